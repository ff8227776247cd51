"""all_reduce: ranks of one process against the mirror, the mirror against float64, the contract."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels._peer_memory import _GROUP, MissingRank, PeerConfig, choose_threads
from engine.kernels.all_reduce import choose_kernel
from engine.testing import cases
from engine.testing.cases_elementwise import FLAT_SHAPES, assert_guards
from engine.testing.tolerances import assert_close
from tests.cases_collectives import PEER_SIZES, Ranks


def _parts(shape, dtype, size, seed=0):
    return [cases.normal(shape, dtype, seed=seed + 10 * r) for r in range(size)]


def _run(xp, parts, ranks=None):
    """Return every rank's result."""
    if xp is np:
        return [kernels.all_reduce(x, parts) for x in parts]
    ranks = ranks or Ranks(len(parts))
    arrays, outs = ranks.move(parts), ranks.move([np.full_like(x, 7) for x in parts])
    ranks.run(lambda r, memory: kernels.all_reduce(arrays[r], memory, out=outs[r]))
    assert [memory.missing() for memory in ranks.memories] == [None] * len(parts)
    return outs


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("size", PEER_SIZES)
def test_matches_mirror_in_every_rank(xp, size, dtype):
    ranks = None if xp is np else Ranks(size)
    for shape in FLAT_SHAPES:
        parts = _parts(shape, dtype, size)
        want = reference.all_reduce(parts[0], parts)
        for got in _run(xp, parts, ranks):
            np.testing.assert_array_equal(to_numpy(got), want)
            assert_close(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("way", ["one_shot", "two_shot"])
def test_both_ways_give_the_same_bits(cp, way, size, monkeypatch):
    module = importlib.import_module("engine.kernels.all_reduce")
    monkeypatch.setattr(module, "choose_kernel", lambda *_: way)
    ranks = Ranks(size)
    for n in (1, 2, 7, 8, 9, 65, 4096, 50_001):
        parts = _parts((n,), "bfloat16", size, seed=n)
        want = reference.all_reduce(parts[0], parts)
        for got in _run(cp, parts, ranks):
            np.testing.assert_array_equal(to_numpy(got), want)


@pytest.mark.gpu
def test_two_devices_of_one_process(cp):
    count = cp.cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip(f"needs two GPUs; there are {count}")
    ranks = Ranks(2, num_devices=2)
    for n in (1, 4096, 100_000):
        parts = _parts((n,), "bfloat16", 2, seed=n)
        want = reference.all_reduce(parts[0], parts)
        for got in _run(cp, parts, ranks):
            np.testing.assert_array_equal(to_numpy(got), want)


@pytest.mark.gpu
def test_larger_than_a_buffer(cp):
    ranks = Ranks(3, capacity=4096)
    # Loads the kernel of the last piece: CUDA would wait with that for a rank that waits for it.
    _run(cp, _parts((8,), "float32", 3), ranks)
    parts = _parts((3, 10_001), "float32", 3)
    want = reference.all_reduce(parts[0], parts)
    for got in _run(cp, parts, ranks):
        np.testing.assert_array_equal(to_numpy(got), want)


@pytest.mark.gpu
def test_calls_of_changing_sizes_in_replayed_graphs(cp):
    """Each call resets the buffers its predecessor used, whatever the size."""
    ranks = Ranks(2)
    sizes = (4096, 3, 30_000, 8, 1, 9000)
    parts = [_parts((n,), "bfloat16", 2, seed=n) for n in sizes]
    arrays = [ranks.move(pair) for pair in parts]
    outs = [ranks.move([np.zeros_like(x) for x in pair]) for pair in parts]

    def call(rank, memory):
        for x, out in zip(arrays, outs, strict=True):
            kernels.all_reduce(x[rank], memory, out=out[rank])

    ranks.run(call)
    graphs = ranks.captured(call)
    for replay in range(5):
        for pair, values in zip(arrays, parts, strict=True):
            for rank in range(2):
                with ranks.on(rank):
                    pair[rank].set((values[rank] * replay).astype(values[rank].dtype))
        for pair in outs:
            for rank in range(2):
                with ranks.on(rank):
                    pair[rank].fill(float("nan"))
        ranks.synchronize()
        ranks.replay(graphs)
        ranks.replay(graphs)
        ranks.synchronize()
        for pair, values in zip(outs, parts, strict=True):
            scaled = [(v * replay).astype(v.dtype) for v in values]
            want = reference.all_reduce(scaled[0], scaled)
            for got in pair:
                np.testing.assert_array_equal(to_numpy(got), want)


@pytest.mark.gpu
def test_the_index_of_calls_restarts(cp):
    """After 3 * 2^30 calls, which take days. Each call must find its buffer empty."""
    ranks = Ranks(2)
    place = _GROUP.fields["call"][1]
    for rank in range(2):
        with ranks.on(rank) as memory:
            memory.group[place : place + 4].view(np.uint32).fill(3 * 2**30 - 4)
    ranks.synchronize()
    for i in range(8):
        parts = _parts((4096,), "bfloat16", 2, seed=i)
        want = reference.all_reduce(parts[0], parts)
        for got in _run(cp, parts, ranks):
            np.testing.assert_array_equal(to_numpy(got), want)


@pytest.mark.gpu
def test_in_place_misaligned_and_guards(cp):
    ranks = Ranks(2)
    parts = _parts((1025,), "float16", 2)
    want = reference.all_reduce(parts[0], parts)
    arrays = ranks.move(parts)
    ranks.run(lambda r, memory: kernels.all_reduce(arrays[r], memory, out=arrays[r]))
    guarded = [cases.guarded(cp, (1025,), np.float16, guard=3) for _ in parts]
    again = ranks.move(parts)
    ranks.synchronize()
    cp.cuda.Device().synchronize()
    ranks.run(lambda r, memory: kernels.all_reduce(again[r], memory, out=guarded[r][0]))
    for in_place, (out, buffer) in zip(arrays, guarded, strict=True):
        np.testing.assert_array_equal(to_numpy(in_place), want)
        np.testing.assert_array_equal(to_numpy(out), want)
        assert_guards(buffer, guard=3)


@pytest.mark.gpu
def test_values_that_look_empty_or_are_not_finite(cp):
    values = np.array([-0.0, 0.0, np.inf, -np.inf, np.nan, 1e-8, -1e-8, -0.0], np.float32)
    for dtype in cases.DTYPES:
        parts = [np.tile(values, 9).astype(cases.normal((1,), dtype, 0).dtype) for _ in range(2)]
        parts[1][:8] = 0
        with np.errstate(invalid="ignore"):
            want = reference.all_reduce(parts[0], parts)
        for got in _run(cp, parts):
            np.testing.assert_array_equal(to_numpy(got).astype(np.float32), want.astype(np.float32))


@pytest.mark.gpu
def test_a_missing_rank_is_named_and_nothing_hangs(cp):
    ranks = Ranks(3, timeout=1.0)
    parts = _parts((5000,), "bfloat16", 3)
    arrays, outs = ranks.move(parts), ranks.move([np.zeros_like(x) for x in parts])
    ranks.run(lambda r, memory: kernels.all_reduce(arrays[r], memory, out=outs[r]))
    for rank in (0, 1):
        with ranks.on(rank) as memory:
            kernels.all_reduce(arrays[rank], memory, out=outs[rank])
    ranks.synchronize()
    for rank in (0, 1):
        assert ranks.memories[rank].missing() == MissingRank(2, 1, "all_reduce")
        assert np.isnan(to_numpy(outs[rank]).astype(np.float32)).all()
    assert ranks.memories[2].missing() is None
    with ranks.on(0) as memory:
        for _ in range(100):
            kernels.all_reduce(arrays[0], memory, out=outs[0])
    ranks.synchronize()
    assert ranks.memories[0].missing() == MissingRank(2, 1, "all_reduce")


def test_mirror_is_the_sum():
    parts = _parts((6, 50), "float32", 4)
    want = sum(x.astype(np.float64) for x in parts)
    np.testing.assert_allclose(reference.all_reduce(parts[0], parts), want, rtol=1e-5, atol=1e-6)


def test_the_order_of_ranks_is_kept():
    parts = [np.array([v], np.float32) for v in (1e8, -1e8, 1.0)]
    assert kernels.all_reduce(parts[0], parts)[0] == 1.0
    assert kernels.all_reduce(parts[0], [parts[0], parts[2], parts[1]])[0] == 0.0


def test_choices():
    assert choose_threads(512, 264) == PeerConfig(blocks=2, threads=256)
    assert choose_threads(1 << 20, 264) == PeerConfig(blocks=264, threads=512)
    assert choose_threads(0, 264) == PeerConfig(blocks=1, threads=256)
    assert choose_kernel(1 << 30, 2) == "one_shot"
    assert choose_kernel(1 << 20, 4) == "two_shot"
    assert choose_kernel(1 << 14, 4) == "one_shot"


def test_contract():
    x = np.zeros((2, 8), np.float32)
    with pytest.raises(ShapeError, match=r"peers\[1\]: must have shape \(2, 8\); got \(8,\)"):
        kernels.all_reduce(x, [x, x[0]])
    with pytest.raises(DTypeError, match=r"peers\[0\]: must be float32; got float16"):
        kernels.all_reduce(x, [x.astype(np.float16)])
    with pytest.raises(ContractError, match="peers: must be a list of arrays; got None"):
        kernels.all_reduce(x, None)


@pytest.mark.gpu
def test_contract_on_the_device(cp):
    x = cp.zeros((2, 8), np.float32)
    with pytest.raises(ContractError, match="peers: must be a PeerMemory; got 'list'"):
        kernels.all_reduce(x, [x])
