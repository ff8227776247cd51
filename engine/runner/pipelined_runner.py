"""Runs the steps of a pipelined model; this process computes the last stage.

`launch` announces a step to the other stages. This stage computes its layers and samples when the
step is read, or when one of its requests must release its row. This keeps several steps in flight,
for different requests; every stage computes them in launch order.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from engine.cache.swap import move_blocks
from engine.errors import RankError
from engine.layers.sampler import SamplingBatch
from engine.request import Request
from engine.runner.batch import StepInputs, build_inputs
from engine.runner.model_runner import LaunchedStep, ModelRunner
from engine.runner.result import StepResult
from engine.scheduler.output import ScheduleOutput

__all__ = ["PipelinedRunner", "make_runner"]


class PipelinedRunner(ModelRunner):
    """A `ModelRunner` for a `PipelinedModel`, with the same parameters."""

    def __init__(self, model: Any, *args: Any, **options: Any) -> None:
        super().__init__(model, *args, **options)
        self._stages = model
        # Steps announced but not yet computed by this stage; oldest first.
        self._announced: deque[tuple[LaunchedStep, StepInputs | None]] = deque()

    def launch(self, output: ScheduleOutput) -> LaunchedStep:
        """Announce `output` to the other stages; see `ModelRunner.launch`."""
        self.model.device.activate()
        if self._is_debug:
            self._check_copies(output)
        step = LaunchedStep(output)
        inputs = None
        if output.sequences:
            rows, starts = self._rows_and_starts(output)
            if self._is_debug:
                self._check_tables(output, rows, starts)
            inputs = build_inputs(output, rows, starts, self._table, self._block_size)
        self._stages.announce(output, None if inputs is None else inputs.batch)
        self._announced.append((step, inputs))
        return step

    def read(self, step: LaunchedStep, timeout: float | None = None) -> StepResult:
        """Compute this stage for all steps up to `step`; see `ModelRunner.read`."""
        while any(other is step for other, _ in self._announced):
            self._compute_oldest()
        return super().read(step, timeout)

    def release(self, requests: Iterable[Request]) -> None:
        """Release these requests' rows, after computing the announced steps that use them."""
        requests = list(requests)
        with contextlib.suppress(RankError):  # the next step raises it as well
            while self._announced and not self._has_none_of(requests):
                self._compute_oldest()
        super().release(requests)

    def _has_none_of(self, requests: list[Request]) -> bool:
        """Tell whether no announced step contains any of these requests."""
        ids = {id(request) for request in requests if request.row >= 0}
        return not any(
            id(sequence.request) in ids
            for step, _ in self._announced
            for sequence in step.output.sequences
        )

    def _compute_oldest(self) -> None:
        step, inputs = self._announced[0]
        self.model.device.activate()
        with self._stages.together():
            move_blocks(self.kv_cache, self._swap, step.output)
            if inputs is not None:
                self._compute(step, inputs)
        self._announced.popleft()

    def _sample(
        self,
        step: LaunchedStep,
        logits: Any,
        inputs: StepInputs,
        sampling: SamplingBatch,
        on_device: Mapping[str, Any],
    ) -> None:
        super()._sample(step, logits, inputs, sampling, on_device)
        # The first stage has no `last_ids`: the host sends it the next step's ids.
        self._table.last_positions[inputs.sampled_rows] = -1


def make_runner(model: Any, *args: Any, **options: Any) -> ModelRunner:
    """Return a runner for the whole model, or for its last pipeline stage."""
    kind = ModelRunner if model.num_stages == 1 else PipelinedRunner
    return kind(model, *args, **options)
