"""Experts of which a rank has some whole: rows that no product writes do not reach the sum."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from engine import kernels
from engine.layers.linear import Linear
from engine.layers.moe import Experts, MoE, RoutingParams
from engine.layers.parallel import ColumnParallelExperts, ExpertParallelExperts
from engine.plan_array import PlanArray, unwrapped
from engine.reference import Routing
from engine.reference.embedding import PADDING_ID
from engine.testing import cases
from engine.testing.cases_moe import routing_of
from engine.testing.cases_quantized import random_weight
from engine.weights import FORMATS, Weight
from engine.weights.stack import stack_matrices, take_matrices

N, E = 256, 7  # as many features as hidden ones: of whole blocks in every format
RUNS = {1: [(0, 7)], 2: [(0, 3), (3, 7)], 4: [(0, 1), (1, 3), (3, 5), (5, 7)]}


def _weight(form, rows, columns):
    if form == "dense":
        values = cases.normal((E, rows, columns), "float32", seed=rows, scale=columns**-0.5)
        return Weight.dense(values)
    return stack_matrices([random_weight(form, rows, columns, seed) for seed in range(E)])


def _bias(rows):
    return Weight.dense(cases.normal((E, rows), "float32", seed=rows + 1))


def _part(weight, first, last):
    if weight.format.is_dense:
        return Weight.dense(weight.data[first:last])
    return take_matrices(weight, first, last)


def _local(experts, first, last, **options):
    parts = {name: _part(weight, first, last) for name, weight in experts._weights()}
    ids = np.full(16, PADDING_ID, np.int32)  # fewer than pairs: cleared in several launches
    return ExpertParallelExperts(
        **vars(replace(experts, **parts)), first=first, padding_ids=ids, **options
    )


@pytest.fixture
def leaves_rows(monkeypatch):
    """Let the op leave rows of experts that it does not have, as kernels do; return the counts."""
    op, counts = kernels.moe_gemm, []

    def unwritten(x, weight, routing, *, scatter=False, out=None, **options):
        result = op(x, weight, routing, scatter=scatter, **options)
        places = np.arange(routing.offsets[0], routing.offsets[-1])
        written = routing.order[places] if scatter else places
        counts.append(len(written))
        if isinstance(result, tuple):  # codes, of which 0x7F is NaN, and scales
            return tuple(kept(one, written, one.dtype.type(0x7F)) for one in result)
        return kept(result, written, np.nan, out)

    def kept(result, written, unknown, out=None):
        target = np.full_like(result, unknown) if out is None else out
        target[written] = result[written]
        return target

    monkeypatch.setattr(kernels, "moe_gemm", unwritten)
    return counts


@pytest.mark.parametrize("form", ["dense", "fp8_block", "mxfp4", "q4_k"])
@pytest.mark.parametrize("size", RUNS)
def test_the_ranks_pairs_are_those_of_one_process(leaves_rows, form, size):
    """All of them, each in one rank, with zeros in the others; also where a rank has no pair."""
    matrices = _weight(form, 2 * N, N), _weight(form, N, N)
    experts = Experts(*matrices, _bias(2 * N), _bias(N), "swiglu_clamped")
    for chosen in ([[6, 2, 0], [1, 2, 3], [4, 5, 6], [3, 0, 5]] * 3, [[4, 6, 5]]):
        x = cases.normal((len(chosen), N), "float32", seed=9)
        routing = routing_of(chosen, E)
        want = experts(x, routing, deterministic=True)
        ranks = []
        for first, last in RUNS[size]:
            leaves_rows.clear()
            got = _local(experts, first, last)(x, routing, deterministic=True)
            own = (routing.experts >= first) & (routing.experts < last)
            assert leaves_rows == [own.sum()] * 2  # rows of each product
            assert not got[~own].any()
            np.testing.assert_array_equal(got[own], want[own])
            ranks.append(got)
        np.testing.assert_array_equal(sum(ranks), want)


def test_tokens_of_a_long_prompt_are_not_only_codes():
    """Ranks read the numbers, too: of zeros of their shape, or of columns."""
    experts = Experts(_weight("fp8_block", 2 * N, N), _weight("fp8_block", N, N))
    assert experts.coded_format(4096) is FORMATS["fp8_block"]
    assert experts.coded_format(40) is None
    local = _local(experts, 2, 5)
    assert local.coded_format(4096) is None
    router = Linear(Weight.dense(cases.normal((E, N), "float32", seed=3)))
    for one in (local, ColumnParallelExperts(**vars(experts), collectives=None)):
        assert MoE(RoutingParams(2), router, one).coded_format(4096) is None


def test_gathered_pairs_are_in_their_places(leaves_rows, on_ranks):
    """The sum of a token's experts then has the order of one process, and its bits."""
    experts = Experts(_weight("dense", 2 * N, N), _weight("dense", N, N))
    x, routing = cases.normal((5, N), "float32", seed=9), routing_of([[6, 2, 0]] * 5, E)
    want = experts(x, routing, deterministic=True)

    def gathered(collectives):
        run = RUNS[4][collectives.rank]
        local = _local(experts, *run, collectives=collectives)
        return kernels.moe_combine(local(x, routing, deterministic=True))

    for got in on_ranks(4, gathered):
        np.testing.assert_array_equal(got, kernels.moe_combine(want))


class OnDevice(np.ndarray):
    """A NumPy array that has an address where CuPy's have it."""

    data = property(lambda self: SimpleNamespace(ptr=self.ctypes.data))


def test_nothing_but_ops_is_done_to_arrays(monkeypatch):
    """So that a launch plan, which repeats the ops of a layer for others, leaves nothing out."""
    experts = Experts(_weight("dense", 2 * N, N), _weight("dense", N, N))
    x, routing = cases.normal((5, N), "float32", seed=9), routing_of([[6, 2, 0]] * 5, E)
    local, called = _local(experts, 2, 5), []
    want = local(x, routing)

    def planned(name):
        op = getattr(kernels, name)

        def call(*arguments, out=None, **options):
            called.append(name)
            given = [
                Routing(*map(unwrapped, a)) if isinstance(a, Routing) else unwrapped(a)
                for a in arguments
            ]
            return PlanArray(op(*given, out=unwrapped(out), **options).view(OnDevice))

        monkeypatch.setattr(kernels, name, call)

    planned("moe_gemm")
    planned("embedding")
    arrays = [PlanArray(array.view(OnDevice)) for array in (x, *routing)]
    got = local(arrays[0], Routing(*arrays[1:]))
    assert isinstance(got, PlanArray) and called == ["embedding", "moe_gemm", "moe_gemm"]
    np.testing.assert_array_equal(unwrapped(got), want)
