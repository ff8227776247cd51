"""decode_outputs: the kernel against its mirror, padding, views."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import DTypeError, ShapeError


@pytest.mark.parametrize(
    ("batch", "query_len", "num_rows"),
    [(1, 1, 1), (7, 1, 9), (300, 1, 512), (0, 1, 4), (5, 4, 6), (130, 3, 200), (2, 64, 2)],
)
def test_matches_mirror(xp, batch, query_len, num_rows):
    rng = np.random.default_rng(batch)
    ids, status = rng.integers(-1, 99, (2, batch, query_len)).astype(np.int32)
    rows = rng.permutation(num_rows)[:batch].astype(np.int32)
    rows[::3] = rng.choice([-1, -5, num_rows, 2**30], len(rows[::3]))
    last_ids = np.arange(num_rows, dtype=np.int32)
    there, out = xp.asarray(last_ids), xp.full((2, batch, query_len), -9, np.int32)
    got = kernels.decode_outputs(*map(xp.asarray, (ids, status, rows)), there.copy(), out=out)
    kept = there.copy()
    kernels.decode_outputs(*map(xp.asarray, (ids, status, rows)), kept)
    want = reference.decode_outputs(ids, status, rows, last_ids)
    assert got is out
    np.testing.assert_array_equal(to_numpy(got), want)
    np.testing.assert_array_equal(to_numpy(kept), last_ids)


def test_mirror_by_hand():
    last_ids = np.array([10, 11, 12], np.int32)
    ids, rows = np.array([[5, 6], [7, 8], [9, 3]], np.int32), np.array([2, -1, 0], np.int32)
    got = reference.decode_outputs(ids, ids - 5, rows, last_ids)
    assert got.tolist() == [ids.tolist(), (ids - 5).tolist()] and last_ids.tolist() == [3, 11, 6]


def test_contract(xp):
    ids, rows = xp.zeros((3, 2), np.int32), xp.zeros(3, np.int32)
    last_ids = xp.zeros(4, np.int32)
    with pytest.raises(ShapeError, match="rows: must have shape"):
        kernels.decode_outputs(ids, ids, rows[:2], last_ids)
    with pytest.raises(DTypeError, match="status: must be int32; got int64"):
        kernels.decode_outputs(ids, ids.astype(np.int64), rows, last_ids)
    with pytest.raises(ShapeError, match="last_ids: must be C-contiguous"):
        kernels.decode_outputs(ids, ids, rows, xp.zeros(8, np.int32)[::2])
    with pytest.raises(ShapeError, match="out: must have shape"):
        kernels.decode_outputs(ids, ids, rows, last_ids, out=xp.zeros((2, 3), np.int32))
