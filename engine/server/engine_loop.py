"""`EngineLoop`: serves an `LLMEngine` to API processes over ZeroMQ on the calling thread.

It neither tokenizes nor detokenizes. Between steps it handles incoming messages; after each step it
sends every API process one message with all of its new outputs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import zmq

from engine.errors import EngineError, RankError, RequestError
from engine.llm_engine import LLMEngine
from engine.lora_request import LoRARequest
from engine.outputs import RequestOutput
from engine.server import messages as m
from engine.server.remote_request import engine_params
from engine.server.sockets import (
    MAX_MESSAGE_BYTES,
    Socket,
    frames_of,
    has_input,
    proof_of,
    received,
)
from engine.snapshot import StepClock, snapshot, starts_with
from engine.tasks.embeddings import embed_in_parts
from engine.tasks.logit_lens import logit_lens_in_parts, num_lens_layers

__all__ = ["EngineLoop"]

_MAX_CLIENTS = 1024
_NUM_COMPILERS = 2  # threads; compiling a grammar releases the GIL
_PREPARING_SECONDS = 0.002  # seconds; polling interval of an idle engine for compiled grammars
_ABORTED = "the request was aborted before its grammar was compiled"
_TOO_SLOW = "the API process did not read the engine's messages in time"
_log = logging.getLogger("engine.server")


class _Served:
    """Request of an API process."""

    __slots__ = ("client", "handle", "is_begun")

    def __init__(self, client: _Client, handle: int) -> None:
        self.client = client
        self.handle = handle
        self.is_begun = False


class _Client:
    """API process, its unfinished requests, and their outputs from the current step."""

    def __init__(self, address: bytes, number: int) -> None:
        self.address = address
        self.number = number
        self.ids: dict[int, str] = {}  # handle -> the engine's request id
        self.preparing: set[int] = set()  # handles of requests whose grammar is compiling
        self.handles: list[int] = []
        self.token_ids: list[int] = []
        self.pieces: list[m.Piece] = []
        self.is_behind = False  # its pipe was full, and `Lost` has not been sent yet
        self.lost: list[int] = []  # handles of requests aborted because it is behind

    def take(self) -> m.StepResult | None:
        """Return the pending outputs, and clear them."""
        if not (self.handles or self.pieces):
            return None
        result = m.StepResult(self.handles, self.token_ids, self.pieces)
        self.handles = []
        self.token_ids = []
        self.pieces = []
        return result


class EngineLoop:
    """Serves requests from a socket until `stop` is called.

    Parameters
    ----------
    engine : LLMEngine
    socket : zmq.Socket
        From `bound_socket`.
    token : str
        Secret that each message of a client must prove.
    on_beat : callable, optional
        Called every half second, or after a step that takes longer: proof that the loop is not
        hanging.
    """

    def __init__(
        self,
        engine: LLMEngine,
        socket: Socket,
        token: str,
        on_beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._socket = socket
        self._proof = proof_of(token)
        self._on_beat = on_beat
        self._clock = StepClock()
        self._clients: dict[bytes, _Client] = {}
        self._served: dict[str, _Served] = {}
        self._pool = ThreadPoolExecutor(_NUM_COMPILERS, "grammar")
        self._prepared: deque[tuple[_Client, m.Add, Exception | None]] = deque()
        self._num_preparing = 0
        # Each adapter that the thread pool has read, or the error that it ran into.
        self._read_adapters: deque[tuple[_Client, m.AddAdapter, Any]] = deque()
        # Calls computed between steps: each yields None after a part, and its value at last.
        self._in_parts: deque[tuple[_Client, int, Iterator[Any]]] = deque()
        self._num_clients = 0
        self._next_beat = 0.0
        self._is_stopping = False
        self._encode = msgspec.msgpack.Encoder().encode
        self._handlers: dict[type, Callable[[_Client, Any], None]] = {
            m.Add: self._add,
            m.Abort: self._abort,
            m.Drop: self._drop,
            m.End: self._end,
            m.Call: self._call,
            m.Embed: self._embed,
            m.Lens: self._lens,
            m.Cancel: self._cancel,
            m.AddAdapter: self._add_adapter,
            m.RemoveAdapter: self._remove_adapter,
            m.UpdateWeights: self._update_weights,
        }

    def stop(self) -> None:
        """Make `run` return after the current step; safe in signal handlers and other threads."""
        self._is_stopping = True

    def run(self) -> None:
        """Serve until `stop`; report an engine exception to the clients and re-raise it."""
        try:
            while not self._is_stopping:
                self._receive()
                self._queue_prepared()
                self._hold_adapters()
                if self._engine.has_unfinished_requests():
                    start = time.perf_counter()
                    outputs = self._engine.step()
                    self._clock.note(time.perf_counter() - start)
                    self._send_outputs(outputs)
                self._run_part()
                if (now := time.monotonic()) >= self._next_beat:
                    self._next_beat = now + m.BEAT_SECONDS
                    self._engine.model.check_ranks()
                    self._on_beat()
                    self._beat()
            reason = m.CLOSED
        except BaseException as error:
            reason = f"the engine failed: {type(error).__name__}: {error}"[: m.MAX_REASON]
            raise
        finally:
            for client in list(self._clients.values()):
                self._send(client, m.Ended(reason))
            self._pool.shutdown(wait=False, cancel_futures=True)

    # ---- incoming messages

    def _receive(self) -> None:
        """Handle all pending messages; if the engine is idle, block until one arrives."""
        socket = self._socket
        if not (self._engine.has_unfinished_requests() or self._in_parts):
            wait = max(0.0, self._next_beat - time.monotonic())
            if self._num_preparing:
                wait = min(wait, _PREPARING_SECONDS)
            if not socket.poll(int(1000 * wait) + 1):
                return
        while has_input(socket):
            found = received(socket.recv_multipart(zmq.NOBLOCK), self._proof)
            if found is not None:
                self._handle(*found)

    def _handle(self, address: bytes, data: bytes) -> None:
        """Handle a message that has proved the token; a wrong one is logged and skipped."""
        client = self._clients.get(address)
        try:
            message = m.decode(data, m.FromClient)
            if isinstance(message, m.Hello):
                self._welcome(address, client)
            elif client is not None:
                self._handlers[type(message)](client, message)
        except RankError:  # the engine's, not the message's
            raise
        except Exception as error:
            _log.warning("a message of an API process was skipped: %s", _text(error))

    def _welcome(self, address: bytes, client: _Client | None) -> None:
        if client is not None:
            self._forget(client)
        elif len(self._clients) >= _MAX_CLIENTS:
            return
        self._num_clients += 1
        client = self._clients[address] = _Client(address, self._num_clients)
        self._send(client, self._ready())

    def _ready(self) -> m.Ready:
        engine = self._engine
        model = self._engine.model
        return m.Ready(
            model.name,
            engine.config.scheduler.max_model_len,
            model.config.vocab_size,
            list(model.eos_token_ids),
            model.sampling_defaults,
            engine.watchdog.timeout,
            engine.config.scheduler.block_size,
            engine.config.scheduler.num_blocks if engine.scheduler.blocks.tree else 0,
            model.config.hidden_size,
            list(engine.list_loras()),
            num_lens_layers(model),
            [] if model.classifier is None else list(model.classifier.labels),
        )

    def _add(self, client: _Client, message: m.Add) -> None:
        if message.handle in client.ids or message.handle in client.preparing:
            raise EngineError(f"handle {message.handle} is in use")
        if "structured" in message.params:
            client.preparing.add(message.handle)
            self._num_preparing += 1
            self._pool.submit(self._prepare, client, message)
        else:
            self._queue(client, message)

    def _prepare(self, client: _Client, message: m.Add) -> None:
        """Compile a request's grammar in the thread pool; this can take a second."""
        error = None
        try:
            self._engine.prepare(engine_params(message.params, is_final_only=True))
        except Exception as raised:
            error = raised
        self._prepared.append((client, message, error))

    def _queue_prepared(self) -> None:
        """Queue requests whose grammars are now compiled, unless aborted meanwhile."""
        while self._prepared:
            client, message, error = self._prepared.popleft()
            self._num_preparing -= 1
            if message.handle not in client.preparing:
                continue
            client.preparing.discard(message.handle)
            if error is None:
                self._queue(client, message)
            else:
                self._refuse(client, message, error)

    def _queue(self, client: _Client, message: m.Add) -> None:
        # Two API processes may use the same id, and a client the id of a request it has aborted.
        request_id = f"{client.number}.{message.handle}/{message.request_id}"
        try:
            self._engine.add_request(
                request_id,
                message.token_ids,
                engine_params(message.params, is_final_only=message.is_final_only),
                priority=message.priority,
                cache_salt=message.cache_salt,
                timeout=message.timeout,
                resumed=message.resumed,
                lora_request=None if message.adapter is None else LoRARequest(message.adapter),
            )
        except Exception as error:
            self._refuse(client, message, error)
            return
        client.ids[message.handle] = request_id
        self._served[request_id] = _Served(client, message.handle)

    def _refuse(self, client: _Client, message: m.Add, error: Exception) -> None:
        self._send(client, m.Refused(message.handle, m.kind_of(error), _text(error)))

    def _abort(self, client: _Client, message: m.Abort) -> None:
        if message.handle in client.preparing:
            client.preparing.discard(message.handle)
            self._send(client, m.Refused(message.handle, "EngineError", _ABORTED))
        if message.handle in client.ids:
            self._engine.abort_request(client.ids[message.handle])

    def _drop(self, client: _Client, message: m.Drop) -> None:
        client.preparing.discard(message.handle)
        request_id = client.ids.pop(message.handle, None)
        if request_id is not None:
            del self._served[request_id]
            self._engine.abort_request(request_id)
            self._engine.forget_aborted([request_id])

    def _end(self, client: _Client, message: m.End) -> None:
        if message.handle in client.ids:
            request_id = client.ids[message.handle]
            self._engine.end_continuation(request_id, message.index, message.reason)

    # ---- calls

    def _call(self, client: _Client, message: m.Call) -> None:
        self._answer(client, message.number, lambda: self._value_of(message))

    def _value_of(self, call: m.Call) -> Any:
        value: Any = None
        if call.name == "stats":
            value = self._engine.stats()
        elif call.name == "snapshot":
            value = snapshot(self._engine, self._clock, starts_with(call.salt_prefix))
            for request in value["requests"]:
                request["id"] = request["id"].partition("/")[2]
        elif call.name == "reset_prefix_cache":
            value = self._engine.reset_prefix_cache()
        elif call.name == "sleep":
            self._engine.sleep(call.level)
            self._beat()
        elif call.name == "wake_up":
            self._engine.wake_up()
            self._beat()
        elif call.name == "is_sleeping":
            value = self._engine.is_sleeping
        return value

    def _add_adapter(self, client: _Client, message: m.AddAdapter) -> None:
        """Read an adapter in the thread pool, while steps go on."""

        def read() -> None:
            found: Any
            try:
                found = self._engine.read_lora(LoRARequest(message.name, lora_path=message.path))
            except Exception as error:
                found = error
            self._read_adapters.append((client, message, found))

        self._num_preparing += 1
        self._pool.submit(read)

    def _hold_adapters(self) -> None:
        """Hold the adapters that have been read, and answer."""
        while self._read_adapters:
            client, message, found = self._read_adapters.popleft()
            self._num_preparing -= 1
            self._answer(client, message.number, partial(self._hold_adapter, message, found))

    def _hold_adapter(self, message: m.AddAdapter, found: Any) -> tuple[str, ...]:
        if isinstance(found, Exception):
            raise found
        request = LoRARequest(message.name, lora_path=message.path)
        self._engine.add_lora(request, load_inplace=message.load_inplace, adapter=found)
        self._beat()
        return self._engine.list_loras()

    def _remove_adapter(self, client: _Client, message: m.RemoveAdapter) -> None:
        def remove() -> tuple[str, ...]:
            self._engine.remove_lora(message.name)
            self._beat()
            return self._engine.list_loras()

        self._answer(client, message.number, remove)

    def _update_weights(self, client: _Client, message: m.UpdateWeights) -> None:
        """Update the weights; no step runs meanwhile."""
        update = partial(self._engine.update_weights, message.path)
        self._answer(client, message.number, update)

    def _answer(self, client: _Client, number: int, call: Callable[[], Any]) -> None:
        """Send the result of a call, or its error: the client waits for one of them."""
        try:
            value = call()
        except Exception as error:
            if not isinstance(error, EngineError):
                _log.error("a call of an API process failed", exc_info=error)
            self._fail_call(client, number, error)
        else:
            self._send(client, m.Answer(number, "", self._encode(value)))

    def _embed(self, client: _Client, message: m.Embed) -> None:
        def start() -> Iterator[Any]:
            parts = embed_in_parts(
                self._engine.model,
                message.token_ids,
                message.pooling,
                normalize=message.normalize,
                has_others=True,
            )
            return _rows_in_parts(parts, len(message.token_ids))

        self._start_parts(client, message.number, start)

    def _lens(self, client: _Client, message: m.Lens) -> None:
        def start() -> Iterator[Any]:
            arguments = message.token_ids, message.num_tokens, message.top
            parts = logit_lens_in_parts(self._engine.model, *arguments)
            return (lens and [each.tolist() for each in vars(lens).values()] for lens in parts)

        self._start_parts(client, message.number, start)

    def _start_parts(
        self, client: _Client, number: int, start: Callable[[], Iterator[Any]]
    ) -> None:
        """Queue a call that is computed between steps, or send the error of its arguments."""
        try:
            self._in_parts.append((client, number, start()))
        except EngineError as error:
            self._fail_call(client, number, error)

    def _run_part(self) -> None:
        """Compute one part of the oldest call in parts."""
        if not self._in_parts:
            return
        client, number, parts = self._in_parts[0]
        try:
            value = next(parts)
        except EngineError as error:
            self._in_parts.popleft()
            self._fail_call(client, number, error)
            return
        if value is not None:
            self._in_parts.popleft()
            self._send(client, m.Answer(number, "", self._encode(value)))

    def _cancel(self, client: _Client, message: m.Cancel) -> None:
        self._drop_parts(lambda owner, number: owner is client and number == message.number)

    def _drop_parts(self, is_unwanted: Callable[[_Client, int], bool]) -> None:
        kept = deque(each for each in self._in_parts if not is_unwanted(each[0], each[1]))
        self._in_parts = kept  # closing the generators of removed calls frees their pages

    def _fail_call(self, client: _Client, number: int, error: Exception) -> bool:
        return self._send(client, m.Answer(number, m.kind_of(error), self._encode(_text(error))))

    # ---- outgoing messages

    def _send_outputs(self, outputs: list[RequestOutput]) -> None:
        """Send each client its outputs from a step."""
        changed: dict[_Client, None] = {}
        for output in outputs:
            served = self._served.get(output.request_id)
            if served is None:
                continue
            client = served.client
            changed[client] = None
            if served.is_begun and (token_id := _only_token(output)) is not None:
                client.handles.append(served.handle)
                client.token_ids.append(token_id)
                continue
            served.is_begun = True
            client.pieces.append(_piece(served.handle, output))
            if output.finished:
                del self._served[output.request_id], client.ids[served.handle]
        for client in changed:
            result = client.take()
            if result is not None:
                self._send(client, result)

    def _send(self, client: _Client, message: m.FromEngine) -> bool:
        """Send without blocking; a client that does not read or has exited loses its requests."""
        data = self._encode(message)
        if len(data) > MAX_MESSAGE_BYTES:
            return self._send_too_large(client, message, len(data))
        try:
            self._socket.send_multipart([client.address, *frames_of(data)], zmq.NOBLOCK)
        except zmq.Again:
            client.lost += [*client.ids, *client.preparing]
            client.is_behind = True
            self._abort_all(client)
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget(client)
            return False
        return True

    def _send_too_large(self, client: _Client, message: m.FromEngine, num_bytes: int) -> bool:
        """Fail the call or the requests whose answer exceeds `MAX_MESSAGE_BYTES`."""
        error = RequestError(
            f"an answer must have at most {MAX_MESSAGE_BYTES} bytes between the processes; "
            f"got {num_bytes}"
        )
        if isinstance(message, m.Answer):
            return self._fail_call(client, message.number, error)
        assert isinstance(message, m.StepResult)  # no other message has this size
        if len(message.pieces) + len(message.handles) > 1:  # the other requests' part is sent
            parts = [m.StepResult(message.handles, message.token_ids, [])]
            parts += [m.StepResult([], [], [piece]) for piece in message.pieces]
            return all(self._send(client, part) for part in parts)
        handle = message.pieces[0].handle
        self._drop(client, m.Drop(handle))
        return self._send(client, m.Refused(handle, m.kind_of(error), _text(error)))

    def _beat(self) -> None:
        """Send each client a heartbeat; this also detects clients that have exited.

        Besides at fixed intervals, one is sent before a change of what it says is answered: the
        next request may come through any client.
        """
        beat = self._heartbeat()
        for client in list(self._clients.values()):
            if not client.is_behind:
                self._send(client, beat)
            elif self._send(client, m.Lost(client.lost, _TOO_SLOW)):
                client.lost = []
                client.is_behind = False

    def _heartbeat(self) -> m.Heartbeat:
        num_tokens = num_requests = 0
        for request in self._engine.scheduler.unfinished_requests():
            num_requests += 1
            num_tokens += max(0, request.num_known_tokens - 1 - request.num_computed_tokens)
        adapters = list(self._engine.list_loras())
        return m.Heartbeat(num_tokens, num_requests, adapters, self._engine.is_sleeping)

    def _abort_all(self, client: _Client) -> None:
        ids = list(client.ids.values())
        client.ids.clear()
        client.preparing.clear()
        for request_id in ids:
            del self._served[request_id]
        self._engine.abort_request(ids)
        self._engine.forget_aborted(ids)
        self._drop_parts(lambda owner, _: owner is client)

    def _forget(self, client: _Client) -> None:
        """Abort the requests of an API process that has exited."""
        self._clients.pop(client.address, None)
        self._abort_all(client)


