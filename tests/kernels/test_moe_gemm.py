"""moe_gemm: the kernels against the mirror, the mirror against a loop in float64, the choice."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.dtypes import np_dtype
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels.moe_gemm import portable
from engine.kernels.moe_gemm.operands import MoeOperands
from engine.kernels.moe_gemm.portable import choose_config, tile_configs
from engine.reference import Routing
from engine.testing import cases
from engine.testing.cases_elementwise import assert_guards, misaligned
from engine.testing.cases_moe import routing_of
from engine.testing.tolerances import assert_close

# (T, E, k, K, R): one token, few and many per expert, more experts than pairs, widths that are not
# multiples of a tile or vector, one expert, sizes of 0.
SHAPES = (
    (1, 4, 2, 64, 96),
    (3, 128, 8, 128, 192),
    (17, 8, 1, 72, 264),
    (64, 60, 4, 256, 128),
    (65, 16, 2, 264, 72),
    (300, 5, 3, 136, 520),
    (300, 256, 8, 64, 64),
    (40, 1, 1, 520, 40),
    (9, 6, 2, 63, 50),
    (130, 7, 3, 33, 22),
    (5, 3, 2, 1, 2),
    (0, 4, 2, 64, 32),
    (4, 4, 2, 64, 0),
)
ACTIVATIONS = (None, "swiglu", "swiglu_clamped", "geglu")
ROUTERS = ("random", "one", "few")


def _routing(num_tokens, num_experts, top_k, router="random"):
    """Route tokens to random experts; all to the same ones; to a third of the experts."""
    rng = np.random.default_rng([num_tokens, num_experts, top_k])
    if router == "one":
        chosen = np.tile(np.arange(num_experts)[-top_k:], (num_tokens, 1))
    else:
        among = num_experts if router == "random" else max(top_k, num_experts // 3)
        names = rng.permutation(num_experts)[:among]
        chosen = names[np.argsort(rng.random((num_tokens, among)), axis=1)[:, :top_k]]
    return routing_of(chosen, num_experts, seed=num_tokens)


def _inputs(shape, dtype, *, scatter=False):
    num_tokens, num_experts, top_k, k, rows = shape
    x = cases.normal((num_tokens * top_k if scatter else num_tokens, k), dtype, seed=1)
    weight = cases.normal((num_experts, rows, k), dtype, seed=2, scale=max(k, 1) ** -0.5)
    return x, weight, cases.normal((num_experts, rows), dtype, seed=3)


def _on(xp, routing):
    return Routing(*cases.to_module(xp, *routing))


def _loop(x, weight, routing, bias=None, activation=None, alpha=1.702, limit=7.0, scatter=False):
    """Return the result pair by pair in float64."""
    (_, top_k), rows = routing.experts.shape, weight.shape[1]
    result = np.zeros((len(routing.order), rows // 2 if activation else rows))
    for place, pair in enumerate(routing.order):
        expert = routing.experts.reshape(-1)[pair]
        row = x[place if scatter else pair // top_k].astype(np.float64)
        y = weight[expert].astype(np.float64) @ row
        if bias is not None:
            y += bias[expert].astype(np.float64)
        if activation:
            gate, up = y[: rows // 2], y[rows // 2 :]
            if activation == "swiglu_clamped":
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + 1
            slope = alpha if activation == "swiglu_clamped" else 1
            if activation == "geglu":
                slope = 2 * math.sqrt(2 / math.pi) * (1 + 0.044715 * gate**2)
            y = gate / (1 + np.exp(-slope * gate)) * up
        result[pair if scatter else place] = y * (
            routing.weights.reshape(-1)[pair] if scatter else 1
        )
    return result


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("scatter", [False, True])
@pytest.mark.grid("shape", SHAPES)
def test_matches_mirror(xp, tier, shape, scatter, dtype):
    x, weight, _ = _inputs(shape, dtype, scatter=scatter)
    for router in ROUTERS:
        routing = _routing(*shape[:3], router)
        want = reference.moe_gemm(x, weight, routing, scatter=scatter)
        out, buffer = cases.guarded(xp, want.shape, want.dtype)
        arrays = cases.to_module(xp, x, weight)
        got = kernels.moe_gemm(*arrays, _on(xp, routing), scatter=scatter, out=out)
        assert got is out
        assert_close(got, want, reduction=shape[3], name=router)
        assert_guards(buffer)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("activation", ACTIVATIONS)
@pytest.mark.grid("shape", [s for s in SHAPES if s[0] and s[4]])
def test_epilogue_matches_mirror(xp, tier, shape, activation, dtype):
    for scatter in (False, True):
        x, weight, bias = _inputs(shape, dtype, scatter=scatter)
        routing = _routing(*shape[:3])
        options = {"activation": activation, "scatter": scatter, "alpha": 1.5, "limit": 1.25}
        want = reference.moe_gemm(x, weight, routing, bias=bias, **options)
        out, buffer = cases.guarded(xp, want.shape, want.dtype)
        gx, gw, gb = cases.to_module(xp, x, weight, bias)
        kernels.moe_gemm(gx, gw, _on(xp, routing), bias=gb, **options, pdl=True, out=out)
        assert_close(out, want, reduction=shape[3])
        assert_guards(buffer)


@pytest.mark.gpu
@pytest.mark.grid(
    ("dtype", "config"),
    [
        pytest.param(dtype, config, id=f"{dtype}-{config.kernel}")
        for dtype in cases.DTYPES
        for config in tile_configs(dtype)
    ],
)
@pytest.mark.grid("activation", ACTIVATIONS)
def test_every_tile_matches_mirror(cp, monkeypatch, config, dtype, activation):
    """A tile may hold any number of an expert's rows."""
    monkeypatch.setenv("ENGINE_KERNEL_TIER", "portable")
    monkeypatch.setattr(portable, "choose_config", lambda *_, **__: config)
    for shape in ((1, 4, 2, 64, 96), (3, 128, 8, 128, 192), (300, 5, 3, 136, 520)):
        for router in ROUTERS:
            routing = _routing(*shape[:3], router)
            for scatter in (False, True):
                x, weight, bias = _inputs(shape, dtype, scatter=scatter)
                options = {"activation": activation, "scatter": scatter}
                want = reference.moe_gemm(x, weight, routing, bias=bias, **options)
                out, buffer = cases.guarded(cp, want.shape, want.dtype)
                gx, gw, gb = cases.to_module(cp, x, weight, bias)
                kernels.moe_gemm(gx, gw, _on(cp, routing), bias=gb, **options, out=out)
                assert_close(out, want, reduction=shape[3], name=router)
                assert_guards(buffer)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("scatter", [False, True])
