"""Collectives over shared memory: values, bits, views, contracts."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from engine import kernels
from engine.distributed.collectives import SharedMemoryCollectives
from engine.distributed.group import Group
from engine.distributed.messages import Messages
from engine.distributed.segment import Segment
from engine.errors import ConfigError, ContractError, RankError

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


def _array(rank, dtype, shape):
    return np.random.default_rng(rank).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_reduce_adds_in_the_order_of_ranks_and_rounds_once(on_ranks, dtype, size):
    sums = on_ranks(size, lambda c: c.all_reduce(_array(c.rank, dtype, (5, 7))))
    wanted = np.zeros((5, 7), np.float32)
    for rank in range(size):
        wanted = wanted + _array(rank, dtype, (5, 7)).astype(np.float32)
    for found in sums:
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, wanted.astype(dtype))


def test_all_reduce_into_its_argument_and_into_a_view(on_ranks):
    def work(collectives):
        x = np.full((2, 3), collectives.rank + 1.0, np.float32)
        assert collectives.all_reduce(x, out=x) is x
        wide = np.zeros((2, 6), np.float32)
        collectives.all_reduce(x[:, ::2], out=wide[:, 1:5:2])
        return x, wide

    for x, wide in on_ranks(2, work):
        np.testing.assert_array_equal(x, np.full((2, 3), 3.0))
        np.testing.assert_array_equal(wide, np.array([[0, 6, 0, 6, 0, 0]] * 2))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_all_gather_joins_along_an_axis(on_ranks, axis):
    for whole in on_ranks(3, lambda c: c.all_gather(_array(c.rank, np.float32, (2, 4)), axis=axis)):
        parts = [_array(rank, np.float32, (2, 4)) for rank in range(3)]
        np.testing.assert_array_equal(whole, np.concatenate(parts, axis=axis))


def test_arrays_larger_than_a_buffer_and_empty_ones(on_ranks):
    shape = 700, 1001

    def work(collectives):
        x = _array(collectives.rank, np.float32, shape)
        none = collectives.all_reduce(x[:0])
        return collectives.all_reduce(x), collectives.all_gather(x, axis=0), none

    for total, whole, none in on_ranks(2, work):
        parts = [_array(rank, np.float32, shape) for rank in range(2)]
        np.testing.assert_array_equal(total, parts[0] + parts[1])
        np.testing.assert_array_equal(whole, np.concatenate(parts))
        assert none.shape == (0, 1001)


def test_broadcast_overwrites_the_others(on_ranks):
    for found in on_ranks(3, lambda c: c.broadcast(np.full(4, c.rank, np.int32), root=1)):
        np.testing.assert_array_equal(found, np.ones(4, np.int32))


def test_the_norm_after_the_sum_is_the_three_operations(on_ranks):
    weight, start = _array(9, np.float32, 16), _array(8, np.float32, (3, 16))

    def work(collectives):
        residual = start.copy()
        x = _array(collectives.rank, np.float32, (3, 16))
        return *collectives.all_reduce_rmsnorm(x, residual, weight, 1e-6), residual

    total = _array(0, np.float32, (3, 16)) + _array(1, np.float32, (3, 16))
    h = total + start
    for normed, found, residual in on_ranks(2, work):
        np.testing.assert_array_equal(found, h)
        np.testing.assert_array_equal(residual, h)
        np.testing.assert_array_equal(normed, kernels.rmsnorm(h, weight, eps=1e-6))


def test_many_operations_of_changing_size(on_ranks):
    def work(collectives):
        found = []
        for turn in range(200):
            x = np.full(1 + turn * 37 % 91, collectives.rank + turn, np.float32)
            found.append(float(collectives.all_reduce(x)[-1]))
        return found

    assert on_ranks(4, work) == [[4.0 * turn + 6 for turn in range(200)]] * 4


def test_contracts(on_ranks):
    alone = SharedMemoryCollectives(Group(Segment.in_process(1), 0))
    with pytest.raises(ContractError, match="16- or 32-bit floats; got int64"):
        alone.all_reduce(np.zeros(3, np.int64))
    with pytest.raises(ContractError, match=r"out of all_reduce must be float32 \(3,\); got"):
        alone.all_reduce(np.zeros(3, np.float32), out=np.zeros(4, np.float32))
    with pytest.raises(ContractError, match="root must be a rank below 1; got 1"):
        alone.broadcast(np.zeros(3, np.float32), root=1)
    with pytest.raises(ConfigError, match=r"rank must be in \[0, 1\); got 1"):
        Group(Segment.in_process(1), 1)
    with pytest.raises(ConfigError, match="from 1 to 64 ranks; got 65"):
        Segment.create(65)


def test_a_rank_that_fails_is_named_with_its_last_words(on_ranks):
    segment = Segment.in_process(2)
    ours, theirs = Group(segment, 0, timeout=5.0), Group(segment, 1)
    try:
        raise MemoryError("no room for layer 3")
    except MemoryError as error:
        theirs.fail(error)
    with pytest.raises(RankError, match=r"rank 1 failed(?s:.)*no room for layer 3"):
        SharedMemoryCollectives(ours).barrier("start")


def test_a_damaged_message_is_refused():
    segment = Segment.in_process(2)
    ours, theirs = (Messages(Group(segment, rank)) for rank in range(2))
    ours.send(b"step")
    segment.slots[1, 0] ^= 1
    with pytest.raises(RankError, match="rank 1 got a damaged message"):
        theirs.receive()


def test_a_full_ring_waits_for_its_readers():
    segment = Segment.in_process(2)
    ours = Messages(Group(segment, 0, timeout=0.1))
    for _ in range(8):
        ours.send(b"step")
    with pytest.raises(RankError, match=r"rank 1 .* did not come to the next message within 0.1 s"):
        ours.send(b"step")
