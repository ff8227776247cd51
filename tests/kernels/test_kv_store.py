"""kv_store: the kernel against its mirror, the mirror against a loop, skipped and bad slots."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.testing import cases
from engine.testing.cases_elementwise import PAGES, assert_guards, assert_same, misaligned


def _inputs(pages_shape, dtype, *, tokens=None):
    """Rows for random distinct slots, every third one skipped."""
    num_blocks, heads, block_size, head_dim = pages_shape
    num_slots = num_blocks * block_size
    tokens = max(1, num_slots // 2) if tokens is None else tokens
    slots = np.random.default_rng(1).permutation(num_slots)[:tokens].astype(np.int64)
    slots[2::3] = -1
    k, v = (cases.normal((tokens, heads, head_dim), dtype, seed=i) for i in (2, 3))
    return k, v, slots


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("shape", PAGES)
def test_matches_mirror(xp, shape, dtype):
    k, v, slots = _inputs(shape, dtype)
    want = np.full((2, *shape), np.nan, k.dtype)
    reference.kv_store(k, v, *want, slots)
    buffers = [cases.guarded(xp, shape, k.dtype) for _ in "kv"]
    (k_pages, k_buffer), (v_pages, v_buffer) = buffers
    gk, gv, gslots = cases.to_module(xp, k, v, slots)
    assert kernels.kv_store(gk, gv, k_pages, v_pages, gslots) is None
    assert_same(k_pages, want[0])  # everything else is still NaN
    assert_same(v_pages, want[1])
    assert_guards(k_buffer)
    assert_guards(v_buffer)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("shape", PAGES)
def test_views_of_fused_rows(xp, shape, dtype):
    """k and v straight out of the qkv projection; pages that are one layer of a slab."""
    _, heads, _, head_dim = shape
    k, v, slots = _inputs(shape, dtype)
    qkv = xp.asarray(np.concatenate([k, v[:, :1], k, v], axis=1).reshape(len(slots), -1))
    rows = qkv.reshape(len(slots), 3 * heads + 1, head_dim)
    slab = xp.asarray(np.zeros((3, 2, *shape), k.dtype))
    want = np.zeros((2, *shape), k.dtype)
    reference.kv_store(k, v, *want, slots)
    from_k, from_v = rows[:, heads + 1 : 2 * heads + 1], rows[:, 2 * heads + 1 :]
    kernels.kv_store(from_k, from_v, slab[1, 0], slab[1, 1], xp.asarray(slots))
    np.testing.assert_array_equal(to_numpy(slab)[1], want)
    assert not to_numpy(slab)[[0, 2]].astype(bool).any()


def test_misaligned_rows(xp):
    shape = (4, 2, 16, 64)
    k, v, slots = _inputs(shape, "float16")
    want = np.zeros((2, *shape), k.dtype)
    reference.kv_store(k, v, *want, slots)
    pages = xp.zeros((2, *shape), k.dtype)
    kernels.kv_store(misaligned(xp, k), xp.asarray(v), *pages, xp.asarray(slots))
    assert_same(pages, want)


def test_mirror_is_a_loop():
    shape = (5, 2, 4, 3)
    k, v, slots = _inputs(shape, "float32")
    want, got = np.zeros((2, 2, *shape), np.float32)
    for t, slot in enumerate(slots.tolist()):
        for head in range(2 if slot >= 0 else 0):
            want[0, slot // 4, head, slot % 4] = k[t, head]
            want[1, slot // 4, head, slot % 4] = v[t, head]
    reference.kv_store(k, v, *got, slots)
    np.testing.assert_array_equal(got, want)


def test_what_is_stored_is_gathered(xp):
    shape = (8, 2, 16, 64)
    tables = np.array([[6, 1, 3], [2, 7, -1]], np.int32)
    lens = np.array([41, 17], np.int32)
    slots = [int(tables[b, p // 16]) * 16 + p % 16 for b in (0, 1) for p in range(lens[b])]
    k, v = (cases.normal((58, 2, 64), "bfloat16", seed=i) for i in (5, 6))
    pages = xp.zeros((2, *shape), k.dtype)
    gk, gv = cases.to_module(xp, k, v)
    kernels.kv_store(gk, gv, *pages, xp.asarray(np.array(slots)))
    cu = np.array([0, 41, 58], np.int32)
    got = kernels.kv_gather(*pages, *cases.to_module(xp, tables, lens, cu))
    assert_same(got[0], k)
    assert_same(got[1], v)


def test_nothing_to_store(xp):
    pages = xp.ones((2, 3, 2, 16, 8), np.float32)
    empty = xp.zeros((0, 2, 8), np.float32)
    kernels.kv_store(empty, empty, *pages, xp.zeros(0, np.int64))
    assert bool((pages == 1).all())


@pytest.mark.parametrize("slot", [32, 2**40, -2])
def test_slot_outside_the_pages(xp, slot):
    k = xp.ones((2, 1, 8), np.float32)
    slots = xp.asarray(np.array([0, slot], np.int64))
    k_pages, buffer = cases.guarded(xp, (2, 1, 16, 8), np.float32)
    v_pages = xp.zeros((2, 1, 16, 8), np.float32)
    if xp is np:
        with pytest.raises(ContractError, match=r"slot_mapping: must be -1 or in \[0, 32\)"):
            kernels.kv_store(k, k, k_pages, v_pages, slots)
        return
    kernels.kv_store(k, k, k_pages, v_pages, slots)
    assert_guards(buffer)
    assert float(v_pages.sum()) == 8.0


def test_contract(xp):
    k, slots = xp.zeros((2, 3, 8), np.float32), xp.zeros(2, np.int64)
    pages = xp.zeros((4, 3, 16, 8), np.float32)
    with pytest.raises(ShapeError, match="v: must have shape"):
        kernels.kv_store(k, k[:, :2], pages, pages, slots)
    with pytest.raises(ShapeError, match=r"k_pages: must have shape .* D = 8 from k"):
        kernels.kv_store(k, k, pages[..., :4], pages, slots)
    with pytest.raises(ShapeError, match="v_pages: must have the strides of k_pages"):
        kernels.kv_store(k, k, pages, pages[::-1], slots)
    with pytest.raises(DTypeError, match="slot_mapping: must be int64; got int32"):
        kernels.kv_store(k, k, pages, pages, slots.astype(np.int32))
    with pytest.raises(DTypeError, match="k_pages: must be float32 or uint8 or int8; got float16"):
        kernels.kv_store(k, k, pages.astype(np.float16), pages, slots)


@pytest.mark.gpu
def test_pages_beyond_two_to_the_31_elements(cp):
    shape = (140_000, 8, 16, 128)
    if cp.cuda.Device().mem_info[0] < 5 * int(np.prod(shape)):
        pytest.skip("needs 12 GB of free device memory")
    pages = cp.zeros(shape, np.float16)
    k = cp.ones((1, 8, 128), np.float16)
    last = cp.asarray(np.array([140_000 * 16 - 1], np.int64))
    kernels.kv_store(k, k, pages, cp.zeros_like(pages), last)
    assert float(pages[-1, :, -1].sum()) == 8 * 128
    assert not bool(pages[:-1].any())
