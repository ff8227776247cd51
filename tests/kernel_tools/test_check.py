"""`kernels.check` without a GPU: cases, sizes, the reference's check, the report, the command."""

from __future__ import annotations

import io
import subprocess
import sys
import threading

import numpy as np
import pytest

from engine import device, errors, kernels
from engine.dtypes import np_dtype
from engine.kernels._module import ARCHITECTURES
from engine.kernels._tools import check as check_module
from engine.kernels._tools.check_cases import all_cases, case_problem, huge_case, make_inputs
from engine.kernels._tools.check_compare import compare
from engine.kernels._tools.check_placement import placed_call
from engine.kernels._tools.check_reference import run_reference
from engine.kernels._tools.check_sizes import check_sizes
from engine.kernels._tools.child import (
    Link,
    launch_message,
    problem_message,
    read_launch,
    read_problem,
)
from engine.kernels._tools.device_run import Answer
from engine.kernels._tools.sanitizer import read_findings
from engine.kernels._tools.worker import WorkerFailure
from engine.kernels._user.files import load_ops
from engine.testing.tolerances import assert_close, tolerance

SOURCE = r"""
extern "C" __global__ void scale(const scalar_t* x, const float* s, scalar_t* out, int64_t T,
                                 int64_t N) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < T * N) out[i] = from_float<scalar_t>(to_float(x[i]) * s[i / N]);
}"""


def _op(signature="x: (T, N) float, s: (T,) float32 -> (T, N) like x", **options):
    options = {
        "reference": lambda x, s: x * s[:, None],
        "source": SOURCE,
        "launch": lambda call: call.grid1d(call["T"] * call["N"], 256),
    } | options
    return kernels.define("scale", signature, **options)


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(device, "resolve_device", lambda _: (device.CPU, "none"))


# Sizes.


def test_the_shapes_have_one_row_odd_sizes_every_empty_axis_and_a_large_one():
    found = dict(check_sizes(_op()))
    assert found["one"] == {"T": 1, "N": 1}
    assert found["empty T"]["T"] == 0 and found["empty T"]["N"] > 1
    assert found["empty N"]["N"] == 0 and found["empty N"]["T"] > 1
    assert all(found["uneven"][name] % 2 for name in "TN")
    assert found["uneven"]["T"] != found["uneven"]["N"]
    assert found["even"]["T"] % 256 == 0
    assert 2**20 < found["large"]["T"] * found["large"]["N"] <= 2**22


@pytest.mark.parametrize(
    ("where", "holds"),
    [
        ("N % 96 == 0", lambda T, N: N % 96 == 0),
        ("T == 2*N", lambda T, N: T == 2 * N),
        ("N <= 64, T % N == 0", lambda T, N: N <= 64 and T % N == 0),
        ("N > 1000", lambda T, N: N > 1000),
    ],
)
def test_sizes_satisfy_the_conditions(where, holds):
    found = list(check_sizes(_op(where=where)))
    assert len(found) >= 5
    for kind, sizes in found:
        is_undecided = 0 in sizes.values()  # 0 % 0: the search leaves these out
        assert is_undecided or holds(**sizes), (kind, sizes)


def test_conditions_on_scalars_hold_in_every_case():
    op = _op(
        "x: (T, N) float, s: (T,) float32, k: int32, eps: float32 = 0.5 -> (T, N) like x",
        reference=lambda x, s, k, eps: x,
        where="eps < 0.8, N > 4*k",
    )
    cases = list(all_cases(op))
    assert all(dict(case.sizes)["N"] > 4 for case in cases)
    assert {dict(case.scalars)["eps"] for case in cases} == {0.5}  # 1.0 is not allowed


def test_given_sizes_are_all_tried():
    found = [sizes for _, sizes in check_sizes(_op(sizes={"N": (64, 80)}))]
    assert {sizes["N"] for sizes in found} == {64, 80}


def test_sizes_inside_expressions_are_integers():
    op = _op("x: (N/8,) int32, s: (2M,) float32 -> (N,) float32")
    for _, sizes in check_sizes(op):
        assert sizes["N"] % 8 == 0


def test_a_huge_case_has_more_than_two_to_the_31_elements():
    case = huge_case(_op(where="N % 64 == 0"))
    sizes = dict(case.sizes)
    assert 2**31 < sizes["T"] * sizes["N"] < 2**31 + 2**20
    assert case.dtype == "float16"
    assert huge_case(_op(where="T <= 64, N <= 64")) is None


