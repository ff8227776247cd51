"""rmsnorm_gemm_wna16: the kernel against the mirror, and against the two separate ops."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, ShapeError
from engine.testing import cases
from engine.testing.cases_quantized import random_weight, weight_to
from engine.testing.tolerances import assert_close


def _inputs(m, n, k, dtype):
    x = cases.normal((m, k), dtype, seed=1)
    norm_weight = cases.normal((k,), dtype, seed=2, mean=1.0, scale=0.1)
    return x, norm_weight, cases.normal((n,), dtype, seed=3)


@pytest.mark.grid("dtype", ["float16", "bfloat16"])
@pytest.mark.grid("m", [1, 2, 3, 8, 15, 20, 0])
@pytest.mark.grid(("n", "k"), [(48, 512), (70, 1096), (20, 100)])
@pytest.mark.grid("name", ["int4_g128", "q4_k", "q6_k", "q8_0"])
def test_matches_mirror(xp, name, n, k, m, dtype):
    weight, (x, norm_weight, bias) = random_weight(name, n, k), _inputs(m, n, k, dtype)
    want = reference.rmsnorm_gemm_wna16(x, norm_weight, weight, bias=bias, activation="silu")
    gx, gw, gb = cases.to_module(xp, x, norm_weight, bias)
    out, buffer = cases.guarded(xp, (m, n), x.dtype)
    got = kernels.rmsnorm_gemm_wna16(
        gx, gw, weight_to(xp, weight), bias=gb, activation="silu", out=out, pdl=True
    )
    assert got is out
    assert_close(got, want, reduction=k)
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.parametrize("m", [1, 5, 20])
@pytest.mark.parametrize("permuted", [False, True])
def test_is_the_two_ops_in_turn(xp, permuted, m):
    weight = random_weight("int4_g64", 64, 256, permuted=permuted)
    x, norm_weight, _ = _inputs(m, 64, 256, "bfloat16")
    gx, gw, moved = xp.asarray(x), xp.asarray(norm_weight), weight_to(xp, weight)
    got = kernels.rmsnorm_gemm_wna16(
        gx, gw, moved, eps=1e-3, weight_offset=1.0, activation="swiglu"
    )
    normed = kernels.rmsnorm(gx, gw, eps=1e-3, weight_offset=1.0)
    want = kernels.gemm_wna16(normed, moved, activation="swiglu")
    assert_close(got, to_numpy(want), reduction=256)


def test_mirror_is_the_formula():
    weight = random_weight("int8_g32", 8, 96)
    x, norm_weight, _ = (a.astype(np.float32) for a in _inputs(3, 8, 96, "float32"))
    got = kernels.rmsnorm_gemm_wna16(x, norm_weight, weight, eps=0.0)
    normed = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=1, keepdims=True)) * norm_weight
    want = normed @ reference.dequantize(weight, "float32").T.astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_contract():
    weight, x = random_weight("q4_0", 16, 64), np.zeros((2, 64), np.float32)
    with pytest.raises(ShapeError, match="norm_weight: must have shape"):
        kernels.rmsnorm_gemm_wna16(x, np.ones(63, np.float32), weight)
    with pytest.raises(ContractError, match="eps: must be a number from"):
        kernels.rmsnorm_gemm_wna16(x, np.ones(64, np.float32), weight, eps=-1.0)
