"""moe_combine_rmsnorm: against the mirror and, bit for bit, the separate ops; the contract."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.testing import cases
from engine.testing.cases_elementwise import misaligned
from engine.testing.tolerances import assert_close

# (T, k, N): real models; each kernel size; more experts than loads in flight; too long; unaligned;
# empty.
SHAPES = (
    (16, 8, 2048),
    (3, 4, 2880),
    (1, 1, 64),
    (9, 2, 1000),
    (5, 16, 4096),
    (2, 9, 6144),
    (2, 3, 16384),
    (2, 2, 20000),
    (4, 3, 33),
    (0, 8, 64),
)
CODES = ({}, {"dtype": "fp8", "group": 128}, {"dtype": "int8"})


def _inputs(shape, dtype):
    num_tokens, _, n = shape
    pairs = cases.normal(shape, dtype, seed=1)
    residual = cases.normal((num_tokens, n), dtype, seed=2, scale=3.0)
    return pairs, residual, cases.normal((n,), dtype, seed=3, mean=1.0)


def _apart(pairs, residual, weight, *, dtype=None, group=0, **norm):
    x = kernels.moe_combine(pairs)
    if dtype is None:
        return kernels.rmsnorm(x, weight, residual=residual, **norm)
    options = {"dtype": dtype, "group": group}
    return kernels.rmsnorm_quantize(x, weight, residual=residual, **options, **norm)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("codes", CODES, ids=lambda one: one.get("dtype", "plain"))
@pytest.mark.grid("shape", SHAPES)
def test_matches_mirror_and_the_separate_ops(xp, shape, codes, dtype):
    pairs, residual, weight = _inputs(shape, dtype)
    for norm in ({}, {"eps": 1e-3, "weight_offset": 1.0}):
        want = reference.moe_combine_rmsnorm(pairs, residual, weight, **codes, **norm)
        arrays = cases.to_module(xp, pairs, residual, weight)
        apart = _apart(*arrays, **codes, **norm)
        for in_place in (False, True):
            given = [arrays[0], arrays[1].copy(), arrays[2]]
            out = given[1] if in_place else None
            got = kernels.moe_combine_rmsnorm(*given, residual_out=out, **codes, **norm)
            assert len(got) == len(want) == len(apart)
            assert not in_place or got[-1] is out
            for one, other in zip(got, apart, strict=True):
                np.testing.assert_array_equal(
                    to_numpy(one).view(np.uint8), to_numpy(other).view(np.uint8)
                )
        assert_close(got[-1], want[-1], reduction=shape[1] + 1)
        if not codes:
            assert_close(got[0], want[0], reduction=64)
        elif shape[0]:
            numbers = to_numpy(got[0]).astype(np.int32) - want[0].astype(np.int32)
            assert (numbers != 0).mean() < 0.02  # y may differ by its last bit


@pytest.mark.gpu
@pytest.mark.parametrize("codes", CODES, ids=lambda one: one.get("dtype", "plain"))
def test_misaligned(cp, codes):
    given = _inputs((6, 4, 64), "bfloat16")
    want = kernels.moe_combine_rmsnorm(*cases.to_module(cp, *given), **codes)
    moved = [misaligned(cp, one) for one in given]
    for one, other in zip(kernels.moe_combine_rmsnorm(*moved, **codes), want, strict=True):
        np.testing.assert_array_equal(to_numpy(one), to_numpy(other))


@pytest.mark.gpu
def test_numbers_that_are_missing_stay_missing(cp):
    """A NaN in one expert's output reaches its token, and no other."""
    pairs, residual, weight = _inputs((5, 8, 2048), "bfloat16")
    pairs[3, 2, 100] = np.nan
    y, h = kernels.moe_combine_rmsnorm(*cases.to_module(cp, pairs, residual, weight))
    bad = np.isnan(to_numpy(y).astype(np.float32)).any(axis=1)
    assert bad.tolist() == [False, False, False, True, False]
    assert np.isnan(to_numpy(h).astype(np.float32)).sum() == 1
    options = {"dtype": "fp8", "group": 128}
    _, scales, _ = kernels.moe_combine_rmsnorm(
        *cases.to_module(cp, pairs, residual, weight), **options
    )
    assert np.isnan(to_numpy(scales)).all(axis=1).tolist() == bad.tolist()


def test_the_contract(xp):
    pairs, residual, weight = cases.to_module(xp, *_inputs((3, 2, 64), "float32"))
    with pytest.raises(ShapeError, match="residual"):
        kernels.moe_combine_rmsnorm(pairs, residual[:2], weight)
    with pytest.raises(ShapeError, match="weight"):
        kernels.moe_combine_rmsnorm(pairs, residual, weight[:63])
    with pytest.raises(DTypeError, match="residual"):
        kernels.moe_combine_rmsnorm(pairs, residual.astype("float16"), weight)
    with pytest.raises(ContractError, match="dtype"):
        kernels.moe_combine_rmsnorm(pairs, residual, weight, dtype="int4")
    with pytest.raises(ContractError, match="group"):
        kernels.moe_combine_rmsnorm(pairs, residual, weight, dtype="fp8", group=64)
