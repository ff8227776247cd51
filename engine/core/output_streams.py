"""Builds the outputs that `LLMEngine.step` returns from the results of steps.

A step's tokens are committed to the scheduler as soon as they are read back, because scheduling
the next step needs them. They are appended to the output streams (text, stop strings,
log-probabilities) only after that step has been launched, while the device computes it. In
between they are `PendingOutputs`.
"""

from __future__ import annotations

import heapq
import itertools
import time
from typing import Any, NamedTuple

from engine.core.output_processor import End, OutputGroup, OutputStream, token_texts
from engine.core.recovery import StepRecovery
from engine.core.stats import StatsCollector
from engine.errors import EngineError
from engine.outputs import RequestOutput
from engine.request import Request, RequestStatus
from engine.runner.model_runner import ModelRunner
from engine.runner.result import StepResult
from engine.scheduler.output import ScheduleOutput
from engine.scheduler.scheduler import Scheduler
from engine.speculative.speculation import NoSpeculation, Speculation

__all__ = ["OutputStreams"]

_RUNNING = RequestStatus.RUNNING


class PendingOutputs(NamedTuple):
    """A step committed to the scheduler, but not yet appended to the output streams.

    Attributes
    ----------
    result : StepResult
    ended : tuple of Request
        Requests that finished or failed in this step.
    time : float
        Arrival time of its tokens, in seconds of the monotonic clock.
    """

    result: StepResult
    ended: tuple[Request, ...]
    time: float


