"""kv_copy: the kernel against its mirror, the mirror against a loop, bad pairs."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.testing import cases
from engine.testing.cases_elementwise import PAGES, assert_guards, assert_same, misaligned


def _pairs(num_blocks):
    """Copy half the blocks to the other half, in random order; one source is used twice."""
    ids = np.random.default_rng(1).permutation(num_blocks).astype(np.int32)
    half = num_blocks // 2
    pairs = np.stack([ids[:half], ids[half : 2 * half]], axis=1)
    pairs[-1, 0] = pairs[0, 0]
    return pairs


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("slabs", [(), (3,), (4, 2)])
@pytest.mark.grid("shape", PAGES)
def test_matches_mirror(xp, shape, slabs, dtype):
    host = cases.normal((*slabs, *shape), dtype, seed=2)
    pairs = _pairs(shape[0])
    pages, buffer = cases.guarded(xp, host.shape, host.dtype)
    pages[...] = xp.asarray(host)
    assert kernels.kv_copy(pages, xp.asarray(pairs)) is None
    want = host.copy()
    reference.kv_copy(want, pairs)
    assert_same(pages, want)
    assert_guards(buffer)


def test_misaligned_pages(xp):
    host = cases.normal((2, 6, 1, 16, 8), "bfloat16", seed=3)
    pairs = np.array([[5, 0], [1, 2]], np.int32)
    pages = misaligned(xp, host)
    kernels.kv_copy(pages, xp.asarray(pairs))
    reference.kv_copy(host, pairs)
    assert_same(pages, host)


def test_more_slabs_than_a_grid_is_high(xp):
    host = cases.normal((70000, 2, 1, 1, 2), "float32", seed=4)
    pages = xp.array(host)
    kernels.kv_copy(pages, xp.asarray(np.array([[0, 1]], np.int32)))
    np.testing.assert_array_equal(to_numpy(pages)[:, 1], host[:, 0])
    np.testing.assert_array_equal(to_numpy(pages)[:, 0], host[:, 0])


def test_mirror_is_a_loop():
    pages = cases.normal((3, 7, 2, 4, 5), "float32", seed=5)
    want, pairs = pages.copy(), _pairs(7)
    for slab in want:
        for source, destination in pairs:
            slab[destination] = slab[source]
    reference.kv_copy(pages, pairs)
    np.testing.assert_array_equal(pages, want)


def test_copying_back_restores(xp):
    host = cases.normal((2, 6, 2, 16, 8), "float16", seed=6)
    pages = xp.array(host)
    there = np.array([[0, 3], [1, 4]], np.int32)
    kernels.kv_copy(pages, xp.asarray(there))
    pages[:, :2] = 0
    kernels.kv_copy(pages, xp.asarray(np.ascontiguousarray(there[:, ::-1])))
    np.testing.assert_array_equal(to_numpy(pages)[:, :3], host[:, :3])


def test_no_pairs(xp):
    pages = xp.ones((3, 1, 16, 8), np.float32)
    kernels.kv_copy(pages, xp.zeros((0, 2), np.int32))
    assert bool((pages == 1).all())


@pytest.mark.parametrize("pair", [(0, 4), (4, 0), (-1, 1), (1, -1), (0, 2**31 - 1)])
def test_block_outside_the_pages(xp, pair):
    pages, buffer = cases.guarded(xp, (4, 1, 16, 8), np.float32)
    pages[...] = 1.0
    pairs = xp.asarray(np.array([pair], np.int32))
    if xp is np:
        with pytest.raises(ContractError, match=r"block_pairs: must be block ids in \[0, 4\)"):
            kernels.kv_copy(pages, pairs)
        return
    kernels.kv_copy(pages, pairs)
    assert bool((pages == 1).all())
    assert_guards(buffer)


def test_contract(xp):
    pages, pairs = xp.zeros((4, 1, 16, 8), np.float32), xp.zeros((1, 2), np.int32)
    with pytest.raises(ShapeError, match=r"block_pairs: must have shape \(n, 2\); got \(2,\)"):
        kernels.kv_copy(pages, pairs[0])
    with pytest.raises(DTypeError, match="block_pairs: must be int32; got int64"):
        kernels.kv_copy(pages, pairs.astype(np.int64))
    with pytest.raises(ShapeError, match="pages: must be C-contiguous"):
        kernels.kv_copy(pages[:, :, ::2], pairs)
    with pytest.raises(ShapeError, match=r"pages: must have shape \(..., P, K, block_size, D\)"):
        kernels.kv_copy(pages[0], pairs)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([[0, 1], [1, 2]], "destinations are no sources"),
        ([[3, 3]], "destinations are no sources"),
        ([[0, 2], [1, 2]], "each destination once"),
    ],
)
def test_pairs_whose_order_would_matter(pairs, message):
    with pytest.raises(ContractError, match=message):
        kernels.kv_copy(np.zeros((4, 1, 16, 8), np.float32), np.array(pairs, np.int32))