# Cases and arguments.

WIDE = (
    "x: (T, N) float, ids: (T,) int32|int64, bias: (N,) like x = None, eps: float32 = 0.5, "
    "flag: bool = False -> (T, N) like x"
)


def test_cases_vary_dtypes_optional_arguments_scalars_and_views():
    op = _op(WIDE, reference=lambda x, *_: x, in_place="x")
    cases = [case for case in all_cases(op, special=["nan"]) if case.kind == "odd"]
    texts = [str(case) for case in cases]
    for words in (
        *("float16", "bfloat16", "ids int64", "without bias", "eps=1.0", "flag=True"),
        *("padded arguments", "transposed arguments", "misaligned arguments", "in place"),
        "with nan",
    ):
        assert any(words in text for text in texts), (words, texts)
    assert len(set(texts)) == len(texts)


def test_cases_omit_what_a_call_may_omit():
    def reference(x, y, total):
        if total is not None:
            total += 1

    op = _op(
        "x: (N,) float = None, y: (N,) like x = None, total: (N,) int32 inout = None ->",
        reference=reference,
    )
    cases = all_cases(op)
    assert {case.omitted for case in cases} == {(), ("x", "y"), ("y",), ("total",)}
    for case in cases:
        wanted, findings = run_reference(op, case, make_inputs(op, case, 0))
        assert not findings and set(wanted) == {"total"} - set(case.omitted)


def test_arguments_are_equal_for_equal_seeds():
    op = _op(WIDE, reference=lambda x, *_: x)
    case = next(case for case in all_cases(op) if case.kind == "uneven")
    first, again, other = (make_inputs(op, case, seed) for seed in (3, 3, 4))
    assert np.array_equal(first["x"], again["x"])
    assert not np.array_equal(first["x"], other["x"])
    assert first["ids"].max() < min(dict(case.sizes).values())  # valid for every axis


def test_arguments_have_the_order_of_the_signature():
    op = _op("x: (N) float, k: float32 = 2.0 -> (N) like x")
    [case, *_] = all_cases(op)
    assert list(make_inputs(op, case, 0)) == ["x", "k"]


def test_inputs_of_the_definition_are_used():
    inputs = {"ids": lambda rng, call: np.full(call["T"], call["N"] - 1)}
    op = _op(WIDE, reference=lambda x, *_: x, inputs=inputs)
    case = next(case for case in all_cases(op) if case.kind == "odd")
    values = make_inputs(op, case, 0)
    assert values["ids"].tolist() == [4, 4, 4]
    assert values["ids"].dtype == np.int32
    op = _op(WIDE, reference=lambda x, *_: x, inputs={"ids": lambda rng, call: np.zeros(2)})
    with pytest.raises(errors.ConfigError, match=r"'ids' must return shape \(T,\) = \(3,\); got"):
        make_inputs(op, case, 0)


@pytest.mark.parametrize(
    ("special", "holds"),
    [
        ("nan", np.isnan),
        ("inf", np.isinf),
        ("zero", lambda x: x == 0),
        ("denormal", lambda x: (x != 0) & (abs(x) < np.finfo(np.float32).tiny)),
        ("large", lambda x: abs(x) > 1e38),
    ],
)
def test_special_values_are_among_the_arguments(special, holds):
    cases = list(all_cases(_op(), dtype="float32", special=[special]))
    case = next(case for case in cases if case.special and case.kind == "uneven")
    share = holds(make_inputs(_op(), case, 0)["x"]).mean()
    assert 0.05 < share < 0.3


# Placement.


@pytest.mark.parametrize(
    ("view", "strides", "offset"),
    [("padded", (32, 4), 0), ("transposed", (4, 12), 0), ("misaligned", (20, 4), 4)],
)
def test_arguments_are_placed_as_a_view(view, strides, offset):
    op = _op()
    case = next(c for c in all_cases(op, dtype="float32") if c.kind == "odd" and c.view == view)
    values = make_inputs(op, case, 0)
    call = placed_call(op, case, values, {"out": values["x"]})
    x, _, out = call.arrays
    assert (x.strides, x.offset) == (strides, offset)
    assert out.strides == (20, 4)  # a result is contiguous, unless it is `strided`
    assert out.offset == offset


