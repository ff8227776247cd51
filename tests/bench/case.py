"""`BenchCase`: one case of an op's benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

L2_BYTES = 60 << 20


def num_copies(nbytes: int) -> int:
    """Return how many copies of `nbytes` to rotate through so that none is found in L2."""
    return max(2, min(16, -(-3 * L2_BYTES // max(nbytes, 1))))


@dataclass(frozen=True)
class BenchCase:
    """One measured shape.

    Attributes
    ----------
    name : str
        Label in the table.
    make : callable
        `make(xp, seed)` returns fresh random arguments for `run`.
    run : callable
        The op; `check` verifies its result before anything is timed.
    nbytes : int
        Minimal traffic: inputs read once, outputs written once.
    flops : int
        Minimal number of operations.
    baselines : dict
        Name -> `baseline(*args)`, the same work done with another library.
    peers : dict
        Name -> `peer()`, another library's time in seconds, measured by itself: for libraries whose
        calls cannot be captured in our graphs. If it raises, the reason replaces its columns.
    copies : int
        Number of copies of the arguments to rotate through; 0: enough that they come from HBM; 2:
        inputs that the preceding kernel leaves in L2.
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
