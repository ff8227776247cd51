"""rmsnorm: the kernel against its mirror, the mirror against float64, and the contract."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels.rmsnorm import Config, choose_config
from engine.testing import cases
from engine.testing.tolerances import assert_close


def _inputs(rows, n, dtype):
    x = cases.normal((rows, n), dtype, seed=1, scale=3.0)
    residual = cases.normal((rows, n), dtype, seed=2)
    weight = cases.normal((n,), dtype, seed=3, scale=0.1, mean=1.0)
    return x, residual, weight


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid(("rows", "n"), cases.ROWS)
def test_matches_mirror(xp, rows, n, dtype):
    x, _, weight = _inputs(rows, n, dtype)
    out, buffer = cases.guarded(xp, (rows, n), x.dtype)
    got = kernels.rmsnorm(*cases.to_module(xp, x, weight), eps=1e-5, out=out)
    assert got is out
    assert_close(got, reference.rmsnorm(x, weight, eps=1e-5), reduction=n)
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid(("rows", "n"), cases.ROWS)
def test_fused_residual_matches_mirror(xp, rows, n, dtype):
    x, residual, weight = _inputs(rows, n, dtype)
    want = reference.rmsnorm(x, weight, residual=residual, weight_offset=1.0)
    gx, gr, gw = cases.to_module(xp, x.copy(), residual.copy(), weight)
    y, h = kernels.rmsnorm(gx, gw, residual=gr, weight_offset=1.0, out=gx, residual_out=gr)
    assert y is gx and h is gr  # in place
    assert_close(h, want[1], name="residual_out")
    assert_close(y, want[0], reduction=n)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("rows", "n"), cases.ROWS)
def test_scaled_residual_has_the_bits_of_the_mirror(xp, rows, n, dtype):
    x, residual, weight = _inputs(rows, n, dtype)
    y, h = reference.rmsnorm(x, weight, residual=residual, x_scale=0.22)
    plain = x.astype(np.float32) * np.float32(0.22) + residual.astype(np.float32)
    np.testing.assert_array_equal(h, plain.astype(x.dtype))
    gx, gr, gw = cases.to_module(xp, x, residual, weight)
    got, sums = kernels.rmsnorm(gx, gw, residual=gr, x_scale=0.22)
    np.testing.assert_array_equal(cases.to_module(np, to_numpy(sums)), h)
    assert_close(got, y, reduction=n)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "n"), [(3, 4, 64), (5, 2, 80), (1, 3, 33)])
def test_strided_heads_in_place(xp, tokens, heads, n, dtype):
    """Per-head q/k norm, in place on a view of the fused qkv rows."""
    qkv = cases.normal((tokens, (heads + 2) * n), dtype, seed=4)
    weight = cases.normal((n,), dtype, seed=5, mean=1.0)
    want = reference.rmsnorm(qkv[:, : heads * n].reshape(tokens, heads, n), weight)
    array = xp.array(qkv)
    view = array[:, : heads * n].reshape(tokens, heads, n)
    assert xp.may_share_memory(view, array)
    kernels.rmsnorm(view, xp.asarray(weight), out=view)
    assert_close(xp.ascontiguousarray(view), want, reduction=n)
    np.testing.assert_array_equal(
        cases.to_module(np, array.get() if xp is not np else array)[:, heads * n :],
        qkv[:, heads * n :],
    )


@pytest.mark.grid("has_bias", [False, True])
@pytest.mark.grid("has_residual", [False, True])
@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid(("rows", "n"), cases.ROWS)
def test_layernorm_matches_mirror(xp, rows, n, dtype, has_residual, has_bias):
    x, residual, weight = _inputs(rows, n, dtype)
    x = (x.astype(np.float32) + 4.0).astype(x.dtype)  # a nonzero mean
    bias = cases.normal((n,), dtype, seed=6) if has_bias else None
    residual = residual if has_residual else None
    options = {"eps": 1e-5, "subtract_mean": True}
    want = reference.rmsnorm(x, weight, residual=residual, bias=bias, **options)
    gx, gr, gw, gb = cases.to_module(xp, x, residual, weight, bias)
    out, buffer = cases.guarded(xp, (rows, n), x.dtype)
    got = kernels.rmsnorm(gx, gw, residual=gr, bias=gb, out=out, **options)
    if has_residual:
        assert_close(got[1], want[1], name="residual_out")
        got, want = got[0], want[0]
    assert_close(got, want, reduction=n)
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


def test_layernorm_mirror_is_the_formula():
    x = np.random.default_rng(0).standard_normal((6, 200)) + 3.0
    w, b = np.random.default_rng(1).standard_normal((2, 200))
    want = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * w + b
    given = (array.astype(np.float32) for array in (x, w))
    got = reference.rmsnorm(*given, subtract_mean=True, bias=b.astype(np.float32))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_mirror_is_the_formula():
    x = np.random.default_rng(0).standard_normal((6, 200))
    w = np.random.default_rng(1).standard_normal(200)
    want = np.array([row / np.sqrt((row @ row) / 200 + 1e-6) * (w + 1.0) for row in x])
    got = reference.rmsnorm(x.astype(np.float32), w.astype(np.float32), weight_offset=1.0)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_scaling_a_row_changes_nothing(xp):
    x, _, weight = _inputs(4, 96, "float32")
    gx, gw = cases.to_module(xp, x, weight)
    a, b = kernels.rmsnorm(gx, gw, eps=0.0), kernels.rmsnorm(gx * 8, gw, eps=0.0)
    np.testing.assert_array_equal(np.asarray(a.tolist()), np.asarray(b.tolist()))


def test_config_is_a_pure_function():
    assert choose_config(512, 2, is_aligned=True) == Config("registers_1", 128, 4)
    assert choose_config(576, 2, is_aligned=True) == Config("registers_2", 64, 1)
    assert choose_config(16384, 2, is_aligned=True) == Config("registers_32", 512, 1)
    assert choose_config(16384, 4, is_aligned=True) == Config("long_vector", 256, 1)
    assert choose_config(4096, 4, is_aligned=False) == Config("long_scalar", 256, 1)


def test_contract(xp):
    x, weight = xp.ones((2, 8), np.float32), xp.ones(8, np.float32)
    with pytest.raises(ShapeError, match=r"weight: must have shape \(N,\); N = 8 from x; got \(7,"):
        kernels.rmsnorm(x, weight[:7])
    with pytest.raises(DTypeError, match=r"weight: must be float32; got float16"):
        kernels.rmsnorm(x, weight.astype(np.float16))
    with pytest.raises(DTypeError, match="x: must be an array; got list"):
        kernels.rmsnorm([1.0], weight)
    with pytest.raises(ContractError, match=r"eps: must be a number from 0\.0 to inf; got nan"):
        kernels.rmsnorm(x, weight, eps=float("nan"))
    with pytest.raises(ContractError, match="weight_offset: must be a number from -inf to inf; go"):
        kernels.rmsnorm(x, weight, weight_offset="1")
    with pytest.raises(ContractError, match=r"x_scale: must be a number from -inf to inf; got nan"):
        kernels.rmsnorm(x, weight, residual=x, x_scale=float("nan"))
    with pytest.raises(ContractError, match="bias: must be None without subtract_mean"):
        kernels.rmsnorm(x, weight, bias=weight)
    with pytest.raises(ShapeError, match=r"bias: must have shape \(N,\)"):
        kernels.rmsnorm(x, weight, bias=weight[:7], subtract_mean=True)
    with pytest.raises(ContractError, match=r"x_scale: must be 1 without residual; got 0\.5"):
        kernels.rmsnorm(x, weight, x_scale=0.5)
    with pytest.raises(ShapeError, match="out: must have shape"):
        kernels.rmsnorm(x, weight, out=xp.empty((3, 8), np.float32))


@pytest.mark.gpu
def test_mixed_modules(cp):
    with pytest.raises(ContractError, match="weight: is a numpy array, but x is a cupy array"):
        kernels.rmsnorm(cp.ones((2, 8), np.float32), np.ones(8, np.float32))


@pytest.mark.gpu
def test_a_late_launch_has_the_same_bits(cp):
    """Between GEMMs, with each kernel launched before its predecessor ends."""
    x, residual, norm_weight = cases.to_module(cp, *_inputs(9, 1024, "bfloat16"))
    weight = cp.asarray(cases.normal((1024, 1024), "bfloat16", seed=7, scale=1 / 32))

    def chain(is_late):
        y = x
        for _ in range(20):
            y = kernels.gemm(y, weight, pdl=True)
            y, _ = kernels.rmsnorm(y, norm_weight, residual=residual, is_late=is_late)
        return to_numpy(y).view("u2")

    np.testing.assert_array_equal(chain(True), chain(False))
