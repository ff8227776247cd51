"""`AsyncEngine`: requests of asyncio tasks, served by an engine on a thread of its own."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from engine.core.stats import EngineStats
from engine.errors import EngineError
from engine.llm_engine import LLMEngine, Prompt
from engine.outputs import RequestOutput
from engine.sampling_params import RequestOutputKind, SamplingParams
from engine.shared_engine import SharedEngine
from engine.snapshot import snapshot
from engine.tasks.embeddings import embed_in_parts

__all__ = ["LONG_TEXT", "AsyncEngine", "EngineClient", "ModelInfo"]

T = TypeVar("T")

LONG_TEXT = 4096  # characters; a longer prompt is tokenized on another thread


@dataclass(frozen=True)
class ModelInfo:
    """What a client must know of the model that it talks to.

    Attributes
    ----------
    model : str
        The name or path that it was loaded from.
    max_model_len : int
        Maximum tokens of a request, prompt and output.
    vocab_size : int
    eos_token_ids : tuple of int
    generation_config : dict
        The sampling that the model's generation_config.json recommends.
    """

    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    generation_config: dict[str, Any] = field(default_factory=dict)


class EngineClient(Protocol):
    """What `AsyncEngine` and a connection to an engine in another process have in common."""

    model_info: ModelInfo
    tokenizer: Any

    @property
    def error(self) -> BaseException | None:
        """Why the engine serves no more requests; None while it does."""

    @property
    def is_responsive(self) -> bool:
        """Whether the engine is alive and no step takes longer than its `step_timeout`."""

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt; see `AsyncEngine.generate`."""

    async def abort(self, request_id: str) -> None:
        """End a request; see `AsyncEngine.abort`."""

    async def stats(self) -> EngineStats:
        """Return the engine's counters and histograms so far."""

    async def snapshot(self) -> dict[str, Any]:
        """Return what the engine does now; see `engine.snapshot`."""

    async def embed(
        self, prompts: Sequence[Prompt], pooling: str = "last", *, normalize: bool = True
    ) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        """Return an embedding of each prompt; see `AsyncEngine.embed`."""

    async def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes."""

    async def close(self) -> None:
        """End all requests."""


@dataclass(eq=False)
class _Stream:
    """A request and the task that waits for its outputs."""

    request_id: str
    arguments: dict[str, Any]
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[RequestOutput | BaseException]
    arrived: list[tuple[_Stream, RequestOutput]]
    is_closed: bool = False

    def append(self, output: RequestOutput) -> None:
        """Take an output of the current step; `AsyncEngine` delivers them together."""
        self.arrived.append((self, output))


class AsyncEngine:
    """Serves the requests of asyncio tasks together, in the same steps.

    The engine runs on a thread of its own, so that steps and event loop do not wait for each
    other. Tasks may belong to several event loops.

    Parameters
    ----------
    engine : LLMEngine
        `AsyncEngine.from_name` makes one. It belongs to this object from now on.

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
        model = engine.model
        self.tokenizer = engine.tokenizer
        self.model_info = ModelInfo(
            model.name,
            engine.config.scheduler.max_model_len,
            model.config.vocab_size,
            model.eos_token_ids,
            model.generation_config,
        )
        self._engine = engine
        self._shared: SharedEngine[_Stream] = SharedEngine(engine)
        self._numbers = itertools.count()
        self._arrived: list[tuple[_Stream, RequestOutput]] = []  # outputs of the current step
        self._calls: deque[Callable[[], None]] = deque()  # to be made by the thread
        self._wake = threading.Event()
        self._is_closing = False
        self._has_ended = False  # the thread makes no more calls
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_name(cls, model: str = "smollm2", **options: Any) -> AsyncEngine:
        """Load `model` and serve it; takes the keywords of `load` and `EngineConfig`."""
        return cls(LLMEngine.from_name(model, **options))

    @property
    def error(self) -> BaseException | None:
        """Why the engine serves no more requests; None while it does."""
        return self._error

    @property
    def is_responsive(self) -> bool:
        """Whether the engine is alive and no step takes longer than its `step_timeout`."""
        return self._error is None and not self._engine.watchdog.is_stuck

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt, and yield its outputs as they are generated.

        Closing the generator, or cancelling the task that reads it, aborts the request before the
        next step.

        Parameters
        ----------
        prompt : str, sequence of int, or mapping
            As for `LLMEngine.add_request`.
        params : SamplingParams, optional
            Its `output_kind` says what each output carries. By default the model's recommended
            sampling, with outputs that carry only what is new.
        request_id : str, optional
            Unique among unfinished requests.
        priority, cache_salt, timeout
            As for `LLMEngine.add_request`.

        Yields
        ------
        RequestOutput

        Raises
        ------
        RequestError
            If the request cannot be served (`QueueFullError`: try again later).
        EngineError
            If the engine fails or is closed before the request is finished.
        """
        if params is None:
            given = self.model_info.generation_config
            kind = RequestOutputKind.DELTA
            params = SamplingParams.from_generation_config(given, output_kind=kind)
        if request_id is None:
            request_id = f"async-{next(self._numbers)}"
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if isinstance(text, str) and len(text) > LONG_TEXT:
            found = await asyncio.to_thread(self._engine.encode, prompt)
            cache_salt = found.cache_salt if cache_salt is None else cache_salt
            prompt = {"prompt": found.text, "prompt_token_ids": found.token_ids}
        if params.structured is not None:  # may take a second
            await asyncio.to_thread(self._engine.prepare, params)
        options = {"priority": priority, "cache_salt": cache_salt, "timeout": timeout}
        arguments = {"prompt": prompt, "params": params, **options}
        loop = asyncio.get_running_loop()
        stream = _Stream(request_id, arguments, loop, asyncio.Queue(), self._arrived)
        self._call(lambda: self._add(stream))
        is_finished = False
        try:
            while not is_finished:
                output = await stream.queue.get()
                if isinstance(output, BaseException):
                    is_finished = True
                    raise output
                is_finished = output.finished
                yield output
        finally:
            stream.is_closed = True
            if not is_finished:
                self._call(lambda: self._drop(stream))

    async def abort(self, request_id: str) -> None:
        """End a request; its generator yields the output so far, with finish_reason "abort".

        Unknown and finished requests are ignored.
        """
        await self._result(lambda: self._engine.abort_request(request_id))

    async def stats(self) -> EngineStats:
        """Return the engine's counters and histograms so far."""
        return await self._result(self._engine.stats)

    async def snapshot(self) -> dict[str, Any]:
        """Return what the engine does now; see `engine.snapshot`."""
        return await self._result(lambda: snapshot(self._engine, self._shared.clock))

    async def embed(
        self, prompts: Sequence[Prompt], pooling: str = "last", *, normalize: bool = True
    ) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        """Return an embedding of each prompt; other requests are served in between.

        Parameters
        ----------
        prompts : sequence of str, of sequences of int, or of mappings
            As for `LLMEngine.add_request`.
        pooling, normalize
            As for `engine.tasks.embeddings.embed`.

        Returns
        -------
        list of (N,) array of float32
            On the host, N the model's hidden size.

        Raises
        ------
        RequestError
            If an argument is none of these, or a prompt is too long.
        EngineError
            If the engine fails or is closed before.
        """
        inputs = await asyncio.to_thread(lambda: [self._engine.encode(each) for each in prompts])
        ids = [each.token_ids for each in inputs]
        model = self._engine.model
        parts = embed_in_parts(model, ids, pooling, normalize=normalize)
        found: dict[int, Any] = {}
        try:
            while (part := await self._result(lambda: next(parts, None))) is not None:
                found.update(part)
        finally:
            self._call(parts.close)
        return [found[index] for index in range(len(ids))]

    async def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes; unfinished requests keep their blocks."""
        await self._result(self._engine.reset_prefix_cache)

    async def close(self) -> None:
        """End all requests, with an `EngineError` for each, and free the memory."""
        self._is_closing = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)

    # ---- from the tasks to the thread

    def _call(self, call: Callable[[], None]) -> None:
        """Let the thread make this call before its next step."""
        self._calls.append(call)
        self._wake.set()
        if self._has_ended:  # perhaps before it saw this call
            self._fail_calls()

    async def _result(self, function: Callable[[], T]) -> T:
        """Return what `function` returns when the thread calls it between two steps."""
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

    # ---- on the thread

    def _run(self) -> None:
        """Step while there are requests; wait for one otherwise."""
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
        # Those that come meanwhile wait for a step, or running requests could wait for ever.
        for _ in range(len(self._calls)):
            self._calls.popleft()()

    def _add(self, stream: _Stream) -> None:
        if stream.is_closed:
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
        """Hand a step's outputs to the event loops, with one call for each loop."""
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
        """Tell everybody who waits why there will be no more outputs."""
        reason = self._error
        if not isinstance(reason, EngineError):
            reason = EngineError(f"the engine failed: {type(reason).__name__}: {reason}")
        for stream in self._shared.inbox.values():
            _call_soon(stream.loop, stream.queue.put_nowait, reason)
        self._shared.inbox.clear()
        self._shared.close()
        self._has_ended = True  # before the last look at the calls: none is left out
        self._fail_calls()

    def _fail_calls(self) -> None:
        """Make the calls that nobody will make any more; each finds that the engine has ended."""
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
    """Call `function` in another thread's event loop; does nothing if the loop has ended."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
