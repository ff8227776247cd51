"""/inference/v1/generate: continue token ids, without text; vLLM's endpoint of this name."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.async_engine import EngineClient
from engine.outputs import CompletionOutput, RequestOutput
from engine.sampling_params import SamplingParams
from engine.server.auth import isolate
from engine.server.field_limits import (
    check_answer,
    check_counts,
    check_num_tokens,
    limited_timeout,
)
from engine.server.json_response import JsonResponse
from engine.server.limits import check_model, read_struct
from engine.server.openapi import Endpoint
from engine.server.prompt_log import log_prompt
from engine.server.protocol.common import Usage, usage_options
from engine.server.protocol.errors import APIError, failed_request, renamed_params
from engine.server.protocol.generate import (
    GenerateChoice,
    GenerateRequest,
    GenerateResponse,
    GenerateSampling,
    generate_params,
)
from engine.server.protocol.logprobs import ChatLogprobs, chat_logprobs, prompt_logprobs
from engine.server.sse import EventStream, unless_disconnected

__all__ = ["ENDPOINTS", "routes"]

_PATH = "/inference/v1/generate"
_FIELDS = {"prompt": "token_ids", "prompt_token_ids": "token_ids"}

ENDPOINTS = (
    Endpoint("post", _PATH, "Continue token ids", GenerateRequest, GenerateResponse, streams=True),
)


def routes() -> list[Route]:
    """Return the routes of this module."""
    return [Route(_PATH, create_generation, methods=["POST"])]


async def create_generation(request: Request) -> Response:
    """Handle POST /inference/v1/generate."""
    body = await read_struct(request, GenerateRequest)
    state = request.app.state
    model = check_model(body.model, request)
    isolate(request, body)
    if not body.token_ids:
        raise APIError(400, "token_ids must not be empty", param="token_ids")
    wholes = ("logprobs", "prompt_logprobs")
    check_counts(body.sampling_params or GenerateSampling(), state.config, wholes=wholes)
    check_num_tokens(len(body.token_ids), "token_ids", state.client)
    params = check_answer(
        generate_params(body), len(body.token_ids), state.client, state.config, num_copies=1
    )
    body.timeout = limited_timeout(body.timeout, state.config)
    job = _Job(state.client, body, params, model)
    if state.config.log_prompts:
        log_prompt(job.engine_id, body.token_ids)
    if body.stream:
        return EventStream(job.frames(), keep_alive=state.config.sse_keep_alive)
    answer = await unless_disconnected(request.receive, job.answer())
    encode = msgspec.json.encode
    data = await asyncio.to_thread(encode, answer) if job.has_logprobs else encode(answer)
    return JsonResponse(data)


class _Job:
    """Validated request.

    Parameters
    ----------
    client : EngineClient
    body : GenerateRequest
    params : SamplingParams
    model : str
        Model name to report in the answer.
    """

    def __init__(
        self, client: EngineClient, body: GenerateRequest, params: SamplingParams, model: str
    ) -> None:
        self.engine_id = f"gen-{secrets.token_hex(16)}"
        self.has_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
        self._client = client
        self._body = body
        self._params = params
        self._head = (body.request_id or self.engine_id, model, int(time.time()))
        self._num_output = 0
        self._num_cached = 0

    async def answer(self) -> GenerateResponse:
        """Return the complete answer."""
        async with contextlib.aclosing(self._outputs()) as outputs:
            [last] = [output async for output in outputs]
        if self.has_logprobs:
            return await asyncio.to_thread(self._response, last)
        return self._response(last)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as SSE frames; the first carries the prompt's log-probabilities."""
        shows_usage, is_continuous = usage_options(self._body.stream_options)
        async with contextlib.aclosing(self._outputs()) as outputs:
            async for output in outputs:
                if output.prompt_logprobs is None:
                    found = self._response(output)
                else:
                    found = await asyncio.to_thread(self._response, output)
                if not is_continuous:
                    found.usage = None
                if found.choices or found.prompt_logprobs is not None:
                    yield _frame(found)
        if shows_usage:
            yield _frame(GenerateResponse(*self._head, [], self._usage()))

    async def _outputs(self) -> AsyncGenerator[RequestOutput, None]:
        body = self._body
        outputs = self._client.generate(
            body.token_ids,
            self._params,
            request_id=self.engine_id,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            timeout=body.timeout,
            lora_request=self._client.adapter_of(body.model),
        )
        with renamed_params(_FIELDS):
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield output

    def _response(self, output: RequestOutput) -> GenerateResponse:
        """Build the answer, or the frame, of an output."""
        self._num_cached = max(self._num_cached, output.num_cached_tokens)
        self._num_output += sum(len(each.token_ids) for each in output.outputs)
        choices = [
            self._choice(each) for each in output.outputs if each.token_ids or each.finish_reason
        ]
        shown = None
        if self._params.prompt_logprobs is not None:
            shown = prompt_logprobs(output.prompt_logprobs)
        return GenerateResponse(*self._head, choices, self._usage(), shown)

    def _choice(self, completion: CompletionOutput) -> GenerateChoice:
        reason = completion.finish_reason
        if reason == "error":
            raise failed_request(completion.stop_reason)
        logprobs = None
        if self._params.logprobs is not None and completion.logprobs is not None:
            tokenizer: Any = self._client.tokenizer
            logprobs = ChatLogprobs(
                chat_logprobs(
                    completion.token_ids, completion.logprobs, self._params.logprobs, tokenizer
                )
            )
        return GenerateChoice(
            completion.index, completion.token_ids, logprobs, reason, completion.stop_reason
        )

    def _usage(self) -> Usage:
        return Usage.of(len(self._body.token_ids), self._num_output, self._num_cached)


def _frame(found: GenerateResponse) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(found)
