"""The process that owns the GPU, with a stand-in for the GPU: launches are asked of the parent,
and the parent survives a crash and a hang."""

from __future__ import annotations

import os

import numpy as np
import pytest

from engine import kernels
from engine.kernels._tools import worker as worker_module
from engine.kernels._tools.device_run import Call, Placed
from engine.kernels._tools.worker import Worker, WorkerFailure

SOURCE = 'extern "C" __global__ void twice(const scalar_t* x, scalar_t* out, int64_t pid) {}'


def _launch(call):
    if call["N"] == 5:
        raise KeyError("a mistake in the notebook")
    return call.grid1d(call["N"], 2, args={"pid": os.getpid()})


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setattr(worker_module, "CHILD", "tests.kernel_tools.fake_child")
    op = kernels.define(
        "twice",
        "x: (N,) float -> (N,) like x",
        reference=lambda x: 2 * x,
        source=SOURCE,
        launch=_launch,
    )
    made = Worker(op, seconds=3.0)
    yield made
    made.close()


def _call(size):
    x = np.arange(size, dtype=np.float16)
    placed = [Placed(name, "float16", x.shape, x.strides) for name in ("x", "out")]
    return Call(placed, {"x": x}, {})


def test_a_call_runs_there_with_launches_from_here(worker, capfd):
    for size in (4, 6):
        answer = worker.call(_call(size))
        assert answer.results["out"].tolist() == (2 * np.arange(size)).tolist()
        assert answer.results["out"].dtype == np.float16
        assert answer.findings == [("launch", f"({size // 2},) {os.getpid()}")]
    assert worker.device == "fake" and worker.chip.arch == "sm_90a"
    assert "printed by a kernel" in capfd.readouterr().err


def test_an_error_in_the_launch_function_is_told(worker):
    with pytest.raises(WorkerFailure):
        worker.call(_call(5))  # the stand-in lets it escape; `run_call` does not
    assert worker.call(_call(4)).error is None


@pytest.mark.parametrize(
    ("size", "is_timeout", "words"), [(7, False, "status 3"), (11, True, "3 s")]
)
def test_a_new_process_follows_a_crash_or_a_hang(worker, size, is_timeout, words):
    with pytest.raises(WorkerFailure) as caught:
        worker.call(_call(size))
    assert caught.value.is_timeout == is_timeout
    assert words in str(caught.value)
    assert worker.call(_call(4)).error is None


def test_a_lost_context_ends_the_process(worker):
    worker.call(_call(4))
    first = worker._process.pid
    assert worker.call(_call(13)).error == ("crash", "cudaErrorIllegalAddress")
    assert worker.call(_call(4)).error is None
    assert worker._process.pid != first