class OutputStreams:
    """Output streams of all unfinished requests, and the outputs to return next.

    Parameters
    ----------
    tokenizer : Tokenizer or None
    scheduler : Scheduler
    runner, recovery, speculation : ModelRunner, StepRecovery, Speculation or NoSpeculation
        Notified when a request ends, so that they drop its state.
    stats : StatsCollector

    Attributes
    ----------
    groups : dict of str to OutputGroup
        Unfinished requests by id.
    texts : mapping of bool to TokenTexts
        Result of `token_texts`, passed to `OutputGroup.open`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        scheduler: Scheduler,
        runner: ModelRunner,
        recovery: StepRecovery,
        speculation: Speculation | NoSpeculation,
        stats: StatsCollector,
    ) -> None:
        self.groups: dict[str, OutputGroup] = {}
        self.texts = token_texts(tokenizer)
        self._scheduler = scheduler
        self._runner = runner
        self._recovery = recovery
        self._speculation = speculation
        self._stats = stats
        self._pending: PendingOutputs | None = None
        # Requests to report; None: `take` builds the output.
        self._changed: dict[OutputGroup, RequestOutput | None] = {}
        self._deadlines = _Deadlines()

    @property
    def is_empty(self) -> bool:
        """Tell whether no request is unfinished and no output is left to return."""
        return not (self.groups or self._changed)

    # ---- requests

    def add(self, group: OutputGroup, timeout: float | None) -> None:
        """Add a request the scheduler has accepted; `timeout` in seconds from its arrival."""
        self.groups[group.request_id] = group
        if timeout is not None:
            self._deadlines.add(group, group.metrics.arrival_time + timeout)
        for stream, end in group.resumed_ends:
            self._end_at_text(stream, end)

    def abort(self, group: OutputGroup, stop_reason: str | None = None) -> None:
        """Abort the unfinished continuations of a request; the next outputs report that."""
        for stream in group.streams:
            self.end(stream, "abort", stop_reason)

    def abort_overdue(self) -> None:
        """Abort requests whose timeout has passed."""
        for group in self._deadlines.pop_overdue():
            self.abort(group, "timeout")

    def end(self, stream: OutputStream, reason: str, stop_reason: str | None = None) -> None:
        """End a continuation unless the scheduler has already finished it."""
        if not stream.request.is_finished:
            self._scheduler.finish_request(stream.request, reason, stop_reason=stop_reason)
            self._release(stream)

    def discard_outputs(self, request_ids: set[str]) -> None:
        """Drop outputs of these requests that have not been returned yet."""
        self._changed = {g: o for g, o in self._changed.items() if g.request_id not in request_ids}

    def close(self) -> None:
        """Abort all requests and drop all outputs."""
        for group in list(self.groups.values()):
            self.abort(group)
        self._changed.clear()

    def check_integrity(self) -> None:
        """Verify that the open streams match the scheduler's unfinished requests.

        Raises
        ------
        EngineError
        """
        requests = [stream.request for group in self.groups.values() for stream in group.streams]
        served = {request for request in requests if request.stream is not None}
        if different := served.symmetric_difference(self._scheduler.unfinished_requests()):
            names = sorted(request.request_id for request in different)
            raise EngineError(f"scheduler and engine disagree about the requests {names}")

    # ---- steps

    def commit(self, output: ScheduleOutput, result: StepResult) -> tuple[Request, ...]:
        """Commit the oldest step to the scheduler, and keep its results until `publish`.

        If a request ends within its accepted drafts, the results after that point are dropped. One
        that fails behind accepted drafts ends with their tokens.

        Returns
        -------
        tuple of Request
            The requests that finished or failed in this step.
        """
        failed = [r for r in result.failed if not r.is_finished]
        for request in failed:
            if request not in result.token_ids:
                self._fail(request, result)
        finished = self._scheduler.commit(output, result.token_ids)
        failed = [r for r in failed if r not in finished]
        for request in failed:
            self._fail(request, result)
        if finished and output.num_draft_tokens:
            lengths = {s.request: s.num_reached_tokens for s in output.sequences}
            for request in finished:
                result.keep(request, request.num_known_tokens - lengths[request])
        self._pending = PendingOutputs(result, (*finished, *failed), time.monotonic())
        return self._pending.ended

    def _fail(self, request: Request, result: StepResult) -> None:
        """End a request that failed in a step, unless it has ended."""
        self._scheduler.finish_request(request, "error", stop_reason=result.failed[request])

    def publish(self, *, is_last: bool) -> None:
        """Append the pending results to the streams; `is_last`: `take` follows immediately."""
        pending = self._pending
        self._pending = None
        if pending is None:
            return
        self._speculation.learn()
        self._append(pending.result, pending.time, is_last=is_last)
        for request in pending.ended:
            if request.stream is not None:  # None: a stop string ended it, and it was released
                self._release(request.stream)

    def take(self) -> list[RequestOutput]:
        """Return the outputs of all requests that changed since the last call."""
        changed = self._changed
        self._changed = {}
        return [o or g.output() for g, o in changed.items() if o is not None or g.wants_output]

    def _append(self, result: StepResult, now: float, *, is_last: bool) -> None:
        """Append a step's results to its requests' streams; record which outputs changed."""
        changed = self._changed
        num_tokens = 0
        for request, (position, entries) in result.prompt_logprobs.items():
            if request.stream is not None:
                request.stream.group.add_prompt_logprobs(position, entries)
        for request, token_ids in result.token_ids.items():
            stream: OutputStream | None = request.stream
            if stream is None:
                continue  # ended while the step was in flight
            num_tokens += len(token_ids)
            if stream.is_quiet:
                continue
            group = stream.group
            if group.metrics.first_token_time is None:
                self._stats.prompt_tokens += request.num_prompt_tokens
            is_one = is_last and len(token_ids) == 1
            if is_one and stream.is_plain and request.status is _RUNNING and group not in changed:
                output = stream.next_output(token_ids, now)
                if output is not None:
                    changed[group] = output
                    continue
            group.note_tokens(len(token_ids), now)
            end = stream.append(token_ids, result.logprobs.get(request, ()))
            changed[group] = None
            if end is not None:
                num_tokens -= self._end_at_text(stream, end)
        self._stats.generation_tokens += num_tokens

    def _end_at_text(self, stream: OutputStream, end: End) -> int:
        """End a continuation where its text ends, before the end the scheduler knows.

        Returns the number of its tokens dropped because they come after that point.
        """
        request = stream.request
        reason = end.finish_reason
        self._scheduler.finish_request(request, reason)  # no effect if already finished
        num_cut = self._scheduler.correct_finish(
            request, reason, stop_reason=end.stop_reason, num_output_tokens=end.num_output_tokens
        )
        self._release(stream)
        return num_cut

    def _release(self, stream: OutputStream) -> None:
        """Release a finished continuation's state; the next outputs report its request."""
        request = stream.request
        group = stream.group
        request.stream = None
        self._recovery.forget(request)
        self._speculation.forget(request)
        self._runner.release([request])
        if stream.is_quiet and request.finish_reason in ("stop", "length"):
            group.note_tokens(0, time.monotonic())  # records the arrival of the last token
        end = stream.finish()
        if end is not None:
            self._scheduler.correct_finish(request, end.finish_reason, stop_reason=end.stop_reason)
        self._changed[group] = None
        group.num_open -= 1
        if not group.num_open:
            del self.groups[group.request_id]
            self._deadlines.discard(group)
            group.metrics.finished_time = time.monotonic()
            group.metrics.num_generation_tokens = group.num_generation_tokens
            self._stats.add_request(request.finish_reason or "error", group.metrics)


class _Deadlines:
    """Requests with a timeout, as a min-heap of deadlines."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, OutputGroup]] = []
        self._num_unfinished = 0
        self._serial = itertools.count()  # breaks ties between equal deadlines

    def add(self, group: OutputGroup, deadline: float) -> None:
        """Set the deadline of `group`, in seconds of the monotonic clock."""
        group.deadline = deadline
        self._num_unfinished += 1
        heapq.heappush(self._heap, (deadline, next(self._serial), group))

    def discard(self, group: OutputGroup) -> None:
        """Drop a finished group, with or without a deadline."""
        if group.deadline is None:
            return
        self._num_unfinished -= 1
        if len(self._heap) > 2 * self._num_unfinished + 64:  # mostly finished entries
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)

    def pop_overdue(self) -> list[OutputGroup]:
        """Remove and return unfinished groups whose deadline has passed."""
        overdue: list[OutputGroup] = []
        if not self._heap:
            return overdue
        now = time.monotonic()
        while self._heap and self._heap[0][0] <= now:
            group = heapq.heappop(self._heap)[2]
            if not group.is_finished:
                overdue.append(group)
        return overdue
