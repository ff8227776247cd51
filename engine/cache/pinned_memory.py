"""Page-locked host memory, which a CUDA device reads and writes at the full rate of the link."""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np

from engine.cache.memory_pool import device_memory, format_bytes
from engine.device import CPU
from engine.errors import OutOfMemoryError

__all__ = ["check_host_memory", "pinned_array", "room", "views"]

Array = np.ndarray[Any, Any]

_log = logging.getLogger("engine")

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device
_HUGE_PAGE_BYTES = 2 << 20
_ALIGNMENT = 256  # bytes, of arrays that share a piece of memory


def pinned_array(num_bytes: int, xp: Any) -> Array:
    """Return host memory that is page-locked until its last view is gone.

    Pages are mapped before CUDA locks them: huge ones where the kernel has them, and without the
    GIL, so that several threads may do so at once.
    CuPy's pinned pool is avoided: it may round up, and never returns memory to the system.

    Parameters
    ----------
    num_bytes : int
        Size n, at least 0.
    xp : module
        `cupy`, with its current device.

    Returns
    -------
    (n,) array of uint8
        Uninitialised, at the start of a page. If CUDA cannot lock the pages, a warning is logged
        and they are ordinary ones: copies are slower, and as correct.

    Raises
    ------
    OutOfMemoryError
        If the host has no room.
    """
    size = max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE  # CUDA locks whole pages
    try:
        memory = np.empty(size + _HUGE_PAGE_BYTES, np.uint8)  # NumPy asks for huge pages
    except MemoryError as error:
        raise OutOfMemoryError(
            f"{format_bytes(num_bytes)} of host memory could not be allocated ({error})"
        ) from error
    start = -memory.ctypes.data % _HUGE_PAGE_BYTES
    pages = memory[start : start + size]
    pages[:: mmap.PAGESIZE].fill(0)
    runtime = xp.cuda.runtime
    try:
        runtime.hostRegister(pages.ctypes.data, size, _PORTABLE)
    except runtime.CUDARuntimeError as error:
        _log.warning(
            "%s of host memory could not be page-locked (%s); copies to and from the device will "
            "be slower",
            format_bytes(num_bytes),
            error,
        )
    else:
        # SAFETY: views keep `memory` alive, and NumPy calls finalizers before it frees the pages.
        weakref.finalize(memory, _unlock, runtime, pages.ctypes.data).atexit = False
    return pages[:num_bytes]


def room(arrays: Iterable[Any]) -> int:
    """Return the bytes of memory that holds copies of these arrays.

    Examples
    --------
    >>> room([np.zeros(100, np.float32), np.zeros(3, np.uint8)])
    768
    """
    return sum(map(_aligned, arrays))


def views(memory: Array, arrays: Iterable[Any]) -> list[Array]:
    """Cut `memory`, of `room(arrays)` bytes, into uninitialised arrays of these shapes and dtypes.

    Examples
    --------
    >>> memory = np.zeros(512, np.uint8)
    >>> [view.shape for view in views(memory, [np.zeros((2, 3)), np.zeros(5)])]
    [(2, 3), (5,)]
    """
    found = []
    start = 0
    for array in arrays:
        part = memory[start : start + array.nbytes]
        found.append(part.view(array.dtype).reshape(array.shape))
        start += _aligned(array)
    return found


def check_host_memory(num_bytes: int, purpose: str, advice: str) -> None:
    """Raise `OutOfMemoryError` unless this process may still take `num_bytes` of host memory."""
    total, free = device_memory(CPU)
    if num_bytes > free:
        raise OutOfMemoryError(
            f"{purpose} need {format_bytes(num_bytes)}, but only {format_bytes(free)} of the "
            f"host's {format_bytes(total)} are free; {advice}"
        )


def _aligned(array: Any) -> int:
    return -(-int(array.nbytes) // _ALIGNMENT) * _ALIGNMENT


def _unlock(runtime: Any, address: int) -> None:
    # After an error of the device every call fails; the process's end unlocks the pages.
    with contextlib.suppress(runtime.CUDARuntimeError):
        runtime.hostUnregister(address)
