"""Serves the requests of an OpenAI batch file with an engine in this process."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec

from engine.async_engine import EngineClient
from engine.checks import shown
from engine.errors import EngineError, did_you_mean
from engine.server.chat_stream import ChatService, ChatStream
from engine.server.protocol.chat import ChatCompletionRequest
from engine.server.protocol.common import SamplingFields, decode_body
from engine.server.protocol.completion import CompletionRequest
from engine.server.protocol.errors import APIError, api_error, error_body
from engine.server.routes.chat import answer_chat
from engine.server.routes.completions import answer_completion, prepare_completion
from engine.server.routes.embeddings import EmbeddingRequest, embed

__all__ = ["MAX_LINE", "Batch", "BatchResult"]

MAX_LINE = 32 << 20
"""Maximum bytes per line."""

Body = ChatCompletionRequest | CompletionRequest | EmbeddingRequest


class BatchLine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Input line: one request."""

    custom_id: str
    method: Literal["POST"] | None = None
    url: str
    body: msgspec.Raw


class BatchResponse(msgspec.Struct):
    """Response to one request, identical to the server's."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct):
    """Why an input line is not a valid request."""

    code: str
    message: str


class BatchResult(msgspec.Struct):
    """Output line: a response, or an error if the input line is not a valid request."""

    id: str
    custom_id: str | None
    response: BatchResponse | None = None
    error: BatchError | None = None

    @property
    def is_success(self) -> bool:
        """Whether the request succeeded (status 200)."""
        return self.response is not None and self.response.status_code == 200


class Batch:
    """Serves the requests of a batch file concurrently.

    Parameters
    ----------
    client : EngineClient
    chat : ChatService
        Its `config` limits every request, as the server's does.
    names : sequence of str
        Accepted names of the model; responses use the first one.
    window : int
        Maximum number of lines in flight: started, but not yet yielded.
    window_bytes : int
        Maximum total bytes of the lines in flight; a single line may exceed it.
    """

    def __init__(
        self,
        client: EngineClient,
        chat: ChatService,
        names: Sequence[str],
        window: int,
        window_bytes: int = 64 << 20,
    ) -> None:
        self._client = client
        self._chat = chat
        self._names = names
        self._window = window
        self._window_bytes = window_bytes
        self._ids: set[str] = set()
        self._answers: dict[str, tuple[type[Body], Callable[[Any, str], Awaitable[Any]]]] = {
            "/v1/chat/completions": (ChatCompletionRequest, self._chat_completion),
            "/v1/completions": (CompletionRequest, self._completion),
            "/v1/embeddings": (EmbeddingRequest, self._embedding),
        }

    async def results(self, lines: Iterable[bytes]) -> AsyncGenerator[BatchResult, None]:
        """Yield the result of each line in input order.

        Blank lines are skipped. An invalid line yields an error, and the other lines continue.

        Raises
        ------
        EngineError
            If the engine has failed, so no further line can be served.
        """
        begun: deque[asyncio.Task[BatchResult]] = deque()
        sizes: deque[int] = deque()  # bytes of each line of `begun`
        num_bytes = 0
        try:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                num_bytes += len(line)
                while begun and (
                    begun[0].done() or len(begun) >= self._window or num_bytes > self._window_bytes
                ):
                    yield await begun.popleft()
                    num_bytes -= sizes.popleft()
                begun.append(asyncio.create_task(self._result(line, number)))
                sizes.append(len(line))
                await asyncio.sleep(0)
            while begun:
                yield await begun.popleft()
        finally:
            for task in begun:
                task.cancel()
            await asyncio.gather(*begun, return_exceptions=True)

    async def _result(self, line: bytes, number: int) -> BatchResult:
        name = f"batch_req_{secrets.token_hex(12)}"
        custom_id = None
        try:
            custom_id, kind, answer, raw = self._read(line)
        except APIError as error:
            custom_id = _custom_id(line)
            message = f"line {number}: {error.message}"
            return BatchResult(name, custom_id, error=BatchError("invalid_request", message))
        request_id = f"req-{secrets.token_hex(12)}"
        try:
            body = decode_body(bytes(raw), kind)
            self._check(body)
            found = msgspec.json.encode(await answer(body, request_id))
            status = 200
        except Exception as error:
            if self._client.error is not None:
                raise EngineError(f"the engine has failed: {self._client.error}") from error
            refusal = api_error(error)
            found = error_body(refusal)
            status = refusal.status
        response = BatchResponse(status, request_id, msgspec.Raw(found))
        return BatchResult(name, custom_id, response)

    def _read(
        self, line: bytes
    ) -> tuple[str, type[Body], Callable[[Any, str], Awaitable[Any]], msgspec.Raw]:
        """Return a line's custom_id, body type, handler and raw body."""
        if len(line) > MAX_LINE:
            raise APIError(400, f"must have at most {MAX_LINE} bytes")
        found = decode_body(line, BatchLine, "the line")
        if found.custom_id in self._ids:
            raise APIError(400, f"custom_id must be unique; got {shown(found.custom_id)} again")
        if found.url not in self._answers:
            known = ", ".join(self._answers)
            hint = did_you_mean(found.url, self._answers)
            raise APIError(400, f"url must be one of {known}; got {shown(found.url)}{hint}")
        self._ids.add(found.custom_id)
        return found.custom_id, *self._answers[found.url], found.body

    def _check(self, body: Body) -> None:
        """Reject options that batches do not support."""
        if body.model is not None and body.model not in self._names:
            names = ", ".join(self._names)
            message = f"the model {shown(body.model)} does not exist; this run has {names}"
            raise APIError(404, message, param="model", code="model_not_found")
        if isinstance(body, SamplingFields) and body.stream:
            raise APIError(400, "stream must be false in a batch; got true", param="stream")

    def _model(self, body: Body) -> str:
        return body.model or self._names[0]

    async def _completion(self, body: CompletionRequest, request_id: str) -> Any:
        defaults = self._chat.sampling_defaults
        config = self._chat.config
        job = await prepare_completion(self._client, body, self._model(body), defaults, config)
        return await answer_completion(job)

    async def _chat_completion(self, body: ChatCompletionRequest, request_id: str) -> Any:
        name = f"chatcmpl-{secrets.token_hex(16)}"
        created = int(time.time())
        chat = await self._chat.prepare(body, name)
        stream = ChatStream(self._client, chat)
        return await answer_chat(
            stream,
            name,
            self._model(body),
            created,
            chat.params.n,
            returns_ids=bool(body.return_token_ids),
        )

    async def _embedding(self, body: EmbeddingRequest, request_id: str) -> Any:
        return await embed(self._client, body, self._model(body), self._chat.config)


def _custom_id(line: bytes) -> str | None:
    """Return the custom_id of an invalid line, if it can still be read."""
    try:
        found = msgspec.json.decode(line[:MAX_LINE])
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None
    custom_id = found.get("custom_id") if isinstance(found, dict) else None
    return custom_id[:512] if isinstance(custom_id, str) else None
