"""gemm: the kernels against the mirror, the mirror against float64, the choice, the contract."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels.gemm import choose_config, interleave_gate_up
from engine.kernels.gemm import launch as gemm_launch
from engine.kernels.gemm.config import all_configs
from engine.kernels.gemm.skinny import (
    Limits,
    SkinnyConfig,
    choose_skinny_in_parts,
    gemv_configs,
    resident_config,
)
from engine.kernels.gemm.sm90 import part_length
from engine.kernels.rmsnorm import choose_config as rmsnorm_config
from engine.testing import cases
from engine.testing.cases_gemm import MODEL_LAYERS, PRODUCTS
from engine.testing.tolerances import assert_close

HOPPER = Limits(227 * 1024, True)
ACTIVATIONS = (None, "silu", "gelu", "gelu_tanh", "relu")


def _inputs(m, n, k, dtype):
    x = cases.normal((m, k), dtype, seed=1)
    weight = cases.normal((n, k), dtype, seed=2, scale=max(k, 1) ** -0.5)
    bias = cases.normal((n,), dtype, seed=3)
    residual = cases.normal((m, n), dtype, seed=4)
    return x, weight, bias, residual


def _force(monkeypatch, config):
    monkeypatch.setattr(gemm_launch, "choose_config", lambda *_, **__: config)


def _name(c):
    if isinstance(c, SkinnyConfig):
        return f"{c.kernel}-{c.num_parts}-{c.cluster}-{c.threads}"
    return f"{c.kernel}-{c.num_splits}"


def _resident(n, k):
    """Return (rows of x, kernel with register-resident weights)."""
    tilings = (2, 1), (5, 2), (8, 1), (8, 3)
    several = [(m, resident_config(m, n, k, groups)) for m, groups in tilings]
    return [*((1, c) for c in gemv_configs(n, k)), *several]


def _resident_name(m_config):
    return f"{m_config[0]}-{_name(m_config[1])}"


def _configs(k=264, is_gated=False):
    return [
        pytest.param(dtype, c, id=f"{dtype}-{_name(c)}")
        for dtype in cases.DTYPES
        for c in all_configs(k, dtype, is_gated=is_gated)
    ]


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid(("m", "n", "k"), PRODUCTS)
def test_matches_mirror(xp, m, n, k, dtype):
    x, weight, _, _ = _inputs(m, n, k, dtype)
    out, buffer = cases.guarded(xp, (m, n), x.dtype)
    got = kernels.gemm(*cases.to_module(xp, x, weight), out=out)
    assert got is out
    assert_close(got, reference.gemm(x, weight), reduction=k)
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.grid("activation", ACTIVATIONS)
@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid(("m", "n", "k"), [(1, 576, 576), (20, 70, 136), (70, 132, 512), (5, 9, 7)])
def test_epilogue_matches_mirror(xp, m, n, k, dtype, activation):
    x, weight, bias, residual = _inputs(m, n, k, dtype)
    want = reference.gemm(x, weight, bias=bias, residual=residual, activation=activation)
    gx, gw, gb, gr = cases.to_module(xp, x, weight, bias, residual.copy())
    got = kernels.gemm(gx, gw, bias=gb, residual=gr, activation=activation, out=gr)
    assert got is gr  # in place
    assert_close(got, want, reduction=k)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 4096, 576), (33, 258, 96), (130, 64, 1024)])
def test_float32_result(xp, m, n, k, dtype):
    """Logits of a 16-bit model: accumulated and stored in float32."""
    x, weight, bias, _ = _inputs(m, n, k, dtype)
    gx, gw, gb = cases.to_module(xp, x, weight, bias)
    got = kernels.gemm(gx, gw, bias=gb, out_dtype=np.float32)
    want = reference.gemm(x, weight, bias=bias, out_dtype=np.float32)
    assert_close(got, want, reduction=k, dtype="float32")


@pytest.mark.grid(("dtype", "config"), _configs())
@pytest.mark.grid("m", [1, 19, 133])
def test_every_kernel_matches_mirror(xp, monkeypatch, m, dtype, config):
    n, k = 300, 264
    x, weight, bias, residual = _inputs(m, n, k, dtype)
    _force(monkeypatch, config)
    want = reference.gemm(x, weight, bias=bias, residual=residual, activation="silu")
    gx, gw, gb, gr = cases.to_module(xp, x, weight, bias, residual)
    out, buffer = cases.guarded(xp, (m, n), x.dtype)
    kernels.gemm(gx, gw, bias=gb, residual=gr, activation="silu", out=out)
    assert_close(out, want, reduction=k)
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.grid(("dtype", "config"), _configs(is_gated=True))
@pytest.mark.grid("m", [1, 19, 133])
def test_every_kernel_makes_silu_and_mul(xp, monkeypatch, m, dtype, config):
    n, k = 304, 264
    x, weight, bias, _ = _inputs(m, n, k, dtype)
    residual = cases.normal((m, n // 2), dtype, seed=4)
    _force(monkeypatch, config)
    gx, gw, gb, gr = cases.to_module(xp, x, weight, bias, residual)
    out, buffer = cases.guarded(xp, (m, n // 2), x.dtype)
    for extra in ({}, {"bias": gb}, {"bias": gb, "residual": gr}):
        want = {name: to_numpy(value) for name, value in extra.items()}
        kernels.gemm(gx, gw, activation="silu_and_mul", out=out, **extra)
        assert_close(out, reference.gemm(x, weight, activation="silu_and_mul", **want), reduction=k)
        assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.grid(("dtype", "config"), _configs())
@pytest.mark.grid("m", [1, 6, 133])
def test_every_kernel_makes_swiglu(xp, monkeypatch, m, dtype, config):
    """Fused into the GEMM, or in a separate kernel after it."""
    n, k = 304, 264
    x, weight, bias, _ = _inputs(m, n, k, dtype)
    _force(monkeypatch, config)
    is_apart = xp is not np and not gemm_launch._fuses_swiglu(config, m, n, k, False)
    gx, gw, gb = cases.to_module(xp, x, weight, bias)
    for extra in ({}, {"bias": gb}):
        host = {name: to_numpy(value) for name, value in extra.items()}
        want = reference.gemm(x, weight, activation="swiglu", **host)
        if is_apart:  # gate and up are rounded in between
            want = reference.swiglu(reference.gemm(x, weight, **host))
        out, buffer = cases.guarded(xp, (m, n // 2), x.dtype)
        kernels.gemm(gx, gw, activation="swiglu", out=out, **extra)
        assert_close(out, want, reduction=k)
        assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(
    ("m", "f", "k"), [(1, 1536, 576), (3, 8, 7), (40, 71, 40), (0, 8, 8), (700, 40, 64), (5, 3, 0)]
)
def test_swiglu_is_the_formula(xp, m, f, k, dtype):
    x, weight, _, _ = _inputs(m, 2 * f, k, dtype)
    got = kernels.gemm(*cases.to_module(xp, x, weight), activation="swiglu")
    product = x.astype(np.float64) @ weight.astype(np.float64).T
    if xp is not np and (f % 8 or k % 8):  # in a separate kernel
        product = product.astype(x.dtype).astype(np.float64)
    gate, up = np.split(product, 2, axis=1)
    want = (gate / (1 + np.exp(-gate)) * up).astype(x.dtype)
    assert got.shape == (m, f)
    assert_close(got, want, reduction=max(k, 1))


@pytest.mark.grid("dtype", ["float16", "bfloat16"])
@pytest.mark.grid("m_config", _resident(304, 1032), ids=_resident_name)
@pytest.mark.grid("pdl", [False, True])
def test_register_resident_weights(xp, monkeypatch, m_config, dtype, pdl):
    n, k = 304, 1032
    m, config = m_config
    x, weight, bias, residual = _inputs(m, n, k, dtype)
    _force(monkeypatch, config)
    arrays = cases.to_module(xp, x, weight, bias, residual, residual[:, : n // 2].copy())
    gx, gw, gb, gr, half = arrays
    for extra, columns in (
        ({}, n),
        ({"bias": gb, "residual": gr, "activation": "silu"}, n),
        ({"bias": gb, "residual": half, "activation": "silu_and_mul"}, n // 2),
    ):
        out, buffer = cases.guarded(xp, (m, columns), x.dtype)
        kernels.gemm(gx, gw, out=out, pdl=pdl, **extra)
        host = {key: to_numpy(v) if hasattr(v, "shape") else v for key, v in extra.items()}
        assert_close(out, reference.gemm(x, weight, **host), reduction=k)
        assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())
    got = kernels.gemm(gx, gw, out_dtype=np.float32, pdl=pdl)
    assert_close(got, reference.gemm(x, weight, out_dtype=np.float32), reduction=k, dtype="float32")


@pytest.mark.parametrize("m_config", _resident(300, 264), ids=_resident_name)
def test_resident_weights_of_sizes_that_nothing_divides(xp, monkeypatch, m_config):
    """Neither rows nor k fill whole tiles; memory after the weight, and between rows, is NaN."""
    m, config = m_config
    x, weight, _, _ = _inputs(m, 300, 264, "bfloat16")
    _force(monkeypatch, config)
    around = xp.full((310, 264), float("nan"), x.dtype)
    around[:300] = xp.asarray(weight)
    wide = xp.full((m, 272), float("nan"), x.dtype)
    wide[:, :264] = xp.asarray(x)
    out, buffer = cases.guarded(xp, (m, 300), x.dtype)
    kernels.gemm(wide[:, :264], around[:300], out=out, pdl=True)
    assert_close(out, reference.gemm(x, weight), reduction=264)
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("m", "f", "k"), [(1, 1536, 576), (3, 8, 7), (40, 72, 40), (0, 8, 8)])
def test_silu_and_mul_of_packed_weights(xp, m, f, k, dtype):
    """Equals gate's and up's separate GEMMs, except for one rounding."""
    x, packed, _, _ = _inputs(m, 2 * f, k, dtype)
    weight = interleave_gate_up(xp.asarray(packed))
    got = kernels.gemm(xp.asarray(x), weight, activation="silu_and_mul", out_dtype=np.float32)
    gate, up = np.split(x.astype(np.float64) @ packed.astype(np.float64).T, 2, axis=1)
    want = gate / (1 + np.exp(-gate)) * up
    assert got.shape == (m, f)
    assert_close(got, want.astype(np.float32), reduction=k, dtype="float32")


@pytest.mark.grid(("dtype", "config"), _configs())
def test_a_permutation_only_moves_values(xp, monkeypatch, dtype, config):
    """Sums with one term each reveal exactly any misplaced or missing element."""
    m, k = 140, 264
    x = cases.normal((m, k), dtype, seed=5)
    order = np.random.default_rng(6).permutation(k)
    weight = np.eye(k, dtype=np.float32)[order].astype(x.dtype)
    _force(monkeypatch, config)
    got = to_numpy(kernels.gemm(*cases.to_module(xp, x, weight)))
    np.testing.assert_array_equal(got.astype(np.float32), x[:, order].astype(np.float32))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), [(3, 40, 72), (50, 96, 64), (2, 12, 13)])
def test_views(xp, m, n, k, dtype):
    """Rows of x and out with padding between them, and rows that start at an odd element."""
    x, weight, _, _ = _inputs(m, n, k, dtype)
    want = reference.gemm(x, weight)
    for extra, start in ((8, 8), (5, 3)):
        wide = xp.full((m, k + extra + start), float("nan"), x.dtype)
        wide[:, start : start + k] = xp.asarray(x)
        view = wide[:, start : start + k]
        out = xp.full((m, n + extra), float("nan"), x.dtype)
        kernels.gemm(view, xp.asarray(weight), out=out[:, :n])
        assert_close(xp.ascontiguousarray(out[:, :n]), want, reduction=k)
        assert bool(xp.isnan(out[:, n:]).all())
    assert_close(
        kernels.gemm(xp.asarray(np.asfortranarray(x)), xp.asarray(weight)), want, reduction=k
    )


def test_mirror_is_the_formula():
    rng = np.random.default_rng(0)
    x, w, b, r = (rng.standard_normal(s) for s in ((6, 200), (30, 200), 30, (6, 30)))
    z = np.array([[np.dot(row, column) for column in w] for row in x]) + b
    formulas = {
        None: z,
        "relu": np.maximum(z, 0),
        "silu": z / (1 + np.exp(-z)),
        "gelu": z * (1 + np.vectorize(math.erf)(z / math.sqrt(2))) / 2,
        "gelu_tanh": z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2,
    }
    x32, w32, b32, r32 = (a.astype(np.float32) for a in (x, w, b, r))
    for activation, want in formulas.items():
        got = reference.gemm(x32, w32, bias=b32, residual=r32, activation=activation)
        np.testing.assert_allclose(got, want + r, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("m", "n", "k"), [(3, 32, 0), (0, 8, 8), (3, 0, 8), (0, 0, 0), (17, 4, 8)])
def test_rows_are_multiplied_alone_whatever_is_empty(m, n, k):
    x, weight, bias, _ = _inputs(m, n, k, "float32")
    got = kernels.gemm(x, weight, bias=bias, deterministic=True)
    assert got.shape == (m, n)
    assert_close(got, reference.gemm(x, weight, bias=bias), reduction=k)


@pytest.mark.parametrize("wanted", ["float64", "nonsense", object()])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_a_dtype_that_the_result_cannot_have_is_named(xp, dtype, wanted):
    x, weight = cases.to_module(xp, *_inputs(2, 8, 8, dtype)[:2])
    with pytest.raises(ContractError, match=f"out_dtype: must be {dtype} or float32; got"):
        kernels.gemm(x, weight, out_dtype=wanted)
    assert str(kernels.gemm(x, weight, out_dtype=dtype).dtype) == dtype


@pytest.mark.parametrize("m", [1, 40])
def test_rounds_once(xp, m):
    """1 + 3/1024 + 3/1024 is 1.0078125 in bfloat16, but 1 if it is rounded on the way."""
    dtype = cases.normal((1,), "bfloat16", 0).dtype
    weight = np.eye(4, 8, dtype=np.float32).astype(dtype)
    small = np.full((m, 4), 3 / 1024, np.float32).astype(dtype)
    x, weight, small = cases.to_module(xp, np.ones((m, 8), dtype), weight, small)
    got = to_numpy(kernels.gemm(x, weight, bias=small[0], residual=small)).astype(np.float32)
    np.testing.assert_array_equal(got, np.full((m, 4), 1.0078125, np.float32))


@pytest.mark.parametrize("m", [1, 9, 50])
def test_float32_is_not_tf32(xp, m):
    """1 + 2^-20 must survive a GEMM; TF32 keeps only ten mantissa bits."""
    x = xp.full((m, 4), 1 + 2.0**-20, np.float32)
    got = kernels.gemm(x, xp.eye(4, dtype=np.float32))
    np.testing.assert_array_equal(to_numpy(got), np.full((m, 4), 1 + 2.0**-20, np.float32))


def test_doubling_x_doubles_the_result(xp):
    x, weight, _, _ = _inputs(37, 50, 96, "float32")
    gx, gw = cases.to_module(xp, x, weight)
    once, twice = kernels.gemm(gx, gw), kernels.gemm(gx * 2, gw)
    np.testing.assert_array_equal(to_numpy(twice), 2 * to_numpy(once))


@pytest.mark.gpu
@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("n", [256, 10000])
@pytest.mark.grid(("tier", "most"), [("portable", 16), ("auto", 8)])
def test_skinny_rows_do_not_depend_on_their_neighbours(cp, tier, most, n, dtype):
    """Up to 16 rows; in the "auto" tier, Hopper tiles start at 9 rows."""
    x, weight, _, _ = _inputs(16, n, 1096, dtype)
    gx, gw = cases.to_module(cp, x, weight)
    together = to_numpy(kernels.gemm(gx[-most:], gw)).astype(np.float32)
    for m in (1, 2, 7, 8, 9, 15):
        if m > most:
            break
        alone = to_numpy(kernels.gemm(gx[-m:], gw)).astype(np.float32)
        np.testing.assert_array_equal(alone, together[-m:])


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 5, 16, 30])
def test_overlapping_kernels_wait_for_each_other(cp, m):
    """A chain of GEMMs; each reads its predecessor's output and overwrites its input."""
    weights = [cp.asarray(cases.normal((1152, 1152), "bfloat16", s, scale=0.04)) for s in range(8)]
    x = cp.asarray(cases.normal((m, 1152), "bfloat16", seed=9))

    def chain(pdl):
        buffers = [x.copy(), x.copy()]
        for _ in range(5):
            for i, weight in enumerate(weights):
                a, b = buffers[i % 2], buffers[(i + 1) % 2]
                kernels.gemm(a, weight, residual=x, out=b, pdl=pdl)
        return to_numpy(buffers[0]).astype(np.float32)

    want = chain(False)
    assert np.isfinite(want).all()
    for _ in range(10):
        np.testing.assert_array_equal(chain(True), want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("m", [4, 48, 260])
def test_the_same_every_time(cp, m, dtype):
    x, weight, _, _ = _inputs(m, 512, 4096, dtype)
    gx, gw = cases.to_module(cp, x, weight)
    first = to_numpy(kernels.gemm(gx, gw)).astype(np.float32)
    for _ in range(5):
        np.testing.assert_array_equal(to_numpy(kernels.gemm(gx, gw)).astype(np.float32), first)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("sm_count", [16, 108, 132])
def test_config_covers_the_problem(dtype, sm_count):
    for n, k in [*MODEL_LAYERS.values(), (1, 8), (100, 4096), (70, 0)]:
        for m in (1, 2, 16, 17, 33, 64, 500, 4096):
            config = choose_config(m, n, k, dtype, sm_count)
            if isinstance(config, SkinnyConfig):
                continue
            assert config.num_splits * config.k_per_split >= k
            assert (config.num_splits - 1) * config.k_per_split < max(k, 1)
            assert (
                config.num_splits == 1
                or config.k_per_split % (32 if dtype != "float32" else 16) == 0
            )
            assert config.shared_bytes <= 99 * 1024  # available on every GPU from sm_80 on
            blocks = math.prod(config.grid(m, n)) // config.num_splits
            assert blocks == math.ceil(m / config.tile_m) * math.ceil(n / config.tile_n)


def test_gated_products_take_kernels_that_can():
    for dtype in cases.DTYPES:
        for n, k in MODEL_LAYERS.values():
            for m in (1, 16, 33, 64, 500, 4096):
                config = choose_config(m, n, k, dtype, 132, is_gated=True)
                assert config.kernel in {c.kernel for c in all_configs(k, dtype, is_gated=True)}


def test_config_is_a_pure_function():
    for m in (1, 2, 8):  # same warps, so the same summation order
        assert choose_config(m, 1024, 1 << 16, "bfloat16", 132).kernel.endswith("_w16")
        assert choose_config(m, 151936, 1 << 16, "bfloat16", 132).kernel.endswith("_w8")
    assert choose_config(4096, 4096, 4096, "float16", 132).kernel == "tile_128x256"
    assert choose_config(48, 1024, 3072, "bfloat16", 132).num_splits > 1
    assert choose_config(1, 8, 7, "float32", 132, is_aligned=False).kernel == "unaligned_64x64"
    assert choose_config(64, 96, 128, "float32", 132) is choose_config(64, 96, 128, "float32", 132)


def test_gemv_is_chosen_where_blocks_fill_the_chip():
    def kernel(n, k, has_norm=False):
        config = choose_config(1, n, k, "bfloat16", 132, limits=HOPPER, has_norm=has_norm)
        return config.kernel

    chosen = {
        layer
        for layer, shape in MODEL_LAYERS.items()
        if kernel(*shape, has_norm=layer[1] in ("qkv", "gate_up")) == "gemv"
    }
    small = {
        (model, name)
        for model in ("Qwen3-0.6B", "SmolLM2-135M")
        for name in ("qkv", "o", "gate_up", "down")
    }
    assert chosen == small | {("Llama-3.2-1B", "o")}
    # Qwen2.5-0.5B
    for n, k, has_norm in ((1152, 896, True), (9728, 896, True), (896, 4864, False)):
        assert kernel(n, k, has_norm) == "skinny_ring_8"
    assert kernel(896, 896) == "gemv"
    assert kernel(4096, 4096) == "skinny_ring_8"  # too many warps


@pytest.mark.parametrize("limits", [HOPPER, Limits(99 * 1024, False)])
@pytest.mark.parametrize("sm_count", [16, 108, 132])
def test_skinny_kernels_cover_the_problem(sm_count, limits):
    chosen = 0
    for n, k in [*MODEL_LAYERS.values(), (1, 8), (100, 4096), (1, 12288), (1152, 896)]:
        for m in (1, 2, 8, 9, 16, 17, 32):
            c = choose_config(m, n, k, "bfloat16", sm_count, limits=limits)
            if not isinstance(c, SkinnyConfig):
                continue
            chosen += 1
            assert c.num_parts * c.k_per_split >= k and c.k_per_split % 128 == 0
            is_gemv = c.kernel in ("gemv", "resident_8")
            assert is_gemv or ((c.num_parts & (c.num_parts - 1)) == 0 and c.num_parts <= 8)
            assert not is_gemv or (m <= c.tile_m and c.num_tiles(n) <= 2 * sm_count)
            assert c.shared_bytes + 2304 <= limits.shared_bytes  # static shared memory
            assert c.cluster == 1 or limits.has_clusters
            assert math.prod(c.block) == c.threads
            assert c.threads <= 512 if is_gemv else c.threads in (128, 256)
            blocks, tokens = c.grid(m, n)
            assert tokens == 1 and blocks % c.cluster == 0
            assert blocks // c.cluster <= math.ceil(n / c.tile_n)
    assert chosen > 50


def test_skinny_kernels_are_chosen_as_measured():
    def choice(m, n, k):
        c = choose_config(m, n, k, "bfloat16", 132, limits=HOPPER)
        return c.kernel, c.num_parts, c.cluster, c.threads

    assert choice(1, 151936, 1024) == ("skinny_ring_8", 1, 1, 256)
    assert choice(8, 1024, 3072) == ("resident_8", 12, 1, 384)
    assert choice(4, 1152, 896) == ("resident_8", 4, 1, 128)
    assert choice(8, 3072, 2048) == ("resident_8", 8, 1, 256)
    assert choice(8, 4096, 2048) == ("skinny_ring_8", 4, 1, 256)
    assert choice(16, 4096, 4096) == ("skinny_ring_16", 4, 1, 128)
    assert choice(16, 2048, 8192) == ("skinny_ring_16", 8, 2, 128)
    assert choice(32, 6144, 1024) == ("skinny_ring_32", 2, 1, 256)


def test_contract(xp):
    x, weight = xp.ones((2, 8), np.float32), xp.ones((3, 8), np.float32)
    with pytest.raises(ShapeError, match=r"weight: must have shape \(N, K\); K = 8 from x; got"):
        kernels.gemm(x, weight[:, :7])
    with pytest.raises(DTypeError, match="weight: must be float32; got float16"):
        kernels.gemm(x, weight.astype(np.float16))
    with pytest.raises(ShapeError, match=r"x: must have shape \(M, K\)"):
        kernels.gemm(x[0], weight)
    with pytest.raises(ShapeError, match=r"bias: must have shape \(N,\); N = 3 from weight"):
        kernels.gemm(x, weight, bias=xp.ones(8, np.float32))
    with pytest.raises(DTypeError, match="residual: must be float32; got float16"):
        kernels.gemm(x, weight, residual=xp.ones((2, 3), np.float16))
    with pytest.raises(ContractError, match=r"activation: must be one of .*; got 'swish'"):
        kernels.gemm(x, weight, activation="swish")
    with pytest.raises(ContractError, match="weight: must be of 8 rows of gate and 8 of up"):
        kernels.gemm(x, weight, activation="silu_and_mul")
    with pytest.raises(ContractError, match="weight: must be of as many rows of gate as of up"):
        kernels.gemm(x, weight, activation="swiglu")
    gated = xp.ones((16, 8), np.float32)
    with pytest.raises(ContractError, match='residual: must be None with "swiglu"'):
        kernels.gemm(x, gated, activation="swiglu", residual=xp.ones((2, 8), np.float32))
    with pytest.raises(ContractError, match='out_dtype: must be float16 with "swiglu"'):
        half = (array.astype(np.float16) for array in (x, gated))
        kernels.gemm(*half, activation="swiglu", out_dtype=np.float32)
    with pytest.raises(ShapeError, match="residual: must have shape"):
        kernels.gemm(x, gated, activation="silu_and_mul", residual=xp.ones((2, 16), np.float32))
    with pytest.raises(ContractError, match="must have a multiple of 16 rows; got 24"):
        interleave_gate_up(xp.ones((24, 8), np.float32))
    with pytest.raises(ShapeError, match="must have rows; got a single value"):
        interleave_gate_up(np.float32(1))
    assert interleave_gate_up(list(range(16)))[8] == 8
    # On CPU and GPU alike, rows may be strided, columns must be contiguous.
    wide = xp.empty((2, 6), np.float32)
    kernels.gemm(x, weight, out=wide[:, :3])
    with pytest.raises(ShapeError, match="out: its last axis must be contiguous"):
        kernels.gemm(x, weight, out=wide[:, ::2])
    with pytest.raises(ContractError, match="out_dtype: must be float32 or float32"):
        kernels.gemm(x, weight, out_dtype=np.float16)
    with pytest.raises(ShapeError, match="out: must have shape"):
        kernels.gemm(x, weight, out=xp.empty((3, 3), np.float32))
    with pytest.raises(DTypeError, match="out: must be float32"):
        kernels.gemm(x, weight, out=xp.empty((2, 3), np.float16))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("n", "k"), [(96, 128), (960, 576), (70, 1096)])