def test_a_result_takes_the_place_of_an_argument():
    op = _op(in_place="x")
    case = next(c for c in all_cases(op, dtype="float32") if c.view == "in place")
    values = make_inputs(op, case, 0)
    assert placed_call(op, case, values, {"out": values["x"]}).arrays[-1].alias == "x"


# Comparison.


def _compared(got, want, **options):
    op = _op(**options)
    case = next(case for case in all_cases(op) if case.kind == "odd")
    return compare(op, case_problem(op, case), "out", np.array(got), np.array(want))


def test_a_difference_names_the_element_and_both_values():
    want = np.ones((3, 5), np.float32)
    got = want.copy()
    got[1, 2:4] = 1.5
    text = _compared(got, want).text
    assert "out[1, 2]: the kernel has 1.5, the reference 1 (error 0.5, allowed 3e-06)" in text
    assert "2 of 15 elements differ, in out[1, 2:4]" in text


def test_an_error_of_a_longer_sum_suggests_the_reduction():
    want = np.linspace(1, 2, 64, dtype=np.float32)
    text = _compared(want * np.float32(1 + 8e-6), want).text
    assert "state reduction='N'" in text
    assert _compared(want * np.float32(1 + 8e-6), want, reduction=1000) is None
    assert _compared(want * np.float32(1 + 8e-6), want, tolerance=(1e-5, 0)) is None


def test_a_constant_factor_is_named():
    want = np.linspace(1, 2, 64, dtype=np.float32)
    assert "the result is 3 times the reference everywhere" in _compared(3 * want, want).text


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_must_agree(value):
    want = np.array([1, value], np.float32)
    assert _compared(want, want) is None
    assert _compared(np.array([1, 2], np.float32), want) is not None
    assert _compared(want, np.array([1, 2], np.float32)) is not None


def test_a_test_compares_results_in_float64():
    """`define` has float64, too; its table has no class for chains, whose operands are rounded."""
    ones = np.ones(3)
    assert_close(ones * (1 + 1e-13), ones)
    with pytest.raises(AssertionError, match="largest error 1e-06"):
        assert_close(ones * (1 + 1e-6), ones, reduction=1000)
    with pytest.raises(errors.DTypeError, match=r"must be one of float32, .*float64; got int8"):
        tolerance("int8")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("others", [[], [1.0]])
def test_a_nan_is_the_largest_error(others):
    got, want = (np.array([value, *others], np.float32) for value in (np.nan, 1))
    with pytest.raises(AssertionError, match=r"largest error nan .* first at \(0,\)"):
        assert_close(got, want)


def test_integers_must_be_equal():
    want = np.arange(4, dtype=np.int32)
    got = want.copy()
    got[3] += 1
    assert "out[3]: the kernel has 4, the reference 3" in _compared(got, want).text


# The report.


def test_a_good_op_is_ok(without_gpu):
    report = kernels.check(_op(), show=False)
    assert report.ok
    assert report.num_references > 30
    assert {kernel.arch for kernel in report.kernels} == set(ARCHITECTURES)
    assert "no GPU: the kernel was compiled, not run" in str(report)


_BLOCK_SUM = r"""
#include "common/reduce.cuh"
extern "C" __global__ void row_sum(const scalar_t* x, float* out, int N) {
  __shared__ float smem[1];
  SUM
  if (threadIdx.x == 0) out[blockIdx.x] = sum;
}"""


@pytest.mark.parametrize(
    ("sum_of", "warns"),
    [
        ("float sum = block_sum<1>(to_float(x[blockIdx.x * N]), smem);", False),
        ("smem[0] = to_float(x[blockIdx.x * N]); float sum = smem[0];", True),
    ],
)
def test_shared_memory_without_a_barrier_is_a_warning(without_gpu, sum_of, warns):
    op = kernels.define(
        "row_sum",
        "x: (T, N) float -> (T) float32",
        reference=lambda x: x.sum(1),
        source=_BLOCK_SUM.replace("SUM", sum_of),
        launch=lambda call: call.grid(call["T"], 32),
    )
    report = kernels.check(op, quick=True, arch="sm_90a", show=False)
    assert ("never __syncthreads()" in str(report)) is warns


def test_requires_limits_the_architectures(without_gpu):
    report = kernels.check(_op(requires="sm_90a"), show=False, quick=True)
    assert {kernel.arch for kernel in report.kernels} == {"sm_90a"}


