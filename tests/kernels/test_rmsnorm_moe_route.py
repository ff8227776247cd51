"""rmsnorm_moe_route: the kernel against the mirror and the separate ops, the contract."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels import rmsnorm_moe_route as op
from engine.testing import cases
from engine.testing.cases_elementwise import misaligned
from engine.testing.cases_moe import distinct_logits
from engine.testing.tolerances import assert_close

# (T, N, E, k): real models; widths that are not multiples of a warp or block; one expert; the most
# experts; a weight larger than shared memory; an unaligned width; no tokens.
SHAPES = (
    (1, 2048, 128, 8),
    (1, 2880, 32, 4),
    (1, 4096, 8, 2),
    (1, 64, 7, 3),
    (1, 72, 33, 16),
    (1, 40, 1, 1),
    (1, 512, 512, 9),
    (1, 8192, 160, 6),
    (1, 8192, 320, 6),
    (1, 63, 40, 4),
    (0, 64, 16, 2),
)
# The same for a few tokens: part of a tile of 16, a tile, several; blocks with fewer columns than
# others, or none; experts that fill a kernel's columns.
FEW = (
    (2, 2048, 128, 8),
    (16, 2880, 32, 4),
    (17, 2880, 128, 4),
    (250, 2048, 128, 8),
    (40, 4096, 64, 8),
    (5, 3072, 256, 8),
    (30, 2048, 512, 10),
    (33, 512, 33, 16),
    (7, 64, 8, 2),
    (3, 8192, 320, 6),
    (5, 40, 64, 8),
)
OPTIONS = (
    {},
    {"score": "sigmoid", "renormalize": False, "scale": 2.5},
    {"weight_offset": 1.0, "eps": 1e-3},
    {"num_shared": 1},
)


def _inputs(shape, dtype, weight_offset=0.0, eps=1e-6):
    """Return x, norm weight and router weight; router logits are well separated."""
    num_tokens, n, num_experts, _ = shape
    x = cases.normal((num_tokens, n), dtype, seed=n)
    norm_weight = cases.normal((n,), dtype, seed=1)
    spread = distinct_logits(1, num_experts, seed=2)[0]
    y = reference.rmsnorm(x[:1], norm_weight, eps=eps, weight_offset=weight_offset)
    y = y.astype(np.float64).sum(axis=0)
    direction = y / max(float(y @ y), 1e-9)
    weight = (spread[:, None] * direction).astype(np.float32).astype(x.dtype)
    # Penalise every third expert, including the best.
    bias = np.where(np.arange(num_experts) % 3 == spread.argmax() % 3, -16, 0)
    return x, norm_weight, weight, bias.astype(x.dtype)


def _assert_same(got, want, name):
    y, routing = got
    assert_close(y, want[0], reduction=64, name=name)
    rtol = 1e-4 if y.dtype == np.float32 else 3e-2  # y is rounded before the product
    for field in ("experts", "order", "offsets"):
        own, other = to_numpy(getattr(routing, field)), getattr(want[1], field)
        assert own.dtype == np.int32
        np.testing.assert_array_equal(own, other, err_msg=f"{field} {name}")
    np.testing.assert_allclose(to_numpy(routing.weights), want[1].weights, rtol=rtol, err_msg=name)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("shape", SHAPES)
def test_matches_mirror(xp, shape, dtype):
    for options in OPTIONS:
        norm = {key: options[key] for key in ("weight_offset", "eps") if key in options}
        x, norm_weight, weight, bias = _inputs(shape, dtype, **norm)
        for own_bias in (None, bias):
            top_k = min(shape[3], shape[2] - options.get("num_shared", 0))
            if not top_k:
                continue
            want = reference.rmsnorm_moe_route(
                x, norm_weight, weight, top_k, bias=own_bias, **options
            )
            arrays = cases.to_module(xp, x, norm_weight, weight)
            on_device = None if own_bias is None else xp.asarray(own_bias)
            for _ in range(2):  # the second call may overlap the first
                got = kernels.rmsnorm_moe_route(*arrays, top_k, bias=on_device, pdl=True, **options)
            _assert_same(got, want, f"{options}")


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("shape", FEW)
def test_few_tokens_match_mirror(xp, shape, dtype):
    """Experts are those of the kernel's own y, whose logits float64 must not confuse."""
    num_tokens, n, num_experts, top_k = shape
    x = cases.normal((num_tokens, n), dtype, seed=n)
    residual = cases.normal((num_tokens, n), dtype, seed=n + 1)
    norm_weight = cases.normal((n,), dtype, seed=1, mean=1.0)
    bias = cases.normal((num_experts,), dtype, seed=3)
    for options in OPTIONS:
        rows = num_experts + options.get("num_shared", 0)
        weight = cases.normal((rows, n), dtype, seed=2, scale=n**-0.5)
        norm = {key: options[key] for key in ("weight_offset", "eps") if key in options}
        routed = {key: value for key, value in options.items() if key not in norm}
        for own_bias, added, coded in (
            (None, None, True),
            (bias, residual, False),
            (None, x, True),
        ):
            if own_bias is not None and rows > num_experts:
                own_bias = np.concatenate([own_bias, own_bias[:1]])
            want = reference.rmsnorm_moe_route(
                *(x, norm_weight, weight, top_k),
                bias=own_bias,
                residual=added,
                quantize_out=coded,
                **options,
            )
            given = cases.to_module(xp, x.copy(), norm_weight, weight)
            optional = [
                None if one is None else xp.asarray(one.copy()) for one in (own_bias, added)
            ]
            results = []
            for out in (None, given[0]):  # the second call may overlap the first
                got = kernels.rmsnorm_moe_route(
                    *(*given, top_k),
                    bias=optional[0],
                    residual=optional[1],
                    quantize_out=coded,
                    out=out,
                    residual_out=None if out is None else optional[1],
                    pdl=True,
                    **options,
                )
                results.append([*got[1], *(one for i, one in enumerate(got) if i != 1)])
            assert len(got) == len(want) == 2 + 2 * coded + (added is not None)
            assert got[0] is given[0] and (added is None or got[-1] is optional[1])
            for one, other in zip(*results, strict=True):
                np.testing.assert_array_equal(
                    to_numpy(one).view(np.uint8), to_numpy(other).view(np.uint8)
                )
            y = to_numpy(got[0])
            assert_close(y, want[0], reduction=64)
            logits = y.astype(np.float64) @ weight.astype(np.float64).T
            logits += 0 if own_bias is None else own_bias.astype(np.float64)
            _assert_routed(got[1], logits, top_k, routed)
            if added is not None:
                np.testing.assert_array_equal(to_numpy(got[-1]), want[-1])
            if coded:
                codes, scales = reference.quantize_rows(y, group=128)
                np.testing.assert_array_equal(to_numpy(got[2]), codes)
                np.testing.assert_array_equal(to_numpy(got[3]), scales)


