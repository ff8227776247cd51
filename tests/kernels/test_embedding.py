"""embedding: the kernel against its mirror, the mirror against a loop, ids outside the table."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.reference.embedding import PADDING_ID
from engine.testing import cases
from engine.testing.cases_elementwise import assert_guards, misaligned
from engine.testing.tolerances import assert_close

# (T, V, N): one row, SmolLM2 and Llama widths, unvectorizable sizes, more rows than grid.y.
_CASES = ((1, 40, 576), (7, 31, 63), (33, 500, 4096), (70000, 5, 8), (2, 3, 1), (0, 4, 64))


def _inputs(case, dtype):
    tokens, vocab, n = case
    ids = np.random.default_rng(1).integers(0, vocab, tokens).astype(np.int32)
    return ids, cases.normal((vocab, n), dtype, seed=2)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("scale", [1.0, 24.0, 0.3])
@pytest.mark.grid("case", _CASES)
def test_matches_mirror(xp, case, scale, dtype):
    ids, weight = _inputs(case, dtype)
    out, buffer = cases.guarded(xp, (case[0], case[2]), weight.dtype)
    got = kernels.embedding(*cases.to_module(xp, ids, weight), scale=scale, out=out)
    assert got is out
    assert_close(got, reference.embedding(ids, weight, scale=scale))
    assert_guards(buffer)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_misaligned_table(xp, dtype):
    ids, weight = _inputs((9, 20, 64), dtype)
    got = kernels.embedding(xp.asarray(ids), misaligned(xp, weight))
    np.testing.assert_array_equal(to_numpy(got), weight[ids])


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_ids_outside_the_table_give_nan_and_padding_zeros(xp, dtype):
    ids = np.array([-1, 3, 10, 2**31 - 1, 1 - 2**31, 9, PADDING_ID], np.int32)
    weight = cases.normal((10, 24), dtype, seed=3)
    got = to_numpy(kernels.embedding(*cases.to_module(xp, ids, weight), scale=2.0))
    want = reference.embedding(ids, weight, scale=2.0)
    assert_close(got, want)
    assert np.isnan(got[[0, 2, 3, 4]]).all()
    assert np.isfinite(got[[1, 5]]).all()
    assert not got[6].any()


def test_mirror_is_a_loop():
    ids, weight = _inputs((6, 9, 5), "float32")
    want = np.array([[float(v) * 0.7 for v in weight[i]] for i in ids])
    np.testing.assert_allclose(reference.embedding(ids, weight, scale=0.7), want, rtol=1e-6)


def test_mirror_leaves_the_table_alone():
    ids, weight = _inputs((6, 9, 5), "float32")
    before = weight.copy()
    reference.embedding(ids, weight, scale=3.0)
    np.testing.assert_array_equal(weight, before)


def test_picking_rows_is_a_product_with_one_hot_rows(xp):
    ids, weight = _inputs((8, 12, 32), "float32")
    one_hot = np.eye(12, dtype=np.float32)[ids]
    got = kernels.embedding(*cases.to_module(xp, ids, weight))
    assert_close(got, one_hot @ weight, reduction=12)


def test_contract(xp):
    ids, weight = xp.zeros(3, np.int32), xp.zeros((4, 8), np.float32)
    with pytest.raises(DTypeError, match="token_ids: must be int32; got int64"):
        kernels.embedding(ids.astype(np.int64), weight)
    with pytest.raises(ShapeError, match=r"token_ids: must have shape \(T,\); got \(1, 3\)"):
        kernels.embedding(ids[None], weight)
    with pytest.raises(ContractError, match="weight: must be a table of at least one row"):
        kernels.embedding(ids, weight[:0])
    with pytest.raises(ContractError, match="scale: must be a number"):
        kernels.embedding(ids, weight, scale=float("nan"))
    with pytest.raises(ShapeError, match="out: must have shape"):
        kernels.embedding(ids, weight, out=xp.zeros((3, 7), np.float32))


@pytest.mark.gpu
def test_table_beyond_two_to_the_31_elements(cp):
    vocab, n = 600_000, 4096
    if cp.cuda.Device().mem_info[0] < 3 * vocab * n:
        pytest.skip("needs 7 GB of free device memory")
    weight = cp.zeros((vocab, n), np.float16)
    weight[-1] = 3.0
    got = kernels.embedding(cp.asarray(np.array([vocab - 1, 0], np.int32)), weight)
    np.testing.assert_array_equal(to_numpy(got), np.repeat([[3.0], [0.0]], n, axis=1))