def test_misaligned_and_views(xp, tier, scatter, dtype):
    shape = (9, 4, 2, 64, 48)
    x, weight, bias = _inputs(shape, dtype, scatter=scatter)
    routing = _routing(*shape[:3])
    options = {"activation": "swiglu", "scatter": scatter}
    want = reference.moe_gemm(x, weight, routing, bias=bias, **options)
    moved = [misaligned(xp, array) for array in (x, weight, bias)]
    got = kernels.moe_gemm(*moved[:2], _on(xp, routing), bias=moved[2], **options)
    assert_close(got, want, reduction=64)
    views = [xp.asarray(np.repeat(array, 2, axis=-1))[..., ::2] for array in (x, weight, bias)]
    got = kernels.moe_gemm(*views[:2], _on(xp, routing), bias=views[2], **options)
    assert_close(got, want, reduction=64)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_deterministic_rows_do_not_depend_on_the_company(xp, tier, dtype):
    shape = (70, 4, 2, 136, 64)
    x, weight, bias = _inputs(shape, dtype)
    gx, gw, gb = cases.to_module(xp, x, weight, bias)
    options = {"bias": gb, "activation": "swiglu", "deterministic": True}
    routing = _routing(*shape[:3])
    whole = to_numpy(kernels.moe_gemm(gx, gw, _on(xp, routing), **options))
    for token in (0, 33, 69):
        alone = routing_of(routing.experts[token : token + 1], 4)
        got = to_numpy(kernels.moe_gemm(gx[token : token + 1], gw, _on(xp, alone), **options))
        places = np.argsort(routing.order)[2 * token + alone.order]
        np.testing.assert_array_equal(got.view(np.uint8), whole[places].view(np.uint8))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_experts_without_tokens_are_not_read(xp, tier, dtype):
    shape = (6, 9, 2, 64, 64)
    x, weight, _ = _inputs(shape, dtype)
    routing = routing_of([[1, 7]] * 6, 9)
    want = reference.moe_gemm(x, weight, routing)
    weight[[e for e in range(9) if e not in (1, 7)]] = np.nan
    got = kernels.moe_gemm(*cases.to_module(xp, x, weight), _on(xp, routing))
    assert_close(got, want, reduction=64)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("scatter", [False, True])
