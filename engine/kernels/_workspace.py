"""Scratch memory that passes data between two launches on one stream."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from engine import device

__all__ = ["counters", "lending", "weight_space", "workspace"]

Lender = Callable[[str, int], Any]
"""Returns the CuPy array for a kind of scratch and a number of elements. See `lending`."""

_local = threading.local()
_buffers: dict[tuple[int, int], list[Any]] = {}
_counters: dict[tuple[int, int], list[Any]] = {}
_weights: dict[tuple[int, int], list[Any]] = {}


def workspace(num_floats: int) -> Any:
    """Return at least `num_floats` floats of scratch, owned by the current device and stream.

    The next kernel on the same stream that uses scratch may overwrite it. The buffer grows by
    doubling and is never freed, because a captured graph keeps using the addresses of its capture.
    It must not grow during a capture (that would allocate): make the same calls once before.

    NOTE: graphs captured on one stream share the buffer and must not be replayed concurrently.
    """
    return _grown("workspace", _buffers, num_floats)


def weight_space(num_floats: int) -> Any:
    """Return scratch for weights dequantized for the next GEMM. See `workspace`.

    It is separate from `workspace`, which that GEMM may use.
    """
    return _grown("weight_space", _weights, num_floats)


def _grown(kind: str, buffers: dict[tuple[int, int], list[Any]], num_floats: int) -> Any:
    lend: Lender | None = getattr(_local, "lend", None)
    if lend is not None:
        return lend(kind, num_floats)
    cupy = device.cupy()
    key = (cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr)
    kept = buffers.setdefault(key, [])
    if not kept or kept[-1].size < num_floats:
        size = 1 << max(16, (num_floats - 1).bit_length())
        kept.append(cupy.empty(size, np.float32))
    return kept[-1]


def counters(count: int = 64) -> Any:
    """Return at least `count` int32 counters, all 0. See `workspace` for their lifetime.

    A kernel that uses them resets them to 0 for the next one.
    """
    lend: Lender | None = getattr(_local, "lend", None)
    if lend is not None:
        return lend("counters", count)
    cupy = device.cupy()
    key = (cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr)
    kept = _counters.setdefault(key, [])
    if not kept or kept[-1].size < count:
        kept.append(cupy.zeros(1 << max(12, (count - 1).bit_length()), np.int32))
    return kept[-1]


@contextlib.contextmanager
def lending(lend: Lender) -> Iterator[None]:
    """Take this thread's scratch from `lend` in the `with` block.

    Parameters
    ----------
    lend : callable
        Called with "workspace", "weight_space" (both float32) or "counters" (int32, all 0), and a
        number of elements.
    """
    previous: Lender | None = getattr(_local, "lend", None)
    _local.lend = lend
    try:
        yield
    finally:
        _local.lend = previous
