"""gemm_fp8: every kernel against the mirror, and the mirror against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.dtypes import np_dtype
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels._chip import Limits
from engine.kernels.gemm import w8
from engine.kernels.gemm.w8_sm90 import choose_w8_hopper, w8_configs, w8_hopper_specs
from engine.testing import cases
from engine.testing.cases_w8 import PRODUCTS_8BIT, dequantized, quantized_weight
from engine.testing.tolerances import assert_close

BLOCKS = [False, True]
ACTIVATIONS = (None, "silu", "gelu", "swiglu", "silu_and_mul")


def inputs(m, n, k, dtype, has_blocks, columns=None):
    x = cases.normal((m, k), dtype, seed=1)
    bias = cases.normal((n,), dtype, seed=3)
    residual = cases.normal((m, columns or n), dtype, seed=4)
    return x, *quantized_weight(n, k, "fp8", has_blocks, seed=2), bias, residual


def compare(xp, x, weight, scales, *, dtype=None, deterministic=False, pdl=False, **args):
    """Call kernel and mirror; 16-bit tolerance, since Hopper's e4m3 accumulation is inexact."""
    want = reference.gemm_fp8(x, weight, scales, **args)
    given = {a: xp.asarray(v) if isinstance(v, np.ndarray) else v for a, v in args.items()}
    out, buffer = cases.guarded(xp, want.shape, want.dtype)
    got = kernels.gemm_fp8(
        *cases.to_module(xp, x, weight, scales),
        out=out,
        deterministic=deterministic,
        pdl=pdl,
        **given,
    )
    assert got is out
    assert_close(got, want, reduction=x.shape[1], dtype=dtype)
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.grid("has_blocks", BLOCKS)
@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid(("m", "n", "k"), PRODUCTS_8BIT)
def test_matches_mirror(xp, m, n, k, dtype, has_blocks):
    x, weight, scales, bias, residual = inputs(m, n, k, dtype, has_blocks)
    compare(xp, x, weight, scales, bias=bias, residual=residual, activation="silu")
    compare(xp, x, weight, scales, deterministic=True)


@pytest.mark.grid("has_blocks", BLOCKS)
@pytest.mark.grid("activation", ACTIVATIONS)
@pytest.mark.grid("m", [1, 7, 40, 150])
def test_epilogues(xp, m, activation, has_blocks):
    is_gated = activation in ("swiglu", "silu_and_mul")
    for n in (256, 96):
        x, weight, scales, bias, residual = inputs(
            m, n, 384, "bfloat16", has_blocks, n // 2 if is_gated else n
        )
        args = {} if activation == "swiglu" else {"residual": residual}
        compare(xp, x, weight, scales, bias=bias, activation=activation, pdl=True, **args)
        compare(
            xp,
            x,
            weight,
            scales,
            activation=activation,
            out_dtype=np.dtype(np.float32),
            dtype="bfloat16",
        )


@pytest.mark.parametrize("has_blocks", BLOCKS)
@pytest.mark.parametrize("m", [1, 6, 70])
def test_codes_of_x(xp, m, has_blocks):
    x, weight, scales, bias, _ = inputs(m, 96, 400, "bfloat16", has_blocks)
    codes, x_scales = reference.quantize_rows(x, group=128 if has_blocks else 0)
    for out_dtype in ("bfloat16", "float32"):
        compare(
            xp,
            codes,
            weight,
            scales,
            x_scales=x_scales,
            bias=bias,
            out_dtype=np_dtype(out_dtype),
            dtype="bfloat16",
        )


@pytest.mark.parametrize("has_blocks", BLOCKS)
@pytest.mark.parametrize("m", [1, 6, 70])
def test_a_norm_before_it(xp, m, has_blocks):
    """The norm's last bit may move a code, so compare with the separate ops."""
    x, weight, scales, _, _ = inputs(m, 96, 1024, "bfloat16", has_blocks)
    norm = cases.normal((1024,), "bfloat16", seed=5, mean=1.0)
    gx, gw, gs, gn = cases.to_module(xp, x, weight, scales, norm)
    got = kernels.gemm_fp8(gx, gw, gs, norm_weight=gn, eps=1e-5, weight_offset=0.5)
    want = kernels.gemm_fp8(kernels.rmsnorm(gx, gn, eps=1e-5, weight_offset=0.5), gw, gs)
    assert_close(got, to_numpy(want), reduction=1024)


@pytest.mark.parametrize("m", [3, 70])
def test_rows_that_lie_apart(xp, m):
    x, weight, scales, _, _ = inputs(m, 64, 256, "bfloat16", False)
    want = reference.gemm_fp8(x, weight, scales)
    for extra in (8, 5):
        wide = xp.full((m, 256 + extra), float("nan"), x.dtype)
        wide[:, :256] = xp.asarray(x)
        out = xp.full((m, 64 + extra), float("nan"), x.dtype)
        kernels.gemm_fp8(wide[:, :256], *cases.to_module(xp, weight, scales), out=out[:, :64])
        assert_close(xp.ascontiguousarray(out[:, :64]), want, reduction=256)
        assert bool(xp.isnan(out[:, 64:]).all())


