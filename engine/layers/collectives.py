"""What layers ask of the ranks that share a model: `Collectives`."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Collectives"]


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

    def close(self) -> None:
        """Free what the operations need; nothing may be called afterwards."""
