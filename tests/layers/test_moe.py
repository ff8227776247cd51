"""The mixture of experts against a loop over tokens in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine import reference
from engine.device import to_numpy
from engine.errors import WeightsError
from engine.layers.linear import Linear
from engine.layers.mlp import MLP
from engine.layers.moe import Experts, MoE, RoutingParams
from engine.layers.norm import Norm
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
    """Which products round x to codes, and that a chain of them gives what each alone gives."""
    shapes = (256, 128), (128, 128)
    weights = [
        stack_matrices([random_weight(name, *shape, seed) for seed in range(E)]) for shape in shapes
    ]
    x = cases.normal((num_tokens, 128), "bfloat16", 1)
    routing = moe_route(cases.normal((num_tokens, E), "float32", 2), 3)
    options = {"quantize_x": has_codes, "deterministic": deterministic}
    experts = Experts(*(weight_to(xp, weight) for weight in weights))
    on_device, gx = Routing(*cases.to_module(xp, *routing)), xp.asarray(x)
    rows = experts.first_product(gx, on_device, deterministic=deterministic)
    want = reference.moe_gemm(x, weights[0], routing, activation="swiglu", **options)
    assert_close(rows, want, reduction=257)
    got = experts.second_product(rows, on_device, deterministic=deterministic)
    want = reference.moe_gemm(to_numpy(rows), weights[1], routing, scatter=True, **options)
    assert_close(got, want.reshape(got.shape), reduction=257)
    for _ in range(3):  # now the kernels overlap
        whole = experts(gx, on_device, deterministic=deterministic)
        np.testing.assert_array_equal(to_numpy(whole).view("u2"), to_numpy(got).view("u2"))
