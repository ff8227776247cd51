"""rmsnorm_gemm: the kernels against the mirror, and against the two ops it fuses."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels import _chip
from engine.kernels.gemm import launch as gemm_launch
from engine.kernels.gemm.config import all_configs, choose_config
from engine.kernels.gemm.skinny import gemv_configs, ring_configs
from engine.testing import cases
from engine.testing.cases_gemm import PRODUCTS
from engine.testing.tolerances import assert_close


def _inputs(m, n, k, dtype):
    x = cases.normal((m, k), dtype, seed=1, scale=3.0)
    norm_weight = cases.normal((k,), dtype, seed=2, scale=0.1, mean=1.0)
    weight = cases.normal((n, k), dtype, seed=3, scale=k**-0.5)
    return x, norm_weight, weight, cases.normal((n,), dtype, seed=4)


def _configs(k=264):
    return [
        pytest.param(dtype, c, id=f"{dtype}-{i}-{c.kernel}")
        for dtype in cases.DTYPES
        for i, c in enumerate(all_configs(k, dtype))
    ]


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid(("m", "n", "k"), [p for p in PRODUCTS if p[2]])
def test_matches_mirror(xp, m, n, k, dtype):
    x, norm_weight, weight, bias = _inputs(m, n, k, dtype)
    want = reference.rmsnorm_gemm(x, norm_weight, weight, eps=1e-5, bias=bias)
    gx, gn, gw, gb = cases.to_module(xp, x, norm_weight, weight, bias)
    out, buffer = cases.guarded(xp, (m, n), x.dtype)
    got = kernels.rmsnorm_gemm(gx, gn, gw, eps=1e-5, bias=gb, out=out)
    assert got is out
    assert_close(got, want, reduction=k)
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.grid(("dtype", "config"), _configs())
@pytest.mark.grid("m", [1, 19, 133])
def test_every_kernel_matches_mirror(xp, monkeypatch, m, dtype, config):
    n, k = 300, 264
    x, norm_weight, weight, bias = _inputs(m, n, k, dtype)
    monkeypatch.setattr(gemm_launch, "choose_config", lambda *_, **__: config)
    want = reference.rmsnorm_gemm(x, norm_weight, weight, weight_offset=1.0, bias=bias)
    gx, gn, gw, gb = cases.to_module(xp, x, norm_weight, weight, bias)
    out, buffer = cases.guarded(xp, (m, n), x.dtype)
    kernels.rmsnorm_gemm(gx, gn, gw, weight_offset=1.0, bias=gb, out=out)
    assert_close(out, want, reduction=k)
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("m", [1, 5, 40, 70])
def test_is_the_two_ops_one_after_the_other(xp, m, dtype):
    x, norm_weight, weight, _ = _inputs(m, 96, 576, dtype)
    gx, gn, gw = cases.to_module(xp, x, norm_weight, weight)
    want = kernels.gemm(kernels.rmsnorm(gx, gn), gw)
    assert_close(kernels.rmsnorm_gemm(gx, gn, gw), to_numpy(want), reduction=576)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("n", [33, 272, 6144])
@pytest.mark.parametrize("k", [72, 512, 1024, 1536, 2560, 3584, 4096, 4104])
def test_deterministic_has_the_bits_of_the_two_ops(xp, k, n, dtype):
    """Up to 4,096 features a kernel for one row computes both; longer rows take two launches."""
    if xp is np and n > 272:
        pytest.skip("one row at a time")
    x, norm_weight, weight, _ = _inputs(40, n, k, dtype)
    gx, gn, gw = cases.to_module(xp, x, norm_weight, weight)
    activation = "swiglu" if n % 16 == 0 else None
    options = {"activation": activation, "deterministic": True, "pdl": True}
    for offset in (0.0, 1.0):
        rows = kernels.rmsnorm(gx, gn, eps=1e-5, weight_offset=offset)
        want = to_numpy(kernels.gemm(rows, gw, **options))
        for start, stop in ((0, 1), (3, 4), (39, 40), (2, 7), (0, 40)):
            got = kernels.rmsnorm_gemm(
                gx[start:stop], gn, gw, eps=1e-5, weight_offset=offset, **options
            )
            np.testing.assert_array_equal(
                to_numpy(got).view(np.uint8), want[start:stop].view(np.uint8)
            )


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("m", [2, 40])
def test_rows_that_lie_apart(xp, m, dtype):
    x, norm_weight, weight, _ = _inputs(m, 33, 72, dtype)
    want = reference.rmsnorm_gemm(x, norm_weight, weight)
    for extra in (8, 5):
        wide = xp.full((m, 72 + extra), float("nan"), x.dtype)
        wide[:, :72] = xp.asarray(x)
        out = xp.full((m, 33 + extra), float("nan"), x.dtype)
        gn, gw = cases.to_module(xp, norm_weight, weight)
        kernels.rmsnorm_gemm(wide[:, :72], gn, gw, out=out[:, :33])
        assert_close(xp.ascontiguousarray(out[:, :33]), want, reduction=72)
        assert bool(xp.isnan(out[:, 33:]).all())


def test_mirror_is_the_formula():
    rng = np.random.default_rng(0)
    x, g, w, b = (rng.standard_normal(s) for s in ((6, 200), 200, (30, 200), 30))
    rms = np.sqrt((x * x).sum(axis=1) / 200 + 1e-3)
    want = np.einsum("mk,k,nk->mn", x, g + 1, w) / rms[:, None] + b
    x, g, w, b = (a.astype(np.float32) for a in (x, g, w, b))
    got = reference.rmsnorm_gemm(x, g, w, eps=1e-3, weight_offset=1.0, bias=b)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("m", [3, 40])
def test_scaling_a_row_changes_nothing(xp, m):
    x, norm_weight, weight, _ = _inputs(m, 50, 96, "float32")
    gx, gn, gw = cases.to_module(xp, x, norm_weight, weight)
    once = kernels.rmsnorm_gemm(gx, gn, gw, eps=0.0)
    np.testing.assert_array_equal(
        to_numpy(kernels.rmsnorm_gemm(gx * 8, gn, gw, eps=0.0)), to_numpy(once)
    )


def test_contract(xp):
    x, norm, weight = (xp.ones(shape, np.float32) for shape in ((2, 8), (8,), (3, 8)))
    with pytest.raises(ShapeError, match=r"norm_weight: must have shape \(K,\); K = 8 from x"):
        kernels.rmsnorm_gemm(x, norm[:7], weight)
    with pytest.raises(DTypeError, match="weight: must be float32; got float16"):
        kernels.rmsnorm_gemm(x, norm, weight.astype(np.float16))
    with pytest.raises(ContractError, match=r"eps: must be a number from 0\.0 to inf; got -1"):
        kernels.rmsnorm_gemm(x, norm, weight, eps=-1)
    with pytest.raises(ContractError, match="weight_offset: must be a number"):
        kernels.rmsnorm_gemm(x, norm, weight, weight_offset=float("nan"))
    with pytest.raises(ContractError, match="x: must be of at least one feature"):
        kernels.rmsnorm_gemm(x[:, :0], norm[:0], weight[:, :0])
    with pytest.raises(ShapeError, match="out: must have shape"):
        kernels.rmsnorm_gemm(x, norm, weight, out=xp.empty((2, 4), np.float32))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 304, 264), (13, 96, 1096), (70, 272, 136)])
def test_silu_and_mul_of_a_norm(xp, m, n, k, dtype):
    x, norm_weight, weight, bias = _inputs(m, n, k, dtype)
    want = reference.rmsnorm_gemm(x, norm_weight, weight, bias=bias, activation="silu_and_mul")
    gx, gn, gw, gb = cases.to_module(xp, x, norm_weight, weight, bias)
    out, buffer = cases.guarded(xp, (m, n // 2), x.dtype)
    kernels.rmsnorm_gemm(gx, gn, gw, bias=gb, activation="silu_and_mul", out=out)
    assert_close(out, want, reduction=k)
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid(
    ("m", "n", "k"),
    [(1, 304, 264), (5, 96, 1096), (13, 96, 1096), (1, 32, 5128), (70, 272, 136), (2, 34, 72)],
)
def test_swiglu_of_a_norm(xp, m, n, k, dtype):
    x, norm_weight, weight, bias = _inputs(m, n, k, dtype)
    want = reference.rmsnorm_gemm(x, norm_weight, weight, bias=bias, activation="swiglu")
    gx, gn, gw, gb = cases.to_module(xp, x, norm_weight, weight, bias)
    out, buffer = cases.guarded(xp, (m, n // 2), x.dtype)
    kernels.rmsnorm_gemm(gx, gn, gw, bias=gb, activation="swiglu", out=out)
    assert_close(out, want, reduction=k)
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.grid(("dtype", "config"), _configs())
@pytest.mark.grid("m", [1, 6])
def test_every_kernel_makes_swiglu(xp, monkeypatch, m, dtype, config):
    n, k = 304, 264
    x, norm_weight, weight, _ = _inputs(m, n, k, dtype)
    monkeypatch.setattr(gemm_launch, "choose_config", lambda *_, **__: config)
    want = reference.rmsnorm_gemm(x, norm_weight, weight, activation="swiglu")
    out, buffer = cases.guarded(xp, (m, n // 2), x.dtype)
    kernels.rmsnorm_gemm(*cases.to_module(xp, x, norm_weight, weight), activation="swiglu", out=out)
    assert_close(out, want, reduction=k)
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.grid("dtype", ["float16", "bfloat16"])
@pytest.mark.grid("config", range(len(gemv_configs(304, 1032, (1,)))))
@pytest.mark.grid("pdl", [False, True])
def test_gemv(xp, monkeypatch, config, dtype, pdl):
    n, k = 304, 1032
    x, norm_weight, weight, bias = _inputs(1, n, k, dtype)
    found = gemv_configs(n, k, (1,))[config]
    monkeypatch.setattr(gemm_launch, "choose_config", lambda *_, **__: found)
    arrays = cases.to_module(xp, x, norm_weight, weight)
    gb = xp.asarray(bias)
    for activation, columns in ((None, n), ("swiglu", n // 2), ("silu_and_mul", n // 2)):
        for extra in ({}, {"bias": gb}):
            host = {key: to_numpy(v) for key, v in extra.items()}
            want = reference.rmsnorm_gemm(x, norm_weight, weight, activation=activation, **host)
            out, buffer = cases.guarded(xp, (1, columns), x.dtype)
            kernels.rmsnorm_gemm(*arrays, activation=activation, out=out, pdl=pdl, **extra)
            assert_close(out, want, reduction=k)
            assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("k", [264, 896, 4096, 4104, 9000])
def test_a_row_has_the_same_bits_alone(xp, monkeypatch, k, dtype):
    """One row is loaded through registers, several by bulk copy."""
    if xp is np:
        pytest.skip("BLAS sums a row as the matrix's shape wants it")
    limits = _chip.limits()
    config = choose_config(3, 64, k, dtype, 132, limits=limits, has_norm=True)
    monkeypatch.setattr(gemm_launch, "choose_config", lambda *_, **__: config)
    x, norm_weight, weight, _ = _inputs(3, 64, k, dtype)
    gx, gn, gw = cases.to_module(xp, x, norm_weight, weight)
    together = to_numpy(kernels.rmsnorm_gemm(gx, gn, gw))
    for row in range(3):
        alone = to_numpy(kernels.rmsnorm_gemm(gx[row : row + 1], gn, gw))
        np.testing.assert_array_equal(alone[0].astype(np.float32), together[row].astype(np.float32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gemv_sums_as_ring_kernels_do(xp, monkeypatch, dtype):
    """Splits of equal length give bitwise identical sums."""
    if xp is np:
        pytest.skip("there is one mirror for both")
    n, k = 64, 512
    x, norm_weight, weight, _ = _inputs(1, n, k, dtype)
    arrays = cases.to_module(xp, x, norm_weight, weight)
    gemv = gemv_configs(n, k, (1,))[0]
    configs = [c for c in ring_configs(k) if c.k_per_split == gemv.k_per_split]
    results = []
    for config in (gemv, *configs):
        monkeypatch.setattr(gemm_launch, "choose_config", lambda *_, c=config, **__: c)
        results.append(to_numpy(kernels.rmsnorm_gemm(*arrays)).astype(np.float32))
    assert len(results) > 1
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_swiglu_is_the_formula():
    rng = np.random.default_rng(1)
    x, g, w, b = (rng.standard_normal(s) for s in ((4, 60), 60, (14, 60), 14))
    rms = np.sqrt((x * x).sum(axis=1) / 60 + 1e-6)
    gate, up = np.split((x * g / rms[:, None]) @ w.T + b, 2, axis=1)
    x, g, w, b = (a.astype(np.float32) for a in (x, g, w, b))
    got = reference.rmsnorm_gemm(x, g, w, bias=b, activation="swiglu")
    np.testing.assert_allclose(got, gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-4)
    with pytest.raises(ContractError, match="weight: must be of as many rows of gate as of up"):
        kernels.rmsnorm_gemm(x, g, w[:13], activation="swiglu")