TILES = [
    (config, b)
    for b in BLOCKS
    for config in dict.fromkeys(
        (*w8_configs("fp8", has_blocks=b), *w8_configs("fp8", has_blocks=b, deterministic=True))
    )
]


@pytest.mark.gpu
@pytest.mark.grid(("config", "has_blocks"), TILES, ids=str)
def test_every_tile_matches_mirror(cp, monkeypatch, config, has_blocks):
    """Tile choice on Hopper; other GPUs always use the same tile."""
    monkeypatch.setattr(w8, "MAX_SKINNY_ROWS", 0)
    monkeypatch.setattr(w8, "choose_w8_hopper", lambda *_, **__: config)
    for m in (1, 19, 64) if config.tile_m <= 64 else (1, 19, 64, 130, 300):
        x, weight, scales, bias, residual = inputs(m, 320, 1040, "bfloat16", has_blocks)
        compare(cp, x, weight, scales, bias=bias, residual=residual)
        compare(cp, x, weight, scales, bias=bias, activation="silu", pdl=True)
        compare(cp, x, weight, scales)
        if config.gates:
            compare(cp, x, weight[:256], scales[: 2 if has_blocks else 256], activation="swiglu")
            # Gate ends, and up begins, within a block of scales.
            x, weight, scales, bias, _ = inputs(m, 384, 1040, "bfloat16", has_blocks)
            compare(cp, x, weight, scales, bias=bias, activation="swiglu", pdl=True)


@pytest.mark.gpu
@pytest.mark.parametrize("has_blocks", BLOCKS)
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_every_cut_of_k_matches_mirror(cp, monkeypatch, parts, has_blocks):
    monkeypatch.setattr(w8, "_num_parts", lambda *_: parts)
    for m, k in ((1, 1040), (8, 1040), (1, 4096), (3, 256)):
        x, weight, scales, bias, residual = inputs(m, 330, k, "bfloat16", has_blocks)
        compare(cp, x, weight, scales, bias=bias, residual=residual)


_LATE = r"""
extern "C" __global__ void late(const float* from, float* to, int n) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");  // the next kernel may start now
#endif
  for (int i = 0; i < 1000; ++i) __nanosleep(1000);
  for (int i = threadIdx.x; i < n; i += blockDim.x) to[i] = from[i];
}
"""


@pytest.mark.gpu
@pytest.mark.parametrize("has_blocks", BLOCKS)
@pytest.mark.parametrize("m", [1, 6, 70])
def test_without_pdl_scales_may_be_written_late(cp, m, has_blocks):
    """A kernel that lets the next one start early writes the weight's scales just before it ends.

    The two kernels must overlap to show an early read, hence several attempts.
    """
    x, weight, scales, _, _ = inputs(m, 96, 1024, "bfloat16", has_blocks)
    codes, x_scales = reference.quantize_rows(x, group=128 if has_blocks else 0)
    gx, gw, gs, gxs = cases.to_module(cp, codes, weight, scales, x_scales)
    options = {"x_scales": gxs, "out_dtype": x.dtype}
    want = to_numpy(kernels.gemm_fp8(gx, gw, gs, **options))
    late = cp.RawKernel(_LATE, "late")
    own = cp.zeros_like(gs)
    with cp.cuda.Stream(non_blocking=True) as stream:
        for _ in range(5):
            own.fill(0)
            late((1,), (256,), (gs, own, np.int32(gs.size)))
            got = kernels.gemm_fp8(gx, gw, own, **options)
            stream.synchronize()
            np.testing.assert_array_equal(to_numpy(got), want)


@pytest.mark.gpu
@pytest.mark.parametrize("has_blocks", BLOCKS)
def test_deterministic_rows_do_not_depend_on_m(cp, has_blocks):
    x, weight, scales, _, _ = inputs(200, 640, 2048, "bfloat16", has_blocks)
    gx, gw, gs = cases.to_module(cp, x, weight, scales)
    whole = kernels.gemm_fp8(gx, gw, gs, deterministic=True)
    for m in (1, 8, 33, 130):
        part = kernels.gemm_fp8(gx[:m], gw, gs, deterministic=True)
        np.testing.assert_array_equal(to_numpy(part), to_numpy(whole[:m]))


@pytest.mark.gpu
@pytest.mark.parametrize("has_blocks", BLOCKS)
def test_rows_are_summed_alike_by_every_tile(cp, monkeypatch, has_blocks):
    """The basis of `deterministic`."""
    x, weight, scales, _, _ = inputs(200, 640, 2064, "bfloat16", has_blocks)
    arrays = cases.to_module(cp, x, weight, scales)
    configs, results = w8_configs("fp8", has_blocks=has_blocks, deterministic=True), []
    assert len(configs) > 4
    for config in configs:
        monkeypatch.setattr(w8, "choose_w8_hopper", lambda *_, config=config, **__: config)
        result = kernels.gemm_fp8(*arrays, deterministic=True, out_dtype=np.float32)
        results.append(to_numpy(result))
        np.testing.assert_array_equal(results[-1], results[0])


