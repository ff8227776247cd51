"""gemm on Hopper: every tile against the mirror and float64, tile choice, ptxas warnings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.kernels import _module
from engine.kernels._chip import Limits
from engine.kernels.gemm import launch as gemm_launch
from engine.kernels.gemm.config import choose_config
from engine.kernels.gemm.skinny import choose_skinny_in_parts, gemv_configs, resident_config
from engine.kernels.gemm.sm90 import (
    HOPPER_CONFIGS,
    NARROW_CONFIGS,
    PART_CONFIGS,
    HopperConfig,
    choose_hopper,
    hopper_specs,
    part_length,
)
from engine.testing import cases
from engine.testing.cases_gemm import MODEL_LAYERS
from engine.testing.tolerances import assert_close

HALVES = ("float16", "bfloat16")
GATES = ("silu_and_mul", "swiglu")
EVERY_CONFIG = (*HOPPER_CONFIGS, *NARROW_CONFIGS, *PART_CONFIGS)
# Tiles that sum a row in the same order, by whether k has parts.
ALIKE = {
    False: [c for c in (*HOPPER_CONFIGS, *NARROW_CONFIGS) if c.sums_in_order],
    True: list(PART_CONFIGS),
}
CONFIGS = [
    pytest.param(
        c,
        id=f"{c.tile_m}x{c.tile_n}-{c.cluster_m}x{c.cluster_n}x{c.cluster_k}-{c.depth}-{c.swapped}"
        + ("-parts" if c.sums_parts else ""),
    )
    for c in EVERY_CONFIG
]
GATED = [p for p in CONFIGS if p.values[0].gates]


def _force(monkeypatch, config):
    monkeypatch.setattr(gemm_launch, "choose_config", lambda *_, **__: config)


def _inputs(m, n, k, dtype, seed=0):
    x = cases.normal((m, k), dtype, seed=seed + 1)
    weight = cases.normal((n, k), dtype, seed=seed + 2, scale=max(k, 1) ** -0.5)
    bias = cases.normal((n,), dtype, seed=seed + 3)
    residual = cases.normal((m, n), dtype, seed=seed + 4)
    return x, weight, bias, residual


@pytest.mark.gpu
@pytest.mark.grid("dtype", HALVES)
@pytest.mark.grid("config", CONFIGS)
def test_every_tile_matches_mirror(hopper, monkeypatch, config, dtype):
    """Random odd sizes, every output alignment, no out-of-bounds writes."""
    _force(monkeypatch, config)
    rng = np.random.default_rng(config.tile_m * config.tile_n + config.cluster_size)
    sizes = [
        (1, 8, 1032),
        (9, 72, 1096),
        (17, 2056, 2048),
        (40, 136, 1224),
        (130, 264, 520),
        (257, 300, 1000),
        (64, 77, 640),
    ]
    sizes += [(*rng.integers(1, 700, 2), 8 * int(rng.integers(64, 160)))]
    for i, (m, n, k) in enumerate(sizes):
        x, weight, _, _ = _inputs(m, n, k, dtype)
        out, buffer = cases.guarded(hopper, (m, n), x.dtype)
        kernels.gemm(*cases.to_module(hopper, x, weight), out=out, pdl=i % 2 == 0)
        assert_close(out, reference.gemm(x, weight), reduction=k)
        assert bool(hopper.isnan(buffer[:64]).all()) and bool(hopper.isnan(buffer[-64:]).all())


@pytest.mark.gpu
@pytest.mark.grid("pdl", [False, True])
@pytest.mark.grid("config", CONFIGS)
def test_ctas_that_compute_many_tiles(hopper, monkeypatch, config, pdl):
    """Two launches: the second begins while the first is still storing."""
    _force(monkeypatch, config)
    m, n, k = 2312, 2056, 1096
    x, weight, _, _ = _inputs(m, n, k, "bfloat16", seed=config.tile_m + config.tile_n)
    gx, gw = cases.to_module(hopper, x, weight)
    out, buffer = cases.guarded(hopper, (m, n), x.dtype)
    for _ in range(2):
        kernels.gemm(gx, gw, out=out, pdl=pdl)
    assert_close(out, reference.gemm(x, weight), reduction=k)
    assert bool(hopper.isnan(buffer[:64]).all()) and bool(hopper.isnan(buffer[-64:]).all())


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "swiglu"])
@pytest.mark.parametrize("config", [p for p in CONFIGS if p.values[0].stores])
def test_results_by_map_into_rows_that_lie_apart(hopper, monkeypatch, config, activation):
    """Also reversed rows, which no tensor map can describe, and an output offset by 8 bytes."""
    _force(monkeypatch, config)
    m, n, k = 530, 1040, 264
    x, weight, _, _ = _inputs(m, n, k, "bfloat16")
    gx, gw = cases.to_module(hopper, x, weight)
    want = reference.gemm(x, weight, activation=activation)
    n = want.shape[1]
    for place in (np.s_[:, 8 : 8 + n], np.s_[::-1, 8 : 8 + n], np.s_[:, 4 : 4 + n]):
        buffer = hopper.asarray(np.full((m, n + 24), np.nan, np.float32).astype(x.dtype))
        kernels.gemm(gx, gw, activation=activation, out=buffer[place])
        got = to_numpy(buffer)
        assert_close(np.ascontiguousarray(got[place]), want, reduction=k)
        assert np.isnan(got.astype(np.float32)).sum() == 24 * m


@pytest.mark.gpu
@pytest.mark.grid("activation", [None, "silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.grid("config", CONFIGS)
def test_epilogues(hopper, monkeypatch, config, activation):
    _force(monkeypatch, config)
    m, n, k = 150, 268, 576
    x, weight, bias, residual = _inputs(m, n, k, "bfloat16")
    gx, gw, gb, gr = cases.to_module(hopper, x, weight, bias, residual.copy())
    got = kernels.gemm(gx, gw, bias=gb, activation=activation, pdl=True)
    want = reference.gemm(x, weight, bias=bias, activation=activation)
    assert_close(got, want, reduction=k)
    in_place = {"residual": gr, "out": gr}
    kernels.gemm(gx, gw, bias=gb, activation=activation, pdl=True, **in_place)
    want = reference.gemm(x, weight, bias=bias, residual=residual, activation=activation)
    assert_close(gr, want, reduction=k)
    got = kernels.gemm(gx, gw, bias=gb, activation=activation, out_dtype=np.float32)
    want = reference.gemm(x, weight, bias=bias, activation=activation, out_dtype=np.float32)
    assert_close(got, want, reduction=k, dtype="float32")


@pytest.mark.gpu
@pytest.mark.grid("m", [1, 50, 150])
@pytest.mark.grid("config", GATED)
def test_silu_and_mul(hopper, monkeypatch, config, m):
    _force(monkeypatch, config)
    n, k = 272, 1104
    x, weight, bias, _ = _inputs(m, n, k, "bfloat16")
    residual = cases.normal((m, n // 2), "bfloat16", seed=8)
    gx, gw, gb, gr = cases.to_module(hopper, x, weight, bias, residual)
    out, buffer = cases.guarded(hopper, (m, n // 2), x.dtype)
    kernels.gemm(gx, gw, bias=gb, residual=gr, activation="silu_and_mul", out=out)
    want = reference.gemm(x, weight, bias=bias, residual=residual, activation="silu_and_mul")
    assert_close(out, want, reduction=k)
    assert bool(hopper.isnan(buffer[:64]).all()) and bool(hopper.isnan(buffer[-64:]).all())
    got = kernels.gemm(gx, gw, activation="silu_and_mul", out_dtype=np.float32)
    want = reference.gemm(x, weight, activation="silu_and_mul", out_dtype=np.float32)
    assert_close(got, want, reduction=k, dtype="float32")


@pytest.mark.gpu
@pytest.mark.grid("dtype", HALVES)
@pytest.mark.grid("config", GATED)
def test_swiglu(hopper, monkeypatch, config, dtype):
    """Gate rows before up rows; halves that end within a tile, and fewer rows than a tile."""
    _force(monkeypatch, config)
    monkeypatch.setattr(gemm_launch, "_APART_MAX_M", 0)
    for m, n, k in [(1, 16, 1032), (50, 272, 1104), (193, 624, 1032), (300, 2096, 1096)]:
        x, weight, bias, _ = _inputs(m, n, k, dtype)
        gx, gw, gb = cases.to_module(hopper, x, weight, bias)
        for has_bias in (False, True):
            out, buffer = cases.guarded(hopper, (m, n // 2), x.dtype)
            given = gb if has_bias else None
            kernels.gemm(gx, gw, bias=given, activation="swiglu", out=out, pdl=has_bias)
            want = reference.gemm(x, weight, bias=bias if has_bias else None, activation="swiglu")
            assert_close(out, want, reduction=k)
            assert bool(hopper.isnan(buffer[:64]).all()) and bool(hopper.isnan(buffer[-64:]).all())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_swiglu_of_a_row_has_the_same_bits_in_any_company(hopper, dtype):
    x, weight, _, _ = _inputs(700, 624, 1032, dtype)
    gx, gw = cases.to_module(hopper, x, weight)
    many = kernels.gemm(gx, gw, activation="swiglu", deterministic=True)
    for m in (1, 7, 60, 200, 257):
        few = kernels.gemm(gx[:m], gw, activation="swiglu", deterministic=True)
        np.testing.assert_array_equal(
            to_numpy(few.view(np.int16)), to_numpy(many[:m].view(np.int16))
        )


@pytest.mark.gpu
@pytest.mark.parametrize("has_parts", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_gate_and_up_have_the_same_bits_in_every_tile(hopper, monkeypatch, dtype, has_parts):
    x, weight, bias, _ = _inputs(300, 1040, 1032, dtype)
    gx, gw, gb = cases.to_module(hopper, x, weight, bias)
    options = {"bias": gb, "activation": "swiglu", "deterministic": True}
    results = []
    for config in ALIKE[has_parts]:
        if config.gates:
            _force(monkeypatch, config)
            results.append(to_numpy(kernels.gemm(gx, gw, **options).view(np.int16)))
    assert len(results) > 10
    for result in results:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.gpu
@pytest.mark.parametrize("has_parts", [False, True])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_gated_sums_with_a_residual_have_the_same_bits_in_every_tile(
    hopper, monkeypatch, out_dtype, has_parts
):
    """No tile contracts the gated product and the residual to one operation."""
    x, weight, bias, _ = _inputs(40, 1040, 1032, "bfloat16")
    residual = cases.normal((40, 520), out_dtype, seed=5)
    gx, gw, gb, gr = cases.to_module(hopper, x, weight, bias, residual)
    options = {"bias": gb, "residual": gr, "out_dtype": residual.dtype}
    results = []
    for config in ALIKE[has_parts]:
        if config.gates:
            _force(monkeypatch, config)
            y = kernels.gemm(gx, gw, activation="silu_and_mul", deterministic=True, **options)
            results.append(to_numpy(y.view(np.int16)))
    assert len(results) > 10
    for result in results:
        np.testing.assert_array_equal(result, results[0])
    options |= {"activation": "silu_and_mul", "deterministic": True}
    for config, m in _streams(1040, 1032) if has_parts else ():
        _force(monkeypatch, config)
        y = kernels.gemm(gx[5 : 5 + m], gw, **options | {"residual": gr[5 : 5 + m]})
        np.testing.assert_array_equal(
            to_numpy(y.view(np.int16)), results[0][5 : 5 + m], str(config)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("m", [1, 5, 16, 300])
@pytest.mark.parametrize("k", [520, 3072])
def test_a_product_in_parts_is_rounded_before_the_residual(hopper, m, k, dtype):
    """So a layer may add the residual in the product, or in the norm after it."""
    assert part_length(k)
    arrays = cases.to_module(hopper, *_inputs(m, 520, k, dtype))
    x, weight, bias, residual = arrays
    whole = kernels.gemm(x, weight, bias=bias, residual=residual, deterministic=True)
    apart = kernels.residual_add(kernels.gemm(x, weight, bias=bias, deterministic=True), residual)
    np.testing.assert_array_equal(to_numpy(whole).view(np.uint8), to_numpy(apart).view(np.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("m", "n", "k"), [(3, 4112, 8200), (5, 4112, 4104), (8, 8192, 4096)])
@pytest.mark.parametrize("activation", [None, "silu_and_mul"])
def test_tiles_of_few_rows(hopper, m, n, k, dtype, activation):
    """Tiles multiply them, whose 16 rows of x are not full."""
    assert isinstance(choose_config(m, n, k, dtype, 132, is_hopper=True), HopperConfig)
    x, weight, bias, residual = _inputs(m, n, k, dtype)
    out, buffer = cases.guarded(hopper, (m, n // 2 if activation else n), x.dtype)
    options = {"bias": bias, "activation": activation}
    if activation is None:
        options["residual"] = residual
    on_device = {
        name: value if value is None or name == "activation" else hopper.asarray(value)
        for name, value in options.items()
    }
    kernels.gemm(*cases.to_module(hopper, x, weight), **on_device, out=out, pdl=True)
    assert_close(out, reference.gemm(x, weight, **options), reduction=k)
    assert bool(hopper.isnan(buffer[:64]).all()) and bool(hopper.isnan(buffer[-64:]).all())


def test_where_swiglu_is_fused():
    hopper, skinny = (
        choose_hopper(64, 6144, 1024, 132),
        choose_config(4, 6144, 1024, "float16", 132),
    )
    portable = choose_config(64, 6144, 1024, "float16", 132)
    for config, m, n, k, deterministic, together in (
        (hopper, 64, 6144, 1024, False, False),
        (hopper, 64, 6144, 1024, True, True),
        (hopper, 257, 6144, 1024, False, True),
        (hopper, 64, 28672, 4096, False, True),
        (hopper, 300, 6152, 1024, True, False),
        (skinny, 4, 6144, 1024, False, True),
        (portable, 64, 6144, 1024, True, False),
    ):
        assert gemm_launch._fuses_swiglu(config, m, n, k, deterministic) == together


@pytest.mark.gpu
@pytest.mark.grid("config", CONFIGS)
def test_rows_that_do_not_fill_a_tile(hopper, monkeypatch, config):
    """Last tiles with 1 to n - 1 rows, including clusters whose second tile has none."""
    _force(monkeypatch, config)
    n, k = 200, 1032
    tile = config.tile_m
    for m in (tile - 1, tile + 1, 2 * tile - 8, 2 * tile + 9, 3 * tile - 1):
        x, weight, _, _ = _inputs(m, n, k, "bfloat16")
        out, buffer = cases.guarded(hopper, (m, n), x.dtype)
        kernels.gemm(*cases.to_module(hopper, x, weight), out=out)
        assert_close(out, reference.gemm(x, weight), reduction=k)
        assert bool(hopper.isnan(buffer[:64]).all()) and bool(hopper.isnan(buffer[-64:]).all())


@pytest.mark.gpu
@pytest.mark.grid("config", CONFIGS)
def test_a_permutation_only_moves_values(hopper, monkeypatch, config):
    _force(monkeypatch, config)
    m, k = 700, 1032
    x = cases.normal((m, k), "float16", seed=5)
    order = np.random.default_rng(6).permutation(k)
    weight = np.eye(k, dtype=np.float32)[order].astype(x.dtype)
    got = to_numpy(kernels.gemm(*cases.to_module(hopper, x, weight)))
    np.testing.assert_array_equal(got, x[:, order])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("m", "n", "k"), [(256, 4096, 4096), (1000, 904, 4864), (300, 1024, 72)])
def test_error_is_no_larger_than_cublas(hopper, m, n, k, dtype):
    x, weight, _, _ = _inputs(m, n, k, dtype)
    gx, gw = cases.to_module(hopper, x, weight)
    want = gx.astype(np.float64) @ gw.astype(np.float64).T

    def error(got):
        return float(hopper.linalg.norm(got.astype(np.float64) - want))

    assert error(kernels.gemm(gx, gw)) <= 1.001 * error(gx @ gw.T)


def _streams(n, k):
    """Yield the kernels for few rows, and their rows: rings, and register-resident weights."""
    part_k, limits = part_length(k), Limits(227 * 1024, has_clusters=True)
    if part_k == 0:
        return
    for m in (1, 2, 8, 9, 16):
        config = choose_skinny_in_parts(m, n, k, part_k, 132, limits)
        if config is not None:
            yield config, m
    if part_k == 256:
        for config in gemv_configs(n, k):
            yield replace(config, sums_parts=True), 1
        for m, groups in ((2, 1), (5, 2), (8, 1)):
            config = resident_config(m, n, k, groups)
            if config.threads <= 512:
                yield replace(config, sums_parts=True), m


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("k", [72, 520, 1024, 2056, 3072, 4096, 5000])
def test_rows_are_summed_alike_by_every_kernel(hopper, monkeypatch, k, dtype):
    """The basis of `deterministic`: tiles, and with parts of k streams, produce the same bits."""
    x, weight, bias, residual = _inputs(300, 520, k, dtype)
    gx, gw, gb, gr = cases.to_module(hopper, x, weight, bias, residual)
    wholes = (
        ({"out_dtype": np.float32}, ()),
        ({"bias": gb, "activation": "gelu"}, ("residual",)),
        ({"activation": "silu_and_mul", "bias": gb}, ()),
        ({"activation": "swiglu"}, ()),
    )
    for options, more in wholes:

        def product(rows, options=options, more=more):
            own = {"residual": gr[rows]} if more else {}
            columns = slice(0, 512) if options.get("activation") in GATES else slice(None)
            own_bias = {"bias": gb[columns]} if "bias" in options else {}
            every = options | own_bias | own | {"deterministic": True}
            return to_numpy(kernels.gemm(gx[rows], gw[columns], **every))

        results = []
        for config in ALIKE[part_length(k) > 0]:
            if options.get("activation") in GATES and not config.gates:
                continue
            _force(monkeypatch, config)
            results.append(product(slice(None)))
            np.testing.assert_array_equal(product(slice(7, 8))[0], results[-1][7])
        for result in results:
            np.testing.assert_array_equal(result.view(np.uint8), results[0].view(np.uint8))
        columns = 512 if options.get("activation") in GATES else 520
        for config, m in _streams(columns, k):
            _force(monkeypatch, config)
            got = product(slice(5, 5 + m))
            want = results[0][5 : 5 + m]
            np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8), str(config))


@pytest.mark.gpu
def test_a_chain_in_which_each_reads_what_the_last_wrote(hopper, monkeypatch):
    """With pdl, a kernel must still wait for its operands and for readers of its output."""
    configs = list(EVERY_CONFIG)
    weights = [cases.normal((512, 512), "float16", seed=i, scale=512**-0.5) for i in range(20)]
    start = cases.normal((200, 512), "float16", seed=99)
    on_device = cases.to_module(hopper, *weights)
    want = start
    for weight in weights:
        want = reference.gemm(want, weight)
    for turn, pdl in enumerate((False, True, True)):
        values = [hopper.asarray(start), hopper.empty_like(hopper.asarray(start))]
        for i, weight in enumerate(on_device):
            _force(monkeypatch, configs[(i + 10 * turn) % len(configs)])
            kernels.gemm(values[i % 2], weight, out=values[(i + 1) % 2], pdl=pdl)
        got = to_numpy(values[0]).astype(np.float32)
        assert np.linalg.norm(got - want.astype(np.float32)) < 0.01 * np.linalg.norm(got)


@pytest.mark.gpu
def test_the_tier_decides(hopper, monkeypatch, tier):
    launched = []
    monkeypatch.setattr(
        gemm_launch, "launch_hopper", lambda *args, **_: launched.append(args) or args[3].fill(0)
    )
    x, weight, _, _ = _inputs(200, 256, 512, "bfloat16")
    kernels.gemm(*cases.to_module(hopper, x, weight))
    assert len(launched) == (tier == "auto")
    kernels.gemm(*cases.to_module(hopper, x.astype(np.float32), weight.astype(np.float32)))
    assert len(launched) == (tier == "auto")  # float32 has no Hopper kernel


@pytest.mark.parametrize("sm_count", [1, 8, 16, 114, 132])  # a partitioned GPU has few
def test_choice_covers_the_problem(sm_count):
    for n, k in [*MODEL_LAYERS.values(), (1, 8), (100, 4096), (7, 64)]:
        for m in (1, 33, 64, 256, 1000, 4096, 100_000):
            config = choose_hopper(m, n, k, sm_count)
            rows = config.tile_m * config.cluster_m
            columns = config.tile_n * config.cluster_n
            assert config.clusters(m, n) == -(-m // rows) * -(-n // columns)
            assert config.cluster_size <= sm_count
            if config.cluster_k > 1:
                assert config.waves(m, n, sm_count) == 1 and k >= 64 * config.cluster_k
            assert choose_hopper(m, n, k, sm_count, deterministic=True).sums_in_order
            gated = choose_hopper(m, n, k, sm_count, is_gated=True)
            assert gated.tile_n // gated.cluster_k % 16 == 0


def test_deterministic_choice_depends_on_m_only_in_the_tile():
    """Every candidate sums all of k in one CTA; narrow tiles fill the chip with few columns."""
    for n, k in [*MODEL_LAYERS.values(), (1, 8), (100, 4096)]:
        for m in (1, 16, 64, 65, 256, 1000, 4096):
            default = choose_hopper(m, n, k, 132)
            chosen = choose_hopper(m, n, k, 132, deterministic=True)
            assert chosen.sums_in_order and default in HOPPER_CONFIGS
            assert chosen.sums_parts == (part_length(k) > 0)
            assert chosen.spec("bfloat16") in hopper_specs("bfloat16", deterministic=True)
            assert default.spec("bfloat16") in hopper_specs("bfloat16")
            gated = choose_hopper(m, n, k, 132, deterministic=True, is_gated=True)
            assert gated.gates and gated.sums_in_order and gated.sums_parts == chosen.sums_parts
    for m in (1, 16, 64):
        assert choose_hopper(m, 1024, 3072, 132, deterministic=True).tile_n == 16
        assert choose_hopper(m, 4096, 12288, 132, deterministic=True).tile_n == 32
    assert choose_hopper(64, 24576, 4096, 132, deterministic=True).tile_n == 64
    assert choose_hopper(16, 24576, 4096, 132, deterministic=True).tile_n == 96
    chosen = choose_hopper(256, 1024, 3072, 132, deterministic=True)
    assert chosen == HopperConfig(64, 32, cluster_m=2, depth=2, sums_parts=True)
    assert choose_hopper(4096, 4096, 4096, 132, deterministic=True) in HOPPER_CONFIGS
    chosen = choose_hopper(4096, 4096, 1024, 132, deterministic=True)
    assert (chosen.tile_m, chosen.tile_n, chosen.sums_parts) == (128, 128, True)


def test_choice_at_known_problems():
    assert choose_hopper(8192, 6144, 4096, 132) == HopperConfig(256, 128, 1, 2)
    assert choose_hopper(256, 896, 4864, 132).cluster_k > 1
    assert choose_hopper(256, 1152, 896, 132).tile_m == 64
    assert choose_hopper(1024, 1024, 3072, 132) == HopperConfig(128, 64, 2)
    assert choose_hopper(256, 3072, 2048, 132) == HopperConfig(64, 128, 4)
    assert choose_hopper(1024, 896, 4864, 132) == HopperConfig(64, 128, 4)
    assert choose_hopper(768, 896, 4864, 132) == HopperConfig(64, 96, 4)
    assert choose_hopper(2048, 896, 4864, 132) == HopperConfig(128, 112, 1, 2)
    assert choose_hopper(40, 4096, 4096, 132) == HopperConfig(64, 64, cluster_k=2, depth=2)
    assert choose_hopper(16, 4096, 4096, 132) == HopperConfig(16, 32, depth=4, swapped=2)
    assert choose_hopper(17, 4096, 4096, 132) == HopperConfig(32, 32, depth=4, swapped=2)
    assert choose_hopper(17, 6144, 1024, 132).swapped == 0
    assert choose_hopper(64, 24576, 4096, 132) == HopperConfig(64, 64, depth=2)
    assert choose_hopper(9, 896, 4864, 132).cluster_k == 4
    assert choose_hopper(192, 28672, 4096, 132, is_gated=True) == HopperConfig(192, 224)
    assert choose_hopper(192, 4096, 4096, 132) == HopperConfig(192, 64, cluster_k=2)
    assert choose_hopper(64, 96, 128, 132) is choose_hopper(64, 96, 128, 132)
    limits = Limits(231_424, has_clusters=True)
    for m, n, k, is_tile in (
        (4096, 4096, 4096, True),
        (17, 6144, 1024, True),
        (16, 6144, 1024, False),  # a small weight
        (9, 4096, 4096, True),
        (9, 16384, 2048, True),  # Llama-3.2-1B
        (8, 16384, 2048, False),
        (8, 2048, 8192, False),
        (5, 4096, 4096, True),  # Llama-3.1-8B
        (4, 4096, 4096, False),
        (4, 28672, 4096, False),
        (3, 4096, 14336, True),
        (2, 4096, 14336, False),
    ):
        chosen = choose_config(m, n, k, "bfloat16", 132, is_hopper=True, limits=limits)
        assert isinstance(chosen, HopperConfig) == is_tile, (m, n, k)
    for unfit in ({"is_hopper": False}, {"is_hopper": True, "is_aligned": False}):
        chosen = choose_config(4096, 4096, 4096, "bfloat16", 132, **unfit)
        assert not isinstance(chosen, HopperConfig)


def test_bands():
    """Neighbouring CTAs share operands like clusters do, until CTAs compute many tiles."""
    for config, m, band in (
        (HopperConfig(128, 64, cluster_m=2), 1024, 1),
        (HopperConfig(128, 112, cluster_n=2), 2048, 16),
        (HopperConfig(128, 96), 1024, 1),
        (HopperConfig(64, 128, cluster_m=4), 1024, 1),
        (HopperConfig(128, 128, cluster_m=2), 2048, 1),
        (HopperConfig(128, 128, cluster_m=2), 4096, 8),
        (HopperConfig(128, 192, cluster_m=2), 1024, 1),
        (HopperConfig(128, 256, cluster_m=2), 1024, 8),
        (HopperConfig(128, 128, cluster_k=2), 1024, 8),
        (HopperConfig(64, 64, depth=2), 512, 8),
        (HopperConfig(256, 128, cluster_n=2), 1024, 8),
        (HopperConfig(128, 64, cluster_m=2), 65536, 8),
    ):
        assert config.band(m, 1024, 132) == band


def test_configs_fit_the_chip():
    for config in EVERY_CONFIG:
        for m in (1, 9, 64, 4096):
            stages = config.stages(m)
            assert 3 <= stages <= 16
            assert config.shared_bytes(m, stages) <= 232_448
            assert config.steps(m, 1024, 0, 132) == 1 <= config.steps(m, 1024, 1024, 132)
        assert config.cluster_size <= 8
    assert hopper_specs("float32") == ()


@pytest.mark.parametrize(
    "config",
    [
        HopperConfig(256, 128, 1, 2),
        HopperConfig(192, 192),
        HopperConfig(192, 224),
        HopperConfig(64, 128),
        HopperConfig(128, 64, 2),
        HopperConfig(64, 64, cluster_k=4, depth=2),
        HopperConfig(64, 128, 4),
        HopperConfig(64, 16, depth=2),
    ],
)
def test_ptxas_neither_spills_nor_serialises(config):
    compiled = _module.compile_module(config.spec("bfloat16"), "sm_90a")
    assert all(entry.spill_bytes == 0 for entry in compiled.entries)
    assert "warning" not in compiled.log.lower(), compiled.log
