"""A step of training; on a GPU, batches that are built alike replay a CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from .network import Adam, Batch, Network, absolute_slope

__all__ = ["Step"]


class Step:
    """Forward pass, backward pass and optimizer, on the mean absolute error.

    A step has some 300 kernels, and launching them one by one takes longer than computing a small
    batch. So the second batch with the same groups of sequences is captured in a graph, which the
    later ones replay. With dropout, whose masks differ from step to step, nothing is captured.

    Parameters
    ----------
    network : Network
    adam : Adam
    max_graphs : int
        Graphs that are kept: each holds the memory of a step.
    """

    def __init__(self, network: Network, adam: Adam, max_graphs: int = 32) -> None:
        self._network = network
        self._adam = adam
        self._num_free = 0 if network.xp is np or network.config.dropout else max_graphs
        self._seen: set[Any] = set()
        self._graphs: dict[Any, _Graph] = {}

    def __call__(self, batch: Batch, wanted: Any) -> Any:
        """Take a step towards `wanted`, (B, 1); return the outputs before it."""
        groups = tuple((g.start, g.count, g.length, id(g.pattern)) for g in batch.groups)
        key = (groups, batch.roots is None)
        if key not in self._graphs:
            if key not in self._seen or not self._num_free:
                self._seen.add(key)
                schedule = self._network.xp.asarray(self._adam.schedule())
                return self._run(batch, wanted, schedule)
            self._num_free -= 1
            self._graphs[key] = _Graph(self._run, batch, wanted)
        return self._graphs[key](batch, wanted, self._adam.schedule())

    def _run(self, batch: Batch, wanted: Any, schedule: Any) -> Any:
        outputs, gradient = self._network.gradient(batch, partial(absolute_slope, wanted=wanted))
        self._adam.apply(self._network, gradient, schedule)
        return outputs


@dataclass
class _Graph:
    """A step on batches that are built like the first one.

    Its arrays come from a memory pool of its own: nobody else may write to them between replays.
    """

    run: Any
    batch: Batch
    wanted: Any

    def __post_init__(self) -> None:
        import cupy as cp

        self._pool = cp.cuda.MemoryPool()
        self._stream = cp.cuda.Stream(non_blocking=True)
        self._schedule = cp.empty(3, np.float32)
        self.wanted = self.wanted.copy()
        arrays = (self.batch.elements.copy(), self.batch.features.copy())
        order = self.batch.order.copy()
        self.batch = replace(self.batch, elements=arrays[0], features=arrays[1])
        vars(self.batch)["order"] = order  # in place of one that the property would make
        self._graph: Any = None
        self._outputs: Any = None

    def __call__(self, batch: Batch, wanted: Any, schedule: Any) -> Any:
        self.batch.elements[...] = batch.elements
        self.batch.features[...] = batch.features
        self.batch.order[...] = batch.order
        self.wanted[...] = wanted
        self._schedule.set(schedule)
        if self._graph is None:
            return self._capture()
        self._graph.launch()
        return self._outputs.copy()

    def _capture(self) -> Any:
        """Take a step, which allocates what it needs; then capture another without running it."""
        import cupy as cp

        current = cp.cuda.get_current_stream()
        self._stream.wait_event(current.record())
        with self._stream, cp.cuda.using_allocator(self._pool.malloc):
            outputs = self.run(self.batch, self.wanted, self._schedule).copy()
            self._stream.begin_capture()
            self._outputs = self.run(self.batch, self.wanted, self._schedule)
            self._graph = self._stream.end_capture()
        current.wait_event(self._stream.record())
        return outputs
