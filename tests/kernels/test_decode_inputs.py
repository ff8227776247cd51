"""decode_inputs: the kernel against its mirror, the mirror against a loop over requests."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.reference.embedding import PADDING_ID

# (B, padding, Q, S, W, block_size)
_CASES = (
    (1, 0, 1, 1, 1, 16),
    (5, 3, 1, 9, 7, 16),
    (5, 3, 4, 9, 7, 16),
    (33, 7, 1, 64, 300, 32),
    (3, 1, 200, 4, 300, 32),
    (256, 0, 2, 256, 2, 128),
)


def _inputs(case, seed=0):
    """Return rows whose block tables grow, in the op's argument order."""
    batch, padding, query_len, num_rows, width, block_size = case
    rng = np.random.default_rng(seed)
    rows = np.full(batch + padding, -1, np.int32)
    rows[:batch] = rng.permutation(num_rows)[:batch]
    counts = np.zeros(batch + padding, np.int32)
    counts[:batch] = rng.integers(0, width + 1, batch)
    starts = np.zeros(batch + padding, np.int32)
    starts[:batch] = [rng.integers(0, width - n + 1) for n in counts[:batch]]
    shape = batch + padding, query_len
    positions = np.zeros(shape, np.int32)
    positions[:batch] = rng.integers(0, width * block_size, (batch, query_len))
    known = np.where(rng.random(shape) < 0.5, -1, rng.integers(0, 99, shape))
    cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    new = rng.integers(0, 2**31 - 1, max(1, int(cu[-1])) + 2).astype(np.int32)
    last_ids = rng.integers(0, 99, num_rows).astype(np.int32)
    tables = rng.integers(0, 2**31 - 1, (num_rows, width)).astype(np.int32)
    return rows, known.astype(np.int32), positions, last_ids, tables, starts, cu, new


@pytest.mark.parametrize("case", _CASES)
def test_matches_mirror(xp, case):
    arrays = _inputs(case)
    there = [xp.asarray(a.copy()) for a in arrays]
    batch, query_len, (width, size) = len(arrays[0]), case[2], case[-2:]
    outs = (
        xp.full((batch, query_len), -7, np.int32),
        xp.full((batch, query_len), -7, np.int64),
        xp.full((batch, width), -7, np.int32),
    )
    got = kernels.decode_inputs(*there, block_size=size, out=outs)
    assert all(a is b for a, b in zip(got, outs, strict=True))
    want = reference.decode_inputs(*arrays, block_size=size)
    np.testing.assert_array_equal(to_numpy(there[4]), arrays[4])  # the mirror wrote to its own copy
    np.testing.assert_array_equal(to_numpy(got[0]), want[0])
    np.testing.assert_array_equal(to_numpy(got[1]), want[1])
    for b, row in enumerate(arrays[0]):
        count = arrays[2][b].max() // size + 1 if row >= 0 else 0
        np.testing.assert_array_equal(to_numpy(got[2])[b, :count], want[2][b, :count])


def test_mirror_is_a_loop():
    rows, known, positions, last_ids, tables, starts, cu, new = _inputs(_CASES[2], seed=3)
    kept = [list(map(int, table)) for table in tables]
    got = reference.decode_inputs(
        rows, known, positions, last_ids, tables, starts, cu, new, block_size=16
    )
    for b, row in enumerate(rows):
        if row < 0:
            assert set(got[0][b]) == {PADDING_ID} and set(got[1][b]) == {-1}
            continue
        blocks = new[cu[b] : cu[b + 1]]
        kept[row][starts[b] : starts[b] + len(blocks)] = blocks
        for i, position in enumerate(positions[b].tolist()):
            block, offset = divmod(position, 16)
            assert got[0][b, i] == (known[b, i] if known[b, i] >= 0 else last_ids[row])
            assert got[1][b, i] == int(kept[row][block]) * 16 + offset
        assert list(got[2][b]) == kept[row] == list(tables[row])


