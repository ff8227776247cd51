"""Products of rows by a matrix in panels (`engine.weights.panels`)."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np

from engine.kernels._cpu import compiled
from engine.kernels._cpu.compiled import Kernels
from engine.weights.panels import WIDTH, Panels

__all__ = ["multiply", "panel_min_bits"]

Array = np.ndarray[Any, Any]

# NumPy multiplies the codes of up to this many rows, and applies the scales to the sums of the
# groups. For more rows it multiplies the scaled weights.
_MAX_FEW_ROWS = 16
_MAX_NUMBERS = 1 << 18  # numbers widened at a time: they fit in an L2 cache of 1 MiB
_MAX_SCALED = 1 << 22  # scaled weights at a time
# Multiply-adds of a product from which on the C kernels share it with helpers: about 0.1 ms. In
# between, the helpers would spin, and take time from others on busy cores.
_MIN_SHARED = 1 << 21
_MAX_BUFFERS = 32  # buffers that a thread keeps


class _Scratch(threading.local):
    """Float32 buffers of a thread, by purpose and shape."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...]], Array] = {}

    def __call__(self, purpose: str, *shape: int) -> Array:
        """Return an uninitialised buffer; the next call with the same arguments returns it too."""
        key = (purpose, shape)
        buffer = self._buffers.get(key)
        if buffer is None:
            if len(self._buffers) >= _MAX_BUFFERS:
                self._buffers.clear()
            buffer = self._buffers[key] = np.empty(shape, np.float32)
        return buffer


_scratch = _Scratch()


def panel_min_bits() -> int:
    """Return the fewest bits of a code in panels: NumPy is slow in splitting bytes."""
    return 8 if compiled.kernels() is None else 4


def multiply(x: Array, panels: Panels) -> Array:
    """Return x Wᵀ (T, N) in float32, for x (T, K) float32 and a weight W (N, K) in panels."""
    kernels = compiled.kernels()
    if kernels is not None:
        return _multiply_in_c(kernels, x, panels)
    return _multiply_few(x, panels) if len(x) <= _MAX_FEW_ROWS else _multiply_many(x, panels)


def _multiply_in_c(kernels: Kernels, x: Array, panels: Panels) -> Array:
    x = np.ascontiguousarray(x)
    y = np.empty((len(x), panels.shape[0]), np.float32)
    num_panels, num_groups, _ = panels.scales.shape
    group_sums = _scratch("group sums", len(x), num_groups)
    arguments = (
        x.ctypes.data,
        *panels.addresses,
        y.ctypes.data,
        group_sums.ctypes.data,
        *(len(x), panels.shape[0], num_groups, panels.group, panels.bits),
    )
    if len(x) * math.prod(panels.shape) < _MIN_SHARED:
        kernels.multiply(*arguments, 1)
        return y
    with kernels.helpers.at_work(num_panels) as num_threads:
        kernels.multiply(*arguments, num_threads)
    return y


def _multiply_few(x: Array, panels: Panels) -> Array:
    """Multiply by some panels at a time, which are widened to a buffer in the cache."""
    num_rows, num_columns = x.shape
    num_panels, num_groups, _ = panels.scales.shape
    groups = x.reshape(num_rows, num_groups, panels.group)
    by_group = np.ascontiguousarray(groups.transpose(1, 0, 2))  # (G, T, g)
    step = max(1, _MAX_NUMBERS // (num_columns * WIDTH))
    y = np.empty((num_panels, num_rows, WIDTH), np.float32)
    for first in range(0, num_panels, step):
        some = slice(first, first + step)
        scales = panels.scales[some, :, None]
        numbers = _scratch("numbers", len(scales), num_groups, panels.group, WIDTH)
        sums = _scratch("sums", len(scales), num_groups, num_rows, WIDTH)
        np.matmul(by_group, panels.widen(some, numbers), out=sums)
        np.multiply(sums, scales, out=sums)
        np.add.reduce(sums, axis=1, out=y[some])
    if panels.offsets is not None:
        y += np.matmul(np.add.reduce(groups, axis=2), panels.offsets)
    rows = y.transpose(1, 0, 2).reshape(num_rows, num_panels * WIDTH)
    return np.ascontiguousarray(rows[:, : panels.shape[0]])


def _multiply_many(x: Array, panels: Panels) -> Array:
    """Widen and scale some panels at a time, and multiply by them."""
    num_rows, num_columns = x.shape
    num_panels, num_groups, _ = panels.scales.shape
    step = max(1, _MAX_SCALED // (num_columns * WIDTH))
    y = np.empty((num_rows, panels.shape[0]), np.float32)
    for first in range(0, num_panels, step):
        some = slice(first, first + step)
        scales = panels.scales[some, :, None]
        out = y[:, first * WIDTH : (first + step) * WIDTH]
        matrix = _scratch("matrix", num_columns, len(scales) * WIDTH)
        numbers = matrix.reshape(num_groups, panels.group, -1, WIDTH).transpose(2, 0, 1, 3)
        np.multiply(panels.widen(some, numbers), scales, out=numbers)
        if panels.offsets is not None:
            np.add(numbers, panels.offsets[some, :, None], out=numbers)
        np.matmul(x, matrix[:, : out.shape[1]], out=out)
    return y
