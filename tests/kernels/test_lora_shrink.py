"""lora_shrink: the kernel against its mirror, the mirror against a loop, splits, the contract."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels.lora_shrink import choose_num_splits
from engine.testing import cases
from engine.testing.cases_lora import adapters_of, sorted_by_adapter
from engine.testing.tolerances import assert_close

# (T, S, R, K): decoding, both tile sizes, prompts, many adapters, rows no vector divides, empty.
SHAPES = (
    (1, 1, 8, 64),
    (64, 16, 48, 1024),
    (17, 3, 16, 512),
    (128, 5, 40, 192),
    (129, 4, 96, 320),
    (1000, 3, 64, 256),
    (300, 256, 16, 64),
    (40, 256, 200, 72),
    (33, 2, 7, 19),
    (200, 3, 9, 131),
    (0, 2, 8, 64),
)


def _inputs(shape, dtype):
    """Return x, a, order and offsets; some tokens have no adapter, and some adapters no token."""
    num_tokens, num_adapters, columns, depth = shape
    x = cases.normal((num_tokens, depth), dtype, seed=1)
    a = cases.normal((num_adapters, columns, depth), dtype, seed=2)
    adapters = adapters_of(num_tokens, num_adapters, seed=3)
    return x, a, *sorted_by_adapter(adapters, num_adapters)


def _listed(order, offsets):
    """Return the tokens that have an adapter, and those that have none."""
    return order[: offsets[-1]], order[offsets[-1] :]


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("num_splits", [1, 3, 16])
@pytest.mark.grid("shape", SHAPES)
def test_matches_mirror(xp, shape, num_splits, dtype):
    x, a, order, offsets = _inputs(shape, dtype)
    want = reference.lora_shrink(x, a, order, offsets, num_splits=num_splits)
    out, buffer = cases.guarded(xp, want.shape, np.float32)
    arrays = cases.to_module(xp, x, a, order, offsets)
    assert kernels.lora_shrink(*arrays, num_splits=num_splits, out=out) is out
    listed, others = _listed(order, offsets)
    got = to_numpy(out)
    assert_close(got[:, listed], want[:, listed], reduction=shape[3])
    assert np.isnan(got[:, others]).all()
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("columns", [16, 17])
def test_views(xp, columns, dtype):
    """x is part of wider rows, aligned or not, whose other values are NaN."""
    x, a, order, offsets = _inputs((50, 4, columns, 128), dtype)
    want = reference.lora_shrink(x, a, order, offsets)
    listed, _ = _listed(order, offsets)
    for begin in (16, 3):
        wide = xp.full((50, 160), float("nan"), x.dtype)
        wide[:, begin : begin + 128] = xp.asarray(x)
        arrays = cases.to_module(xp, a, order, offsets)
        got = kernels.lora_shrink(wide[:, begin : begin + 128], *arrays, num_splits=1)
        assert_close(to_numpy(got)[:, listed], want[:, listed], reduction=128)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_aligned_rows_of_uneven_length(xp, dtype):
    """The only row of `a`, and the rows of x, end within 16 bytes whose other values are NaN."""
    x, a = cases.normal((5, 99), dtype, seed=1), cases.normal((1, 1, 99), dtype, seed=2)
    order, offsets = np.arange(5, dtype=np.int32), np.array([0, 5], np.int32)
    want = reference.lora_shrink(x, a, order, offsets)
    wide_x, wide_a = xp.full((5, 128), np.nan, x.dtype), xp.full((2, 2, 128), np.nan, x.dtype)
    wide_x[:, :99], wide_a[:1, :1, :99] = xp.asarray(x), xp.asarray(a)
    lists = cases.to_module(xp, order, offsets)
    got = kernels.lora_shrink(wide_x[:, :99], wide_a[:1, :1, :99], *lists, num_splits=1)
    assert_close(got, want, reduction=99)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("num_splits", [1, 4])
@pytest.mark.grid("columns", [24, 96])
def test_bits_depend_on_no_other_token(xp, columns, num_splits, dtype):
    """A token alone, in a small batch and in a large one of other order."""
    x, a, _, _ = _inputs((300, 3, columns, 320), dtype)
    adapters = np.arange(300) % 4 - 1
    results = []
    for tokens in (np.arange(300), np.arange(299, -1, -1), np.arange(100), np.array([7])):
        lists = sorted_by_adapter(adapters[tokens], 3)
        arrays = cases.to_module(xp, x[tokens], a, *lists)
        got = to_numpy(kernels.lora_shrink(*arrays, num_splits=num_splits))
        results.append(got[:, np.flatnonzero(tokens == 7)[0]])
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


@pytest.mark.grid("dtype", cases.DTYPES)
def test_only_matrices_of_adapters_with_tokens_are_read(xp, dtype):
    x, a, _, _ = _inputs((20, 3, 16, 64), dtype)
    order, offsets = sorted_by_adapter([1] * 20, 3)
    want = reference.lora_shrink(x, a, order, offsets)
    a[[0, 2]] = np.nan
    got = kernels.lora_shrink(*cases.to_module(xp, x, a, order, offsets), num_splits=1)
    assert_close(got, want, reduction=64)


@pytest.mark.parametrize("adapters", [[-1] * 9, [2] * 9, [-1] * 8 + [0]], ids=["none", "one", "1"])
def test_uneven_batches(xp, adapters):
    x, a, _, _ = _inputs((9, 3, 8, 64), "bfloat16")
    order, offsets = sorted_by_adapter(adapters, 3)
    out = xp.full((2, 9, 8), float("nan"), np.float32)
    arrays = cases.to_module(xp, x, a, order, offsets)
    got = to_numpy(kernels.lora_shrink(*arrays, num_splits=2, out=out))
    want = reference.lora_shrink(x, a, order, offsets, num_splits=2)
    listed, others = _listed(order, offsets)
    assert_close(got[:, listed], want[:, listed], reduction=64)
    assert np.isnan(got[:, others]).all()


@pytest.mark.gpu
def test_damaged_lists_write_nothing_else(cp):
    """Tokens out of range are skipped, and offsets out of range clamped."""
    x, a, order, offsets = _inputs((40, 3, 16, 64), "float16")
    want = reference.lora_shrink(x, a, order, offsets)
    damaged = order.copy()
    damaged[5] = 40
    damaged[6] = -1
    out, buffer = cases.guarded(cp, (1, 40, 16), np.float32)
    kernels.lora_shrink(*cases.to_module(cp, x, a, damaged, offsets), num_splits=1, out=out)
    kept = np.delete(order[: offsets[-1]], [5, 6])
    assert_close(to_numpy(out)[:, kept], want[:, kept], reduction=64)
    assert np.isnan(to_numpy(out)[:, order[[5, 6]]]).all()
    for bad in ([-5, 2**31 - 1, -(2**31), 7], [30, 20, 10, 0]):
        lists = cases.to_module(cp, order, np.array(bad, np.int32))
        kernels.lora_shrink(cp.asarray(x), cp.asarray(a), *lists, num_splits=1, out=out)
    assert bool(cp.isnan(buffer[:64]).all()) and bool(cp.isnan(buffer[-64:]).all())


def test_mirror_is_a_loop():
    """Each split is a sum over its range of k; together they are the product."""
    x, a, order, offsets = _inputs((9, 3, 5, 150), "float32")
    adapters = adapters_of(9, 3, seed=3)
    got = reference.lora_shrink(x, a, order, offsets, num_splits=2)
    for t, s in enumerate(adapters):
        for split, part in enumerate((slice(0, 64), slice(64, 150))):
            want = [np.float64(row[part]) @ x[t, part] for row in a[s]] if s >= 0 else np.nan
            np.testing.assert_allclose(got[split, t], want, rtol=1e-4, atol=1e-5)


def test_splits_cover_the_depth():
    x, a, order, offsets = _inputs((4, 1, 3, 200), "float32")
    x = x.astype(np.float64)
    a = a.astype(np.float64)
    want = x @ a[0].T
    for num_splits in (1, 2, 3, 4, 7):
        got = kernels.lora_shrink(x, a, order, offsets, num_splits=num_splits)
        assert got.shape == (num_splits, 4, 3) and got.dtype == np.float64
        listed, _ = _listed(order, offsets)
        np.testing.assert_allclose(got.sum(0)[listed], want[listed], rtol=1e-12)


def test_choice_of_splits():
    """Few tokens fill the GPU with splits; no split is shorter than 256 values."""
    for num_tokens in (0, 1, 16, 64, 256, 4096, 65536):
        for depth in (64, 256, 1000, 4096, 16384):
            splits = choose_num_splits(num_tokens, 16, 48, depth)
            assert 1 <= splits <= max(1, min(16, depth // 256))
    assert choose_num_splits(1, 1, 48, 4096) == 16
    assert choose_num_splits(65536, 16, 48, 4096) == 1


def test_contract(xp):
    arrays = _inputs((5, 2, 8, 16), "float32")
    x, a, order, offsets = cases.to_module(xp, *arrays)
    with pytest.raises(ShapeError, match=r"a: must have shape \(S, R, K\); K = 16 from x"):
        kernels.lora_shrink(x, a[..., :8], order, offsets)
    with pytest.raises(DTypeError, match="a: must be float32; got float16"):
        kernels.lora_shrink(x, a.astype(np.float16), order, offsets)
    with pytest.raises(ShapeError, match=r"order: must have shape \(T,\); T = 5 from x"):
        kernels.lora_shrink(x, a, order[:4], offsets)
    with pytest.raises(ShapeError, match=r"offsets: must have shape \(3,\); got \(2,\)"):
        kernels.lora_shrink(x, a, order, offsets[:2])
    with pytest.raises(DTypeError, match="offsets: must be int32"):
        kernels.lora_shrink(x, a, order, offsets.astype(np.int64))
    with pytest.raises(ShapeError, match=r"out: must have shape \(2, 5, 8\)"):
        kernels.lora_shrink(x, a, order, offsets, num_splits=2, out=xp.zeros((1, 5, 8), x.dtype))
    for bad in (0, 65, True, 2.0):
        with pytest.raises(ContractError, match="num_splits: must be from 1 to 64; got"):
            kernels.lora_shrink(x, a, order, offsets, num_splits=bad)
    with pytest.raises(ContractError, match="S: must be from 1 to 256; got 257"):
        kernels.lora_shrink(x, xp.zeros((257, 8, 16), x.dtype), order, xp.zeros(258, np.int32))


def test_contract_of_lists_on_the_host():
    x, a, order, offsets = _inputs((5, 2, 8, 16), "float32")
    for bad, wanted in (
        ([1, 2, 3], "0 at the first adapter; got 1"),
        ([0, 3, 2], "ascending"),
        ([0, 2, 6], "at most T = 5; got 6"),
    ):
        with pytest.raises(ContractError, match=f"offsets: must be {wanted}"):
            kernels.lora_shrink(x, a, order, np.array(bad, np.int32))
    for bad in ([0, 1, 2, 3, 3], [0, 1, 2, 3, 5], [-1, 1, 2, 3, 4]):
        with pytest.raises(ContractError, match=r"order: must be a permutation of range\(5\)"):
            kernels.lora_shrink(x, a, np.array(bad, np.int32), offsets)
