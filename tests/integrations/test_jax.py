"""`engine.integrations.jax` on the CPU: XLA calls the mirrors."""

from __future__ import annotations

import importlib
import itertools
import re
import threading
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
if jax.config.jax_num_cpu_devices == -1:
    jax.config.update("jax_num_cpu_devices", 2)  # for shard_map; before any backend starts

import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

from engine import kernels, reference  # noqa: E402
from engine.errors import ContractError, DTypeError, EngineError, ShapeError  # noqa: E402
from engine.integrations import jax as ops  # noqa: E402

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="the tests of test_jax_gpu.py are for this machine"
)
TOLERANCE = {"float64": 1e-12, "float32": 3e-6, "float16": 2e-3, "bfloat16": 2e-2}
DTYPES = ["float32", "float16", "bfloat16"]
START = np.array([0, 2, 2, 7])
COS_SIN = np.concatenate([np.cos(a := np.outer(np.arange(9), [1, 0.1, 0.01])), np.sin(a)], 1)
COS_SIN = COS_SIN.astype(np.float32)


def random(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def assert_close(found, wanted, dtype):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def as_floats(function):
    """Compute in float32 and round once, as the kernels do."""

    def run(*arrays):
        results = function(*(a.astype(jnp.float32) for a in arrays))
        return jax.tree.map(lambda r: r.astype(arrays[0].dtype), results)

    return run


def rms(x, weight):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * weight


def layer(x, weight):
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * weight + weight


def gated(activation):
    return lambda x: activation(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :]


def exact_gelu(x):
    return jax.nn.gelu(x, approximate=False)


def dense_attention(q, k, v, sinks=None, *, hidden=None, softcap=0.0):
    """(B, S, H, D); `hidden` (Sq, Sk) marks the keys that a query does not see."""
    k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], axis=2) for a in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    if hidden is not None:
        scores = jnp.where(hidden, -jnp.inf, scores)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    p = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]]
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


def causal_mask(num_queries, num_keys, window=None):
    last = jnp.arange(num_queries)[:, None] + num_keys - num_queries
    key = jnp.arange(num_keys)
    return (key > last) | (key <= last - window if window else False)


def packed_attention(q, k, v):
    parts = [
        dense_attention(q[None, a:b], k[None, a:b], v[None, a:b], hidden=causal_mask(b - a, b - a))
        for a, b in itertools.pairwise(START)
    ]
    return jnp.concatenate(parts, axis=1)[0]


