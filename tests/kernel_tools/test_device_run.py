"""The checks around a call: a Python function on NumPy memory stands in for the kernel."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from engine import kernels
from engine.kernels._tools import check as check_module
from engine.kernels._tools.device_run import Call, Placed, run_call
from engine.kernels._user.problem import CHIPS
from tests.kernel_tools.fake_gpu import FakeOp, beyond, fake_gpu

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def _placed(name, array, role="in", **options):
    return Placed(name, str(array.dtype), array.shape, array.strides, role=role, **options)


def _run(monkeypatch, kernel, **options):
    """Run a kernel with one argument and one result of the shape of X."""
    arrays = [_placed("x", X), _placed("out", X, options.pop("role", "out"))]
    with fake_gpu(monkeypatch) as gpu:
        return run_call(FakeOp(gpu, kernel), Call(arrays, {"x": X}, {}, **options))


def _double(gpu, x, out):
    out[...] = 2 * x


def test_a_right_kernel_has_no_findings(monkeypatch):
    answer = _run(monkeypatch, _double, has_graph=True)
    assert answer.error is None
    assert answer.findings == []
    np.testing.assert_array_equal(answer.results["out"], 2 * X)


def test_a_write_behind_the_end_is_told(monkeypatch):
    def kernel(gpu, x, out):
        _double(gpu, x, out)
        beyond(out, 0, 3)[-3:] = 1.5

    [finding] = _run(monkeypatch, kernel).findings
    assert finding == ("guard", "wrote 3 elements after the end of out (the first is 1 behind)")


def test_a_write_before_the_start_is_told(monkeypatch):
    def kernel(gpu, x, out):
        _double(gpu, x, out)
        beyond(out, 2, 0)[0] = 1.5

    [finding] = _run(monkeypatch, kernel).findings
    assert finding == ("guard", "wrote 1 element before the start of out (the last is 2 before)")


def test_a_write_into_the_gaps_of_strided_rows_is_told(monkeypatch):
    def kernel(gpu, x, out):
        np.ndarray((3, 6), np.float32, out.base, (64 << 10), (24, 4))[...] = 7.0
        out[...] = 2 * x

    gappy = Placed("out", "float32", (3, 4), (24, 4), role="out")
    with fake_gpu(monkeypatch) as gpu:
        call = Call([_placed("x", X), gappy], {"x": X}, {})
        answer = run_call(FakeOp(gpu, kernel), call)
    assert ("guard", "wrote 4 elements between the rows of out: its strides leave gaps there") in (
        answer.findings
    )
    np.testing.assert_array_equal(answer.results["out"], 2 * X)


def test_a_write_to_an_argument_is_told(monkeypatch):
    def kernel(gpu, x, out):
        _double(gpu, x, out)
        x[1, 2:] = 99

    [finding] = _run(monkeypatch, kernel).findings
    assert finding == ("input", "wrote to its argument x[1, 2:4], which is not inout")


def test_a_read_behind_the_end_is_told_with_the_array(monkeypatch):
    def kernel(gpu, x, out):
        _double(gpu, x, out)
        out[2, 3] += beyond(x, 0, 1)[-1]

    [finding] = _run(monkeypatch, kernel).findings
    assert finding[0] == "outside"
    assert finding[1].startswith("reads outside x: out[2, 3] changes with")


def test_elements_that_are_not_written_are_told(monkeypatch):
    def kernel(gpu, x, out):
        out[:, :2] = 2 * x[:, :2]

    [finding] = _run(monkeypatch, kernel).findings
    assert finding == ("unwritten", "out[:, 2:4] was never written (6 of 12 elements)")


def test_a_zeroed_result_needs_no_write(monkeypatch):
    def kernel(gpu, x, out):
        out[...] = 0
        out[0] += x[0]

    assert _run(monkeypatch, kernel, role="zeroed").findings == []


def test_a_read_of_the_result_is_told(monkeypatch):
    def kernel(gpu, x, out):
        out[...] = np.where(x > 5, out + x, x)

    [finding] = _run(monkeypatch, kernel).findings
    assert finding[0] == "outside"
    assert finding[1].startswith("reads the result before it has written it: out[1:3, :]")


def test_a_read_of_old_shared_memory_is_told(monkeypatch):
    def kernel(gpu, x, out):
        _double(gpu, x, out)
        out[0, 0] = gpu.shared

    [finding] = _run(monkeypatch, kernel).findings
    assert finding[0] == "shared"
    assert "__syncthreads()" in finding[1]
    assert "out[0, 0] changes" in finding[1]


def test_results_that_differ_between_runs_are_told(monkeypatch):
    count = itertools.count()

    def kernel(gpu, x, out):
        _double(gpu, x, out)
        out[1, 1] = 100 + next(count)

    answer = _run(monkeypatch, kernel)
    [finding] = answer.findings
    assert finding[0] == "nondeterminism"
    assert "a race" in finding[1]
    assert "out[1, 1] is 100.0, then 101.0; 1 of 12 elements differ" in finding[1]
    assert _run(monkeypatch, kernel, is_deterministic=False).findings == []


def test_a_graph_that_computes_something_else_is_told(monkeypatch):
    def kernel(gpu, x, out):
        out[...] = x if gpu.captured is None and getattr(gpu, "is_replay", False) else 2 * x
        gpu.is_replay = gpu.captured is None and hasattr(gpu, "runs") and gpu.runs > 3
        gpu.runs = getattr(gpu, "runs", 0) + 1

    kinds = {kind for kind, _ in _run(monkeypatch, kernel, has_graph=True).findings}
    assert kinds == {"graph"}


def test_a_result_in_place_is_compared_there(monkeypatch):
    arrays = [_placed("x", X), _placed("out", X, "out", alias="x")]
    with fake_gpu(monkeypatch) as gpu:
        answer = run_call(FakeOp(gpu, _double), Call(arrays, {"x": X}, {}))
    assert answer.findings == []
    np.testing.assert_array_equal(answer.results["out"], 2 * X)


def test_a_misaligned_argument_keeps_its_content(monkeypatch):
    arrays = [_placed("x", X, offset=4), _placed("out", X, "out", offset=4)]
    with fake_gpu(monkeypatch) as gpu:
        answer = run_call(FakeOp(gpu, _double), Call(arrays, {"x": X}, {}))
    assert answer.findings == []
    np.testing.assert_array_equal(answer.results["out"], 2 * X)


@pytest.mark.parametrize("shape", [(0, 4), (0,)])
def test_an_empty_result_is_no_finding(monkeypatch, shape):
    empty = np.empty(shape, np.float32)
    arrays = [_placed("x", empty), _placed("out", empty, "out")]
    with fake_gpu(monkeypatch) as gpu:
        answer = run_call(FakeOp(gpu, _double), Call(arrays, {"x": empty}, {}))
    assert (answer.error, answer.findings) == (None, [])
    assert answer.results["out"].shape == shape


def test_an_exception_of_the_driver_is_a_crash(monkeypatch):
    def kernel(gpu, x, out):
        raise RuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    kind, text = _run(monkeypatch, kernel).error
    assert kind == "crash"
    assert "IllegalAddress" in text


# All of `kernels.check`, with a Python function in place of the kernel.


def _checked(monkeypatch, kernel, **options):
    op = kernels.define(
        "shifted",
        "x: (T, N) float strided, ids: (T,) int32|int64, b: (N,) like x = None, "
        "eps: float32 = 0.5 -> (T, N) like x, most: (T,) int32 zeroed",
        reference=lambda x, ids, b, eps: (
            x + (0 if b is None else b) + np.float32(eps),
            ids.astype(np.int32),
        ),
        source='extern "C" __global__ void shifted(const scalar_t* x, const ids_t* ids, '
        "const scalar_t* b, scalar_t* out, int* most) {}",
        launch=lambda call: call.grid(1, 32),
        in_place="x",
    )
    with fake_gpu(monkeypatch) as gpu:
        fake = FakeOp(gpu, kernel, ("out", "most"))
        runner = SimpleNamespace(
            device="a stand-in",
            start=lambda: CHIPS["sm_90a"],
            call=lambda call: run_call(fake, call),
            close=lambda: None,
        )
        monkeypatch.setattr(check_module._Checker, "_runner", lambda *_, **__: runner)
        return kernels.check(op, show=False, special=True, **options)


def _shifted(gpu, x, ids, b, eps, out, most):
    with np.errstate(all="ignore"):
        wide = x.astype(np.float32) + (0 if b is None else b.astype(np.float32))
        out[...] = (wide + np.float32(eps)).astype(out.dtype)
    most[...] = ids


def test_every_variation_of_a_right_kernel_is_right(monkeypatch):
    report = _checked(monkeypatch, _shifted)
    assert report.ok, str(report)
    assert report.num_calls > 100


def test_a_kernel_that_ignores_an_optional_argument_is_told_with_its_name(monkeypatch):
    def kernel(gpu, b, **others):
        _shifted(gpu, b=None, **others)

    texts = [finding.where for finding in _checked(monkeypatch, kernel).errors]
    assert texts and not any("without b" in text for text in texts)


def test_a_kernel_that_ignores_strides_is_told_for_views_alone(monkeypatch):
    def kernel(gpu, x, **others):
        if x.strides[-1] != x.itemsize and x.size:
            x = np.full(x.shape, x.ravel()[0], x.dtype)
        _shifted(gpu, x=x, **others)

    texts = [finding.where for finding in _checked(monkeypatch, kernel).errors]
    assert texts and all("transposed" in text for text in texts)
