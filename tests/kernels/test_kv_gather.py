"""kv_gather: the kernel against its mirror, the mirror against a loop, bad tables."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.testing import cases
from engine.testing.cases_elementwise import PAGES, assert_guards, assert_same, misaligned


def _inputs(shape, dtype, lens):
    """Pages, tables with poisoned ids past each sequence's end, lengths and their sums."""
    num_blocks, _, block_size, _ = shape
    rng = np.random.default_rng(1)
    columns = max(-(-max(lens, default=0) // block_size), 1) + 1
    tables = np.full((len(lens), columns), 2**30, np.int32)
    for row, length in zip(tables, lens, strict=True):
        used = -(-length // block_size)
        row[:used] = rng.integers(0, num_blocks, used)
    k_pages, v_pages = (cases.normal(shape, dtype, seed=i) for i in (2, 3))
    cu = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    return k_pages, v_pages, tables, np.array(lens, np.int32), cu


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("lens", [[1], [37, 16, 5], [0, 3, 0, 0, 33, 0], [], [0]])
@pytest.mark.grid("shape", PAGES)
def test_matches_mirror(xp, shape, lens, dtype):
    inputs = _inputs(shape, dtype, lens)
    want = reference.kv_gather(*inputs)
    rows = (sum(lens), shape[1], shape[3])
    k, k_buffer = cases.guarded(xp, rows, inputs[0].dtype)
    v, v_buffer = cases.guarded(xp, rows, inputs[0].dtype)
    arrays = cases.to_module(xp, *inputs)
    got = kernels.kv_gather(*arrays, total_tokens=rows[0], out=(k, v))
    fresh = kernels.kv_gather(*arrays)
    assert got[0] is k and got[1] is v
    for i in (0, 1):
        assert_same(got[i], want[i])
        assert_same(fresh[i], want[i])
    assert_guards(k_buffer)
    assert_guards(v_buffer)


def test_rows_of_no_sequence_are_nan(xp):
    inputs = _inputs((5, 2, 16, 64), "bfloat16", [18, 3])
    got = [to_numpy(a) for a in kernels.kv_gather(*cases.to_module(xp, *inputs), total_tokens=30)]
    for array, want in zip(got, reference.kv_gather(*inputs, total_tokens=30), strict=True):
        assert_same(array, want)
        assert (
            np.isnan(array[21:].astype(np.float32)).all()
            and np.isfinite(array[:21].astype(np.float32)).all()
        )


def test_views(xp):
    """Misaligned pages, and tables that are columns of wider tables."""
    k_pages, v_pages, tables, lens, cu = _inputs((5, 2, 16, 64), "float16", [18, 40])
    wide = np.concatenate([tables, tables], axis=1)
    got = kernels.kv_gather(
        misaligned(xp, k_pages),
        xp.asarray(v_pages),
        xp.asarray(wide)[:, : tables.shape[1]],
        *cases.to_module(xp, lens, cu),
    )
    want = reference.kv_gather(k_pages, v_pages, tables, lens, cu)
    assert_same(got[0], want[0])
    assert_same(got[1], want[1])


def test_mirror_is_a_loop():
    k_pages, v_pages, tables, lens, cu = _inputs((6, 2, 4, 3), "float32", [5, 0, 9])
    got = reference.kv_gather(k_pages, v_pages, tables, lens, cu)
    for pages, dense in zip((k_pages, v_pages), got, strict=True):
        want = [
            [pages[tables[b, p // 4], head, p % 4] for head in range(2)]
            for b in range(3)
            for p in range(lens[b])
        ]
        np.testing.assert_array_equal(dense, want)


def test_order_of_blocks_does_not_matter(xp):
    """Permuting the pages and renaming the blocks in the tables gives the same rows."""
    k_pages, v_pages, tables, lens, cu = _inputs((7, 2, 16, 8), "float32", [30, 50])
    order = np.random.default_rng(4).permutation(7)
    name = np.argsort(order).astype(np.int32)
    renamed = np.where(tables < 7, name[np.minimum(tables, 6)], tables).astype(np.int32)
    first = kernels.kv_gather(*cases.to_module(xp, k_pages, v_pages, tables, lens, cu))
    second = kernels.kv_gather(
        *cases.to_module(xp, k_pages[order], v_pages[order], renamed, lens, cu)
    )
    for a, b in zip(first, second, strict=True):
        assert_same(a, to_numpy(b))


def test_heads_without_features():
    k_pages, _, *lists = _inputs((4, 2, 16, 8), "float32", [3, 20])
    empty = np.zeros((*k_pages.shape[:3], 0), np.float32)
    assert [each.shape for each in kernels.kv_gather(empty, empty, *lists)] == [(23, 2, 0)] * 2


def test_pages_may_be_read_only():
    inputs = _inputs((4, 2, 16, 8), "float32", [3, 20])
    want = kernels.kv_gather(*inputs)
    for pages in inputs[:2]:
        pages.flags.writeable = False
    for got, expected in zip(kernels.kv_gather(*inputs), want, strict=True):
        assert_same(got, expected)


def test_contract(xp):
    inputs = cases.to_module(xp, *_inputs((4, 2, 16, 8), "float32", [3, 20]))
    pages, _, tables, lens, cu = inputs
    with pytest.raises(ShapeError, match=r"cu_seqlens_k: must have shape \(3,\); got \(2,\)"):
        kernels.kv_gather(pages, pages, tables, lens, cu[:2])
    with pytest.raises(ShapeError, match="context_lens: must have shape"):
        kernels.kv_gather(pages, pages, tables, lens[:1], cu)
    with pytest.raises(DTypeError, match="block_tables: must be int32"):
        kernels.kv_gather(pages, pages, tables.astype(np.int64), lens, cu)
    with pytest.raises(ShapeError, match="k_pages: must be C-contiguous"):
        kernels.kv_gather(pages[::2], pages[::2], tables, lens, cu)
    with pytest.raises(ContractError, match="total_tokens: must be at least 0; got -1"):
        kernels.kv_gather(*inputs, total_tokens=-1)
    with pytest.raises(ContractError, match=r"out: must be None or a pair"):
        kernels.kv_gather(*inputs, out=pages)


def test_bad_values(xp):
    """NumPy: an error that names the argument. CUDA: NaN, and no access outside the arrays."""
    k_pages, v_pages, tables, lens, cu = _inputs((4, 2, 16, 8), "float32", [3, 20])
    bad_id = tables.copy()
    bad_id[1, 1] = 4
    too_long = np.array([3, 49], np.int32)
    not_the_sum = np.array([0, 4, 23], np.int32)
    bad = {
        "block_tables: must be block ids in": (bad_id, lens, cu, slice(19, 23)),
        "context_lens: must be in": (
            tables,
            too_long,
            np.array([0, 3, 52], np.int32),
            slice(51, 52),
        ),
        "cu_seqlens_k: must be the cumulated": (tables, lens, not_the_sum, slice(3, 4)),
    }
    for message, (*values, rows) in bad.items():
        arrays = cases.to_module(xp, k_pages, v_pages, *values)
        if xp is np:
            with pytest.raises(ContractError, match=message):
                kernels.kv_gather(*arrays)
        else:
            got = to_numpy(kernels.kv_gather(*arrays)[0])
            assert np.isnan(got[rows]).all() and np.isfinite(got[:3]).all()
