"""moe_gemm with quantized weights: both tiers against the mirror, the mirror against a loop."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels.moe_gemm import codes_sm90, few_tokens, quantized_sm90, scratch
from engine.reference import Routing
from engine.reference._products import values_of_codes
from engine.testing import cases
from engine.testing.cases_elementwise import assert_guards
from engine.testing.cases_moe import routing_of
from engine.testing.cases_quantized import BYTE_FORMATS, PACKED_FORMATS, random_weight, weight_to
from engine.testing.tolerances import assert_close
from engine.weights import FORMATS, Weight, unpack_weight
from engine.weights.stack import stack_matrices, take_matrices

NAMES = (*PACKED_FORMATS, *BYTE_FORMATS)
# One format per decoding path: code type, scale type, offset type.
SAMPLES = ("fp8_block", "fp8", "int8", "mxfp4", "int4_g128", "int8_g64_zp", "q5_1", "q4_k", "q6_k")
DTYPES = ("float16", "bfloat16")
# (T, E, k, K, R): one token, few and many per expert, more experts than pairs, widths that are not
# multiples of a tile, one expert, no tokens.
SHAPES = (
    (1, 4, 2, 64, 32),
    (5, 16, 4, 256, 96),
    (33, 7, 3, 520, 208),
    (150, 3, 2, 144, 288),
    (40, 1, 1, 1040, 64),
    (9, 6, 2, 63, 48),
    (0, 4, 2, 64, 32),
)
CONFIGS = [
    pytest.param(c, id=f"{c.warpgroups}x{c.mma_tiles}x{c.tokens}")
    for c in quantized_sm90.QUANTIZED_CONFIGS
]
CODES_CONFIGS = [
    pytest.param(c, id=f"{c.warpgroups}x{c.tokens}x{c.depth}") for c in codes_sm90.CODES_CONFIGS
]


def _rounded_rows(x):
    """Return rows rounded to e4m3, as float32, with one scale per 128 columns."""
    return values_of_codes(*reference.quantize_rows(x, dtype="fp8", group=128))


def _weight(name, num_experts, rows, k, scales="float16") -> Weight:
    parts = [random_weight(name, rows, k, seed, scales=scales) for seed in range(num_experts)]
    return stack_matrices(parts)


def _routing(num_tokens, num_experts, top_k, router="random"):
    """Route tokens to random experts; all to the same ones."""
    rng = np.random.default_rng([num_tokens, num_experts, top_k])
    chosen = np.argsort(rng.random((num_tokens, num_experts)), axis=1)[:, :top_k]
    if router == "one":
        chosen = np.tile(np.arange(num_experts)[-top_k:], (num_tokens, 1))
    return routing_of(chosen, num_experts, seed=num_tokens)


def _on(xp, routing):
    return Routing(*cases.to_module(xp, *routing))


def _inputs(name, shape, dtype, *, scatter=False):
    num_tokens, num_experts, top_k, k, rows = shape
    x = cases.normal((num_tokens * top_k if scatter else num_tokens, k), dtype, seed=1)
    return x, _weight(name, num_experts, rows, k), cases.normal((num_experts, rows), dtype, seed=3)


def _splits_tiles(weight, options):
    """Tell whether a row tile of a packed weight has rows of gate and of up."""
    return weight.format.is_packed and bool(options.get("activation")) and weight.shape[1] % 32


def _is_few(xp, num_tokens):
    return xp is not np and num_tokens <= few_tokens.MAX_TOKENS


def _wanted(x, weight, routing, *, rounded=True, **options):
    """Return the mirror's result; kernels for few tokens do not round the weights."""
    if rounded:
        return reference.moe_gemm(x, weight, routing, **options)
    bias = options.pop("bias", None)
    options["bias"] = None if bias is None else bias.astype(np.float32)
    return reference.moe_gemm(x.astype(np.float32), weight, routing, **options).astype(x.dtype)


def _check(xp, name, shape, dtype, router, **options):
    """Compare a call with the mirror, and check the memory past the end of `out`."""
    x, weight, bias = _inputs(name, shape, dtype, scatter=options.get("scatter", False))
    routing = _routing(*shape[:3], router)
    few = _is_few(xp, shape[0]) and not (shape[3] % 16 or _splits_tiles(weight, options))
    want = _wanted(x, weight, routing, rounded=not few, bias=bias, **options)
    out, buffer = cases.guarded(xp, want.shape, want.dtype)
    gx, gb = cases.to_module(xp, x, bias)
    got = kernels.moe_gemm(
        gx, weight_to(xp, weight), _on(xp, routing), bias=gb, pdl=True, out=out, **options
    )
    assert got is out
    assert_close(got, want, reduction=max(shape[3], 257), name=f"{name} {router}")
    assert_guards(buffer)


