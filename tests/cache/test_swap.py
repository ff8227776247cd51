"""Blocks are swapped out and in unchanged; block moves are done in a safe order."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from engine.cache.kv_cache import KVCache, KVGeometry
from engine.cache.layer_cache import LayerCache, StateShape
from engine.cache.memory_pool import MemoryPool
from engine.cache.state_slots import SlotMoves
from engine.cache.swap import SwapSpace, move_blocks
from engine.device import CPU, Device, to_numpy
from engine.errors import ConfigError, ContractError, OutOfMemoryError
from engine.testing import cases


def build(xp, dtype="float32", num_blocks=9, num_host=6, **changes):
    fields = {"num_layers": 2, "num_kv_heads": 3, "head_dim": 8, "dtype": dtype, **changes}
    device = CPU if xp is np else Device("cuda")
    kv = KVCache(KVGeometry.uniform(**fields), num_blocks, MemoryPool(device))
    content = cases.normal(kv.slab.shape, dtype, seed=1)
    kv.slab[...] = xp.asarray(content)
    return kv, SwapSpace(kv, num_host), content


def moves(**fields):
    empty = {"swap_out": [], "copies": [], "swap_in": [], "freed_blocks": [], "slot_moves": None}
    return SimpleNamespace(**{**empty, **fields})


@pytest.mark.parametrize("buffer_blocks", [1, 2, 100])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_swap_out_and_in(xp, dtype, buffer_blocks):
    kv, default, content = build(xp, dtype)
    default.close()
    swap = SwapSpace(kv, 6, buffer_bytes=buffer_blocks * kv.geometry.bytes_per_block)
    out = [(8, 3), (1, 4), (5, 0), (2, 5), (0, 1)]
    swap.swap_blocks_to_cpu(out)
    swap.synchronize()
    for device, host in out:
        want = content[:, :, device].reshape(swap.blocks[host].shape)
        np.testing.assert_array_equal(swap.blocks[host], want)
    kv.slab[:, :, [8, 1, 5, 2, 0]] = 0
    swap.swap_blocks_from_cpu([(host, device) for device, host in out])
    np.testing.assert_array_equal(to_numpy(kv.slab), content)
    swap.swap_blocks_from_cpu([(3, 7)])
    np.testing.assert_array_equal(to_numpy(kv.slab)[:, :, 7], content[:, :, 8])


def test_mixed_pages_and_states_are_swapped(xp):
    """Blocks and slots with arrays of several shapes and dtypes come back bit for bit."""
    state = StateShape((6, 3), "float16"), StateShape((2, 4, 8), "float32")
    layers = LayerCache.attention(2, 8), LayerCache(states=state), LayerCache.attention(4, 12, 8)
    geometry = KVGeometry((*layers, *layers), dtype="float16")
    pool = MemoryPool(CPU if xp is np else Device("cuda"))
    kv = KVCache(geometry, 9, pool, num_slots=4)
    content = []
    for slab in (*kv.page_slabs, *kv.state_slabs):
        content.append(cases.normal(slab.shape, str(slab.dtype), seed=len(content)))
        slab[...] = xp.asarray(content[-1])
    swap = SwapSpace(kv, 5, num_slots=3, buffer_bytes=2 * geometry.bytes_per_block)
    swap.swap_blocks_to_cpu([(8, 3), (1, 4), (5, 0)])
    swap.swap_states_to_cpu([(3, 0), (1, 2)])
    for slab in kv.page_slabs:
        slab[:, [8, 1, 5]] = 0
    for slab in kv.state_slabs:
        slab[:, [3, 1]] = 0
    swap.swap_blocks_from_cpu([(3, 8), (4, 1), (0, 5)])
    swap.swap_states_from_cpu([(0, 3), (2, 1)])
    for slab, want in zip((*kv.page_slabs, *kv.state_slabs), content, strict=True):
        np.testing.assert_array_equal(to_numpy(slab), want)
    with pytest.raises(ContractError, match=r"below \(3, 4\); got \(3, 0\)"):
        swap.swap_states_from_cpu([(3, 0)])
    swap.close()
    assert set(pool.stats().slabs) == {"kv", *(f"kv {number}" for number in range(1, 5))}


def test_a_stage_without_pages_or_states_moves_nothing(xp):
    """Pipeline stages follow the moves of all layers, whatever their own layers keep."""
    pool = MemoryPool(CPU if xp is np else Device("cuda"))
    kv = KVCache(KVGeometry((LayerCache(),)), 9, pool, num_slots=4)
    swap = SwapSpace(kv, 5, num_slots=3)
    slots = SlotMoves(swap_out=[(3, 0)], copies=[(1, 2)], swap_in=[(2, 0)], freed=[1])
    move_blocks(
        kv, swap, moves(swap_out=[(8, 4)], copies=[(0, 1)], swap_in=[(3, 2)], slot_moves=slots)
    )
    with pytest.raises(ContractError, match=r"below \(4, 3\); got \(3, 3\)"):
        move_blocks(kv, swap, moves(slot_moves=SlotMoves(swap_out=[(3, 3)])))
    assert pool.used == swap.blocks.nbytes == 0
    swap.synchronize()
    swap.close()


def test_device_blocks_are_reusable_at_once_and_host_blocks_rewritable(xp):
    kv, swap, content = build(xp)
    for turn in range(20):  # no synchronization in between
        first, second = turn % 9, (turn + 4) % 9
        swap.swap_blocks_to_cpu([(first, 0), (second, 1)])
        kv.slab[:, :, [first, second]] = -1.0
        swap.swap_blocks_from_cpu([(1, first), (0, second)])
        swap.swap_blocks_to_cpu([(first, 1), (second, 0)])
        kv.slab[:, :, [first, second]] = -2.0
        swap.swap_blocks_from_cpu([(1, second), (0, first)])
    np.testing.assert_array_equal(to_numpy(kv.slab), content)


def test_moves_are_done_in_the_order_that_is_safe(xp):
    """Block 0 is swapped out and filled by a copy of 1, then 1 is filled by an earlier swap."""
    kv, swap, content = build(xp)
    swap.swap_blocks_to_cpu([(7, 2)])
    move_blocks(
        kv, swap, moves(swap_out=[(0, 1)], copies=[(1, 0)], swap_in=[(2, 1)], freed_blocks=[4])
    )
    swap.synchronize()
    slab = to_numpy(kv.slab)
    np.testing.assert_array_equal(swap.blocks[1], content[:, :, 0].reshape(swap.blocks[1].shape))
    np.testing.assert_array_equal(slab[:, :, 0], content[:, :, 1])
    np.testing.assert_array_equal(slab[:, :, 1], content[:, :, 7])
    assert np.isnan(slab[:, :, 4]).all()
    np.testing.assert_array_equal(slab[:, :, [2, 3, 5, 6, 7, 8]], content[:, :, [2, 3, 5, 6, 7, 8]])


def test_without_a_swap_space(xp):
    kv, _, content = build(xp)
    move_blocks(kv, None, moves(copies=[(1, 0)]))
    np.testing.assert_array_equal(to_numpy(kv.slab)[:, :, 0], content[:, :, 1])
    with pytest.raises(ConfigError, match="swap must be a SwapSpace"):
        move_blocks(kv, None, moves(swap_out=[(0, 0)]))


def test_no_moves(xp):
    kv, swap, content = build(xp)
    move_blocks(kv, swap, moves())
    np.testing.assert_array_equal(to_numpy(kv.slab), content)


def test_wrong_pairs(xp):
    _, swap, _ = build(xp)
    for pair in ((9, 0), (0, 6), (-1, 0), (0, -1)):
        with pytest.raises(ContractError, match=r"ids below \(9, 6\)"):
            swap.swap_blocks_to_cpu([pair])
    with pytest.raises(ContractError, match=r"ids below \(6, 9\)"):
        swap.swap_blocks_from_cpu([(6, 0)])
    with pytest.raises(ContractError, match="each block at most once"):
        swap.swap_blocks_to_cpu([(0, 1), (2, 1)])


def test_the_host_must_have_the_memory():
    kv = KVCache(KVGeometry.uniform(num_layers=2, num_kv_heads=3, head_dim=8), 2)
    with pytest.raises(OutOfMemoryError, match="lower swap_space_gb"):
        SwapSpace(kv, 1 << 40)
    with pytest.raises(ConfigError, match="at least 1; got 0"):
        SwapSpace(kv, 0)


def test_buffers_of_blocks_are_freed_if_those_of_states_find_no_room(monkeypatch):
    kv, _, _ = build(np)
    open_tiers = []

    class Tier:
        def __init__(self, kv, name, *_):
            if name == "state swap buffers":
                raise OutOfMemoryError("the device is full")
            open_tiers.append(self)

        def close(self):
            open_tiers.remove(self)

    monkeypatch.setattr("engine.cache.swap._HostTier", Tier)
    with pytest.raises(OutOfMemoryError, match="the device is full"):
        SwapSpace(kv, 2)
    assert not open_tiers


def test_close_frees_the_memory(xp):
    kv, swap, _ = build(xp)
    used = kv.pool.used
    swap.close()
    assert swap.blocks.nbytes == 0
    assert kv.pool.used == kv.slab.nbytes <= used
