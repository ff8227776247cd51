"""moe_decode: the one kernel and the ops it is made of, against the mirror and a float64 loop."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.testing import cases
from engine.testing.tolerances import assert_close

# (T, E, k, N, I): the kernel's; several units a warp, rows of down in parts; four entry points.
FUSED = (
    (1, 128, 8, 2048, 768),
    (1, 60, 4, 256, 72),
    (1, 300, 16, 64, 8),
    (1, 8, 2, 4096, 264),
    (1, 32, 4, 2880, 2880),
    (1, 4, 1, 8, 8),
    (1, 16, 4, 1000, 3000),
)
# What takes the other ops: two tokens, sizes that are no multiples of 8, wide rows.
APART = ((2, 16, 4, 64, 32), (1, 12, 3, 60, 24), (1, 6, 2, 72, 20), (1, 4, 2, 4104, 16))
_MARGIN = 0.02  # of logits, between the chosen experts and the next


def _layer(tokens, experts, top_k, features, width, dtype, *, biases=False):
    """Return a call's arrays and options; routers that are nearly tied are drawn again."""
    for seed in range(100):
        x = cases.normal((tokens, features), dtype, seed=seed + 1)
        router = cases.normal((experts, features), dtype, seed=seed + 2, scale=2 * features**-0.5)
        norm = cases.normal((features,), dtype, seed=seed + 3, scale=0.1)
        y = reference.rmsnorm(x, norm, eps=1e-5, weight_offset=1.0)
        logits = -np.sort(-reference.gemm(y, router, out_dtype=np.float32), axis=1)
        if top_k == experts or (logits[:, top_k - 1] - logits[:, top_k]).min() > _MARGIN:
            break
    up = cases.normal((experts, 2 * width, features), dtype, seed=4, scale=features**-0.5)
    down = cases.normal((experts, features, width), dtype, seed=5, scale=width**-0.5)
    options = {"eps": 1e-5, "weight_offset": 1.0}
    if biases:
        options["gate_up_bias"] = cases.normal((experts, 2 * width), dtype, seed=6)
        options["down_bias"] = cases.normal((experts, features), dtype, seed=7)
        options["router_bias"] = np.zeros(experts, x.dtype)
        options |= {"activation": "swiglu_clamped", "limit": 1.5, "alpha": 1.2}
    return (x, norm, router, up, down), options


