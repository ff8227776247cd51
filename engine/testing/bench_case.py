"""`BenchCase`: one case of an op's benchmark; `measure` verifies it, then times it and its rivals.

The benchmarks of the catalog (`python -m tests.bench`) and of a kernel of the user's own
(`engine.kernels.bench`) are measured by this code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from engine.testing.timing import Timing, measure_cpu, measure_gpu, num_copies

__all__ = ["BenchCase", "Measurement", "cases_for_cpu", "measure"]

# A case beyond these sizes takes the NumPy mirrors more than a second.
_CPU_BYTES = 17e6
_CPU_FLOPS = 1e8
_CPU_CASES = 3
_CPU_SECONDS = 0.5  # seconds of timing a case


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
    nbytes : float
        Minimal traffic: inputs read once, outputs written once.
    flops : float
        Minimal number of operations; 0 if they are not counted.
    baselines : dict
        Name -> `baseline(*args)`, the same work done with another library.
    peers : dict
        Name -> `peer()`, another library's time in seconds, measured by itself: for libraries whose
        calls cannot be captured in our graphs.
    copies : int
        Number of copies of the arguments to rotate through; 0: enough that they come from HBM; 2:
        inputs that the preceding kernel leaves in L2.
    check : callable or None
        `check(args, result)` raises AssertionError when the result is wrong.
    arithmetic : str
        Dtype of the products that `flops` counts, which selects the card's peak: float32, tf32,
        bfloat16, fp8 or int8.
    """

    name: str
    make: Callable[[Any, int], tuple[Any, ...]]
    run: Callable[..., Any]
    nbytes: float
    flops: float = 0
    baselines: Mapping[str, Callable[..., Any]] | None = None
    peers: Mapping[str, Callable[[], float]] | None = None
    copies: int = 0
    check: Callable[[tuple[Any, ...], Any], None] | None = None
    arithmetic: str = "bfloat16"


@dataclass(frozen=True)
class Measurement:
    """A case's times.

    Attributes
    ----------
    case : BenchCase
    timing : Timing
    rivals : dict
        Name of a baseline or peer -> its time, or the reason why it has none.
    """

    case: BenchCase
    timing: Timing
    rivals: Mapping[str, Timing | str] = field(default_factory=dict)

    @property
    def gbytes_per_s(self) -> float:
        """GB/s of the minimal traffic."""
        return self.case.nbytes / self.timing.median * 1e-9

    @property
    def tflops(self) -> float:
        """TFLOP/s; 0 if the case does not count operations."""
        return self.case.flops / self.timing.median * 1e-12

    def row(self) -> dict[str, Any]:
        """Return the columns of a table: no rate without its numerator."""
        seconds = self.timing.median
        low, high = self.timing.quartiles
        row: dict[str, Any] = {"case": self.case.name, "us": seconds * 1e6}
        row |= {"us low": low * 1e6, "us high": high * 1e6}
        if self.case.nbytes:
            row["GB/s"] = self.gbytes_per_s
        if self.case.flops:
            row["TFLOP/s"] = self.tflops
        for name, rival in self.rivals.items():
            row |= self._rival_columns(name, rival, seconds)
        return row

    def _rival_columns(self, name: str, rival: Timing | str, seconds: float) -> dict[str, Any]:
        if isinstance(rival, str):
            return {f"no {name}": rival}
        columns: dict[str, Any] = {f"{name} us": rival.median * 1e6}
        if rival.has_launches:
            columns[f"{name} timed"] = "without a graph"
        if self.case.nbytes and name in (self.case.peers or {}):
            columns[f"{name} GB/s"] = self.case.nbytes / rival.median * 1e-9
        return columns | {f"x {name}": rival.median / seconds}


def cases_for_cpu(cases: Sequence[BenchCase]) -> list[BenchCase]:
    """Return the cheapest cases, at most three, that the NumPy mirrors run in about a second.

    A case "from L2" is left out if the same sizes are also measured from HBM.
    """
    cold = {(case.nbytes, case.flops) for case in cases if not case.copies}
    fit = [
        case
        for case in cases
        if case.nbytes <= _CPU_BYTES
        and case.flops <= _CPU_FLOPS
        and not (case.copies and (case.nbytes, case.flops) in cold)
    ]
    return sorted(fit, key=lambda case: case.nbytes + case.flops)[:_CPU_CASES]


def measure(case: BenchCase, xp: Any) -> Measurement:
    """Verify a case, then time it, its baselines and its peers.

    Parameters
    ----------
    case : BenchCase
    xp : module
        `numpy`: on the host; `cupy`: on the current device.

    Raises
    ------
    AssertionError
        If the result is wrong.
    """
    on_gpu = xp is not np
    copies = (case.copies or num_copies(case.nbytes)) if on_gpu else 1
    args = [case.make(xp, 100 * i) for i in range(copies)]
    if case.check is not None:
        case.check(args[0], case.run(*args[0]))

    def timing(run: Callable[..., Any], needs_graph: bool = True) -> Timing:
        if on_gpu:
            calls = [lambda a=a: run(*a) for a in args]
            return measure_gpu(calls, needs_graph=needs_graph)
        return measure_cpu(lambda: run(*args[0]), warmup=1, seconds=_CPU_SECONDS)

    ours = timing(case.run)
    rivals: dict[str, Timing | str] = {}
    for name, baseline in (case.baselines or {}).items():
        rivals[name] = _or_reason(partial(timing, baseline, needs_graph=False))
    if case.peers and on_gpu:
        args.clear()
        xp.get_default_memory_pool().free_all_blocks()  # peers use their own memory pools
        for name, peer in case.peers.items():
            rivals[name] = _or_reason(partial(_seconds_of, peer))
    return Measurement(case, ours, rivals)


def _seconds_of(peer: Callable[[], float]) -> Timing:
    return Timing((peer(),))


def _or_reason(time: Callable[[], Timing]) -> Timing | str:
    """Return a rival's time, or why it has none: its error must not end the benchmark."""
    try:
        return time()
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        return f"{type(error).__name__}: {reason}"
