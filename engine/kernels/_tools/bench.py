"""`kernels.bench`: time an op beside its NumPy formula and other libraries, against the roofs."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from engine.checks import shown_with_type
from engine.device import Device, is_cupy_array, resolve_device, to_numpy
from engine.errors import CompileError, ConfigError, ContractError, DeviceError
from engine.kernels._tools.bench_report import BenchReport, BenchRow
from engine.kernels._tools.bench_sizes import bench_dtypes, bench_shapes, case_of, cpu_case
from engine.kernels._tools.check_cases import Case, case_problem, make_inputs
from engine.kernels._tools.check_compare import compare
from engine.kernels._tools.profile import profile_compiled
from engine.kernels._tools.profile_report import ProfileReport
from engine.kernels._tools.roofline import Peaks, copy_rate, peaks_of_device
from engine.kernels._user.op import Op
from engine.kernels._user.signature import DTYPES, ArrayArg
from engine.testing.bench_case import BenchCase, measure
from engine.testing.timing import num_copies

__all__ = ["bench", "bench_cases", "device_name"]

_REFERENCE_SECONDS = 20  # limit for NumPy to verify one shape
_HALVES = ("float16", "bfloat16")


def bench(
    op: Op,
    sizes: Mapping[str, int] | Sequence[Mapping[str, int]] | None = None,
    dtypes: Sequence[str] | str = (),
    *,
    against: Mapping[str, Callable[..., Any]] | None = None,
    warm: bool = False,
    device: str | Device = "auto",
) -> BenchReport:
    """Verify an op, then time it.

    Parameters
    ----------
    op : Op
        Made by `kernels.define`. Its `nbytes` and `flops` are what the rates count.
    sizes : mapping or sequence of mappings, optional
        A size for every symbol; by default the definition's `bench`.
    dtypes : str or sequence of str
        Dtypes of `scalar_t`; by default float32 and one of 16 bits, if the op supports them.
    against : mapping, optional
        Name -> function with the op's arguments, timed beside it. The reference on CuPy arrays is
        always tried, as "cupy", with its casts to and from float32.
    warm : bool
        Leave the inputs in L2, as after a kernel that wrote them.
    device : str or Device
        "auto", "cuda", "cuda:1" or "cpu".

    Returns
    -------
    BenchReport
        On a CPU: times of the reference, on shapes shrunk so that it runs in 0.2 s, and what the
        compiler says about the kernel.

    Raises
    ------
    ConfigError
        If a size or dtype is not one of the op's, or an argument is of another kind.
    CompileError
        If the CUDA source does not compile.

    Examples
    --------
    >>> from engine import kernels  # doctest: +SKIP
    >>> report = kernels.bench(scale_rows, {"T": 8192, "N": 4096})  # doctest: +SKIP
    >>> report.plot("roofline.png")  # doctest: +SKIP
    """
    chosen = resolve_device(device)[0]
    chosen.activate()
    if not isinstance(against, Mapping | None):
        raise ConfigError(
            f"against: must be a mapping of names to functions; got {shown_with_type(against)}"
        )
    shapes = bench_shapes(op, sizes)
    names = bench_dtypes(op, (dtypes,) if isinstance(dtypes, str) and dtypes else tuple(dtypes))
    if not chosen.is_cuda:
        names = names if dtypes else names[:1]
        rows = [_cpu_row(op, shape.sizes, n, against or {}) for shape in shapes for n in names]
        compiled = _compiled(op, case_of(op, shapes[0].sizes, names[-1]))
        return BenchReport(op.name, device_name(chosen), tuple(rows), compiled=compiled)
    peaks = peaks_of_device(chosen.index)
    rows = []
    for shape in shapes:
        for name in names:
            case = case_of(op, shape.sizes, name)
            bench_op = _OpCase(op, case, chosen.xp, against or {}, peaks, warm)
            rows.append(bench_op.row((shape.note,) if shape.note else ()))
    return BenchReport(op.name, device_name(chosen), tuple(rows), peaks, copy_rate())


def device_name(device: Device) -> str:
    """Return the name of the GPU, or the CPU's architecture and number of cores."""
    if not device.is_cuda:
        return f"{platform.machine()}, {os.cpu_count()} cores"
    properties = device.xp.cuda.runtime.getDeviceProperties(device.index)
    return str(properties["name"].decode())