def test_the_report_is_printed_unless_show_is_false(without_gpu, capsys):
    kernels.check(_op(), quick=True, arch="sm_90a")
    assert capsys.readouterr().out.startswith("scale(x: (T, N) float")
    kernels.check(_op(), quick=True, arch="sm_90a", show=False)
    assert capsys.readouterr().out == ""


def test_numpys_integers_are_sizes(without_gpu):
    sizes = dict(zip("TN", np.array([3, 5]), strict=True))
    report = kernels.check(_op(), sizes=sizes, arch="sm_90a", show=False)
    assert report.ok and report.num_references > 0, str(report)


def test_a_call_is_checked_however_little_time_there_is(without_gpu):
    wrong = _op(reference=lambda x, s: x[:, :0])
    report = kernels.check(wrong, arch="sm_90a", quick=True, max_seconds=1e-9, show=False)
    assert report.num_references == 1 and not report.ok, str(report)
    assert "the time was over" in str(report)


def test_one_shape_can_be_repeated(without_gpu):
    report = kernels.check(_op(), sizes={"T": 3, "N": 5}, dtype="float16", show=False)
    assert report.ok
    assert {kernel.dtype for kernel in report.kernels} == {"float16"}


def test_a_reference_that_is_not_finite_is_a_warning(without_gpu):
    op = _op(reference=lambda x, s: x / np.float32(0))
    report = kernels.check(op, arch="sm_90a", quick=True, show=False)
    assert report.ok
    assert "the reference is not finite for finite arguments, at out" in str(report)


def test_a_reference_that_no_empty_axis_suits_gets_a_hint(without_gpu):
    op = _op(reference=lambda x, s: x - x.max(axis=-1, keepdims=True))
    report = kernels.check(op, arch="sm_90a", show=False)
    assert "if N is never 0, state where='N >= 1'" in str(report)
    op = _op(reference=lambda x, s: x - x.max(axis=-1, keepdims=True), where="N >= 1")
    assert kernels.check(op, arch="sm_90a", show=False).ok


def test_a_huge_shape_that_is_not_run_is_said(without_gpu):
    report = kernels.check(_op(), arch="sm_90a", quick=True, huge=True, show=False)
    assert "not checked: a huge shape: the kernel was not run" in str(report)


def test_a_launch_that_is_not_pure_is_told(without_gpu):
    counter = iter(range(1, 10_000))
    op = _op(launch=lambda call: call.grid(next(counter), 256))
    report = kernels.check(op, arch="sm_90a", quick=True, show=False)
    assert "it must be pure" in str(report)


def test_compiler_warnings_and_spills_are_warnings(without_gpu):
    report = kernels.check(
        _op(source=SOURCE.replace("if (i", "int unused = 3;\n  if (i")),
        arch="sm_90a",
        quick=True,
        show=False,
    )
    assert report.ok
    assert 'scale.cu:5: warning: variable "unused" was declared but never referenced' in str(report)


def test_too_many_registers_for_the_block_are_told(without_gpu):
    text = """
extern "C" __global__ void scale(const scalar_t* x, const float* s, scalar_t* out) {
  float v[100];
#pragma unroll
  for (int k = 0; k < 100; ++k) v[k] = s[k];
  float sum = to_float(x[0]);
#pragma unroll
  for (int k = 0; k < 100; ++k) sum += v[k];
#pragma unroll
  for (int k = 0; k < 100; ++k) out[threadIdx.x * 100 + k] = from_float<scalar_t>(sum / v[k]);
}"""
    op = _op(source=text, launch=lambda call: call.grid(1, 1024))
    report = kernels.check(op, arch="sm_90a", quick=True, show=False)
    assert not report.ok
    assert "scale: 1024 threads of 128 registers need 131072; a block has 65536" in str(report)
    assert "__launch_bounds__(1024)" in str(report)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sizes": {"T": 1}}, "sizes: must have T, N; got {'T': 1}"),
        ({"sizes": {"T": 1, "N": 2, "M": 3}}, "sizes: must have T, N; got {'T': 1,"),
        ({"sizes": {"T": -1, "N": 2}}, "sizes: T: must be an integer of at least 0; got -1"),
        ({"sizes": {"T": 1, "N": True}}, "sizes: N: must be an integer of at least 0; got True"),
        ({"sizes": {"T": "1", "N": 2}}, "sizes: T: must be an integer of at least 0; got '1'"),
        ({"sizes": [1, 2]}, "sizes: must be a mapping; got [1, 2]"),
        ({"dtype": "int8"}, "dtype: must be one of float32, float16, bfloat16; got 'int8'"),
        ({"arch": "sm_70"}, "arch: must be one of all, sm_80"),
        ({"sanitizer": "valgrind"}, "sanitizer: must be one of memcheck"),
        ({"special": ["zeros"]}, "special: must be of nan, inf, zero"),
        ({"special": "nans"}, "got 'nans'"),
        ({"seed": -1}, "seed: must be an int of at least 0; got -1"),
        ({"seed": 0.5}, "seed: must be an int of at least 0; got 0.5"),
        ({"timeout": 0}, "timeout: must be above 0; got 0"),
        ({"max_seconds": float("nan")}, "max_seconds: must be above 0; got nan"),
    ],
)
def test_wrong_arguments_are_told(options, words):
    with pytest.raises(errors.ConfigError) as caught:
        kernels.check(_op(), **options)
    assert words in str(caught.value)