@pytest.mark.grid("shape", [(1, 4, 2, 64, 96), (33, 7, 3, 64, 64), (300, 5, 3, 136, 520)])
def test_a_run_of_experts(xp, tier, shape, scatter, dtype):
    """Offsets may start late and end early: rows outside are neither computed nor written."""
    num_experts = shape[1]
    x, weight, bias = _inputs(shape, dtype, scatter=scatter)
    for router in ROUTERS:
        routing = _routing(*shape[:3], router)
        want = reference.moe_gemm(x, weight, routing, bias=bias, scatter=scatter)
        for first, last in ((0, 2), (1, num_experts - 1), (num_experts - 1, num_experts)):
            run = routing._replace(offsets=routing.offsets[first : last + 1])
            places = np.arange(*routing.offsets[[first, last]])
            own = routing.order[places] if scatter else places
            gx, gw, gb = cases.to_module(xp, x, weight[first:last], bias[first:last])
            out = cases.to_module(xp, np.zeros_like(want))
            options = {"bias": gb, "scatter": scatter, "pdl": True, "out": out}
            kernels.moe_gemm(gx, gw, _on(xp, run), **options, num_experts=num_experts)
            kept = want.copy()
            kept[np.setdiff1d(np.arange(len(want)), own)] = 0
            assert_close(out, kept, reduction=shape[3], name=f"{router} {first}:{last}")


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("scatter", [False, True])
@pytest.mark.grid("shape", SHAPES)
def test_transposed_matrices(xp, tier, shape, scatter, dtype):
    x, weight, _ = _inputs(shape, dtype, scatter=scatter)
    for router in ROUTERS:
        routing = _routing(*shape[:3], router)
        want = reference.moe_gemm(x, weight, routing, scatter=scatter)
        across = np.ascontiguousarray(weight.swapaxes(1, 2))
        out, buffer = cases.guarded(xp, want.shape, want.dtype)
        arrays = (*cases.to_module(xp, x, across), _on(xp, routing))
        kernels.moe_gemm(*arrays, scatter=scatter, transposed=True, out=out)
        assert_close(out, want, reduction=shape[3], name=router)
        assert_guards(buffer)


@pytest.mark.grid("dtype", cases.DTYPES)
def test_scatter_without_weights(xp, tier, dtype):
    x, weight, _ = _inputs((65, 16, 2, 264, 72), dtype, scatter=True)
    routing = _routing(65, 16, 2)
    ones = routing._replace(weights=np.ones_like(routing.weights))
    want = reference.moe_gemm(x, weight, ones, scatter=True)
    bare = routing._replace(weights=np.full_like(routing.weights, np.nan))
    arrays = (*cases.to_module(xp, x, weight), _on(xp, bare))
    got = kernels.moe_gemm(*arrays, scatter=True, weighted=False)
    assert_close(got, want, reduction=264)


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_gates_whose_exponential_overflows(xp, activation, dtype):
    """The gates are -1000: their sigmoid is 0."""
    x = np.ones((1, 8), np_dtype(dtype))
    weight = np.full((1, 16, 8), -125, x.dtype)
    routing = _on(xp, reference.moe_route(np.zeros((1, 1), np.float32), 1))
    arrays = cases.to_module(xp, x, weight)
    assert not to_numpy(kernels.moe_gemm(*arrays, routing, activation=activation)).any()


def test_the_mirror_computes_float64_in_float64():
    x, weight, _ = (a.astype(np.float64) for a in _inputs((9, 4, 2, 24, 16), "float32"))
    routing = _routing(9, 4, 2)
    routing = routing._replace(weights=routing.weights.astype(np.float64))
    for activation in ACTIVATIONS:
        got = kernels.moe_gemm(x, weight, routing, activation=activation)
        np.testing.assert_allclose(got, _loop(x, weight, routing, activation=activation), 1e-13)


def test_tiles_are_for_the_pairs_of_some_experts():
    weight, out = np.empty((64, 2, 4)), np.empty((2048, 2))
    own = (None, weight, None, out, None, None, 1.7, 7.0, False, False, False)
    assert MoeOperands(*own, num_experts=128).expected_pairs == 1024
    assert MoeOperands(*own, num_experts=64).expected_pairs == 2048


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_mirror_is_the_loop(shape, activation, scatter):
    x, weight, bias = _inputs(shape, "float32", scatter=scatter)
    for router in ROUTERS:
        routing = _routing(*shape[:3], router)
        options = {"bias": bias, "activation": activation, "scatter": scatter}
        got = reference.moe_gemm(x, weight, routing, **options)
        want = _loop(x, weight, routing, **options)
        assert got.shape == want.shape
        assert_close(got, want.astype(np.float32), reduction=max(shape[3], 257))