def _moved(xp, arrays, options):
    moved = {
        name: xp.asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    return [xp.asarray(array) for array in arrays], moved


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("sizes", FUSED + APART)
def test_matches_mirror(xp, sizes, biases, dtype):
    if sizes[1] * sizes[3] * sizes[4] > 1 << 27 and xp is np:
        pytest.skip("slow: the mirror is what would be compared with itself")
    top_k = sizes[2]
    arrays, options = _layer(*sizes, dtype, biases=biases)
    want = reference.moe_decode(*arrays, top_k, **options)
    moved, extra = _moved(xp, arrays, options)
    out = xp.full(want.shape, xp.nan, want.dtype)
    for _ in range(3):  # the counters are 0 again after each
        out[:] = xp.nan
        assert kernels.moe_decode(*moved, top_k, **extra, pdl=True, out=out) is out
        assert_close(out, want, reduction=sizes[3])


def test_float32_takes_the_other_ops(xp):
    arrays, options = _layer(2, 12, 3, 64, 24, "float32")
    want = reference.moe_decode(*arrays, 3, **options)
    moved, extra = _moved(xp, arrays, options)
    assert_close(kernels.moe_decode(*moved, 3, **extra), want, reduction=64)


@pytest.mark.parametrize("tokens", [1, 3])
def test_the_result_may_take_the_place_of_x(xp, tokens):
    arrays, options = _layer(tokens, 20, 4, 128, 64, "bfloat16")
    want = reference.moe_decode(*arrays, 4, **options)
    moved, extra = _moved(xp, arrays, options)
    assert kernels.moe_decode(*moved, 4, **extra, out=moved[0]) is moved[0]
    assert_close(moved[0], want, reduction=128)


@pytest.mark.parametrize("tokens", [1, 5])
def test_the_rule_of_the_choice(xp, tokens):
    """Sigmoids with a correction, in groups; the load without padding."""
    arrays, options = _layer(tokens, 32, 4, 128, 64, "bfloat16")
    correction = np.linspace(0, 4, 32, dtype=np.float32)[::-1].copy()
    slots = np.arange(tokens, dtype=np.int64)
    slots[1:2] = -1
    rule = {"score": "sigmoid", "num_groups": 4, "top_groups": 2, "scale": 2.5}
    rule["renormalize"] = False
    options |= rule | {"correction": correction, "slots": slots}
    load = np.zeros(32, np.int64)
    want = reference.moe_decode(*arrays, 4, **options, load=load)
    assert load.sum() == max(1, tokens - 1) * 4
    moved, extra = _moved(xp, arrays, options)
    got_load = xp.zeros(32, np.int64)
    assert_close(kernels.moe_decode(*moved, 4, **extra, load=got_load), want, reduction=128)
    np.testing.assert_array_equal(to_numpy(got_load), load)


@pytest.mark.gpu
def test_a_graph_of_many_layers(cp):
    """One after another with pdl, as in a step: each reads what the one before wrote."""
    arrays, options = _layer(1, 64, 8, 512, 128, "bfloat16")
    x, want = arrays[0], arrays[0]
    for _ in range(6):
        want = reference.moe_decode(want, *arrays[1:], 8, **options)
    moved, extra = _moved(cp, arrays, options)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        h = moved[0]
        kernels.moe_decode(h, *moved[1:], 8, **extra)
        stream.synchronize()
        stream.begin_capture()
        for _ in range(6):
            kernels.moe_decode(h, *moved[1:], 8, **extra, pdl=True, out=h)
        graph = stream.end_capture()
        results = []
        for _ in range(20):
            h.set(x, stream=stream)
            graph.launch(stream)
            results.append(h.get(stream=stream))
        stream.synchronize()
    for result in results:
        np.testing.assert_array_equal(result.view(np.uint16), results[0].view(np.uint16))
    assert_close(results[0], want, reduction=512 * 16)


def test_mirror_is_the_loop():
    arrays, options = _layer(3, 10, 3, 48, 24, "float32")
    x, norm, router, up, down = (array.astype(np.float64) for array in arrays)
    want = x.copy()
    for t, row in enumerate(x):
        y = row / np.sqrt((row**2).mean() + options["eps"]) * (norm + 1)
        logits = router @ y
        chosen = np.argsort(-logits)[:3]
        weights = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
        for weight, e in zip(weights, chosen, strict=True):
            gate, value = np.split(up[e] @ y, 2)
            want[t] += weight * (down[e] @ (gate / (1 + np.exp(-gate)) * value))
    got = reference.moe_decode(*arrays, 3, **options)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_contract(xp):
    arrays, _ = _layer(2, 8, 2, 16, 8, "float32")
    x, norm, router, up, down = (xp.asarray(array) for array in arrays)
    op = kernels.moe_decode
    with pytest.raises(ShapeError, match=r"gate_up: must have shape \(E, 16, N\)"):
        op(x, norm, router, up[:, :8], down, 2)
    with pytest.raises(ShapeError, match=r"router: must have shape \(E, N\); N = 16 from x"):
        op(x, norm, router[:, :8], up, down, 2)
    with pytest.raises(DTypeError, match=r"down: must be float32; got float16"):
        op(x, norm, router, up, down.astype(np.float16), 2)
    with pytest.raises(ContractError, match=r"top_k: must be from 1 to 8; got 9"):
        op(x, norm, router, up, down, 9)
    with pytest.raises(ContractError, match=r"activation: must be one of .*; got 'gelu'"):
        op(x, norm, router, up, down, 2, activation="gelu")
    with pytest.raises(ContractError, match=r"eps: must be a number from 0.0 to inf; got -1"):
        op(x, norm, router, up, down, 2, eps=-1)