def _rows_in_parts(parts: Iterator[dict[int, Any]], count: int) -> Iterator[list[bytes] | None]:
    """Yield None after each part of an embedding, then the vectors of all `count` sequences."""
    rows = [b""] * count
    for part in parts:
        for index, vector in part.items():
            rows[index] = vector.tobytes()
        yield None
    yield rows


def _only_token(output: RequestOutput) -> int | None:
    """Return the token id of an output that carries a single token and nothing else; else None."""
    if output.finished or len(output.outputs) != 1:
        return None
    only = output.outputs[0]
    if only.index or only.logprobs is not None or only.finish_reason or len(only.token_ids) != 1:
        return None
    return only.token_ids[0]


def _piece(handle: int, output: RequestOutput) -> m.Piece:
    metrics = output.metrics
    return m.Piece(
        handle,
        [
            m.Continuation(
                each.index,
                list(each.token_ids),
                m.encode_logprobs(each.logprobs),
                each.finish_reason,
                each.stop_reason,
            )
            for each in output.outputs
        ],
        output.finished,
        output.num_cached_tokens,
        metrics.first_scheduled_time if metrics else None,
        metrics.first_token_time if metrics else None,
        m.encode_logprobs(output.prompt_logprobs),
    )


def _text(error: BaseException) -> str:
    return str(error)[: m.MAX_REASON]
