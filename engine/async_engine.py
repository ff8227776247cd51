"""`AsyncEngine`: an `LLMEngine` for asyncio; `EngineClient`: the interface of async engines."""

from __future__ import annotations

import asyncio
import itertools
import threading
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from engine.core.input_processor import Prompt, PromptInput
from engine.core.stats import EngineStats
from engine.core.token_meter import METER
from engine.engine_config import CONFIG_OPTIONS
from engine.errors import EngineError, RequestError, WeightsError, map_items
from engine.llm_engine import LLMEngine
from engine.loading.array_tensors import as_arrays
from engine.lora_request import LoRARequest
from engine.model import LOAD_OPTIONS
from engine.outputs import RequestOutput
from engine.sampling_params import RequestOutputKind, SamplingDefaults, SamplingParams
from engine.shared_engine import SharedEngine
from engine.signatures import takes_keywords
from engine.snapshot import snapshot, starts_with
from engine.tasks.embeddings import embed_in_parts
from engine.tasks.logit_lens import LogitLens, logit_lens_in_parts, num_lens_layers

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from engine.options import LLMOptions

__all__ = ["LONG_TEXT", "AsyncEngine", "EngineClient", "ModelInfo", "OutputSource"]

T = TypeVar("T")

LONG_TEXT = 4096  # characters; longer prompts are tokenized in another thread


@dataclass(frozen=True)
class ModelInfo:
    """Properties of the served model that clients need.

    Attributes
    ----------
    model : str
        Name or path it was loaded from.
    max_model_len : int
        Maximum number of tokens per request, prompt plus output.
    vocab_size : int
    eos_token_ids : tuple of int
    sampling_defaults : SamplingDefaults
        Sampling parameters of requests that leave them out.
    hidden_size : int
        Number of values of an embedding.
    num_lens_layers : int
        Number of layers that the logit lens reads; 0 if it does not support the model.
    labels : tuple of str
        Labels of the model's classification head; empty for a model that generates text.
    """

    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    hidden_size: int = 0
    num_lens_layers: int = 0
    labels: tuple[str, ...] = ()


class OutputSource(Protocol):
    """A request in progress."""

    async def next_output(self) -> RequestOutput:
        """Wait for the next output; raise the error of a failed request."""