@pytest.mark.gpu
@pytest.mark.parametrize("has_blocks", BLOCKS)
def test_depth_changes_no_bit(cp, monkeypatch, has_blocks):
    """The slabs of a stage keep separate sums, each with its own group's scales."""
    arrays = cases.to_module(cp, *inputs(40, 640, 2048, "bfloat16", has_blocks)[:3])
    deep = [c for c in w8_configs("fp8", has_blocks=has_blocks) if c.depth > 1 and not c.swapped]
    assert deep
    for config in deep:
        results = []
        for chosen in (config, replace(config, depth=1)):
            monkeypatch.setattr(w8, "choose_w8_hopper", lambda *_, chosen=chosen, **__: chosen)
            results.append(to_numpy(kernels.gemm_fp8(*arrays)))
        np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("has_blocks", BLOCKS)
def test_deterministic_choice(has_blocks):
    """No candidate splits k; the modules are prepared."""
    for n, k in ((1024, 3072), (4096, 4096), (28672, 4096), (4096, 14336), (100, 64)):
        for m in (1, 16, 64, 256, 4096):
            problem = ("fp8", m, n, k, 132)
            chosen = choose_w8_hopper(*problem, has_blocks=has_blocks, deterministic=True)
            assert chosen.sums_in_order
            assert chosen.tile_m <= 64 or m > 64
            default = choose_w8_hopper(*problem, has_blocks=has_blocks)
            assert default in w8_configs("fp8", has_blocks=has_blocks)
            assert chosen in w8_configs("fp8", has_blocks=has_blocks, deterministic=True)
    few = choose_w8_hopper("fp8", 1, 1024, 3072, 132, has_blocks=has_blocks, deterministic=True)
    assert few.tile_n == 32
    prepared = w8_hopper_specs("fp8", "bfloat16")
    more = w8_hopper_specs("fp8", "bfloat16", deterministic=True)
    assert set(prepared) < set(more) and len(more) == len(prepared) + (3 + 7) + (3 + 4)


@pytest.mark.parametrize("has_blocks", BLOCKS)
def test_mirror_is_the_product_of_dequantized_numbers(has_blocks):
    x, weight, scales, _, _ = inputs(7, 150, 300, "float32", has_blocks)
    codes, x_scales = reference.quantize_rows(x, group=128 if has_blocks else 0)
    numbers = np.stack([dequantized(codes[i : i + 1], x_scales[i : i + 1])[0] for i in range(7)])
    want = numbers @ dequantized(weight, scales).T
    np.testing.assert_allclose(reference.gemm_fp8(x, weight, scales), want, rtol=1e-4, atol=1e-4)


def test_choice_of_skinny():
    limits = Limits(232_448, True)
    assert w8.choose_skinny(9, 4096, 4096, 132, limits) is None
    assert w8.choose_skinny(8, 4096, 32768, 132, limits) is None
    for m, n, k in ((1, 4096, 14336), (8, 4096, 4096), (3, 28672, 4096)):
        config = w8.choose_skinny(m, n, k, 132, limits, group=128)
        assert config is not None and config.shared_bytes <= 232_448
        assert config.parts * config.part_pairs * 2 >= k and config.blocks <= 264


def test_contract(xp):
    x, weight = xp.ones((2, 32), np.float32), xp.ones((16, 32), np.uint8)
    scales, codes = xp.ones(16, np.float32), xp.ones((2, 32), np.uint8)
    with pytest.raises(DTypeError, match="weight: must be uint8; got int8"):
        kernels.gemm_fp8(x, weight.view(np.int8), scales)
    with pytest.raises(ShapeError, match="weight_scales: must have shape"):
        kernels.gemm_fp8(x, weight, scales[:15])
    with pytest.raises(ShapeError, match="weight_scales: must have shape"):
        kernels.gemm_fp8(x, weight, xp.ones((2, 1), np.float32))
    with pytest.raises(DTypeError, match="x: must be float32 or float16 or bfloat16; got uint8"):
        kernels.gemm_fp8(codes, weight, scales)
    with pytest.raises(ContractError, match="out_dtype: must be float32 or float16 or bfloat16"):
        kernels.gemm_fp8(codes, weight, scales, x_scales=xp.ones((2, 1), np.float32))
    with pytest.raises(ContractError, match='residual: must be None with "swiglu"'):
        kernels.gemm_fp8(x, weight, scales, residual=x[:, :8], activation="swiglu")
    with pytest.raises(ContractError, match="norm_weight: must be None with x_scales"):
        kernels.gemm_fp8(
            codes, weight, scales, x_scales=xp.ones((2, 1), np.float32), norm_weight=x[0]
        )