def rotate(x):
    a, b, rest = x[..., :3], x[..., 3:6], x[..., 6:]
    cos, sin = jnp.split(jnp.asarray(COS_SIN[1:6], x.dtype)[:, None, :], 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


IDS = jnp.array([[1, 0], [3, 1], [3, 2], [1, 3], [0, 3]])  # experts of five tokens


def dense_experts(x, gate_up, down, weights):
    hidden = gated(jax.nn.silu)(jnp.einsum("tn,efn->tef", x, gate_up))
    experts = jnp.einsum("tef,enf->ten", hidden, down)
    chosen = jnp.take_along_axis(experts, IDS[:, :, None], axis=1)
    return jnp.sum(weights[:, :, None] * chosen, axis=1)


# Name: (op, the same in jnp, shapes of the arguments).
CASES = {
    "rmsnorm": (ops.rmsnorm, rms, (4, 3, 16), (16,)),
    "rmsnorm_offset": (
        lambda x, w: ops.rmsnorm(x, w, weight_offset=1.0),
        lambda x, w: rms(x, w + 1),
        (4, 16),
        (16,),
    ),
    "layernorm": (lambda x, w: ops.layernorm(x, w, w), layer, (4, 16), (16,)),
    "swiglu": (ops.swiglu, gated(jax.nn.silu), (4, 3, 16)),
    "geglu": (ops.geglu, gated(jax.nn.gelu), (4, 16)),
    "geglu_exact": (lambda x: ops.geglu(x, approximate="none"), gated(exact_gelu), (4, 16)),
    "gelu": (ops.gelu, exact_gelu, (4, 5)),
    "silu": (ops.silu, jax.nn.silu, (4, 5)),
    "relu": (ops.relu, jax.nn.relu, (4, 5)),
    "rope": (
        lambda q, k: ops.rope(q, k, COS_SIN, jnp.arange(1, 6)),
        lambda q, k: (rotate(q), rotate(k)),
        (4, 5, 3, 8),
        (4, 5, 1, 8),
    ),
    "embedding": (
        lambda w: ops.embedding(jnp.array([[1, 0], [3, 1]]), w, scale=2.0),
        lambda w: 2 * w[jnp.array([[1, 0], [3, 1]])],
        (4, 5),
    ),
    "attention": (ops.attention, dense_attention, (4, 3, 4, 8), (4, 5, 2, 8), (4, 5, 2, 8)),
    "attention_causal": (
        lambda q, k, v: ops.attention(q, k, v, causal=True, window=2, softcap=3.0),
        lambda *a: dense_attention(*a, hidden=causal_mask(3, 5, 2), softcap=3.0),
        (4, 3, 4, 8),
        (4, 5, 2, 8),
        (4, 5, 2, 8),
    ),
    "attention_varlen": (
        lambda q, k, v: ops.attention_varlen(q, k, v, START, START, 5, 5, causal=True),
        packed_attention,
        (7, 4, 8),
        (7, 2, 8),
        (7, 2, 8),
    ),
    "moe_experts": (
        lambda x, gate_up, down, weights: ops.moe_experts(x, gate_up, down, IDS, weights),
        dense_experts,
        (5, 8),
        (4, 12, 8),
        (4, 8, 6),
        (5, 2),
    ),
    "linear": (ops.linear, lambda x, w, b: x @ w.T + b, (4, 3, 8), (16, 8), (16,)),
    "linear_swiglu": (
        lambda x, w: ops.linear(x, w, activation="swiglu"),
        lambda x, w: gated(jax.nn.silu)(x @ w.T),
        (4, 8),
        (16, 8),
    ),
    "linear_residual": (
        lambda x, w: ops.linear(x, w, residual=x, activation="gelu_tanh"),
        lambda x, w: x + jax.nn.gelu(x @ w.T),
        (4, 8),
        (8, 8),
    ),
}
CASES_64 = [name for name in CASES if not name.startswith("linear")]


def arguments(case, dtype):
    return [random(i, *shape, dtype=dtype) for i, shape in enumerate(CASES[case][2:])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_equals_a_formula_under_jit(case, dtype):
    op, formula = CASES[case][:2]
    arrays = arguments(case, dtype)
    found = jax.jit(op)(*arrays)
    assert all(leaf.dtype == arrays[0].dtype for leaf in jax.tree.leaves(found))
    assert_close(found, as_floats(formula)(*arrays), dtype)
    assert_close(op(*arrays), found, "float64")  # the same bits outside jit


@pytest.mark.parametrize("case", CASES_64)
def test_float64_on_the_mirrors(case):
    with jax.enable_x64(True):
        op, formula = CASES[case][:2]
        arrays = arguments(case, "float64")
        assert_close(jax.jit(op)(*arrays), formula(*arrays), "float64")
        check_grads(op, arrays, order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_gradient_equals_the_formulas(case):
    op, formula = CASES[case][:2]
    arrays = arguments(case, "float32")
    shapes = jax.eval_shape(op, *arrays)
    factors = jax.tree.map(lambda s: random(9, *s.shape), shapes)

    def loss(function):
        return lambda *a: sum(
            jnp.vdot(y, f)
            for y, f in zip(jax.tree.leaves(function(*a)), jax.tree.leaves(factors), strict=True)
        )

    argnums = tuple(range(len(arrays)))
    found = jax.grad(loss(jax.jit(op)), argnums)(*arrays)
    wanted = jax.grad(loss(formula), argnums)(*arrays)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_vmap_over_the_first_the_last_and_all_arguments(case):
    op = CASES[case][0]
    arrays = arguments(case, "float32")
    last = len(arrays) - 1
    for mapped in {(0,), (last,), tuple(range(len(arrays)))}:
        axes = tuple(-1 if i in mapped else None for i in range(len(arrays)))
        stacked = [
            a if axis is None else jnp.stack([a, 2 * a, a - 1], axis=axis)
            for a, axis in zip(arrays, axes, strict=True)
        ]
        found = jax.jit(jax.vmap(op, in_axes=axes))(*stacked)
        for n in range(3):
            one = [a if axis is None else a[..., n] for a, axis in zip(stacked, axes, strict=True)]
            assert_close(jax.tree.map(lambda y, n=n: y[n], found), op(*one), "float32")


@pytest.mark.parametrize("case", CASES)
def test_vmap_over_no_element(case):
    op = CASES[case][0]
    first, *rest = arguments(case, "float32")
    axes = (0, *(None for _ in rest))
    found = jax.vmap(op, in_axes=axes)(first[None][:0], *rest)
    for y, one in zip(jax.tree.leaves(found), jax.tree.leaves(op(first, *rest)), strict=True):
        assert y.shape == (0, *one.shape) and y.dtype == one.dtype
    stacked = [jnp.zeros((0, *a.shape)) for a in (first, *rest)]
    gradients = jax.grad(
        lambda *a: sum(y.sum() for y in jax.tree.leaves(jax.vmap(op)(*a))),
        argnums=tuple(range(len(stacked))),
    )(*stacked)
    assert [g.shape for g in gradients] == [a.shape for a in stacked]


@pytest.mark.parametrize("case", ["rmsnorm", "attention", "linear"])
def test_gradients_with_jit_disabled(case):
    """`jax.disable_jit` is for debugging: what is called inside is run as it is."""
    op = CASES[case][0]
    arrays = arguments(case, "float32")

    def loss(*arrays):
        return jnp.sum(op(*arrays) ** 2)

    wanted = jax.grad(loss)(*arrays)
    with jax.disable_jit():
        assert_close(jax.jit(op)(*arrays), op(*arrays), "float32")
        assert_close(jax.grad(loss)(*arrays), wanted, "float32")


@pytest.mark.parametrize("case", ["rmsnorm", "attention_causal", "rope", "linear"])
def test_gradient_of_each_element_of_a_batch(case):
    """vmap of grad, where each element has its own gradient of the shared arguments."""
    op = CASES[case][0]
    first, *rest = arguments(case, "float32")

    def loss(*arrays):
        return sum(jnp.sum(y**2) for y in jax.tree.leaves(op(*arrays)))

    gradient = jax.grad(loss, argnums=tuple(range(1 + len(rest))))
    batch = jnp.stack([first, first + 1])
    found = jax.vmap(gradient, in_axes=(0, *(None for _ in rest)))(batch, *rest)
    for n in range(2):
        wanted = gradient(batch[n], *rest)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a[n], b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "token_id", [np.int64(2**32 + 1), np.int64(1 - 2**32), np.uint32(2**31), jnp.uint32(2**31)]
)
def test_an_id_that_int32_does_not_hold_is_outside_the_table(token_id):
    rows = ops.embedding(token_id.reshape(1), jnp.ones((4, 2)))
    assert np.isnan(rows).all()


def test_an_override_does_not_reach_a_compiled_program():
    x = random(0, 4, 5)
    with kernels.override("silu", lambda x: 0 * x):
        assert_close(ops.silu(x), jax.nn.silu(x), "float32")
        assert_close(jax.jit(ops.silu)(x), jax.nn.silu(x), "float32")


def test_residual_is_added_first():
    x, residual, weight = random(0, 4, 8), random(1, 4, 8), random(2, 8)

    def loss(norm):
        return lambda *a: sum(jnp.sum(jnp.sin(y)) for y in norm(*a))

    def formula(x, residual, weight):
        h = 0.5 * x + residual
        return rms(h, weight), h

    def op(x, residual, weight):
        return ops.rmsnorm(x, weight, residual=residual, x_scale=0.5)

    assert_close(op(x, residual, weight), formula(x, residual, weight), "float32")
    found = jax.grad(loss(op), (0, 1, 2))(x, residual, weight)
    assert_close(found, jax.grad(loss(formula), (0, 1, 2))(x, residual, weight), "float32")


@pytest.mark.parametrize("is_packed", [False, True])
def test_gradients_of_sinks_and_of_the_log_sum_exp(is_packed):
    pattern = kernels.Periodic(period=3, width=2)
    starts = np.array([0, 3, 7])

    def op(q, k, v, sinks):
        options = {"sinks": sinks, "causal": True, "pattern": pattern, "return_lse": True}
        if is_packed:
            return ops.attention_varlen(q, k, v, starts, starts, 4, 4, **options)
        return ops.attention(q[None], k[None], v[None], **options)

    with jax.enable_x64(True):
        arrays = [random(i, 7, h, 8, dtype="float64") for i, h in enumerate((4, 2, 2))]
        arrays.append(random(5, 4, dtype="float64"))
        check_grads(op, arrays, order=1, modes=["rev"], atol=1e-6, rtol=1e-6)
        mapped = jax.vmap(jax.grad(lambda *a: sum(map(jnp.sum, op(*a))), (0, 3)))
        for n, scale in enumerate((1.0, 3.0)):
            batch = [jnp.stack([a, 3 * a]) for a in arrays]
            one = jax.grad(lambda *a: sum(map(jnp.sum, op(*a))), (0, 3))(
                *(scale * a for a in arrays)
            )
            assert_close([g[n] for g in mapped(*batch)], one, "float64")


@pytest.mark.parametrize(
    "pattern", [kernels.Periodic(4, width=2), kernels.BlockSparse(np.eye(3, dtype=bool), 2, 2)]
)
def test_patterns_reach_the_kernel(pattern):
    q, k, v = (random(i, 1, 6, 2, 8) for i in range(3))
    found, lse = jax.jit(lambda *a: ops.attention(*a, pattern=pattern, return_lse=True))(q, k, v)
    starts = np.array([0, 6], np.int32)
    wanted = reference.attention_prefill(
        *(np.asarray(a)[0] for a in (q, k, v)),
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        causal=False,
        pattern=pattern,
        return_lse=True,
    )
    assert_close((found[0], lse[0]), wanted, "float32")
    assert not np.allclose(found, ops.attention(q, k, v))


def paged_case():
    """Return dense keys and values of two sequences, and the same in pages of 16."""
    k, v = random(1, 2, 20, 2, 8), random(2, 2, 20, 2, 8)
    tables = jnp.array([[3, 1], [0, 2]])
    pages = []
    for dense in (k, v):
        padded = np.zeros((2, 32, 2, 8), np.float32)
        padded[:, :20] = dense
        blocks = padded.reshape(2, 2, 16, 2, 8).transpose(0, 1, 3, 2, 4).reshape(4, 2, 16, 8)
        pages.append(jnp.zeros((4, 2, 16, 8)).at[tables.reshape(-1)].set(blocks))
    return k, v, *pages, tables


def test_paged_attention_decodes():
    k, v, k_pages, v_pages, tables = paged_case()
    q = random(0, 2, 2, 4, 8)
    found = jax.jit(ops.attention_paged)(q, k_pages, v_pages, tables, jnp.array([20, 20]))
    assert_close(found, dense_attention(q, k, v, hidden=causal_mask(2, 20)), "float32")
    mapped = jax.vmap(ops.attention_paged, (0, None, None, None, None))
    found = mapped(jnp.stack([q, -q]), k_pages, v_pages, tables, jnp.array([20, 20]))
    assert_close(found[1], dense_attention(-q, k, v, hidden=causal_mask(2, 20)), "float32")


def test_paged_attention_of_chunks():
    k, v, k_pages, v_pages, tables = paged_case()
    q = random(0, 8, 4, 8)
    found, lse = ops.attention_paged(
        *(q, k_pages, v_pages, tables, jnp.array([20, 20])),
        cu_seqlens_q=jnp.array([0, 5, 8]),
        max_seqlen_q=5,
        return_lse=True,
    )
    for b, rows in enumerate((slice(0, 5), slice(5, 8))):
        one = q[None, rows]
        mask = causal_mask(one.shape[1], 20)
        wanted = dense_attention(one, k[b : b + 1], v[b : b + 1], hidden=mask)
        assert_close(found[rows], wanted[0], "float32")
        scores = jnp.einsum("qhd,khd->qhk", q[rows], jnp.repeat(k[b], 2, axis=1)) * 8**-0.5
        scores = jnp.where(mask[:, None], -jnp.inf, scores)
        assert_close(lse[rows], jax.nn.logsumexp(scores, axis=-1), "float32")


def test_kv_store_writes_in_place_only_if_it_may():
    k, v = random(0, 3, 2, 8), random(1, 3, 2, 8)
    pages = jnp.zeros((2, 2, 16, 8))
    slots = jnp.array([5, -1, 17])
    k_pages, v_pages = jax.jit(ops.kv_store)(k, v, pages, pages, slots)
    assert not pages.any()  # still used here, so XLA made a copy
    wanted = np.zeros((2, 2, 16, 8), np.float32)
    wanted[0, :, 5], wanted[1, :, 1] = k[0], k[2]
    np.testing.assert_array_equal(k_pages, wanted)
    np.testing.assert_array_equal(v_pages[0, :, 5], v[0])
    where = k_pages.unsafe_buffer_pointer()
    store = jax.jit(ops.kv_store, donate_argnums=(2, 3))
    again, _ = store(k, v, k_pages, v_pages, slots + 1)
    assert again.unsafe_buffer_pointer() == where
    assert np.asarray(again)[0, :, 5].any() and np.asarray(again)[0, :, 6].any()


def test_a_loop_appends_and_attends():
    """A decode loop in one program: the carried pages are written in place."""
    keys, queries = random(0, 6, 1, 2, 8), random(1, 6, 1, 1, 4, 8)
    tables = jnp.array([[1, 0]])

    @jax.jit
    def decode(pages):
        def step(pages, inputs):
            i, key, q = inputs
            pages = ops.kv_store(key, key, *pages, i[None] + 16)
            return pages, ops.attention_paged(q, *pages, tables, i[None] + 1)

        return jax.lax.scan(step, pages, (jnp.arange(6), keys, queries))[1]

    found = decode((jnp.zeros((2, 2, 16, 8)),) * 2)
    dense = keys.reshape(1, 6, 2, 8)
    wanted = dense_attention(queries.reshape(1, 6, 4, 8), dense, dense, hidden=causal_mask(6, 6))
    assert_close(found.reshape(1, 6, 4, 8), wanted, "float32")


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16)])
def test_empty_arrays(shape):
    x = jnp.zeros(shape)
    assert jax.jit(ops.rmsnorm)(x, jnp.ones(16)).shape == shape
    assert jax.jit(ops.linear)(x, jnp.ones((3, 16))).shape == (*shape[:-1], 3)
    assert jax.jit(ops.embedding)(jnp.zeros(shape, int), jnp.ones((3, 5))).shape == (*shape, 5)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_route_and_its_gradient(score):
    logits, factors = random(0, 6, 8), random(1, 6, 3)

    def op(x):
        return ops.moe_route(x, 3, score=score, scale=1.5)

    def formula(x):
        scores = jax.nn.softmax(x) if score == "softmax" else jax.nn.sigmoid(x)
        weights, ids = jax.lax.top_k(scores, 3)
        return 1.5 * weights / weights.sum(-1, keepdims=True), ids

    assert_close(jax.jit(op)(logits), formula(logits), "float32")
    assert_close(jax.vmap(op)(logits.reshape(2, 3, 8))[0].reshape(6, 3), op(logits)[0], "float32")
    found, wanted = (
        jax.jit(jax.grad(lambda x, f=f: jnp.vdot(f(x)[0], factors)))(logits) for f in (op, formula)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float64", *DTYPES])
def test_cross_entropy_and_its_gradient(dtype):
    target = np.array([[0, 6, -100], [3, 3, 1]])

    def formula(logits):
        x = logits.astype(jnp.promote_types(dtype, jnp.float32))
        x = 5 * jnp.tanh(x / 5)
        lse = jax.nn.logsumexp(x, axis=-1)
        chosen = jnp.take_along_axis(x, jnp.maximum(target, 0)[..., None], axis=-1)[..., 0]
        losses = 0.9 * (lse - chosen) + 0.1 * (lse - x.mean(-1)) + 0.01 * lse**2
        return jnp.where(target == -100, 0, losses)

    def op(logits, **rest):
        options = {"softcap": 5.0, "z_loss": 0.01, "label_smoothing": 0.1}
        return ops.cross_entropy(logits, target, **options, **rest)

    with jax.enable_x64(dtype == "float64"):
        logits = random(0, 2, 3, 7, dtype=dtype)
        close = 1e-9 if dtype == "float64" else 1e-5
        losses = jax.jit(lambda x: op(x, reduction="none"))(logits)
        np.testing.assert_allclose(losses, formula(logits), rtol=close, atol=close)
        np.testing.assert_allclose(op(logits), formula(logits).sum() / 5, rtol=close)
        found = jax.jit(jax.grad(op))(logits)
        wanted = jax.grad(lambda x: formula(x).sum() / 5)(logits)
        assert found.dtype == logits.dtype
        assert_close(found, wanted, dtype)
        slope = jax.grad(lambda x: ops.cross_entropy(x, target[1]))
        assert_close(jax.vmap(slope)(logits)[0], slope(logits[0]), dtype)


@pytest.mark.parametrize("shape", [(0, 4), (5, 0)])
def test_linear_cross_entropy_refuses_a_weight_of_no_element(shape):
    with pytest.raises(ContractError, match="weight: must be of at least one element; got"):
        ops.linear_cross_entropy(random(0, 2, shape[1]), random(1, *shape), jnp.zeros(2, int))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_linear_cross_entropy_equals_its_parts(monkeypatch, dtype, reduction):
    module = importlib.import_module("engine.integrations.jax.linear_cross_entropy")
    monkeypatch.setattr(module, "_chunk_rows", lambda *_: 4)  # 4 + 4 + 2 rows
    target = jnp.array([[0, 6, -100, 2, 1], [3, 3, 1, -100, 5]])
    factors = random(4, 2, 5)

    def ours(x, weight, bias):
        options = {"softcap": 5.0, "reduction": reduction}
        losses = ops.linear_cross_entropy(x, weight, target, bias=bias, **options)
        return jnp.sum(losses * factors) if reduction == "none" else losses

    def parts(x, weight, bias):
        logits = (x @ weight.T + bias).astype(x.dtype)
        losses = ops.cross_entropy(logits, target, softcap=5.0, reduction=reduction)
        return jnp.sum(losses * factors) if reduction == "none" else losses

    with jax.enable_x64(dtype == "float64"):
        arrays = [random(i, *s, dtype=dtype) for i, s in enumerate([(2, 5, 8), (7, 8), (7,)])]
        close = 1e-9 if dtype == "float64" else 3e-3
        np.testing.assert_allclose(jax.jit(ours)(*arrays), parts(*arrays), rtol=close, atol=close)
        found, wanted = (jax.jit(jax.grad(f, (0, 1, 2)))(*arrays) for f in (ours, parts))
        mapped = jax.vmap(jax.grad(ours), (0, None, None))(
            jnp.stack([arrays[0], -arrays[0]]), *arrays[1:]
        )
        for a, b in zip((*found, mapped[0]), (*wanted, wanted[0]), strict=True):
            assert a.dtype == b.dtype == dtype
            np.testing.assert_allclose(a, b, rtol=close, atol=close)


def test_quantized_products():
    x = random(0, 4, 3, 128)
    weight = jnp.round(random(1, 16, 128))
    scales = jnp.linspace(0.5, 2, 16)
    wanted = x @ (weight * scales[:, None]).T
    for op, codes in (
        (ops.linear_fp8, weight.astype(jnp.float8_e4m3fn)),
        (ops.linear_int8, weight.astype(jnp.int8)),
    ):
        found = jax.jit(op)(x, codes, scales)
        error = jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted)
        assert error < 0.04, (op, error)
        assert_close(jax.vmap(op, (0, None, None))(x, codes, scales), found, "float32")


