"""`Collectives`: the operations between ranks that layers call, and the size of their buffers."""

from __future__ import annotations

import math
from typing import Any, Protocol

from engine.kernels._peer_memory import NUM_BUFFERS, PeerMemory

__all__ = ["MAX_BUFFERED_BYTES", "Collectives", "buffer_bytes", "buffer_capacity"]

MAX_BUFFERED_BYTES = 64 << 20
"""Largest array that two GPUs move in one launch, in bytes; larger arrays take several launches."""


def buffer_capacity(size: int, max_bytes: int = MAX_BUFFERED_BYTES) -> int:
    """Return the bytes of one collective buffer on each of `size` GPUs.

    With more than two GPUs all-reduce is two-shot. From each peer, a buffer receives the summands
    of this GPU's segment, then the peer's reduced segment.
    """
    return max_bytes if size <= 2 else math.ceil(2 * (size - 1) / size * max_bytes)


def buffer_bytes(size: int) -> int:
    """Return the bytes of all collective buffers on each of `size` GPUs.

    Examples
    --------
    >>> [buffer_bytes(size) >> 20 for size in (1, 2, 4, 8)]
    [0, 192, 288, 336]
    """
    return NUM_BUFFERS * buffer_capacity(size) if size > 1 else 0


class Collectives(Protocol):
    """Operations that all ranks of a group call in the same order, with arrays of equal shape.

    Arrays are NumPy or CuPy arrays; operations on a device are launched on the current stream.

    Raises
    ------
    RankError
        If a rank has ended or failed, does not arrive in time, or calls a different operation.
    """

    @property
    def rank(self) -> int:
        """Number of this rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def peers(self) -> PeerMemory | None:
        """Argument `peers` of products whose result is summed next; None if they send nothing."""

    def all_reduce(self, x: Any, *, out: Any = None) -> Any:
        """Return the sum of all ranks' `x`, added in float32 in rank order, rounded once.

        `out` may be `x`; by default it is a new array.
        """

    def all_reduce_rmsnorm(
        self, x: Any, residual: Any, weight: Any, eps: float, *, out: Any = None
    ) -> tuple[Any, Any]:
        """Return (rmsnorm(h) * weight, h) for h = residual + the sum of all ranks' `x` (T, N).

        `residual` is overwritten with h.
        """

    def all_gather(self, x: Any, *, axis: int = -1, out: Any = None) -> Any:
        """Return all ranks' `x`, concatenated along `axis`."""

    def broadcast(self, x: Any, *, root: int = 0) -> Any:
        """Overwrite `x` with rank `root`'s, and return it."""

    def barrier(self, name: str) -> None:
        """Wait until all ranks have called it."""

    def check(self, doing: str = "") -> None:
        """Raise RankError if an operation on the device timed out waiting for a rank.

        Call it when results are read: a failed operation's results are NaN.
        """

    def abort(self) -> None:
        """Abort operations on the device that wait for a rank; all later results are NaN."""

    def close(self) -> None:
        """Free the buffers; no operation may be called afterwards."""