def bench_cases(op: str, cases: Sequence[BenchCase], device: Device) -> BenchReport:
    """Measure the cases of an op of the catalog."""
    peaks = peaks_of_device(device.index) if device.is_cuda else None
    rows = []
    for case in cases:
        try:
            found = measure(case, device.xp)
        except AssertionError as error:
            rows.append(BenchRow(case.name, None, wrong=str(error)))
            continue
        roof = peaks.roof(case.nbytes, case.flops, case.arithmetic) if peaks else None
        rows.append(BenchRow(case.name, found, roof, ("inputs in L2",) if case.copies else ()))
    rate = copy_rate() if device.is_cuda else 0.0
    return BenchReport(op, device_name(device), tuple(rows), peaks, rate)


def _cpu_row(
    op: Op, sizes: Mapping[str, int], dtype: str, against: Mapping[str, Callable[..., Any]]
) -> BenchRow:
    case, _ = cpu_case(op, sizes, dtype)
    inputs = make_inputs(op, case, 0)
    notes: tuple[str, ...] = ()
    if dict(case.sizes) != {name: sizes[name] for name in op.signature.symbols}:
        full = ", ".join(f"{name}={size}" for name, size in sizes.items())
        notes = (f"shrunk from {full}: the reference takes at most 0.2 s",)
    measured = measure(
        BenchCase(
            str(case),
            lambda xp, seed: tuple(np.copy(x) if _is_array(x) else x for x in inputs.values()),
            op,
            op.nbytes(case_problem(op, case)),
            baselines=against,
        ),
        np,
    )
    return BenchRow(str(case), measured, None, notes)


def _compiled(op: Op, case: Case) -> ProfileReport:
    """Return what the compiler says; without NVRTC, why it says nothing."""
    try:
        return profile_compiled(op, case)
    except CompileError as error:
        return ProfileReport(op.name, str(case), (), note=str(error))


