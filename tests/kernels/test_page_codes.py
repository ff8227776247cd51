"""Stores and copies of quantized KV pages: kernels against mirrors, rounding, NaN, bad scales."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.dtypes import KV_CODE_DTYPES
from engine.errors import ContractError, DTypeError
from engine.testing import cases
from engine.testing.cases_elementwise import PAGES

_E4M3 = ml_dtypes.float8_e4m3fn
_KINDS = [pytest.param(codes, id=name) for name, codes in KV_CODE_DTYPES.items()]


def _inputs(shape, dtype):
    """Return rows with special values among them, their slots and scales."""
    num_blocks, heads, block_size, head_dim = shape
    num_slots = num_blocks * block_size
    slots = np.random.default_rng(1).permutation(num_slots)[: max(1, num_slots // 2)]
    slots = slots.astype(np.int64)
    slots[2::3] = -1
    rng = np.random.default_rng(2)
    rows = []
    for seed in (2, 3):
        x = cases.normal((len(slots), heads, head_dim), dtype, seed=seed)
        flat = x.reshape(-1)
        special = [np.nan, np.inf, -np.inf, 1e4, -1e4, 1e-6, 0.0, -0.0]
        places = rng.integers(0, flat.size, len(special)) if flat.size else []
        for place, value in zip(places, special, strict=False):
            flat[place] = value
        rows.append(x)
    scales = (rng.uniform(0.001, 0.02, heads).astype(np.float32) for _ in "kv")
    return *rows, slots, *scales


@pytest.mark.grid("kind", _KINDS)
@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("shape", PAGES)
def test_store_matches_mirror(xp, shape, dtype, kind):
    k, v, slots, k_scale, v_scale = _inputs(shape, dtype)
    want = np.full((2, *shape), 0x55, kind.dtype)
    reference.kv_store(k, v, *want, slots, k_scale=k_scale, v_scale=v_scale)
    got = xp.full((2, *shape), 0x55, kind.dtype)
    moved = cases.to_module(xp, k, v)
    kernels.kv_store(
        *moved,
        got[0],
        got[1],
        xp.asarray(slots),
        k_scale=xp.asarray(k_scale),
        v_scale=xp.asarray(v_scale),
    )
    np.testing.assert_array_equal(to_numpy(got), want)


def test_mirror_of_e4m3_rounds_to_nearest_even_and_saturates():
    values = np.arange(256, dtype=np.uint8).view(_E4M3).astype(np.float32)
    finite = np.unique(values[np.isfinite(values)])
    middles = (finite[1:] + finite[:-1]) / 2
    x = np.concatenate([finite, middles, [1e9, -1e9, np.inf, -np.inf]]).astype(np.float32)
    pages = np.zeros((2, len(x), 1, 1, 1), np.uint8)
    rows, slots = x[:, None, None] * np.float32(0.25), np.arange(len(x))
    scale = np.array([0.25], np.float32)
    reference.kv_store(rows, rows, *pages, slots, k_scale=scale, v_scale=scale)
    got = pages[0].reshape(-1).view(_E4M3).astype(np.float32)
    np.testing.assert_array_equal(got[: len(finite)], finite)
    between = got[len(finite) : -4]
    codes = pages[0].reshape(-1)[len(finite) : -4]
    assert not (codes & 1).any()  # ties go to the even code
    assert (np.minimum(between - finite[:-1], finite[1:] - between) == 0).all()
    np.testing.assert_array_equal(got[-4:], [448, -448, 448, -448])


def test_mirror_of_int8_rounds_to_nearest_even_and_saturates():
    halves = np.arange(-255, 256).astype(np.float32) / 2
    x = np.concatenate([halves, [126.5, 127.49, 127.5, 1e9, np.inf, -1e9, -np.inf, np.nan]])
    x = x.astype(np.float32)
    pages = np.zeros((2, len(x), 1, 1, 1), np.int8)
    rows, slots = x[:, None, None] * np.float32(0.25), np.arange(len(x))
    scale = np.array([0.25], np.float32)
    reference.kv_store(rows, rows, *pages, slots, k_scale=scale, v_scale=scale)
    got = pages[0].reshape(-1).astype(int)
    whole = [min(127, max(-127, round(float(half)))) for half in halves]  # half to even
    np.testing.assert_array_equal(got[: len(halves)], whole)
    np.testing.assert_array_equal(got[len(halves) :], [126, 127, 127, 127, 127, -127, -127, 0])


@pytest.mark.parametrize("kind", _KINDS)
def test_copies(xp, kind):
    rng = np.random.default_rng(0)
    slab = rng.integers(0, 256, (3, 2, 5, 2, 16, 24)).astype(np.uint8).view(kind.dtype)
    pairs = np.array([[0, 3], [1, 4]], np.int32)
    want, got = slab.copy(), xp.asarray(slab.copy())
    reference.kv_copy(want, pairs)
    kernels.kv_copy(got, xp.asarray(pairs))
    np.testing.assert_array_equal(to_numpy(got), want)
    source, swaps = slab.reshape(6, 5, 2, 16, 24), np.array([[0, 1], [4, 0]], np.int32)
    want = np.zeros((2, 6, 2, 16, 24), kind.dtype)
    reference.kv_swap(source, want.swapaxes(0, 1), swaps)
    got = xp.zeros((2, 6, 2, 16, 24), kind.dtype)
    kernels.kv_swap(xp.asarray(source), got.swapaxes(0, 1), xp.asarray(swaps))
    np.testing.assert_array_equal(to_numpy(got), want)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(4, 2, 16, 64), (3, 3, 16, 20), (4, 1, 32, 128)])
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("kind", _KINDS)
def test_fused_store_is_rope_then_store(xp, kind, dtype, shape, interleaved):
    """Without norms, the fused op's codes equal the separate ops' codes bit for bit."""
    k, v, slots, k_scale, v_scale = _inputs(shape, dtype)
    tokens, heads, head_dim = k.shape
    q = cases.normal((tokens, 2 * heads, head_dim), dtype, seed=9)
    angles = np.random.default_rng(4).uniform(0, 6, (50, head_dim // 2))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    positions = (np.arange(tokens) * 7 % 50).astype(np.int32)
    q, k, v, table, positions, slots = cases.to_module(xp, q, k, v, table, positions, slots)
    scales = {"k_scale": xp.asarray(k_scale), "v_scale": xp.asarray(v_scale)}
    want, got = xp.zeros((2, *shape), kind.dtype), xp.zeros((2, *shape), kind.dtype)
    _, rotated = kernels.rope(q, k, positions, table, interleaved=interleaved)
    kernels.kv_store(rotated, v, want[0], want[1], slots, **scales)
    places = (got[0], got[1], slots)
    kernels.qk_norm_rope_store(
        q, k, v, positions, table, *places, interleaved=interleaved, **scales
    )
    np.testing.assert_array_equal(to_numpy(got), to_numpy(want))


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0, -1.0])
def test_bad_scales_are_refused_by_name(bad, kind):
    k, v, slots, k_scale, v_scale = _inputs((4, 2, 16, 8), "float32")
    pages = np.zeros((2, 4, 2, 16, 8), kind.dtype)
    v_scale[1] = bad
    with pytest.raises(ContractError, match="kv_store: v_scale: must be positive and finite"):
        kernels.kv_store(k, v, *pages, slots, k_scale=k_scale, v_scale=v_scale)
    with pytest.raises(ContractError, match=f"kv_store: k_scale: must be an array .* {kind.dtype}"):
        kernels.kv_store(k, v, *pages, slots)
    with pytest.raises(DTypeError, match="k_pages: must be float32 or uint8 or int8"):
        kernels.kv_store(k, v, *pages.view(np.bool_), slots, k_scale=k_scale, v_scale=k_scale)
