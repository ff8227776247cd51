"""Log-probabilities of a completion's text, sent in step with it."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

from engine.outputs import CompletionOutput
from engine.server.protocol.logprobs import CompletionLogprobs, completion_logprobs
from engine.text.detokenizer import TextOffsets

__all__ = ["ChoiceLogprobs"]


class ChoiceLogprobs:
    """Log-probabilities of one continuation, each sent with the text that it belongs to.

    Text that may become a stop string is sent later than its tokens are known, or never.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], skips_special: bool) -> None:
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._skips_special = skips_special
        self._offsets: TextOffsets | None = None
        self._begin = 0  # length of the prompt's text, with `echo`
        self._num_sent = 0  # characters
        self._held = CompletionLogprobs([], [], [], [])

    def add_prompt(self, text: str, token_ids: Sequence[int], entries: Sequence[Any]) -> None:
        """Add the prompt's log-probabilities."""
        self._begin = len(text)
        offsets = None
        if self._tokenizer is not None:
            offsets = TextOffsets(self._tokenizer, (), False, text)
        self._add(token_ids, entries, offsets, 0)

    def add(self, completion: CompletionOutput) -> None:
        """Add the log-probabilities of new tokens."""
        assert completion.logprobs is not None
        if self._offsets is None and self._tokenizer is not None:
            self._offsets = TextOffsets(self._tokenizer, self._prompt_ids, self._skips_special)
        self._add(completion.token_ids, completion.logprobs, self._offsets, self._begin)

    def _add(
        self,
        token_ids: Sequence[int],
        entries: Sequence[Any],
        offsets: TextOffsets | None,
        begin: int,
    ) -> None:
        positions = [begin] * len(token_ids)
        if offsets is not None:
            positions = [begin + offsets.push(i) for i in token_ids[: len(entries)]]
        more = completion_logprobs(token_ids, entries, positions, self._tokenizer)
        self._held.tokens += more.tokens
        self._held.token_logprobs += more.token_logprobs
        self._held.top_logprobs += more.top_logprobs
        self._held.text_offset += more.text_offset

    def take(self, num_chars: int, is_last: bool) -> CompletionLogprobs:
        """Send this many further characters; return the log-probabilities that go with them."""
        self._num_sent += num_chars
        held = self._held
        end = self._num_sent
        offsets = held.text_offset
        count = len(offsets) if is_last else bisect.bisect_left(offsets, end)
        self._held = CompletionLogprobs(
            held.tokens[count:],
            held.token_logprobs[count:],
            held.top_logprobs[count:],
            offsets[count:],
        )
        return CompletionLogprobs(
            held.tokens[:count],
            held.token_logprobs[:count],
            held.top_logprobs[:count],
            [min(offset, end) for offset in offsets[:count]],
        )