def _assert_routed(routing, logits, top_k, options):
    """Compare with the routing of float64 logits; experts with nearly equal ones may swap."""
    experts, weights, order, offsets = map(to_numpy, routing)
    want = reference.moe_route(logits, top_k, **options)
    own = np.take_along_axis(logits, experts, axis=1)
    others = np.take_along_axis(logits, want.experts, axis=1)
    np.testing.assert_allclose(own, others, atol=2e-5, rtol=2e-5)
    np.testing.assert_allclose(weights, want.weights, rtol=1e-4, atol=1e-6)
    flat = experts.reshape(-1)
    np.testing.assert_array_equal(order, np.argsort(flat, kind="stable"))
    counts = np.bincount(flat, minlength=logits.shape[1])
    np.testing.assert_array_equal(offsets, np.concatenate([[0], np.cumsum(counts)]))


@pytest.mark.parametrize("num_tokens", [1, 20])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_groups_correction_scale_and_load(xp, dtype, num_tokens):
    shape = (num_tokens, 512, 64, 6)
    x, norm_weight, weight, _ = _inputs(shape, dtype)
    correction = distinct_logits(1, 64, seed=7)[0] * 0.01
    options = {"score": "sigmoid", "num_groups": 8, "top_groups": 3}
    load = np.zeros(64, np.int64)
    arguments = (x, norm_weight, weight, 6)
    factor = np.linspace(0.5, 2.0, 64, dtype=np.float32)
    options["expert_scale"] = factor
    want = reference.rmsnorm_moe_route(*arguments, correction=correction, load=load, **options)
    options["expert_scale"] = xp.asarray(factor)
    own = xp.zeros(64, np.int64)
    arrays = cases.to_module(xp, x, norm_weight, weight, correction)
    slots = np.zeros(num_tokens, np.int64)
    for slot in (3, -1):  # padding is not counted
        slots[:] = slot
        got = kernels.rmsnorm_moe_route(
            *arrays[:3],
            6,
            correction=arrays[3],
            load=own,
            slots=xp.asarray(slots),
            pdl=True,
            **options,
        )
        _assert_same(got, want, "groups")
        np.testing.assert_array_equal(to_numpy(own), load)


