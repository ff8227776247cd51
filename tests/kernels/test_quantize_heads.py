"""quantize_heads: the kernel against its mirror, rotation invariants, and the contract."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.testing import cases

_E4M3 = ml_dtypes.float8_e4m3fn
_SHAPES = [(1, 1, 64), (5, 3, 64), (33, 2, 128), (7, 2, 7), (9, 1, 256), (3, 2, 1), (0, 2, 64)]


def _values(codes, scale):
    return to_numpy(codes).view(_E4M3).astype(np.float64) * to_numpy(scale)[:, None]


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("shape", _SHAPES)
@pytest.mark.grid("has_offset", [False, True])
def test_matches_mirror(xp, shape, dtype, has_offset):
    x = cases.normal(shape, dtype, 1, scale=3.0)
    offset = cases.normal(shape[1:], "float32", 2) if has_offset else None
    given, moved = cases.to_module(xp, x, offset)
    codes, scale = kernels.quantize_heads(given, offset=moved)
    want, want_scale = reference.quantize_heads(x, offset=offset)
    assert codes.dtype == np.uint8 and codes.shape == shape and codes.flags.c_contiguous
    np.testing.assert_array_equal(to_numpy(codes), want)
    np.testing.assert_array_equal(to_numpy(scale), want_scale)


@pytest.mark.parametrize("head_dim", [1, 2, 16, 64, 128, 256])
def test_rotation_matches_mirror(xp, head_dim):
    """Summation order differs, so a value halfway between two codes may round either way."""
    x = cases.normal((20, 3, head_dim), "bfloat16", 3)
    codes, scale = kernels.quantize_heads(xp.asarray(x), rotate=True)
    want, want_scale = reference.quantize_heads(x, rotate=True)
    np.testing.assert_allclose(to_numpy(scale), want_scale, rtol=1e-6)
    steps = np.abs(to_numpy(codes).astype(int) - want.astype(int))
    assert steps.max() <= 1 and (steps != 0).mean() <= 0.005


def test_mirror_rounds_to_nearest():
    x = cases.normal((50, 2, 64), "float32", 4)
    codes, scale = reference.quantize_heads(x)
    values = codes.view(_E4M3).astype(np.float64)
    assert np.abs(values).max() == 448
    limit = np.maximum(np.abs(values) * 2.0**-4, 2.0**-10) * scale[:, None]  # half a step
    assert (np.abs(values * scale[:, None] - x) <= limit * 1.001).all()


def test_rotation_keeps_products(xp):
    q, k = (cases.normal((40, 1, 64), "float32", seed) for seed in (5, 6))
    want = q[:, 0].astype(np.float64) @ k[:, 0].T.astype(np.float64)
    turned = [_values(*kernels.quantize_heads(xp.asarray(x), rotate=True))[:, 0] for x in (q, k)]
    assert np.linalg.norm(turned[0] @ turned[1].T - want) < 0.06 * np.linalg.norm(want)
    assert np.linalg.norm(turned[0] - q[:, 0]) > np.linalg.norm(q)  # they were rotated


def test_strided_heads(xp):
    qkv = cases.normal((6, 8 * 64), "bfloat16", 7)
    array = xp.array(qkv)
    view = array[:, 128:256].reshape(6, 2, 64)
    assert xp.may_share_memory(view, array)
    codes, _ = kernels.quantize_heads(view)
    want, _ = reference.quantize_heads(qkv[:, 128:256].reshape(6, 2, 64))
    np.testing.assert_array_equal(to_numpy(codes), want)


def test_a_head_of_zeros(xp):
    codes, scale = kernels.quantize_heads(xp.zeros((3, 2, 8), np.float32))
    assert not to_numpy(codes).any() and (to_numpy(scale) == 1).all()


@pytest.mark.parametrize("rotate", [False, True])
def test_nan_stays_in_its_row(xp, rotate):
    """Without rotation, NaN affects only its element; the scale comes from the other rows."""
    x = cases.normal((6, 2, 64), "float32", 8)
    want, want_scale = kernels.quantize_heads(xp.asarray(np.delete(x, 3, axis=0)), rotate=rotate)
    x[3, 0] = 0
    x[3, 0, 5] = x[3, 1] = np.nan
    codes, scale = map(to_numpy, kernels.quantize_heads(xp.asarray(x), rotate=rotate))
    np.testing.assert_array_equal(scale, to_numpy(want_scale))
    np.testing.assert_array_equal(np.delete(codes, 3, axis=0), to_numpy(want))
    is_nan = np.isnan(codes[3].view(_E4M3).astype(np.float32))
    assert (
        is_nan[1].all() and is_nan[0, 5] and (is_nan[0].all() if rotate else is_nan[0].sum() == 1)
    )


def test_every_nan_has_one_code(xp):
    """Also inf / inf, which is -NaN on some machines."""
    x = np.array([[[np.nan, -np.nan, np.inf, -np.inf, 1, 0]]], np.float32)
    codes, scale = kernels.quantize_heads(xp.asarray(x))
    assert to_numpy(codes)[0, 0].tolist() == [0x7F] * 4 + [0, 0]
    assert to_numpy(scale).tolist() == [np.inf]


def test_a_tiny_scale_saturates(xp):
    """The scale, 1.4 times the smallest float32, rounds down to it; larger codes clamp to 448."""
    x = np.array([[[627, -627, 300, 0]]], np.float32) * np.float32(1e-45)
    codes, scale = kernels.quantize_heads(xp.asarray(x))
    assert to_numpy(scale)[0] == np.float32(1e-45)
    values = to_numpy(codes).view(_E4M3).astype(np.float32)[0, 0]
    np.testing.assert_array_equal(values, np.array([448, -448, 288, 0], np.float32))


def test_contract(xp):
    x = xp.ones((2, 2, 12), np.float32)
    with pytest.raises(ContractError, match="rotate: must be False unless D is a power of 2"):
        kernels.quantize_heads(x, rotate=True)
    with pytest.raises(ShapeError, match=r"offset: must have shape \(H, D\)"):
        kernels.quantize_heads(x, offset=xp.ones((2, 11), np.float32))
    with pytest.raises(DTypeError, match="offset: must be float32"):
        kernels.quantize_heads(x, offset=xp.ones((2, 12), np.float16))
    with pytest.raises(ContractError, match="D: must be from 1 to 256"):
        kernels.quantize_heads(xp.ones((1, 1, 257), np.float32))
