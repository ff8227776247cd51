"""moe_gemm_combine: the kernels against the mirror, the mirror against a loop, the contract."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels.moe_gemm import few_combine, few_tokens
from engine.reference import Routing
from engine.testing import cases
from engine.testing.cases_elementwise import assert_guards, misaligned
from engine.testing.cases_moe import routing_of
from engine.testing.cases_quantized import BYTE_FORMATS, PACKED_FORMATS, random_weight, weight_to
from engine.testing.tolerances import assert_close
from engine.weights import FORMATS, unpack_weight
from engine.weights.formats import TILE_ROWS
from engine.weights.stack import stack_matrices

# One format per decoding path: code type, scale type, offset type.
SAMPLES = ("fp8_block", "fp8", "int8", "mxfp4", "int4_g128", "int8_g64_zp", "q5_1", "q4_k", "q6_k")
# (T, E, k, K, R): one token, several that share experts, K and R that are not multiples of a stage
# or row tile, fewer experts than pairs, many tokens.
SHAPES = (
    (1, 8, 4, 768, 64),
    (1, 3, 1, 16, 16),
    (5, 16, 4, 272, 96),
    (8, 6, 3, 528, 208),
    (8, 128, 16, 144, 32),
    (3, 1, 1, 1040, 48),
    (33, 7, 3, 144, 64),
    (0, 4, 2, 64, 32),
)
LARGEST_SHARED = 220 << 10  # bytes per block on Hopper, excluding static shared memory
EXTRAS = ((), ("bias", "residual"), ("shared", "shared_gate", "residual"), ("shared", "bias"))


@pytest.fixture
def one_kernel(request, monkeypatch):
    """Use one kernel for up to 8 tokens, however few its blocks; record the kernels launched."""
    launched, launch = [], few_tokens.launch
    if "xp" in request.fixturenames and request.getfixturevalue("xp") is np:
        return launched

    def choose(operands):
        if not few_combine.is_supported(operands):
            return None
        (tokens, top_k), weight = operands.routing.experts.shape, operands.weight
        sms = -(-weight.shape[1] // TILE_ROWS)
        of = (tokens, top_k, weight.shape, weight.format)
        return few_combine.choose_few_combine(*of, sms, LARGEST_SHARED)

    def noted(operands, config):
        launched.append(operands.summed is not None)
        launch(operands, config)

    monkeypatch.setattr(few_combine, "choose", choose)
    monkeypatch.setattr(few_tokens, "launch", noted)
    return launched


def _inputs(name, shape, dtype, extras=EXTRAS[1]):
    num_tokens, num_experts, top_k, k, rows = shape
    rng = np.random.default_rng([num_tokens, num_experts, top_k])
    chosen = np.argsort(rng.random((num_tokens, num_experts)), axis=1)[:, :top_k]
    x = cases.normal((num_tokens * top_k, k), dtype, seed=1)
    if name == "dense":
        weight = cases.normal((num_experts, rows, k), dtype, seed=2)
    else:
        weight = stack_matrices([random_weight(name, rows, k, seed) for seed in range(num_experts)])
    others = {
        "bias": cases.normal((num_experts, rows), dtype, seed=3),
        "shared": cases.normal((num_tokens, rows), dtype, seed=4, scale=9.0),
        "shared_gate": cases.normal((num_tokens, 1), dtype, seed=5, scale=4.0),
        "residual": cases.normal((num_tokens, rows), dtype, seed=6, scale=9.0),
    }
    routing = routing_of(chosen, num_experts, seed=num_tokens)
    return x, weight, routing, {key: others[key] for key in extras}


def _wanted(x, weight, routing, others):
    """Return the mirror's result; the single kernel rounds neither weights nor expert outputs."""
    wide = {key: value.astype(np.float32) for key, value in others.items()}
    result = reference.moe_gemm_combine(x.astype(np.float32), weight, routing, **wide)
    return result.astype(x.dtype)


def _check(xp, name, shape, dtype, extras):
    x, weight, routing, others = _inputs(name, shape, dtype, extras)
    want = _wanted(x, weight, routing, others)
    out, buffer = cases.guarded(xp, want.shape, want.dtype)
    gx = xp.asarray(x)
    gw = xp.asarray(weight) if name == "dense" else weight_to(xp, weight)
    on_device = {key: xp.asarray(value) for key, value in others.items()}
    moved = Routing(*cases.to_module(xp, *routing))
    for _ in range(2):  # the second call may overlap the first
        got = kernels.moe_gemm_combine(gx, gw, moved, pdl=True, out=out, **on_device)
        assert got is out
    # Two separate kernels round each expert's output, and possibly its weights.
    assert_close(got, want, reduction=max(shape[3], 257) * shape[2], name=f"{name} {shape}")
    assert_guards(buffer)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("shape", SHAPES)
def test_dense_weights_match_mirror(xp, shape, dtype):
    for extras in EXTRAS:
        _check(xp, "dense", shape, dtype, extras)


