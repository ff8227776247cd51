"""kv_swap: the kernel against its mirror, the mirror against a loop, bad pairs."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.testing import cases
from engine.testing.cases_elementwise import PAGES, assert_guards, assert_same, misaligned


def _pairs(num_source, num_target):
    """Return up to one pair per target; sources repeat if there are fewer of them."""
    rng = np.random.default_rng(1)
    targets = rng.permutation(num_target)[: max(1, num_target - 1)]
    return np.stack([rng.integers(0, num_source, len(targets)), targets], axis=1).astype(np.int32)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("num_slabs", [1, 8])
@pytest.mark.grid("shape", PAGES)
def test_matches_mirror(xp, shape, num_slabs, dtype):
    source = cases.normal((num_slabs, *shape), dtype, seed=2)
    pairs = _pairs(shape[0], 5)
    target, buffer = cases.guarded(xp, (num_slabs, 5, *shape[1:]), source.dtype)
    target[...] = 0
    assert kernels.kv_swap(xp.asarray(source), target, xp.asarray(pairs)) is None
    want = np.zeros(target.shape, source.dtype)
    reference.kv_swap(source, want, pairs)
    assert_same(target, want)
    assert_guards(buffer)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_packing_and_unpacking_restore_the_pages(xp, dtype):
    host = cases.normal((6, 7, 2, 16, 8), dtype, seed=3)
    pages = xp.array(host)
    packed = xp.zeros((3, 6, 2, 16, 8), host.dtype)  # block axis first: each block is contiguous
    there = np.array([[5, 0], [1, 1], [6, 2]], np.int32)
    kernels.kv_swap(pages, packed.swapaxes(0, 1), xp.asarray(there))
    assert_same(packed, np.ascontiguousarray(host[:, there[:, 0]].swapaxes(0, 1)))
    pages[:, [1, 5, 6]] = 0
    back = np.ascontiguousarray(there[:, ::-1])
    kernels.kv_swap(packed.swapaxes(0, 1), pages, xp.asarray(back))
    assert_same(pages, host)


@pytest.mark.parametrize("step", [1, 2])
def test_source_and_target_may_be_parts_of_one_array(xp, step):
    host = cases.normal((3, 6, 1, 16, 8), "float32", seed=7)
    pages = xp.array(host)
    parts = (np.s_[:, :3], np.s_[:, 3:]) if step == 1 else (np.s_[:, ::2], np.s_[:, 1::2])
    kernels.kv_swap(pages[parts[0]], pages[parts[1]], xp.asarray(np.array([[2, 0]], np.int32)))
    host[parts[1]][:, 0] = host[parts[0]][:, 2]
    assert_same(pages, host)


def test_misaligned_pages(xp):
    source = cases.normal((2, 6, 1, 16, 8), "bfloat16", seed=4)
    pairs = np.array([[5, 0], [1, 2]], np.int32)
    target = xp.zeros((2, 3, 1, 16, 8), source.dtype)
    kernels.kv_swap(misaligned(xp, source), target, xp.asarray(pairs))
    want = np.zeros((2, 3, 1, 16, 8), source.dtype)
    reference.kv_swap(source, want, pairs)
    assert_same(target, want)


def test_more_slabs_than_a_grid_is_high(xp):
    source = cases.normal((70000, 2, 1, 1, 2), "float32", seed=5)
    target = xp.zeros((70000, 1, 1, 1, 2), np.float32)
    kernels.kv_swap(xp.asarray(source), target, xp.asarray(np.array([[1, 0]], np.int32)))
    np.testing.assert_array_equal(to_numpy(target)[:, 0], source[:, 1])


def test_mirror_is_a_loop():
    source = cases.normal((3, 7, 2, 4, 5), "float32", seed=6)
    got, want = np.zeros((2, 3, 4, 2, 4, 5), np.float32)
    pairs = _pairs(7, 4)
    for slab in range(3):
        for src, dst in pairs:
            want[slab, dst] = source[slab, src]
    reference.kv_swap(source, got, pairs)
    np.testing.assert_array_equal(got, want)


def test_no_pairs_and_no_blocks(xp):
    source, target = xp.ones((2, 3, 1, 16, 8), np.float32), xp.zeros((2, 0, 1, 16, 8), np.float32)
    kernels.kv_swap(source, target, xp.zeros((0, 2), np.int32))


@pytest.mark.parametrize("pair", [(0, 3), (4, 0), (-1, 1), (1, -1), (0, 2**31 - 1)])
def test_block_outside_the_pages(xp, pair):
    source = xp.ones((2, 4, 1, 16, 8), np.float32)
    target, buffer = cases.guarded(xp, (2, 3, 1, 16, 8), np.float32)
    target[...] = 0
    pairs = xp.asarray(np.array([pair], np.int32))
    if xp is np:
        with pytest.raises(ContractError, match=r"block_pairs: must be block ids in \[0, "):
            kernels.kv_swap(source, target, pairs)
        return
    kernels.kv_swap(source, target, pairs)
    assert not bool(target.any())
    assert_guards(buffer)


def test_contract(xp):
    source, target = xp.zeros((2, 4, 1, 16, 8), np.float32), xp.zeros((2, 3, 1, 16, 8), np.float32)
    pairs = xp.zeros((1, 2), np.int32)
    with pytest.raises(ShapeError, match=r"block_pairs: must have shape \(n, 2\); got \(2,\)"):
        kernels.kv_swap(source, target, pairs[0])
    with pytest.raises(DTypeError, match="target: must be float32; got float16"):
        kernels.kv_swap(source, target.astype(np.float16), pairs)
    with pytest.raises(ShapeError, match=r"target: must have shape .*S = 2 from source"):
        kernels.kv_swap(source, target[:1], pairs)
    with pytest.raises(ContractError, match="source: must be of contiguous blocks"):
        kernels.kv_swap(source[..., ::2], target[..., :4], pairs)


def test_what_cannot_be_told_on_the_gpu_is_checked_on_numpy():
    pages = np.zeros((2, 4, 1, 16, 8), np.float32)
    twice = np.array([[0, 1], [1, 1]], np.int32)
    with pytest.raises(ContractError, match="each target once"):
        kernels.kv_swap(pages, np.zeros_like(pages), twice)
    with pytest.raises(ContractError, match="other memory than source"):
        kernels.kv_swap(pages, pages, twice[:1])
    with pytest.raises(ContractError, match="other memory than source"):
        kernels.kv_swap(pages[:, :3], pages[:, 2:], twice[:1])
