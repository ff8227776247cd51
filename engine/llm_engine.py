"""The engine: requests in, steps, outputs out. Start reading at `LLMEngine.step`."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from engine.cache.kv_cache import KVCache
from engine.cache.memory_pool import MemoryPool
from engine.cache.swap import SwapSpace
from engine.checks import request_ids_of, shown_with_type
from engine.core.adapters import AdapterRegistry
from engine.core.input_processor import InputProcessor, Prompt, PromptInput
from engine.core.locks import not_reentrant
from engine.core.output_processor import OutputGroup
from engine.core.output_streams import OutputStreams
from engine.core.preemption_costs import with_measured_costs
from engine.core.recovery import StepRecovery
from engine.core.resolve import ResolvedConfig, resolve
from engine.core.stats import EngineStats, StatsCollector
from engine.core.watchdog import Watchdog
from engine.engine_config import CONFIG_OPTIONS, EngineConfig
from engine.errors import ConfigError, EngineError, RequestError, WeightsError
from engine.kernels._override.scope import current_overrides, forbid_override
from engine.loading.lora import LoraAdapter
from engine.loading.parked_decoder import check_level
from engine.lora_request import LoRARequest
from engine.model import LOAD_OPTIONS, Model
from engine.outputs import RequestOutput
from engine.parallel.make_engine import make_engine
from engine.request import Request, RequestStatus
from engine.runner.model_runner import LaunchedStep
from engine.runner.pipelined_runner import make_runner
from engine.runner.result import StepResult
from engine.sampling_params import SamplingParams
from engine.scheduler.admission import QueueFullError
from engine.scheduler.output import ScheduleOutput
from engine.scheduler.scheduler import Scheduler
from engine.signatures import takes_keywords
from engine.speculative import make_speculation
from engine.speculative.draft_loading import load_draft

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from engine.options import EngineOptions, LLMOptions

__all__ = ["LLMEngine", "Prompt", "QueueFullError"]


class LLMEngine:
    """Serves many requests with continuous batching, one step at a time.

    It belongs to one thread at a time: a call during another call raises a `RequestError`.

    Parameters
    ----------
    model : Model
        Loaded by `engine.load`; `LLMEngine.from_name` loads it itself.
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

    @takes_keywords(CONFIG_OPTIONS.values())
    def __init__(self, model: Model, **options: Unpack[EngineOptions]) -> None:
        given = EngineConfig.from_options(options)
        self.model = model
        self.tokenizer = model.tokenizer if model.has_tokenizer else None
        draft = load_draft(given.speculative_config, model)
        config = resolve(given, model, draft)
        limits = config.scheduler
        self._inputs = InputProcessor(
            model,
            self.tokenizer,
            max_model_len=limits.max_model_len,
            seed=config.seed,
            logits_processors=given.logits_processors,
        )
        config = config.with_reason("kv_scales", model.prepare_pages(config.geometry.dtype))
        self._pool = MemoryPool(model.device)
        self._has_draft = draft is not None
        self.is_sleeping = False
        self._allocate(config)
        model.share_pages(self.kv_cache, self._swap)
        with model.kernels.active():
            self.config = config = with_measured_costs(config, model, self.kv_cache, self._swap)
        self.scheduler = Scheduler(config.scheduler)
        self.runner = make_runner(
            model,
            self.kv_cache,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            swap=self._swap,
            is_debug=config.is_debug,
            feature_layers=() if draft is None else draft.feature_layers,
        )
        with model.kernels.loading():
            self._capture()
            self.speculation = make_speculation(
                config.speculative,
                self.scheduler,
                self.runner,
                draft,
                overlaps=config.async_scheduling,
                is_pipelined=model.num_stages > 1,
            )
            self._overrides = current_overrides()  # of the last step
        self._adapters = AdapterRegistry(model.read_adapter)
        for name, path in given.lora_modules.items():
            self._adapters.get(LoRARequest(name, lora_path=path))
        self._entry = threading.Lock()  # see `not_reentrant`
        self._reading = threading.Lock()  # held to read an adapter, and to fall asleep
        describe = self.scheduler.describe  # capturing `self` in the watchdog would create a cycle
        self.watchdog = Watchdog(
            given.step_timeout,
            lambda: describe() + model.describe_ranks(),
            raises=given.raise_on_timeout,
        )
        self._recovery = StepRecovery(self.scheduler, self.runner, is_debug=config.is_debug)
        self._in_flight: deque[LaunchedStep] = deque()  # launched but not read back; oldest first
        # Steps in flight between two `step` calls: one with async scheduling, plus one per
        # additional pipeline stage.
        self._max_in_flight = int(config.async_scheduling) + model.num_stages - 1
        # Whether a pipeline launches a request's next step before its last one has been read. Not
        # with drafts: they are proposed after tokens that the host knows.
        has_drafts = config.speculative is not None
        is_async = config.async_scheduling
        self._chains_steps = is_async and self.runner.is_linked and not has_drafts
        runs = model.kernels.runs  # a closed model is still counted
        self.collector = StatsCollector(
            model.expert_load, model.expert_runs, kernel_runs=lambda: dict(runs)
        )
        self._streams = OutputStreams(
            self.tokenizer,
            scheduler=self.scheduler,
            runner=self.runner,
            recovery=self._recovery,
            speculation=self.speculation,
            stats=self.collector,
        )

    @classmethod
    @takes_keywords(LOAD_OPTIONS.values(), CONFIG_OPTIONS.values())
    def from_name(cls, model: str = "smollm2", **options: Unpack[LLMOptions]) -> LLMEngine:
        """Load `model` and build its engine; accepts the keywords of `load` and `EngineConfig`."""
        return make_engine(cls, model, dict(options))

    @not_reentrant
    def step(self) -> list[RequestOutput]:
        """Compute one step and return the outputs of requests that changed.

        There is one output per request that got tokens, failed or was aborted since the last step.
        With `async_scheduling`, the tokens are those of the previous step.

        Raises
        ------
        StepTimeoutError
            With `raise_on_timeout`, if the step is stuck. It is rolled back and recomputed later.
        """
        self._streams.abort_overdue()
        with self.watchdog, self.model.kernels.active():
            self._follow_overrides()
            try:
                not_due = self._propose()
                scheduled = self._schedule(not_due)
                self._launch(scheduled)
                self._commit(self._due(scheduled))
                self._sample()
            finally:
                self._streams.publish(is_last=True)
            self._capture_missed()
        return self._streams.take()

    # ---- adding and ending requests

    def encode(self, prompt: Prompt) -> PromptInput:
        """Return a prompt's text (None for token ids), validated ids and salt.

        Raises
        ------
        RequestError
            If `prompt` is not a valid prompt, or contains an id outside the vocabulary.
        """
        return self._inputs.encode(prompt)

    def prepare(self, params: SamplingParams) -> None:
        """Compile the grammar of `params` ahead of `add_request`; callable from any thread.

        Raises
        ------
        RequestError
            If the grammar does not compile.
        """
        self._inputs.grammar(params)

    @not_reentrant
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
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Queue a request.

        Parameters
        ----------
        request_id : str
            Unique among unfinished requests.
        prompt : str, sequence of int, or mapping
            Text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}, optionally with a
            "cache_salt".
        params : SamplingParams, optional
        priority : int
            Smaller values are served first.
        cache_salt : str, optional
            Cached prefixes are shared only among requests with the same salt.
        timeout : float, optional
            Seconds after which the request ends with finish_reason "abort", stop_reason "timeout".
        parent : str, optional
            An unfinished request whose tokens are a prefix of this prompt (tree search, beam
            search). Its computed blocks of that prefix are shared, even a partial last one.
        resumed : sequence of (sequence of int or None), optional
            For a request moved from another engine: the tokens each continuation generated there,
            or None for a continuation that has ended, which no output holds. The tokens'
            log-probabilities are not known: `cumulative_logprob`, by which `best_of` ranks, covers
            only the tokens generated here.
        lora_request : LoRARequest, optional
            The adapter to apply; its files are read on first use.

        Raises
        ------
        QueueFullError
            If the queue is full (a subclass of RequestError); try again later.
        RequestError
            If the request cannot be served. Nothing is queued, and other requests are unaffected.
        """
        params = SamplingParams() if params is None else params
        self._check_awake("the request cannot be served")
        if self.kv_cache.is_closed:
            raise RequestError("the request cannot be served: the engine was closed")
        if self.model.classifier is not None:
            raise RequestError(
                "the request cannot be served: the model classifies texts and generates none; "
                "use classify or score"
            )
        checked = self._inputs.encode(prompt, cache_salt)
        priority, timeout = self._inputs.check(request_id, params, priority, timeout)
        if request_id in self._streams.groups:
            raise RequestError(f"request id {request_id[:80]!r} is in use")
        if resumed is not None:
            resumed = self._inputs.check_resumed(resumed)
        adapter = self._adapters.get(lora_request)
        specs = self._inputs.sampling_specs(params)
        arrived = time.monotonic()
        requests = self._inputs.requests(
            request_id, checked.token_ids, specs, arrived, priority, checked.cache_salt, adapter
        )
        group = OutputGroup(request_id, checked.text, params, arrived, self.tokenizer)
        requests = group.open(requests, self._streams.texts, resumed)
        self._queue(requests, parent, is_resumed=resumed is not None)
        self._streams.add(group, timeout)

    @not_reentrant
    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Abort these requests, whatever their state; unknown and finished ids are ignored.

        The next step returns their output so far, with finish_reason "abort".
        """
        for request_id in request_ids_of(request_ids):
            if (group := self._streams.groups.get(request_id)) is not None:
                self._streams.abort(group)

    @not_reentrant
    def end_continuation(self, request_id: str, index: int, reason: str) -> None:
        """End one continuation because of its text, which another process decodes.

        Raises
        ------
        RequestError
            If the request has no continuation of this index.
        """
        if (group := self._streams.groups.get(request_id)) is not None:
            if not 0 <= index < len(group.streams):
                raise RequestError(f"index must be in [0, {len(group.streams)}); got {index}")
            self._streams.end(group.streams[index], reason)

    @not_reentrant
    def forget_aborted(self, request_ids: Iterable[str]) -> None:
        """Drop the final outputs of requests aborted since the last step."""
        self._streams.discard_outputs(set(request_ids_of(request_ids)))

    def has_unfinished_requests(self) -> bool:
        """Tell whether another `step` would have anything to compute or report."""
        return bool(self._in_flight) or not self._streams.is_empty

    def is_unfinished(self, request_id: str) -> bool:
        """Tell whether this request is waiting or running."""
        return request_id in self._streams.groups

    @property
    def num_unfinished_requests(self) -> int:
        """Number of waiting or running requests."""
        return len(self._streams.groups)

    # ---- the whole engine

    @not_reentrant
    def reset_prefix_cache(self) -> int:
        """Drop all cached prefixes, for example after the weights have changed.

        Unfinished requests keep their blocks and continue, but nothing of them is shared with
        later requests. Prefixes in host memory, snapshots of recurrent states and the pages of
        drafts go with their blocks.

        Returns
        -------
        int
            Number of blocks freed, on device and host.
        """
        return self.scheduler.reset_prefix_cache()

    @not_reentrant
    def add_lora(
        self,
        lora_request: LoRARequest,
        *,
        load_inplace: bool = False,
        adapter: LoraAdapter | None = None,
    ) -> None:
        """Hold an adapter, so that requests may name it without a path.

        Parameters
        ----------
        lora_request : LoRARequest
        load_inplace : bool
            Replace an adapter of the same name; running requests keep the old one.
        adapter : LoraAdapter, optional
            Result of `read_lora`; by default the files are read now, between two steps.

        Raises
        ------
        RequestError
            If it cannot be read or does not fit the model, or its name is another adapter's.
        EngineError
            If files must be read, but the engine is asleep.
        """
        if not load_inplace:
            self._adapters.check(lora_request)
            if lora_request.lora_name in self._adapters.names:
                return
        adapter = self.read_lora(lora_request) if adapter is None else adapter
        self._adapters.hold(lora_request, adapter)

    def read_lora(self, lora_request: LoRARequest) -> LoraAdapter:
        """Read an adapter's files to host memory, for `add_lora`; callable from any thread.

        Raises
        ------
        RequestError
            If it cannot be read or does not fit the model.
        EngineError
            If the engine is asleep: the adapter cannot be compared with the model's weights.
        """
        with self._reading:
            self._check_awake("the adapter cannot be read")
            return self._adapters.read(lora_request)

    @not_reentrant
    def remove_lora(self, lora_name: str) -> None:
        """Forget an adapter; requests that use it end with it.

        Raises
        ------
        RequestError
            If the engine holds none of this name.
        """
        self._adapters.remove(lora_name)

    @not_reentrant
    def update_weights(self, source: str | PathLike[str] | Mapping[str, Any]) -> tuple[str, ...]:
        """Write new weights over the model's; steps in flight end with the old ones.

        Cached prefixes are dropped. Unfinished requests go on with the keys and values that the old
        weights have computed; what they compute is shared with no later request.

        Parameters
        ----------
        source : str or path, or mapping of str to array
            See `Model.update_weights`.

        Returns
        -------
        tuple of str
            Names of the weights that have changed.

        Raises
        ------
        RequestError
            If they do not fit the model, or it has pipeline stages; then nothing changes.
        EngineError
            If writing fails: some weights may be new. Cached prefixes are dropped then, too.
        """
        if self.model.num_stages > 1:
            raise RequestError(
                "update_weights needs one pipeline stage: others hold weights too; got "
                f"pipeline_parallel_size={self.model.num_stages}"
            )
        try:
            names = self.model.update_weights(source)
        except (ConfigError, WeightsError) as error:
            raise RequestError(str(error)) from error
        except BaseException:
            self.scheduler.reset_prefix_cache()  # some weights may be new
            raise
        self.scheduler.reset_prefix_cache()
        return names

    def list_loras(self) -> tuple[str, ...]:
        """Return the names of the adapters that the engine holds."""
        return self._adapters.names

    @not_reentrant
    def sleep(self, level: int = 1) -> None:
        """Free the device memory of weights, adapters and KV cache; if asleep, do nothing.

        Cached prefixes are dropped. Options, counters, compiled kernels, and the adapters that the
        engine holds on the host stay. `wake_up` ends the sleep.

        Parameters
        ----------
        level : int
            1 copies the weights to host memory; 2 drops them, and `wake_up` reads the checkpoint
            again.

        Raises
        ------
        RequestError
            If a request is unfinished, or the engine was closed.
        ConfigError
            If the model has several ranks or stages, or drafts with weights of their own, or
            `level` is neither 1 nor 2.
        """
        check_level(level)
        if self.is_sleeping:
            return
        if self.kv_cache.is_closed:
            raise RequestError("the engine cannot sleep: it was closed")
        if self._streams.is_empty:
            with self.watchdog, self.model.kernels.active():
                self._commit(list(self._in_flight))  # steps of requests that have ended
                self._streams.publish(is_last=True)
        if self.has_unfinished_requests():
            count = self.num_unfinished_requests
            raise RequestError(f"sleep needs an engine without unfinished requests; got {count}")
        if self._has_draft:
            raise ConfigError("sleep needs an engine without a draft model or draft heads; got one")
        with self._reading:  # a read refers to the weights
            self.model.sleep(level)
            self.scheduler.reset_prefix_cache()
            self._release()
            self.model.free_cached_memory()  # the graphs' inputs
            self.is_sleeping = True
        self._level = level

    @not_reentrant
    def wake_up(self) -> None:
        """Allocate all that `sleep` has freed, and capture the graphs; if awake, do nothing.

        Raises
        ------
        OutOfMemoryError, WeightsError
            If the device has no room, or the checkpoint cannot be read; the engine sleeps on.
        """
        if not self.is_sleeping:
            return
        self.model.wake_up()
        try:
            self._allocate(self.config)
            self.runner.attach(self.kv_cache, self._swap)
            with self.model.kernels.loading():
                self._capture()
        except BaseException:
            self._release()
            self.model.sleep(self._level)
            raise
        self.is_sleeping = False

    def stats(self) -> EngineStats:
        """Return the counters since construction; for an MoE model, synchronizes the device."""
        return self.collector.snapshot(
            self.scheduler.stats(),
            num_step_failures=self._recovery.num_failures,
            num_stuck_steps=self.watchdog.num_stuck,
            speculation=self.speculation.stats(),
        )

    def check_integrity(self) -> None:
        """Verify the invariants of scheduler, blocks and rows, and that their requests match.

        Raises
        ------
        EngineError
            If an invariant is violated; the message names it.
        """
        self.scheduler.check_integrity()
        self.runner.check_integrity()
        self._streams.check_integrity()

    @not_reentrant
    def close(self) -> None:
        """Abort all requests and free the memory; a second call does nothing."""
        if self.kv_cache.is_closed and not self.is_sleeping:
            return
        self.is_sleeping = False
        self._streams.close()
        while self._in_flight:
            step = self._in_flight.pop()
            self.scheduler.rollback(step.output)
            with contextlib.suppress(Exception):  # its result is dropped
                self.runner.read(step)
        self.watchdog.close()
        self.speculation.close()
        self._release()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- memory

    def _allocate(self, config: ResolvedConfig) -> None:
        """Allocate the KV cache, and its blocks on the host."""
        limits = config.scheduler
        self._swap: SwapSpace | None = None
        self.kv_cache = KVCache(
            config.geometry, limits.num_blocks, self._pool, num_slots=limits.num_state_slots
        )
        if limits.num_host_blocks:
            self._swap = SwapSpace(
                self.kv_cache, limits.num_host_blocks, num_slots=limits.num_host_state_slots
            )

    def _release(self) -> None:
        """Free the KV cache, its blocks on the host and the graphs."""
        self.runner.detach()
        if self._swap is not None:
            self._swap.close()
            self._swap = None
        self.kv_cache.close()

    def _capture(self) -> None:
        """Capture the CUDA graphs, if they are wanted."""
        if self.config.cuda_graphs:
            limits = self.config.scheduler
            self.runner.capture_graphs(
                limits.max_model_len, limits.max_draft_tokens, progress=sys.stderr.isatty()
            )

    def _capture_missed(self) -> None:
        """Capture the graphs that steps with LoRA adapters have missed, once no request runs."""
        if self.runner.graphs is not None and not self.num_unfinished_requests:
            self.runner.graphs.capture_missed()

    # ---- parts of add_request

    def _check_awake(self, consequence: str) -> None:
        if self.is_sleeping:
            raise EngineError(f"{consequence}: the engine is asleep, wake it up first")

    def _queue(self, requests: Sequence[Request], parent: str | None, *, is_resumed: bool) -> None:
        """Add a request's continuations to the scheduler, or fork a single one from `parent`."""
        first, *others = requests
        try:
            if parent is None:
                self.scheduler.add_request(first, others, is_resumed=is_resumed)
                return
            origin = self._streams.groups.get(parent) if isinstance(parent, str) else None
            if origin is None or others or len(origin.streams) > 1:
                raise RequestError(
                    "parent must be an unfinished request, and neither may have n > 1; "
                    f"got {shown_with_type(parent)}"
                )
            source = origin.streams[0].request
            self.scheduler.fork_request(source, first, is_resumed=is_resumed)
            if first.status is RequestStatus.RUNNING:  # no step admits it
                first.stream.group.note_scheduled()
        except QueueFullError:
            self.collector.admission_rejections += 1
            raise

    # ---- parts of step, in order

    def _follow_overrides(self) -> None:
        """Drop the cached prefixes if other kernels have computed them (`kernels.override`)."""
        forbid_override(self.model.num_ranks * self.model.num_stages)
        overrides = current_overrides()
        if overrides != self._overrides:
            self._overrides = overrides
            self.scheduler.reset_prefix_cache()

    def _propose(self) -> set[Request]:
        """Propose drafts for the next step, once the tokens before them are known.

        Returns the requests that a pipeline leaves out of that step.
        """
        if self.speculation.is_active:
            self._commit(list(self._in_flight))
        not_due = set[Request]()
        if self.model.num_stages > 1:
            chains = self._chains_steps
            num_groups = self.model.num_stages if chains else self._max_in_flight + 1
            not_due = self.scheduler.requests_not_due(num_groups, chains_steps=chains)
        self.speculation.propose(not_due)
        return not_due

    def _schedule(self, not_due: set[Request]) -> ScheduleOutput:
        """Schedule the next step, without `not_due`; empty if there is nothing to compute."""
        for excluded in self._recovery.excluded():
            scheduled = self.scheduler.schedule(excluded | not_due)
            self.runner.release([*scheduled.preempted, *scheduled.restarted])
            if not scheduled.is_empty:
                break
        for request in scheduled.admitted:
            request.stream.group.note_scheduled()
        return scheduled

    def _launch(self, scheduled: ScheduleOutput) -> None:
        """Launch a step; meanwhile the proposer reads the prompts it admitted."""
        if not scheduled.is_empty:
            try:
                self._in_flight.append(self.runner.launch(scheduled))
            except BaseException as error:
                self._recover(error, scheduled)
        self.speculation.read_ahead(scheduled.admitted)

    def _due(self, scheduled: ScheduleOutput) -> list[LaunchedStep]:
        """Return the steps to read back now: all but the newest `_max_in_flight`.

        During fault bisection, return all of them.
        """
        count = len(self._in_flight)
        keep = 0 if self._recovery.is_bisecting else self._max_in_flight
        if scheduled.is_empty:  # nothing can be scheduled until the oldest step's tokens are known
            keep = min(keep, count - 1)
        return list(self._in_flight)[: max(0, count - keep)]

    def _read_back(self, step: LaunchedStep) -> StepResult | None:
        """Wait for a step and return its result; None if an error rolled it back."""
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
        """Sample the steps in flight that were waiting for the tokens just committed."""
        try:
            for step in self._in_flight:
                self.runner.sample(step)
        except BaseException as error:
            self._recover(error)

    def _commit(self, steps: Iterable[LaunchedStep]) -> None:
        """Read back steps and commit their tokens to the requests."""
        for step in steps:
            if (result := self._read_back(step)) is None:
                continue
            self._streams.publish(is_last=False)
            self.speculation.record(step.output, result.token_ids)
            ended = self._streams.commit(step.output, result)
            self.runner.release(ended)  # the next step needs their rows
            self._recovery.record_success(step.output)

    def _recover(self, error: BaseException, unlaunched: ScheduleOutput | None = None) -> None:
        """Roll back `unlaunched`, or else all steps in flight, the oldest of which raised `error`.

        A fatal error is re-raised.
        """
        outputs = [unlaunched] if unlaunched else [s.output for s in reversed(self._in_flight)]
        if unlaunched is None:
            self._recovery.abandon(self._in_flight)
            self._in_flight.clear()
        if (faulty := self._recovery.undo(outputs, error)) is not None:
            request, why = faulty
            self._streams.end(request.stream, "error", why)
