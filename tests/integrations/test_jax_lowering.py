"""Lowering for CUDA and launches on the addresses of a call, with the prepared call mocked."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402

from engine.errors import EngineError  # noqa: E402
from engine.integrations import jax as ops  # noqa: E402
from engine.integrations.jax import _handlers, _operators  # noqa: E402
from engine.integrations.jax._ffi import Buffer  # noqa: E402
from engine.kernels._prepared_call import ArrayLayout  # noqa: E402

F32 = np.dtype(np.float32)
U8 = np.dtype(np.uint8)


LOWER_ALL = """
from tests.integrations import mock_cuda
mock_cuda.install()
from tests.integrations import lower_for_cuda
lower_for_cuda.main()
"""


class MockPrepared:
    """A prepared call that needs scratch and counters; records its runs."""

    def __init__(self, results=(), scratch_bytes=1000, num_counters=3):
        self.results = results
        self.scratch_bytes = scratch_bytes
        self.num_counters = num_counters
        self.runs = []
        self.is_running = False

    def run(self, *arguments):
        assert not self.is_running, "two threads in one prepared call"
        self.is_running = True
        time.sleep(0.002)
        self.is_running = False
        self.runs.append(arguments)


class MockCall:
    """A call of the handler, as XLA makes it."""

    def __init__(self, name, arguments, results):
        given = (True,) * len(arguments)
        self.config = _operators._encode(name, given, ()).encode()
        self.arguments, self.results = tuple(arguments), tuple(results)

    def stream(self):
        return 77

    def device(self):
        return 0


@pytest.fixture
def prepared(monkeypatch):
    mock = MockPrepared()
    lock = threading.Lock()
    monkeypatch.setattr(_handlers, "_on_device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(_handlers, "_lowering_device", lambda: 0)
    monkeypatch.setattr(_handlers, "_prepared", lambda *_: (mock, lock))
    mock.zeroed = []
    monkeypatch.setattr(_handlers, "_zero", lambda *arguments: mock.zeroed.append(arguments))
    return mock


def lowered(function, *arrays):
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_every_operator_is_prepared_for_a_gpu():
    """Its function calls nothing but ops of the catalog, and returns what was declared."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", LOWER_ALL],
        capture_output=True,
        text=True,
        env=environment,
        cwd=root,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    prepared = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert set(prepared) == set(_operators.OPERATORS)
    assert all(len(line.split()) > 3 for line in prepared.values())  # a kernel at least
    assert "attention bfloat16 0 attention_prefill_sm90" in done.stdout


def test_scratch_is_one_more_result(prepared):
    prepared.results = (ArrayLayout.contiguous((4, 8), F32),)
    text = lowered(ops.silu, jnp.ones((4, 8)))
    (call,) = re.findall(r"custom_call @engine.silu.*", text)
    assert call.endswith("(tensor<4x8xf32>) -> (tensor<4x8xf32>, tensor<1036xui8>)")
    prepared.scratch_bytes = prepared.num_counters = 0
    (call,) = re.findall(
        r"custom_call @engine.silu.*", lowered(lambda x: ops.silu(x), jnp.ones((4, 8)))
    )
    assert call.endswith("(tensor<4x8xf32>) -> tensor<4x8xf32>")


def test_a_result_of_another_size_or_dtype_is_an_error(prepared):
    for layout in (ArrayLayout.contiguous((4, 9), F32), ArrayLayout.contiguous((4, 8), U8)):
        prepared.results = (layout,)
        with pytest.raises(EngineError, match=r"silu: returns .*; .* was declared"):
            lowered(lambda x: ops.silu(x), jnp.ones((4, 8)))


def test_pages_are_aliased(prepared):
    pages = jnp.zeros((2, 1, 16, 4))
    rows = jnp.ones((3, 1, 4))
    text = lowered(ops.kv_store, rows, rows, pages, pages, jnp.arange(3))
    (call,) = re.findall(r"custom_call @engine.kv_store.*", text)
    aliases = r"output_tuple_indices = \[{}\], operand_index = {}"
    assert re.search(aliases.format(0, 2), call) and re.search(aliases.format(1, 3), call)
    assert "tensor<3x2xi32>" in call  # slots are int64, in pairs


def test_a_launch_gets_addresses_scratch_and_zeroed_counters(prepared):
    prepared.results = (ArrayLayout.contiguous((4,), F32),)
    x, y, scratch = Buffer(16, F32, (4,)), Buffer(32, F32, (4,)), Buffer(512, U8, (1036,))
    _handlers._run_on_cuda(MockCall("silu", [x], [y, scratch]))
    assert prepared.runs == [([16, 32], 77, 512, 512 + 1024)]
    assert prepared.zeroed == [(512 + 1024, 3, 77)]
    small = Buffer(512, U8, (1035,))
    with pytest.raises(EngineError, match="silu: needs 1036 bytes of scratch; got 1035"):
        _handlers._run_on_cuda(MockCall("silu", [x], [y, small]))


def test_aliased_results_are_not_passed_twice(prepared):
    prepared.scratch_bytes = prepared.num_counters = 0
    rows, pages = Buffer(16, F32, (1, 1, 4)), [Buffer(n, F32, (1, 1, 16, 4)) for n in (32, 64)]
    slots = Buffer(96, np.dtype(np.int32), (1, 2))
    arguments = [rows, rows, *pages, slots]
    _handlers._run_on_cuda(MockCall("kv_store", arguments, pages))
    assert prepared.runs == [([16, 16, 32, 64, 96], 77, 0, 0)]
    with pytest.raises(EngineError, match="XLA did not alias argument 2 and result 0"):
        _handlers._run_on_cuda(MockCall("kv_store", arguments, pages[::-1]))


def test_a_prepared_call_runs_on_one_thread_at_a_time(prepared):
    prepared.results = (ArrayLayout.contiguous((4,), F32),)
    call = MockCall(
        "silu", [Buffer(16, F32, (4,))], [Buffer(32, F32, (4,)), Buffer(512, U8, (1036,))]
    )
    threads = [threading.Thread(target=_handlers._run_on_cuda, args=(call,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(prepared.runs) == 8


def test_lowering_for_cuda_without_a_gpu_says_what_it_needs():
    if jax.default_backend() != "cpu":
        pytest.skip("this machine has a GPU")
    with pytest.raises(EngineError, match="lowering an op for CUDA needs a GPU"):
        lowered(ops.relu, jnp.ones((4, 8)))
