"""gemm_wna16 on Hopper: every tile and format against the mirror, the choice."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.dtypes import dtype_name, np_dtype
from engine.kernels import _module
from engine.kernels._chip import HOPPER, sm_count
from engine.kernels._packed import SAMPLE, stage_tiles
from engine.kernels.gemm.operands import Operands
from engine.kernels.gemm_wna16 import few_rows, portable, sm90
from engine.kernels.gemm_wna16.few_rows import few_rows_config
from engine.kernels.gemm_wna16.gemm_wna16 import launch
from engine.kernels.gemm_wna16.sm90 import (
    HOPPER_CONFIGS,
    INVARIANT_CONFIGS,
    HopperConfig,
    choose_hopper,
    num_parts,
)
from engine.testing import cases
from engine.testing.cases_gemm import MODEL_LAYERS
from engine.testing.cases_quantized import PACKED_FORMATS, random_weight, weight_to
from engine.testing.tolerances import assert_close
from engine.weights import FORMATS

HALVES = ("float16", "bfloat16")
EVERY_CONFIG = tuple(dict.fromkeys((*HOPPER_CONFIGS, *INVARIANT_CONFIGS)))
CONFIGS = [
    pytest.param(
        c,
        id=f"{c.tokens}x{c.rows}-{c.mma_tiles}-{c.splits}"
        + f"{'-rounds' if c.rounds_weights else ''}{f'-{c.parts}' if c.parts > 1 else ''}",
    )
    for c in EVERY_CONFIG
]


@pytest.fixture
def hopper(hopper, monkeypatch):
    """CuPy, on a device that runs these kernels; few rows use them too."""
    monkeypatch.setattr(few_rows, "choose", lambda _: None)
    return hopper


def _force(monkeypatch, config):
    monkeypatch.setattr(sm90, "choose_hopper", lambda *_, **__: config)


def _want(config, x, weight, **options):
    """Return the mirror's result; weights are rounded to x's dtype if the tile rounds them."""
    if config.scales_sums(weight.format):
        return reference.gemm_wna16(x, weight, **options)
    return reference.gemm(x, reference.dequantize(weight, dtype_name(x.dtype)), **options)


def _chosen(x, weight):
    return choose_hopper(x.shape[0], *weight.shape, weight.format, sm_count())


def _is_untouched(xp, buffer):
    return bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.gpu
@pytest.mark.grid("dtype", HALVES)
@pytest.mark.grid("name", PACKED_FORMATS)
def test_every_format_matches_mirror(hopper, name, dtype):
    for i, (m, n, k) in enumerate([(9, 48, 512), (40, 37, 1096), (130, 264, 200), (300, 77, 640)]):
        weight, x = random_weight(name, n, k), cases.normal((m, k), dtype, seed=1)
        out, buffer = cases.guarded(hopper, (m, n), x.dtype)
        kernels.gemm_wna16(hopper.asarray(x), weight_to(hopper, weight), out=out, pdl=i % 2 == 0)
        assert_close(out, _want(_chosen(x, weight), x, weight), reduction=k)
        assert _is_untouched(hopper, buffer)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["int4_g32", "int4_g128_zp", "int8_g64", "int8_g128_zp"])
def test_scales_in_bfloat16(hopper, name, dtype):
    for m, n, k in [(33, 80, 512), (257, 37, 1096)]:
        weight = random_weight(name, n, k, scales="bfloat16")
        x = cases.normal((m, k), dtype, seed=1)
        got = kernels.gemm_wna16(hopper.asarray(x), weight_to(hopper, weight))
        assert_close(got, _want(_chosen(x, weight), x, weight), reduction=k)


@pytest.mark.gpu
@pytest.mark.grid("name", ["int4_g128", "q6_k"])
@pytest.mark.grid("config", CONFIGS)
def test_every_tile_matches_mirror(hopper, monkeypatch, config, name):
    """Odd sizes, fewer rows than a tile, no out-of-bounds writes."""
    if not config.supports(FORMATS[name]):
        pytest.skip("no such module")
    _force(monkeypatch, config)
    rng = np.random.default_rng(config.tokens + config.rows)
    tokens = config.tokens
    sizes = [(1, 8, 1032), (17, 520, 2048), (tokens - 1, 77, 640), (tokens + 1, 300, 72)]
    sizes += [
        (2 * tokens - 8, 136, 1224),
        (*rng.integers(1, 700, 2), 8 * int(rng.integers(1, 160))),
    ]
    for i, (m, n, k) in enumerate(sizes):
        # Enough k for every CTA and part.
        k = max(k, 64 * config.depth * config.splits, 128 * config.parts)
        weight, x = random_weight(name, n, k), cases.normal((m, k), "bfloat16", seed=i)
        out, buffer = cases.guarded(hopper, (m, n), x.dtype)
        kernels.gemm_wna16(hopper.asarray(x), weight_to(hopper, weight), out=out, pdl=i % 2 == 0)
        assert_close(out, _want(config, x, weight), reduction=k)
        assert _is_untouched(hopper, buffer)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["q4_k", "q4_1", "q4_0", "int4_g128_zp"])
def test_scales_of_any_size(hopper, name, dtype):
    """The largest and the smallest float16, and zeros: nibbles are read as subnormal numbers."""
    random, x = random_weight(name, 256, 1024), cases.normal((24, 1024), dtype, seed=1)
    plane = "scales" if random.super_scales is None else "super_scales"
    old, rng = getattr(random, plane), np.random.default_rng(3)
    for size in (2.0**-24, 2.0**-14, 1.0, 6e4 if dtype == "bfloat16" else 8.0):
        scales = np.where(rng.random(old.shape) < 0.1, 0, size).astype(np.float16)
        if random.format.offset == "zero":
            scales[..., 1] = old[..., 1]  # zero points are codes
        weight = replace(random, **{plane: scales})
        got = kernels.gemm_wna16(hopper.asarray(x), weight_to(hopper, weight), out_dtype=np.float32)
        want = _want(_chosen(x, weight), x, weight, out_dtype=np.float32)
        assert_close(got, want, reduction=1024, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.grid("config", CONFIGS)
def test_ctas_that_compute_many_tiles(hopper, monkeypatch, config):
    """Two launches: the second begins while the first is still storing."""
    _force(monkeypatch, config)
    m, n, k = 2312, 2056, 1032
    weight, x = random_weight("int4_g64", n, k), cases.normal((m, k), "bfloat16", seed=1)
    gx, gw = hopper.asarray(x), weight_to(hopper, weight)
    out, buffer = cases.guarded(hopper, (m, n), x.dtype)
    for _ in range(2):
        kernels.gemm_wna16(gx, gw, out=out, pdl=True)
    assert_close(out, _want(config, x, weight), reduction=k)
    assert _is_untouched(hopper, buffer)


@pytest.mark.gpu
@pytest.mark.grid("activation", [None, "silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.grid("config", CONFIGS)
def test_epilogues(hopper, monkeypatch, config, activation):
    _force(monkeypatch, config)
    m, n, k = 150, 268, 1088
    name = "int4_g128_zp" if config.scales_sums(FORMATS["int4_g128_zp"]) else "int4_g32_zp"
    weight, x = random_weight(name, n, k), cases.normal((m, k), "bfloat16", seed=1)
    bias = cases.normal((n,), "bfloat16", seed=3)
    residual = cases.normal((m, n), "bfloat16", seed=4)
    gx, gb, gr = cases.to_module(hopper, x, bias, residual.copy())
    gw = weight_to(hopper, weight)
    options = {"bias": bias, "activation": activation}
    got = kernels.gemm_wna16(gx, gw, bias=gb, activation=activation, out_dtype=np.float32)
    want = _want(config, x, weight, **options, out_dtype=np.float32)
    assert_close(got, want, reduction=k, dtype="bfloat16")
    kernels.gemm_wna16(gx, gw, bias=gb, activation=activation, residual=gr, out=gr, pdl=True)
    want = _want(config, x, weight, **options, residual=residual)
    assert_close(gr, want, reduction=k)


@pytest.mark.gpu
@pytest.mark.grid("config", CONFIGS)
def test_swiglu(hopper, monkeypatch, config):
    """Halves that end within a tile, and halves that are not whole row tiles."""
    if not config.combines():
        pytest.skip("never chosen for gated products")
    names = ("int8_g128", "int4_g64_zp") if config.scales_sums(FORMATS["int8_g128"]) else ("q4_k",)
    _force(monkeypatch, config)
    sizes = [(1, 32, 1032), (50, 288, 1104), (193, 624, 1032), (300, 2080, 1536)]
    for name, (m, n, k) in itertools.product(names, sizes):
        weight, x = random_weight(name, n, k), cases.normal((m, k), "bfloat16", seed=1)
        bias = cases.normal((n,), "bfloat16", seed=3)
        gx, gb, gw = hopper.asarray(x), hopper.asarray(bias), weight_to(hopper, weight)
        out, buffer = cases.guarded(hopper, (m, n // 2), x.dtype)
        kernels.gemm_wna16(gx, gw, bias=gb, activation="swiglu", out=out)
        want = _want(config, x, weight, bias=bias, activation="swiglu")
        assert_close(out, want, reduction=k)
        assert _is_untouched(hopper, buffer)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_a_row_has_the_same_bits_in_any_company(hopper, dtype):
    weight, x = random_weight("int4_g128", 520, 1032), cases.normal((700, 1032), dtype, seed=1)
    gx, gw = hopper.asarray(x), weight_to(hopper, weight)
    many = to_numpy(kernels.gemm_wna16(gx, gw, deterministic=True)).view(np.int16)
    for m in (1, 7, 60, 200, 257):
        few = kernels.gemm_wna16(gx[:m], gw, deterministic=True)
        np.testing.assert_array_equal(to_numpy(few).view(np.int16), many[:m])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int4_g128", "q4_k", "mxfp4"])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_rows_are_summed_alike_by_every_tile(hopper, monkeypatch, parts, name):
    """The basis of `deterministic`: CTAs that sum the same parts of k produce the same bits.

    Slabs of k are odd in number, and not a multiple of the parts.
    """
    n, k = 520, 4232
    weight, x = random_weight(name, n, k), cases.normal((300, k), "bfloat16", seed=1)
    gx, gw = hopper.asarray(x), weight_to(hopper, weight)
    configs = [c for c in INVARIANT_CONFIGS if c.parts * c.splits == parts]
    results = []
    assert len(configs) >= 5
    for config in configs:
        _force(monkeypatch, config)
        results.append(to_numpy(kernels.gemm_wna16(gx, gw, out_dtype=np.float32)))
        np.testing.assert_array_equal(results[-1], results[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", SAMPLE)
def test_few_rows_are_summed_as_in_tiles(hopper, monkeypatch, name, dtype):
    """Parts of k that begin within a stage, one that ends in half a pair of slabs; epilogues."""
    form = FORMATS[name]
    for n, k in ((544, 4232), (96, 3072), (64, 200)):
        weight, x = random_weight(name, n, k), cases.normal((40, k), dtype, seed=1)
        gx, gw = hopper.asarray(x), weight_to(hopper, weight)
        bias = hopper.asarray(cases.normal((n,), dtype, seed=2))
        residual = hopper.asarray(cases.normal((40, n), dtype, seed=3))
        for activation in (None, "gelu", "silu", "gelu_tanh", "swiglu"):
            added = None if activation == "swiglu" else residual
            given = {"bias": bias, "activation": activation, "deterministic": True}
            want = _bits(kernels.gemm_wna16(gx, gw, residual=added, **given))
            for m, config in itertools.product((1, 3, 8, 16), _FEW_ROWS):
                chosen = _few_rows_config(m, n, k, form, *config)
                if chosen is None or (activation == "swiglu" and chosen.row_tiles % 2):
                    continue
                with monkeypatch.context() as patch:
                    patch.setattr(sm90, "max_few_rows", lambda *_, **__: 16)
                    patch.setattr(few_rows, "choose", lambda _, chosen=chosen: chosen)
                    own = None if added is None else added[:m]
                    got = _bits(kernels.gemm_wna16(gx[:m], gw, residual=own, **given))
                np.testing.assert_array_equal(got, want[:m], f"{n} {k} {activation} {chosen}")


# Warps along rows, stages, CTAs of a cluster, multiprocessors (few: several work tiles per CTA).
_FEW_ROWS = ((1, 3, 1, 4), (2, 4, 1, 1000), (3, 2, 1, 4), (2, 3, 2, 8), (2, 2, 4, 1000))


def _few_rows_config(m, n, k, form, row_tiles, stages, cluster, sms):
    """Return a tiling that rounds weights, or None if the kernel cannot have it."""
    parts = num_parts(k)
    if parts % cluster or (cluster > 1 and m == 1):
        return None
    way = (m, n, k, form, sms, parts // cluster, row_tiles, stages, cluster)
    config = few_rows_config(*way, rounds_weights=True)
    return config if config.shared_bytes <= HOPPER.shared_bytes - few_rows._STATIC_BYTES else None


def _bits(array):
    return to_numpy(array).view(np.int16)


@pytest.mark.parametrize("name", ["int4_g128", "int8_g64"])
def test_parts_of_few_rows_are_those_of_tiles(name):
    """A warp's stages cover its part of k, and its x."""
    form = FORMATS[name]
    for k in (64, 1000, 3072, 4232, 9728, 14336):
        parts, slabs = num_parts(k), -(-k // 64)
        bounds = sm90.part_bounds(slabs, parts)
        tiles = stage_tiles(form)
        assert slabs <= bounds[-1] <= slabs + 1
        config = few_rows_config(1, 512, k, form, 132, parts, 2, rounds_weights=True)
        for begin, end in itertools.pairwise(bounds):
            assert -(-end // tiles) - begin // tiles <= config.part_stages
        assert parts * config.part_stages * tiles >= slabs
    assert sm90.part_bounds(152, 4) == (0, 38, 76, 114, 152)  # within stages of four slabs
    assert sm90.part_bounds(67, 4) == (0, 16, 34, 50, 68)


@pytest.mark.gpu
@pytest.mark.parametrize("scales", ["float16", "bfloat16"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("k", [768, 4232])
def test_few_rows_have_the_bits_of_many(cp, dtype, k, scales):
    """As callers get them. Activations of numbers far below 0 are -0."""
    if _module.current_architecture(cp.cuda.runtime.getDevice()) != "sm_90a":
        pytest.skip("not a Hopper GPU")
    n = 160
    x = cp.asarray((30 * cases.normal((40, k), "float32", seed=1)).astype(np_dtype(dtype)))
    weight = weight_to(cp, random_weight("int4_g128", n, k, scales=scales))
    bias = cp.asarray(cases.normal((n,), dtype, seed=2))
    residual = cp.asarray(cases.normal((40, n), dtype, seed=3))
    activations = (None, "silu", "gelu", "gelu_tanh", "relu", "swiglu")
    for activation, out_dtype, added, own in itertools.product(
        activations, (None, np.float32), (None, residual), (None, bias)
    ):
        if activation == "swiglu" and not (out_dtype is added is None):
            continue
        given = {"bias": own, "activation": activation, "out_dtype": out_dtype}
        if out_dtype is not None and added is not None:
            added = added.astype(out_dtype)
        want = _deterministic(x, weight, added, given)
        for m in (1, 5, 8):
            got = _deterministic(x[:m], weight, None if added is None else added[:m], given)
            assert got.tobytes() == want[:m].tobytes(), (given, m)


def _deterministic(x, weight, residual, given):
    return to_numpy(kernels.gemm_wna16(x, weight, residual=residual, deterministic=True, **given))


@pytest.mark.gpu
def test_a_chain_in_which_each_reads_what_the_last_wrote(hopper, monkeypatch):
    """With pdl, a kernel must still wait for its operands and for readers of its output."""
    weights = [random_weight("int8_g128", 512, 512, seed=i) for i in range(12)]
    start, form = cases.normal((200, 512), "float16", seed=99), FORMATS["int8_g128"]
    on_device = [weight_to(hopper, weight) for weight in weights]
    configs = [c for c in HOPPER_CONFIGS if c.depth * c.splits <= 8 and c.supports(form)]
    want = start
    for weight in weights:
        want = reference.gemm_wna16(want, weight)
    for pdl in (False, True, True):
        values = [hopper.asarray(start), hopper.empty_like(hopper.asarray(start))]
        for i, weight in enumerate(on_device):
            _force(monkeypatch, configs[i % len(configs)])
            kernels.gemm_wna16(values[i % 2], weight, out=values[(i + 1) % 2], pdl=pdl)
        got = to_numpy(values[0]).astype(np.float32)
        assert np.linalg.norm(got - want.astype(np.float32)) < 0.01 * np.linalg.norm(got)


@pytest.mark.gpu
def test_the_tier_decides(hopper, monkeypatch, tier):
    launched = []
    monkeypatch.setattr(sm90, "launch", lambda *args: launched.append(args))
    weight, x = random_weight("q8_0", 256, 512), cases.normal((200, 512), "bfloat16", seed=1)
    kernels.gemm_wna16(hopper.asarray(x), weight_to(hopper, weight))
    assert len(launched) == (tier == "auto")


@pytest.mark.parametrize("sm_count", [1, 8, 114, 132])  # a partitioned GPU has few
def test_choice_covers_the_problem(sm_count):
    for n, k in [*MODEL_LAYERS.values(), (1, 8), (100, 4096), (7, 64)]:
        for m in (1, 17, 33, 64, 256, 1000, 4096, 100_000):
            for name in ("int4_g128", "q6_k", "int8_g32_zp"):
                form = FORMATS[name]
                config = choose_hopper(m, n, k, form, sm_count)
                assert config.splits <= sm_count
                chosen = choose_hopper(m, n, k, form, sm_count, deterministic=True)
                assert chosen.splits <= sm_count and not chosen.scales_sums(form)
                gated = choose_hopper(m, 2 * n, k, form, sm_count, is_gated=True)
                assert gated.combines()


def test_deterministic_order_depends_on_k_alone():
    """The parts of k begin at the same slabs for all rows, columns, formats and chips."""
    for k in (64, 1000, 1024, 2048, 3072, 4096, 4232, 14336):
        slabs, orders = -(-k // 64), set()
        for name in ("int4_g128", "q4_k", "mxfp4", "int8_g64"):
            modules = sm90.specs("bfloat16", (name,), deterministic=True)
            base = sm90.format_specs("gemm_wna16_sm90.cu", "bfloat16", (name,))[0]
            for n in (512, 4096, 28672):
                for m in (1, 16, 32, 64, 256, 4096):
                    for sms in (8, 78, 132):
                        config = choose_hopper(m, n, k, FORMATS[name], sms, deterministic=True)
                        assert config.spec(base, FORMATS[name]) in modules
                        orders.add(config.bounds(slabs))
        (order,) = orders
        assert len(order) == num_parts(k) and len(set(order)) == len(order)


def test_rows_from_which_tiles_are_used(monkeypatch):
    """Tiles that scale sums beat streams from two or three rows on, the others from nine on."""
    assert [sm90.max_few_rows(FORMATS[name]) for name in ("int4_g64_zp", "int8_g128")] == [1, 2]
    for name in ("int4_g32", "q4_0", "q4_1", "q6_k", "mxfp4"):
        assert sm90.max_few_rows(FORMATS[name]) == 8
    asked = []
    monkeypatch.setattr(sm90, "choose", lambda _: asked.append("tiles"))
    monkeypatch.setattr(few_rows, "choose", lambda _: asked.append("streams"))
    monkeypatch.setattr(portable, "launch", lambda _: None)
    weight = random_weight("int4_g128", 32, 128)

    def ask(m, **given):
        asked.clear()
        x, out = np.ones((m, 128), np.float32), np.empty((m, 32), np.float32)
        launch(Operands(x, weight, out, **given))
        return asked

    assert ask(1)[0] == "streams" and ask(2)[0] == "tiles"
    # Kernels other than the tiles add in another order, so the tiles are asked first.
    assert ask(1, deterministic=True) == ["tiles"]
    monkeypatch.setattr(sm90, "choose", lambda _: HopperConfig(128))
    monkeypatch.setattr(sm90, "launch", lambda *_: asked.append("tiles"))
    assert ask(8, deterministic=True) == ["streams", "tiles"]
    assert ask(9, deterministic=True) == ["tiles"]
    assert ask(1, deterministic=True, activation="gelu") == ["tiles"]  # a -0 would become +0
    assert ask(1, deterministic=True, activation="gelu", residual=weight)[0] == "streams"


def test_bounds_are_those_of_the_kernel():
    """Clusters divide stages, one CTA divides units of two slabs; the former by their depth."""
    assert HopperConfig(32, splits=4, depth=2).bounds(67) == (0, 16, 34, 50)
    assert HopperConfig(128, parts=4).bounds(67) == (0, 16, 34, 50)
    assert HopperConfig(128, splits=4).bounds(67) == (0, 16, 33, 50)
    assert HopperConfig(256).bounds(67) == (0,)
    assert set(HOPPER_CONFIGS).isdisjoint(c for c in INVARIANT_CONFIGS if c.parts > 1)
    assert choose_hopper(1, 4096, 4096, FORMATS["int4_g128"], 132, deterministic=True).splits == 4


@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_stages_fit(name):
    form = FORMATS[name]
    for config in EVERY_CONFIG:
        assert config.blocks * (config.shared_bytes(form) + 1024) <= 228 * 1024


@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_every_format_has_a_tile_for_any_number_of_rows(name):
    for m in (1, 40, 100, 5000):
        for deterministic in (False, True):
            config = choose_hopper(m, 4096, 64, FORMATS[name], 1, deterministic=deterministic)
            assert config.supports(FORMATS[name]) and config.splits == 1


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_modules_are_those_of_packed_formats(name, deterministic):
    """A model passes the formats of all its weights, also of those that are not packed."""
    specs = sm90.specs("bfloat16", (name,), deterministic=deterministic)
    assert bool(specs) == FORMATS[name].is_packed
    assert any("PARTS" in dict(spec.defines) for spec in specs) == (bool(specs) and deterministic)
