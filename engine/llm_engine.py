"""The engine: requests in, steps, outputs. Start reading at `LLMEngine.step`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from engine.cache.kv_cache import KVCache
from engine.cache.memory_pool import MemoryPool
from engine.cache.swap import SwapSpace
from engine.calibration import with_measured_costs
from engine.deadlines import Deadlines
from engine.engine_config import EngineConfig
from engine.errors import RequestError
from engine.input_processor import InputProcessor, Prompt, PromptInput
from engine.model import Model, load
from engine.output_processor import End, OutputGroup, OutputStream, token_texts
from engine.outputs import RequestOutput
from engine.request import FINISH_REASONS, Request, RequestStatus
from engine.runner.model_runner import ModelRunner
from engine.runner.result import StepResult
from engine.runner.sampling import SamplingSpec
from engine.sampling_params import SamplingParams
from engine.scheduler.admission import QueueFullError
from engine.scheduler.output import ScheduleOutput
from engine.scheduler.scheduler import Scheduler
from engine.stats import EngineStats, StatsCollector
from engine.step_loop import StepLoop
from engine.watchdog import Watchdog

__all__ = ["LLMEngine", "Prompt", "QueueFullError"]

_RUNNING = RequestStatus.RUNNING
_Changed = dict[OutputGroup, RequestOutput | None]  # None: the output is still to be made


class LLMEngine:
    """Serves many requests at once, a step at a time.

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
        config = given.resolve(
            model.config, model.device, model.dtype, model.max_model_len, model.weight_bytes
        )
        limits = config.scheduler
        self._inputs = InputProcessor(
            model, self.tokenizer, max_model_len=limits.max_model_len, seed=config.seed
        )
        self._texts = token_texts(self.tokenizer)
        self._pool = MemoryPool(model.device)
        self.kv_cache = KVCache(config.geometry, limits.num_blocks, self._pool)
        self._swap = (
            SwapSpace(self.kv_cache, limits.num_host_blocks) if limits.num_host_blocks else None
        )
        self.config = config = with_measured_costs(config, model, self.kv_cache, self._swap)
        self.scheduler = Scheduler(config.scheduler)
        self.runner = ModelRunner(
            model,
            self.kv_cache,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            swap=self._swap,
            is_debug=config.is_debug,
        )
        if config.cuda_graphs:
            self.runner.capture_graphs(limits.max_model_len, progress=sys.stderr.isatty())
        self._watchdog = Watchdog(given.step_timeout, self._describe, raises=given.raise_on_timeout)
        self._loop = StepLoop(
            self.scheduler,
            self.runner,
            self._watchdog,
            depth=int(config.is_late),
            is_debug=config.is_debug,
            on_schedule=self._note_start,
        )
        self._groups: dict[str, OutputGroup] = {}  # unfinished, by the user's id
        self._streams: dict[Request, OutputStream] = {}  # of these
        self._ended: _Changed = {}  # by abort or timeout, not reported yet
        self._deadlines = Deadlines()
        self._stats = StatsCollector()

    @classmethod
    def from_name(cls, model: str = "smollm2", **options: Any) -> LLMEngine:
        """Load `model` and build an engine around it; takes the keywords of both."""
        names = ("device", "dtype", "load_format", "deterministic", "progress", "config")
        loading = {name: options.pop(name) for name in names if name in options}
        EngineConfig.from_options(options, names)  # a mistake is said now, not after the load
        if "max_model_len" in options:
            loading["max_model_len"] = options["max_model_len"]
        return cls(load(model, **loading), **options)

    def step(self) -> list[RequestOutput]:
        """Compute one step and return the outputs of the requests that took part.

        Every request that got a token, failed, or was aborted since the last step has one output.
        With `async_scheduling`, tokens are those of the step before.

        Raises
        ------
        StepTimeoutError
            With `raise_on_timeout`, if the step is stuck. Nothing is lost: it is computed again.
        """
        self._end_overdue()
        results = self._loop.advance()
        changed, self._ended = self._ended, {}
        for result in results:
            self._take(result, changed, is_only=len(results) == 1)
        return [
            output or group.output()
            for group, output in changed.items()
            if output is not None or group.wants_output
        ]

    # ---- requests come and go

    def encode(self, prompt: Prompt) -> PromptInput:
        """Return the text, if there is one, the checked ids and the salt of a prompt.

        Raises
        ------
        RequestError
            If it is no prompt, or holds an id outside the vocabulary.
        """
        return self._inputs.encode(prompt)

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
    ) -> None:
        """Queue a request.

        Parameters
        ----------
        request_id : str
            Unique among unfinished requests.
        prompt : str, sequence of int, or mapping
            Text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}, in which "cache_salt"
            may stand too.
        params : SamplingParams, optional
        priority : int
            Smaller is served earlier.
        cache_salt : str, optional
            Requests share cached prefixes only with requests of the same salt.
        timeout : float, optional
            Seconds after which the request ends with finish_reason "abort", stop_reason "timeout".
        parent : str, optional
            An unfinished request whose tokens this prompt begins with. All that it has computed
            of them is shared at once, also a block that is not full (tree search, beam search).

        Raises
        ------
        QueueFullError
            If too much waits already (a RequestError, too); try again later.
        RequestError
            If the request cannot be served; nothing is queued and the others go on.
        """
        params = SamplingParams() if params is None else params
        if self.kv_cache.is_closed:
            raise RequestError(f"request {request_id!r} cannot be served: the engine was closed")
        checked = self._inputs.encode(prompt, cache_salt)
        self._inputs.check(request_id, params, priority, timeout)
        if request_id in self._groups:
            raise RequestError(f"request id {request_id!r} is in use")
        specs, salt = self._inputs.sampling_specs(params), checked.cache_salt
        group = OutputGroup(request_id, checked.text, params, time.monotonic(), self.tokenizer)
        requests = self._inputs.requests(
            request_id, checked.token_ids, params, group.metrics.arrival_time, priority, salt
        )
        group.streams = [
            OutputStream(request, spec, group, self.tokenizer, self._texts)
            for request, spec in zip(requests, specs, strict=True)
        ]
        self._queue(requests, parent)
        self._register(group, specs, timeout)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End these requests, in whatever state; unknown and finished ones are left alone.

        The next step returns what they have so far, with finish_reason "abort".
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        for request_id in ids:
            if request_id in self._groups:
                self._end_group(self._groups[request_id], None)

    def forget_aborted(self, request_ids: Iterable[str]) -> None:
        """Do not report these requests, which were aborted since the last step."""
        ids = set(request_ids)
        self._ended = {g: None for g in self._ended if g.request_id not in ids}

    def has_unfinished_requests(self) -> bool:
        """Tell whether another step has something to do or to report."""
        return bool(self._groups or self._ended or self._loop.num_under_way)

    def is_unfinished(self, request_id: str) -> bool:
        """Tell whether this request waits or runs."""
        return request_id in self._groups

    @property
    def num_unfinished_requests(self) -> int:
        """Requests that wait or run."""
        return len(self._groups)

    # ---- the engine as a whole

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; requests under way keep what they have."""
        self.scheduler.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """Return counts and distributions since the engine was made."""
        return self._stats.snapshot(
            self.scheduler.stats(),
            num_step_failures=self._loop.num_failures,
            num_stuck_steps=self._watchdog.num_stuck,
        )

    def check_integrity(self) -> None:
        """Verify every invariant of scheduler, blocks and slots, and that nobody is forgotten.

        Raises
        ------
        EngineError
            Naming what is wrong.
        """
        self.scheduler.check_integrity()
        self.runner.check_integrity()
        known = set(self.scheduler.unfinished_requests())
        held = {request for request in self._streams if not request.is_finished}
        if known != held:
            names = sorted(request.request_id for request in known ^ held)
            raise RequestError(f"scheduler and engine disagree about the requests {names}")

    def close(self) -> None:
        """Abort everything and give the memory back; a second time does nothing."""
        if self.kv_cache.is_closed:
            return
        self.abort_request(list(self._groups))
        self._ended.clear()
        self._loop.drain()
        self._watchdog.close()
        if self._swap is not None:
            self._swap.close()
        self.kv_cache.close()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- parts of add_request

    def _queue(self, requests: Sequence[Request], parent: str | None) -> None:
        first, *others = requests
        if parent is None:
            try:
                self.scheduler.add_request(first, others)
            except QueueFullError:
                self._stats.admission_rejections += 1
                raise
            return
        origin = self._groups.get(parent)
        if origin is None or others or len(origin.streams) > 1:
            raise RequestError(
                f"parent must be an unfinished request, and neither may have n > 1; got {parent!r}"
            )
        self.scheduler.fork_request(origin.streams[0].request, first)

    def _register(
        self, group: OutputGroup, specs: Sequence[SamplingSpec], timeout: float | None
    ) -> None:
        self._groups[group.request_id] = group
        for stream, spec in zip(group.streams, specs, strict=True):
            self._streams[stream.request] = stream
            self.runner.add(stream.request, spec)
        if timeout is not None:
            self._deadlines.add(group, group.metrics.arrival_time + timeout)

    # ---- parts of step

    def _end_overdue(self) -> None:
        """End the requests whose time is up."""
        for group in self._deadlines.pop_overdue():
            self._end_group(group, "timeout")

    def _note_start(self, output: ScheduleOutput) -> None:
        for request in output.admitted:
            stream = self._streams.get(request)
            if stream is not None and stream.group.metrics.first_scheduled_time is None:
                stream.group.metrics.first_scheduled_time = time.monotonic()

    def _take(self, result: StepResult, changed: _Changed, *, is_only: bool) -> None:
        """Hand a step's results to their streams, and add the requests that have news to `changed`.

        With them comes their output, if it was made already: of a plain stream that goes on, in the
        only result there is.
        """
        streams, now = self._streams, time.monotonic()
        for request, (position, entries) in result.prompt_logprobs.items():
            if request in streams:
                streams[request].group.add_prompt_logprobs(position, entries)
        num_tokens = 0
        for request, token_ids in result.token_ids.items():
            stream = streams.get(request)
            if stream is None:
                continue  # ended while the step was under way
            num_tokens += len(token_ids)
            if stream.is_quiet:
                continue
            if stream.is_plain and is_only and request.status is _RUNNING and len(token_ids) == 1:
                output = stream.next_output(token_ids, now)
                if output is not None:
                    changed[stream.group] = output
                    continue
            stream.group.note_tokens(len(token_ids), now)
            end = stream.append(token_ids, result.logprobs.get(request, ()))
            changed[stream.group] = None
            if end is not None:
                self._end(stream, end)
        self._stats.generation_tokens += num_tokens
        for request in result.finished:
            stream = streams.get(request)
            if stream is not None:
                stream.group.note_tokens(0, now)
                changed[stream.group] = None
                self._release(stream)
        for request in result.failed:
            if request in streams:
                changed[streams[request].group] = None
                self._release(streams[request])

    def _end(self, stream: OutputStream, end: End) -> None:
        """End a continuation because of its text: that counts before what the scheduler found."""
        request = stream.request
        self.scheduler.finish_request(request, end.finish_reason, stop_reason=end.stop_reason)
        request.status = FINISH_REASONS[end.finish_reason]
        request.stop_reason = end.stop_reason
        self._release(stream)

    def _end_group(self, group: OutputGroup, stop_reason: str | None) -> None:
        """Abort what is left of a request; the next step reports it."""
        for stream in group.streams:
            if not stream.request.is_finished:
                self.scheduler.finish_request(stream.request, "abort", stop_reason=stop_reason)
                self._release(stream)
        self._ended[group] = None

    def _release(self, stream: OutputStream) -> None:
        """Forget a finished continuation; its request still has to be shown once."""
        del self._streams[stream.request]
        self._loop.forget(stream.request)
        stream.finish()
        group = stream.group
        group.num_open -= 1
        if not group.num_open:
            del self._groups[group.request_id]
            self._deadlines.discard(group)
            group.metrics.finished_time = time.monotonic()
            group.metrics.num_generation_tokens = group.num_generation_tokens
            first = stream.request
            self._stats.add_request(
                first.num_prompt_tokens, first.finish_reason or "error", group.metrics
            )

    def _describe(self) -> str:
        """Return the engine's state for the watchdog's log."""
        names = [r.request_id for r in self.scheduler.unfinished_requests()]
        return f"{self.scheduler.stats()}\n{len(names)} unfinished requests: {names[:64]}"
