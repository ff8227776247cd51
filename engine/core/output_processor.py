"""Builds `RequestOutput`s from sampled ids: text, stop strings, log-probabilities, metrics.

`OutputStream` is one continuation, `OutputGroup` a request with all its continuations. They hold
the user-visible state; the scheduler's state stays in `Request`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from engine.checks import shown_with_type
from engine.errors import RequestError
from engine.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    next_piece,
)
from engine.request import Request, RequestStatus
from engine.runner.sampling import SamplingSpec
from engine.sampling_params import RequestOutputKind, SamplingParams
from engine.text.detokenizer import IncrementalDetokenizer, TokenTexts, known_bytes
from engine.text.stop import StopChecker

__all__ = ["End", "OutputGroup", "OutputStream", "token_texts"]

_FINAL_ONLY = RequestOutputKind.FINAL_ONLY
_DELTA = RequestOutputKind.DELTA


class End(NamedTuple):
    """The end of a continuation that only its text reveals (the scheduler would continue it)."""

    finish_reason: str
    stop_reason: int | str | None
    num_output_tokens: int | None = None
    """Output tokens to keep; None keeps all."""


class OutputStream:
    """The output of one continuation so far.

    Parameters
    ----------
    request : Request
        The scheduler's record: token ids, status and sampling spec. Read-only here.
    group : OutputGroup
        The request this continuation belongs to.
    tokenizer : Tokenizer or None
        None leaves the text empty.
    texts : mapping of bool to TokenTexts
        From `token_texts`.

    Attributes
    ----------
    is_quiet : bool
        Whether tokens need no further processing until the continuation ends.
    is_plain : bool
        Whether `next_output` applies: a single streamed continuation with token ids and text only.
    has_ended_elsewhere : bool
        Whether another engine has reported its end; no output holds it then.
    num_resumed_tokens : int
        Output tokens that another engine generated.
    """

    __slots__ = (
        "_detokenizer",
        "_is_delta",
        "_is_finish_sent",
        "_is_lazy",
        "_logprobs",
        "_num_read",
        "_params",
        "_sent_tokens",
        "_shows_logprobs",
        "_stop",
        "_text",
        "_tokenizer",
        "cumulative_logprob",
        "group",
        "has_ended_elsewhere",
        "is_plain",
        "is_quiet",
        "num_resumed_tokens",
        "request",
    )

    def __init__(
        self,
        request: Request,
        group: OutputGroup,
        tokenizer: Any,
        texts: Mapping[bool, TokenTexts],
    ) -> None:
        spec: SamplingSpec = request.spec
        self.request = request
        self.group = group
        self.cumulative_logprob = 0.0
        params = self._params = spec.params
        self._detokenizer = None
        self._tokenizer = tokenizer if params.detokenize else None
        if self._tokenizer is not None:
            skip = params.skip_special_tokens
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, request.prompt_token_ids, skip, texts[skip]
            )
        self._is_delta = params.output_kind is _DELTA
        self._shows_logprobs = params.logprobs is not None
        # Text that is not shown before the end is decoded in one go at the end.
        self._is_lazy = params.output_kind is _FINAL_ONLY and not params.stop
        self._stop = StopChecker(params.stop or (), params.include_stop_str_in_output)
        self._text: list[str] = []  # text not yet shown (DELTA), or the whole text
        self._logprobs: list[dict[int, Logprob]] | None = None if spec.num_logprobs is None else []
        # Set after the first token: its arrival time is always recorded.
        self.is_quiet = False
        self.is_plain = (
            params.num_continuations == 1
            and params.output_kind is not _FINAL_ONLY
            and not params.stop
            and spec.num_logprobs is None
            and params.prompt_logprobs is None
        )
        self._num_read = 0  # number of token ids already decoded
        self._sent_tokens = 0
        self._is_finish_sent = False
        self.has_ended_elsewhere = False
        self.num_resumed_tokens = 0

    def resume(self, token_ids: Sequence[int] | None) -> End | None:
        """Continue after `token_ids`, which were already reported; None marks an ended one.

        Returns the end found in their text: a tokenizer may raise here that did not before.
        """
        request = self.request
        if token_ids is None:
            request.status = RequestStatus.FINISHED_ABORTED
            request.stream = None
            self.has_ended_elsewhere = True
            return None
        request.output_token_ids = list(token_ids)
        end = None if self._is_lazy else self._read_ids()
        if end is not None and end.num_output_tokens is not None:
            del request.output_token_ids[end.num_output_tokens :]
        self._sent_tokens = self.num_resumed_tokens = len(request.output_token_ids)
        if self._is_delta:
            self._text = []
        if self._logprobs is not None:
            self._logprobs = [{} for _ in request.output_token_ids]
        return end

    def append(
        self, token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]]
    ) -> End | None:
        """Process ids already appended to the request; return the end found in their text."""
        end = None if self._is_lazy else self._read_ids()
        if self._logprobs is not None:
            num_cut = 0
            if end is not None and end.num_output_tokens is not None:
                num_cut = self.request.num_output_tokens - end.num_output_tokens
            for token, entry in list(zip(token_ids, logprobs, strict=True))[: -num_cut or None]:
                self._logprobs.append(with_text(entry, self._tokenizer))
                self.cumulative_logprob += entry[token].logprob
        self.is_quiet = self._is_lazy and self._logprobs is None
        return end

    def next_output(self, token_ids: list[int], now: float) -> RequestOutput | None:
        """Process one new id of an unfinished plain stream and return its output.

        Fast path of `append` and `OutputGroup.output`, used for most tokens. Returns None and
        changes nothing if the tokenizer raises; the slow path then reports the error.
        """
        text = ""
        group = self.group
        request = self.request
        if self._detokenizer is not None:
            try:
                text = self._detokenizer.push_token(token_ids[0])
            except Exception:
                return None
            self._num_read += 1
        self._sent_tokens += 1
        if not self._is_delta:
            self._text.append(text)
            text = self._new_text()
            token_ids = request.output_token_ids.copy()
        metrics = group.metrics
        metrics.num_generation_tokens += 1
        metrics.last_token_time = now
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        metrics.num_cached_tokens = num_cached = request.num_cached_tokens
        prompt_ids = request.prompt_token_ids
        return next_piece(
            group.request_id, group.prompt, prompt_ids, text, token_ids, metrics, num_cached
        )

    def finish(self) -> End | None:
        """Decode the remaining text of a finished request; return an `End` if that fails."""
        end = None
        if self._detokenizer is not None:
            end = self._read_ids()
            if self._stop.stop is None and end is None:
                end = self._guarded(self._flush)
        return end if end is not None and end.finish_reason == "error" else None

    def has_news(self) -> bool:
        """Tell whether `completion` would return anything not yet reported."""
        request = self.request
        return len(request.output_token_ids) > self._sent_tokens or (
            request.is_finished and not self._is_finish_sent
        )

    def completion(self, index: int) -> CompletionOutput:
        """Return the whole continuation, or in DELTA mode the part since the last call."""
        request = self.request
        logprobs = self._logprobs
        ids = request.output_token_ids
        start = self._sent_tokens if self._is_delta else 0
        reason = request.finish_reason
        self._sent_tokens = len(ids)
        self._is_finish_sent = reason is not None
        return CompletionOutput(
            index,
            self._new_text() if self._text else "",
            ids[start:],
            None if logprobs is None else self.cumulative_logprob,
            logprobs[start:] if logprobs is not None and self._shows_logprobs else None,
            reason,
            request.stop_reason,
        )

    def _read_ids(self) -> End | None:
        """Decode the ids that have not been decoded yet."""
        return self._guarded(self._push) if self._detokenizer is not None else None

    def _push(self) -> End | None:
        assert self._detokenizer is not None
        request = self.request
        ids = request.output_token_ids[self._num_read :]
        num_new = len(ids)
        self._num_read += num_new
        # As in vLLM, drop the text of the token that ended the request, unless requested.
        ended_by_id = request.status is RequestStatus.FINISHED_STOPPED and not self._stop.stop
        if ids and ended_by_id and not self._params.include_stop_str_in_output:
            ids = ids[:-1]
        if not self._params.stop:
            text = (
                self._detokenizer.push(ids)
                if len(ids) != 1
                else self._detokenizer.push_token(ids[0])
            )
            self._text.append(text)
            return None
        pieces = [self._detokenizer.push_token(token_id) for token_id in ids]
        return self._push_until_stop(pieces, request.num_output_tokens - num_new)

    def _push_until_stop(self, pieces: Sequence[str], num_before: int) -> End | None:
        """Append the text of each id, up to and including the id that completes a stop string."""
        for count, text in enumerate(pieces, num_before + 1):
            result = self._stop.push(text, check=count >= self._params.min_tokens)
            self._text.append(result.text)
            if result.stop is not None:
                return End("stop", result.stop, count)
        return None

    def _flush(self) -> None:
        assert self._detokenizer is not None
        self._text += [self._stop.flush(), self._detokenizer.finish()]

    def _guarded(self, part: Callable[[], End | None]) -> End | None:
        """Call `part`; if the tokenizer raises, stop decoding and fail the request."""
        try:
            return part()
        except Exception as error:
            self._detokenizer = None
            return End("error", f"the tokenizer raised {type(error).__name__}: {error}")

    def _new_text(self) -> str:
        """Return the text to report; each piece is joined once, so streaming takes linear time."""
        text = "".join(self._text)
        self._text = [] if self._is_delta else [text]
        return text


class OutputGroup:
    """A user's request: its continuations and their outputs.

    Parameters
    ----------
    request_id : str
    prompt : str or None
        Text of the prompt, if it was given as text.
    params : SamplingParams
    arrival_time : float
    tokenizer : Tokenizer or None

    Attributes
    ----------
    streams : list of OutputStream
        One per continuation.
    num_open : int
        Continuations the engine is still serving.
    resumed_ends : list of (OutputStream, End)
        Continuations whose text has ended within the tokens that another engine generated.
    deadline : float or None
        Time at which the request times out, in seconds of the monotonic clock.
    """

    __slots__ = (
        "_is_delta",
        "_is_prompt_sent",
        "_is_ranked",
        "_prompt_logprobs",
        "_shows_prompt_logprobs",
        "_tokenizer",
        "_waits_for_end",
        "deadline",
        "metrics",
        "num_open",
        "params",
        "prompt",
        "request_id",
        "resumed_ends",
        "streams",
    )

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        params: SamplingParams,
        arrival_time: float,
        tokenizer: Any,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self._is_delta = params.output_kind is _DELTA
        self._shows_prompt_logprobs = params.prompt_logprobs is not None
        self._is_ranked = params.num_continuations > params.n
        self._waits_for_end = params.output_kind is _FINAL_ONLY or self._is_ranked
        self.metrics = RequestMetrics(arrival_time, num_continuations=params.num_continuations)
        self.streams: list[OutputStream] = []
        self.num_open = params.num_continuations
        self.resumed_ends: list[tuple[OutputStream, End]] = []
        self.deadline: float | None = None
        self._tokenizer = tokenizer
        self._prompt_logprobs: list[dict[int, Logprob] | None] = []
        self._is_prompt_sent = False

    @property
    def is_finished(self) -> bool:
        """Tell whether all continuations have finished and been released by the engine."""
        return not self.num_open

    @property
    def num_generation_tokens(self) -> int:
        """Tokens that this engine has generated so far, over all continuations."""
        return sum([len(s.request.output_token_ids) - s.num_resumed_tokens for s in self.streams])

    @property
    def wants_output(self) -> bool:
        """Tell whether an output is due now, given `output_kind` and ranking."""
        return not (self._waits_for_end and self.num_open)

    def open(
        self,
        requests: list[Request],
        texts: Mapping[bool, TokenTexts],
        resumed: Sequence[Sequence[int] | None] | None = None,
    ) -> list[Request]:
        """Create a stream per continuation; return the requests that have not ended.

        Parameters
        ----------
        requests : list of Request
        texts : mapping of bool to TokenTexts
            From `token_texts`.
        resumed : sequence of (sequence of int or None), optional
            For a request moved from another engine: the tokens of each continuation that were
            generated and reported there, or None for a continuation that has ended.

        Raises
        ------
        RequestError
            If `resumed` has the wrong number of continuations, or all of them have ended.
        """
        for request in requests:
            request.stream = OutputStream(request, self, self._tokenizer, texts)
        self.streams = [request.stream for request in requests]
        if resumed is None:
            return requests
        if len(resumed) != len(self.streams) or all(ids is None for ids in resumed):
            raise RequestError(
                f"resumed must have {len(self.streams)} continuations, not all of which have "
                f"ended; got {shown_with_type(resumed)}"
            )
        for stream, token_ids in zip(self.streams, resumed, strict=True):
            if (end := stream.resume(token_ids)) is not None:
                self.resumed_ends.append((stream, end))
            self.num_open -= token_ids is None
        return [stream.request for stream in self.streams if not stream.request.is_finished]

    def note_scheduled(self) -> None:
        """Record when the request's first step started."""
        if self.metrics.first_scheduled_time is None:
            self.metrics.first_scheduled_time = time.monotonic()

    def note_tokens(self, count: int, now: float) -> None:
        """Record the arrival of tokens; quiet streams call this only for their first and last."""
        metrics = self.metrics
        metrics.num_generation_tokens += count
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        metrics.last_token_time = now

    def add_prompt_logprobs(self, position: int, entries: Sequence[dict[int, Logprob]]) -> None:
        """Store the log-probabilities of the prompt tokens from `position` on."""
        if not self._prompt_logprobs:
            self._prompt_logprobs = [None] * len(self.streams[0].request.prompt_token_ids)
        tokenizer = self._tokenizer if self.params.detokenize else None
        shown = [with_text(entry, tokenizer) for entry in entries]
        self._prompt_logprobs[position : position + len(entries)] = shown

    def output(self) -> RequestOutput:
        """Return the request's whole state, or in DELTA mode the part since the last call."""
        request = self.streams[0].request
        metrics = self.metrics
        metrics.num_cached_tokens = request.num_cached_tokens
        return RequestOutput(
            self.request_id,
            self.prompt,
            request.prompt_token_ids,
            self._completions(),
            not self.num_open,
            self._shown_prompt_logprobs(request) if self._shows_prompt_logprobs else None,
            metrics,
            request.num_cached_tokens,
        )

    def _completions(self) -> list[CompletionOutput]:
        streams = self.streams
        if len(streams) == 1:
            return [streams[0].completion(0)]
        own = [(i, s) for i, s in enumerate(streams) if not s.has_ended_elsewhere]
        if self._is_ranked:
            # Failed and aborted ones rank last: their sums cover too few tokens to compare.
            ranked = sorted([s for _, s in own], key=_rank)
            return [s.completion(i) for i, s in enumerate(ranked[: self.params.n])]
        every = not self._is_delta
        return [s.completion(i) for i, s in own if every or s.has_news()]

    def _shown_prompt_logprobs(
        self, request: Request
    ) -> Sequence[dict[int, Logprob] | None] | None:
        """Return the prompt's log-probabilities; in DELTA mode, only with the first output."""
        if self._is_delta and self._is_prompt_sent:
            return None
        self._is_prompt_sent = True
        return self._prompt_logprobs or [None] * request.num_prompt_tokens


def token_texts(tokenizer: Any) -> dict[bool, TokenTexts]:
    """Return the per-token text caches by `skip_special_tokens`; empty without a tokenizer."""
    return {s: TokenTexts(tokenizer, s) for s in (True, False)} if tokenizer is not None else {}


def with_text(entry: dict[int, Logprob], tokenizer: Any) -> dict[int, Logprob]:
    """Return `entry` with the text of each token; unchanged without a tokenizer.

    Bytes that do not form a complete character are shown as U+FFFD.
    """
    if tokenizer is None:
        return entry
    return {i: Logprob(p.logprob, p.rank, _text_of(i, tokenizer)) for i, p in entry.items()}


def _text_of(token_id: int, tokenizer: Any) -> str | None:
    """Return the text of a token; None if the tokenizer raises."""
    data = known_bytes(tokenizer, token_id)
    return None if data is None else data.decode("utf-8", "replace")


def _rank(stream: OutputStream) -> tuple[bool, int, float]:
    """Sort key: complete continuations by log-probability, then the rest by length."""
    is_whole = stream.request.finish_reason in ("stop", "length")
    length = 0 if is_whole else stream.request.num_output_tokens
    return not is_whole, -length, -stream.cumulative_logprob
