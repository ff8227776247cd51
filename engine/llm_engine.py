"""The engine: requests in, steps, outputs. Start reading at `LLMEngine.step`."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from engine.cache.kv_cache import KVCache
from engine.cache.memory_pool import MemoryPool
from engine.cache.swap import SwapSpace
from engine.checks import request_ids_of, shown_with_type
from engine.core.commit import CommittedStep, commit
from engine.core.deadlines import Deadlines
from engine.core.input_processor import InputProcessor, Prompt, PromptInput
from engine.core.locks import exclusive
from engine.core.make_engine import make_engine, resolved
from engine.core.output_processor import End, OutputGroup, OutputStream, check_groups, token_texts
from engine.core.preemption_costs import with_measured_costs
from engine.core.recovery import StepRecovery
from engine.core.stats import EngineStats, StatsCollector
from engine.core.watchdog import Watchdog
from engine.engine_config import EngineConfig
from engine.errors import RankError, RequestError
from engine.model import Model
from engine.outputs import RequestOutput
from engine.request import Request, RequestStatus
from engine.runner.model_runner import LaunchedStep
from engine.runner.pipelined_runner import make_runner
from engine.runner.result import StepResult
from engine.sampling_params import SamplingParams
from engine.scheduler.admission import QueueFullError
from engine.scheduler.output import ScheduleOutput
from engine.scheduler.scheduler import Scheduler
from engine.speculative import make_speculation
from engine.speculative.draft_loading import load_draft

__all__ = ["LLMEngine", "Prompt", "QueueFullError"]

_RUNNING = RequestStatus.RUNNING


class LLMEngine:
    """Serves many requests at once with continuous batching, one step at a time.

    It belongs to one thread at a time: a call during another one raises a `RequestError`.

    Parameters
    ----------
    model : Model
        From `engine.load`; `LLMEngine.from_name` loads one.
    **options
        Fields of `EngineConfig`.

    Examples
    --------
    ::

        engine = LLMEngine.from_name("smollm2", device="cpu")
        engine.add_request("r0", "The capital of France is", SamplingParams(max_tokens=8))
        while engine.has_unfinished_requests():
            for output in engine.step():
                print(output.outputs[0].text)
    """

    def __init__(self, model: Model, **options: Any) -> None:
        given = EngineConfig.from_options(options)
        self.model = model
        self.tokenizer = model.tokenizer if model.has_tokenizer else None
        draft = load_draft(given.speculative_config, model)
        config = resolved(given, model, draft)
        limits = config.scheduler
        length = limits.max_model_len
        seed = config.seed
        self._inputs = InputProcessor(model, self.tokenizer, max_model_len=length, seed=seed)
        self._texts = token_texts(self.tokenizer)
        config = config.with_reason("kv_scales", model.prepare_pages(config.geometry.dtype))
        self._pool = MemoryPool(model.device)
        self.kv_cache = KVCache(config.geometry, limits.num_blocks, self._pool)
        self._swap = SwapSpace(self.kv_cache, n) if (n := limits.num_host_blocks) else None
        model.share_pages(self.kv_cache, limits.num_host_blocks)
        self.config = config = with_measured_costs(config, model, self.kv_cache, self._swap)
        self.scheduler = Scheduler(config.scheduler)
        self.runner = make_runner(
            model,
            self.kv_cache,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            swap=self._swap,
            is_debug=config.is_debug,
            feature_layers=() if draft is None else draft.feature_layers,
        )
        if config.cuda_graphs:
            show = sys.stderr.isatty()
            drafts = limits.max_draft_tokens
            self.runner.capture_graphs(length, drafts, progress=show)
        parts = config.speculative, self.scheduler, self.runner, draft
        self.speculation = make_speculation(*parts, overlaps=config.async_scheduling)
        self._entry = threading.Lock()  # see `exclusive`
        describe = self.scheduler.describe
        raises = given.raise_on_timeout
        doing = lambda: describe() + model.describe_ranks()  # noqa: E731
        self.watchdog = Watchdog(given.step_timeout, doing, raises=raises)
        self._recovery = StepRecovery(self.scheduler, self.runner, is_debug=config.is_debug)
        self._in_flight: deque[LaunchedStep] = deque()  # launched, not read back; oldest first
        # Steps in flight after `step`: each of several stages has one.
        self._max_in_flight = int(config.async_scheduling) + model.num_stages - 1
        self._committed: CommittedStep | None = None  # not yet in the output streams
        self._groups: dict[str, OutputGroup] = {}  # unfinished ones, by request id
        self._changed: dict[OutputGroup, RequestOutput | None] = {}  # to report; None: not made yet
        self._deadlines = Deadlines()
        self.collector = StatsCollector(model.expert_load, model.expert_runs)

    @classmethod
    def from_name(cls, model: str = "smollm2", **options: Any) -> LLMEngine:
        """Load `model` and make its engine; takes the keywords of `load` and `EngineConfig`."""
        return make_engine(cls, model, options)

    @exclusive
    def step(self) -> list[RequestOutput]:
        """Compute one step and return the outputs of the requests that changed.

        Each request that got tokens, failed, or was aborted since the last step has one output.
        With `async_scheduling`, the tokens are those of the previous step.

        Raises
        ------
        StepTimeoutError
            With `raise_on_timeout`, if the step is stuck. It is rolled back and will be recomputed.
        """
        for group in self._deadlines.pop_overdue():
            self._end_group(group, "timeout")
        with self.watchdog:
            try:
                if self.speculation.is_active:  # drafts follow the tokens in flight
                    self._commit(list(self._in_flight))
                self.speculation.propose()
                scheduled = self._schedule()
                self._launch(scheduled)
                self.speculation.read_ahead(scheduled.admitted)
                self._commit(self._due(scheduled))
                self._sample()
            finally:
                self._publish(is_last=True)
        return self._take_outputs()

    # ---- adding and ending requests

    def encode(self, prompt: Prompt) -> PromptInput:
        """Return the text, if there is one, the validated ids and the salt of a prompt.

        Raises
        ------
        RequestError
            If it is not a prompt, or has an id outside the vocabulary.
        """
        return self._inputs.encode(prompt)

    def prepare(self, params: SamplingParams) -> None:
        """Compile the grammar of `params`, so that `add_request` finds it; any thread may call it.

        Raises
        ------
        RequestError
            If it cannot be compiled.
        """
        self._inputs.grammar(params)

    @exclusive
    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout: float | None = None,
        parent: str | None = None,
        resumed: Sequence[Sequence[int] | None] | None = None,
    ) -> None:
        """Queue a request.

        Parameters
        ----------
        request_id : str
            Unique among unfinished requests.
        prompt : str, sequence of int, or mapping
            Text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}, which may also have a
            "cache_salt".
        params : SamplingParams, optional
        priority : int
            Smaller is served earlier.
        cache_salt : str, optional
            Requests share cached prefixes only with requests of the same salt.
        timeout : float, optional
            Seconds after which the request ends with finish_reason "abort", stop_reason "timeout".
        parent : str, optional
            An unfinished request whose tokens this prompt begins with. The blocks that it has
            computed of them are shared, even a partial one (tree search, beam search).
        resumed : sequence of (sequence of int or None), optional
            Each continuation's tokens from an engine that has accepted it; None: it has ended.

        Raises
        ------
        QueueFullError
            If the queue is full (also a RequestError); try again later.
        RequestError
            If the request cannot be served. Nothing is queued; other requests are not affected.
        """
        params = SamplingParams() if params is None else params
        if self.kv_cache.is_closed:
            raise RequestError("the request cannot be served: the engine was closed")
        checked = self._inputs.encode(prompt, cache_salt)
        priority, timeout = self._inputs.check(request_id, params, priority, timeout)
        if request_id in self._groups:
            raise RequestError(f"request id {request_id[:80]!r} is in use")
        specs = self._inputs.sampling_specs(params)
        salt = checked.cache_salt
        group = OutputGroup(request_id, checked.text, params, time.monotonic(), self.tokenizer)
        requests = self._inputs.requests(
            request_id, checked.token_ids, specs, group.metrics.arrival_time, priority, salt
        )
        requests = group.open(requests, self._texts, resumed)
        self._queue(requests, parent, is_resumed=resumed is not None)
        self._groups[request_id] = group
        if timeout is not None:
            self._deadlines.add(group, group.metrics.arrival_time + timeout)

    @exclusive
    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End these requests, whatever their state; unknown and finished ones are ignored.

        The next step returns their output so far, with finish_reason "abort".
        """
        for request_id in request_ids_of(request_ids):
            if request_id in self._groups:
                self._end_group(self._groups[request_id], None)

    @exclusive
    def end_continuation(self, request_id: str, index: int, reason: str) -> None:
        """End one continuation of a request because of its text, which is made elsewhere."""
        if request_id in self._groups:
            stream = self._groups[request_id].streams[index]
            if not stream.request.is_finished:
                self.scheduler.finish_request(stream.request, reason)
                self._release(stream)

    @exclusive
    def forget_aborted(self, request_ids: Iterable[str]) -> None:
        """Drop the outputs of these requests, which were aborted since the last step."""
        ids = set(request_ids_of(request_ids))
        self._changed = {g: o for g, o in self._changed.items() if g.request_id not in ids}

    def has_unfinished_requests(self) -> bool:
        """Tell whether another `step` has something to compute or to report."""
        return bool(self._groups or self._changed or self._in_flight)

    def is_unfinished(self, request_id: str) -> bool:
        """Tell whether this request is waiting or running."""
        return request_id in self._groups

    @property
    def num_unfinished_requests(self) -> int:
        """Requests that are waiting or running."""
        return len(self._groups)

    # ---- the whole engine

    @exclusive
    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes; unfinished requests keep their blocks."""
        self.scheduler.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """Return all counts since the engine was made; with experts, waits for the device."""
        return self.collector.snapshot(
            self.scheduler.stats(),
            num_step_failures=self._recovery.num_failures,
            num_stuck_steps=self.watchdog.num_stuck,
            speculation=self.speculation.stats(),
        )

    def check_integrity(self) -> None:
        """Verify all invariants of scheduler, blocks and rows, and that they agree on requests.

        Raises
        ------
        EngineError
            If one is violated; the message names it.
        """
        self.scheduler.check_integrity()
        self.runner.check_integrity()
        check_groups(self._groups.values(), self.scheduler.unfinished_requests())

    @exclusive
    def close(self) -> None:
        """Abort all requests and free the memory; a second call does nothing."""
        if self.kv_cache.is_closed:
            return
        for group in list(self._groups.values()):
            self._end_group(group, None)
        self._changed.clear()
        while self._in_flight:
            step = self._in_flight.pop()
            self.scheduler.rollback(step.output)
            with contextlib.suppress(RankError):  # nobody wants its result
                self.runner.read(step)
        self.watchdog.close()
        self.speculation.close()
        if self._swap is not None:
            self._swap.close()
        self.kv_cache.close()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- parts of add_request

    def _queue(self, requests: Sequence[Request], parent: str | None, *, is_resumed: bool) -> None:
        first, *others = requests
        if parent is None:
            try:
                self.scheduler.add_request(first, others, is_resumed=is_resumed)
            except QueueFullError:
                self.collector.admission_rejections += 1
                raise
            return
        origin = self._groups.get(parent) if isinstance(parent, str) else None
        if origin is None or others or len(origin.streams) > 1:
            raise RequestError(
                "parent must be an unfinished request, and neither may have n > 1; "
                f"got {shown_with_type(parent)}"
            )
        self.scheduler.fork_request(origin.streams[0].request, first)

    # ---- parts of step, in order

    def _schedule(self) -> ScheduleOutput:
        """Schedule the next step; empty if there is nothing to compute."""
        for excluded in self._recovery.excluded():
            if self.model.num_stages > 1:
                excluded |= self.scheduler.requests_not_due(self._max_in_flight + 1)
            scheduled = self.scheduler.schedule(excluded)
            self.runner.release(scheduled.preempted)
            if not scheduled.is_empty:
                break
        for request in scheduled.admitted:
            request.stream.group.note_scheduled()
        return scheduled

    def _launch(self, scheduled: ScheduleOutput) -> None:
        """Launch a step, which is then in flight."""
        if scheduled.is_empty:
            return
        try:
            self._in_flight.append(self.runner.launch(scheduled))
        except BaseException as error:
            self._recover(error, scheduled)

    def _due(self, scheduled: ScheduleOutput) -> list[LaunchedStep]:
        """Return the steps to read back now: all in flight, or all but the newest ones."""
        count = len(self._in_flight)
        keep = 0 if self._recovery.is_bisecting else self._max_in_flight
        if scheduled.is_empty:  # until the tokens of the oldest are known
            keep = min(keep, count - 1)
        return list(self._in_flight)[: max(0, count - keep)]

    def _read_back(self, step: LaunchedStep) -> StepResult | None:
        """Wait for a step that is due; None: it was rolled back, as it or an earlier one failed."""
        if step not in self._in_flight:
            return None
        try:
            self.watchdog.check()
            result = self.runner.read(step, self.watchdog.remaining())
        except BaseException as error:
            self._recover(error)
            return None
        self._in_flight.popleft()
        return result

    def _sample(self) -> None:
        """Sample the step in flight, if that had to wait until the step before was committed."""
        try:
            for step in self._in_flight:
                self.runner.sample(step)
        except BaseException as error:
            self._recover(error)

    def _commit(self, steps: Iterable[LaunchedStep]) -> None:
        """Read back steps, and commit their tokens to the requests."""
        for step in steps:
            if (result := self._read_back(step)) is None:
                continue
            self._publish(is_last=False)
            self.speculation.record(step.output, result.token_ids)
            self._committed = commit(self.scheduler, step.output, result)
            self.runner.release(self._committed.ended)  # the next step needs their rows
            self._recovery.record_success(step.output)

    def _take_outputs(self) -> list[RequestOutput]:
        """Return the outputs of the requests that changed."""
        changed = self._changed
        self._changed = {}
        return [o or g.output() for g, o in changed.items() if o is not None or g.wants_output]

    # ---- parts of the above

    def _recover(self, error: BaseException, unlaunched: ScheduleOutput | None = None) -> None:
        """Roll back `unlaunched`, or all in flight; the oldest raised `error`, again if fatal."""
        outputs = [unlaunched] if unlaunched else [s.output for s in reversed(self._in_flight)]
        if unlaunched is None:
            self._recovery.abandon(self._in_flight)
            self._in_flight.clear()
        if (faulty := self._recovery.undo(outputs, error)) is not None:
            request, why = faulty
            self.scheduler.finish_request(request, "error", stop_reason=why)
            self._release(request.stream)

    def _publish(self, *, is_last: bool) -> None:
        """Append what was committed to the streams; `is_last`: then outputs are made of them."""
        committed = self._committed
        self._committed = None
        if committed is None:
            return
        self.speculation.learn()
        self._update_streams(committed.result, committed.time, is_last=is_last)
        for stream in [r.stream for r in committed.ended if r.stream is not None]:
            self._release(stream)  # None: a stop string has ended it, and it is released

    def _update_streams(self, result: StepResult, now: float, *, is_last: bool) -> None:
        """Append a step's results to the streams of its requests; note which outputs changed."""
        changed = self._changed
        num_tokens = 0
        for request, (position, entries) in result.prompt_logprobs.items():
            if request.stream is not None:
                request.stream.group.add_prompt_logprobs(position, entries)
        for request, token_ids in result.token_ids.items():
            stream: OutputStream | None = request.stream
            if stream is None:
                continue  # it ended while the step was in flight
            num_tokens += len(token_ids)
            if stream.is_quiet:
                continue
            group = stream.group
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
                num_tokens -= self._end(stream, end)
        self.collector.generation_tokens += num_tokens

    def _end(self, stream: OutputStream, end: End) -> int:
        """End a continuation because of its text, which takes precedence over the scheduler.

        Return how many of its tokens come after that end, and are dropped.
        """
        request = stream.request
        reason = end.finish_reason
        self.scheduler.finish_request(request, reason)  # does nothing if it has finished
        num_cut = self.scheduler.correct_finish(
            request, reason, stop_reason=end.stop_reason, num_output_tokens=end.num_output_tokens
        )
        self._release(stream)
        return num_cut

    def _end_group(self, group: OutputGroup, stop_reason: str | None) -> None:
        """Abort the unfinished continuations of a request; the next step reports it."""
        for stream in group.streams:
            if not stream.request.is_finished:
                self.scheduler.finish_request(stream.request, "abort", stop_reason=stop_reason)
                self._release(stream)

    def _release(self, stream: OutputStream) -> None:
        """Release what a finished continuation holds; the next outputs report its request."""
        request = stream.request
        group = stream.group
        request.stream = None
        self._recovery.forget(request)
        self.speculation.forget(request)
        self.runner.release([request])
        if stream.is_quiet and request.finish_reason in ("stop", "length"):
            group.note_tokens(0, time.monotonic())  # records when its last token came
        end = stream.finish()
        if end is not None:
            self.scheduler.correct_finish(request, end.finish_reason, stop_reason=end.stop_reason)
        self._changed[group] = None
        group.num_open -= 1
        if not group.num_open:
            del self._groups[group.request_id]
            self._deadlines.discard(group)
            group.metrics.finished_time = time.monotonic()
            group.metrics.num_generation_tokens = group.num_generation_tokens
            self.collector.add_request(
                request.num_prompt_tokens, request.finish_reason or "error", group.metrics
            )
