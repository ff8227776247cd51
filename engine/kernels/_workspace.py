"""Scratch memory that passes data between two launches on one stream."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine import device

__all__ = ["counters", "weight_space", "workspace"]

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
    return _grown(_buffers, num_floats)


def weight_space(num_floats: int) -> Any:
    """Return scratch for weights dequantized for the next GEMM. See `workspace`.

    It is separate from `workspace`, which that GEMM may use.
    """
    return _grown(_weights, num_floats)


def _grown(buffers: dict[tuple[int, int], list[Any]], num_floats: int) -> Any:
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
    cupy = device.cupy()
    key = (cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr)
    kept = _counters.setdefault(key, [])
    if not kept or kept[-1].size < count:
        kept.append(cupy.zeros(1 << max(12, (count - 1).bit_length()), np.int32))
    return kept[-1]
