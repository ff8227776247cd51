"""What a benchmark of one op declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

L2_BYTES = 60 << 20


def num_copies(nbytes: int) -> int:
    """Return over how many copies of `nbytes` to rotate so that none is found in the L2 cache."""
    return max(2, min(16, -(-3 * L2_BYTES // max(nbytes, 1))))


@dataclass(frozen=True)
class BenchCase:
    """One measured shape.

    Attributes
    ----------
    name : str
        Shown in the table.
    make : callable
        `make(xp, seed)` returns fresh random arguments of `run`.
    run : callable
        The op; its result is checked against `check` before anything is timed.
    nbytes : int
        Fewest bytes that must move: inputs once, outputs once.
    flops : int
        Operations that must be done.
    baselines : dict
        Name -> `baseline(*args)` doing the same work with another library.
    peers : dict
        Name -> `peer()`, the seconds that another library takes by its own clock: for those whose
        calls cannot be captured in our graphs. One that raises has no columns but its reason.
    copies : int
        Over how many copies of the arguments to rotate; 0: over so many that they come from HBM.
        Two for what the kernel in front leaves in the L2 cache.
    check : callable or None
        `check(args, result)` raises AssertionError when the result is wrong.
    """

    name: str
    make: Callable[[Any, int], tuple[Any, ...]]
    run: Callable[..., Any]
    nbytes: int
    flops: int = 0
    baselines: dict[str, Callable[..., Any]] | None = None
    peers: dict[str, Callable[[], float]] | None = None
    copies: int = 0
    check: Callable[[tuple[Any, ...], Any], None] | None = None
