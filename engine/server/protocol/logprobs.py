"""Log-probabilities in the /v1/chat/completions and /v1/completions formats."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from engine.outputs import Logprob
from engine.text.detokenizer import known_bytes

__all__ = [
    "ChatLogprobs",
    "CompletionLogprobs",
    "PromptLogprob",
    "TokenLogprob",
    "TopLogprob",
    "chat_logprobs",
    "completion_logprobs",
    "prompt_logprobs",
    "trimmed",
]

_LEAST = -9999.0  # lowest log-probability sent: JSON has no -inf

Entry = Mapping[int, Logprob]


class TopLogprob(msgspec.Struct):
    """One of the top tokens at a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    """Generated token, and the top tokens at its position."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities in the /v1/chat/completions format."""

    content: list[TokenLogprob]
    refusal: list[TokenLogprob] | None = None


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities in the /v1/completions format."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class PromptLogprob(msgspec.Struct):
    """Entry of vLLM's `prompt_logprobs` dicts, which are keyed by token id."""

    logprob: float
    rank: int | None
    decoded_token: str | None


def chat_logprobs(
    token_ids: Sequence[int], entries: Sequence[Entry], num_top: int, tokenizer: Any
) -> list[TokenLogprob]:
    """Return a `TokenLogprob` per token.

    Parameters
    ----------
    token_ids : sequence of int
    entries : sequence of dict from int to Logprob
        `CompletionOutput.logprobs` for these tokens.
    num_top : int
        Number of top tokens to include; -1: all.
    tokenizer : Tokenizer or None
        Used to get the bytes of tokens that are not complete characters.
    """
    found = []
    for token_id, entry in zip(token_ids, entries, strict=False):
        # The top tokens come first; the sampled token follows if it is not among them.
        top = itertools.islice(entry.items(), len(entry) if num_top < 0 else num_top)
        tops = [TopLogprob(*_shown(i, item, tokenizer)) for i, item in top]
        found.append(TokenLogprob(*_shown(token_id, entry[token_id], tokenizer), tops))
    return found


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[Entry | None],
    offsets: Iterable[int],
    tokenizer: Any,
) -> CompletionLogprobs:
    """Return the log-probabilities of these tokens.

    Parameters
    ----------
    token_ids : sequence of int
    entries : sequence of (dict from int to Logprob, or None)
    offsets : iterable of int
        Where each token begins in the text, in characters.
    tokenizer : Tokenizer or None
    """
    found = CompletionLogprobs([], [], [], [])
    for token_id, entry, offset in zip(token_ids, entries, offsets, strict=False):
        text = _text(token_id, entry, tokenizer)
        found.tokens.append(text)
        found.text_offset.append(offset)
        if entry is None:  # the first token of a prompt has no log-probability
            found.token_logprobs.append(None)
            found.top_logprobs.append(None)
            continue
        found.token_logprobs.append(max(entry[token_id].logprob, _LEAST))
        top: dict[str, float] = {}
        for i, e in entry.items():
            key = _text(i, entry, tokenizer)
            if key in top or (key == text and i != token_id):
                key = f"token_id:{i}"  # tokens may have equal texts, such as parts of characters
            top[key] = max(e.logprob, _LEAST)
        found.top_logprobs.append(top)
    return found


def trimmed(
    token_ids: Sequence[int], entries: Sequence[Entry | None], num_top: int
) -> Sequence[Entry | None]:
    """Return entries with at most `num_top` top tokens each, besides the actual one; -1: all."""
    if num_top < 0:
        return entries
    found: list[Entry | None] = []
    for token_id, entry in zip(token_ids, entries, strict=False):
        if entry is not None and len(entry) > num_top:
            top = dict(itertools.islice(entry.items(), num_top))  # the top tokens come first
            entry = top | {token_id: entry[token_id]}
        found.append(entry)
    return found


def prompt_logprobs(
    entries: Sequence[Entry | None] | None,
) -> list[dict[int, PromptLogprob] | None] | None:
    """Return a prompt's log-probabilities in vLLM's format."""
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            i: PromptLogprob(max(e.logprob, _LEAST), e.rank, e.decoded_token)
            for i, e in entry.items()
        }
        for entry in entries
    ]


def _shown(token_id: int, entry: Logprob, tokenizer: Any) -> tuple[str, float, list[int] | None]:
    data = None if tokenizer is None else known_bytes(tokenizer, token_id)
    text = entry.decoded_token
    if text is None:
        text = "" if data is None else data.decode("utf-8", "replace")
    return text, max(entry.logprob, _LEAST), None if data is None else list(data)


def _text(token_id: int, entry: Entry | None, tokenizer: Any) -> str:
    text = entry[token_id].decoded_token if entry is not None and token_id in entry else None
    if text is None:
        data = None if tokenizer is None else known_bytes(tokenizer, token_id)
        text = "" if data is None else data.decode("utf-8", "replace")
    return text
