"""Device memory that another process of this host writes, and streams that wait for it.

An `Inbox` is memory on one process's device, with a counter. The `Outbox` of another process copies
arrays to it (CUDA IPC), and then sets the counter. Streams wait for the
counter, not hosts: the receiver can launch what reads an array long before it is there.

The sender must not overwrite what the receiver still reads; the caller keeps them in step. While a
stream waits, the driver loads no kernels: the sender must not depend on what the receiver's host
does next.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from functools import cache
from typing import Any

import numpy as np

from engine import device
from engine.device import Device
from engine.errors import DeviceError

__all__ = ["Inbox", "Outbox"]

_COUNTER_BYTES = 256  # bytes of the counter at the head of the memory, with padding
_LEAST_BYTES = 2 << 20  # smallest allocation; other processes map whole allocations of the driver
_ABORTED = 2**63 - 1  # counter that ends every wait
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_IS_REACHED = 0  # CU_STREAM_WAIT_VALUE_GEQ


class Inbox:
    """Memory on a device, written by the `Outbox` of another process.

    Parameters
    ----------
    place : Device
        A CUDA device.
    num_bytes : int

    Attributes
    ----------
    memory : (num_bytes,) uint8 array on the device, valid until `close`
    handle : bytes
        For the sender.
    close : callable
        Frees the memory; a second call does nothing.

    Raises
    ------
    DeviceError
        If the memory cannot be shared, or the driver has no waits on a stream.
    """

    def __init__(self, place: Device, num_bytes: int) -> None:
        place.activate()
        _stream_calls()
        cupy = device.cupy()
        runtime = cupy.cuda.runtime
        size = max(_COUNTER_BYTES + num_bytes, _LEAST_BYTES)
        try:
            address = int(runtime.malloc(size))  # not from CuPy's pool, see `_LEAST_BYTES`
        except runtime.CUDARuntimeError as error:
            raise DeviceError(f"{size} bytes on {place} cannot be allocated: {error}") from error
        self.close = weakref.finalize(self, _free, place, address)
        self.close.atexit = False  # at exit the driver frees it; the runtime may be gone
        self._place = place
        self._address = address
        owned = cupy.cuda.UnownedMemory(address, size, None, place.index)
        whole = cupy.ndarray((size,), np.uint8, cupy.cuda.MemoryPointer(owned, 0))
        whole[:_COUNTER_BYTES].fill(0)
        self.wait(0)  # raises if the device cannot
        cupy.cuda.get_current_stream().synchronize()
        self.memory = whole[_COUNTER_BYTES : _COUNTER_BYTES + num_bytes]
        # Source of the counter that `abort` writes: it must stay pinned until the copy has ended.
        self._host = cupy.cuda.alloc_pinned_memory(8)
        np.frombuffer(self._host, np.int64, 1)[:] = _ABORTED
        try:
            self.handle = bytes(runtime.ipcGetMemHandle(address))
        except runtime.CUDARuntimeError as error:
            raise DeviceError(f"memory of {place} cannot be shared: {error}") from error

    def wait(self, count: int) -> None:
        """Let later work on the current stream wait until the sender has posted `count`."""
        stream = device.cupy().cuda.get_current_stream().ptr
        wait, _ = _stream_calls()
        _check(wait(stream, self._address, count, _IS_REACHED), "wait for another GPU")

    def abort(self) -> None:
        """End all waits, also later ones, unless the sender posts again; from any thread."""
        if not self.close.alive:
            return
        cupy = device.cupy()
        with cupy.cuda.Device(self._place.index):
            stream = cupy.cuda.Stream(non_blocking=True)
            kind = cupy.cuda.runtime.memcpyHostToDevice
            cupy.cuda.runtime.memcpyAsync(self._address, self._host.ptr, 8, kind, stream.ptr)
            stream.synchronize()


class Outbox:
    """The inbox of another process, mapped into this one.

    Parameters
    ----------
    place : Device
        This process's device.
    handle : bytes
        `Inbox.handle`.

    Attributes
    ----------
    close : callable
        Unmaps the memory; a second call does nothing.

    Raises
    ------
    DeviceError
        If this device cannot map the memory.
    """

    def __init__(self, place: Device, handle: bytes) -> None:
        place.activate()
        _stream_calls()
        runtime = device.cupy().cuda.runtime
        try:
            self._address = int(runtime.ipcOpenMemHandle(handle, _LAZY_PEER_ACCESS))
        except runtime.CUDARuntimeError as error:
            message = f"{place} cannot map the memory of another device: {error}"
            raise DeviceError(message) from error
        self.close = weakref.finalize(self, _unmap, place, self._address)
        self.close.atexit = False
        self.post(0)  # raises if the device cannot

    def write(self, offset: int, array: Any) -> None:
        """Copy a contiguous array to bytes from `offset` on, on the current stream."""
        cuda = device.cupy().cuda
        target = self._address + _COUNTER_BYTES + offset
        kind = cuda.runtime.memcpyDeviceToDevice
        stream = cuda.get_current_stream().ptr
        cuda.runtime.memcpyAsync(target, array.data.ptr, array.nbytes, kind, stream)

    def post(self, count: int) -> None:
        """Set the counter, once earlier work on the current stream has ended; it must grow."""
        stream = device.cupy().cuda.get_current_stream().ptr
        _, write = _stream_calls()
        _check(write(stream, self._address, count, 0), "post to another GPU")


# Finalizers run anywhere: they must leave the thread's current device as it is.


def _free(place: Device, address: int) -> None:
    cuda = device.cupy().cuda
    with cuda.Device(place.index):
        cuda.runtime.free(address)


def _unmap(place: Device, address: int) -> None:
    cuda = device.cupy().cuda
    with cuda.Device(place.index):
        cuda.runtime.ipcCloseMemHandle(address)


@cache
def _stream_calls() -> tuple[Any, Any]:
    """Return the driver's (wait, write) of 64-bit values; CuPy does not have them."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        calls = driver.cuStreamWaitValue64_v2, driver.cuStreamWriteValue64_v2
    except (OSError, AttributeError) as error:
        raise DeviceError(f"the driver has no waits on a stream: {error}") from error
    for call in calls:
        call.argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint
    return calls


def _check(status: int, what: str) -> None:
    if status:
        raise DeviceError(f"the stream cannot {what}: the driver returned {status}")