def test_scan_over_layers_and_its_gradient():
    weights = random(1, 5, 16)

    def run(norm):
        def step(x, weight):
            return norm(x + 1, weight), None

        return lambda x, w: jnp.sum(jnp.cos(jax.lax.scan(step, x, w)[0]))

    x = random(0, 3, 16)
    found = jax.jit(jax.value_and_grad(run(ops.rmsnorm), (0, 1)))(x, weights)
    assert_close(found, jax.value_and_grad(run(rms), (0, 1))(x, weights), "float32")


def test_checkpointing_recomputes():
    x, weight = random(0, 3, 16), random(1, 16)
    plain = jax.grad(lambda x: jnp.sum(ops.silu(ops.rmsnorm(x, weight))))
    saved = jax.grad(jax.checkpoint(lambda x: jnp.sum(ops.silu(ops.rmsnorm(x, weight)))))
    np.testing.assert_array_equal(jax.jit(saved)(x), jax.jit(plain)(x))


@pytest.mark.parametrize("case", ["rmsnorm", "layernorm", "swiglu", "geglu_exact", "gelu", "rope"])
def test_second_derivatives(case):
    with jax.enable_x64(True):
        op, formula, shape = CASES[case][:3]
        x, *rest = arguments(case, "float64")

        def slope(function):
            def loss(x):
                return sum(jnp.sum(y**3) for y in jax.tree.leaves(function(x, *rest)))

            return jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))(x)

        assert slope(op).shape == shape
        np.testing.assert_allclose(slope(op), slope(formula), rtol=1e-9, atol=1e-9)