class EngineClient(ABC):
    """Async interface to an engine in this process or another one.

    Attributes
    ----------
    model_info : ModelInfo
    tokenizer : Tokenizer or None
    """

    model_info: ModelInfo
    tokenizer: Any

    def __init__(self) -> None:
        self._request_numbers = itertools.count()

    @property
    @abstractmethod
    def error(self) -> BaseException | None:
        """The error that stopped the engine; None while it is running."""

    @property
    @abstractmethod
    def is_responsive(self) -> bool:
        """Whether the engine is alive and its current step is within `step_timeout`."""

    @property
    @abstractmethod
    def seems_asleep(self) -> bool:
        """Whether the engine slept when it was last heard of; see `is_sleeping`."""

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout: float | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate a continuation of `prompt`, and yield outputs as they arrive.

        Closing the generator, or cancelling the task that reads it, aborts the request before the
        next step. If the engine runs in another process, a reader that falls behind receives
        several tokens per output.

        Parameters
        ----------
        prompt : str, sequence of int, or mapping
            See `LLMEngine.add_request`.
        params : SamplingParams, optional
            `output_kind` selects the contents of each output. Default: the model's recommended
            sampling parameters, with delta outputs.
        request_id : str, optional
            Unique among unfinished requests.
        priority, cache_salt, timeout
            See `LLMEngine.add_request`.
        lora_request : LoRARequest, optional
            The adapter to apply. An engine in another process must hold it already (`add_lora`).

        Yields
        ------
        RequestOutput

        Raises
        ------
        RequestError
            If the request cannot be served (`QueueFullError`: try again later). An engine in
            another process also rejects `logits_processors`: functions cannot be sent.
        EngineError
            If the engine fails or is closed before the request is finished.
        """
        if params is None:
            kind = RequestOutputKind.DELTA
            params = self.model_info.sampling_defaults.params(output_kind=kind)
        if request_id is None:
            request_id = f"async-{next(self._request_numbers)}"
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        given_prompt: Prompt | PromptInput = prompt
        if isinstance(text, str) and len(text) > LONG_TEXT:
            given_prompt = await asyncio.to_thread(self._encode, prompt, cache_salt)
        if params.structured is not None:  # compiling a grammar may take a second
            await asyncio.to_thread(self._prepare, params)
        meter = METER.get()
        output = None
        request = self._start(
            request_id,
            given_prompt,
            params,
            priority=priority,
            cache_salt=cache_salt,
            timeout=timeout,
            lora_request=lora_request,
        )
        try:
            output = await request.next_output()
            self._note_first(request, output)
            yield output
            while not output.finished:
                output = await request.next_output()
                yield output
        finally:
            self.drop(request)
            if meter is not None and output is not None:
                meter.add(output)

    async def embed(
        self, prompts: Sequence[Prompt], pooling: str | None = None, *, normalize: bool = True
    ) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        """Return the embedding of each prompt; other requests keep running meanwhile.

        Parameters
        ----------
        prompts : sequence of str, of sequences of int, or of mappings
            See `LLMEngine.add_request`.
        pooling, normalize
            See `engine.tasks.embeddings.embed`.

        Returns
        -------
        list of (N,) array of float32
            On the host; N is the model's hidden size.

        Raises
        ------
        RequestError
            If an argument is invalid, or a prompt is too long.
        EngineError
            If the engine fails or is closed before all embeddings are computed.
        """
        encode = lambda prompt: self._encode(prompt).token_ids  # noqa: E731
        ids = await asyncio.to_thread(map_items, "prompts", prompts, encode)
        found = await self.embed_ids(ids, pooling, normalize=normalize)
        if (meter := METER.get()) is not None:
            meter.num_prompt_tokens += sum(map(len, ids))
        return found

    @abstractmethod
    async def embed_ids(
        self, token_ids: Sequence[Sequence[int]], pooling: str | None, *, normalize: bool
    ) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        """Embed sequences of token ids.

        Parameters
        ----------
        token_ids : sequence of sequences of int
            1 to `max_model_len` ids per sequence.
        pooling, normalize
            See `engine.tasks.embeddings.embed`.

        Returns
        -------
        list of (N,) array of float32
            One per sequence, on the host; N is the model's hidden size.

        Raises
        ------
        RequestError
            If an argument is invalid.
        EngineError
            If the engine has ended.
        """

    @abstractmethod
    async def logit_lens(
        self, token_ids: Sequence[int], num_tokens: int = 1, top: int = 5
    ) -> LogitLens:
        """Return what each layer predicts; other requests keep running meanwhile.

        Parameters
        ----------
        token_ids : sequence of int
            At least two ids.
        num_tokens : int
            Number of tokens to look at, at the end of the sequence.
        top : int
            Number of predictions per layer and token.

        Returns
        -------
        LogitLens
            Arrays on the host. See `engine.tasks.logit_lens.logit_lens`.

        Raises
        ------
        RequestError
            If an argument is invalid, or the model is not supported.
        EngineError
            If the engine has ended.
        """

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """Abort a request; its generator yields the output so far, with finish_reason "abort".

        Unknown and finished requests are ignored.
        """

    @abstractmethod
    async def stats(self) -> EngineStats:
        """Return the engine's counters and histograms."""

    @abstractmethod
    async def snapshot(self, salt_prefix: str | None = None) -> dict[str, Any]:
        """Return the engine's current state between two steps.

        With `salt_prefix`, only requests and prefixes whose cache salt starts with it are listed.
        The dict holds numbers, texts, and lists and dicts of them, never the content of a
        prompt or reply; see `engine.snapshot`. Raises EngineError if the engine has ended.
        """

    @abstractmethod
    async def reset_prefix_cache(self) -> int:
        """Drop all cached prefixes; return the number of blocks freed.

        See `LLMEngine.reset_prefix_cache`.
        """

    @property
    @abstractmethod
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that the engine holds."""

    def adapter_of(self, model: str | None) -> LoRARequest | None:
        """Return the LoRA adapter called `model`; None if that is no adapter's name."""
        return LoRARequest(model) if model and model in self.adapters else None

    @abstractmethod
    async def add_lora(self, lora_request: LoRARequest, *, load_inplace: bool = False) -> None:
        """Read an adapter's files while other requests go on, then hold it.

        With `load_inplace` it replaces one of the same name, which running requests keep. Raises
        RequestError if it cannot be read or does not fit the model.
        """

    @abstractmethod
    async def remove_lora(self, lora_name: str) -> None:
        """Forget an adapter; requests that use it end with it."""

    @abstractmethod
    async def sleep(self, level: int = 1) -> None:
        """Free the engine's device memory until `wake_up`.

        `level` 1 copies the weights to host memory, 2 drops them. Raises RequestError if a request
        is unfinished, ConfigError if the model cannot sleep. See `LLMEngine.sleep`.
        """

    @abstractmethod
    async def wake_up(self) -> None:
        """Bring the engine's device memory back.

        Raises OutOfMemoryError or WeightsError if that fails; the engine then sleeps on.
        """

    @abstractmethod
    async def is_sleeping(self) -> bool:
        """Return whether the engine sleeps."""

    @abstractmethod
    async def update_weights(self, path: str) -> tuple[str, ...]:
        """Write the weights of a folder over the model's, and drop all cached prefixes.

        Returns the names of the weights that have changed. Raises RequestError if they do not fit
        the model; then nothing changes. See `LLMEngine.update_weights`.
        """

    @abstractmethod
    async def close(self) -> None:
        """Fail all requests of this client with an `EngineError`."""

    @abstractmethod
    def _encode(self, prompt: Prompt, cache_salt: str | None = None) -> PromptInput:
        """Tokenize and validate a prompt; may run in any thread."""

    @abstractmethod
    def _prepare(self, params: SamplingParams) -> None:
        """Validate and compile the grammar of `params`; may run in any thread."""

    @abstractmethod
    def _start(
        self, request_id: str, prompt: Prompt | PromptInput, params: SamplingParams, **options: Any
    ) -> OutputSource:
        """Send a request to the engine, and return it.

        `options` are the priority, cache_salt, timeout and lora_request of `generate`.
        """

    @abstractmethod
    def drop(self, request: Any) -> None:
        """Abort a request that nobody reads any more; finished requests are ignored."""

    def _note_first(self, request: Any, output: RequestOutput) -> None:  # noqa: B027
        """Hook: called with the first output of a request before it is yielded."""


