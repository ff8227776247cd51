"""Host memory is page-locked while a view of it lives; if CUDA refuses, it is ordinary memory."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
from types import SimpleNamespace

import numpy as np
import pytest

from engine.cache import pinned_memory
from engine.cache.pinned_memory import check_host_memory, pinned_array
from engine.errors import OutOfMemoryError


class Refused(RuntimeError):
    """Stands for `CUDARuntimeError`."""


def make_cupy(*, refuses=False):
    """Return a stand-in for CuPy, and the ranges that it has locked, by address."""
    locked = {}
    seen = []

    def register(address, num_bytes, flags):
        if refuses:
            raise Refused("cudaErrorMemoryAllocation: out of memory")
        assert address % mmap.PAGESIZE == num_bytes % mmap.PAGESIZE == 0 and flags == 1
        locked[address] = num_bytes

    def unregister(address):
        # The pages are still mapped: the first byte can be read.
        seen.append(ctypes.string_at(address, 1))
        del locked[address]

    runtime = SimpleNamespace(
        hostRegister=register, hostUnregister=unregister, CUDARuntimeError=Refused
    )
    return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)), locked, seen


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 4097, (40 << 20) + 3])
def test_pages_are_locked_until_the_last_view_is_gone(num_bytes):
    cupy, locked, seen = make_cupy()
    array = pinned_array(num_bytes, cupy)
    assert (array.shape, array.dtype) == ((num_bytes,), np.uint8)
    assert array.flags.c_contiguous and array.flags.writeable
    [(address, size)] = locked.items()
    assert num_bytes <= size < num_bytes + 2 * mmap.PAGESIZE
    if num_bytes:
        assert address == array.ctypes.data
    array[:] = 7
    view = array[num_bytes // 2 :].view(np.int8)
    del array
    gc.collect()
    assert locked and (view == 7).all()
    del view
    gc.collect()
    assert not locked and seen == [b"\x07" if num_bytes else b"\x00"]


def test_memory_that_cannot_be_locked_is_ordinary_memory(caplog):
    cupy, locked, seen = make_cupy(refuses=True)
    with caplog.at_level(logging.WARNING, "engine"):
        array = pinned_array(3 << 20, cupy)
    array[:] = 5
    assert array.sum(dtype=np.int64) == 5 * (3 << 20)
    del array
    gc.collect()
    assert not locked and not seen
    [record] = caplog.records
    assert "3.00 MiB of host memory could not be page-locked" in record.getMessage()
    assert "out of memory" in record.getMessage()


def test_an_unlock_that_fails_is_no_error(capsys):
    cupy, *_ = make_cupy()

    def fail(address):
        raise Refused("the device is lost")

    cupy.cuda.runtime.hostUnregister = fail
    array = pinned_array(10, cupy)
    del array
    gc.collect()
    assert not capsys.readouterr().err


def test_memory_that_the_host_does_not_have(monkeypatch):
    cupy, *_ = make_cupy()
    with pytest.raises(OutOfMemoryError, match=r"PiB|TiB.* of host memory could not be allocated"):
        pinned_array(1 << 60, cupy)
    monkeypatch.setattr(pinned_memory, "device_memory", lambda device: (8 << 30, 3 << 30))
    check_host_memory(3 << 30, "copies", "buy more")
    with pytest.raises(
        OutOfMemoryError,
        match=r"^copies need 3.00 GiB, but only 3.00 GiB of the host's 8.00 GiB are free; buy more",
    ):
        check_host_memory((3 << 30) + 1, "copies", "buy more")


@pytest.mark.gpu
def test_copies_from_locked_memory_are_exact():
    cp = pytest.importorskip("cupy")
    host = pinned_array(100_003, cp)
    attributes = cp.cuda.runtime.pointerGetAttributes(host.ctypes.data)
    assert attributes.type == 1  # cudaMemoryTypeHost: page-locked
    host[:] = np.arange(len(host), dtype=np.uint32).astype(np.uint8)
    array = cp.empty(len(host), np.uint8)
    array.set(host)
    assert np.array_equal(array.get(), host)
