"""Products of rows by a matrix in panels (`engine.weights.panels`)."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np

from engine.kernels._cpu import team
from engine.weights.panels import Panel, Panels

__all__ = ["multiply"]

Array = np.ndarray[Any, Any]

# Up to this many rows the codes are multiplied, and the scales applied to the sums of the groups.
# For more rows scaling the weights is less work.
_MAX_FEW_ROWS = 16
_MAX_WIDE = 1 << 22  # numbers of the panels that are widened at a time
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
    y = np.empty((len(x), panels.shape[0]), np.float32)
    if len(x) > _MAX_FEW_ROWS:
        _multiply_many(x, panels, y)
    elif len(x):
        _multiply_few(x, panels, y)
    return y


def _multiply_few(x: Array, panels: Panels, y: Array) -> None:
    groups = x.reshape(len(x), -1, panels.group)
    by_group = groups.transpose(1, 0, 2)  # (G, T, g)
    for panel in panels.views:
        _sum_groups(by_group, panel, y[:, panel.features])
    if panels.offsets is not None:
        y += np.dot(np.add.reduce(groups, axis=2), panels.offsets)


def _sum_groups(x: Array, panel: Panel, y: Array) -> None:
    """Write the product of x (G, T, g) and a panel's codes, scaled, to y (T, n)."""
    codes = panel.codes
    num_groups, num_rows, _ = x.shape
    numbers = _scratch("numbers", *codes.shape)
    sums = _scratch("sums", num_groups, num_rows, codes.shape[2])
    np.copyto(numbers, codes)
    np.matmul(x, numbers, out=sums)
    np.multiply(sums, panel.scales, out=sums)
    np.add.reduce(sums, axis=0, out=y)


def _multiply_many(x: Array, panels: Panels, y: Array) -> None:
    """Widen some panels at a time, and multiply by each: BLAS has its own threads."""
    size = panels.views[0].codes.size
    step = max(1, _MAX_WIDE // size)
    for first in range(0, len(panels.views), step):
        block = panels.views[first : first + step]
        room = _scratch("wide", min(step, len(panels.views)), size)
        pairs = [
            (panel, row[: panel.codes.size].reshape(panel.codes.shape))
            for panel, row in zip(block, room, strict=False)
        ]
        team.run([partial(panels.widen, *pair) for pair in pairs])
        for panel, numbers in pairs:
            np.matmul(x, numbers.reshape(x.shape[1], -1), out=y[:, panel.features])
