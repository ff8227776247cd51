"""From sampled ids to `RequestOutput`: text, stop strings, log-probabilities, metrics.

One `OutputStream` a request. It holds what the user sees; what the scheduler needs stays in
`Request`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from engine.request import Request
from engine.sampling_params import RequestOutputKind, SamplingParams
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.stop import StopChecker

__all__ = ["OutputStream"]


class OutputStream:
    """What one request has produced so far, ready to be shown.

    Parameters
    ----------
    request : Request
        Its ids and its end; read, never written.
    params : SamplingParams
    prompt : str or None
        The prompt's text, if it came as text.
    tokenizer : Tokenizer or None
        None leaves the text empty.
    """

    def __init__(
        self, request: Request, params: SamplingParams, prompt: str | None, tokenizer: Any
    ) -> None:
        self.request = request
        self.params = params
        self.prompt = prompt
        self.tokenizer = tokenizer
        self.metrics = RequestMetrics(arrival_time=request.arrival_time)
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, request.prompt_token_ids, params.skip_special_tokens
            )
        self._stop = StopChecker(params.stop or (), params.include_stop_str_in_output)
        self._text: list[str] = []
        self._logprobs: list[dict[int, Logprob]] | None = (
            [] if params.logprobs is not None else None
        )
        self._cumulative_logprob = 0.0
        self._sent_tokens = 0
        self._sent_text = 0

    def append(
        self, token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]]
    ) -> str | None:
        """Take new ids of the request; return the stop string that they complete, if any.

        A stop id's text is left out unless the stop is to be included, as vLLM does.
        """
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = time.monotonic()
        if self._logprobs is not None:
            self._logprobs += logprobs
            self._cumulative_logprob += sum(
                entry[token].logprob for token, entry in zip(token_ids, logprobs, strict=True)
            )
        if self._detokenizer is None:
            return None
        shown = list(token_ids)
        ends_by_id = self.request.stop_reason is not None and self.request.is_finished
        if ends_by_id and not self.params.include_stop_str_in_output:
            shown = shown[:-1]
        can_stop = self.request.num_output_tokens >= self.params.min_tokens
        result = self._stop.push(self._detokenizer.push(shown), check=can_stop)
        self._text.append(result.text)
        return result.stop

    def finish(self) -> None:
        """Release the text that was held back, and note the time."""
        self.metrics.finished_time = time.monotonic()
        if self._detokenizer is not None and self._stop.stop is None:
            self._text += [self._stop.flush(), self._detokenizer.finish()]

    @property
    def wants_output(self) -> bool:
        """Tell whether the user wants to see the request in its present state."""
        kind = self.params.output_kind
        return self.request.is_finished or kind is not RequestOutputKind.FINAL_ONLY

    def output(self) -> RequestOutput:
        """Return the request's state: all of it, or what is new since the last call (DELTA)."""
        request = self.request
        text, start = self._new_text(), 0
        if self.params.output_kind is RequestOutputKind.DELTA:
            start, self._sent_tokens = self._sent_tokens, request.num_output_tokens
        completion = CompletionOutput(
            index=0,
            text=text,
            token_ids=request.output_token_ids[start:],
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            logprobs=None if self._logprobs is None else self._logprobs[start:],
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=self.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[completion],
            finished=request.is_finished,
            metrics=self.metrics,
            num_cached_tokens=request.num_cached_tokens,
        )

    def _new_text(self) -> str:
        """Return the text to show; pieces are joined once, so that a stream stays linear."""
        if self.params.output_kind is RequestOutputKind.DELTA:
            start, self._sent_text = self._sent_text, len(self._text)
            return "".join(self._text[start:])
        self._text = ["".join(self._text)]
        return self._text[0]