def _check_codes(xp, monkeypatch, shape, dtype, router, **options):
    """Like `_check`, for quantized x: as codes, or rounded to `dtype` by the other kernels."""
    x, weight, bias = _inputs("fp8_block", shape, dtype, scatter=options.get("scatter", False))
    routing, calls, launch = _routing(*shape[:3], router), [], codes_sm90.launch
    with monkeypatch.context() as patch:
        patch.setattr(
            codes_sm90, "launch", lambda *a, **options: calls.append(launch(*a, **options))
        )
        gx, gb = cases.to_module(xp, x, bias)
        got = kernels.moe_gemm(
            *(gx, weight_to(xp, weight), _on(xp, routing)),
            **{"bias": gb, "pdl": True, "quantize_x": True, **options},
        )
    if calls or xp is np:
        want = reference.moe_gemm(x, weight, routing, bias=bias, quantize_x=True, **options)
    else:
        few = _is_few(xp, shape[0]) and not shape[3] % 16
        numbers = _rounded_rows(x).astype(x.dtype)
        want = _wanted(numbers, weight, routing, rounded=not few, bias=bias, **options)
    # Hopper accumulates e4m3 with fewer bits than float16.
    name = f"{shape} {router} {options}"
    assert_close(got, want, reduction=max(shape[3], 257), dtype="bfloat16", name=name)
    return bool(calls)


# Up rows aligned like gate rows; not aligned; many tokens per expert; K not a multiple of 128.
CODES_SHAPES = (
    *SHAPES,
    (70, 4, 2, 384, 256),
    (70, 4, 2, 384, 192),
    (300, 3, 2, 1040, 512),
    (64, 64, 8, 256, 128),
)