@pytest.mark.grid("shape", SHAPES)
@pytest.mark.grid("name", SAMPLES)
def test_quantized_weights_match_mirror(xp, name, shape):
    for dtype, extras in zip(("float16", "bfloat16") * 2, EXTRAS, strict=True):
        _check(xp, name, shape, dtype, extras)


@pytest.mark.grid("shape", SHAPES[:6])
@pytest.mark.grid("name", SAMPLES)
def test_one_kernel_matches_mirror(xp, one_kernel, name, shape):
    for dtype in ("float16", "bfloat16"):
        for extras in EXTRAS:
            _check(xp, name, shape, dtype, extras)
    assert one_kernel == [True] * (16 if xp is not np else 0)  # each call twice


@pytest.mark.grid("name", [n for n in (*PACKED_FORMATS, *BYTE_FORMATS) if n not in SAMPLES])
def test_every_other_format(xp, one_kernel, name):
    for shape in ((1, 8, 4, 768, 64), (6, 9, 3, 272, 96)):
        _check(xp, name, shape, "bfloat16", EXTRAS[1])
    assert one_kernel == [True] * (4 if xp is not np else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SAMPLES)
def test_every_way_to_cut(cp, monkeypatch, name):
    for shape in SHAPES[:5]:
        tokens, num_experts, top_k, k, rows = shape
        of = (tokens, top_k, (num_experts, rows, k), FORMATS[name])
        chosen = few_combine.choose_few_combine(*of, rows // 16, LARGEST_SHARED)
        assert chosen is not None
        for config in (chosen, *few_combine.all_configs(*of)):
            if config.shared_bytes > LARGEST_SHARED:
                continue
            monkeypatch.setattr(few_combine, "choose", lambda *_, own=config: own)
            _check(cp, name, shape, "bfloat16", EXTRAS[1])


@pytest.mark.parametrize("name", (*PACKED_FORMATS, *BYTE_FORMATS))
def test_one_kernel_is_cut_to_fit(name):
    """One token has a tiling for every model; a block is alone on its multiprocessor."""
    shapes = ((8, 6144, 16384), (32, 2880, 2880), (128, 2048, 768), (257, 7168, 2048), (3, 16, 16))
    for shape, top_k in zip(shapes, (2, 4, 8, 9, 1), strict=True):
        for tokens in range(1, few_tokens.MAX_TOKENS + 1):
            of = (tokens, top_k, shape, FORMATS[name], 132, 227 << 10)
            config = few_combine.choose_few_combine(*of)
            assert config is not None or tokens > 1
            if config is not None:
                assert config.shared_bytes < (227 << 10) - 3072
                assert config.blocks <= 132
                assert config.blocks * config.row_tiles * TILE_ROWS >= shape[1]
                assert config.parts * config.row_tiles <= 16
    small = (1, 16, (64, 4096, 1 << 14), FORMATS[name], 132, 227 << 10)
    assert few_combine.choose_few_combine(*small) is None  # x of all pairs does not fit


@pytest.mark.gpu
def test_which_calls_are_one_kernel(cp, monkeypatch):
    calls, launch = [], few_tokens.launch

    def noted(operands, config):
        calls.append(operands.summed is not None)
        launch(operands, config)

    monkeypatch.setattr(few_tokens, "launch", noted)

    def ways(shape, *, move=cp.asarray, **options):
        calls.clear()
        x, weight, routing, others = _inputs("fp8_block", shape, "bfloat16")
        moved = Routing(*cases.to_module(cp, *routing))
        on_device = {key: cp.asarray(value) for key, value in others.items()}
        got = kernels.moe_gemm_combine(
            move(x), weight_to(cp, weight), moved, **on_device, **options
        )
        want = _wanted(x, weight, routing, others)
        assert_close(got, want, reduction=shape[3] * shape[2], dtype="bfloat16")
        return calls

    rows = 16 * cp.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"]
    assert ways((8, 6, 3, 528, rows)) == [True]
    assert ways((1, 6, 3, 528, 208)) == [True]
    assert True not in ways((2, 6, 3, 528, rows + 16))  # one SM gets an extra block
    assert True not in ways((9, 6, 3, 528, rows))
    assert True not in ways((2, 6, 3, 528, rows), deterministic=True)
    assert True not in ways((2, 6, 3, 520, rows))  # unaligned rows of x
    assert True not in ways((2, 6, 3, 528, rows), move=lambda x: misaligned(cp, x))


@pytest.mark.parametrize("name", ["dense", "q4_k"])
def test_in_place(xp, one_kernel, name):
    x, weight, routing, others = _inputs(name, SHAPES[2], "bfloat16")
    want = _wanted(x, weight, routing, others)
    on_device = {key: xp.asarray(value) for key, value in others.items()}
    gw = xp.asarray(weight) if name == "dense" else weight_to(xp, weight)
    moved = Routing(*cases.to_module(xp, *routing))
    target = on_device["residual"]
    got = kernels.moe_gemm_combine(xp.asarray(x), gw, moved, **on_device, out=target)
    assert got is target
    assert_close(got, want, reduction=SHAPES[2][3] * SHAPES[2][2], dtype="bfloat16")
    assert one_kernel == [True] * (xp is not np and name != "dense")


def test_broken_numbers_stay_with_their_token(xp, one_kernel):
    """NaN in a token's row affects its own result only."""
    x, weight, routing, _ = _inputs("fp8_block", (5, 16, 4, 272, 96), "bfloat16")
    x[np.flatnonzero(routing.order // 4 == 2)[1], 7] = np.nan
    moved = Routing(*cases.to_module(xp, *routing))
    got = to_numpy(kernels.moe_gemm_combine(xp.asarray(x), weight_to(xp, weight), moved))
    got = got.astype(np.float32)
    assert np.isnan(got[2]).all()
    assert np.isfinite(np.delete(got, 2, axis=0)).all()
    assert one_kernel == [True] * (xp is not np)


@pytest.mark.parametrize("name", ["fp8_block", "fp8", "mxfp4"])
def test_one_token_of_experts_of_any_magnitude(xp, one_kernel, name):
    """The routing weights undo the experts' magnitudes, so an error in each of them shows."""
    x, weight, routing, others = _inputs(name, (1, 16, 4, 272, 96), "bfloat16", ())
    factors = np.float32(2.0) ** np.array([50, -50, 0, 100], np.float32)
    x *= factors[routing.order][:, None].astype(x.dtype)
    routing = routing._replace(weights=(routing.weights / factors).astype(np.float32))
    want = _wanted(x, weight, routing, others)
    moved = Routing(*cases.to_module(xp, *routing))
    got = kernels.moe_gemm_combine(xp.asarray(x), weight_to(xp, weight), moved)
    assert_close(got, want, reduction=272 * 4)
    assert one_kernel == [True] * (xp is not np)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8_block", "mxfp4"])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_a_chain_in_place_has_the_bits_of_single_calls(cp, one_kernel, name, num_tokens):
    """Each kernel is launched before the kernels that produce its inputs have ended."""
    hidden, width, experts, top_k = 512, 256, 16, 4
    matrices = [
        weight_to(cp, stack_matrices([random_weight(name, *shape, s) for s in range(experts)]))
        for shape in ((2 * width, hidden), (hidden, width))
    ]
    router = cp.asarray(cases.normal((experts, hidden), "bfloat16", seed=8, scale=0.1))
    norm = cp.asarray(cases.normal((hidden,), "bfloat16", seed=9, mean=1.0, scale=0.1))
    start = cases.normal((num_tokens, hidden), "bfloat16", seed=1)

    def chain(finish):
        x = cp.asarray(start)
        for _ in range(20):
            y, routing = kernels.rmsnorm_moe_route(x, norm, router, top_k, pdl=True)
            finish()
            rows = kernels.moe_gemm(y, matrices[0], routing, activation="swiglu", pdl=True)
            finish()
            kernels.moe_gemm_combine(rows, matrices[1], routing, residual=x, pdl=True, out=x)
            finish()
        return to_numpy(x).view("u2")

    apart = chain(cp.cuda.Device().synchronize)
    for _ in range(3):
        np.testing.assert_array_equal(chain(lambda: None), apart)
    assert one_kernel.count(True) == 80


def test_the_mirror_against_a_loop():
    x, weight, routing, others = _inputs("fp8_block", (5, 6, 3, 272, 96), "float32", EXTRAS[2])
    matrices = unpack_weight(weight).astype(np.float64)
    want = np.zeros((5, 96))
    for place, pair in enumerate(routing.order):
        token, rank = divmod(int(pair), 3)
        product = matrices[routing.experts[token, rank]] @ x[place].astype(np.float64)
        want[token] += routing.weights[token, rank] * product
    want += others["shared"] / (1 + np.exp(-others["shared_gate"])) + others["residual"]
    got = reference.moe_gemm_combine(x, weight, routing, **others)
    assert_close(got, want.astype(np.float32), reduction=272 * 3)


def test_the_contract(xp):
    x, weight, routing, others = _inputs("dense", (2, 4, 2, 64, 32), "float32", EXTRAS[2])
    moved = Routing(*cases.to_module(xp, *routing))
    gx, gw = xp.asarray(x), xp.asarray(weight)
    shared, gate, residual = (xp.asarray(value) for value in others.values())

    def op(*args, **options):
        return kernels.moe_gemm_combine(*args, **options)

    with pytest.raises(ShapeError, match="residual"):
        op(gx, gw, moved, residual=residual[:1])
    with pytest.raises(ShapeError, match="shared"):
        op(gx, gw, moved, shared=shared[:, :5])
    with pytest.raises(ContractError, match="shared_gate"):
        op(gx, gw, moved, shared_gate=gate)
    with pytest.raises(DTypeError, match="residual"):
        op(gx, gw, moved, residual=residual.astype("float16"))
    with pytest.raises(ShapeError, match="x"):
        op(gx[:3], gw, moved)
    with pytest.raises(ContractError, match="128 x 128"):
        op(gx, gw, moved, quantize_x=True)
    with pytest.raises(ShapeError, match="out"):
        op(gx, gw, moved, out=residual[:1])