def test_nothing_outside_is_touched(xp):
    """A row with out-of-range numbers is skipped, and all other rows are right."""
    if xp is np:
        pytest.skip("they are errors there")
    i32 = lambda *values: xp.asarray(np.array(values, np.int32))  # noqa: E731
    tables = xp.zeros((2, 3), np.int32)
    ids, slots, _ = kernels.decode_inputs(
        i32(9, 1, 0),
        i32([-1, 3], [-1, 2], [4, -1]),
        i32([0, 1], [16, -1], [5000, 3]),
        i32(5, 6),
        tables,
        i32(0, 1, 2),
        i32(0, 2, 4, 9),
        i32(1, 2, 7, 8),
        block_size=16,
    )
    assert to_numpy(ids).tolist() == [[PADDING_ID] * 2, [6, 2], [4, 5]]
    assert to_numpy(slots).tolist() == [[-1, -1], [7 * 16, -1], [-1, 3]]
    assert to_numpy(tables).tolist() == [[0, 0, 0], [0, 7, 8]]


@pytest.mark.gpu
def test_sums_that_overflow_are_outside_too(cp):
    """A start or a prefix sum at the ends of int32, whose sum with an index is another number."""
    largest, smallest = 2**31 - 1, -(2**31)
    i32 = lambda *values: cp.asarray(np.array(values, np.int32))  # noqa: E731
    tables = cp.zeros((4, 3), np.int32)
    ids, slots, _ = kernels.decode_inputs(
        i32(0, 1, 2, 3),
        i32([-1], [-1], [-1], [-1]),
        i32([0], [0], [0], [0]),
        i32(5, 6, 7, 8),
        tables,
        i32(largest, 0, 0, largest - 1),
        i32(0, 3, largest, smallest + 2, 3),
        i32(7, 8, 9),
        block_size=16,
    )
    assert to_numpy(ids).tolist() == [[5], [6], [7], [8]]
    assert to_numpy(slots).tolist() == [[0], [0], [0], [0]]
    assert not to_numpy(tables).any()


def test_contract(xp):
    arrays = [xp.asarray(a) for a in _inputs(_CASES[1])]
    with pytest.raises(ShapeError, match="cu_new_blocks: must have shape"):
        kernels.decode_inputs(*arrays[:6], arrays[6][1:], arrays[7], block_size=16)
    with pytest.raises(DTypeError, match="rows: must be int32"):
        kernels.decode_inputs(arrays[0].astype(np.int64), *arrays[1:], block_size=16)
    with pytest.raises(ContractError, match="block_size: must be a whole number"):
        kernels.decode_inputs(*arrays, block_size=0)
    with pytest.raises(ContractError, match="out: must be None or three arrays"):
        kernels.decode_inputs(*arrays, block_size=16, out=arrays[0])


@pytest.mark.parametrize(
    ("index", "value", "text"),
    [
        (0, [1, 4], r"rows: must be from -1 to 3; got \(1, 4\)"),
        (0, [-2, 1], r"rows: must be from -1 to 3; got \(-2, 1\)"),
        (2, [[0], [48]], r"positions: must be from 0 to 47; got \(0, 48\)"),
        (2, [[-1], [0]], r"positions: must be from 0 to 47; got \(-1, 0\)"),
        (5, [-1, 0], r"new_starts: must be from 0 to 3; got \(-1, 0\)"),
        (5, [0, 3], r"new_starts plus .*: must be from 0 to 3; got \(2, 4\)"),
        (6, [0, 2, 9], r"cu_new_blocks: must be from 0 to 3; got \(0, 9\)"),
    ],
)
def test_damaged_values_are_named_on_the_host(index, value, text):
    i32 = lambda *values: np.array(values, np.int32)  # noqa: E731
    arrays = [
        i32(0, 1),
        i32([-1], [3]),
        i32([0], [16]),
        i32(5, 6, 7, 8),
        np.zeros((4, 3), np.int32),
    ]
    arrays += [i32(0, 1), i32(0, 2, 3), i32(1, 2, 7)]
    kernels.decode_inputs(*arrays, block_size=16)
    arrays[index] = np.array(value, np.int32)
    with pytest.raises(ContractError, match=f"^decode_inputs: {text}"):
        kernels.decode_inputs(*arrays, block_size=16)


def test_nobody(xp):
    empty, tables = xp.zeros(0, np.int32), xp.zeros((2, 3), np.int32)
    one = xp.zeros(1, np.int32)
    last_ids = xp.zeros(2, np.int32)
    got = kernels.decode_inputs(
        *(empty, empty[:, None], empty[:, None], last_ids, tables, empty, one, one), block_size=16
    )
    assert [a.shape for a in got] == [(0, 1), (0, 1), (0, 3)]
