"""LoRA adapters in a GEMM's epilogue: every op and every tile against the sum of two products."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.dtypes import np_dtype
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels import LowRank, _module
from engine.kernels.gemm import launch as gemm_launch
from engine.kernels.gemm import low_rank as low_rank_module
from engine.kernels.gemm import w8
from engine.kernels.gemm.low_rank import MIN_ROWS
from engine.kernels.gemm.sm90 import ADAPTED_CONFIGS, choose_hopper, hopper_specs
from engine.kernels.gemm.w8_sm90 import w8_configs
from engine.testing import cases
from engine.testing.cases_lora import adapters_of, sorted_by_adapter
from engine.testing.cases_quantized import random_weight, weight_to
from engine.testing.tolerances import assert_close
from engine.weights import FORMATS, Weight
from engine.weights.quantize import quantize

# (M, S, rank, bounds, K): few rows, one tile, several, parts that divide no tile, ranks of several
# steps of the tensor cores, more adapters than rows, ranks and parts that kernels do not fuse.
SHAPES = (
    (1, 1, 16, (64,), 128),
    (5, 2, 16, (48, 64), 128),
    (40, 16, 16, (64, 96, 128), 256),
    (64, 3, 32, (208,), 192),
    (70, 70, 48, (128, 256), 128),
    (150, 2, 64, (40, 48, 320), 256),
    (300, 4, 16, (96, 304), 320),
    (33, 3, 8, (64, 128), 128),
    (33, 3, 16, (60, 128), 128),
    (600, 5, 32, (64, 192), 128),
)
PACKED_SHAPES = (
    (2, 4, 16, (256, 512), 512),
    (40, 16, 16, (256, 512), 512),
    (64, 3, 32, (96,), 256),
    (130, 5, 16, (64, 128), 256),
    (300, 4, 48, (128, 224), 512),
)
_NAMES = {"gemm": "gemm", "fp8": "gemm_fp8", "int8": "gemm_int8"}


def _op(module, name):
    """Return the op of a weight format, or of dense weights, in `kernels` or `reference`."""
    return getattr(module, _NAMES.get(name, "gemm_wna16"))


def _low_rank(shape, dtype, *, bias=False, has_bias=False, num_splits=3, seed=0):
    """Return adapters of the rows, on the host: those without one have NaN for h."""
    rows, num_adapters, rank, bounds, _ = shape
    adapters = adapters_of(rows, num_adapters, seed=seed)
    order, offsets = sorted_by_adapter(adapters, num_adapters)
    h = cases.normal((num_splits, rows, len(bounds) * rank), "float32", seed=seed + 1)
    h[:, adapters < 0] = np.nan
    b = cases.normal((num_adapters, bounds[-1], rank), dtype, seed=seed + 2, scale=rank**-0.5)
    slots = np.where(adapters < 0, np.iinfo(np.int32).max, adapters).astype(np.int32)
    biases = cases.normal((num_adapters, bounds[-1]), dtype, seed=seed + 3) if bias else None
    used = None
    if has_bias:
        used = np.arange(num_adapters, dtype=np.int32) % 2
        biases[used == 0] = 0
    return LowRank(h, b, order, offsets, slots, bounds, biases, used)


def _moved(xp, low_rank):
    names = ("h", "b", "order", "offsets", "slots", "bias", "has_bias")
    arrays = cases.to_module(xp, *(getattr(low_rank, name) for name in names))
    return replace(low_rank, **dict(zip(names, arrays, strict=True)))


def _arguments(op, shape, dtype, blocks=False):
    """Return x and the weight's arguments of an op."""
    rows, _, _, bounds, depth = shape
    x = cases.normal((rows, depth), dtype, seed=11)
    weight = cases.normal((bounds[-1], depth), "float32", seed=12, scale=depth**-0.5)
    if op == "gemm":
        return x, weight.astype(x.dtype)
    if op not in _NAMES:
        return x, random_weight(op, *weight.shape)
    made = quantize(weight, FORMATS["fp8_block" if blocks else op])
    return x, made.data, made.scales


