"""embedding_backward: the kernel against its mirror, the mirror against one-hot rows."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.testing import cases
from engine.testing.cases_elementwise import assert_guards, misaligned
from engine.testing.tolerances import assert_close

# (T, V, N): one row, rows of one id in one block of sorted ids and in many, ids that end with a
# block, begin in one and end in the next, unvectorizable sizes, several blocks of columns, and
# no tokens.
_CASES = (
    *((1, 40, 576), (64, 1, 64), (70, 1, 64), (900, 3, 300), (333, 31, 63), (2000, 65, 8)),
    *((128, 500, 4096), (3000, 2, 257), (2, 3, 1), (0, 4, 64)),
)


def _sorted(ids):
    order = np.argsort(ids, kind="stable")
    return ids[order], order


def _inputs(case, dtype):
    tokens, vocab, n = case
    ids = np.random.default_rng(1).integers(0, vocab, tokens).astype(np.int32)
    return cases.normal((tokens, n), dtype, seed=2), *_sorted(ids)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("scale", [1.0, 0.3])
@pytest.mark.grid("case", _CASES)
def test_matches_mirror(xp, case, scale, dtype):
    tokens, vocab, n = case
    dout, ids, order = _inputs(case, dtype)
    want = reference.embedding_backward(dout, ids, order, vocab, scale=scale)
    out, buffer = cases.guarded(xp, (vocab, n), dout.dtype)
    arrays = cases.to_module(xp, dout, ids, order)
    assert kernels.embedding_backward(*arrays, vocab, scale=scale, out=out) is out
    assert_close(out, want, reduction=max(tokens // vocab, 1))
    assert_guards(buffer)
    again = kernels.embedding_backward(*arrays, vocab, scale=scale)
    np.testing.assert_array_equal(to_numpy(again).view("u1"), to_numpy(out).view("u1"))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_misaligned_rows(xp, dtype):
    dout, ids, order = _inputs((9, 4, 64), dtype)
    arrays = (misaligned(xp, dout), *cases.to_module(xp, ids, order))
    want = reference.embedding_backward(dout, ids, order, 4)
    assert_close(kernels.embedding_backward(*arrays, 4), want, reduction=9)


def test_runs_at_the_borders_of_blocks(xp):
    """Ids that fill whole blocks of 64, and ids to skip before, between and behind them."""
    runs = [(-3, 50), (0, 14), (1, 64), (2, 64), (4, 65), (5, 190), (6, 1), (9, 70)]
    ids = np.repeat(*np.array(runs, np.int32).T)
    order = np.random.default_rng(0).permutation(len(ids))
    dout = np.random.default_rng(1).integers(-8, 9, (len(ids), 40)).astype(np.float32)
    want = np.zeros((8, 40), np.float32)
    np.add.at(want, ids[(ids >= 0) & (ids < 8)], dout[order[(ids >= 0) & (ids < 8)]])
    want[5] = 0
    got = kernels.embedding_backward(*cases.to_module(xp, dout, ids, order), 8, padding_id=5)
    np.testing.assert_array_equal(to_numpy(got), want)


def test_skipped_ids_leave_no_trace(xp):
    ids, order = _sorted(np.array([-1, 5, 2, 2**31 - 1, 2, 9, -(2**31), 5], np.int32))
    dout = cases.normal((8, 24), "float32", seed=3)
    dout[[0, 3, 5, 6]] = np.nan
    dout[[1, 7]] = np.inf
    arrays = cases.to_module(xp, dout, ids, order)
    got = to_numpy(kernels.embedding_backward(*arrays, 9, padding_id=5))
    np.testing.assert_allclose(got[2], dout[2] + dout[4], rtol=1e-6)
    got[2] = 0
    np.testing.assert_array_equal(got, np.zeros((9, 24)))


def test_mirror_is_a_product_with_one_hot_rows():
    dout, ids, order = _inputs((30, 7, 5), "float32")
    dout = dout.astype(np.float64)
    want = 0.5 * np.eye(7)[ids].T @ dout[order]
    got = reference.embedding_backward(dout, ids, order, 7, scale=0.5)
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_no_features(xp):
    dout, ids, order = cases.to_module(xp, *_inputs((30, 7, 0), "float32"))
    assert kernels.embedding_backward(dout, ids, order, 7).shape == (7, 0)


@pytest.mark.gpu
def test_a_damaged_order_reads_nothing_else(cp):
    """Rows outside dout are clamped to it."""
    dout = cp.arange(6, dtype=np.float32).reshape(3, 2)
    ids = cp.asarray(np.array([0, 1, 1], np.int32))
    order = cp.asarray(np.array([-(2**40), 2**40, 1]))
    got = kernels.embedding_backward(dout, ids, order, 2)
    assert got.tolist() == [[0, 1], [6, 8]]


def test_contract(xp):
    dout, ids, order = cases.to_module(xp, *_inputs((6, 4, 8), "float32"))
    with pytest.raises(DTypeError, match="sorted_ids: must be int32; got int64"):
        kernels.embedding_backward(dout, order, order, 4)
    with pytest.raises(DTypeError, match="order: must be int64; got int32"):
        kernels.embedding_backward(dout, ids, ids, 4)
    with pytest.raises(ShapeError, match="order: must have shape"):
        kernels.embedding_backward(dout, ids, order[:5], 4)
    with pytest.raises(ContractError, match="vocab_size: must be"):
        kernels.embedding_backward(dout, ids, order, 0)
    with pytest.raises(ContractError, match="padding_id: must be"):
        kernels.embedding_backward(dout, ids, order, 4, padding_id=4)
    with pytest.raises(ShapeError, match="out: must have shape"):
        kernels.embedding_backward(dout, ids, order, 4, out=xp.zeros((4, 7), np.float32))


@pytest.mark.gpu
def test_a_table_of_more_than_two_to_the_31_elements(cp):
    vocab, n = 600_000, 4096
    if cp.cuda.Device().mem_info[0] < 3 * vocab * n:
        pytest.skip("needs 7 GB of free device memory")
    ids, order = _sorted(np.array([vocab - 1, 0, vocab - 1], np.int32))
    dout = cp.full((3, n), 2.0, np.float16)
    got = kernels.embedding_backward(dout, cp.asarray(ids), cp.asarray(order), vocab)
    np.testing.assert_array_equal(to_numpy(got[[0, 1, -1]])[:, -1], [2.0, 0.0, 4.0])
