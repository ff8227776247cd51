"""gemm_wna16: the kernels against the mirror in every format, the choice, the contract."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels._packed import stage_tiles
from engine.kernels.gemm_wna16 import few_rows, sm90
from engine.testing import cases
from engine.testing.cases_gemm import MODEL_LAYERS
from engine.testing.cases_quantized import PACKED_FORMATS, random_weight, weight_to
from engine.testing.tolerances import assert_close
from engine.weights import FORMATS, unpack_weight

HALVES = ("float16", "bfloat16")
ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 40)
SIZES = ((48, 512), (37, 200), (130, 1096))


def _extras(m, n, dtype):
    return cases.normal((n,), dtype, seed=3), cases.normal((m, n), dtype, seed=4)


@pytest.mark.grid("dtype", HALVES)
@pytest.mark.grid("m", ROWS)
@pytest.mark.grid(("n", "k"), SIZES)
@pytest.mark.grid("name", PACKED_FORMATS)
def test_matches_mirror(xp, name, n, k, m, dtype):
    weight, x = random_weight(name, n, k), cases.normal((m, k), dtype, seed=1)
    out, buffer = cases.guarded(xp, (m, n), x.dtype)
    got = kernels.gemm_wna16(xp.asarray(x), weight_to(xp, weight), out=out)
    assert got is out
    assert_close(got, reference.gemm_wna16(x, weight), reduction=k)
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.grid("activation", [None, "silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.grid("m", [1, 5, 12, 30])
@pytest.mark.grid("name", ["int4_g128", "q4_k", "q8_0"])
def test_epilogue_matches_mirror(xp, name, m, activation):
    n, k = 70, 512
    weight, x = random_weight(name, n, k), cases.normal((m, k), "bfloat16", seed=1)
    bias, residual = _extras(m, n, "bfloat16")
    want = reference.gemm_wna16(x, weight, bias=bias, residual=residual, activation=activation)
    gx, gb, gr = cases.to_module(xp, x, bias, residual.copy())
    got = kernels.gemm_wna16(
        gx, weight_to(xp, weight), bias=gb, residual=gr, activation=activation, out=gr
    )
    assert got is gr  # in place
    assert_close(got, want, reduction=k)


def _is_close(got, want, reduction):
    try:
        assert_close(got, want, reduction=reduction)
    except AssertionError:
        return False
    return True


@pytest.mark.grid("m", [1, 3, 16, 20])
@pytest.mark.grid(("f", "k"), [(32, 256), (160, 512), (40, 128), (35, 64)])
@pytest.mark.grid("name", ["int4_g64_zp", "q6_k", "mxfp4"])
def test_swiglu_matches_mirror(xp, name, f, k, m):
    weight, x = random_weight(name, 2 * f, k), cases.normal((m, k), "bfloat16", seed=1)
    bias = cases.normal((2 * f,), "bfloat16", seed=3)
    for extra in ({}, {"bias": bias}):
        moved = {key: xp.asarray(value) for key, value in extra.items()}
        gx, gw = xp.asarray(x), weight_to(xp, weight)
        got = kernels.gemm_wna16(gx, gw, activation="swiglu", **moved)
        if f % 16 and xp is not np:  # separate kernel: gate and up are rounded in between
            packed = to_numpy(kernels.gemm_wna16(gx, gw, **moved))
            assert_close(got, reference.swiglu(packed))
            continue
        wanted = [reference.gemm_wna16(x, weight, activation="swiglu", **extra)]
        if m > 8:  # tiles round the weights
            rounded = unpack_weight(weight).astype(x.dtype)
            wanted.append(reference.gemm(x, rounded, activation="swiglu", **extra))
        assert any(_is_close(got, want, k) for want in wanted)


@pytest.mark.parametrize("m", [1, 9, 33])
def test_float32_result(xp, m):
    """Logits: accumulated and stored in float32."""
    n, k = 300, 512
    weight, x = random_weight("q6_k", n, k), cases.normal((m, k), "bfloat16", seed=1)
    got = kernels.gemm_wna16(xp.asarray(x), weight_to(xp, weight), out_dtype=np.float32)
    want = reference.gemm_wna16(x, weight, out_dtype=np.float32)
    assert_close(got, want, reduction=k, dtype="bfloat16")


@pytest.mark.grid("scales", HALVES)
@pytest.mark.grid("m", [1, 11, 24])
@pytest.mark.grid("name", ["int4_g32", "int4_g128_zp", "int8_g128"])
def test_scales_of_checkpoints(xp, name, m, scales):
    weight, x = random_weight(name, 64, 384, scales=scales), cases.normal((m, 384), "float16", 1)
    got = kernels.gemm_wna16(xp.asarray(x), weight_to(xp, weight))
    assert_close(got, reference.gemm_wna16(x, weight), reduction=384)


@pytest.mark.parametrize("m", [1, 8, 20])
@pytest.mark.parametrize("name", ["int4_g128", "int4_g64_zp"])
def test_columns_in_another_order(xp, name, m):
    weight = random_weight(name, 48, 256, permuted=True)
    x = cases.normal((m, 256), "bfloat16", seed=1)
    got = kernels.gemm_wna16(xp.asarray(x), weight_to(xp, weight))
    assert_close(got, reference.gemm_wna16(x, weight), reduction=256)


@pytest.mark.gpu
@pytest.mark.grid("m", [1, 2, 3, 6, 16])
@pytest.mark.grid("name", ["int4_g128", "q4_0", "q4_k", "q6_k", "q8_0", "int8_g128_zp"])
def test_every_way_to_cut(cp, monkeypatch, name, m):
    n, k, form = 608, 2312, FORMATS[name]  # k: more than two warps hold of a row in registers
    weight, x = random_weight(name, n, k), cases.normal((m, k), "bfloat16", seed=1)
    gx, gw = cp.asarray(x), weight_to(cp, weight)
    for activation, columns in ((None, n), ("swiglu", n // 2)):
        want = reference.gemm_wna16(x, weight, activation=activation)
        for pdl in (False, True):
            for config in few_rows.all_configs(m, n, k, form):
                if activation and config.row_tiles % 2:
                    continue
                monkeypatch.setattr(few_rows, "choose", lambda _, config=config: config)
                monkeypatch.setattr(sm90, "choose", lambda _: None)
                out, buffer = cases.guarded(cp, (m, columns), x.dtype)
                kernels.gemm_wna16(gx, gw, activation=activation, pdl=pdl, out=out)
                assert_close(out, want, reduction=k, name=f"{config}")
                assert bool(cp.isnan(buffer[:64]).all()) and bool(cp.isnan(buffer[-64:]).all())


@pytest.mark.parametrize("m", [3, 12, 20])
def test_views(xp, m):
    """Rows of x and out with padding between them, and rows that start at an odd element."""
    weight, x = random_weight("int4_g32", 40, 96), cases.normal((m, 96), "bfloat16", seed=1)
    want = reference.gemm_wna16(x, weight)
    for extra, start in ((8, 8), (5, 3)):
        wide = xp.full((m, 96 + extra + start), float("nan"), x.dtype)
        wide[:, start : start + 96] = xp.asarray(x)
        out = xp.full((m, 40 + extra), float("nan"), x.dtype)
        kernels.gemm_wna16(wide[:, start : start + 96], weight_to(xp, weight), out=out[:, :40])
        assert_close(xp.ascontiguousarray(out[:, :40]), want, reduction=96)
        assert bool(xp.isnan(out[:, 40:]).all())


@pytest.mark.parametrize(("m", "n", "k"), [(0, 16, 64), (3, 0, 64), (3, 16, 0)])
def test_empty(xp, m, n, k):
    weight, x = random_weight("q4_0", n, k), cases.normal((m, k), "bfloat16", seed=1)
    got = kernels.gemm_wna16(xp.asarray(x), weight_to(xp, weight))
    assert_close(got, np.zeros((m, n), x.dtype))


def test_mirror_is_the_formula():
    weight = random_weight("q4_k", 20, 256)
    x = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    want = x.astype(np.float64) @ unpack_weight(weight).astype(np.float64).T
    np.testing.assert_allclose(kernels.gemm_wna16(x, weight), want, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 4, 20])
@pytest.mark.parametrize("k", [1024, 2304, 4352])
@pytest.mark.parametrize("name", ["int4_g128", "q6_k", "int8_g64"])
def test_deterministic_rows_do_not_depend_on_their_neighbours(cp, name, k, m):
    weight = weight_to(cp, random_weight(name, 256, k))
    x = cp.asarray(cases.normal((40, k), "bfloat16", seed=1))
    together = to_numpy(kernels.gemm_wna16(x, weight, deterministic=True))
    alone = to_numpy(kernels.gemm_wna16(x[-m:], weight, deterministic=True))
    np.testing.assert_array_equal(alone.view(np.uint16), together[-m:].view(np.uint16))


@pytest.mark.gpu
def test_overlapping_kernels_wait_for_each_other(cp):
    """A chain of GEMMs; each reads its predecessor's output and overwrites its input."""
    names = ("int4_g128", "q4_0", "q8_0", "q6_k")
    weights = [weight_to(cp, random_weight(name, 1024, 1024, 9)) for name in names]
    x = cp.asarray(cases.normal((1, 1024), "bfloat16", seed=9))

    def chain(pdl):
        buffers = [x.copy(), x.copy()]
        for _ in range(5):
            for i, weight in enumerate(weights):
                a, b = buffers[i % 2], buffers[(i + 1) % 2]
                kernels.gemm_wna16(a, weight, residual=x, out=b, pdl=pdl)
        return to_numpy(buffers[0]).astype(np.float32)

    want = chain(False)
    for _ in range(5):
        np.testing.assert_array_equal(chain(True), want)


