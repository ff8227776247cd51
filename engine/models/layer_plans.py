"""Launch replay: in each step the first layer of a kind records a launch plan for the others.

Within a step, all layers of a kind launch the same GPU kernels with the same arguments, apart from
addresses. So the first of them is called while its launches are recorded
(`kernels/_launch_plan.py`), and the plan is replayed for the others: a step of 28 layers costs the
host about 4 ms instead of 24. A last layer that drops tokens is called without a plan, and so is
every layer if an op is overridden by a Python function: a plan would not repeat what it does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.device import is_cupy_array
from engine.kernels._launch_plan import LaunchPlan, making_plan
from engine.kernels._override.dispatch import add_runs, recorded_runs
from engine.kernels._override.scope import current_overrides
from engine.kernels._peer_memory import PeerMemory, Sent
from engine.layers.batch import ForwardBatch
from engine.plan_array import PlanArray, unwrapped

__all__ = ["LayerPlans"]

_ALIGNMENT = 16  # largest alignment that affects kernel selection, in bytes


class _LayerArrays:
    """The device arrays of one layer: a plan of its kind is replayed with their addresses."""

    def __init__(self, layer: Any, numbers: Hashable) -> None:
        named = [(name, array) for name, array in layer.arrays() if is_cupy_array(array)]
        places = [int(array.data.ptr) for _, array in named]
        # An array with two names is listed once. Layers whose arrays alias differently are of
        # different kinds.
        first = [places.index(place) for place in places]
        self.named = [named[i] for i in dict.fromkeys(first)]
        self.addresses = [int(array.data.ptr) for _, array in self.named]
        layouts = tuple((name, *_layout(array)) for name, array in named)
        self.kind: Hashable = (numbers, tuple(first), layouts)


@dataclass
class _Planned:
    """A plan, and the arrays that carry `delta` and `residual` from layer to layer."""

    plan: LaunchPlan
    runs: dict[str, int]  # kernel -> runs in one replay of the plan
    deltas: tuple[Any, Any]  # input and output of the recorded layer, used alternately
    residual: Any
    sent: Sent | None  # rows of its output that the recorded layer has sent
    num_replays: int = 0

    def run(self, addresses: list[int], delta: Any) -> tuple[Any, Any]:
        """Replay the plan for another layer; return its (delta, residual)."""
        if delta is not None:
            # The previous layer's output is read throughout this layer: write the other array.
            out = self.deltas[1 if delta is not self.deltas[1] else 0]
            addresses = [*addresses, int(delta.data.ptr), int(out.data.ptr)]
            delta = out
        self.plan.run(addresses)
        self.num_replays += 1
        return delta, self.residual


class LayerPlans:
    """Runs layers in order: calls each, or replays the plan of its kind.

    Parameters
    ----------
    layers : sequence of DecoderLayer
    numbers : sequence of hashable
        Non-array values that determine each layer's launches; equal for layers of one kind.
    peers : PeerMemory or None
        The ranks to which products send rows.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        numbers: Sequence[Hashable],
        peers: PeerMemory | None,
    ) -> None:
        self._layers = tuple(layers)
        self._peers = peers
        self._arrays = [_LayerArrays(*pair) for pair in zip(layers, numbers, strict=True)]
        self._last = {arrays.kind: index for index, arrays in enumerate(self._arrays)}

    def __call__(
        self,
        residual: Any,
        batch: ForwardBatch,
        kv_pages: Sequence[tuple[Any, ...]],
        rows: Any = None,
        before: Callable[[int, Any, Any], None] | None = None,
        delta: Any = None,
    ) -> tuple[Any, Any]:
        """Return (delta, residual) of the last layer; overwrite the residual stream.

        With `rows` (R,) int32, the last layer drops all other tokens. `before` is called before
        each layer with the layer's index, delta and residual. `delta` is the first layer's, and is
        overwritten too.
        """
        if rows is None:
            return self._run(self._layers, delta, residual, batch, kv_pages, before)
        # The plans are released first: the last layer can reuse their memory.
        delta, residual = self._run(
            self._layers[:-1], delta, residual, batch, kv_pages[:-1], before
        )
        if before is not None:
            before(len(self._layers) - 1, delta, residual)
        called: tuple[Any, Any] = self._layers[-1](delta, residual, batch, kv_pages[-1], rows)
        return called

    def _run(
        self,
        layers: Sequence[Any],
        delta: Any,
        residual: Any,
        batch: ForwardBatch,
        kv_pages: Sequence[tuple[Any, ...]],
        before: Callable[[int, Any, Any], None] | None,
    ) -> tuple[Any, Any]:
        """Run `layers`, which are the first ones of the decoder."""
        plans: dict[Hashable, _Planned | None] = {}
        can_plan = current_overrides().is_planned
        peers = self._peers
        for index, (layer, pages) in enumerate(zip(layers, kv_pages, strict=True)):
            if before is not None:
                before(index, delta, residual)
            # The rows of delta that have been sent are constants of the plan that sums them.
            shape = None if delta is None else delta.shape
            kind = self._arrays[index].kind, shape, peers and peers.sent
            planned = plans.get(kind)
            if planned is not None and residual is planned.residual:
                addresses = self._arrays[index].addresses + [int(p.data.ptr) for p in pages]
                delta, residual = planned.run(addresses, delta)
                if peers is not None:
                    peers.sent = planned.sent  # as the layer itself would have left it
            elif can_plan and self._is_worth_it(index, delta, batch) and kind not in plans:
                delta, residual, plans[kind] = self._plan(index, delta, residual, batch, pages)
            else:
                delta, residual = layer(delta, residual, batch, pages)
        for planned in plans.values():
            if planned is not None:
                add_runs(planned.runs, planned.num_replays)
        return delta, residual

    def _is_worth_it(self, index: int, delta: Any, batch: ForwardBatch) -> bool:
        """Tell whether a later layer of the same kind can replay a plan of this one."""
        arrays = self._arrays[index]
        is_alike = delta is not None or self._layers[index].is_fused(batch.num_tokens)
        is_worth_it = bool(arrays.addresses) and is_alike and self._last[arrays.kind] > index
        return is_worth_it and self._layers[index].can_plan(batch)

    def _plan(
        self, index: int, delta: Any, residual: Any, batch: ForwardBatch, pages: tuple[Any, ...]
    ) -> tuple[Any, Any, _Planned | None]:
        """Call a layer; return its (delta, residual), and the plan of its launches.

        The plan is None if the layer's outputs would not be valid inputs of the plan: it returned a
        delta but was given none (or the reverse, or one of another shape), or returned another
        residual array.
        """
        given = None if delta is None else PlanArray(delta)
        with making_plan() as builder, recorded_runs() as runs:
            results = self._layers[index](given, PlanArray(residual), batch, pages)
        add_runs(runs)
        out, new_residual = map(unwrapped, results)
        shapes = [None if one is None else one.shape for one in (out, delta)]
        if shapes[0] != shapes[1] or new_residual.data.ptr != residual.data.ptr:
            return out, new_residual, None
        caches = [(f"cache {number}", array) for number, array in enumerate(pages)]
        moving = [*self._arrays[index].named, *caches]
        if delta is not None:
            moving += [("delta", delta), ("out", out)]
        plan = builder.finish([(name, int(a.data.ptr), int(a.nbytes)) for name, a in moving])
        sent = None if self._peers is None else self._peers.sent
        return out, new_residual, _Planned(plan, runs, (delta, out), new_residual, sent)


def _layout(array: Any) -> tuple[Any, ...]:
    """Return the properties of an array that may affect kernel selection."""
    return array.shape, array.strides, array.dtype, int(array.data.ptr) % _ALIGNMENT
