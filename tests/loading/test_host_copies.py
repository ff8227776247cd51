"""Copies of a device's arrays on the host: exact, in memory that serves again until it is freed."""

from __future__ import annotations

import ctypes
import gc
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from engine.cache import pinned_memory
from engine.device import CPU, Device
from engine.errors import OutOfMemoryError
from engine.loading import host_copies
from engine.loading.host_copies import HostCopies

TO_DEVICE, TO_HOST = 1, 2


class DeviceArray:
    """Memory of a stand-in for a device: an array that only `memcpyAsync` reads and writes."""

    def __init__(self, content):
        self.content = content
        self.shape, self.dtype, self.nbytes = content.shape, content.dtype, content.nbytes
        self.data = SimpleNamespace(ptr=content.ctypes.data)


class FakeCuda:
    """A stand-in for CuPy whose device is this process's memory."""

    def __init__(self):
        self.locked = {}
        self.num_locks = 0
        self.synchronized = 0
        self.full = False
        self._local = threading.local()
        self.runtime = SimpleNamespace(
            CUDARuntimeError=RuntimeError,
            hostRegister=self._register,
            hostUnregister=lambda address: self.locked.pop(address),
            memcpyAsync=self._copy,
            memcpyDeviceToHost=TO_HOST,
            memcpyHostToDevice=TO_DEVICE,
            deviceSynchronize=self._synchronize,
        )
        self.cuda = SimpleNamespace(
            runtime=self.runtime,
            Stream=self._stream,
            get_current_stream=lambda: getattr(self._local, "stream", self.main),
            memory=SimpleNamespace(OutOfMemoryError=MemoryError),
        )
        self.main = SimpleNamespace(ptr=0, synchronize=self._synchronize)

    def ascontiguousarray(self, array):
        content = array.content
        return array if content.flags.c_contiguous else DeviceArray(content.copy())

    def empty(self, shape, dtype):
        if self.full:
            raise MemoryError("no room")
        return DeviceArray(np.empty(shape, dtype))

    def device(self):
        return SimpleNamespace(is_cuda=True, xp=self, activate=lambda: None)

    def _register(self, address, num_bytes, flags):
        self.num_locks += 1
        self.locked[address] = num_bytes

    def _synchronize(self):
        self.synchronized += 1

    def _copy(self, target, source, num_bytes, kind, stream):
        assert kind == (TO_HOST if stream else TO_DEVICE), "only copies to the host have a stream"
        ctypes.memmove(target, source, num_bytes)

    @contextmanager
    def _stream(self, *, non_blocking):
        assert non_blocking
        self._local.stream = SimpleNamespace(ptr=1, synchronize=lambda: None)
        yield self._local.stream
        del self._local.stream


def contents():
    """Arrays of several dtypes and sizes: none, one element, odd, a view, and large ones."""
    rng = np.random.default_rng(0)
    return [
        rng.standard_normal((300, 70), np.float32),
        np.array(3.5, np.float32),
        np.empty((0, 4), np.float16),
        rng.standard_normal((33, 3)).astype(ml_dtypes.bfloat16),
        rng.integers(0, 255, (64, 129)).astype(np.uint8)[:, ::2],
        rng.standard_normal(5000, np.float64),
    ]


def check(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("group_bytes", [1, 20_000, 1 << 28])
def test_copies_are_exact_and_restored(group_bytes, monkeypatch):
    monkeypatch.setattr(host_copies, "_GROUP_BYTES", group_bytes)
    cuda, wanted = FakeCuda(), contents()
    host = HostCopies(cuda.device())
    copies = host.take([DeviceArray(content) for content in wanted])
    assert cuda.synchronized == 1, "the arrays are written before they are read"
    check(copies, wanted)
    assert all(copy.flags.c_contiguous for copy in copies)
    assert cuda.num_locks == {1: len(wanted) - 1, 20_000: 2, 1 << 28: 1}[group_bytes]
    check([array.content for array in host.restore(copies)], wanted)


def test_the_memory_serves_again_for_arrays_of_the_same_sizes(monkeypatch):
    monkeypatch.setattr(host_copies, "_GROUP_BYTES", 20_000)
    cuda, wanted = FakeCuda(), contents()
    host = HostCopies(cuda.device())
    assert host.num_bytes == 0
    addresses = [copy.ctypes.data for copy in host.take(list(map(DeviceArray, wanted)))]
    num_bytes = host.num_bytes
    assert num_bytes >= sum(content.nbytes for content in wanted) and cuda.num_locks == 2
    changed = [np.array(content * 2, content.dtype) for content in wanted]
    copies = host.take(list(map(DeviceArray, changed)))
    assert [copy.ctypes.data for copy in copies] == addresses and cuda.num_locks == 2
    check(copies, changed)
    del copies
    check(host.take([DeviceArray(wanted[0])]), wanted[:1])
    gc.collect()
    assert cuda.num_locks == 3 and len(cuda.locked) == 1 and host.num_bytes < num_bytes
    host.free()
    gc.collect()
    assert not cuda.locked and host.num_bytes == 0


def test_a_host_without_room_keeps_nothing(monkeypatch):
    cuda, wanted = FakeCuda(), contents()
    host = HostCopies(cuda.device())
    with monkeypatch.context() as patch:
        patch.setattr(pinned_memory, "device_memory", lambda device: (1 << 20, 1000))
        with pytest.raises(OutOfMemoryError, match=r"copies of the weights need .* level 2"):
            host.take(list(map(DeviceArray, wanted)))
    with monkeypatch.context() as patch:
        # The second of two groups fails in its thread.
        patch.setattr(host_copies, "_GROUP_BYTES", 20_000)
        rooms = iter([host_copies.pinned_array])

        def failing(num_bytes, xp):
            if (make := next(rooms, None)) is None:
                raise OutOfMemoryError("no room")
            return make(num_bytes, xp)

        patch.setattr(host_copies, "pinned_array", failing)
        with pytest.raises(OutOfMemoryError, match="no room"):
            host.take(list(map(DeviceArray, wanted)))
    gc.collect()
    assert host.num_bytes == 0 and not cuda.locked
    check(host.take(list(map(DeviceArray, wanted))), wanted)


def test_a_full_device_is_an_error_of_the_engine():
    cuda = FakeCuda()
    host = HostCopies(cuda.device())
    copies = host.take(list(map(DeviceArray, contents())))
    cuda.full = True
    with pytest.raises(OutOfMemoryError, match=r"the weights do not fit on .*: no room"):
        host.restore(copies)


def test_on_the_cpu_arrays_are_copied():
    host, wanted = HostCopies(CPU), contents()
    copies = host.take(wanted)
    check(copies, wanted)
    restored = host.restore(copies)
    check(restored, wanted)
    for one, two, three in zip(wanted, copies, restored, strict=True):
        assert not np.shares_memory(one, two) and not np.shares_memory(two, three)
    assert host.num_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("group_bytes", [1, 20_000, 1 << 28])
def test_copies_of_arrays_on_a_gpu(group_bytes, monkeypatch):
    monkeypatch.setattr(host_copies, "_GROUP_BYTES", group_bytes)
    cp, wanted = pytest.importorskip("cupy"), contents()
    device = Device("cuda")
    host = HostCopies(device)
    for _ in range(2):
        arrays = [cp.asarray(content) for content in wanted]
        arrays[0] = cp.asarray(wanted[0].T.copy()).T  # in Fortran's order
        copies = host.take(arrays)
        check(copies, wanted)
        del arrays
        check([array.get() for array in host.restore(copies)], wanted)
    host.free()