@pytest.mark.parametrize("name", ["int4_g128", "q4_0", "q8_0", "q6_k"])
@pytest.mark.parametrize("m", [1, 8, 16])
def test_the_choice_covers_the_problem(name, m):
    form = FORMATS[name]
    for (n, k), gated in ((v, key[1] == "gate_up") for key, v in MODEL_LAYERS.items()):
        config = few_rows.choose_few_rows(
            m, n, k, form, 132, 227 << 10, max_cluster=4, is_gated=gated
        )
        assert config is not None and config.tokens >= m
        columns = stage_tiles(form) * 64
        assert config.cluster * config.parts * config.part_stages * columns >= k
        assert config.parts * config.row_tiles <= (12 if m > 8 else 16)
        assert config.clusters * config.cluster <= 132 and config.shared_bytes <= 220 << 10
        assert not gated or config.row_tiles % 2 == 0
        units = -(-n // (16 * config.row_tiles))
        rounds = -(-units // config.clusters)
        assert 1 <= config.num_stages <= min(4, rounds * config.part_stages)


def test_contract(xp):
    weight, x = weight_to(xp, random_weight("q4_0", 16, 64)), xp.zeros((2, 64), np.float16)
    with pytest.raises(ShapeError, match=r"x: must have shape|weight: "):
        kernels.gemm_wna16(xp.zeros((2, 63), np.float16), weight)
    with pytest.raises(DTypeError, match="weight: must be a Weight; got ndarray"):
        kernels.gemm_wna16(x, xp.zeros((16, 64), np.float16))
    with pytest.raises(ContractError, match="a packed format; got 'int8'"):
        kernels.gemm_wna16(x, weight_to(xp, random_weight("int8", 16, 64)))
    with pytest.raises(ContractError, match="activation: must be one of"):
        kernels.gemm_wna16(x, weight, activation="silu_and_mul")
    with pytest.raises(ContractError, match="out_dtype: must be float16 or float32; got 'int8'"):
        kernels.gemm_wna16(x, weight, out_dtype="int8")
