"""decode_outputs: the kernel against its mirror, padding, views."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import DTypeError, ShapeError


@pytest.mark.parametrize(("batch", "num_slots"), [(1, 1), (7, 9), (300, 512), (0, 4)])
def test_matches_mirror(xp, batch, num_slots):
    rng = np.random.default_rng(batch)
    ids, status = rng.integers(-1, 99, (2, batch)).astype(np.int32)
    rows = rng.permutation(num_slots)[:batch].astype(np.int32)
    rows[::3] = rng.choice([-1, -5, num_slots, 2**30], len(rows[::3]))
    last_ids = np.arange(num_slots, dtype=np.int32)
    there, out = xp.asarray(last_ids), xp.full((2, batch), -9, np.int32)
    got = kernels.decode_outputs(*map(xp.asarray, (ids, status, rows)), there.copy(), out=out)
    kept = there.copy()
    kernels.decode_outputs(*map(xp.asarray, (ids, status, rows)), kept)
    want = reference.decode_outputs(ids, status, rows, last_ids)
    assert got is out
    np.testing.assert_array_equal(to_numpy(got), want)
    np.testing.assert_array_equal(to_numpy(kept), last_ids)


def test_mirror_by_hand():
    last_ids = np.array([10, 11, 12], np.int32)
    ids, rows = np.array([5, 6, 7], np.int32), np.array([2, -1, 0], np.int32)
    got = reference.decode_outputs(ids, np.array([0, 1, 2], np.int32), rows, last_ids)
    assert got.tolist() == [[5, 6, 7], [0, 1, 2]] and last_ids.tolist() == [7, 11, 5]


def test_contract(xp):
    ids, last_ids = xp.zeros(3, np.int32), xp.zeros(4, np.int32)
    with pytest.raises(ShapeError, match="rows: must have shape"):
        kernels.decode_outputs(ids, ids, ids[:2], last_ids)
    with pytest.raises(DTypeError, match="status: must be int32; got int64"):
        kernels.decode_outputs(ids, ids.astype(np.int64), ids, last_ids)
    with pytest.raises(ShapeError, match="last_ids: must be C-contiguous"):
        kernels.decode_outputs(ids, ids, ids, xp.zeros(8, np.int32)[::2])
    with pytest.raises(ShapeError, match="out: must have shape"):
        kernels.decode_outputs(ids, ids, ids, last_ids, out=xp.zeros((2, 2), np.int32))