@pytest.mark.gpu
def test_which_calls_are_one_kernel(cp, launched):
    for index, shape in enumerate(SHAPES[:-1]):
        launched.clear()
        arrays = cases.to_module(cp, *_inputs(shape, "bfloat16")[:3])
        kernels.rmsnorm_moe_route(*arrays, shape[3], pdl=True)
        is_one = index < 8  # others: too large, unaligned
        assert launched[0].startswith("rmsnorm_moe_route") == is_one, (shape, launched)
        assert len(launched) == 1 or not is_one
    for shape in FEW:
        launched.clear()
        num_tokens, n, num_experts, top_k = shape
        given = [cp.zeros(s, "float16") for s in ((num_tokens, n), (n,), (num_experts, n))]
        kernels.rmsnorm_moe_route(*given, top_k, pdl=True)
        is_few = shape not in FEW[-2:]  # too large, unaligned
        assert launched[0].startswith("rmsnorm_moe_route_few") == is_few, (shape, launched)
        assert not is_few or len(launched) == 1 + (num_tokens > 16)
    launched.clear()
    x, *others = _inputs(SHAPES[0], "bfloat16")[:3]
    moved = cases.to_module(cp, *others)
    got = kernels.rmsnorm_moe_route(misaligned(cp, x), *moved, 8, pdl=True)
    assert len(launched) > 1
    launched.clear()
    kernels.rmsnorm_moe_route(cp.asarray(x), *moved, 8)
    assert len(launched) > 1  # the weight must not be prefetched
    _assert_same(got, reference.rmsnorm_moe_route(x, *others, 8), "misaligned")


def test_padding_is_not_counted(xp):
    """Tokens of two clusters, some of them padding."""
    x, norm_weight, weight, _ = _inputs((20, 512, 64, 6), "bfloat16")
    slots = np.where(np.arange(20) % 3 == 1, -1, 5)
    own = xp.zeros(64, np.int64)
    arrays = cases.to_module(xp, x, norm_weight, weight)
    _, routing = op(*arrays, 6, load=own, slots=xp.asarray(slots), pdl=True)
    counted = to_numpy(routing.experts)[slots >= 0]
    np.testing.assert_array_equal(to_numpy(own), np.bincount(counted.reshape(-1), minlength=64))


@pytest.mark.gpu
def test_broken_numbers_of_one_token_leave_others_alone(cp):
    x, *others = _inputs((20, 2048, 128, 8), "bfloat16")[:3]
    moved = cases.to_module(cp, *others)
    whole = op(cp.asarray(x), *moved, 8, pdl=True, quantize_out=True)
    for broken in (np.nan, np.inf):
        x[17, 700] = broken
        y, routing, *_ = op(cp.asarray(x), *moved, 8, pdl=True, quantize_out=True)
        experts = to_numpy(routing.experts)
        assert all(len(set(row)) == 8 and min(row) >= 0 and max(row) < 128 for row in experts)
        rest = np.arange(20) != 17
        np.testing.assert_array_equal(experts[rest], to_numpy(whole[1].experts)[rest])
        assert np.isnan(to_numpy(y).astype(np.float32)).any(axis=1).tolist() == (~rest).tolist()


@pytest.mark.gpu
def test_broken_numbers(cp):
    """Experts are valid and distinct, whatever x is."""
    x, *others = _inputs(SHAPES[0], "bfloat16")[:3]
    for broken in (np.nan, np.inf):
        x[0, 5] = broken
        _, routing = op(*cases.to_module(cp, x, *others), 8, pdl=True)
        chosen = to_numpy(routing.experts)[0]
        assert len(set(chosen)) == 8
        assert chosen.min() >= 0
        assert chosen.max() < 128


def test_the_contract(xp):
    x, norm_weight, weight, bias = cases.to_module(xp, *_inputs((2, 64, 8, 2), "float32"))
    with pytest.raises(ShapeError, match="weight"):
        op(x, norm_weight, weight[:, :63], 2)
    with pytest.raises(ShapeError, match="bias"):
        op(x, norm_weight, weight, 2, bias=bias[:5])
    with pytest.raises(DTypeError, match="norm_weight"):
        op(x, norm_weight.astype("float16"), weight, 2)
    with pytest.raises(ContractError, match="top_k"):
        op(x, norm_weight, weight, 9)
    with pytest.raises(ContractError, match="num_groups"):
        op(x, norm_weight, weight, 2, num_groups=3)
    with pytest.raises(ContractError, match="score"):
        op(x, norm_weight, weight, 2, score="relu")
