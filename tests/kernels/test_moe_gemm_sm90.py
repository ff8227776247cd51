"""moe_gemm on Hopper: both modules against the mirror, batch invariance, tile choice."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.kernels.moe_gemm import sm90
from engine.reference import Routing
from engine.testing import cases
from engine.testing.cases_moe import distinct_logits
from engine.testing.tolerances import assert_close

CONFIGS = [pytest.param(c, id=f"{c.warpgroups}x{c.tokens}x{c.depth}") for c in sm90.MOE_CONFIGS]


def _on_gpu(cp, routing):
    return Routing(*map(cp.asarray, routing))


def _poisoned(cp, shape, dtype):
    out = cp.empty(shape, dtype)
    out.view(np.uint16).fill(0x7FFF)  # NaN in both dtypes
    return out


@pytest.mark.gpu
@pytest.mark.grid("dtype", ["float16", "bfloat16"])
@pytest.mark.grid("config", CONFIGS)
@pytest.mark.grid(
    ("num_tokens", "num_experts", "top_k", "hidden", "width"),
    [(1, 4, 1, 64, 8), (5, 128, 8, 136, 72), (33, 7, 3, 520, 264), (700, 4, 2, 72, 136),
     (500, 256, 2, 64, 64)],
)  # fmt: skip
def test_every_module_matches_mirror(
    hopper, monkeypatch, config, dtype, num_tokens, num_experts, top_k, hidden, width
):
    """Fewer tokens than an MMA, more than a tile, widths that are not multiples of a tile."""
    monkeypatch.setattr(sm90, "choose_config", lambda *_: config)
    routing = reference.moe_route(distinct_logits(num_tokens, num_experts, seed=1), top_k)
    x = cases.normal((num_tokens, hidden), dtype, seed=2)
    weight = cases.normal((num_experts, 2 * width, hidden), dtype, seed=3, scale=hidden**-0.5)
    bias = cases.normal((num_experts, 2 * width), dtype, seed=4)
    on_gpu = _on_gpu(hopper, routing)
    for activation in ("swiglu", "swiglu_clamped", None):
        options = {"activation": activation, "limit": 1.5}
        columns = 2 * width if activation is None else width
        out = _poisoned(hopper, (num_tokens * top_k, columns), dtype)
        arrays = (hopper.asarray(x), hopper.asarray(weight), on_gpu)
        kernels.moe_gemm(*arrays, bias=hopper.asarray(bias), out=out, **options)
        want = reference.moe_gemm(x, weight, routing, bias=bias, **options)
        assert_close(out, want, reduction=hidden, name=str(activation))
    rows = cases.normal((num_tokens * top_k, hidden), dtype, seed=5)
    out = _poisoned(hopper, (num_tokens * top_k, 2 * width), dtype)
    for pdl in (False, True):
        arrays = (hopper.asarray(rows), hopper.asarray(weight), on_gpu)
        kernels.moe_gemm(*arrays, scatter=True, pdl=pdl, out=out)
        want = reference.moe_gemm(rows, weight, routing, scatter=True)
        assert_close(out, want, reduction=hidden, name="scatter")


@pytest.mark.gpu
def test_a_token_has_the_same_bits_in_any_company(hopper):
    """A token alone, among few (one module) and among many (the other)."""
    hidden, width, num_experts, top_k = 256, 192, 8, 3
    logits = distinct_logits(900, num_experts, seed=1)
    x = hopper.asarray(cases.normal((900, hidden), "bfloat16", seed=2))
    up = cases.normal((num_experts, 2 * width, hidden), "bfloat16", seed=3, scale=hidden**-0.5)
    down = cases.normal((num_experts, hidden, width), "bfloat16", seed=4, scale=width**-0.5)
    up, down = hopper.asarray(up), hopper.asarray(down)

    def layer(first, last):
        routing = kernels.moe_route(hopper.asarray(logits[first:last]), top_k)
        options = {"deterministic": True, "pdl": True}
        rows = kernels.moe_gemm(x[first:last], up, routing, activation="swiglu", **options)
        pairs = kernels.moe_gemm(rows, down, routing, scatter=True, **options)
        out = kernels.moe_combine(pairs.reshape(last - first, top_k, hidden))
        return to_numpy(out).view(np.uint16)

    whole = layer(0, 900)
    for first, last in ((0, 1), (5, 6), (17, 40), (100, 300)):
        np.testing.assert_array_equal(layer(first, last), whole[first:last])


@pytest.mark.gpu
def test_a_graph_follows_the_routing(hopper):
    """Captured once, replayed with other counts, which the host never knows."""
    num_experts, top_k, hidden, width = 16, 4, 128, 64
    weight = cases.normal((num_experts, 2 * width, hidden), "bfloat16", seed=3, scale=hidden**-0.5)
    x, weight = cases.normal((40, hidden), "bfloat16", seed=2), hopper.asarray(weight)
    logits, x_gpu = hopper.zeros((40, num_experts), np.float32), hopper.asarray(x)
    stream = hopper.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(2):
            kept = [kernels.moe_route(logits, top_k)]
            kept.append(kernels.moe_gemm(x_gpu, weight, kept[0], activation="swiglu"))
        stream.synchronize()
        stream.begin_capture()
        kept = [kernels.moe_route(logits, top_k)]
        kept.append(kernels.moe_gemm(x_gpu, weight, kept[0], activation="swiglu"))
        graph = stream.end_capture()
        for seed in (5, 6):
            new = distinct_logits(40, num_experts, seed=seed)
            if seed == 6:
                new[:, :top_k] += 100  # all tokens go to the same experts; the others are empty
            logits.set(new, stream=stream)
            graph.launch(stream)
            stream.synchronize()
            want = reference.moe_route(new, top_k)
            np.testing.assert_array_equal(to_numpy(kept[0].order), want.order)
            result = reference.moe_gemm(x, to_numpy(weight), want, activation="swiglu")
            assert_close(kept[1], result, reduction=hidden)


def test_few_tokens_an_expert_take_the_narrow_tile():
    one, few, some, many = sm90.MOE_CONFIGS
    assert sm90.choose_config(8, 128) is one
    assert sm90.choose_config(9, 128) is few
    assert sm90.choose_config(4 * 128, 128) is few
    assert sm90.choose_config(4 * 128 + 1, 128) is some
    assert sm90.choose_config(32 * 128, 128) is some
    assert sm90.choose_config(32 * 128 + 1, 128) is many
    for config in sm90.MOE_CONFIGS:
        assert config.stages() >= 3 and config.shared_bytes() <= 232_448