def test_deterministic_rows_have_the_same_bits(xp, n, k, dtype):
    x = cases.normal((300, k), dtype, seed=11)
    weight = xp.asarray(cases.normal((n, k), dtype, seed=12, scale=k**-0.5))
    gx = xp.asarray(x)
    want = kernels.gemm(gx, weight, deterministic=True)
    for start, stop in [(0, 1), (7, 8), (3, 20), (100, 133), (299, 300), (0, 200), (40, 169)]:
        got = kernels.gemm(gx[start:stop], weight, deterministic=True)
        assert bool((got == want[start:stop]).all()), (start, stop)
    assert_close(want, reference.gemm(x, cases.to_module(np, to_numpy(weight))), reduction=k)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("m", [1, 2, 8, 9, 16])
def test_streams_sum_the_parts_of_tiles(m, has_norm):
    """A warp sums a part; with a norm the block has the threads that `rmsnorm` has for a row."""
    lengths = (8, 264, 512, 1032, 2048, 2056, 3072, 3080, 4096, 4104, 14336)
    chosen = 0
    for n, k in [*MODEL_LAYERS.values(), *((n, k) for n in (8, 2000, 9000) for k in lengths)]:
        part = part_length(k) or 1024  # also longer than the parts that are in use
        c = choose_skinny_in_parts(m, n, k, part, 132, HOPPER, has_norm=has_norm)
        if has_norm and (m > 1 or k > 4096):
            assert c is None
        if c is None:
            continue
        chosen += 1
        assert c.sums_parts and c.k_per_split == part and c.num_parts * part >= k
        assert c.threads <= 512 and c.shared_bytes + 2304 <= HOPPER.shared_bytes
        if has_norm:
            norm = rmsnorm_config(k, 2, is_aligned=True)
            assert c.cluster == 1 and c.threads >= norm.threads // norm.rows_per_block
    assert chosen > 0 or (has_norm and m > 1)