@pytest.mark.grid("dtype", DTYPES)
@pytest.mark.grid("shape", CODES_SHAPES)
def test_codes_match_mirror(xp, tier, monkeypatch, shape, dtype):
    for router in ("random", "one"):
        for activation in (None, "swiglu", "swiglu_clamped"):
            options = {"activation": activation, "limit": 1.25}
            _check_codes(xp, monkeypatch, shape, dtype, router, **options)
        _check_codes(xp, monkeypatch, shape, dtype, router, scatter=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", CODES_CONFIGS)
def test_every_tile_of_codes_matches_mirror(hopper, monkeypatch, config, dtype):
    monkeypatch.setattr(codes_sm90, "choose_config", lambda *_, **__: config)
    for shape in ((1, 4, 2, 64, 128), (150, 3, 2, 144, 384), *CODES_SHAPES[-4:]):
        for router in ("random", "one"):
            options = {"activation": "swiglu"} if shape[4] % 128 == 0 else {}
            assert _check_codes(hopper, monkeypatch, shape, dtype, router, **options)
            assert _check_codes(hopper, monkeypatch, shape, dtype, router, scatter=True)


# Gated columns: no multiple of 128; not aligned; 128; 256; with more tiles than fit a GPU at once.
QUANTIZED_SHAPES = (
    (150, 3, 2, 512, 384),
    (300, 3, 2, 1024, 130),
    (70, 4, 2, 384, 256),
    (300, 3, 2, 1040, 512),
    (300, 64, 8, 256, 1536),
)


@pytest.mark.grid("dtype", DTYPES)
@pytest.mark.grid("shape", QUANTIZED_SHAPES)
@pytest.mark.grid("config", codes_sm90.QUANTIZING_CONFIGS)
def test_codes_go_from_one_product_to_the_next(xp, tier, monkeypatch, config, shape, dtype):
    """Given or returned, they are `quantize_rows` of the numbers: the same bits."""
    monkeypatch.setattr(codes_sm90, "QUANTIZING_CONFIGS", (config, config))
    fused, launch = [], codes_sm90.launch

    def counted(operands, *args, **options):
        fused.append(operands.out_scales is not None)
        launch(operands, *args, **options)

    monkeypatch.setattr(codes_sm90, "launch", counted)
    x, weight, bias = _inputs("fp8_block", shape, dtype)
    gx, gb = cases.to_module(xp, x, bias)
    gw = weight_to(xp, weight)
    coded = kernels.quantize_rows(gx, group=128)
    for router in ("random", "one"):
        routing = _on(xp, _routing(*shape[:3], router))
        for activation in (None, "swiglu", "swiglu_clamped", "geglu"):
            options = {"activation": activation, "bias": gb, "limit": 1.25, "pdl": True}
            numbers = kernels.moe_gemm(gx, gw, routing, quantize_x=True, **options)
            given = {"x_scales": coded[1], "out_dtype": gx.dtype, **options}
            again = kernels.moe_gemm(coded[0], gw, routing, **given)
            np.testing.assert_array_equal(to_numpy(again), to_numpy(numbers))
            wanted = kernels.quantize_rows(numbers, group=128)
            for rows, how in ((coded[0], given), (gx, {"quantize_x": True, **options})):
                got = kernels.moe_gemm(rows, gw, routing, quantize_out=True, **how)
                for one, other in zip(got, wanted, strict=True):
                    np.testing.assert_array_equal(to_numpy(one), to_numpy(other))
    if fused:  # one call of two routers, three activations, codes given or not: in groups of 128
        assert sum(fused) == (12 if shape[4] % 256 == 0 else 0)


def test_codes_at_any_address(xp, tier):
    """Where they are not aligned to 16 bytes, GPUs multiply the numbers rounded to x's dtype."""
    x, weight, _ = _inputs("fp8_block", (70, 4, 2, 384, 256), "bfloat16")
    routing = _routing(70, 4, 2)
    codes, scales = kernels.quantize_rows(xp.asarray(x), group=128)
    moved = xp.empty(codes.size + 8, codes.dtype)[8:].reshape(codes.shape)
    moved[...] = codes
    options = {"x_scales": scales, "out_dtype": x.dtype, "activation": "swiglu"}
    got = kernels.moe_gemm(moved, weight_to(xp, weight), _on(xp, routing), **options)
    if xp is np:
        want = reference.moe_gemm(codes, weight, routing, **options)
    else:
        numbers = _rounded_rows(x).astype(x.dtype)
        want = _wanted(numbers, weight, routing, rounded=True, activation="swiglu")
    assert_close(got, want, reduction=384, dtype="bfloat16")


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")  # infinity by 0
@pytest.mark.parametrize("config", codes_sm90.QUANTIZING_CONFIGS)
def test_codes_of_large_and_missing_numbers(xp, tier, monkeypatch, config):
    """The scale of 128 columns is NaN with a NaN, infinite with an infinity, 0 with zeros only."""
    monkeypatch.setattr(codes_sm90, "QUANTIZING_CONFIGS", (config, config))
    shape = (150, 3, 2, 512, 256)
    x, weight, _ = _inputs("fp8_block", shape, "bfloat16")
    x[7], x[11] = np.nan, 0
    bias = np.zeros(weight.shape[:2], x.dtype)
    bias[1, 130], bias[2, 3] = np.nan, np.inf
    arrays = cases.to_module(xp, x, bias)
    options = {"activation": "swiglu", "quantize_x": True, "bias": arrays[1]}
    call = partial(
        kernels.moe_gemm, arrays[0], weight_to(xp, weight), _on(xp, _routing(*shape[:3]))
    )
    wanted = kernels.quantize_rows(call(**options), group=128)
    for one, other in zip(call(**options, quantize_out=True), wanted, strict=True):
        np.testing.assert_array_equal(to_numpy(one), to_numpy(other))
    scales = to_numpy(wanted[1])
    assert np.isnan(scales).any() and np.isinf(scales).any() and (scales == 0).any()


def test_arguments_of_codes():
    x, weight, _ = _inputs("fp8_block", SHAPES[1], "float32")
    routing = _routing(*SHAPES[1][:3])
    codes, scales = kernels.quantize_rows(x, group=128)
    given = {"x_scales": scales, "out_dtype": np.float32}
    for options, message in (
        ({"x_scales": scales}, "out_dtype: must be given with x_scales"),
        ({**given, "quantize_x": True}, "quantize_x: must be False with x_scales"),
        (
            {**given, "out_dtype": np.int32},
            "out_dtype: must be float32 or float16 or bfloat16; got",
        ),
        ({**given, "x_scales": scales[1:]}, "x_scales: "),
        ({**given, "quantize_out": True, "out": x}, "out: must be None with quantize_out"),
    ):
        with pytest.raises((ContractError, ShapeError), match=message):
            kernels.moe_gemm(codes, weight, routing, **options)
    with pytest.raises(DTypeError, match="x: "):
        kernels.moe_gemm(x, weight, routing, **given)
    with pytest.raises(ContractError, match="out_dtype: must be float32; got"):
        kernels.moe_gemm(x, weight, routing, out_dtype=np.float16)
    rows, down, _ = _inputs("fp8_block", SHAPES[1], "float32", scatter=True)
    with pytest.raises(ContractError, match="quantize_out: must be False with scatter"):
        kernels.moe_gemm(rows, down, routing, scatter=True, quantize_x=True, quantize_out=True)


def test_rows_of_codes_do_not_depend_on_the_company(xp, tier):
    shape = (300, 4, 2, 272, 256)
    x, weight, bias = _inputs("fp8_block", shape, "bfloat16")
    gx, gb = cases.to_module(xp, x, bias)
    gw = weight_to(xp, weight)
    options = {"activation": "swiglu", "deterministic": True, "quantize_x": True}
    routing = _routing(*shape[:3])
    whole = to_numpy(kernels.moe_gemm(gx, gw, _on(xp, routing), bias=gb, **options))
    for token in (0, 33, 299):
        alone = routing_of(routing.experts[token : token + 1], 4)
        rows = kernels.moe_gemm(gx[token : token + 1], gw, _on(xp, alone), bias=gb, **options)
        places = np.argsort(routing.order)[2 * token + alone.order]
        np.testing.assert_array_equal(to_numpy(rows).view("u2"), whole[places].view("u2"))


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("name", ["fp8_block", "fp8_block codes", "mxfp4", "q4_k"])
def test_a_run_of_experts(xp, tier, name, scatter):
    """Offsets may start late and end early: rows outside are neither computed nor written."""
    form, _, codes = name.partition(" ")
    options = {"scatter": scatter, "quantize_x": bool(codes), "pdl": True}
    for shape in ((5, 16, 4, 256, 96), (33, 7, 3, 512, 256)):
        routing = _routing(*shape[:3])
        x, weight, bias = _inputs(form, shape, "bfloat16", scatter=scatter)
        gx, gb = cases.to_module(xp, x, bias)
        gw = weight_to(xp, weight)
        want = to_numpy(kernels.moe_gemm(gx, gw, _on(xp, routing), bias=gb, **options))
        for first, last in ((1, shape[1] - 1), (shape[1] - 1, shape[1])):
            run = routing._replace(offsets=routing.offsets[first : last + 1])
            places = np.arange(*routing.offsets[[first, last]])
            own = routing.order[places] if scatter else places
            part = weight_to(xp, take_matrices(weight, first, last))
            gb, out = cases.to_module(xp, bias[first:last], np.zeros_like(want))
            kernels.moe_gemm(gx, part, _on(xp, run), bias=gb, out=out, **options)
            kept = want.copy()
            kept[np.setdiff1d(np.arange(len(want)), own)] = 0
            assert_close(out, kept, reduction=max(shape[3], 257), name=f"{first}:{last}")


def test_codes_of_a_run_of_experts(xp, tier):
    """Rows of other experts' pairs are not written, and not read by the next product."""
    shape = (300, 7, 3, 512, 512)
    x, up, _ = _inputs("fp8_block", shape, "bfloat16")
    _, down, _ = _inputs("fp8_block", (300, 7, 3, 256, 128), "bfloat16")
    routing = _routing(*shape[:3])
    gx = xp.asarray(x)

    def pairs(first, last):
        parts = [weight_to(xp, take_matrices(weight, first, last)) for weight in (up, down)]
        run = _on(xp, routing._replace(offsets=routing.offsets[first : last + 1]))
        options = {"pdl": True, "num_experts": 7}
        codes, scales = kernels.moe_gemm(
            gx, parts[0], run, activation="swiglu", quantize_x=True, quantize_out=True, **options
        )
        out = xp.zeros((900, 128), x.dtype)
        given = {"x_scales": scales, "out_dtype": x.dtype, "scatter": True, "out": out}
        return to_numpy(kernels.moe_gemm(codes, parts[1], run, **given, **options))

    want = pairs(0, 7)
    for first, last in ((0, 2), (3, 4), (5, 7)):
        own = (routing.experts.reshape(-1) >= first) & (routing.experts.reshape(-1) < last)
        got = pairs(first, last)
        np.testing.assert_array_equal(got[own], want[own])
        assert not got[~own].any() or xp is np


@pytest.mark.parametrize("name", ["fp8", "int8", "mxfp4"])
def test_only_blocks_take_codes(name):
    x, weight, _ = _inputs(name, SHAPES[1], "float32")
    with pytest.raises(ContractError, match="weight: must be in blocks of 128 x 128"):
        kernels.moe_gemm(x, weight, _routing(*SHAPES[1][:3]), quantize_x=True)


def test_codes_match_loop():
    """The mirror with `quantize_x`, against gemm_fp8's mirror per expert."""
    x, weight, _ = _inputs("fp8_block", (40, 1, 1, 300, 64), "float32")
    routing = _routing(40, 1, 1)
    got = reference.moe_gemm(x, weight, routing, quantize_x=True)
    want = reference.gemm_fp8(x, weight.data[0], weight.scales[0])
    assert_close(got, want[routing.order], reduction=300)


@pytest.mark.grid("dtype", DTYPES)
@pytest.mark.grid("name", NAMES)
def test_every_format_matches_mirror(xp, tier, name, dtype):
    for shape in ((5, 16, 4, 256, 96), (33, 3, 2, 520, 96)):
        _check(xp, name, shape, dtype, "random", activation="swiglu")
        _check(xp, name, shape, dtype, "random", scatter=True)


@pytest.mark.grid("dtype", DTYPES)
@pytest.mark.grid("shape", SHAPES)
@pytest.mark.grid("name", SAMPLES)
def test_every_shape_matches_mirror(xp, tier, name, shape, dtype):
    for router in ("random", "one"):
        for activation in (None, "swiglu", "swiglu_clamped"):
            _check(xp, name, shape, dtype, router, activation=activation, limit=1.25)
        _check(xp, name, shape, dtype, router, scatter=True)


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("name", BYTE_FORMATS)
def test_rows_that_are_no_multiple_of_a_row_tile(xp, tier, name, num_tokens):
    """The last row tile of gate and of up, and the last one of all rows, are not full."""
    shape = (num_tokens, 4, 2, 144, 150)
    for dtype in DTYPES:
        _check(xp, name, shape, dtype, "random", activation="swiglu")
        _check(xp, name, shape, dtype, "random", scatter=True)


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("name", ["fp8_block", "mxfp4", "q4_k"])
def test_scatter_with_an_activation(xp, tier, name, num_tokens):
    """Each pair has a row of x, also with gate and up rows."""
    shape = (num_tokens, 16, 8, 1040, 96)
    _check(xp, name, shape, "bfloat16", "random", activation="swiglu", scatter=True)


@pytest.mark.gpu
@pytest.mark.grid("dtype", DTYPES)
@pytest.mark.grid("config", CONFIGS)
@pytest.mark.grid("name", SAMPLES)
def test_every_tile_matches_mirror(hopper, monkeypatch, name, config, dtype):
    """A tile may hold any number of an expert's rows."""
    if config.mma_tiles == 1 and not FORMATS[name].is_packed:
        pytest.skip("a tile for packed weights")
    monkeypatch.setattr(quantized_sm90, "choose_config", lambda *_, **__: config)
    for shape in ((1, 4, 2, 128, 96), (33, 7, 3, 528, 208), (150, 3, 2, 144, 288)):
        for router in ("random", "one"):
            for activation in ("swiglu", "swiglu_clamped", "geglu"):
                _check(hopper, name, shape, dtype, router, activation=activation, limit=1.25)
            _check(hopper, name, shape, dtype, router)
            _check(hopper, name, shape, dtype, router, scatter=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mxfp4", "int4_g128", "q4_k", "q6_k"])
def test_tiles_for_many_tokens_have_the_bits_of_those_for_few(hopper, monkeypatch, name):
    """Every width of an instruction, one and several tiles; columns past the last whole tile."""
    weight = weight_to(hopper, _weight(name, 2, 288, 272))
    for count in (1, 128, 129, 161, 193, 225, 256, 257, 600):
        routing = _on(hopper, routing_of([[1]] * count + [[0]] * 3, 2, seed=count))
        x = hopper.asarray(cases.normal((count + 3, 272), "bfloat16", seed=count))
        bias = hopper.asarray(cases.normal((2, 288), "bfloat16", seed=3))
        for activation in (None, "swiglu", "swiglu_clamped"):
            results = []
            for config in quantized_sm90.QUANTIZED_CONFIGS[2:]:
                monkeypatch.setattr(
                    quantized_sm90, "choose_config", lambda *_, config=config: config
                )
                scatter = activation is None
                options = {"bias": bias, "activation": activation, "scatter": scatter}
                got = kernels.moe_gemm(x, weight, routing, **options)
                results.append(to_numpy(got).view("u2"))
            np.testing.assert_array_equal(*results, err_msg=f"{count} {activation}")


@pytest.mark.gpu
@pytest.mark.grid("dtype", DTYPES)
@pytest.mark.grid("name", SAMPLES)
def test_every_way_to_cut(cp, monkeypatch, name, dtype):
    """Split k, work tiles of several rounds, experts with several tokens."""
    for shape in ((1, 4, 2, 1104, 96), (3, 7, 3, 528, 224), (8, 3, 2, 272, 288)):
        for scatter in (False, True):
            activation = None if scatter else "swiglu"
            experts, k, rows = shape[1], shape[3], shape[4]
            of = (shape[0], shape[2], (experts, rows, k), FORMATS[name])
            configs = few_tokens.all_configs(*of, is_gated=not scatter, scatter=scatter)
            for config in configs:
                monkeypatch.setattr(few_tokens, "choose", lambda *_, config=config: config)
                options = {"scatter": True} if scatter else {"activation": activation}
                for router in ("random", "one"):
                    _check(cp, name, shape, dtype, router, **options)


def test_more_tokens_than_few(cp, monkeypatch):
    """Few tokens use kernels without a tile configuration."""
    monkeypatch.setattr(few_tokens, "launch", None)
    _check(cp, "fp8_block", (few_tokens.MAX_TOKENS + 1, 6, 2, 64, 32), "float16", "random")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_few_tokens_keep_nan(cp, num_tokens, dtype):
    """A NaN code makes its output feature NaN for every token of the expert, and nothing else."""
    shape = (num_tokens, 3, 3, 256, 64)
    x, weight, _ = _inputs("fp8_block", shape, dtype)
    routing = _routing(*shape[:3])
    weight.data.view(np.uint8)[1, 37, 200] = 0xFF
    want = _wanted(x, weight, routing, rounded=False)
    got = to_numpy(kernels.moe_gemm(cp.asarray(x), weight_to(cp, weight), _on(cp, routing)))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert np.isnan(want).any()
    assert_close(np.nan_to_num(got), np.nan_to_num(want), reduction=257)


@pytest.mark.parametrize("name", ["fp8_block", "fp8", "int8"])
@pytest.mark.parametrize("powers", [(60, -60), (-60, 60), (-120, -120), (110, 0)])
def test_one_token_of_large_and_small_numbers(xp, tier, name, powers):
    """Columns of different magnitude: odd rows of the weight are zero in the first 128 columns."""
    shape = (1, 4, 2, 256, 64)
    x, weight, _ = _inputs(name, shape, "bfloat16")
    x *= np.repeat(np.float32(2.0) ** np.array(powers), 128).astype(x.dtype)
    weight.data.view(np.uint8)[:, 1::2, :128] = 0
    routing = _routing(*shape[:3])
    want = _wanted(x, weight, routing, rounded=not _is_few(xp, 1))
    got = kernels.moe_gemm(xp.asarray(x), weight_to(xp, weight), _on(xp, routing))
    for rows in (slice(0, None, 2), slice(1, None, 2)):
        assert_close(to_numpy(got)[:, rows].copy(), want[:, rows].copy(), reduction=257)


@pytest.mark.parametrize("power", [-110, 60, 126])
def test_one_token_of_large_and_small_numbers_in_mxfp4(xp, tier, power):
    """Up to the largest exponent of bfloat16."""
    shape = (1, 4, 2, 512, 64)
    x, weight, _ = _inputs("mxfp4", shape, "bfloat16")
    weight = replace(weight, scales=weight.scales - np.uint8(8))  # the results stay finite
    x *= np.float32(2.0**power).astype(x.dtype)
    largest = np.abs(x.astype(np.float32)).max()
    assert np.frexp(largest)[1] - 2 == power  # x was below 4
    routing = _routing(*shape[:3])
    want = _wanted(x, weight, routing, rounded=not _is_few(xp, 1))
    got = to_numpy(kernels.moe_gemm(xp.asarray(x), weight_to(xp, weight), _on(xp, routing)))
    unit = np.float32(2.0 ** (8 - power))  # its square would overflow bfloat16
    part = [(a.astype(np.float32) * unit).astype(x.dtype) for a in (got, want)]
    assert_close(*part, reduction=513)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["fp8_block", "mxfp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_token_of_missing_numbers(xp, tier, dtype, name, value):
    """NaN stays NaN, and infinity infinity where no code of its column is 0."""
    shape = (1, 4, 2, 256, 64)
    x, weight, _ = _inputs(name, shape, dtype)
    codes = weight.data.view(np.uint8)
    if name == "mxfp4":
        codes |= 0x11  # mantissa bits
    codes[codes % 128 == 0] = 8
    x[0, 130] = value
    routing = _routing(*shape[:3])
    want = _wanted(x, weight, routing, rounded=not _is_few(xp, 1))
    got = kernels.moe_gemm(xp.asarray(x), weight_to(xp, weight), _on(xp, routing))
    np.testing.assert_array_equal(to_numpy(got).astype(np.float32), want.astype(np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("shape", [(4, 5, 2, 128, 64), (1, 9, 8, 128, 64)])
def test_few_tokens_of_wrong_routings_stay_inside(cp, shape, scatter):
    """Invalid pairs and offsets: no out-of-bounds read or write."""
    x, weight, _ = _inputs("mxfp4", shape, "float16", scatter=scatter)
    gx, gw = cp.asarray(x), weight_to(cp, weight)
    routing = _routing(*shape[:3])
    order = routing.order.copy()
    order[3], order[5] = -7, 1 << 30
    for places in ({2: 1000, 4: -3}, {0: 6, 3: -3}, {0: -9, shape[1]: 1 << 30}, {shape[1]: -1}):
        offsets = routing.offsets.copy()
        for place, value in places.items():
            offsets[place] = value
        out, buffer = cases.guarded(cp, (8, 64), x.dtype)
        wrong = _on(cp, routing._replace(order=order, offsets=offsets))
        kernels.moe_gemm(gx, gw, wrong, scatter=scatter, out=out)
        assert_guards(buffer)
        if scatter:
            out, buffer = cases.guarded(cp, (shape[0], 64), x.dtype)
            kernels.moe_gemm_combine(gx, gw, wrong, out=out)
            assert_guards(buffer)


@pytest.mark.parametrize("name", ["int4_g128", "int8_g32_zp"])
@pytest.mark.parametrize("num_tokens", [3, 9])
def test_bfloat16_scales(xp, tier, name, num_tokens):
    shape = (num_tokens, 4, 2, 256, 64)
    x, _, bias = _inputs(name, shape, "bfloat16")
    weight, routing = _weight(name, 4, 64, 256, scales="bfloat16"), _routing(*shape[:3])
    want = _wanted(x, weight, routing, rounded=not _is_few(xp, shape[0]), bias=bias)
    gx, gb = cases.to_module(xp, x, bias)
    got = kernels.moe_gemm(gx, weight_to(xp, weight), _on(xp, routing), bias=gb)
    assert_close(got, want, reduction=257)


def test_large_and_small_scales_of_mxfp4(xp, tier):
    """One expert per case: e8m0 exponents that fit a single factor, and exponents that need two."""
    exponents = (40, 127, 128, 129, 190)
    shape = (40, len(exponents), 2, 128, 64)
    x, weight, _ = _inputs("mxfp4", shape, "bfloat16")
    scales = weight.scales.copy()
    scales.reshape(len(exponents), -1)[:] = np.array(exponents, np.uint8)[:, None]
    scales.reshape(len(exponents), -1)[2, ::3] = 130
    weight, routing = replace(weight, scales=scales), _routing(*shape[:3])
    want = reference.moe_gemm(x, weight, routing)
    got = to_numpy(kernels.moe_gemm(xp.asarray(x), weight_to(xp, weight), _on(xp, routing)))
    for e, (first, last) in enumerate(zip(routing.offsets, routing.offsets[1:], strict=False)):
        unit = np.float32(2.0 ** (127 - exponents[e]))  # its square would overflow bfloat16
        part = [(a[first:last].astype(np.float32) * unit).astype(x.dtype) for a in (got, want)]
        assert_close(*part, reduction=257, name=f"2^{exponents[e] - 127}")


@pytest.mark.parametrize("name", ["fp8_block", "mxfp4"])
def test_deterministic_rows_do_not_depend_on_the_company(xp, tier, name):
    shape = (300, 4, 2, 272, 64)
    x, weight, bias = _inputs(name, shape, "bfloat16")
    gx, gb = cases.to_module(xp, x, bias)
    gw, options = weight_to(xp, weight), {"activation": "swiglu", "deterministic": True}
    routing = _routing(*shape[:3])
    whole = to_numpy(kernels.moe_gemm(gx, gw, _on(xp, routing), bias=gb, **options))
    for token in (0, 33, 299):
        alone = routing_of(routing.experts[token : token + 1], 4)
        rows = kernels.moe_gemm(gx[token : token + 1], gw, _on(xp, alone), bias=gb, **options)
        places = np.argsort(routing.order)[2 * token + alone.order]
        np.testing.assert_array_equal(to_numpy(rows).view("u2"), whole[places].view("u2"))


@pytest.mark.parametrize("name", ["fp8_block", "int4_g64"])
def test_experts_without_tokens_are_not_read(xp, tier, name):
    shape = (6, 9, 2, 128, 64)
    x, weight, _ = _inputs(name, shape, "float16")
    routing = routing_of([[1, 7]] * 6, 9)
    want = reference.moe_gemm(x, weight, routing)
    scales = weight.scales.copy()
    parts = scales.reshape(9, -1)
    parts[[e for e in range(9) if e not in (1, 7)]] = np.nan
    spoiled = weight_to(xp, replace(weight, scales=scales))
    got = kernels.moe_gemm(xp.asarray(x), spoiled, _on(xp, routing))
    assert_close(got, want, reduction=257)


@pytest.mark.parametrize("name", NAMES)
def test_mirror_is_the_loop(name):
    """Loop over tokens and experts with dequantized weights in float64."""
    shape = (6, 5, 2, 70, 32)
    x, weight, bias = _inputs(name, shape, "float32")
    routing, numbers = _routing(*shape[:3]), unpack_weight(weight).astype(np.float64)
    want = np.zeros((12, 16))
    for place, pair in enumerate(routing.order):
        expert = routing.experts.reshape(-1)[pair]
        y = numbers[expert] @ x[pair // 2].astype(np.float64) + bias[expert]
        want[place] = y[:16] / (1 + np.exp(-y[:16])) * y[16:]
    got = reference.moe_gemm(x, weight, routing, bias=bias, activation="swiglu")
    assert_close(got, want.astype(np.float32), reduction=257)


def test_scratch_takes_experts_in_parts(xp, monkeypatch):
    """Few experts at a time; fp8_block scale blocks end with each matrix."""
    monkeypatch.setenv("ENGINE_KERNEL_TIER", "portable")
    monkeypatch.setattr(scratch, "_PART_BYTES", 3 * 96 * 256 * 2)
    for name in ("fp8_block", "q5_k"):
        _check(xp, name, (20, 8, 2, 256, 96), "float16", "random", activation="swiglu")


def test_choice_fits_shared_memory():
    for name in NAMES:
        for config in quantized_sm90.tiles(FORMATS[name]):
            stage = quantized_sm90._stage_bytes(config, FORMATS[name])
            assert config.stages(stage) >= 2
            assert config.blocks * (config.shared_bytes(stage) + 1024) <= 233_472
    for config in (*codes_sm90.CODES_CONFIGS, *codes_sm90.QUANTIZING_CONFIGS):
        stage = codes_sm90._bytes(config)
        assert config.stages(*stage) >= 4
        assert config.blocks * (config.shared_bytes(*stage) + 1024) <= 233_472
    few, few_e2m1, some, many = quantized_sm90.QUANTIZED_CONFIGS
    for name, *wanted in (("q4_k", few, some, many), ("mxfp4", few_e2m1, some, many),
                          ("fp8", few, some, some)):  # fmt: skip
        for tokens, config in zip((32, 64, 256), wanted, strict=True):
            assert quantized_sm90.choose_config(tokens * 128, 128, FORMATS[name]) is config
    for quantizes_out in (False, True):
        configs = codes_sm90.QUANTIZING_CONFIGS if quantizes_out else codes_sm90.CODES_CONFIGS
        for pairs, config in zip((8, 256 * 128), configs, strict=True):
            assert codes_sm90.choose_config(pairs, 128, quantizes_out=quantizes_out) is config


def test_few_tokens_are_cut_to_fit():
    for name in NAMES:
        for shape, top_k in (((128, 1536, 2048), 8), ((32, 2880, 2880), 4), ((3, 48, 64), 2)):
            for tokens in range(1, few_tokens.MAX_TOKENS + 1):
                for limit in (99 << 10, 227 << 10):
                    of = (tokens, top_k, shape, FORMATS[name], 132, limit)
                    config = few_tokens.choose_few_tokens(*of, is_gated=True, scatter=False)
                    assert config.shared_bytes < limit - 3072 and config.row_tiles % 2 == 0
                    assert config.parts * config.row_tiles <= 16
    many = few_tokens.MAX_TOKENS + 1
    for tokens, top_k in ((many, 2), (8, 17), (0, 2)):
        of = (tokens, top_k, (32, 64, 64), FORMATS["fp8"], 132, 227 << 10)
        assert not few_tokens.choose_few_tokens(*of, is_gated=False, scatter=True)


@pytest.mark.parametrize("is_gated", [False, True])
def test_one_token_has_a_row_of_x_per_pair_with_scatter(is_gated):
    """fp8_block: 16 segments of 128 columns and a factor; mxfp4: 8 segments of 256."""
    for name, row in (("fp8_block", 16 * (256 + 4)), ("mxfp4", 8 * (512 + 4))):
        of = (1, 8, (128, 1536, 2048), FORMATS[name], 132, 4, 4, 2)
        gathered, scattered = (
            few_tokens.few_tokens_config(*of, is_gated=is_gated, scatter=scatter).shared_bytes
            for scatter in (False, True)
        )
        assert scattered - gathered == 7 * row


def test_contract(xp):
    shape = (3, 4, 2, 64, 32)
    routing, x = _on(xp, _routing(*shape[:3])), xp.zeros((3, 64), np.float16)
    packed, rows = (weight_to(xp, _weight(name, 4, 32, 64)) for name in ("q4_0", "fp8"))
    op = kernels.moe_gemm
    with pytest.raises(ShapeError, match=r"weight: must have shape \(E, R, K\) with K = 60; got"):
        op(x[:, :60], packed, routing)
    with pytest.raises(ContractError, match=r"weight: must be of shape \(E, R, K\); got \(128, 64"):
        op(x, replace(packed, shape=(128, 64)), routing)
    with pytest.raises(ContractError, match=r"weight: must be of a multiple of 16 rows; got 24"):
        op(x, replace(packed, shape=(4, 24, 64)), routing)
    with pytest.raises(ContractError, match=r"weight: must be without permuted columns; got 'q4"):
        op(x, replace(packed, permutation=xp.arange(64, dtype=np.int32)), routing)
    with pytest.raises(ShapeError, match=r"weight.data: must have shape \(8, 1, 512\); got \(7, 1"):
        op(x, replace(packed, data=packed.data[:7]), routing)
    with pytest.raises(DTypeError, match=r"weight.scales: must be float16 or bfloat16; got float3"):
        op(x, replace(packed, scales=packed.scales.astype(np.float32)), routing)
    with pytest.raises(ShapeError, match=r"weight.scales: must have shape \(4, 32\); got"):
        op(x, replace(rows, scales=rows.scales[:, :31]), routing)
    with pytest.raises(DTypeError, match=r"weight.data: must be uint8; got int8"):
        op(x, replace(rows, data=rows.data.view(np.int8)), routing)
