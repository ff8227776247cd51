"""`kernels.check`: a user's kernel against its reference."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from engine import device
from engine.errors import ConfigError, EngineError
from engine.kernels._module import ARCHITECTURES
from engine.kernels._tools.check_cases import (
    SPECIAL,
    Case,
    all_cases,
    case_problem,
    huge_case,
    make_inputs,
)
from engine.kernels._tools.check_compare import compare
from engine.kernels._tools.check_placement import placed_call
from engine.kernels._tools.check_reference import run_reference
from engine.kernels._tools.check_report import CheckReport, Finding
from engine.kernels._tools.check_sizes import check_op, checked_sizes
from engine.kernels._tools.check_static import check_static
from engine.kernels._tools.device_run import Answer
from engine.kernels._tools.sanitizer import TOOLS, sanitize
from engine.kernels._tools.worker import Local, Worker, WorkerFailure
from engine.kernels._user.module import can_run
from engine.kernels._user.op import Op
from engine.kernels._user.problem import CHIPS, Chip

__all__ = ["check"]

_MAX_CRASHES = 3  # calls that may crash before the others are given up
_QUICK = ("one", "odd", "uneven", "asked")  # kinds of cases
_HUGE_SECONDS = 600.0
_HUGE_HINT = (
    "smaller shapes are right: an index of 32 bits overflows at 2**31 elements; "
    "int64_t(blockIdx.x) * blockDim.x does not"
)
_FATAL = ("compile", "parameters", "launch", "definition", "resources")


def check(
    op: Op,
    *,
    sizes: Mapping[str, int] | None = None,
    dtype: str = "",
    special: bool | str | Sequence[str] = False,
    seed: int = 0,
    arch: str = "",
    isolate: bool = True,
    allow_nondeterministic: bool = False,
    sanitizer: str = "",
    huge: bool = False,
    quick: bool = False,
    timeout: float = 20.0,
    max_seconds: float = 60.0,
    show: bool = True,
) -> CheckReport:
    """Check a kernel against its reference, over shapes made from the signature.

    On a GPU every call is made several times, with poisoned results and guard bands around every
    array. Without a GPU the reference runs, the launches are chosen, and the kernel is compiled for
    every architecture.

    Parameters
    ----------
    op : Op
        What `define` returned.
    sizes : mapping, optional
        Only this shape, with every variation of the call. It may name scalar arguments, too.
    dtype : str
        Only this dtype of `scalar_t`.
    special : bool, or one or several of {"nan", "inf", "zero", "denormal", "large"}
        Put such values into float arguments, too.
    seed : int
        Seed of the arguments.
    arch : str
        Architecture to compile for, or "all". By default that of the GPU; all without one.
    isolate : bool
        Run the kernel in a child process: an illegal access, a hang or a crash ends that process
        alone. False: in this one.
    allow_nondeterministic : bool
        Two runs need not be equal bit by bit: for atomics in floating point.
    sanitizer : {"", "memcheck", "racecheck", "synccheck", "initcheck"}
        Run a few shapes under this tool of compute-sanitizer instead.
    huge : bool
        Check a shape of more than 2**31 elements, too: takes gigabytes, and minutes.
    quick : bool
        A few shapes only: one element, less than a warp a row, and several warps a row.
    timeout : float
        Seconds after which a call that has not ended is reported as one that never does.
    max_seconds : float
        Seconds after which the calls that remain, but for the first, are skipped.
    show : bool
        Print the report.

    Returns
    -------
    CheckReport
        `ok` tells whether nothing is wrong; `str` is the text.

    Raises
    ------
    ConfigError
        If an argument is invalid.
    DeviceError
        If a sanitizer is asked for, but not installed.

    Examples
    --------
    >>> from engine import kernels
    >>> double = kernels.define(
    ...     "double",
    ...     "x: (N,) float -> (N,) like x",
    ...     reference=lambda x: 2 * x,
    ...     source=r'''
    ...     extern "C" __global__ void twice(const scalar_t* x, scalar_t* out, int64_t N) {
    ...       const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    ...       if (i < N) out[i] = from_float<scalar_t>(2.0f * to_float(x[i]));
    ...     }''',
    ...     entry="twice",
    ...     launch=lambda call: call.grid1d(call["N"], 256),
    ... )
    >>> kernels.check(double, quick=True, arch="sm_90a", show=False).ok
    True
    """
    begin = time.monotonic()
    check_op(op)
    sizes = checked_sizes(op, sizes) if sizes is not None else None
    _check_arguments(op, dtype, arch, sanitizer)
    _check_numbers(op, seed, timeout=timeout, max_seconds=max_seconds)
    if isinstance(special, str):
        special = (special,)
    chosen = SPECIAL if special is True else tuple(special or ())
    if unknown := set(chosen) - set(SPECIAL):
        raise ConfigError(f"special: must be of {', '.join(SPECIAL)}; got {sorted(unknown)[0]!r}")
    report = CheckReport(op.name, op.signature.text)
    cases = list(all_cases(op, sizes=sizes, dtype=dtype, special=chosen))
    if quick:
        cases = [case for case in cases if case.kind in _QUICK] or cases[:3]
    if not cases:
        report.findings.append(_no_sizes(op))
    elif sanitizer:
        report.findings += sanitize(op, sanitizer, cases, seed, report)
    else:
        checker = _Checker(op, report, seed, begin + max_seconds, not allow_nondeterministic)
        checker.run(cases, arch, isolate=isolate, timeout=timeout)
        if huge and report.device and report.ok:
            checker.run_huge(huge_case(op), isolate=isolate)
        elif huge:
            reason = "smaller ones are wrong" if report.device else "the kernel was not run"
            report.skipped.append(f"a huge shape: {reason}")
    report.seconds = time.monotonic() - begin
    if show:
        print(report, flush=True)
    return report


def _check_arguments(op: Op, dtype: str, arch: str, sanitizer: str) -> None:
    for name, value, known in (
        ("dtype", dtype, op.signature.scalar_dtypes),
        ("arch", arch, ("all", *CHIPS)),
        ("sanitizer", sanitizer, TOOLS),
    ):
        if value and value not in known:
            raise ConfigError(
                f"{op.name}: {name}: must be one of {', '.join(known)}; got {value!r}"
            )


def _check_numbers(op: Op, seed: int, **seconds: float) -> None:
    if not isinstance(seed, int | np.integer) or seed < 0:
        raise ConfigError(f"{op.name}: seed: must be an int of at least 0; got {seed!r}")
    for name, value in seconds.items():
        if not value > 0:  # also NaN
            raise ConfigError(f"{op.name}: {name}: must be above 0; got {value!r}")


def _no_sizes(op: Op) -> Finding:
    where = ", ".join(part.text for part in op.definition.where)
    return Finding(
        "sizes",
        f"no sizes were found that satisfy where={where!r} and the shapes of the signature; "
        'name some: sizes={"N": (64, 1000)}',
    )


class _Checker:
    """Checks one op; fills a report."""

    def __init__(
        self, op: Op, report: CheckReport, seed: int, deadline: float, is_deterministic: bool
    ) -> None:
        self._op = op
        self._report = report
        self._seed = seed
        self._deadline = deadline
        self._is_deterministic = is_deterministic
        self._outcomes: dict[Case, bool] = {}
        self._num_crashes = 0

    def run(self, cases: Sequence[Case], arch: str, *, isolate: bool, timeout: float) -> None:
        """Check everything that this machine can."""
        runner = self._runner(isolate, timeout)
        try:
            self._check_static(cases, arch, runner)
            if runner is not None and any(each.kind in _FATAL for each in self._report.errors):
                self._report.skipped.append("the kernel was not run: mend the errors above first")
                runner.close()
                runner = None
            for done, case in enumerate(cases):
                if done and time.monotonic() > self._deadline:
                    reason = f"{len(cases) - done} of {len(cases)} calls: the time was over"
                    self._report.skipped.append(f"{reason} (max_seconds=)")
                    break
                runner = self._check_case(case, runner)
        finally:
            if runner is not None:
                runner.close()
        self._report.findings += _pattern(self._outcomes)

    def _check_static(
        self, cases: Sequence[Case], arch: str, runner: Worker | Local | None
    ) -> None:
        chip = None if runner is None else runner.start()
        findings, compiled = check_static(self._op, cases, _chips(arch, chip))
        self._report.findings += findings
        self._report.kernels += compiled

    def run_huge(self, case: Case | None, *, isolate: bool) -> None:
        """Check a shape of more than 2**31 elements."""
        if case is None:
            self._report.skipped.append("a huge shape: `where` allows none")
            return
        runner = self._runner(isolate, _HUGE_SECONDS)
        assert runner is not None
        try:
            self._check_case(case, runner)
        finally:
            runner.close()

    def _runner(self, isolate: bool, timeout: float) -> Worker | Local | None:
        """Return what makes calls on the GPU; None without one."""
        chosen, _ = device.resolve_device("auto")
        if not chosen.is_cuda:
            return None
        runner = Worker(self._op, timeout) if isolate else Local(self._op)
        chip = runner.start()
        from_requires = self._op.definition.requires
        if not _runs_on(self._op, chip):
            reason = f"requires={from_requires!r}; this GPU is {chip.arch}"
            self._report.skipped.append(f"the kernel was not run: {reason}")
            runner.close()
            return None
        self._report.device = runner.device
        return runner

    def _check_case(self, case: Case, runner: Worker | Local | None) -> Worker | Local | None:
        """Check one call; return the runner, or None if no more calls are to be made on it."""
        try:
            values = make_inputs(self._op, case, self._seed)
        except EngineError as error:
            self._add(case, "inputs", str(error))
            return runner
        wanted, findings = run_reference(self._op, case, values)
        self._report.num_references += 1
        for finding in findings:
            self._add(case, finding.kind, finding.text, is_error=finding.is_error)
        if wanted is None or runner is None:
            return runner
        return self._check_kernel(case, values, wanted, runner)

    def _check_kernel(
        self, case: Case, values: dict[str, Any], wanted: dict[str, Any], runner: Worker | Local
    ) -> Worker | Local | None:
        before = len(self._report.errors)
        call = placed_call(self._op, case, values, wanted)
        call.is_deterministic = self._is_deterministic
        self._report.num_calls += 1
        try:
            answer = runner.call(call)
        except WorkerFailure as error:
            return self._crashed(case, _failure_text(error), runner, is_timeout=error.is_timeout)
        if answer.error is not None:
            kind, text = answer.error
            if kind == "crash":
                return self._crashed(case, _crash_text(self._op, text), runner)
            self._add(case, "call", text)
            return runner
        self._compare(case, answer, wanted)
        self._outcomes[case] = len(self._report.errors) == before
        return runner

    def _compare(self, case: Case, answer: Answer, wanted: Mapping[str, Any]) -> None:
        for kind, text in answer.findings:
            self._add(case, kind, text)
        unwritten = {
            re.split(r"[\[ ]", text)[0] for kind, text in answer.findings if kind == "unwritten"
        }
        problem = case_problem(self._op, case)
        for name, want in wanted.items():
            if name in unwritten:
                continue
            got = np.asarray(answer.results[name])
            difference = compare(self._op, problem, name, got, want)
            if difference is not None:
                self._add(case, "values", difference.text)

    def _crashed(
        self, case: Case, text: str, runner: Worker | Local, *, is_timeout: bool = False
    ) -> Worker | Local | None:
        self._add(case, "timeout" if is_timeout else "crash", text)
        self._outcomes[case] = False
        self._num_crashes += 1
        if isinstance(runner, Worker) and self._num_crashes < _MAX_CRASHES:
            return runner  # starts a new process
        why = f"{self._num_crashes} calls crashed or did not end"
        if isinstance(runner, Local):
            why = "this process has lost its CUDA context (isolate=True keeps it)"
        self._report.skipped.append(f"the other calls of the kernel: {why}")
        runner.close()
        return None

    def _add(self, case: Case, kind: str, text: str, *, is_error: bool = True) -> None:
        if case.kind == "huge":
            text = f"{text}\n{_HUGE_HINT}"
        sizes = ",".join(f"{name}={size}" for name, size in case.sizes)
        dtype = f"--dtype {case.dtype} " if case.has_dtypes else ""
        repeat = f"--sizes {sizes} {dtype}--seed {self._seed}" if sizes else ""
        self._report.findings.append(Finding(kind, text, str(case), repeat, is_error))


def _chips(arch: str, chip: Chip | None) -> list[Chip]:
    if arch and arch != "all":
        return [CHIPS[arch]]
    if arch == "all" or chip is None:
        return [CHIPS[name] for name in ARCHITECTURES]
    return [chip]


def _runs_on(op: Op, chip: Chip) -> bool:
    return can_run(op.definition.requires, chip.arch)


def _failure_text(error: WorkerFailure) -> str:
    if error.is_timeout:
        return (
            f"the kernel does not end ({error}): an infinite loop, or a barrier that not all "
            "threads of the block reach"
        )
    return f"the process that ran the kernel crashed: {error}"


def _crash_text(op: Op, text: str) -> str:
    lower = text.lower()
    if ("illegal" in lower and "address" in lower) or "illegal memory" in lower:
        return (
            f"illegal memory access in {op.name}: it reads or writes far outside an array; "
            "--sanitizer memcheck names the line"
        )
    if "misaligned" in lower:
        return (
            f"misaligned address in {op.name}: a vector access (float4, load_vec) needs an address "
            "at a multiple of its size. State alignment=16, so that misaligned arrays are copied, "
            "or choose another kernel where not call.is_aligned"
        )
    if "illegal" in lower and "instruction" in lower:
        return (
            f"illegal instruction in {op.name}: an instruction that this GPU lacks, or a TMA copy "
            "whose innermost coordinate is not at a multiple of 16 bytes (common/tma.cuh)"
        )
    if "assert" in lower:
        return f"a device-side assert in {op.name} failed ({text})"
    return f"{op.name} fails: {text}"


def _pattern(outcomes: Mapping[Case, bool]) -> Iterator[Finding]:
    """Yield a hint if exactly the sizes that a power of two divides are right."""
    plain = {
        case: ok
        for case, ok in outcomes.items()
        if not (case.view or case.special or 0 in dict(case.sizes).values())
    }
    for symbol in dict.fromkeys(name for case in plain for name, _ in case.sizes):
        right = {dict(case.sizes)[symbol] for case, ok in plain.items() if ok}
        wrong = {dict(case.sizes)[symbol] for case, ok in plain.items() if not ok}
        for divisor in (1 << power for power in range(1, 13)):
            is_rule = not any(size % divisor for size in right)
            if right and wrong and is_rule and all(size % divisor for size in wrong):
                text = f"it fails only where {symbol} is not a multiple of {divisor}"
                yield Finding("pattern", text, is_error=False)
                return
