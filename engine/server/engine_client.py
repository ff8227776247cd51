"""`ZmqEngineClient`: an `EngineClient` for an engine in another process."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import zmq

from engine.async_engine import ModelInfo
from engine.core.stats import EngineStats
from engine.errors import EngineError, RequestError
from engine.lora_request import LoRARequest
from engine.scheduler.admission import QueueFullError
from engine.server import messages as m
from engine.server.remote_request import RemoteRequest
from engine.server.request_client import Answerer, RequestClient
from engine.server.sockets import (
    MAX_MESSAGE_BYTES,
    Socket,
    connected_socket,
    descriptor,
    frames_of,
    has_input,
    proof_of,
)
from engine.tasks.logit_lens import LogitLens

__all__ = ["CLIENT_CLOSED", "ZmqEngineClient"]

CLIENT_CLOSED = "the client was closed before the request finished"

_MAX_BATCH = 64  # maximum messages processed before other tasks get a turn
# Maximum seconds between two messages from an idle engine: heartbeat interval plus latency.
_SILENCE = m.BEAT_SECONDS + 0.5


class ZmqEngineClient(RequestClient):
    """Client of one engine process; bound to the event loop that created it.

    Parameters
    ----------
    socket, monitor : zmq.Socket
        From `connected_socket`.
    token : str
        The engine's token.
    tokenizer : Tokenizer or None

    Attributes
    ----------
    num_cache_tokens, block_size : int
        Capacity of the engine's prefix cache and block size, both in tokens.
    load : (int, int)
        Tokens that the engine has yet to compute, and its number of unfinished requests, including
        those of other clients; up to half a second old.
    on_end : callable, optional
        ``on_end(requests, error)`` is called once when the engine stops, and takes over its
        unfinished requests.
    on_refusal : callable, optional
        ``on_refusal(request, error)`` is called when the engine rejects a request. If it returns
        False, the request fails with `error`.
    answer : callable, optional
        Stand-in that answers all messages instead of the engine; see `answered_by`.
    """

    def __init__(self, socket: Socket, monitor: Socket, token: str, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._proof = proof_of(token)
        self.num_cache_tokens = self.block_size = 0
        self.load = 0, 0
        self._adapters: tuple[str, ...] = ()
        self._seems_asleep = False
        self.on_end: Callable[[list[RemoteRequest], EngineError], None] | None = None
        self.on_refusal: Callable[[RemoteRequest, EngineError], bool] | None = None
        self.answer: Answerer | None = None
        self._socket = socket
        self._monitor = monitor
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[m.Ready] = self._loop.create_future()
        self._requests: dict[int, RemoteRequest] = {}
        self._handles: dict[str, int] = {}  # request id -> handle of each unfinished request
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count(1)
        self._unsent: deque[bytes] = deque()
        self._error: EngineError | None = None
        self._last_seen = time.monotonic()
        self._step_timeout: float | None = None
        self._is_closed = self._is_reading_later = False
        self._pack = msgspec.msgpack.Encoder().encode
        for each, read in ((socket, self._read), (monitor, self._read_monitor)):
            self._loop.add_reader(descriptor(each), read)
            # The descriptor is edge-triggered: earlier messages are not signaled.
            self._loop.call_soon(read)

    @classmethod
    async def connect(cls, address: str, token: str, tokenizer: Any = None) -> ZmqEngineClient:
        """Connect to an engine and wait until it has loaded its model.

        Parameters
        ----------
        address : str
            Address of a socket from `sockets.bound_socket`.
        token : str
            The engine's token.
        tokenizer : Tokenizer, optional
            If None, prompts must be token ids and outputs contain no text.

        Raises
        ------
        EngineError
            If the engine exits before it is ready.
        """
        client = cls(*connected_socket(address, token), token, tokenizer)
        client._send(m.Hello())
        try:
            ready = await client._ready
            if client._error is not None:  # `Ready` and `Ended` arrived in the same batch
                raise client._error
        except BaseException:
            await client.close()
            raise
        client._take_model(
            ModelInfo(
                ready.model,
                ready.max_model_len,
                ready.vocab_size,
                tuple(ready.eos_token_ids),
                ready.sampling_defaults,
                ready.hidden_size,
                ready.num_lens_layers,
                tuple(ready.labels),
            )
        )
        client._step_timeout = ready.step_timeout
        client.block_size = ready.block_size
        client.num_cache_tokens = ready.num_blocks * ready.block_size
        client._adapters = tuple(ready.adapters)
        return client

    @property
    def error(self) -> EngineError | None:
        """The error that stopped the engine; None while it is running."""
        return self._error

    @property
    def is_responsive(self) -> bool:
        """Whether the engine is alive and its current step is within `step_timeout`."""
        if self._error is not None or self._step_timeout is None or self._is_closed:
            return self._error is None
        if has_input(self._socket):  # unread messages: this process was too busy to read
            self._read_later()
            return True
        return time.monotonic() - self._last_seen < self._step_timeout + _SILENCE

    @property
    def num_unfinished_requests(self) -> int:
        """Number of this client's requests that are waiting or running."""
        return len(self._requests)

    def submit(self, request: RemoteRequest) -> None:
        """Send a request to the engine; see `RequestClient.submit`."""
        self._check_alive()
        request_id = request.request_id
        message = request.message
        if request_id in self._handles:
            raise RequestError(f"request id {request_id[:80]!r} is in use")
        message.handle = next(self._numbers)
        if not self._send(message):
            raise QueueFullError("the engine takes no requests at the moment; try again later")
        self._requests[message.handle] = request
        self._handles[request_id] = message.handle

    def drop(self, request: RemoteRequest) -> None:
        """Abort a request that nobody reads any more."""
        if self._forget(request):
            self._send(m.Drop(request.handle))

    async def abort(self, request_id: str) -> None:
        """Abort a request; see `EngineClient.abort`."""
        if request_id in self._handles:
            handle = self._handles[request_id]
            self._requests[handle].is_aborted = True
            self._send(m.Abort(handle))

    async def stats(self) -> EngineStats:
        """Return the engine's counters and histograms."""
        content = await self._call(lambda number: m.Call(number, "stats"))
        found: EngineStats = m.decode(content, EngineStats)
        return found

    async def snapshot(self, salt_prefix: str | None = None) -> dict[str, Any]:
        """Return the engine's current state; see `EngineClient.snapshot`."""
        content = await self._call(lambda number: m.Call(number, "snapshot", salt_prefix))
        found: dict[str, Any] = m.decode(content, dict[str, Any])
        return found

    async def embed_ids(
        self, token_ids: Sequence[Sequence[int]], pooling: str | None, *, normalize: bool
    ) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        """Embed each sequence of validated token ids; see `EngineClient.embed`."""
        ids = [list(each) for each in token_ids]
        content = await self._call(lambda number: m.Embed(number, ids, pooling, normalize))
        rows = m.decode(content, list[bytes])
        return [np.frombuffer(row, np.float32) for row in rows]

    async def logit_lens(
        self, token_ids: Sequence[int], num_tokens: int = 1, top: int = 5
    ) -> LogitLens:
        """Return what each layer predicts; see `EngineClient.logit_lens`."""
        ids = list(token_ids)
        content = await self._call(lambda number: m.Lens(number, ids, num_tokens, top))
        own, ranks, p, top_ids, top_p = m.decode(content, list[Any])
        arrays = [np.array(each, np.int32) for each in (own, ranks, top_ids)]
        shares = [np.array(each, np.float32) for each in (p, top_p)]
        return LogitLens(arrays[0], arrays[1], shares[0], arrays[2], shares[1])

    async def reset_prefix_cache(self) -> int:
        """Drop all cached prefixes; see `EngineClient.reset_prefix_cache`."""
        content = await self._call(lambda number: m.Call(number, "reset_prefix_cache"))
        count: int = m.decode(content, int)
        return count

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the engine's LoRA adapters; the engine sends changes to every client."""
        return self._adapters

    async def add_lora(self, lora_request: LoRARequest, *, load_inplace: bool = False) -> None:
        """Have the engine read an adapter; see `EngineClient.add_lora`."""
        name = lora_request.lora_name
        path = lora_request.lora_path
        await self._change_adapters(lambda n: m.AddAdapter(n, name, path, load_inplace))

    async def remove_lora(self, lora_name: str) -> None:
        """Have the engine forget an adapter; see `EngineClient.remove_lora`."""
        await self._change_adapters(lambda number: m.RemoveAdapter(number, lora_name))

    async def update_weights(self, path: str) -> tuple[str, ...]:
        """Have the engine read new weights; see `EngineClient.update_weights`."""
        content = await self._call(lambda number: m.UpdateWeights(number, path))
        return tuple(m.decode(content, list[str]))

    async def _change_adapters(self, message: Any) -> None:
        self._adapters = tuple(m.decode(await self._call(message), list[str]))

    @property
    def seems_asleep(self) -> bool:
        """Whether the engine slept when it was last heard of."""
        return self._seems_asleep

    async def sleep(self, level: int = 1) -> None:
        """Free the engine's device memory until `wake_up`; see `LLMEngine.sleep`."""
        await self._call(lambda number: m.Call(number, "sleep", level=level))
        self._seems_asleep = True

    async def wake_up(self) -> None:
        """Bring the engine's device memory back; see `LLMEngine.wake_up`."""
        await self._call(lambda number: m.Call(number, "wake_up"))
        self._seems_asleep = False

    async def is_sleeping(self) -> bool:
        """Return whether the engine sleeps."""
        content = await self._call(lambda number: m.Call(number, "is_sleeping"))
        found: bool = m.decode(content, bool)
        return found

    async def close(self, reason: str = CLIENT_CLOSED) -> None:
        """Fail all requests of this client with an `EngineError`; the engine keeps running."""
        if self._is_closed:
            return
        for handle in self._requests:
            self._send(m.Drop(handle))
        self._end(EngineError(reason))
        self._is_closed = True
        self._loop.remove_reader(descriptor(self._socket))
        self._loop.remove_reader(descriptor(self._monitor))
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=100)

    # ---- to the engine

    def _set_answer(self, answer: Answerer | None) -> None:
        self.answer = answer

    def _send(self, message: m.FromClient) -> bool:
        """Send without blocking; return False if an `Add` would block.

        Other messages are queued and sent later.
        """
        if self.answer is not None:
            for each in self.answer(message):
                self._loop.call_soon(self._take, each)
            return True
        if self._is_closed or self._error is not None:
            return True  # the engine has stopped: there is no recipient
        data = self._pack(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise RequestError(
                f"a request must have at most {MAX_MESSAGE_BYTES} bytes between the processes; "
                f"got {len(data)}"
            )
        if not self._flush() or not self._sent(data):
            if isinstance(message, m.Add):
                return False
            self._unsent.append(data)
        # The descriptor signals a message only once, and sending may have consumed the signal.
        if has_input(self._socket):
            self._read_later()
        return True

    def _sent(self, data: bytes) -> bool:
        try:
            self._socket.send_multipart([self._proof, *frames_of(data)], zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _flush(self) -> bool:
        """Send the queued messages; return whether all were sent."""
        while self._unsent and self._sent(self._unsent[0]):
            self._unsent.popleft()
        return not self._unsent

    async def _call(self, message: Any) -> bytes:
        """Send `message(number)` with a new call number, and return the payload of its answer."""
        self._check_alive()
        number = next(self._numbers)
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._calls[number] = future
        try:
            self._send(message(number))
            return await future
        finally:
            if self._calls.pop(number, None) is not None:
                self._send(m.Cancel(number))

    def _forget(self, request: RemoteRequest) -> bool:
        """Forget a request; return whether the engine is still serving it."""
        if self._requests.get(request.handle) is not request:
            return False
        del self._requests[request.handle]
        self._handles.pop(request.request_id, None)
        return not request.is_finished

    # ---- from the engine

    def _read_later(self) -> None:
        if not self._is_reading_later:
            self._is_reading_later = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Process the messages that have arrived."""
        self._is_reading_later = False
        for _ in range(_MAX_BATCH):
            if self._is_closed:
                return
            if not has_input(self._socket):
                if self._unsent and self._flush():
                    continue  # sending may have consumed the descriptor's signal
                return
            data = b"".join(self._socket.recv_multipart(zmq.NOBLOCK))
            self._last_seen = time.monotonic()
            try:
                self._take(m.decode(data, m.FromEngine))
            except Exception as error:  # what it was to tell us, nobody will
                self._end(EngineError(f"the engine sent a wrong message: {error}"))
                return
        self._read_later()

    def _read_monitor(self) -> None:
        """Read the monitor socket, which reports that the engine process has exited."""
        if self._is_closed:
            return
        while has_input(self._monitor):
            self._monitor.recv_multipart(zmq.NOBLOCK)
            while has_input(self._socket):
                self._read()  # messages sent before it exited
            self._end(EngineError("the engine's process has ended"))

    def _take(self, message: m.FromEngine) -> None:
        if isinstance(message, m.StepResult):
            self._take_step(message)
        elif isinstance(message, m.Refused):
            self._refuse(message)
        elif isinstance(message, m.Answer):
            self._settle(message)
        elif isinstance(message, m.Lost):
            for handle in message.handles:
                self._fail(handle, EngineError(message.reason))
            for future in self._calls.values():
                if not future.done():
                    future.set_exception(EngineError(message.reason))
        elif isinstance(message, m.Ended):
            self._end(EngineError(message.reason))
        elif isinstance(message, m.Heartbeat):
            self.load = message.num_waiting_tokens, message.num_requests
            self._adapters = tuple(message.adapters)
            self._seems_asleep = message.is_sleeping
        elif isinstance(message, m.Ready) and not self._ready.done():
            self._ready.set_result(message)

    def _take_step(self, step: m.StepResult) -> None:
        now = time.monotonic()
        requests = self._requests
        for handle, token_id in zip(step.handles, step.token_ids, strict=True):
            request = requests.get(handle)
            if request is not None:
                try:
                    self._end_here(request, request.push_token(token_id, now))
                except Exception as error:
                    self._give_up(request, error)
        for piece in step.pieces:
            request = requests.get(piece.handle)
            if request is not None:
                try:
                    self._end_here(request, request.push(piece, now))
                    if piece.is_finished:
                        self._forget(request)
                except Exception as error:
                    self._give_up(request, error)

    def _end_here(self, request: RemoteRequest, ends: list[m.End]) -> None:
        """Tell the engine which continuations were ended here by their text (stop strings)."""
        for end in ends:
            self._send(end)
        if ends and request.is_finished:
            self._forget(request)

    def _give_up(self, request: RemoteRequest, error: Exception) -> None:
        """Fail a request whose update cannot be applied; the others go on."""
        request.fail(error)
        self._forget(request)
        self._send(m.Drop(request.handle))

    def _refuse(self, message: m.Refused) -> None:
        request = self._requests.get(message.handle)
        if request is None:
            return
        error = m.error_of(message.kind, message.reason)
        self._forget(request)
        if self.on_refusal is None or not self.on_refusal(request, error):
            request.fail(error)

    def _fail(self, handle: int, error: EngineError) -> None:
        request = self._requests.get(handle)
        if request is not None:
            request.fail(error)
            self._forget(request)

    def _settle(self, answer: m.Answer) -> None:
        future = self._calls.pop(answer.number, None)
        if future is None or future.done():
            return
        if answer.kind:
            reason = m.decode(answer.content, str)
            future.set_exception(m.error_of(answer.kind, reason))
        else:
            future.set_result(answer.content)

    def _end(self, error: EngineError) -> None:
        """Fail everything that waits for the engine, or hand it to `on_end`."""
        if self._error is not None:
            return
        self._error = error
        requests = list(self._requests.values())
        self._requests.clear()
        self._handles.clear()
        futures: list[asyncio.Future[Any]] = [*self._calls.values(), self._ready]
        for future in futures:
            if not future.done():
                future.set_exception(error)
        self._calls.clear()
        self._unsent.clear()
        if self.on_end is not None:
            self.on_end(requests, error)
            return
        for request in requests:
            request.fail(error)
