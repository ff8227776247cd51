"""gemm_int8: every kernel against the mirror, and the mirror against float64."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.dtypes import np_dtype
from engine.errors import DTypeError, ShapeError
from engine.kernels.gemm import w8
from engine.kernels.gemm.w8_sm90 import w8_configs
from engine.testing import cases
from engine.testing.cases_w8 import PRODUCTS_8BIT, dequantized, quantized_weight
from engine.testing.tolerances import assert_close

ACTIVATIONS = (None, "relu", "gelu_tanh", "swiglu", "silu_and_mul")


def inputs(m, n, k, dtype, columns=None):
    x = cases.normal((m, k), dtype, seed=1)
    bias = cases.normal((n,), dtype, seed=3)
    residual = cases.normal((m, columns or n), dtype, seed=4)
    return x, *quantized_weight(n, k, "int8", False, seed=2), bias, residual


def compare(xp, x, weight, scales, *, deterministic=False, pdl=False, **args):
    want = reference.gemm_int8(x, weight, scales, **args)
    given = {a: xp.asarray(v) if isinstance(v, np.ndarray) else v for a, v in args.items()}
    out, buffer = cases.guarded(xp, want.shape, want.dtype)
    got = kernels.gemm_int8(
        *cases.to_module(xp, x, weight, scales),
        out=out,
        deterministic=deterministic,
        pdl=pdl,
        **given,
    )
    assert got is out
    assert_close(got, want, reduction=x.shape[1])
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), PRODUCTS_8BIT)
def test_matches_mirror(xp, m, n, k, dtype):
    x, weight, scales, bias, residual = inputs(m, n, k, dtype)
    compare(xp, x, weight, scales, bias=bias, residual=residual, activation="silu")
    compare(xp, x, weight, scales, deterministic=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("m", [1, 7, 40, 150])
def test_epilogues(xp, m, activation):
    is_gated = activation in ("swiglu", "silu_and_mul")
    for n in (256, 96):
        x, weight, scales, bias, residual = inputs(m, n, 384, "bfloat16", n // 2 if is_gated else n)
        args = {} if activation == "swiglu" else {"residual": residual}
        compare(xp, x, weight, scales, bias=bias, activation=activation, pdl=True, **args)


@pytest.mark.parametrize("m", [1, 6, 70])
def test_codes_of_x(xp, m):
    x, weight, scales, bias, _ = inputs(m, 96, 400, "bfloat16")
    codes, x_scales = reference.quantize_rows(x, dtype="int8")
    for out_dtype in ("bfloat16", "float32"):
        compare(
            xp, codes, weight, scales, x_scales=x_scales, bias=bias, out_dtype=np_dtype(out_dtype)
        )


@pytest.mark.parametrize("m", [1, 6, 70])
def test_a_norm_before_it(xp, m):
    """A last bit of the norm may move a code: the result is that of the ops one by one."""
    x, weight, scales, _, _ = inputs(m, 96, 1024, "bfloat16")
    norm = cases.normal((1024,), "bfloat16", seed=5, mean=1.0)
    gx, gw, gs, gn = cases.to_module(xp, x, weight, scales, norm)
    got = kernels.gemm_int8(gx, gw, gs, norm_weight=gn)
    assert_close(got, to_numpy(kernels.gemm_int8(kernels.rmsnorm(gx, gn), gw, gs)), reduction=1024)


@pytest.mark.gpu
@pytest.mark.parametrize("config", w8_configs(has_blocks=False), ids=str)
def test_every_tile_matches_mirror(cp, monkeypatch, config):
    """Where it is Hopper; elsewhere the same tile each time."""
    monkeypatch.setattr(w8, "MAX_SKINNY_ROWS", 0)
    monkeypatch.setattr(w8, "choose_w8_hopper", lambda *_, **__: config)
    for m in (1, 19, 64) if config.tile_m == 64 else (1, 19, 64, 130, 300):
        x, weight, scales, bias, residual = inputs(m, 320, 1040, "bfloat16")
        compare(cp, x, weight, scales, bias=bias, residual=residual)
        compare(cp, x, weight, scales, bias=bias, activation="silu", pdl=True)
        if config.gates:
            compare(cp, x, weight[:256], scales[:256], activation="swiglu")


@pytest.mark.gpu
def test_sums_are_exact(cp):
    """Codes of +-127 along a long k: the sum has more bits than a float."""
    k = 8192
    weight = np.full((32, k), 127, np.int8)
    weight[:, 1::2] = -126
    codes = np.full((70, k), 127, np.int8)
    exact = (codes.astype(np.int64) @ weight.astype(np.int64).T).astype(np.float32)
    gx, gw, ones = cases.to_module(cp, codes, weight, np.ones(32, np.float32))
    scales = cp.ones((70, 1), np.float32)
    for m in (1, 8, 70):
        got = kernels.gemm_int8(gx[:m], gw, ones, x_scales=scales[:m], out_dtype=np.float32)
        np.testing.assert_array_equal(to_numpy(got), exact[:m])


def test_mirror_is_the_product_of_dequantized_numbers():
    x, weight, scales, _, _ = inputs(7, 150, 300, "float32")
    codes, x_scales = reference.quantize_rows(x, dtype="int8")
    want = dequantized(codes, x_scales) @ dequantized(weight, scales).T
    np.testing.assert_allclose(reference.gemm_int8(x, weight, scales), want, rtol=1e-4, atol=1e-4)


def test_contract(xp):
    x, weight, scales = (
        xp.ones((2, 32), np.float32),
        xp.ones((16, 32), np.int8),
        xp.ones(16, np.float32),
    )
    with pytest.raises(DTypeError, match="weight: must be int8; got uint8"):
        kernels.gemm_int8(x, weight.view(np.uint8), scales)
    with pytest.raises(ShapeError, match="weight_scales: must have shape"):
        kernels.gemm_int8(x, weight, xp.ones((1, 1), np.float32))
    with pytest.raises(ShapeError, match="x_scales: must have shape"):
        kernels.gemm_int8(weight[:2], weight, scales, x_scales=scales[:2], out_dtype=np.float32)
