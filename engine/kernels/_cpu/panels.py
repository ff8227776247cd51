"""Products of rows by a matrix in panels (`engine.weights.panels`)."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from engine.kernels._cpu import compiled
from engine.kernels._cpu.compiled import Kernels
from engine.weights.panels import WIDTH, Panels

__all__ = ["multiply"]

Array = np.ndarray[Any, Any]

# Up to this many rows the codes are multiplied, and the scales applied to the sums of the groups.
# For more rows the scaled weights are multiplied by BLAS.
_MAX_ROWS_IN_C = 32
_MAX_ROWS_IN_NUMPY = 16
_MAX_NUMBERS = 1 << 18  # numbers that NumPy widens at a time: they fit in an L2 cache of 1 MiB
_MAX_WIDE = 1 << 22  # numbers that BLAS multiplies at a time
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


def multiply(x: Array, panels: Panels) -> Array:
    """Return x Wᵀ (T, N) in float32, for x (T, K) float32 and a weight W (N, K) in panels."""
    kernels = compiled.kernels()
    if len(x) > (_MAX_ROWS_IN_NUMPY if kernels is None else _MAX_ROWS_IN_C):
        return _multiply_many(kernels, x, panels)
    return _multiply_few(x, panels) if kernels is None else _multiply_in_c(kernels, x, panels)


def _multiply_in_c(kernels: Kernels, x: Array, panels: Panels) -> Array:
    x = np.ascontiguousarray(x)
    y = np.empty((len(x), panels.shape[0]), np.float32)
    num_panels, num_groups, group, _ = panels.codes.shape
    group_sums = _scratch("group sums", len(x), num_groups)
    with kernels.helpers.at_work(num_panels) as num_threads:
        kernels.multiply(
            x.ctypes.data,
            *panels.addresses,
            y.ctypes.data,
            group_sums.ctypes.data,
            *(len(x), panels.shape[0], num_groups, group, num_threads),
        )
    return y


def _multiply_few(x: Array, panels: Panels) -> Array:
    """Multiply by some panels at a time, which are widened to a buffer in the cache."""
    num_rows, num_columns = x.shape
    num_panels, num_groups, group, _ = panels.codes.shape
    groups = x.reshape(num_rows, num_groups, group)
    by_group = np.ascontiguousarray(groups.transpose(1, 0, 2))  # (G, T, g)
    step = max(1, _MAX_NUMBERS // (num_columns * WIDTH))
    y = np.empty((num_panels, num_rows, WIDTH), np.float32)
    for first in range(0, num_panels, step):
        some = slice(first, first + step)
        codes = panels.codes[some]
        numbers = _scratch("numbers", *codes.shape)
        sums = _scratch("sums", len(codes), num_groups, num_rows, WIDTH)
        np.copyto(numbers, codes)
        np.matmul(by_group, numbers, out=sums)
        np.multiply(sums, panels.scales[some, :, None], out=sums)
        np.add.reduce(sums, axis=1, out=y[some])
    if panels.offsets is not None:
        y += np.matmul(np.add.reduce(groups, axis=2), panels.offsets)
    rows = y.transpose(1, 0, 2).reshape(num_rows, num_panels * WIDTH)
    return np.ascontiguousarray(rows[:, : panels.shape[0]])


def _multiply_many(kernels: Kernels | None, x: Array, panels: Panels) -> Array:
    """Widen and scale some panels at a time, and multiply by them: BLAS has its own threads."""
    num_rows, num_columns = x.shape
    y = np.empty((num_rows, panels.shape[0]), np.float32)
    step = max(1, _MAX_WIDE // (num_columns * WIDTH))
    for first in range(0, len(panels.codes), step):
        count = min(step, len(panels.codes) - first)
        wide = _scratch("wide", num_columns, count * WIDTH)
        _widen(kernels, panels, first, wide)
        out = y[:, first * WIDTH : (first + count) * WIDTH]
        np.matmul(x, wide[:, : out.shape[1]], out=out)
    return y


def _widen(kernels: Kernels | None, panels: Panels, first: int, out: Array) -> None:
    """Write the numbers of panels from `first` on to `out` (K, count * 64)."""
    _, num_groups, group, _ = panels.codes.shape
    count = out.shape[1] // WIDTH
    if kernels is not None:
        with kernels.helpers.at_work(count) as num_threads:
            kernels.widen(
                *panels.addresses, out.ctypes.data, num_groups, group, first, count, num_threads
            )
        return
    some = slice(first, first + count)
    numbers = out.reshape(num_groups, group, count, WIDTH).transpose(2, 0, 1, 3)
    np.multiply(panels.codes[some], panels.scales[some, :, None], out=numbers)
    if panels.offsets is not None:
        np.add(numbers, panels.offsets[some, :, None], out=numbers)