def test_threads_do_not_disturb_each_other():
    x, weight = random(0, 64, 128), random(1, 128)
    functions = [jax.jit(lambda x, n=n: ops.rmsnorm(ops.silu(x + n), weight)) for n in range(2)]
    wanted = [np.asarray(f(x)) for f in functions]
    failed = []

    def work(n):
        for _ in range(100):
            if not np.array_equal(functions[n](x), wanted[n]):
                failed.append(n)

    threads = [threading.Thread(target=work, args=(n % 2,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_an_exported_program_needs_nothing_of_its_process():
    """The attribute of a call names the op and its options: nothing refers to this process."""
    exported = jax.export.export(
        jax.jit(lambda x, w: ops.rmsnorm(x, w, eps=0.5)),
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("engine.rmsnorm")],
    )(jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.float32))
    assert '"eps", 0.5' in exported.mlir_module().replace("\\22", '"')
    x, weight = random(0, 4, 8), random(1, 8)
    np.testing.assert_array_equal(exported.call(x, weight), ops.rmsnorm(x, weight, eps=0.5))


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_sums_the_gradient_of_a_shared_weight(check_vma):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, shared = jax.sharding.PartitionSpec("i"), jax.sharding.PartitionSpec()

    def run(x, weight):
        y = ops.rmsnorm(ops.silu(x), weight).reshape(-1, 4, 2, 8)
        return ops.attention(y, y, y, causal=True)

    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(rows, shared), out_specs=rows, check_vma=check_vma
    )
    arrays = random(0, 4, 64), random(1, 64)
    assert_close(jax.jit(mapped)(*arrays), run(*arrays), "float32")
    found, wanted = (
        jax.jit(jax.grad(lambda *a, f=f: jnp.sum(f(*a) ** 2), (0, 1)))(*arrays)
        for f in (mapped, run)
    )
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_arrays_divided_along_an_explicit_mesh_axis(case):
    """`jax.make_mesh` makes such axes; a gradient is divided as its argument is."""
    op = CASES[case][0]
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    whole = arguments(case, "float32")
    axes = [next((i for i, size in enumerate(a.shape) if size % 2 == 0), None) for a in whole]
    specs = [
        jax.sharding.PartitionSpec(*("i" if i == axis else None for i in range(a.ndim)))
        for a, axis in zip(whole, axes, strict=True)
    ]
    arrays = [
        jax.device_put(a, jax.NamedSharding(mesh, spec))
        for a, spec in zip(whole, specs, strict=True)
    ]
    gradient = jax.grad(
        lambda *a: sum(jnp.sum(y**2) for y in jax.tree.leaves(op(*a))), tuple(range(len(whole)))
    )
    with jax.set_mesh(mesh):
        assert_close(jax.jit(op)(*arrays), op(*whole), "float32")
        found = jax.jit(gradient)(*arrays)
    for a, b, spec in zip(found, gradient(*whole), specs, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
        assert a.sharding.spec == spec


TARGET = np.array([1, 2, -100])
STRICT_CASES = {
    **{name: (case[0], case[2:]) for name, case in CASES.items()},
    "attention_sinks": (
        lambda q, s: ops.attention(q, q, q, sinks=s, return_lse=True),
        ((2, 3, 4, 8), (4,)),
    ),
    "moe_route": (lambda logits: ops.moe_route(logits, 2)[0], ((3, 8),)),
    "rmsnorm_residual": (
        lambda x, w: ops.rmsnorm(x, w, residual=x, x_scale=0.5),
        ((3, 8), (8,)),
    ),
    **{
        f"cross_entropy_{reduction}": (
            lambda x, reduction=reduction: ops.cross_entropy(x, TARGET, reduction=reduction),
            ((3, 8),),
        )
        for reduction in ("mean", "sum")
    },
    **{
        f"linear_cross_entropy_{reduction}": (
            lambda x, w, b, reduction=reduction: ops.linear_cross_entropy(
                x, w, TARGET, bias=b, reduction=reduction
            ),
            ((3, 8), (7, 8), (7,)),
        )
        for reduction in ("mean", "none")
    },
}


@pytest.mark.parametrize("case", STRICT_CASES)
def test_dtypes_are_not_promoted_implicitly(case):
    """`jax_numpy_dtype_promotion="strict"` is for debugging: it finds sums of two dtypes."""
    op, shapes = STRICT_CASES[case]
    arrays = [random(i, 2, *shape, dtype="bfloat16") for i, shape in enumerate(shapes)]

    def loss(*elements):
        return sum(leaf.astype("float32").sum() for leaf in jax.tree.leaves(op(*elements)))

    gradient = jax.grad(loss, tuple(range(len(arrays))))
    with jax.numpy_dtype_promotion("strict"):
        batch = jax.vmap(gradient)(*arrays)
        found = gradient(*(a[0] for a in arrays))
    assert_close([g[0] for g in batch], found, "bfloat16")


def test_kernels_take_arrays_outside_jit():
    x = random(0, 4, 8)
    found = jnp.from_dlpack(kernels.silu(x))
    assert_close(found, jax.nn.silu(x), "float32")
    found = jnp.asarray(kernels.silu(np.asarray(x.astype(jnp.bfloat16))))
    assert found.dtype == jnp.bfloat16
    assert_close(found, jax.nn.silu(x), "bfloat16")


def test_the_example_of_the_documentation():
    page = (Path(__file__).parents[2] / "docs/integrations/jax.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(code, names)
    shapes = [g.shape for g in names["gradients"]]
    assert shapes == [(2, 16, 64), (64,), (192, 64)]
    assert all(np.isfinite(g).all() and np.any(g) for g in names["gradients"])


X = np.ones((2, 8), np.float32)
BAD_CALLS = {
    "weight: must have shape .N,.; N = 8 from x; got .5,": lambda: ops.rmsnorm(X, X[0, :5]),
    "residual: must be float32; got float16": lambda: ops.rmsnorm(
        X, X[0], residual=X.astype(np.float16)
    ),
    "x: must be an array; got list": lambda: ops.silu([1.0]),
    "x: must be .*; got int32": lambda: ops.silu(np.ones(3, np.int32)),
    "eps: must be a number from 0.0 to inf; got -1": lambda: ops.rmsnorm(X, X[0], eps=-1.0),
    "x_scale: must be 1 without residual; got 2.0": lambda: ops.rmsnorm(X, X[0], x_scale=2.0),
    "x: must be of rows .gate . up., an even number; got .2, 7": lambda: ops.swiglu(X[:, :7]),
    "approximate: must be 'tanh' or 'none'; got 'erf'": lambda: ops.gelu(X, approximate="erf"),
    "k: must have shape .B, Sk, K, D.; B = 1 from q; got .2, ": lambda: ops.attention(
        X.reshape(1, 1, 2, 8), X.reshape(2, 1, 1, 8), X.reshape(2, 1, 1, 8)
    ),
    "window: must be 0 unless causal; got 3": lambda: ops.attention(
        *[X.reshape(1, 2, 1, 8)] * 3, window=3
    ),
    "pattern: must be BlockSparse, Periodic or None; got 'str'": lambda: ops.attention(
        *[X.reshape(1, 2, 1, 8)] * 3, pattern="causal"
    ),
    "cu_seqlens_q: must be integers; got float32": lambda: ops.attention_varlen(
        *[X.reshape(2, 1, 8)] * 3, np.ones(2, np.float32), START, 1, 1
    ),
    "activation: must be one of .*; got 'tanh'": lambda: ops.linear(X, X, activation="tanh"),
    "k_pages: .* size .*|block_size: must be one of": lambda: ops.attention_paged(
        *(X.reshape(2, 1, 1, 8), X.reshape(1, 1, 2, 8), X.reshape(1, 1, 2, 8)), START[:1], START[:1]
    ),
    "num_groups: must be a divisor of the 8 experts; got 3": lambda: ops.moe_route(
        X, 2, num_groups=3
    ),
    "top_groups: must be groups with 3 experts together; got 1": lambda: ops.moe_route(
        X, 3, num_groups=4
    ),
    "logits: must be of at least one class; got .2, 0": lambda: ops.cross_entropy(X[:, :0], IDS[0]),
    "ignore_index: must be an int32; got 1.0": lambda: ops.cross_entropy(
        X, IDS[0], ignore_index=1.0
    ),
    "ignore_index: must be an int32; got 1099511627776": lambda: ops.linear_cross_entropy(
        X, X, IDS[0], ignore_index=2**40
    ),
    "positions: must be .*; got .3,": lambda: ops.rope(
        X.reshape(2, 1, 8), X.reshape(2, 1, 8), COS_SIN, np.arange(3)
    ),
}


def test_numpys_numbers_are_numbers():
    """As a configuration's may be."""
    found = ops.moe_route(X, np.int64(2), num_groups=np.int64(2), top_groups=np.int64(1))
    assert_close(found, ops.moe_route(X, 2, num_groups=2, top_groups=1), "float32")


@pytest.mark.parametrize("message", BAD_CALLS)
def test_bad_arguments_are_named_when_traced(message):
    with pytest.raises((ContractError, ShapeError, DTypeError), match=message):
        BAD_CALLS[message]()


def test_bad_values_are_named_when_run():
    _, _, k_pages, v_pages, tables = paged_case()
    q = random(0, 2, 1, 4, 8)
    call = jax.jit(ops.attention_paged)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="block_tables: must be ids from 0 to 3; got 9"
    ):
        call(q, k_pages, v_pages, tables.at[0, 0].set(9), jnp.array([20, 20])).block_until_ready()
    call(q, k_pages, v_pages, tables, jnp.array([20, 20])).block_until_ready()  # still works


def test_what_has_no_derivative_says_so():
    _, _, k_pages, v_pages, tables = paged_case()
    q = random(0, 2, 1, 4, 8)

    def loss(q):
        return ops.attention_paged(q, k_pages, v_pages, tables, jnp.array([20, 20])).sum()

    with pytest.raises(EngineError, match="attention_paged: has no derivative"):
        jax.grad(loss)(q)
    with pytest.raises(EngineError, match="attention_backward: has no derivative"):
        jax.grad(lambda q: jax.grad(lambda q: ops.attention(q, q, q).sum())(q).sum())(q)
