"""/v1/completions: text completion, streamed or not."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.async_engine import EngineClient
from engine.errors import in_item, map_items
from engine.outputs import CompletionOutput, RequestOutput
from engine.sampling_params import SamplingDefaults, SamplingParams
from engine.server.auth import isolate
from engine.server.choice_logprobs import ChoiceLogprobs
from engine.server.field_limits import (
    check_answer,
    check_fields,
    check_length,
    check_num_ids,
    check_text_of,
    text_of_ids,
)
from engine.server.json_response import JsonResponse
from engine.server.limits import check_model, read_struct
from engine.server.openapi import Endpoint
from engine.server.prompt_log import log_prompt
from engine.server.protocol.common import Usage, own_names, usage_options
from engine.server.protocol.completion import (
    CompletionChoice,
    CompletionChunks,
    CompletionRequest,
    CompletionResponse,
    completion_params,
    prompts_of,
)
from engine.server.protocol.errors import APIError, failed_request, renamed_params
from engine.server.protocol.logprobs import prompt_logprobs, trimmed
from engine.server.server_config import ServerConfig
from engine.server.sse import EventStream, all_or_none, unless_disconnected

__all__ = ["ENDPOINTS", "CompletionJob", "answer_completion", "prepare_completion", "routes"]


ENDPOINTS = (
    Endpoint(
        "post",
        "/v1/completions",
        "Continue prompts",
        CompletionRequest,
        CompletionResponse,
        streams=True,
    ),
)


def routes() -> list[Route]:
    """Return the routes of this module."""
    return [Route("/v1/completions", create_completion, methods=["POST"])]


async def create_completion(request: Request) -> Response:
    """Handle POST /v1/completions."""
    body = await read_struct(request, CompletionRequest)
    state = request.app.state
    model = check_model(body.model, request)
    isolate(request, body)
    defaults = state.chat.sampling_defaults
    job = await prepare_completion(state.client, body, model, defaults, state.config)
    if state.config.log_prompts:
        for prompt in job.prompts:
            log_prompt(job.request_id, prompt)
    if body.stream:
        return EventStream(_frames(job), keep_alive=state.config.sse_keep_alive)
    answer = await unless_disconnected(request.receive, answer_completion(job))
    encode = msgspec.json.encode
    data = await asyncio.to_thread(encode, answer) if job.has_logprobs else encode(answer)
    return JsonResponse(data)


@dataclasses.dataclass(frozen=True)
class CompletionJob:
    """Validated /v1/completions request.

    Attributes
    ----------
    client : EngineClient
    body : CompletionRequest
    request_id, model : str
    created : int
        Unix time, seconds.
    prompts : list of str, list of int, or mapping
        A mapping has a text and its token ids.
    params : SamplingParams
    """

    client: EngineClient
    body: CompletionRequest
    request_id: str
    model: str
    created: int
    prompts: list[Any]
    params: SamplingParams

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer may be large for its text, so that threads build it."""
        return self.params.logprobs is not None or self.params.prompt_logprobs is not None

    async def outputs(self, index: int) -> AsyncGenerator[RequestOutput, None]:
        """Yield the engine's outputs for prompt `index`."""
        body = self.body
        request_id = self.request_id if len(self.prompts) == 1 else f"{self.request_id}-{index}"
        outputs = self.client.generate(
            self.prompts[index],
            self.params,
            request_id=request_id,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            timeout=body.timeout,
            lora_request=self.client.adapter_of(self.model),
        )
        with renamed_params(own_names(body)), in_item("prompt", index, len(self.prompts)):
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield output


async def prepare_completion(
    client: EngineClient,
    body: CompletionRequest,
    model: str,
    defaults: SamplingDefaults,
    config: ServerConfig,
) -> CompletionJob:
    """Validate a request without sending anything to the engine.

    Raises
    ------
    APIError, RequestError
        If the request cannot be served.
    """
    check_fields(body, config)
    with renamed_params(own_names(body)):
        params = completion_params(body, defaults)
    prompts: list[Any] = prompts_of(body.prompt, config.max_prompts)
    is_text = isinstance(prompts[0], str)
    is_counted = params.prompt_logprobs is not None or bool(body.return_token_ids)
    if is_text and (body.add_special_tokens is False or (is_counted and client.tokenizer)):
        prompts = await _encoded(client, prompts, with_special=body.add_special_tokens is not False)
    params = await _limited(client, body, prompts, params, config)
    if body.echo and isinstance(prompts[0], list) and client.tokenizer is not None:
        with_text = functools.partial(_with_text, client)
        prompts = await asyncio.to_thread(map_items, "prompt", prompts, with_text)
    request_id = f"cmpl-{secrets.token_hex(16)}"
    return CompletionJob(client, body, request_id, model, int(time.time()), prompts, params)


