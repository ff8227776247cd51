"""moe_sort: the kernel against the mirror and against moe_route, ids out of range, the contract."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.testing import cases
from engine.testing.cases_moe import distinct_logits

# (T, E, k): every width of entry point, one block and many, one expert, empty.
SHAPES = ((1, 8, 2), (33, 32, 4), (9, 60, 4), (5000, 128, 8), (700, 200, 1), (300, 512, 16),
          (40, 1, 1), (0, 8, 2))  # fmt: skip


def _ids(shape, dtype=np.int32):
    """Return random ids, with repetitions."""
    num_tokens, num_experts, top_k = shape
    rng = np.random.default_rng(shape)
    return rng.integers(0, num_experts, (num_tokens, top_k)).astype(dtype)


def _assert_same(got, want):
    for name, a, b in zip(want._fields, got, want, strict=True):
        np.testing.assert_array_equal(to_numpy(a), b, err_msg=name)


@pytest.mark.grid("dtype", [np.int32, np.int64])
@pytest.mark.grid("shape", SHAPES)
def test_matches_mirror(xp, shape, dtype):
    ids = _ids(shape, dtype)
    weights = cases.normal(ids.shape, "float32", seed=1)
    want = reference.moe_sort(ids, weights, num_experts=shape[1])
    got = kernels.moe_sort(*cases.to_module(xp, ids, weights), num_experts=shape[1])
    assert got.experts.dtype == np.int32
    _assert_same(got, want)


@pytest.mark.grid("shape", [s for s in SHAPES if s[0]])
def test_equals_the_sort_of_moe_route(xp, shape):
    num_tokens, num_experts, top_k = shape
    logits = xp.asarray(distinct_logits(num_tokens, num_experts, seed=1))
    routing = kernels.moe_route(logits, top_k)
    got = kernels.moe_sort(routing.experts, routing.weights, num_experts=num_experts)
    _assert_same(got, type(routing)(*map(to_numpy, routing)))


def test_ids_out_of_range_take_the_nearest_expert(xp):
    ids = np.array([[-1, 2**40], [3, 7]], np.int64)
    got = kernels.moe_sort(*cases.to_module(xp, ids, np.ones((2, 2), np.float32)), num_experts=4)
    assert to_numpy(got.experts).tolist() == [[0, 3], [3, 3]]
    assert to_numpy(got.order).tolist() == [0, 1, 2, 3]
    assert to_numpy(got.offsets).tolist() == [0, 1, 1, 1, 4]


@pytest.mark.gpu
def test_offsets_without_tokens(cp):
    kept = [cp.full(9, 7, np.int32) for _ in range(8)]  # memory of other numbers for the results
    del kept
    empty = cp.zeros((0, 2), np.int32), cp.zeros((0, 2), np.float32)
    assert not to_numpy(kernels.moe_sort(*empty, num_experts=8).offsets).any()


def test_contract(xp):
    ids, weights = xp.zeros((3, 2), np.int32), xp.zeros((3, 2), np.float32)
    with pytest.raises(ShapeError, match=r"weights: must have shape \(T, k\); k = 2 from ids"):
        kernels.moe_sort(ids, weights[:, :1], num_experts=4)
    with pytest.raises(DTypeError, match=r"ids: must be int32 or int64; got float32"):
        kernels.moe_sort(weights, weights, num_experts=4)
    for bad in (0, 513, 4.0, True):
        with pytest.raises(ContractError, match=r"num_experts: must be from 1 to 512"):
            kernels.moe_sort(ids, weights, num_experts=bad)