class _OpCase:
    """One call of an op: its inputs, its expected results, and its rivals."""

    def __init__(
        self,
        op: Op,
        case: Case,
        xp: Any,
        against: Mapping[str, Callable[..., Any]],
        peaks: Peaks,
        warm: bool,
    ) -> None:
        self._op = op
        self._case = case
        self._xp = xp
        self._peaks = peaks
        self._inputs = make_inputs(op, case, 0)
        self._rivals = {"cupy": self._on_cupy, **against}
        example = self._make(xp, 0)
        self._problem = op.problem(*example)
        self._nbytes = op.nbytes(self._problem)
        self._flops = op.flops(self._problem)
        self._copies = 1 if warm else num_copies(self._nbytes, peaks.l2_bytes)
        self._notes: list[str] = ["inputs in L2"] if warm else []
        if not warm and self._copies * self._nbytes < 2 * peaks.l2_bytes:
            self._notes.append("small: its inputs may be found in L2")

    def row(self, notes: tuple[str, ...]) -> BenchRow:
        """Verify and measure."""
        case = BenchCase(
            str(self._case),
            self._make,
            self._op,
            self._nbytes,
            self._flops,
            self._rivals,
            copies=self._copies,
            check=self._check,
        )
        try:
            measured = measure(case, self._xp)
        except AssertionError as error:
            return BenchRow(str(self._case), None, wrong=str(error))
        except Exception as error:
            if not type(error).__module__.startswith("cupy"):
                raise
            raise DeviceError(
                f"{self._op.name}: {self._case}: the GPU reports: {error}; "
                "engine kernels check --sanitizer looks for the access"
            ) from error
        roof = self._peaks.roof(self._nbytes, self._flops, self._arithmetic())
        return BenchRow(str(self._case), measured, roof, (*notes, *self._notes))

    def _arithmetic(self) -> str:
        """Return the dtype of the products, which selects the roof."""
        if self._case.dtype == "float32" and "tf32" in self._op.source.current().text:
            return "tf32"
        return self._case.dtype

    def _make(self, xp: Any, seed: int) -> tuple[Any, ...]:
        return tuple(xp.asarray(x) if _is_array(x) else x for x in self._inputs.values())

    def _check(self, args: tuple[Any, ...], result: Any) -> None:
        """Compare the kernel's result with the reference's, in NumPy or, if that is slow, CuPy."""
        names = [array.name for array in self._written()]
        got = dict(zip(names, self._results(args, result), strict=True))
        want = self._expected()
        for name in names:
            found = compare(
                self._op, self._problem, name, to_numpy(got[name]), to_numpy(want[name])
            )
            if found is not None:
                raise AssertionError(found.text)
        for name, rival in self._rivals.items():
            self._compare_rival(name, rival, want)

    def _written(self) -> list[ArrayArg]:
        signature = self._op.signature
        return [*signature.outputs, *(a for a in signature.arrays if a.is_inout)]

    def _results(self, args: tuple[Any, ...], result: Any) -> list[Any]:
        """Return the arrays of `_written`: results, then arguments that were written in place."""
        outputs = self._op.signature.outputs
        returned = result if isinstance(result, tuple) else (result,)
        by_name = dict(zip(self._inputs, args, strict=True))
        inout = [by_name[a.name] for a in self._op.signature.arrays if a.is_inout]
        return [*(returned if outputs else ()), *inout]

    def _expected(self) -> dict[str, Any]:
        run: Callable[..., Any] = self._op
        args = tuple(np.copy(x) if _is_array(x) else x for x in self._inputs.values())
        if self._numpy_seconds() > _REFERENCE_SECONDS:
            self._notes.append("verified with the reference on CuPy arrays: NumPy takes too long")
            run = self._on_cupy
            args = self._make(self._xp, 0)
        results = self._results(args, run(*args))
        return dict(zip([a.name for a in self._written()], results, strict=True))

    def _numpy_seconds(self) -> float:
        """Return about how long the reference takes in NumPy, from a smaller shape."""
        if self._nbytes < 1 << 20 and self._flops < 1e9:
            return 0.0
        less, seconds = cpu_case(self._op, dict(self._problem.values), self._case.dtype)
        problem = case_problem(self._op, less)
        work = self._flops / self._op.flops(problem) if self._flops else 0.0
        return seconds * max(work, self._nbytes / max(1.0, self._op.nbytes(problem)))

    def _compare_rival(self, name: str, rival: Callable[..., Any], want: dict[str, Any]) -> None:
        """Note if a rival computes something else."""
        args = self._make(self._xp, 0)
        try:
            got = self._results(args, rival(*args))
            for array, value in zip(self._written(), got, strict=True):
                expected = to_numpy(want[array.name])
                values = to_numpy(value).astype(expected.dtype)
                if compare(self._op, self._problem, array.name, values, expected) is not None:
                    self._notes.append(f"{name}: its result differs from the reference's")
        except Exception:
            return  # its column will say why it has no time

    def _on_cupy(self, *args: Any) -> Any:
        """Run the reference on CuPy arrays, 16-bit floats as float32, as the op does with NumPy."""
        given = [self._widened(*pair) for pair in zip(self._inputs, args, strict=True)]
        returned = self._op.reference(*given)
        for array in self._op.signature.arrays:
            index = list(self._inputs).index(array.name)
            if array.is_inout and given[index] is not args[index]:
                args[index][...] = given[index]
        outputs = self._op.signature.outputs
        if not outputs:
            return None
        values = returned if len(outputs) > 1 else (returned,)
        if not all(is_cupy_array(value) for value in values):
            raise ContractError("the reference does not run on CuPy: it returned a NumPy array")
        results = [
            v.astype(self._dtype(a), copy=False) for a, v in zip(outputs, values, strict=True)
        ]
        return results[0] if len(results) == 1 else tuple(results)

    def _widened(self, name: str, value: Any) -> Any:
        is_half = is_cupy_array(value) and self._problem.dtype_of(name) in _HALVES
        return value.astype(np.float32) if is_half else value

    def _dtype(self, output: ArrayArg) -> np.dtype[Any]:
        """Return the declared dtype of a result."""
        if output.like:
            return DTYPES[self._problem.dtype_of(output.like)]
        return DTYPES[self._problem.dtype if output.is_scalar_t else output.dtypes[0]]


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)
