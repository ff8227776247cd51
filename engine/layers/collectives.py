"""What layers ask of the ranks that share a model: `Collectives`."""

from __future__ import annotations

import math
from typing import Any, Protocol

from engine.kernels._peer_memory import NUM_BUFFERS

__all__ = ["MAX_BUFFERED_BYTES", "Collectives", "buffer_bytes", "buffer_capacity"]

MAX_BUFFERED_BYTES = 16 << 20
"""Bytes of an array that two GPUs move in one launch; larger ones take several."""


def buffer_capacity(size: int, max_bytes: int = MAX_BUFFERED_BYTES) -> int:
    """Return the bytes of each of the buffers that a GPU of `size` has for collectives.

    Two shots of `max_bytes` fit: sums of a segment arrive, and segments, from each peer.
    """
    return max_bytes if size <= 2 else math.ceil(2 * (size - 1) / size * max_bytes)


def buffer_bytes(size: int) -> int:
    """Return the bytes of all buffers of a GPU of `size` that share a model.

    Examples
    --------
    >>> [buffer_bytes(size) >> 20 for size in (1, 2, 4, 8)]
    [0, 48, 72, 84]
    """
    return NUM_BUFFERS * buffer_capacity(size) if size > 1 else 0


class Collectives(Protocol):
    """Operations that all ranks of a group call in the same order, with arrays of one shape.

    Arrays are NumPy's or CuPy's; an operation on the device is launched on the current stream.

    Raises
    ------
    RankError
        If a rank has ended, failed or does not come, or calls something else.
    """

    @property
    def rank(self) -> int:
        """This process's number."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, x: Any, *, out: Any = None) -> Any:
        """Return the sum of all ranks' `x`: in the order of ranks, in float32, rounded once.

        `out` may be `x`; by default it is a new array.
        """

    def all_reduce_rmsnorm(
        self, x: Any, residual: Any, weight: Any, eps: float, *, out: Any = None
    ) -> tuple[Any, Any]:
        """Return (rmsnorm(h) * weight, h) of h = residual + the sum of all ranks' `x` (T, N).

        `residual` is overwritten with h.
        """

    def all_gather(self, x: Any, *, axis: int = -1, out: Any = None) -> Any:
        """Return all ranks' `x`, one behind the other along `axis`."""

    def broadcast(self, x: Any, *, root: int = 0) -> Any:
        """Overwrite `x` with that of rank `root`, and return it."""

    def barrier(self, name: str) -> None:
        """Wait until all ranks are here."""

    def check(self, doing: str = "") -> None:
        """Raise a RankError if an operation on the device waited for a rank that did not come.

        Call it when results are read: those of the failed operation are NaN.
        """

    def abort(self) -> None:
        """End the operations on the device that wait for a rank; all later results are NaN."""

    def close(self) -> None:
        """Free what the operations need; nothing may be called afterwards."""
