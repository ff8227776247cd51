"""moe_route: the kernels against the mirror, the mirror against a loop in float64, the sort."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels._workspace import workspace
from engine.kernels.moe_route import chunk_tokens
from engine.testing.cases_moe import distinct_logits, tied_logits
from engine.testing.tolerances import assert_close

# (T, E, k): no tokens, one block, many; every entry point's width and sizes in between.
SHAPES = (
    (0, 8, 2),
    (1, 4, 1),
    (1, 128, 8),
    (3, 60, 4),
    (16, 512, 16),
    (17, 1, 1),
    (64, 32, 4),
    (64, 512, 8),
    (65, 64, 6),
    (65, 33, 2),
    (300, 256, 8),
    (300, 8, 8),
    (300, 512, 16),
    (5000, 128, 8),
    (5000, 16, 1),
    (1, 768, 12),
    (16, 768, 16),
    (300, 700, 12),
    (5000, 768, 12),
)
_ARRAYS = ("correction", "expert_scale")
# (options, number of experts)
OPTIONS = (
    ({"renormalize": False}, 60),
    ({"score": "sigmoid", "scale": 2.5}, 60),
    ({"correction": True, "score": "sigmoid"}, 100),
    ({"num_groups": 8, "top_groups": 3}, 64),
    ({"num_groups": 8, "top_groups": 4, "correction": True, "score": "sigmoid"}, 256),
    ({"num_groups": 5, "top_groups": 5, "renormalize": False, "scale": 0.5}, 60),
    ({"num_groups": 32, "top_groups": 9, "correction": True}, 64),
    ({"num_groups": 3, "top_groups": 2, "score": "sigmoid"}, 300),
    ({"expert_scale": True, "scale": 0.5}, 60),
    ({"expert_scale": True, "renormalize": False}, 128),
)


def _correction(num_experts):
    """Return small integers as logits, so distinct scores stay well separated."""
    return np.random.default_rng(5).integers(-1, 2, num_experts).astype(np.float32)


def _arguments(options, num_experts):
    given = {name: _correction(num_experts) for name in _ARRAYS if options.get(name)}
    return {**options, **given}


def _assert_same(got, want):
    for name in ("experts", "order", "offsets"):
        host = to_numpy(getattr(got, name))
        np.testing.assert_array_equal(host, getattr(want, name), err_msg=name, strict=True)
    assert_close(got.weights, want.weights, reduction=64, name="weights")


def _assert_sorted(routing, num_experts):
    """`order` is a stable sort by expert, and `offsets` are where each expert begins."""
    experts, order, offsets = (to_numpy(x) for x in (routing.experts, *routing[2:]))
    flat = experts.reshape(-1)
    assert (flat >= 0).all() and (flat < num_experts).all()
    assert all(len(set(row)) == len(row) for row in experts.tolist())
    np.testing.assert_array_equal(np.sort(order), np.arange(flat.size))
    keys = flat[order].astype(np.int64) * flat.size + order
    assert (np.diff(keys) > 0).all()
    np.testing.assert_array_equal(np.diff(offsets), np.bincount(flat, minlength=num_experts))
    assert offsets[0] == 0 and len(offsets) == num_experts + 1


def _loop(logits, top_k, score="softmax", correction=None, num_groups=1, top_groups=1,
          renormalize=True, scale=1.0, expert_scale=None):  # fmt: skip
    """Return experts and weights, token by token in float64."""
    experts, weights = [], []
    for row in logits.astype(np.float64):
        exps = np.exp(row - row.max())
        scores = exps / exps.sum() if score == "softmax" else 1 / (1 + np.exp(-row))
        ranked = scores if correction is None else scores + correction
        size = len(row) // num_groups
        kept = range(len(row))
        if num_groups > 1:
            take = 1 if correction is None else 2
            ranks = [sum(sorted(ranked[g * size :][:size])[-take:]) for g in range(num_groups)]
            best = sorted(range(num_groups), key=lambda g: (-ranks[g], g))[:top_groups]
            kept = [e for e in range(len(row)) if e // size in best]
        chosen = sorted(kept, key=lambda e: (-ranked[e], e))[:top_k]
        own = scores[chosen]
        experts.append(chosen)
        factor = scale if expert_scale is None else scale * expert_scale[chosen]
        weights.append(own / (own.sum() if renormalize else 1) * factor)
    return np.array(experts), np.array(weights)


@pytest.mark.grid(("num_tokens", "num_experts", "top_k"), SHAPES)
def test_matches_mirror(xp, num_tokens, num_experts, top_k):
    logits = distinct_logits(num_tokens, num_experts, seed=1)
    got = kernels.moe_route(xp.asarray(logits), top_k)
    _assert_same(got, reference.moe_route(logits, top_k))
    _assert_sorted(got, num_experts)


@pytest.mark.grid("num_tokens", [0, 1, 17, 300])
@pytest.mark.grid(("options", "num_experts"), OPTIONS)
def test_options_match_mirror(xp, options, num_experts, num_tokens):
    logits = distinct_logits(num_tokens, num_experts, seed=2)
    arguments = _arguments(options, num_experts)
    want = reference.moe_route(logits, 6, **arguments)
    arguments |= {name: xp.asarray(arguments[name]) for name in _ARRAYS if name in arguments}
    _assert_same(kernels.moe_route(xp.asarray(logits), 6, **arguments), want)


def _hf_sparsemixer(row, jitter):
    """Weights of the two chosen experts of one token, as the reference of Phi-3.5-MoE has them."""
    weights, left = [], row.astype(np.float64)
    for _ in range(2):
        best = left.max()
        factor = np.maximum(np.abs(row), best)
        kept = np.where((best - row) / factor > 2 * jitter, -np.inf, left)
        exps = np.exp(kept - best)
        weights.append((exps / exps.sum())[left.argmax()])
        left[left.argmax()] = -np.inf
    return weights


@pytest.mark.grid("num_tokens", [0, 1, 16, 17, 300])
@pytest.mark.grid(("num_experts", "jitter"), [(16, 0.01), (16, 0.3), (32, 0.2), (2, 0.0), (7, 1.0)])
def test_sparsemixer(xp, num_tokens, num_experts, jitter):
    logits = distinct_logits(num_tokens, num_experts, seed=10)
    logits -= np.float32(logits.mean()) if logits.size else 0  # of both signs
    options = {"score": "sparsemixer", "jitter": jitter, "renormalize": False, "scale": 1.5}
    load = xp.zeros(num_experts, np.int64)
    got = kernels.moe_route(xp.asarray(logits), 2, load=load, **options)
    want = reference.moe_route(logits, 2, **options)
    _assert_same(got, want)
    _assert_sorted(got, num_experts)
    assert int(load.sum()) == 2 * num_tokens
    rows = np.array([_hf_sparsemixer(row, jitter) for row in logits]).reshape(-1, 2)
    np.testing.assert_allclose(want.weights, 1.5 * rows, rtol=1e-5)
    if num_experts == 16 and num_tokens:  # a wide jitter shares the weight with other experts
        assert (want.weights.max() < 1.2) == (jitter == 0.3)


def test_what_a_sparsemixer_lacks(xp):
    logits = xp.zeros((3, 33), np.float32)
    options = {"score": "sparsemixer", "renormalize": False}
    with pytest.raises(ContractError, match=r"logits: must be of at most 32 experts; got 33"):
        kernels.moe_route(logits, 2, **options)
    few = xp.zeros((3, 8), np.float32)
    with pytest.raises(ContractError, match=r"renormalize: must be False with sparsemixer"):
        kernels.moe_route(few, 2, score="sparsemixer")
    with pytest.raises(ContractError, match=r"num_groups: must be 1 with sparsemixer; got \d"):
        kernels.moe_route(few, 2, num_groups=2, top_groups=2, **options)
    with pytest.raises(ContractError, match=r"correction: must be None .*; got an array of"):
        kernels.moe_route(few, 2, correction=xp.zeros(8, np.float32), **options)
    with pytest.raises(ContractError, match=r"jitter: must be a number from 0"):
        kernels.moe_route(few, 2, jitter=-1.0, **options)


@pytest.mark.parametrize("num_tokens", [1, 8, 64, 65, 300])
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (128, 8), (300, 16)])
def test_of_equals_the_first(xp, num_tokens, num_experts, top_k):
    logits = tied_logits(num_tokens, num_experts, seed=3)
    got = kernels.moe_route(xp.asarray(logits), top_k)
    _assert_same(got, reference.moe_route(logits, top_k))
    same = kernels.moe_route(xp.zeros((num_tokens, num_experts), np.float32), top_k)
    assert (to_numpy(same.experts) == np.arange(top_k)).all()


@pytest.mark.parametrize("num_tokens", [1, 64, 2000])
@pytest.mark.parametrize("expert", [0, 77, 127])
def test_all_tokens_to_one_expert(xp, num_tokens, expert):
    logits = xp.zeros((num_tokens, 128), np.float32)
    logits[:, expert] = 9
    got = kernels.moe_route(logits, 1)
    assert bool((got.experts == expert).all())
    assert bool((got.weights == 1).all())
    assert bool((got.order == xp.arange(num_tokens)).all())
    _assert_sorted(got, 128)


@pytest.mark.parametrize("num_tokens", [9, 100])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"score": "sigmoid", "renormalize": False},
        {"num_groups": 4, "top_groups": 2, "correction": True},
    ],
)
def test_any_logits_choose_experts_that_exist(xp, options, num_tokens):
    """Rows with infinities or NaN still get distinct experts, and other rows are unaffected."""
    logits = distinct_logits(num_tokens, 40, seed=4)
    clean = logits.copy()
    for row, value in enumerate([np.nan, np.inf, -np.inf]):
        logits[row] = value
        logits[row + 3, row::3] = value
    arguments = _arguments(options, 40)
    want = reference.moe_route(clean, 8, **arguments)
    arguments |= {name: xp.asarray(arguments[name]) for name in _ARRAYS if name in arguments}
    got = kernels.moe_route(xp.asarray(logits), 8, **arguments)
    _assert_sorted(got, 40)
    np.testing.assert_array_equal(to_numpy(got.experts)[6:], want.experts[6:])


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [7, 4096])
def test_nothing_is_read_from_the_workspace(cp, num_tokens):
    logits = distinct_logits(num_tokens, 128, seed=6)
    want = reference.moe_route(logits, 8)
    for value in (-1.0, float("nan")):
        workspace(1).fill(value)
        _assert_same(kernels.moe_route(cp.asarray(logits), 8), want)


@pytest.mark.parametrize("num_tokens", [5, 16, 17, 700])
def test_load_counts_the_pairs_of_tokens_with_a_slot(xp, num_tokens):
    logits = distinct_logits(num_tokens, 48, seed=9)
    slots = np.arange(num_tokens, dtype=np.int64)
    slots[::3] = -1  # padding
    want = reference.moe_route(logits, 4)
    load = xp.full(48, 1 << 40, np.int64)
    _assert_same(kernels.moe_route(xp.asarray(logits), 4, load=load), want)
    once = np.bincount(want.experts.reshape(-1), minlength=48) + (1 << 40)
    np.testing.assert_array_equal(to_numpy(load), once)
    got = kernels.moe_route(xp.asarray(logits), 4, slots=xp.asarray(slots), load=load)
    _assert_same(got, want)  # padding is routed as well
    again = np.bincount(want.experts[slots >= 0].reshape(-1), minlength=48)
    np.testing.assert_array_equal(to_numpy(load), once + again)


@pytest.mark.grid("num_tokens", [0, 1, 16, 17, 64, 65, 300, 5000])
@pytest.mark.grid(("num_experts", "top_k"), [(8, 2), (32, 4), (100, 16), (256, 8), (512, 10)])
def test_a_shared_expert_comes_last(xp, num_tokens, num_experts, top_k):
    logits = distinct_logits(num_tokens, num_experts + 1, seed=10)
    logits[:, -1] = np.linspace(-9, 9, num_tokens)
    options = {"score": "sigmoid", "scale": 2.5, "num_groups": 4, "top_groups": 3}
    load = xp.zeros(num_experts, np.int64)
    got = kernels.moe_route(xp.asarray(logits), top_k, num_shared=1, load=load, **options)
    _assert_same(got, reference.moe_route(logits, top_k, num_shared=1, **options))
    _assert_sorted(got, num_experts + 1)
    others = reference.moe_route(np.ascontiguousarray(logits[:, :-1]), top_k, **options)
    np.testing.assert_array_equal(to_numpy(got.experts)[:, :-1], others.experts)
    weights = to_numpy(got.weights)
    assert_close(weights[:, :-1].copy(), others.weights, reduction=64)
    assert (to_numpy(got.experts)[:, -1] == num_experts).all()
    gates = 1 / (1 + np.exp(-logits[:, -1].astype(np.float64)))
    np.testing.assert_allclose(weights[:, -1], gates, rtol=2e-6)
    np.testing.assert_array_equal(to_numpy(load), np.diff(others.offsets))


def test_views(xp):
    logits = distinct_logits(30, 24, seed=7)
    view = xp.asarray(np.repeat(logits, 2, axis=1))[:, ::2]
    _assert_same(kernels.moe_route(view, 3), reference.moe_route(logits, 3))


@pytest.mark.parametrize(("options", "num_experts"), [({}, 60), *OPTIONS])
def test_mirror_is_the_loop(options, num_experts):
    logits = distinct_logits(300, num_experts, seed=2)
    arguments = _arguments(options, num_experts)
    routing = reference.moe_route(logits, 6, **arguments)
    experts, weights = _loop(logits, 6, **arguments)
    np.testing.assert_array_equal(routing.experts, experts)
    np.testing.assert_allclose(routing.weights, weights, rtol=2e-5)
    _assert_sorted(routing, num_experts)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_order_sorts_the_pairs_and_keeps_their_order(data):
    num_experts = data.draw(st.integers(1, 40), "num_experts")
    top_k = data.draw(st.integers(1, min(num_experts, 8)), "top_k")
    num_tokens = data.draw(st.integers(0, 90), "num_tokens")
    logits = tied_logits(num_tokens, num_experts, data.draw(st.integers(0, 99), "seed"))
    _assert_sorted(kernels.moe_route(logits, top_k), num_experts)


def test_renormalized_weights_are_the_softmax_of_the_chosen(xp):
    logits = distinct_logits(40, 96, seed=8)
    got = kernels.moe_route(xp.asarray(logits), 7)
    chosen = np.take_along_axis(logits, to_numpy(got.experts), axis=1).astype(np.float64)
    want = np.exp(chosen) / np.exp(chosen).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(to_numpy(got.weights), want, rtol=2e-6)


def test_chunks_cover_all_tokens():
    for num_tokens in (17, 65, 100, 2048, 2049, 5000, 100_000, 1_000_000):
        chunk = chunk_tokens(num_tokens)
        assert chunk % 16 == 0 and 0 < num_tokens <= chunk * 128


def test_contract(xp):
    logits = xp.zeros((3, 8), np.float32)
    op = kernels.moe_route
    with pytest.raises(DTypeError, match=r"logits: must be float32.*; got float16"):
        op(logits.astype(np.float16), 2)
    with pytest.raises(ShapeError, match=r"logits: must have shape \(T, E\)"):
        op(logits[0], 2)
    with pytest.raises(ContractError, match=r"logits: must be of 1 to 768 experts; got 769"):
        op(xp.zeros((1, 769), np.float32), 2)
    for top_k in (0, 9, True, 2.0):
        with pytest.raises(ContractError, match=rf"top_k: must be from 1 to 8; got {top_k}"):
            op(logits, top_k)
    with pytest.raises(ContractError, match=r"top_k: must be from 1 to 16; got 17"):
        op(xp.zeros((1, 40), np.float32), 17)
    with pytest.raises(ContractError, match=r"score: must be one of .*; got 'relu'"):
        op(logits, 2, score="relu")
    with pytest.raises(ShapeError, match=r"correction: must have shape \(E,\); E = 8 from logits"):
        op(logits, 2, correction=xp.zeros(7, np.float32))
    with pytest.raises(ShapeError, match=r"slots: must have shape \(T,\); T = 3 from logits"):
        op(logits, 2, slots=xp.zeros(2, np.int64))
    with pytest.raises(DTypeError, match=r"load: must be int64; got int32"):
        op(logits, 2, load=xp.zeros(8, np.int32))
    with pytest.raises(ContractError, match=r"num_groups: must be a divisor of the 8 .*; got 3"):
        op(logits, 2, num_groups=3)
    with pytest.raises(ContractError, match=r"num_groups: must be at most 32; got 64"):
        op(xp.zeros((1, 64), np.float32), 2, num_groups=64, top_groups=2)
    with pytest.raises(ContractError, match=r"num_groups: must be at most 4; got 8"):
        op(logits, 2, num_groups=8, top_groups=2, correction=xp.zeros(8, np.float32))
    with pytest.raises(ContractError, match=r"top_groups: must be from 1 to 4; got 5"):
        op(logits, 2, num_groups=4, top_groups=5)
    with pytest.raises(ContractError, match=r"top_groups: must be groups with 4 .*; got 1"):
        op(logits, 4, num_groups=4, top_groups=1)
    with pytest.raises(ContractError, match=r"num_shared: must be 0 or 1; got 2"):
        op(logits, 2, num_shared=2)
    with pytest.raises(ShapeError, match=r"load: must have shape \(7,\)"):
        op(logits, 2, num_shared=1, load=xp.zeros(8, np.int64))
    with pytest.raises(ContractError, match=r"scale: must be a number from .*; got nan"):
        op(logits, 2, scale=float("nan"))