async def _encoded(client: EngineClient, texts: list[str], *, with_special: bool) -> list[Any]:
    """Return texts as prompts with token ids, which keep the text if it is the tokens' own."""
    tokenizer = client.tokenizer
    if tokenizer is None:
        raise APIError(400, "prompt must be token ids, the model has no tokenizer")

    def encode(text: str) -> list[int]:
        check_length(text, "prompt", client)
        ids: list[int] = tokenizer.encode(text, with_special)
        return ids

    ids = await asyncio.to_thread(map_items, "prompt", texts, encode)
    if not with_special:
        return ids
    pairs = zip(texts, ids, strict=True)
    return [{"prompt": text, "prompt_token_ids": each} for text, each in pairs]


def _with_text(client: EngineClient, ids: list[int]) -> dict[str, Any]:
    """Return token ids as a prompt with its text, which `echo` returns."""
    return {"prompt": text_of_ids(ids, "prompt", client), "prompt_token_ids": ids}


async def _limited(
    client: EngineClient,
    body: CompletionRequest,
    prompts: list[Any],
    params: SamplingParams,
    config: ServerConfig,
) -> SamplingParams:
    """Bound the answer's log-probabilities and echoed text; see `check_answer`."""
    given = [each["prompt_token_ids"] if isinstance(each, dict) else each for each in prompts]
    if body.echo:
        texts = [each["prompt"] if isinstance(each, dict) else each for each in prompts]
        check = functools.partial(check_text_of, texts, "prompt", client.tokenizer, config)
        await asyncio.to_thread(check, num_copies=params.n)
    if body.return_token_ids:
        check_num_ids(given, config, num_copies=params.n)
    is_echoed = bool(body.echo) and body.logprobs is not None
    is_shown = body.prompt_logprobs is not None
    return check_answer(
        params,
        sum(map(len, given)) if params.prompt_logprobs is not None else 0,
        client,
        config,
        num_prompts=len(prompts),
        num_copies=params.n * max(1, is_echoed + is_shown),
    )


async def answer_completion(job: CompletionJob) -> CompletionResponse:
    """Return the complete response."""

    async def one(index: int) -> RequestOutput:
        async with contextlib.aclosing(job.outputs(index)) as outputs:
            return [output async for output in outputs][-1]  # the only output: not streamed

    finals = await all_or_none([one(index) for index in range(len(job.prompts))])
    if job.has_logprobs:
        return await asyncio.to_thread(_response, job, finals)
    return _response(job, finals)


def _response(job: CompletionJob, finals: list[RequestOutput]) -> CompletionResponse:
    """Build the response from the last output of each prompt."""
    choices: list[CompletionChoice] = []
    usage = _UsageCounter()
    for index, output in enumerate(finals):
        writer = _ChoiceWriter(job, index)
        usage.note(index, output)
        for completion in output.outputs:
            choices.append(writer.choice(output, completion))
    total = usage.total(is_without_output=writer.hides_output)
    return CompletionResponse(job.request_id, job.created, job.model, choices, total)


# ---- choices


class _UsageCounter:
    """Sums token counts over all prompts of a request."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._num_output = 0

    def note(self, index: int, output: RequestOutput) -> None:
        """Count an output's tokens."""
        if output.num_cached_tokens or index not in self._prompts:
            self._prompts[index] = len(output.prompt_token_ids), output.num_cached_tokens
        for completion in output.outputs:
            self._num_output += len(completion.token_ids)

    def total(self, *, is_without_output: bool = False) -> Usage:
        """Return the total usage."""
        counts = self._prompts.values()
        num_output = 0 if is_without_output else self._num_output
        return Usage.of(sum(c[0] for c in counts), num_output, sum(c[1] for c in counts))