def _run(xp, op, arguments, low_rank, *, activation=None, **options):
    moved = {
        name: xp.asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    return _op(kernels, op)(
        *(weight_to(xp, a) if isinstance(a, Weight) else xp.asarray(a) for a in arguments),
        activation=activation,
        low_rank=_moved(xp, low_rank),
        **moved,
    )


def _compare(xp, op, shape, dtype, *, activation=None, blocks=False, residual=False, **options):
    low_rank = _low_rank(shape, dtype, **options)
    arguments = _arguments(op, shape, dtype, blocks)
    columns = shape[3][-1] // (2 if activation == "swiglu" else 1)
    more = {}
    if residual:
        more["residual"] = cases.normal((shape[0], columns), dtype, seed=21)
    if options.get("bias"):
        more["bias"] = cases.normal((shape[3][-1],), dtype, seed=22)
    want = _op(reference, op)(*arguments, activation=activation, low_rank=low_rank, **more)
    out, buffer = cases.guarded(xp, want.shape, want.dtype)
    got = _run(xp, op, arguments, low_rank, activation=activation, out=out, pdl=True, **more)
    assert got is out
    assert_close(out, want, reduction=shape[4] + shape[2])
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.parametrize("activation", [None, "swiglu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mirror_matches_merged_weights(shape, activation):
    """In float64: each row times the weight to which its adapter's product was added."""
    low_rank = _low_rank(shape, "float32", bias=True, num_splits=1)
    rows, num_adapters, rank, bounds, depth = shape
    x, weight = _arguments("gemm", shape, "float32")
    a = cases.normal((num_adapters, len(bounds) * rank, depth), "float32", seed=31, scale=0.1)
    want = np.empty((rows, bounds[-1]))
    h = np.zeros((rows, len(bounds) * rank), np.float32)
    for row, slot in enumerate(low_rank.slots):
        merged = weight.astype(np.float64)
        want[row] = 0
        if slot < num_adapters:
            h[row] = a[slot].astype(np.float64) @ x[row]
            want[row] = low_rank.bias[slot]
            for part, (begin, end) in enumerate(itertools.pairwise((0, *bounds))):
                low = a[slot, part * rank : (part + 1) * rank].astype(np.float64)
                merged[begin:end] += low_rank.b[slot, begin:end].astype(np.float64) @ low
        want[row] += merged @ x[row]
    if activation == "swiglu":
        want = reference.swiglu(want)
    got = reference.gemm(x, weight, activation=activation, low_rank=replace(low_rank, h=h[None]))
    np.testing.assert_allclose(got, want, atol=2e-4, rtol=2e-5)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("residual", [False, True])
@pytest.mark.grid("bias", [False, True])
@pytest.mark.grid("shape", SHAPES)
def test_gemm_matches_mirrors(xp, shape, bias, residual, dtype):
    _compare(xp, "gemm", shape, dtype, bias=bias, has_bias=bias, residual=residual)


@pytest.mark.grid("op", ["fp8", "int8"])
@pytest.mark.grid("blocks", [False, True])
@pytest.mark.grid("shape", SHAPES)
def test_8_bits_match_mirrors(xp, shape, blocks, op):
    if blocks and op == "int8":
        pytest.skip("int8 has no blocks")
    _compare(xp, op, shape, "bfloat16", blocks=blocks, bias=True, residual=True)


@pytest.mark.parametrize("rows", [3, 64, 130, 300, 600])
@pytest.mark.parametrize("bounds", [(384,), (192, 384)], ids=str)
@pytest.mark.parametrize("op", ["gemm", "fp8", "int8"])
def test_swiglu(xp, op, bounds, rows):
    shape = (rows, 4, 16, bounds, 256)
    _compare(xp, op, shape, "bfloat16", activation="swiglu", bias=True, has_bias=True)


@pytest.mark.grid("name", ["int4_g128", "q4_k", "q6_k", "mxfp4", "int8_g64"])
@pytest.mark.grid("activation", [None, "swiglu"])
@pytest.mark.grid("shape", PACKED_SHAPES)
def test_packed_weights(xp, shape, activation, name):
    _compare(xp, name, shape, "bfloat16", activation=activation)
    _compare(xp, name, shape, "bfloat16", activation=activation, bias=True, has_bias=True)


def test_out_may_be_the_residual(xp):
    shape = SHAPES[2]
    low_rank = _low_rank(shape, "bfloat16")
    arguments = _arguments("gemm", shape, "bfloat16")
    residual = cases.normal((shape[0], shape[3][-1]), "bfloat16", seed=3)
    want = reference.gemm(*arguments, residual=residual, low_rank=low_rank)
    out = xp.asarray(residual)
    x, weight = cases.to_module(xp, *arguments)
    kernels.gemm(x, weight, residual=out, out=out, low_rank=_moved(xp, low_rank))
    assert_close(out, want, reduction=shape[4])


def test_rows_without_an_adapter_keep_their_bits(xp):
    shape = (300, 4, 16, (96, 304), 320)
    low_rank = _low_rank(shape, "bfloat16", bias=True)
    arguments = cases.to_module(xp, *_arguments("gemm", shape, "bfloat16"))
    plain = to_numpy(kernels.gemm(*arguments, deterministic=True))
    got = kernels.gemm(*arguments, deterministic=True, low_rank=_moved(xp, low_rank))
    others = low_rank.slots >= 4
    assert others.any() and np.array_equal(to_numpy(got)[others], plain[others])


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["gemm", "fp8"])
def test_a_row_has_the_same_bits_in_any_batch(cp, op):
    shape = (300, 4, 16, (96, 304), 320)
    low_rank = _low_rank(shape, "bfloat16", bias=True, num_splits=8)
    arguments = _arguments(op, shape, "bfloat16")
    whole = to_numpy(_run(cp, op, arguments, low_rank, deterministic=True))
    for rows in (slice(0, 1), slice(5, 45), slice(100, 264)):
        slots = low_rank.slots[rows]
        order, offsets = sorted_by_adapter(np.where(slots < 4, slots, -1), 4)
        part = replace(low_rank, h=low_rank.h[:, rows].copy(), slots=slots)
        part = replace(part, order=order, offsets=offsets)
        some = (arguments[0][rows], *arguments[1:])
        got = to_numpy(_run(cp, op, some, part, deterministic=True))
        assert np.array_equal(got, whole[rows])


# ---- every tile


def _hopper(cp):
    if _module.current_architecture(cp.cuda.runtime.getDevice()) != "sm_90a":
        pytest.skip("not a Hopper GPU")


@pytest.fixture
def epilogue(monkeypatch):
    """The epilogue adds adapters to any number of rows."""
    monkeypatch.setattr(low_rank_module, "MIN_ROWS", 1)


TILE_SHAPES = (
    (9, 3, 16, (72,), 1096),
    (64, 16, 16, (512, 640, 768), 2048),
    (130, 4, 32, (136, 264), 520),
    (257, 2, 64, (296,), 1000),
    (700, 40, 16, (1024, 2048), 640),
)


@pytest.mark.gpu
@pytest.mark.grid("dtype", ["float16", "bfloat16"])
@pytest.mark.grid("config", ADAPTED_CONFIGS, ids=str)
def test_every_tile_matches_mirrors(cp, epilogue, monkeypatch, config, dtype):
    _hopper(cp)
    monkeypatch.setattr(gemm_launch, "choose_config", lambda *_, **__: config)
    for shape in TILE_SHAPES:
        _compare(cp, "gemm", shape, dtype)
        _compare(cp, "gemm", shape, dtype, bias=True, has_bias=True, residual=True, num_splits=9)
    if config.gates:
        _compare(cp, "gemm", (100, 5, 16, (288, 576), 640), dtype, activation="swiglu")


@pytest.mark.gpu
@pytest.mark.grid("blocks", [False, True])
@pytest.mark.grid("op", ["fp8", "int8"])
@pytest.mark.grid("config", w8_configs(has_blocks=False), ids=str)
def test_every_tile_of_8_bits_matches_mirrors(cp, epilogue, monkeypatch, config, op, blocks):
    _hopper(cp)
    if blocks and (op == "int8" or 128 % config.tile_n):
        pytest.skip("no such kernel")
    monkeypatch.setattr(w8, "MAX_SKINNY_ROWS", 0)
    monkeypatch.setattr(w8, "choose_w8_hopper", lambda *_, **__: config)
    for shape in ((40, 16, 16, (256, 384), 1040), (300, 3, 32, (640,), 528)):
        _compare(cp, op, shape, "bfloat16", blocks=blocks)
        _compare(cp, op, shape, "bfloat16", blocks=blocks, bias=True, residual=True)
    if config.gates:
        _compare(cp, op, (70, 5, 16, (128, 256), 528), "bfloat16", activation="swiglu")


def test_a_tile_with_adapters_has_registers_for_them():
    """The choice leaves out tiles whose modules would spill; the others are compiled."""
    files = {spec.file for spec in hopper_specs("bfloat16", is_adapted=True)}
    assert files == {"gemm/gemm_adapted_sm90.cu"}
    for m in (MIN_ROWS, 1024, 8192):
        for n, k in ((6144, 4096), (28672, 4096), (4096, 14336)):
            assert choose_hopper(m, n, k, 132, is_adapted=True).adapts


# ---- what is refused


def test_contract():
    shape = SHAPES[2]
    low_rank = _low_rank(shape, "float32", bias=True, has_bias=True)
    x, weight = _arguments("gemm", shape, "float32")

    def refused(error, match, **changes):
        options = {n: changes.pop(n) for n in ("activation", "out_dtype") if n in changes}
        with pytest.raises(error, match=match):
            kernels.gemm(x, weight, low_rank=replace(low_rank, **changes), **options)

    refused(ContractError, r"activation: must be one of .* with low_rank; got 'relu'",
            activation="relu")  # fmt: skip
    refused(ShapeError, "low_rank.h", h=low_rank.h[:, :-1])
    refused(ContractError, "low_rank.h: must be of bounds x r columns", h=low_rank.h[:, :, :-16])
    refused(ShapeError, "low_rank.b", b=low_rank.b[:, :-1])
    refused(DTypeError, "low_rank.b", b=low_rank.b.astype(np_dtype("bfloat16")))
    refused(ContractError, "low_rank.bounds: must be ascending up to 128", bounds=(96, 64, 128))
    refused(ShapeError, "low_rank.slots", slots=low_rank.slots[:-1])
    refused(DTypeError, "low_rank.slots", slots=low_rank.slots.astype(np.int64))
    refused(ShapeError, "low_rank.bias", bias=low_rank.bias[:, 1:])
    refused(ShapeError, "low_rank.has_bias", has_bias=low_rank.has_bias[1:])
