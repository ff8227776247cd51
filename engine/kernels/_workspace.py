"""Scratch memory for kernels that need some between two launches on one stream."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine import device

__all__ = ["counters", "workspace"]

_buffers: dict[tuple[int, int], list[Any]] = {}
_counters: dict[tuple[int, int], list[Any]] = {}


def workspace(num_floats: int) -> Any:
    """Return at least `num_floats` floats of scratch, owned by the current device and stream.

    What is in it may be overwritten by the next kernel of the same stream that asks for scratch.
    It grows by doubling and is never given back: a captured graph goes on writing where it was when
    it was captured. While a graph is captured it must not grow (that would allocate), so run the
    same calls once before.

    NOTE: graphs captured on one stream share it, so they must not be replayed side by side.
    """
    cupy = device.cupy()
    key = (cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr)
    kept = _buffers.setdefault(key, [])
    if not kept or kept[-1].size < num_floats:
        size = 1 << max(16, (num_floats - 1).bit_length())
        kept.append(cupy.empty(size, np.float32))
    return kept[-1]


def counters(count: int = 64) -> Any:
    """Return at least `count` int32 counters that are 0, otherwise as `workspace`.

    A kernel that counts on them leaves them at 0, so that the next one need not clear them first.
    """
    cupy = device.cupy()
    key = (cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr)
    kept = _counters.setdefault(key, [])
    if not kept or kept[-1].size < count:
        kept.append(cupy.zeros(1 << max(12, (count - 1).bit_length()), np.int32))
    return kept[-1]
