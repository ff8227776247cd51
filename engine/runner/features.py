"""Features: the residual stream of chosen layers, kept as input for draft heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from engine.dtypes import np_dtype
from engine.layers.batch import ForwardBatch
from engine.scheduler.output import ScheduleOutput

__all__ = ["FeatureTap", "Features", "StageFeatureTap"]

Features = Mapping[int, Any]
"""Layer -> its input, the residual stream (T, N); see `ForwardBatch.features`."""


class FeatureTap:
    """Passes the features of each step to `on_step`, if it is set.

    Parameters
    ----------
    model : RunnableModel
        Must have a `dtype`, unless `layers` is empty.
    layers : sequence of int
        Layers whose input is kept.

    Attributes
    ----------
    on_step : callable or None
        Called after each step's launch with the step, the index of each sequence's first token
        (B,), and the step's features.
    are_lasting : bool
        Whether features stay valid after the next launch.
    """

    are_lasting = False

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        self.on_step: Callable[[ScheduleOutput, Any, Features], None] | None = None
        self._model = model
        self._layers = tuple(layers)
        self._of_graphs: Features = {}
        self._last: Features = {}

    def new_for_graphs(self, num_tokens: int) -> Features:
        """Allocate the feature arrays shared by all graphs, for up to `num_tokens` tokens."""
        self._of_graphs = self._new(num_tokens)
        return self._of_graphs

    def add_to(self, batch: ForwardBatch) -> ForwardBatch:
        """Return the batch with newly allocated feature arrays."""
        if self.on_step is None:
            return batch
        self._last = self._new(batch.num_tokens)
        return replace(batch, features=self._last)

    def note_graph(self, num_tokens: int) -> None:
        """Record that a graph computes the step, whose tokens come first in its arrays."""
        self._last = self._of_graphs

    def report(self, output: ScheduleOutput, first_tokens: Any) -> None:
        """Pass on the features of a step just launched."""
        if self.on_step is not None:
            self.on_step(output, first_tokens, self._last)

    def report_graph(self, output: ScheduleOutput) -> None:
        """Pass on the features of a step just launched as a graph."""
        if self.on_step is not None:
            first_tokens = np.arange(len(output.sequences)) * output.query_len
            self.note_graph(len(first_tokens) * output.query_len)
            self.on_step(output, first_tokens, self._last)

    def _new(self, num_tokens: int) -> Features:
        if not self._layers:
            return {}
        shape = num_tokens, self._model.config.hidden_size
        xp = self._model.device.xp
        dtype = np_dtype(self._model.dtype)
        return {layer: xp.empty(shape, dtype) for layer in self._layers}


class StageFeatureTap(FeatureTap):
    """The tap of a pipeline's last stage: the other stages send the inputs of their layers.

    Steps in flight are computed before the features of earlier ones are read, so each step has
    arrays of its own.

    Parameters
    ----------
    model : PipelinedModel
    layers : sequence of int
        Layers of the whole model whose input is kept.
    """

    are_lasting = True

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        first = model.decoder.stage.first
        super().__init__(model, [layer for layer in layers if layer >= first])
        self._stages = model
        model.keep_features(sorted({layer for layer in layers if layer < first}))

    def note_graph(self, num_tokens: int) -> None:
        """Record that a graph computes the step, and copy what the next one overwrites."""
        own = {layer: array[:num_tokens].copy() for layer, array in self._of_graphs.items()}
        self._last = own | self._stages.received_features