def test_a_layer_is_the_sum_over_each_tokens_experts(xp, tier):
    """Routing, two grouped GEMMs and their sum, against dense GEMMs by every expert."""
    num_tokens, num_experts, top_k, hidden, width = 33, 6, 2, 48, 40
    x = cases.normal((num_tokens, hidden), "float32", seed=1)
    first = cases.normal((num_experts, 2 * width, hidden), "float32", seed=2, scale=hidden**-0.5)
    second = cases.normal((num_experts, hidden, width), "float32", seed=3, scale=width**-0.5)
    logits = cases.normal((num_tokens, num_experts), "float32", seed=4)
    gx, g1, g2, gl = cases.to_module(xp, x, first, second, logits)
    routing = kernels.moe_route(gl, top_k)
    y = kernels.moe_gemm(gx, g1, routing, activation="swiglu")
    y = kernels.moe_gemm(y, g2, routing, scatter=True)
    got = to_numpy(kernels.moe_combine(y.reshape(num_tokens, top_k, hidden)))
    gate, up = np.split(np.einsum("th,erh->ter", x, first.astype(np.float64)), 2, axis=2)
    dense = np.einsum("tew,ehw->teh", gate / (1 + np.exp(-gate)) * up, second)
    kept = np.sort(logits, axis=1)[:, -top_k:][:, :1] <= logits
    weights = np.where(kept, np.exp(logits.astype(np.float64)), 0)
    want = np.einsum("te,teh->th", weights / weights.sum(axis=1, keepdims=True), dense)
    assert_close(got, want.astype(np.float32), reduction=257)


def test_choice_covers_the_problem():
    for dtype in cases.DTYPES:
        for config in tile_configs(dtype):
            for pairs, experts in ((1, 1), (8, 128), (2048, 128), (1000, 3), (40_000, 256)):
                tiles, columns = config.grid(pairs, experts, 1536)
                most = min(pairs, experts)  # experts with a pair; each may have one partial tile
                assert tiles >= min(pairs, most + (pairs - most) // config.tile_m)
                assert columns * config.tile_n >= 1536
            assert config.shared_bytes <= 99 * 1024
        few, many, unaligned = tile_configs(dtype)
        assert choose_config(8, 128, dtype) is few
        assert choose_config(32768, 128, dtype) is many
        assert choose_config(32768, 128, dtype, is_aligned=False) is unaligned


def test_contract(xp):
    x, weight = xp.zeros((3, 8), np.float16), xp.zeros((4, 6, 8), np.float16)
    routing = _on(xp, _routing(3, 4, 2))
    op = kernels.moe_gemm
    with pytest.raises(DTypeError, match=r"weight: must be float16; got float32"):
        op(x, weight.astype(np.float32), routing)
    with pytest.raises(ShapeError, match=r"weight: must have shape \(E, R, K\); K = 8 from x"):
        op(x, weight[:, :, :7], routing)
    with pytest.raises(ShapeError, match=r"x: must have shape \(T, K\); T = 3 from routing.exp"):
        op(x[:2], weight, routing)
    with pytest.raises(ShapeError, match=r"x: must have shape \(P, K\); P = 6 from routing.exp"):
        op(x, weight, routing, scatter=True)
    with pytest.raises(ShapeError, match=r"routing.offsets: must have shape \(5,\); got \(4,\)"):
        op(x, weight, routing._replace(offsets=routing.offsets[:4]))
    with pytest.raises(ShapeError, match=r"routing.order: must have shape \(P,\); P = 6"):
        op(x, weight, routing._replace(order=routing.order[:4]))
    with pytest.raises(DTypeError, match=r"routing.weights: must be float32.*; got float16"):
        op(x, weight, routing._replace(weights=routing.weights.astype(np.float16)))
    with pytest.raises(ContractError, match=r"activation: must be one of .*; got 'gelu'"):
        op(x, weight, routing, activation="gelu")
    with pytest.raises(ContractError, match=r"weight: must be of as many .*; got '5 rows'"):
        op(x, weight[:, :5], routing, activation="swiglu")
    with pytest.raises(ShapeError, match=r"bias: must have shape \(E, R\); R = 6 from weight"):
        op(x, weight, routing, bias=xp.zeros((4, 5), np.float16))
    with pytest.raises(ContractError, match=r"transposed: must be False with a bias or activation"):
        op(x, weight.swapaxes(1, 2), routing, transposed=True, activation="swiglu")
    with pytest.raises(ShapeError, match=r"weight: must have shape \(E, K, R\); K = 8 from x"):
        op(x, weight, routing, transposed=True)
    with pytest.raises(ContractError, match=r"num_experts: must be a number from 4 .*; got 3"):
        op(x, weight, routing, num_experts=3)
    with pytest.raises(ContractError, match=r"limit: must be a number from 0.0 .*; got -1"):
        op(x, weight, routing, limit=-1)
    with pytest.raises(ShapeError, match=r"out: must have shape \(6, 3\); got \(6, 6\)"):
        op(x, weight, routing, activation="swiglu", out=xp.zeros((6, 6), np.float16))
