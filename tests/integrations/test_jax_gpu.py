"""`engine.integrations.jax` on a GPU: our kernels on XLA's stream, memory and CUDA graphs."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other tests use the GPU, too
jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402

from engine import kernels  # noqa: E402
from engine.integrations import jax as ops  # noqa: E402
from engine.integrations.jax import _handlers  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cp")]

TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


def random(seed, *shape, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def on_both(function, *arrays):
    """Return the results on the GPU and on the CPU (the mirrors)."""
    gpu = jax.jit(function)(*arrays)
    cpu = jax.devices("cpu")[0]
    return gpu, jax.jit(function)(*jax.device_put(arrays, cpu))


def assert_close(found, wanted, dtype):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


CASES = {
    "rmsnorm": (lambda x, w: ops.rmsnorm(x, w, residual=x), (37, 256), (256,)),
    "rmsnorm_odd": (lambda x, w: ops.rmsnorm(x, w), (3, 5, 99), (99,)),
    "layernorm": (lambda x, w: ops.layernorm(x, w, w), (37, 256), (256,)),
    "swiglu": (ops.swiglu, (37, 512)),
    "geglu": (ops.geglu, (37, 512)),
    "gelu": (ops.gelu, (37, 51)),
    "attention": (
        lambda q, k: ops.attention(q, k, k, causal=True, window=40, return_lse=True),
        (2, 70, 4, 64),
        (2, 90, 2, 64),
    ),
    "attention_128": (
        lambda q, k: ops.attention(q, k, k, softcap=20.0),
        (2, 300, 4, 128),
        (2, 300, 4, 128),
    ),
    "varlen": (
        lambda q, k: ops.attention_varlen(
            q, k, k, jnp.array([0, 3, 90]), jnp.array([0, 50, 140]), 87, 90, causal=True
        ),
        (90, 4, 128),
        (140, 2, 128),
    ),
    "paged": (
        lambda q, k: ops.attention_paged(
            q, k, k, jnp.array([[3, 1], [0, 2]]), jnp.array([17, 32])
        ),
        (2, 1, 8, 128),
        (4, 2, 16, 128),
    ),
    "kv_store": (
        lambda x, pages: ops.kv_store(x, -x, pages, pages, jnp.array([5, -1, 40])),
        (3, 2, 64),
        (4, 2, 16, 64),
    ),
    "embedding": (lambda w: ops.embedding(jnp.array([3, -(2**31), 0]), w), (7, 96)),
    "rope": (
        lambda q, k: ops.rope(q, k, jnp.full((9, 64), 0.5**0.5), jnp.arange(9)),
        (2, 9, 4, 64),
        (2, 9, 2, 64),
    ),
    "linear": (lambda x, w: ops.linear(x, w, activation="swiglu"), (5, 3, 64), (96, 64)),
    "linear_few_rows": (ops.linear, (2, 512), (256, 512)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_gpu_equals_the_mirrors(case):
    function, *shapes = CASES[case]
    arrays = [random(i, *shape, dtype="bfloat16") for i, shape in enumerate(shapes)]
    assert_close(*on_both(function, *arrays), "bfloat16")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("case", ["rmsnorm", "swiglu", "linear"])
def test_other_dtypes(case, dtype):
    function, *shapes = CASES[case]
    arrays = [random(i, *shape, dtype=dtype) for i, shape in enumerate(shapes)]
    assert_close(*on_both(function, *arrays), dtype)


TARGET = jnp.array([3, -100, 0, 99])
GRADIENTS = {
    "attention": (
        lambda q, k, v: ops.attention(q, k, v, causal=True, sinks=q[0, 0, :, 0], return_lse=True),
        (2, 150, 4, 64),
        (2, 150, 2, 64),
        (2, 150, 2, 64),
    ),
    "varlen": (
        lambda q, k: ops.attention_varlen(
            q, k, k, jnp.array([0, 3, 90]), jnp.array([0, 50, 140]), 87, 90, causal=True
        ),
        (90, 4, 128),
        (140, 2, 128),
    ),
    "rmsnorm": (lambda x, w, r: ops.rmsnorm(x, w, residual=r), (37, 256), (256,), (37, 256)),
    "layernorm": (lambda x, w, b: ops.layernorm(x, w, b), (37, 256), (256,), (256,)),
    "swiglu": (ops.swiglu, (37, 512)),
    "gelu": (ops.gelu, (37, 51)),
    "moe": (
        lambda x, gate_up, down, logits: ops.moe_experts(
            x, gate_up / 8, down / 8, *ops.moe_route(logits, 2)[::-1]
        ),
        (50, 64),
        (4, 256, 64),
        (4, 64, 128),
        (50, 4),
    ),
    "cross_entropy": (lambda x: ops.cross_entropy(x, TARGET, reduction="sum"), (4, 100)),
}


@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients_equal_the_mirrors(case):
    function, *shapes = GRADIENTS[case]
    arrays = [random(i, *shape, dtype="bfloat16") for i, shape in enumerate(shapes)]

    def loss(*a):
        return sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in jax.tree.leaves(function(*a)))

    found, wanted = on_both(jax.grad(loss, tuple(range(len(arrays)))), *arrays)
    for a, b in zip(found, wanted, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.linalg.norm(a - b) < 0.01 * np.linalg.norm(b)


def test_a_program_is_replayed_as_a_cuda_graph():
    """After the first runs XLA replays the launches, and calls no handler any more."""

    @jax.jit
    def layers(x, weight):
        for _ in range(8):
            x = ops.rmsnorm(x + 1, weight)
        return x

    x, weight = random(0, 64, 512), jnp.linspace(0.5, 1.5, 512)
    wanted = layers(*jax.device_put((x, weight), jax.devices("cpu")[0]))
    calls = []
    launch = _handlers._launch
    _handlers._launch = lambda *args: (calls.append(1), launch(*args))
    try:
        for _ in range(20):
            found = layers(x, weight)
        found.block_until_ready()
    finally:
        _handlers._launch = launch
    assert_close(found, wanted, "float32")
    assert len(calls) < 8 * 10, f"{len(calls)} calls of the handler in 20 runs of 8 ops"


def test_scan_and_vmap():
    weights = random(1, 6, 256)

    def run(x):
        return jax.lax.scan(lambda x, w: (ops.rmsnorm(x + 1, w), None), x, weights)[0]

    assert_close(*on_both(jax.vmap(run), random(0, 5, 3, 256)), "float32")


def test_pages_are_written_in_place():
    store = jax.jit(ops.kv_store, donate_argnums=(2, 3))
    k_pages, v_pages = jnp.zeros((2, 4, 2, 16, 64))
    where = k_pages.unsafe_buffer_pointer()
    k_pages, v_pages = store(*random(0, 2, 3, 2, 64), k_pages, v_pages, jnp.arange(3))
    assert k_pages.unsafe_buffer_pointer() == where
    assert float(jnp.abs(k_pages).sum()) > 0


def test_float64_is_an_error_of_the_compilation():
    with jax.enable_x64(True), pytest.raises(ValueError, match="float64 must be a NumPy array"):
        jax.jit(ops.silu)(jnp.ones(3, jnp.float64))


def test_dlpack_outside_jit():
    x = random(0, 4, 64)
    found = jnp.from_dlpack(kernels.silu(x))
    assert_close(found, jax.nn.silu(x), "float32")


def test_two_threads():
    x, weight = random(0, 64, 512), jnp.linspace(0.5, 1.5, 512)
    function = jax.jit(lambda x, w: ops.rmsnorm(ops.silu(x), w))
    wanted = function(x, weight)
    failed = []

    def work(scale):
        for _ in range(200):
            found = function(x * scale, weight)
            if not np.allclose(found, function(x * scale, weight)):
                failed.append(scale)

    threads = [threading.Thread(target=work, args=(s,)) for s in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert_close(function(x, weight), wanted, "float32")
