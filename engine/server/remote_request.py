"""Client side of a request served by an engine in another process: text, stop strings, outputs.

The engine sends token ids; here they become outputs, with the same `OutputGroup` and `OutputStream`
classes that `LLMEngine` uses.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from engine.async_engine import ModelInfo
from engine.core.input_processor import InputProcessor, Prompt, PromptInput
from engine.core.output_processor import OutputGroup, OutputStream, token_texts
from engine.errors import RequestError
from engine.outputs import RequestOutput
from engine.request import FINISH_REASONS
from engine.runner.sampling import SamplingSpec
from engine.sampling_params import RequestOutputKind, SamplingParams
from engine.server.messages import Add, Continuation, End, Entries, Piece, decode_logprobs

__all__ = ["RemoteRequest", "RequestMaker", "engine_params"]

_DEFAULTS = dict(vars(SamplingParams()))
_MANY_ENTRIES = 256  # number of tokens whose log-probabilities are read in another thread
_SHORTEST_TIMEOUT = 1e-3  # seconds; for a request resumed past its deadline
# Fields applied on the client side: stop strings, the contents of outputs, `best_of`.
_OURS = {
    *("n", "best_of", "stop", "detokenize", "skip_special_tokens"),
    *("include_stop_str_in_output", "output_kind", "logits_processors"),
}


class RemoteRequest:
    """Request of an API process, read by one task.

    Outputs are built when they are read. A slow reader thus receives fewer outputs with more tokens
    each, and buffered memory is bounded by the request's token count.

    Parameters
    ----------
    message : Add
        Message that submits the request to an engine; it holds the request's handle.
    group : OutputGroup
        The request's output streams, which build its texts and outputs.

    Attributes
    ----------
    handle : int
        Handle of the request at its current engine.
    is_aborted : bool
        Whether an abort has been sent to the engine.
    num_crashes : int
        Number of engines that have crashed while serving it.
    is_finished : bool
        Whether all continuations have ended, in the engine or here because of their text.
    """

    __slots__ = (
        *("error", "group", "is_aborted", "is_finished", "message", "num_crashes"),
        *("_arrived", "_has_news", "_is_open", "_late", "_plain", "_waiter"),
    )

    def __init__(self, message: Add, group: OutputGroup) -> None:
        self.message = message
        self.group = group
        self.is_aborted = False
        self.num_crashes = 0
        self.error: BaseException | None = None
        self.is_finished = False
        self._is_open = [True] * len(group.streams)
        self._has_news = False
        self._late: list[Callable[[], Any]] = []  # what `next_output` has to read in a thread
        self._arrived: RequestOutput | None = None
        self._waiter: asyncio.Future[None] | None = None
        # The only continuation, if its tokens only need detokenizing.
        self._plain = group.streams[0] if group.streams[0].is_plain else None

    @property
    def handle(self) -> int:
        """Handle of the request at its current engine."""
        return self.message.handle

    @property
    def request_id(self) -> str:
        """Request id given by the client."""
        return self.message.request_id

    @property
    def has_begun(self) -> bool:
        """Whether its current engine resumed it with tokens from another engine."""
        return any(self.message.resumed or ())

    def resume(self) -> bool:
        """Prepare `message` for another engine; return False if nothing is left to generate.

        Tokens and text so far are kept, so the reader does not notice.
        """
        if self.is_finished:
            return False
        message = self.message
        streams = self.group.streams
        is_final = message.is_final_only  # if so, the engine has sent no tokens yet
        message.resumed = [
            ([] if is_final else list(stream.request.output_token_ids)) if is_open else None
            for stream, is_open in zip(streams, self._is_open, strict=True)
        ]
        return True

    def update_timeout(self) -> None:
        """Set the message's timeout to the time remaining until the deadline."""
        if self.group.deadline is not None:
            left = self.group.deadline - time.monotonic()
            self.message.timeout = max(_SHORTEST_TIMEOUT, left)

    async def next_output(self) -> RequestOutput:
        """Wait for the next output; once all are read, raise `error` if it is set."""
        while True:
            while self._late:
                await asyncio.to_thread(self._late.pop(0))
            if self._arrived is not None:
                output = self._arrived
                self._arrived = None
                return output
            if self._has_news and self.group.wants_output:
                self._has_news = False
                return self.group.output()
            if self.error is not None:
                raise self.error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def abort(self, stop_reason: str | None = None) -> None:
        """Finish the request with the tokens so far, as if its engine had aborted it."""
        now = time.monotonic()
        for index, is_open in enumerate(self._is_open):
            if is_open:
                self._push(Continuation(index, [], None, "abort", stop_reason), now)

    def fail(self, error: BaseException) -> None:
        """Make the reader raise `error` after the outputs that it has yet to read."""
        self.error = error
        self.is_finished = True
        self._wake()

    def push_token(self, token_id: int, now: float) -> list[End]:
        """Append a token to the request's only continuation, which must not have ended."""
        stream = self._plain
        if stream is not None and self._is_open[0] and not self._has_news and not self._arrived:
            stream.request.output_token_ids.append(token_id)
            self._arrived = stream.next_output([token_id], now)
            if self._arrived is not None:
                self._wake()
                return []
            stream.request.output_token_ids.pop()
        return self._push(Continuation(0, [token_id], None, None, None), now)

    def push(self, piece: Piece, now: float) -> list[End]:
        """Apply an update from the engine; return the ends to report back to it.

        Many log-probabilities are read by `next_output` in another thread, as each takes
        microseconds.
        """
        if _num_entries(piece) > _MANY_ENTRIES:
            if piece.is_finished:
                self._late.append(partial(self._apply, piece, now))
                self.is_finished = True
                self._wake()
                return []
            self._late.append(partial(self._read_prompt, piece.prompt_logprobs))
            piece.prompt_logprobs = None
        return self._apply(piece, now)

    # ---- mirrors LLMEngine

    def _apply(self, piece: Piece, now: float) -> list[End]:
        group = self.group
        if not self.has_begun:  # keep the first engine's values
            for stream in group.streams:
                stream.request.num_cached_tokens = piece.num_cached_tokens
            group.metrics.first_scheduled_time = piece.first_scheduled_time
            group.metrics.first_token_time = piece.first_token_time
        self._read_prompt(piece.prompt_logprobs)
        ends = [end for each in piece.continuations for end in self._push(each, now)]
        if piece.is_finished and self.group.num_open:
            self._finish(now)
        return ends

    def _read_prompt(self, entries: Entries | None) -> None:
        for position, entry in enumerate(decode_logprobs(entries or [])):
            if entry is not None:
                self.group.add_prompt_logprobs(position, [entry])

    def _push(self, new: Continuation, now: float) -> list[End]:
        if not self._is_open[new.index]:
            return []  # already ended here; the engine did not know yet
        group = self.group
        stream = self.group.streams[new.index]
        request = stream.request
        request.output_token_ids += new.token_ids
        if new.finish_reason is not None:
            request.status = FINISH_REASONS[new.finish_reason]
            request.stop_reason = new.stop_reason
        ends = []
        if new.token_ids:
            logprobs: Any = () if new.logprobs is None else decode_logprobs(new.logprobs)
            group.note_tokens(len(new.token_ids), now)
            end = stream.append(new.token_ids, logprobs)
            if end is not None:
                request.status = FINISH_REASONS[end.finish_reason]
                request.stop_reason = end.stop_reason
                if end.num_output_tokens is not None:
                    del request.output_token_ids[end.num_output_tokens :]
                ends.append(End(self.handle, new.index, end.finish_reason))
        if request.finish_reason is not None:
            self._release(new.index, now)
        self._has_news = True
        self._wake()
        return ends if new.finish_reason is None else []

    def _release(self, index: int, now: float) -> None:
        """Flush the text of a continuation that has ended."""
        self._is_open[index] = False
        stream = self.group.streams[index]
        if (end := stream.finish()) is not None:
            stream.request.status = FINISH_REASONS[end.finish_reason]
            stream.request.stop_reason = end.stop_reason
        self.group.num_open -= 1
        if not self.group.num_open:
            self._finish(now)

    def _finish(self, now: float) -> None:
        group = self.group
        self.is_finished = True
        group.num_open = 0
        group.metrics.finished_time = now
        group.metrics.num_generation_tokens = group.num_generation_tokens

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _num_entries(piece: Piece) -> int:
    """Return the number of tokens with log-probabilities."""
    return len(piece.prompt_logprobs or ()) + sum(
        len(each.logprobs or ()) for each in piece.continuations
    )


