"""Named slabs under a limit, on both array modules."""

from __future__ import annotations

import numpy as np
import pytest

from engine.cache.memory_pool import MemoryPool, device_memory
from engine.device import CPU, Device
from engine.errors import ContractError, OutOfMemoryError


@pytest.fixture
def pool(xp):
    return MemoryPool(CPU if xp is np else Device("cuda"), limit=1 << 20)


def test_slabs_are_zero_counted_and_freed(pool, xp):
    slab = pool.allocate("kv", (3, 5), np.float32)
    assert isinstance(slab, xp.ndarray) and not slab.any()
    assert (slab.shape, slab.dtype, slab.flags.c_contiguous) == ((3, 5), np.float32, True)
    empty = pool.allocate("nothing", (0, 4), np.float16)
    assert empty.size == 0
    stats = pool.stats()
    assert stats.slabs == {"kv": 60, "nothing": 0}
    assert (stats.used, stats.peak, stats.limit) == (60, 60, 1 << 20)
    pool.free("kv")
    assert (pool.used, pool.stats().peak) == (0, 60)
    pool.allocate("kv", (1,), np.float32)  # the name is free again


def test_the_limit_is_enforced_and_the_error_lists_the_slabs(pool):
    pool.allocate("weights", (1 << 19,), np.uint8)
    with pytest.raises(
        OutOfMemoryError,
        match=r"slab 'kv' needs 512.00 KiB.*limit is reached: limit 1.00 MiB, "
        r"slabs: weights 512.00 KiB, state 256 B; the device has .* free",
    ):
        pool.allocate("state", (256,), np.uint8)
        pool.allocate("kv", (1 << 19,), np.uint8)
    assert "kv" not in pool.stats().slabs
    pool.free("state")
    pool.allocate("kv", (1 << 19,), np.uint8)


def test_wrong_names_shapes_and_limits(pool):
    pool.allocate("a", (1,), np.uint8)
    with pytest.raises(ContractError, match="slab 'a' must be new"):
        pool.allocate("a", (1,), np.uint8)
    with pytest.raises(ContractError, match="sizes >= 0"):
        pool.allocate("b", (-1,), np.uint8)
    with pytest.raises(ContractError, match=r"name must be one of \['a'\]; got 'b'"):
        pool.free("b")
    with pytest.raises(ContractError, match="at least 1 byte"):
        MemoryPool(CPU, limit=0)


def test_device_memory(pool):
    total, free = device_memory(pool.device)
    assert 0 < free <= total
    assert MemoryPool(pool.device).limit == total


def test_an_allocation_that_the_system_refuses():
    pool = MemoryPool(CPU, limit=1 << 62)
    with pytest.raises(OutOfMemoryError, match="the system refused"):
        pool.allocate("huge", (1 << 60,), np.uint8)


@pytest.mark.gpu
def test_a_freed_slab_returns_to_the_device(cp):
    device = Device("cuda")
    pool = MemoryPool(device)
    _, before = device_memory(device)
    pool.allocate("kv", (1 << 28,), np.uint8)
    assert device_memory(device)[1] <= before - (1 << 28)
    pool.free("kv")
    assert device_memory(device)[1] >= before - (1 << 22)