class _ChoiceWriter:
    """Builds the choices of one prompt; with `echo`, each one starts with the prompt."""

    def __init__(self, job: CompletionJob, prompt_index: int) -> None:
        self._job = job
        self._first_index = prompt_index * job.params.n
        self._item = f"prompt[{prompt_index}]: " if len(job.prompts) > 1 else ""
        self._continuations: dict[int, ChoiceLogprobs] = {}
        self._prompt_logprobs: Sequence[Any] | None = None  # only the first output has them
        self._has_logprobs = job.body.logprobs is not None
        self.hides_output = bool(job.body.echo) and job.body.max_tokens == 0
        self._returns_ids = bool(job.body.return_token_ids)
        self.is_plain = not (job.body.echo or self._has_logprobs or self._returns_ids)
        self.is_plain &= job.params.prompt_logprobs is None

    def index(self, completion: CompletionOutput) -> int:
        """Return the choice index of a continuation, counted over all prompts."""
        return self._first_index + completion.index

    def choice(self, output: RequestOutput, completion: CompletionOutput) -> CompletionChoice:
        """Build the choice for a continuation's output."""
        job = self._job
        reason = completion.finish_reason
        if reason == "error":
            raise failed_request(completion.stop_reason, self._item)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        is_first = completion.index not in self._continuations
        if is_first:
            skips = job.params.skip_special_tokens
            self._continuations[completion.index] = ChoiceLogprobs(
                job.client.tokenizer, output.prompt_token_ids, skips
            )
        continuation = self._continuations[completion.index]
        text = ""
        if is_first and job.body.echo:
            text = output.prompt or ""
            if self._has_logprobs:
                ids = output.prompt_token_ids
                entries = trimmed(ids, self._prompt_logprobs or (), job.body.logprobs or 0)
                continuation.add_prompt(text, ids, entries)
        if not self.hides_output:
            text += completion.text
            if self._has_logprobs and completion.logprobs is not None:
                continuation.add(completion)
        logprobs = None
        if self._has_logprobs:
            logprobs = continuation.take(len(text), is_last=reason is not None)
        shown = None
        num_prompt = job.body.prompt_logprobs
        if is_first and num_prompt is not None and self._prompt_logprobs is not None:
            shown = trimmed(output.prompt_token_ids, self._prompt_logprobs, num_prompt)
        choice = CompletionChoice(
            self.index(completion),
            text,
            logprobs,
            "length" if self.hides_output and reason is not None else reason,
            completion.stop_reason,
            prompt_logprobs(shown),
        )
        if self._returns_ids:
            choice.token_ids = [] if self.hides_output else list(completion.token_ids)
            if is_first:
                choice.prompt_token_ids = list(output.prompt_token_ids)
        return choice


# ---- streaming


class _FrameWriter:
    """Builds the SSE frames of a streamed request."""

    def __init__(self, job: CompletionJob) -> None:
        self.shows_usage, self._is_continuous = usage_options(job.body.stream_options)
        self._chunks = CompletionChunks(
            job.request_id, job.model, job.created, shows_usage=self.shows_usage
        )
        self._writers = [_ChoiceWriter(job, index) for index in range(len(job.prompts))]
        self._is_plain = self._writers[0].is_plain
        self._usage = _UsageCounter()

    def frames(self, prompt_index: int, output: RequestOutput) -> bytes:
        """Return an output's frames; b"" if it contains nothing new."""
        if self.shows_usage:
            self._usage.note(prompt_index, output)
        if self._is_continuous:
            self._chunks.show_usage(self._total())
        writer = self._writers[prompt_index]
        found = b""
        for completion in output.outputs:
            if self._is_plain and completion.finish_reason is None:
                if completion.text:
                    found += self._chunks.text(writer.index(completion), completion.text)
                continue
            choice = writer.choice(output, completion)
            has_logprobs = choice.logprobs is not None and bool(choice.logprobs.tokens)
            has_logprobs |= choice.prompt_logprobs is not None
            if choice.text or has_logprobs or choice.token_ids or choice.finish_reason is not None:
                found += self._chunks.choice(choice)
        return found

    def usage(self) -> bytes:
        """Return the usage frame."""
        return self._chunks.usage(self._total())

    def _total(self) -> Usage:
        return self._usage.total(is_without_output=self._writers[0].hides_output)


async def _frames(job: CompletionJob) -> AsyncGenerator[bytes, None]:
    writer = _FrameWriter(job)
    sources = [job.outputs(index) for index in range(len(job.prompts))]
    if len(sources) == 1:
        async with contextlib.aclosing(sources[0]) as outputs:
            async for output in outputs:
                if frames := await _written(writer, 0, output):
                    yield frames
    else:
        async with contextlib.aclosing(_merged(sources)) as pairs:
            async for index, output in pairs:
                if frames := await _written(writer, index, output):
                    yield frames
    if writer.shows_usage:
        yield writer.usage()


async def _written(writer: _FrameWriter, index: int, output: RequestOutput) -> bytes:
    """Return an output's frames; a thread builds those with a prompt's log-probabilities."""
    if output.prompt_logprobs is None:
        return writer.frames(index, output)
    return await asyncio.to_thread(writer.frames, index, output)


async def _merged(
    sources: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield the items of all generators as they arrive, each with its generator's index."""
    queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue(2 * len(sources))
    tasks = [asyncio.ensure_future(_pump(i, s, queue)) for i, s in enumerate(sources)]
    try:
        num_open = len(tasks)
        while num_open:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(index: int, source: AsyncGenerator[Any, None], queue: asyncio.Queue[Any]) -> None:
    """Put a generator's items into the queue, followed by None or its error."""
    try:
        async with contextlib.aclosing(source):
            async for item in source:
                await queue.put((index, item))
    except Exception as error:
        await queue.put((index, error))
    else:
        await queue.put((index, None))
