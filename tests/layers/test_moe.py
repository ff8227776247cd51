"""The mixture of experts against a loop over tokens in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import WeightsError
from engine.layers import moe as moe_layer
from engine.layers.linear import Linear
from engine.layers.mlp import MLP
from engine.layers.moe import Experts, MoE, RoutingParams
from engine.layers.norm import Norm, QuantizedRows
from engine.reference import Routing, moe_route
from engine.testing import cases
from engine.testing.cases_quantized import random_weight, weight_to
from engine.testing.tolerances import assert_close
from engine.weights import Format, Weight
from engine.weights.stack import stack_matrices

N, F, E, SHARED = 24, 10, 7, 14
rng = np.random.default_rng(5)


def _weight(*shape: int) -> Weight:
    return Weight.dense(rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5))


def _moe(params: RoutingParams, **options) -> MoE:
    """Return a layer with all that is in `options`."""
    has = options.get
    experts = Experts(
        _weight(E, 2 * F, N),
        _weight(E, N, F),
        _weight(E, 2 * F) if has("biases") else None,
        _weight(E, N) if has("biases") else None,
        *(("swiglu_clamped", 1.5, 0.6) if has("clamped") else ()),
    )
    return MoE(
        params,
        Linear(_weight(E, N), _weight(E) if has("biases") else None),
        experts,
        correction=rng.standard_normal(E).astype(np.float32) if has("correction") else None,
        shared=MLP(Linear(_weight(2 * SHARED, N)), Linear(_weight(N, SHARED)), "silu")
        if has("shared")
        else None,
        shared_gate=Linear(_weight(1, N)) if has("shared_gate") else None,
        deterministic=bool(has("deterministic")),
    )


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _chosen(moe: MoE, logits: np.ndarray) -> list[tuple[int, float]]:
    """Return the experts of one token with their weights."""
    p = moe.params
    exps = np.exp(logits - logits.max())
    scores = exps / exps.sum() if p.score == "softmax" else _sigmoid(logits)
    ranked = scores if moe.correction is None else scores + moe.correction
    chosen = sorted(range(E), key=lambda e: -ranked[e])[: p.top_k]
    total = sum(scores[e] for e in chosen) if p.renormalize else 1.0
    return [(e, p.scale * scores[e] / total) for e in chosen]


def _expert(experts: Experts, e: int, x: np.ndarray) -> np.ndarray:
    def bias(weight):
        return 0.0 if weight is None else weight.data[e].astype(float)

    z = experts.gate_up.data[e].astype(float) @ x + bias(experts.gate_up_bias)
    gate, up = z[:F], z[F:]
    if experts.activation == "swiglu_clamped":
        gate, up = np.minimum(gate, experts.limit), np.clip(up, -experts.limit, experts.limit)
        h = (up + 1) * gate * _sigmoid(experts.alpha * gate)
    else:
        h = gate * _sigmoid(gate) * up
    return experts.down.data[e].astype(float) @ h + bias(experts.down_bias)


def _by_token(moe: MoE, tokens: np.ndarray) -> np.ndarray:
    rows = []
    for x in tokens.astype(float):
        bias = 0.0 if moe.router.bias is None else moe.router.bias.astype(float)
        logits = moe.router.weight.data.astype(float) @ x + bias
        y = sum(w * _expert(moe.experts, e, x) for e, w in _chosen(moe, logits))
        if moe.shared is not None:
            z = moe.shared.gate_up.weight.data.astype(float) @ x
            h = z[:SHARED] * _sigmoid(z[:SHARED]) * z[SHARED:]
            gate = 1.0
            if moe.shared_gate is not None:
                gate = _sigmoid(moe.shared_gate.weight.data[0].astype(float) @ x)
            y = y + gate * (moe.shared.down.weight.data.astype(float) @ h)
        rows.append(y)
    return np.array(rows)


CASES = {
    "mixtral": (RoutingParams(2), {}),
    "one_expert": (RoutingParams(1, renormalize=False), {}),
    "all_experts": (RoutingParams(E), {}),
    "qwen2_moe": (RoutingParams(4, renormalize=False), {"shared": True, "shared_gate": True}),
    "gpt_oss": (RoutingParams(4), {"biases": True, "clamped": True}),
    "glm4_moe": (
        RoutingParams(3, "sigmoid", scale=2.5),
        {"shared": True, "correction": True},
    ),
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_against_a_loop_over_tokens(case, deterministic):
    params, options = CASES[case]
    moe = _moe(params, deterministic=deterministic, **options)
    x = rng.standard_normal((13, N), np.float32)
    np.testing.assert_allclose(moe(x), _by_token(moe, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_norm_and_residual(case):
    """As the decoder calls it for one token: the input is the residual stream itself."""
    params, options = CASES[case]
    moe, norm = _moe(params, **options), Norm(_weight(N).data, 1e-6)
    x = rng.standard_normal((1, N), np.float32)
    want = x + _by_token(moe, norm(x))
    residual = x.copy()
    got = moe(residual, norm=norm, residual=residual)
    assert got is residual
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_groups_limit_the_experts():
    """With 7 groups of one expert, the 2 best groups are the 2 best experts."""
    moe = _moe(RoutingParams(2, "sigmoid", num_groups=7, top_groups=2))
    x = rng.standard_normal((9, N), np.float32)
    got = moe(x)
    moe.params = replace(moe.params, num_groups=1, top_groups=1)
    np.testing.assert_array_equal(got, moe(x))


def test_deterministic_rows_do_not_depend_on_other_rows():
    moe = _moe(RoutingParams(3), biases=True, shared=True, deterministic=True)
    moe.router.deterministic = moe.shared.gate_up.deterministic = True
    moe.shared.down.deterministic = True
    x = rng.standard_normal((33, N), np.float32)
    alone = np.concatenate([moe(x[i : i + 1]) for i in range(len(x))])
    np.testing.assert_array_equal(moe(x), alone)


def test_arrays_and_num_multiplied():
    params = RoutingParams(2)
    moe = _moe(params, biases=True, shared=True, shared_gate=True, correction=True)
    names = dict(moe.arrays())
    assert set(names) == {
        "router.weight.data", "router.bias", "experts.gate_up.data", "experts.down.data",
        "experts.gate_up_bias.data", "experts.down_bias.data", "shared.gate_up.weight.data",
        "shared.down.weight.data", "shared_gate.weight.data", "correction", "load",
    }  # fmt: skip
    assert moe.num_multiplied == E * N + 2 * 3 * F * N + 3 * SHARED * N


def test_a_quantized_bias_is_refused():
    bias = _weight(E, 2 * F)
    coded = Weight(Format("int4", 4, (1, 32), 16), bias.data, bias.shape)
    with pytest.raises(WeightsError, match=r"gate_up_bias must be a dense weight; got 'int4'"):
        Experts(_weight(E, 2 * F, N), _weight(E, N, F), gate_up_bias=coded)


@pytest.mark.parametrize(
    ("name", "num_tokens", "deterministic", "has_codes"),
    [
        ("fp8_block", 8, False, False),
        ("fp8_block", 9, False, True),
        ("fp8_block", 1, True, True),
        ("fp8_block", 150, False, True),
        ("mxfp4", 40, False, False),
    ],
)
def test_quantized_experts(xp, name, num_tokens, deterministic, has_codes):
    """Which products multiply codes, and that a chain of them gives what each alone gives."""
    shapes = (256, 128), (128, 128)
    weights = [
        stack_matrices([random_weight(name, *shape, seed) for seed in range(E)]) for shape in shapes
    ]
    x = cases.normal((num_tokens, 128), "bfloat16", 1)
    routing = moe_route(cases.normal((num_tokens, E), "float32", 2), 3)
    options = {"quantize_x": has_codes, "deterministic": deterministic}
    experts = Experts(*(weight_to(xp, weight) for weight in weights))
    on_device, gx = Routing(*cases.to_module(xp, *routing)), xp.asarray(x)
    rows = experts.first_product(gx, on_device, deterministic=deterministic, as_codes=False)
    want = reference.moe_gemm(x, weights[0], routing, activation="swiglu", **options)
    assert_close(rows, want, reduction=257)
    coded = experts.first_product(gx, on_device, deterministic=deterministic)
    assert isinstance(coded, QuantizedRows) == has_codes
    got = experts.second_product(coded, on_device, deterministic=deterministic)
    apart = experts.second_product(rows, on_device, deterministic=deterministic)
    np.testing.assert_array_equal(to_numpy(got).view("u2"), to_numpy(apart).view("u2"))
    want = reference.moe_gemm(to_numpy(rows), weights[1], routing, scatter=True, **options)
    assert_close(got, want.reshape(got.shape), reduction=257)
    for _ in range(3):  # now the kernels overlap
        whole = experts(gx, on_device, deterministic=deterministic)
        np.testing.assert_array_equal(to_numpy(whole).view("u2"), to_numpy(got).view("u2"))


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("num_tokens", [9, 40, 300])
def test_a_chain_of_layers_with_codes(xp, monkeypatch, num_tokens, is_fused):
    """Norm, experts and shared expert exchange codes; each kernel starts before others have ended.

    The bits are those of ops that quantize their own rows, waited for one by one. Two of them
    compute the logits in different ways: one with the norm, and a product.
    """

    def weight(*shape, seed):
        return weight_to(xp, random_weight("fp8_block", *shape, seed))

    monkeypatch.setattr(moe_layer, "_CODED_FROM", 9)
    width, hidden, count = 128, 256, 16
    shapes = (2 * width, hidden), (hidden, width)
    matrices = [[random_weight("fp8_block", *s, seed) for seed in range(count)] for s in shapes]
    stacks = [weight_to(xp, stack_matrices(one)) for one in matrices]
    router = cases.normal((count, hidden), "bfloat16", 1, scale=0.1)
    moe = MoE(
        RoutingParams(4),
        Linear(Weight.dense(xp.asarray(router))),
        Experts(*stacks),
        shared=MLP(*(Linear(weight(*s, seed=9)) for s in shapes), "silu"),
    )
    norm = Norm(xp.asarray(cases.normal((hidden,), "bfloat16", 2, mean=1.0)), 1e-6)
    start = [cases.normal((num_tokens, hidden), "bfloat16", seed) for seed in (3, 4)]

    def apart(x, residual):
        if is_fused:
            y, routing, residual = kernels.rmsnorm_moe_route(
                x, norm.weight, moe.router.weight.data, 4, eps=norm.eps, residual=residual, pdl=True
            )
        else:
            y, residual = norm.add(x, residual)
            _waited(xp)
            _, routing, _ = moe.normed_and_routed(y, None, None)
        _waited(xp)
        options = {"quantize_x": True, "pdl": True}
        rows = kernels.moe_gemm(y, stacks[0], routing, activation="swiglu", **options)
        _waited(xp)
        pairs = kernels.moe_gemm(rows, stacks[1], routing, scatter=True, **options)
        _waited(xp)
        x = kernels.moe_combine(pairs.reshape(num_tokens, 4, hidden), shared=moe.shared(y))
        _waited(xp)
        return x, residual

    def together(x, residual):
        if is_fused:
            return moe.after_add(x, residual, norm)
        y, residual = norm.add_for(moe.coded_format(num_tokens), x, residual, keeps_numbers=True)
        return moe(y), residual

    def run(step):
        x, residual = (xp.asarray(one.copy()) for one in start)
        for _ in range(10):
            x, residual = step(x, residual)
        return to_numpy(x).view("u2")

    want = run(apart)
    for _ in range(3):
        np.testing.assert_array_equal(run(together), want)
    y, _ = norm.add_for(moe.coded_format(num_tokens), *map(xp.asarray, start), keeps_numbers=True)
    assert moe.normed_and_routed(y, None, None)[2] is y and moe._shares(y)


def _waited(xp):
    if xp is not np:
        xp.cuda.Device().synchronize()
