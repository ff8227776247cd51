"""Runs the steps of a pipelined model; this process computes the last stage.

`launch` announces a step to the other stages. If they are linked (`engine.distributed.links`), this
stage launches it, too, and its device waits for the activations; ids sampled stay on the devices.

Otherwise this stage computes its layers and samples when the step is read, or when one of its
requests must release its row. This keeps several steps in flight, for different requests; every
stage computes them in launch order. On CUDA, `read` launches one more step before it waits, if the
step's activations have arrived: the device computes it while the host commits and schedules.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from engine.cache.swap import move_blocks
from engine.distributed.links import LastIds
from engine.errors import RankError, StepTimeoutError
from engine.layers.sampler import SamplingBatch
from engine.request import Request
from engine.runner.batch import StepInputs, build_inputs
from engine.runner.features import StageFeatureTap
from engine.runner.model_runner import LaunchedStep, ModelRunner, note_replayed
from engine.runner.request_rows import IntArray
from engine.runner.result import StepResult
from engine.runner.stage_graphs import StagedStep, StageGraphs
from engine.runner.transfer import DeviceToHostCopy
from engine.scheduler.output import ScheduleOutput

__all__ = ["PipelinedRunner", "make_runner"]

_FAILURE_SECONDS = 2.0  # time in which a stage reports that one of its ranks has died


class _Announced(NamedTuple):
    """A step that this stage has not computed yet."""

    step: LaunchedStep
    inputs: StepInputs | None  # None: nothing to compute, or all of it is staged
    staged: StagedStep | None  # None: no graph computes it


class PipelinedRunner(ModelRunner):
    """A `ModelRunner` for a `PipelinedModel`, with the same parameters.

    Parameters
    ----------
    max_num_batched_tokens : int
        Maximum tokens per step.
    """

    _graphs_type = StageGraphs
    _tap_type = StageFeatureTap

    def __init__(self, model: Any, *args: Any, max_num_batched_tokens: int, **options: Any) -> None:
        super().__init__(model, *args, **options)
        self._stages = model
        num_rows = len(self._table.owners)
        self.is_linked = model.link(num_rows, max_num_batched_tokens)
        # Count to wait for before the first stage may read a row's last id; see `Links.post_ids`.
        self._posted = np.zeros(num_rows, np.int64)
        # Steps announced but not yet computed by this stage; oldest first.
        self._announced: deque[_Announced] = deque()
        # Without a device of its own, a step launched early would delay the one to be read.
        self._looks_ahead = model.device.is_cuda

    def capture_graphs(
        self, max_model_len: int, max_draft_tokens: int = 0, *, progress: bool = False
    ) -> None:
        """Capture graphs in all stages at once; see `ModelRunner.capture_graphs`."""
        super().capture_graphs(max_model_len, max_draft_tokens, progress=progress)
        self._stages.wait_for_graphs()

    def launch(self, output: ScheduleOutput) -> LaunchedStep:
        """Announce `output` to the other stages; see `ModelRunner.launch`."""
        self.model.device.activate()
        if self._is_debug:
            self._check_copies(output)
        step = LaunchedStep(output)
        inputs = staged = None
        posted = 0
        if output.sequences:
            rows, starts = self._rows_and_starts(output)
            posted = int(
                self._posted[rows].max(where=self._table.last_positions[rows] >= 0, initial=0)
            )
            if self._is_debug:
                self._check_tables(output, rows, starts)
            if isinstance(self.graphs, StageGraphs) and not self._sampling.num_prompt_scored:
                staged = self.graphs.stage(output, rows, starts)
            if staged is None or not staged.is_plain:
                inputs = build_inputs(output, rows, starts, self._table, self._block_size)
        if staged is not None:
            self._stages.announce_graph(output, staged, posted)
        elif inputs is None:
            self._stages.announce(output, None)
        else:
            last_ids = LastIds(posted, inputs.last_id_tokens, inputs.last_id_rows)
            self._stages.announce(output, inputs.batch, last_ids)
        self._announced.append(_Announced(step, inputs, staged))
        if self.is_linked:
            self._compute_oldest()
            if output.sequences and step.tokens is None:
                # Once a step has been read, a later one uses its slot: it must have ended.
                step.ended = DeviceToHostCopy(self.model.device, {})
        return step

    def read(self, step: LaunchedStep, timeout: float | None = None) -> StepResult:
        """Compute this stage for all steps up to `step`; see `ModelRunner.read`.

        Raises
        ------
        RankError
            If a rank or another stage has failed; with links, also if the step does not end in
            `collective_timeout` seconds.
        """
        if self.is_linked:
            return self._read_linked(step, timeout)
        while any(other.step is step for other in self._announced):
            self._compute_oldest()
        if self._looks_ahead and self._announced and self._stages.has_activations:
            self._compute_oldest()
        return super().read(step, timeout)

    def _read_linked(self, step: LaunchedStep, timeout: float | None) -> StepResult:
        group = self._stages.group
        limit = group.timeout if timeout is None else min(group.timeout, timeout)
        try:
            if step.ended is not None:
                step.ended.wait(limit)
            result = super().read(step, limit)
        except StepTimeoutError as error:
            if limit < group.timeout:
                raise
            doing = f"a step did not end within {group.timeout:g} s{group.describe()}"
            raise group.fail(doing) from error
        if result.failed and not result.token_ids and self._stages.num_ranks > 1:
            # If a rank of another stage has died, all logits are NaN; its stage will report it.
            group.find_failure(_FAILURE_SECONDS)
        return result

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
            for other in self._announced
            for sequence in other.step.output.sequences
        )

    def _compute_oldest(self) -> None:
        step, inputs, staged = self._announced[0]
        self.model.device.activate()
        # `release` is also called outside a step.
        with self._stages.together(), self._stages.kernels.active():
            move_blocks(self.kv_cache, self._swap, step.output)
            if staged is not None:
                assert isinstance(self.graphs, StageGraphs)
                entering = self._stages.entering(staged.num_tokens, staged.key.num_tokens)
                tokens = self.graphs.launch_staged(staged, entering)
                if tokens is not None:
                    note_replayed(step, tokens)
                    self.features.report_graph(step.output)
                    self._note_ids(staged.rows, staged.positions)
            if inputs is not None:
                self._compute(step, inputs)
                # The host knows all ids that sampling needs; the next step may be a graph.
                self.sample(step)
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
        self._note_ids(inputs.sampled_rows, self._table.last_positions[inputs.sampled_rows])

    def _note_ids(self, rows: IntArray, positions: IntArray) -> None:
        """Send the ids just sampled for these rows (B,) to the first stage, if it is linked.

        `positions` (B,): of the ids in their sequences; -1: the host sends the next step's.
        """
        if self.is_linked:
            self._posted[rows] = self._stages.links.post_ids(self._table.last_ids)
        self._table.last_positions[rows] = positions if self.is_linked else -1


def make_runner(model: Any, *args: Any, max_num_batched_tokens: int, **options: Any) -> ModelRunner:
    """Return a runner for the whole model, or for its last pipeline stage."""
    if model.num_stages == 1:
        return ModelRunner(model, *args, **options)
    return PipelinedRunner(model, *args, max_num_batched_tokens=max_num_batched_tokens, **options)
