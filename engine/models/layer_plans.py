"""Runs a decoder's layers: each kind of layer is worked out once a step, the others run its plan.

On a GPU the layers of one kind launch the same kernels, for one step, with the same numbers; only
addresses differ. So the first of them is called while a launch plan is made
(`kernels/_launch_plan.py`), which is run for the others: a step of 28 layers takes the host about
4 ms instead of 24. A last layer that some tokens leave is called, too.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.device import is_cupy_array
from engine.kernels._launch_plan import LaunchPlan, making_plan
from engine.layers.batch import ForwardBatch
from engine.plan_array import PlanArray, unwrapped

__all__ = ["LayerPlans"]

_ALIGNMENT = 16  # bytes: no kernel is chosen by more


class _LayerArrays:
    """The arrays of one layer on the device: what is the layer's own in a plan of its kind."""

    def __init__(self, layer: Any, numbers: Hashable) -> None:
        named = [(name, array) for name, array in layer.arrays() if is_cupy_array(array)]
        places = [int(array.data.ptr) for _, array in named]
        # A weight that has two names is listed once; such layers are a kind of their own.
        first = [places.index(place) for place in places]
        self.named = [named[i] for i in dict.fromkeys(first)]
        self.addresses = [int(array.data.ptr) for _, array in self.named]
        layouts = tuple((name, *_layout(array)) for name, array in named)
        self.kind: Hashable = (numbers, tuple(first), layouts)


@dataclass
class _Planned:
    """A plan, and the arrays through which its layers hand on what is to be added."""

    plan: LaunchPlan
    deltas: tuple[Any, Any]  # what came into the layer, what went out of it
    residual: Any

    def run(self, addresses: list[int], delta: Any) -> tuple[Any, Any]:
        """Run the plan for another layer; return its (delta, residual)."""
        if delta is not None:
            # What went out of the layer before is read until the end of this one.
            out = self.deltas[1 if delta is not self.deltas[1] else 0]
            addresses = [*addresses, int(delta.data.ptr), int(out.data.ptr)]
            delta = out
        self.plan.run(addresses)
        return delta, self.residual


class LayerPlans:
    """Calls layers in their order, or runs the plan of their kind.

    Parameters
    ----------
    layers : sequence of DecoderLayer
    numbers : sequence of hashable
        What each layer computes with beside its arrays: layers that agree are of one kind.
    """

    def __init__(self, layers: Sequence[Any], numbers: Sequence[Hashable]) -> None:
        self._layers = tuple(layers)
        self._arrays = [_LayerArrays(*pair) for pair in zip(layers, numbers, strict=True)]
        self._last = {arrays.kind: index for index, arrays in enumerate(self._arrays)}

    def __call__(
        self,
        residual: Any,
        batch: ForwardBatch,
        kv_pages: Sequence[tuple[Any, Any]],
        rows: Any = None,
    ) -> tuple[Any, Any]:
        """Return (delta, residual) of the last layer, of a residual stream that is overwritten.

        With `rows` (R,) int32, those of these tokens only: the others leave within the last layer.
        """
        if rows is None:
            return self._run(self._layers, residual, batch, kv_pages)
        # The plans are gone when the last layer is called: what they held is memory for it.
        delta, residual = self._run(self._layers[:-1], residual, batch, kv_pages[:-1])
        called: tuple[Any, Any] = self._layers[-1](delta, residual, batch, kv_pages[-1], rows)
        return called

    def _run(
        self,
        layers: Sequence[Any],
        residual: Any,
        batch: ForwardBatch,
        kv_pages: Sequence[tuple[Any, Any]],
    ) -> tuple[Any, Any]:
        """Call the first `layers`, or run their plans."""
        delta = None
        plans: dict[Hashable, _Planned | None] = {}
        for index, (layer, pages) in enumerate(zip(layers, kv_pages, strict=True)):
            kind = self._arrays[index].kind, delta is None
            planned = plans.get(kind)
            if planned is not None and residual is planned.residual:
                addresses = self._arrays[index].addresses + [int(p.data.ptr) for p in pages]
                delta, residual = planned.run(addresses, delta)
            elif self._is_worth_it(index, delta, batch) and kind not in plans:
                delta, residual, plans[kind] = self._plan(index, delta, residual, batch, pages)
            else:
                delta, residual = layer(delta, residual, batch, pages)
        return delta, residual

    def _is_worth_it(self, index: int, delta: Any, batch: ForwardBatch) -> bool:
        """Tell whether a layer is followed by one of its kind that begins as it does."""
        arrays = self._arrays[index]
        is_alike = delta is not None or self._layers[index].is_fused(batch.num_tokens)
        return bool(arrays.addresses) and is_alike and self._last[arrays.kind] > index

    def _plan(
        self, index: int, delta: Any, residual: Any, batch: ForwardBatch, pages: tuple[Any, Any]
    ) -> tuple[Any, Any, _Planned | None]:
        """Call a layer; return its (delta, residual), and a plan of what it launched.

        None instead of a plan: the layer hands on something else than it got, so its plan would
        not follow upon itself.
        """
        given = None if delta is None else PlanArray(delta)
        with making_plan() as builder:
            results = self._layers[index](given, PlanArray(residual), batch, pages)
        out, new_residual = map(unwrapped, results)
        if (out is None) != (delta is None) or new_residual.data.ptr != residual.data.ptr:
            return out, new_residual, None
        moving = [*self._arrays[index].named, *zip(("k_pages", "v_pages"), pages, strict=True)]
        if delta is not None:
            moving += [("delta", delta), ("out", out)]
        plan = builder.finish([(name, int(a.data.ptr), int(a.nbytes)) for name, a in moving])
        return out, new_residual, _Planned(plan, (delta, out), new_residual)


def _layout(array: Any) -> tuple[Any, ...]:
    """Return what kernels are chosen by: all of an array but where it is."""
    return array.shape, array.strides, array.dtype, int(array.data.ptr) % _ALIGNMENT