def test_a_sanitizer_that_is_missing_is_told(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(errors.DeviceError) as caught:
        kernels.check(_op(), sanitizer="memcheck")
    assert "conda install -c nvidia" in str(caught.value)


# The kernel's calls, answered by a stand-in for the process that owns the GPU.


class _Runner:
    device = "a stand-in"

    def __init__(self, answer):
        self._answer = answer
        self.num_calls = 0

    def start(self):
        return _op().example_problem({"T": 1, "N": 1}).chip

    def call(self, call):
        self.num_calls += 1
        return self._answer(call)

    def close(self):
        pass


def _checked(monkeypatch, answer):
    runner = _Runner(answer)
    monkeypatch.setattr(check_module._Checker, "_runner", lambda *_, **__: runner)
    return kernels.check(_op(), show=False)


def _right(call):
    x, s = call.data["x"], call.data["s"]
    return Answer({"out": (x.astype(np.float32) * s[:, None]).astype(x.dtype)})


def test_right_results_are_ok(monkeypatch):
    report = _checked(monkeypatch, _right)
    assert report.ok and report.num_calls > 50


def test_a_wrong_result_is_told_beside_an_unwritten_one_of_a_longer_name(monkeypatch):
    op = kernels.define(
        "f",
        "x: (N,) float32 -> y: (N,) like x, y2: (N,) like x",
        reference=lambda x: (x, x),
        source="""extern "C" __global__ void f(const float* x, float* y, float* y2) {}""",
        launch=lambda call: call.grid(1, 1),
    )

    def answer(call):
        x = call.data["x"]
        findings = [("unwritten", "y2[:] was never written")]
        return Answer({"y": x + 1, "y2": x}, findings=findings)

    monkeypatch.setattr(check_module._Checker, "_runner", lambda *_, **__: _Runner(answer))
    text = str(kernels.check(op, sizes={"N": 3}, show=False))
    assert "y2[:] was never written" in text and "y[0]: the kernel has" in text


def test_a_wrong_result_is_told_with_shape_dtype_and_seed(monkeypatch):
    def answer(call):
        right = _right(call)
        if right.results["out"].shape == (3, 5):
            right.results["out"][2, 4] = 100
        return right

    text = str(_checked(monkeypatch, answer))
    assert "FAILED (values) with T=3, N=5, float32" in text
    assert "out[2, 4]: the kernel has 100, the reference" in text
    assert "repeat: --sizes T=3,N=5 --dtype float32 --seed 0" in text


def test_sizes_that_a_block_divides_are_named(monkeypatch):
    def answer(call):
        right = _right(call)
        out = right.results["out"]
        out[:, out.shape[1] // 64 * 64 :] = 7
        return right

    text = str(_checked(monkeypatch, answer))
    assert "it fails only where N is not a multiple of" in text


def test_a_crash_names_the_cause_and_ends_after_a_few(monkeypatch):
    crash = "CUDARuntimeError: cudaErrorIllegalAddress: an illegal memory access was encountered"
    runner = []

    def answer(call):
        runner.append(1)
        return Answer(error=("crash", crash))

    report = _checked(monkeypatch, answer)
    assert "illegal memory access in scale" in str(report)
    assert "--sanitizer memcheck" in str(report)
    assert len(runner) == 1  # a stand-in is no child process: its context is lost


def test_a_hang_is_told(monkeypatch):
    def answer(call):
        raise WorkerFailure("no answer within 3 s", is_timeout=True)

    text = str(_checked(monkeypatch, answer))
    assert "does not end (no answer within 3 s): an infinite loop" in text


def test_a_contract_that_the_call_violates_is_told(monkeypatch):
    answer = Answer(error=("contract", "scale: x: must start at a multiple of 16 bytes"))
    text = str(_checked(monkeypatch, lambda call: answer))
    assert "FAILED (call)" in text and "multiple of 16 bytes" in text


# Messages between the processes.


def test_messages_keep_headers_and_arrays():
    arrays = {
        "x": np.arange(6, dtype=np.float16).reshape(2, 3),
        "empty": np.empty((0, 4), np.float32),
        "flag": np.array(True),
        "half": np.ones(3, np.float32).astype(np_dtype("bfloat16")),
    }
    pipe = io.BytesIO()
    Link(pipe, pipe).send({"do": "call", "eps": 0.5}, arrays)
    pipe.seek(0)
    header, found = Link(pipe, pipe).receive()
    assert header == {"do": "call", "eps": 0.5}
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)
    assert Link(pipe, pipe).receive() is None


def test_problems_and_launches_survive_the_way():
    problem = _op().example_problem({"T": 3, "N": 5}, "float16")
    assert read_problem(problem_message(problem)) == problem
    launch = problem.grid(
        (3, 2),
        128,
        shared=64,
        cluster=2,
        args={
            "tile": 4,
            "map": problem.tensor_map("x", (8, 64)),
            "sums": problem.scratch((3, 4), zeroed=True),
            "scale": np.float32(0.5),
        },
        defines={"D": 64},
    )
    assert read_launch(launch_message(launch)) == launch


# compute-sanitizer's logs.

MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 2 bytes
=========     at scale+0x150 in scale.cu:5
=========     by thread (63,0,0) in block (0,0,0)
=========     Access to 0x7f5c4ba0007e is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f5c4ba00000 of size 126 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame:  [0x2d6f05] in libcuda.so.1
=========
========= Invalid __global__ write of size 2 bytes
=========     at scale+0x150 in scale.cu:5
=========     by thread (64,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """\
========= Error: Race reported between Write access at scale+0x90 in scale.cu:4
=========     and Read access at scale+0xd0 in scale.cu:5 [224 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def test_findings_of_memcheck_are_told_once_with_the_source_line():
    [finding] = read_findings(MEMCHECK, "memcheck", SOURCE, "scale.cu")
    lines = finding.text.splitlines()
    assert lines == [
        "scale.cu:5: a write of 2 bytes outside every array: 1 bytes after the nearest one, of "
        "126 bytes, by thread (63,0,0) in block (0,0,0)",
        "    5 | if (i < T * N) out[i] = from_float<scalar_t>(to_float(x[i]) * s[i / N]);",
    ]


def test_findings_of_racecheck_name_both_accesses():
    [finding] = read_findings(RACECHECK, "racecheck", SOURCE, "scale.cu")
    assert finding.text.splitlines() == [
        "scale.cu:4: a race in shared memory: a write in scale.cu:4 and a read in scale.cu:5, "
        "without a __syncthreads() in between",
        "    4 | const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;",
        "    5 | if (i < T * N) out[i] = from_float<scalar_t>(to_float(x[i]) * s[i / N]);",
    ]


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            "========= Invalid __global__ read of size 16 bytes\n"
            "=========     at scale+0x80 in scale.cu:5\n"
            "=========     by thread (0,0,0) in block (0,0,0)\n"
            "=========     Access to 0x7f64f2800304 is misaligned\n",
            "scale.cu:5: a read of 16 bytes at an address that is no multiple of 16, by thread",
        ),
        (
            "========= Barrier error detected. Divergent thread(s) in warp.\n"
            "=========     at scale+0x170 in scale.cu:5\n"
            "=========     by thread (65,0,0) in block (0,0,0)\n",
            "scale.cu:5: a barrier that not all threads reach: Divergent thread(s) in warp, by",
        ),
        (
            "========= Uninitialized __global__ memory read of size 4 bytes\n"
            "=========     at scale+0xa0 in scale.cu:5\n",
            "scale.cu:5: a read of 4 bytes of global memory that nothing has written",
        ),
    ],
)
def test_findings_of_the_other_tools(log, words):
    [finding] = read_findings(log, "memcheck", SOURCE, "scale.cu")
    assert finding.text.startswith(words)


# Watching, and the command.


def _written(tmp_path, body="2.0f"):
    cuda = (
        'extern "C" __global__ void twice(const scalar_t* x, scalar_t* out, int64_t N) {\n'
        "  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;\n"
        f"  if (i < N) out[i] = from_float<scalar_t>({body} * to_float(x[i]));\n}}\n"
    )
    (tmp_path / "twice.cu").write_text(cuda)
    path = tmp_path / "my_op.py"
    path.write_text(
        "from engine import kernels\n"
        "twice = kernels.define('twice', 'x: (N,) float -> (N,) like x',\n"
        "    reference=lambda x: 2 * x, source='twice.cu',\n"
        "    launch=lambda call: call.grid1d(call['N'], 256))\n"
    )
    return path


def test_watch_checks_again_when_the_source_is_saved(tmp_path, without_gpu, monkeypatch):
    path = _written(tmp_path)
    shown = []
    turned = threading.Event()

    def show(text):
        shown.append(text)
        turned.set()

    monkeypatch.setattr("engine.kernels._tools.watch._printed", lambda: show)
    watcher = kernels.watch(str(path), arch="sm_90a", quick=True)
    try:
        assert turned.wait(60) and "twice: ok" in shown[-1]
        turned.clear()
        _written(tmp_path, body="missing")
        assert turned.wait(60)
        assert 'twice.cu:3: error: identifier "missing" is undefined' in shown[-1]
        turned.clear()
        _written(tmp_path)
        assert turned.wait(60) and "twice: ok" in shown[-1]
    finally:
        watcher.stop()
    assert "stopped" in repr(watcher)


def test_watch_survives_a_python_file_that_fails(tmp_path, without_gpu, monkeypatch):
    path = _written(tmp_path)
    shown = []
    turned = threading.Event()
    monkeypatch.setattr(
        "engine.kernels._tools.watch._printed", lambda: lambda t: (shown.append(t), turned.set())
    )
    watcher = kernels.watch(str(path), arch="sm_90a", quick=True)
    try:
        assert turned.wait(60)
        turned.clear()
        path.write_text("1 / 0\n")
        assert turned.wait(60) and "ZeroDivisionError" in shown[-1]
    finally:
        watcher.stop()
    assert not watcher.ok


def test_watch_needs_a_file(tmp_path):
    with pytest.raises(errors.ConfigError, match="there is no file"):
        kernels.watch(str(tmp_path / "missing.py"))
    with pytest.raises(errors.ConfigError, match="must be a file"):
        kernels.watch(_op())


def _command(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "engine", "kernels", "check", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def test_an_op_of_two_names_is_loaded_once(tmp_path):
    path = _written(tmp_path)
    path.write_text(path.read_text() + "\nother = twice\n")
    assert list(load_ops(str(path))) == ["twice"]
    assert list(load_ops(f"{path}:other")) == ["other"]


def test_the_command_checks_every_op_of_a_file(tmp_path):
    path = _written(tmp_path)
    status, text, _ = _command(str(path), "--quick", "--arch", "sm_90a")
    assert status == 0 and "twice: ok" in text
    _written(tmp_path, body="missing")
    status, text, _ = _command(f"{path}:twice", "--quick", "--arch", "sm_90a")
    assert status == 1 and "twice.cu:3: error" in text
    status, _, reason = _command(f"{path}:other")
    assert status == 2 and "has no op called 'other'" in reason


def test_an_error_in_the_users_python_has_its_line(tmp_path):
    path = _written(tmp_path)
    good = path.read_text()
    for old, new, status, words in (
        ("2 * x", "x.y", 1, "the reference fails in line 3: AttributeError"),
        ("call['N'], 256", "len(call), 256", 1, "launch fails in line 4: TypeError"),
        ("\ntwice", "\nnumbers = [][1]\ntwice", 2, "my_op.py fails in line 2: IndexError"),
    ):
        path.write_text(good.replace(old, new))
        found, *texts = _command(str(path), "--quick", "--arch", "sm_90a")
        assert found == status and words in "".join(texts)
