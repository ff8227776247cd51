"""gemm_int8: every kernel against the mirror, and the mirror against float64."""

from __future__ import annotations

from dataclasses import replace

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

TILES = dict.fromkeys((*w8_configs("int8"), *w8_configs("int8", deterministic=True)))
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


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid(("m", "n", "k"), PRODUCTS_8BIT)
def test_matches_mirror(xp, m, n, k, dtype):
    x, weight, scales, bias, residual = inputs(m, n, k, dtype)
    compare(xp, x, weight, scales, bias=bias, residual=residual, activation="silu")
    compare(xp, x, weight, scales, deterministic=True)


@pytest.mark.grid("activation", ACTIVATIONS)
@pytest.mark.grid("m", [1, 7, 40, 150])
def test_epilogues(xp, m, activation):
    is_gated = activation in ("swiglu", "silu_and_mul")
    for n in (256, 96):
        x, weight, scales, bias, residual = inputs(m, n, 384, "bfloat16", n // 2 if is_gated else n)
        args = {} if activation == "swiglu" else {"residual": residual}
        compare(xp, x, weight, scales, bias=bias, activation=activation, pdl=True, **args)


@pytest.mark.parametrize("m", [1, 6, 70])
def test_codes_of_x(xp, m):
    x, weight, scales, bias, _ = inputs(m, 96, 400, "bfloat16")
    codes, x_scales = reference.quantize_rows(x, dtype="int8", group=128)
    for out_dtype in ("bfloat16", "float32"):
        compare(
            xp, codes, weight, scales, x_scales=x_scales, bias=bias, out_dtype=np_dtype(out_dtype)
        )


@pytest.mark.parametrize("m", [1, 6, 70])
def test_a_norm_before_it(xp, m):
    """The norm's last bit may move a code, so compare with the separate ops."""
    x, weight, scales, _, _ = inputs(m, 96, 1024, "bfloat16")
    norm = cases.normal((1024,), "bfloat16", seed=5, mean=1.0)
    gx, gw, gs, gn = cases.to_module(xp, x, weight, scales, norm)
    got = kernels.gemm_int8(gx, gw, gs, norm_weight=gn)
    assert_close(got, to_numpy(kernels.gemm_int8(kernels.rmsnorm(gx, gn), gw, gs)), reduction=1024)


@pytest.mark.gpu
@pytest.mark.parametrize("config", TILES, ids=str)
def test_every_tile_matches_mirror(cp, monkeypatch, config):
    """Tile choice on Hopper; other GPUs always use the same tile."""
    monkeypatch.setattr(w8, "MAX_SKINNY_ROWS", 0)
    monkeypatch.setattr(w8, "choose_w8_hopper", lambda *_, **__: config)
    for m in (1, 19, 64) if config.tile_m <= 64 else (1, 19, 64, 130, 300):
        x, weight, scales, bias, residual = inputs(m, 320, 1040, "bfloat16")
        compare(cp, x, weight, scales, bias=bias, residual=residual)
        compare(cp, x, weight, scales, bias=bias, activation="silu", pdl=True)
        if config.gates:
            compare(cp, x, weight[:256], scales[:256], activation="swiglu")


@pytest.mark.gpu
def test_depth_changes_no_bit(cp, monkeypatch):
    """The slabs of a stage keep separate sums, each with its own group's scales."""
    arrays = cases.to_module(cp, *inputs(40, 640, 2048, "bfloat16")[:3])
    deep = [c for c in w8_configs("int8") if c.depth > 1 and not c.swapped]
    assert deep
    for config in deep:
        results = []
        for chosen in (config, replace(config, depth=1)):
            monkeypatch.setattr(w8, "choose_w8_hopper", lambda *_, chosen=chosen, **__: chosen)
            results.append(to_numpy(kernels.gemm_int8(*arrays)))
        np.testing.assert_array_equal(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_every_cut_of_k_matches_mirror(cp, monkeypatch, parts):
    monkeypatch.setattr(w8, "_num_parts", lambda *_: parts)
    for m, k in ((1, 1040), (8, 1040), (1, 4096), (3, 256)):
        x, weight, scales, bias, residual = inputs(m, 330, k, "bfloat16")
        compare(cp, x, weight, scales, bias=bias, residual=residual)


@pytest.mark.gpu
def test_deterministic_rows_do_not_depend_on_m(cp):
    x, weight, scales, _, _ = inputs(200, 640, 2048, "bfloat16")
    gx, gw, gs = cases.to_module(cp, x, weight, scales)
    whole = kernels.gemm_int8(gx, gw, gs, deterministic=True)
    for m in (1, 8, 33, 130):
        part = kernels.gemm_int8(gx[:m], gw, gs, deterministic=True)
        np.testing.assert_array_equal(to_numpy(part), to_numpy(whole[:m]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("k", [128, 4096 + 16])
def test_sums_of_a_group_are_exact(xp, k, dtype):
    """Groups of extreme codes whose sums have opposite signs; the total stays below 2^24."""
    rng = np.random.default_rng(0)
    signs = np.repeat((-1) ** np.arange(-(-k // 128)), 128)[:k]
    weight = (rng.integers(-128, -99, (33, k)) * signs).clip(-128, 127).astype(np.int8)
    codes = rng.integers(100, 128, (70, k)).astype(np.int8)
    exact = codes.astype(np.int64) @ weight.astype(np.int64).T
    assert abs(exact).max() < 2**24
    gx, gw, ones = cases.to_module(xp, codes, weight, np.ones(33, np.float32))
    scales = xp.ones((70, -(-k // 128)), np.float32)
    bias = xp.zeros(33, np_dtype(dtype))  # its dtype selects the module
    for m in (1, 8, 70):
        got = kernels.gemm_int8(
            gx[:m], gw, ones, x_scales=scales[:m], bias=bias, out_dtype=np.float32
        )
        np.testing.assert_array_equal(to_numpy(got), exact[:m].astype(np.float32))


@pytest.mark.parametrize("m", [1, 8, 70])
def test_a_large_value_spoils_its_group_only(xp, m):
    """With one scale per row, the codes of all other values in the row would be 0."""
    x, weight, scales, _, _ = inputs(m, 64, 384, "float16")
    x[:, 130] = 3e4
    weight[:, 130] = 0
    others = x.astype(np.float64)
    others[:, 128:256] = 0
    numbers = dequantized(weight, scales)
    got = to_numpy(kernels.gemm_int8(*cases.to_module(xp, x, weight, scales)))
    np.testing.assert_allclose(got, others @ numbers.T, atol=0.1)


@pytest.mark.parametrize("m", [1, 70])
def test_nan_stays(xp, m):
    x, weight, scales, _, _ = inputs(m, 64, 384, "bfloat16")
    x[0, 200] = np.nan
    got = to_numpy(kernels.gemm_int8(*cases.to_module(xp, x, weight, scales)))
    assert np.isnan(got[0].astype(np.float32)).all()
    assert not np.isnan(got[1:].astype(np.float32)).any()


def test_mirror_is_the_product_of_dequantized_numbers():
    x, weight, scales, _, _ = inputs(7, 150, 300, "float32")
    codes, x_scales = reference.quantize_rows(x, dtype="int8", group=128)
    numbers = np.stack([dequantized(codes[i : i + 1], x_scales[i : i + 1])[0] for i in range(7)])
    want = numbers @ dequantized(weight, scales).T
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
    long = xp.ones((2, 130), np.int8)
    with pytest.raises(ShapeError, match=r"x_scales: must have shape \(M, 2\)"):
        one = xp.ones((2, 1), np.float32)
        kernels.gemm_int8(long, long, scales[:2], x_scales=one, out_dtype=np.float32)