class RequestMaker:
    """Builds requests, running the engine's own checks before anything is sent.

    Parameters
    ----------
    info : ModelInfo
    tokenizer : Tokenizer or None
    """

    def __init__(self, info: ModelInfo, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts = token_texts(tokenizer)
        # Only the attributes that `InputProcessor` reads; the RoPE variant is the engine's choice.
        model: Any = SimpleNamespace(
            config=SimpleNamespace(vocab_size=info.vocab_size),
            eos_token_ids=info.eos_token_ids,
            short_rope_len=0,
        )
        self._inputs = InputProcessor(model, tokenizer, max_model_len=info.max_model_len)

    def encode(self, prompt: Prompt, cache_salt: str | None = None) -> PromptInput:
        """Tokenize and validate a prompt."""
        return self._inputs.encode(prompt, cache_salt)

    def make(
        self,
        request_id: str,
        prompt: PromptInput,
        params: SamplingParams,
        priority: int,
        timeout: float | None,
    ) -> RemoteRequest:
        """Build a request; its message has no handle yet.

        Raises
        ------
        RequestError
            If it fails a check that does not need the engine.
        """
        priority, timeout = self._inputs.check(request_id, params, priority, timeout)
        if params.logits_processors:
            raise RequestError(
                "logits_processors must be left out, as the engine is another process: functions "
                f"are never sent; got {len(params.logits_processors)}"
            )
        # Seeds, grammars and bad words are the engine's job, hence the placeholders.
        spec = SamplingSpec(params, 0, (), _num_logprobs(params))
        specs = [spec] * params.num_continuations
        group = OutputGroup(request_id, prompt.text, params, time.monotonic(), self._tokenizer)
        requests = self._inputs.requests(
            request_id, prompt.token_ids, specs, group.metrics.arrival_time
        )
        group.streams = [
            OutputStream(request, group, self._tokenizer, self._texts) for request in requests
        ]
        if timeout is not None:
            group.deadline = group.metrics.arrival_time + timeout
        message = Add(
            0,
            request_id,
            prompt.token_ids,
            _engine_params(params),
            params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop,
            priority,
            prompt.cache_salt,
            timeout,
        )
        return RemoteRequest(message, group)


def _num_logprobs(params: SamplingParams) -> int | None:
    """Return the number of log-probabilities to request, even if only to rank `best_of`."""
    is_ranked = params.num_continuations > params.n
    return 0 if params.logprobs is None and is_ranked else params.logprobs


def _engine_params(params: SamplingParams) -> dict[str, Any]:
    """Return the `SamplingParams` fields for the engine, which neither ranks nor detokenizes."""
    fields = {
        name: value
        for name, default in _DEFAULTS.items()
        if name not in _OURS and (value := getattr(params, name)) != default
    }
    if params.num_continuations > 1:
        fields["n"] = params.num_continuations
    if (num_logprobs := _num_logprobs(params)) is not None:
        fields["logprobs"] = num_logprobs
    structured = fields.get("structured")
    if structured is not None:
        fields["structured"] = _plain(structured)
    return fields


def _plain(structured: Any) -> dict[str, Any]:
    return {
        f.name: value
        for f in dataclasses.fields(structured)
        if (value := getattr(structured, f.name)) not in (None, False)
    }


def engine_params(fields: dict[str, Any], *, is_final_only: bool) -> SamplingParams:
    """Return the engine's sampling parameters for an `Add`: token ids only, no text."""
    kind = RequestOutputKind.FINAL_ONLY if is_final_only else RequestOutputKind.DELTA
    return SamplingParams(**fields, detokenize=False, output_kind=kind)