@dataclass(eq=False)
class _Stream:
    """A request, and the queue on which its task awaits outputs."""

    request_id: str
    arguments: dict[str, Any]
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[RequestOutput | BaseException]
    arrived: list[tuple[_Stream, RequestOutput]]
    is_dropped: bool = False
    is_finished: bool = False

    def append(self, output: RequestOutput) -> None:
        """Collect an output of the current step; `AsyncEngine` delivers them after the step."""
        self.arrived.append((self, output))

    async def next_output(self) -> RequestOutput:
        """Wait for the next output; raise the error of a failed request."""
        output = await self.queue.get()
        if isinstance(output, BaseException):
            self.is_finished = True
            raise output
        self.is_finished = output.finished
        return output


class AsyncEngine(EngineClient):
    """Engine in this process; requests from all asyncio tasks are batched into the same steps.

    The engine runs in its own thread, so steps and the event loop do not block each other. Tasks
    may belong to several event loops.

    Parameters
    ----------
    engine : LLMEngine
        Owned by the `AsyncEngine` from now on: do not use it directly. `AsyncEngine.from_name`
        loads one.

    Attributes
    ----------
    model_info : ModelInfo
    tokenizer : Tokenizer or None

    Examples
    --------
    ::

        engine = AsyncEngine.from_name("smollm2")
        async for output in engine.generate("The capital of France is"):
            print(output.outputs[0].text, end="", flush=True)
        await engine.close()
    """

    def __init__(self, engine: LLMEngine) -> None:
        super().__init__()
        model = engine.model
        self.tokenizer = engine.tokenizer
        self.model_info = ModelInfo(
            model.name,
            engine.config.scheduler.max_model_len,
            model.config.vocab_size,
            model.eos_token_ids,
            model.sampling_defaults,
            model.config.hidden_size,
            num_lens_layers(model),
            () if model.classifier is None else model.classifier.labels,
        )
        self._engine = engine
        self._shared: SharedEngine[_Stream] = SharedEngine(engine)
        self._arrived: list[tuple[_Stream, RequestOutput]] = []  # outputs of the current step
        self._calls: deque[Callable[[], None]] = deque()  # pending calls for the engine's thread
        self._wake = threading.Event()
        self._is_closing = False
        self._has_ended = False  # set before the thread's last pass over `_calls`
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    @takes_keywords(LOAD_OPTIONS.values(), CONFIG_OPTIONS.values())
    def from_name(cls, model: str = "smollm2", **options: Unpack[LLMOptions]) -> AsyncEngine:
        """Load `model` and serve it; `options` are those of `load` and `EngineConfig`."""
        return cls(LLMEngine.from_name(model, **options))

    @property
    def error(self) -> BaseException | None:
        """The error that stopped the engine; None while it is running."""
        return self._error

    @property
    def is_responsive(self) -> bool:
        """Whether the engine is alive and its current step is within `step_timeout`."""
        return self._error is None and not self._engine.watchdog.is_stuck

    @property
    def seems_asleep(self) -> bool:
        """Whether the engine sleeps."""
        return self._engine.is_sleeping

    async def abort(self, request_id: str) -> None:
        """Abort a request; its generator yields the output so far, with finish_reason "abort".

        Unknown and finished requests are ignored.
        """
        await self._result(lambda: self._engine.abort_request(request_id))

    async def stats(self) -> EngineStats:
        """Return the engine's counters and histograms."""
        return await self._result(self._engine.stats)

    async def snapshot(self, salt_prefix: str | None = None) -> dict[str, Any]:
        """Return the engine's current state between two steps, as JSON can hold it.

        With `salt_prefix`, only requests and prefixes whose cache salt starts with it are listed.
        Raises EngineError if the engine has ended. See `engine.snapshot`.
        """
        wants = starts_with(salt_prefix)
        return await self._result(lambda: snapshot(self._engine, self._shared.clock, wants))

    async def embed_ids(
        self, token_ids: Sequence[Sequence[int]], pooling: str | None, *, normalize: bool
    ) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        """Embed sequences of token ids: one (N,) array of float32 each, on the host.

        Raises RequestError if an argument is invalid. See `EngineClient.embed_ids`.
        """
        parts = embed_in_parts(
            self._engine.model, token_ids, pooling, normalize=normalize, has_others=True
        )
        found: dict[int, Any] = {}
        try:
            while (part := await self._result(lambda: next(parts, None))) is not None:
                found.update(part)
        finally:
            self._call(parts.close)
        return [found[index] for index in range(len(token_ids))]

    async def logit_lens(
        self, token_ids: Sequence[int], num_tokens: int = 1, top: int = 5
    ) -> LogitLens:
        """Return what each layer predicts at the last `num_tokens` tokens, as arrays on the host.

        Raises RequestError if an argument is invalid, or the model is not supported. See
        `EngineClient.logit_lens`.
        """
        parts = logit_lens_in_parts(self._engine.model, token_ids, num_tokens, top)
        lens = None
        try:
            while lens is None:
                lens = await self._result(lambda: next(parts))
        finally:
            self._call(parts.close)
        return lens

    async def reset_prefix_cache(self) -> int:
        """Drop all cached prefixes; return the number of blocks freed, on device and host."""
        return await self._result(self._engine.reset_prefix_cache)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that the engine holds."""
        return self._engine.list_loras()

    async def add_lora(self, lora_request: LoRARequest, *, load_inplace: bool = False) -> None:
        """Read an adapter's files in a thread while other requests go on, then hold it.

        With `load_inplace` it replaces one of the same name, which running requests keep. Raises
        RequestError if it cannot be read or does not fit the model.
        """
        engine = self._engine
        adapter = await asyncio.to_thread(engine.read_lora, lora_request)
        hold = partial(engine.add_lora, lora_request, load_inplace=load_inplace, adapter=adapter)
        await self._result(hold)

    async def remove_lora(self, lora_name: str) -> None:
        """Forget an adapter; requests that use it end with it."""
        await self._result(partial(self._engine.remove_lora, lora_name))

    async def sleep(self, level: int = 1) -> None:
        """Free the engine's device memory until `wake_up`.

        `level` 1 copies the weights to host memory, 2 drops them. Raises RequestError if a request
        is unfinished, ConfigError if the model cannot sleep. See `LLMEngine.sleep`.
        """
        await self._result(lambda: self._engine.sleep(level))

    async def wake_up(self) -> None:
        """Bring the engine's device memory back.

        Raises OutOfMemoryError or WeightsError if that fails; the engine then sleeps on.
        """
        await self._result(self._engine.wake_up)

    async def is_sleeping(self) -> bool:
        """Return whether the engine sleeps."""
        return await self._result(lambda: self._engine.is_sleeping)

    async def update_weights(
        self, source: str | PathLike[str] | Mapping[str, Any]
    ) -> tuple[str, ...]:
        """Write new weights over the model's, between two steps, and drop all cached prefixes.

        Parameters
        ----------
        source : str or path, or mapping of str to array
            A folder, or tensors by their names in the checkpoint. See `Model.update_weights`.

        Returns
        -------
        tuple of str
            Names of the weights that have changed.

        Raises
        ------
        RequestError
            If they do not fit the model; then nothing changes.
        """
        if isinstance(source, Mapping):
            try:
                source = as_arrays(source)  # in this thread, whose streams write them
            except WeightsError as error:
                raise RequestError(str(error)) from error
        return await self._result(partial(self._engine.update_weights, source))

    async def close(self) -> None:
        """Fail all requests with an `EngineError`, and free the engine's memory."""
        self._is_closing = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)

    # ---- requests

    def _encode(self, prompt: Prompt, cache_salt: str | None = None) -> PromptInput:
        found = self._engine.encode(prompt)
        return found if cache_salt is None else replace(found, cache_salt=cache_salt)

    def _prepare(self, params: SamplingParams) -> None:
        self._engine.prepare(params)

    def _start(
        self, request_id: str, prompt: Prompt | PromptInput, params: SamplingParams, **options: Any
    ) -> _Stream:
        if isinstance(prompt, PromptInput):
            options["cache_salt"] = prompt.cache_salt
            prompt = {"prompt": prompt.text, "prompt_token_ids": prompt.token_ids}
        arguments = {"prompt": prompt, "params": params, **options}
        loop = asyncio.get_running_loop()
        stream = _Stream(request_id, arguments, loop, asyncio.Queue(), self._arrived)
        self._call(lambda: self._add(stream))
        return stream

    def drop(self, request: _Stream) -> None:
        """Abort a request that nobody reads any more; see `EngineClient.drop`."""
        request.is_dropped = True
        if not request.is_finished:
            self._call(lambda: self._drop(request))

    # ---- called from tasks

    def _call(self, call: Callable[[], None]) -> None:
        """Schedule `call` on the engine's thread, before its next step."""
        self._calls.append(call)
        self._wake.set()
        if self._has_ended:  # the thread may have stopped without seeing this call
            self._fail_calls()

    async def _result(self, function: Callable[[], T]) -> T:
        """Call `function` in the engine's thread, between two steps, and return its result."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            if future.done():  # cancelled
                return
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

        def call() -> None:
            try:
                self._check_alive()
                value = function()
                error = None
            except Exception as raised:
                value = None
                error = raised
            _call_soon(loop, settle, value, error)

        self._call(call)
        return await future

    # ---- called from the engine's thread

    def _run(self) -> None:
        """Run steps while any request is unfinished; otherwise wait for a call."""
        try:
            while not self._is_closing:
                self._wake.clear()
                self._make_calls()
                if self._shared.is_idle:
                    if not self._calls and not self._is_closing:
                        self._wake.wait()
                    continue
                with self._shared.lock:
                    self._shared.step()
                self._deliver()
            self._error = EngineError("the engine was closed before the request finished")
        except BaseException as error:
            self._error = error
        self._end()

    def _make_calls(self) -> None:
        # Only the calls queued so far: later ones must not keep running requests waiting.
        for _ in range(len(self._calls)):
            self._calls.popleft()()

    def _add(self, stream: _Stream) -> None:
        if stream.is_dropped:
            return
        name = stream.request_id
        if name in self._shared.inbox and not self._engine.is_unfinished(name):
            # The request that had this id was aborted just now; the next step reports its end.
            self._calls.append(partial(self._add, stream))
            return
        try:
            self._check_alive()
            self._engine.add_request(stream.request_id, **stream.arguments)
        except Exception as error:
            _call_soon(stream.loop, stream.queue.put_nowait, error)
            return
        self._shared.inbox[stream.request_id] = stream

    def _drop(self, stream: _Stream) -> None:
        if self._shared.inbox.get(stream.request_id) is stream:
            del self._shared.inbox[stream.request_id]
            self._shared.drop([stream.request_id])

    def _deliver(self) -> None:
        """Deliver a step's outputs, with one callback per event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput]]]
        by_loop = defaultdict(list)
        for stream, output in self._arrived:
            by_loop[stream.loop].append((stream, output))
            if output.finished:
                del self._shared.inbox[output.request_id]
        self._arrived.clear()
        for loop, pairs in by_loop.items():
            _call_soon(loop, _put, pairs)

    def _check_alive(self) -> None:
        if self._error is not None:
            raise EngineError(f"the engine has ended: {self._error}") from self._error

    def _end(self) -> None:
        """Fail all requests and pending calls with the error that stopped the engine."""
        reason = self._error
        if not isinstance(reason, EngineError):
            reason = EngineError(f"the engine failed: {type(reason).__name__}: {reason}")
        for stream in self._shared.inbox.values():
            _call_soon(stream.loop, stream.queue.put_nowait, reason)
        self._shared.inbox.clear()
        self._shared.close()
        self._has_ended = True  # set before the last pass over `_calls`, so that none is missed
        self._fail_calls()

    def _fail_calls(self) -> None:
        """Run the remaining calls; each one fails because the engine has stopped."""
        while True:
            try:
                call = self._calls.popleft()
            except IndexError:
                return
            call()


def _put(pairs: list[tuple[_Stream, RequestOutput]]) -> None:
    for stream, output in pairs:
        stream.queue.put_nowait(output)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *args: Any) -> None:
    """Call `function` in another thread's event loop; do nothing if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
