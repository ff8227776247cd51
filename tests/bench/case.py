"""What a benchmark of one op declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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
        calls cannot be captured in our graphs.
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
    check: Callable[[tuple[Any, ...], Any], None] | None = None
