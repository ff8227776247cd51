"""Control tokens in prompts: which there are, where a prompt has them, and encoding around them.

A text that spells a control token without being one (see `engine.text.content_marks`) is encoded
by a twin of the tokenizer. It shares vocabulary, merges and all steps, but its control tokens have
secret names, which are written at their places; so all other spellings are ordinary text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import tokenizers
from tokenizers import AddedToken

from engine.errors import RequestError
from engine.text.library_errors import library_errors

__all__ = ["ControlFinder", "Spans", "TwinEncoder", "control_tokens"]

Spans = Sequence[tuple[int, int]]
"""Start and end of each control token of a text, in characters and in order."""

_ROLES = ("system", "developer", "user", "assistant", "tool")
_FIRST_NAME = 0x100000  # private use plane 16
_BASE = 1 << 14  # number of characters that names are made of
_SPECIAL_LOOK = re.compile("<([|\uff5c]).*\\1>", re.DOTALL)
_MIN_MARKER = 3  # characters
_MAX_TAKEN = 1 << 16  # ids beyond the vocabulary's size, in a vocabulary with gaps


def control_tokens(
    backend: tokenizers.Tokenizer, literals: Iterable[str], listed: Collection[str]
) -> frozenset[str]:
    """Return the tokens that only a template may write.

    These are all special tokens, and other added tokens that the template writes as markers or that
    look like special ones: DeepSeek's ``<｜User｜>`` and Qwen's ``<tool_call>`` and
    ``<|fim_prefix|>`` are not special in their files.

    Parameters
    ----------
    backend : tokenizers.Tokenizer
    literals : iterable of str
        The texts that the template holds.
    listed : collection of str
        More such tokens, as far as they are added tokens.
    """
    texts = list(literals)
    return frozenset(
        token.content
        for token in _added(backend)
        if token.special or token.content in listed or _is_marker(texts, token.content)
    )


def _is_marker(texts: list[str], token: str) -> bool:
    if len(token) < _MIN_MARKER or any(c.isalnum() or c.isspace() for c in (token[0], token[-1])):
        return False
    if _SPECIAL_LOOK.fullmatch(token) or any(token in text for text in texts):
        return True
    halves = [token.split(role) for role in _ROLES if token.count(role) == 1]
    return any(
        any(text.endswith(head) for text in texts) and any(text.startswith(tail) for text in texts)
        for head, tail in halves
    )


def _added(backend: tokenizers.Tokenizer) -> list[AddedToken]:
    return [token for _, token in sorted(backend.get_added_tokens_decoder().items())]


class ControlFinder:
    """Finds control tokens in a text as the library does: the leftmost, then the longest.

    Parameters
    ----------
    backend : tokenizers.Tokenizer
    tokens : collection of str
        The control tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer, tokens: Collection[str]) -> None:
        whole = {token.content for token in _added(backend) if token.single_word}
        self._is_whole = {token: token in whole for token in tokens if token}
        self._sizes: dict[str, list[int]] = {}
        for token in sorted(self._is_whole, key=len, reverse=True):
            for head in {token[:1], token[:2]}:
                sizes = self._sizes.setdefault(head, [])
                if len(token) not in sizes:
                    sizes.append(len(token))
        heads = {token[:2] for token in self._is_whole}
        pattern = "|".join(map(re.escape, sorted(heads, key=len, reverse=True)))
        self._heads = re.compile(pattern or "(?!)")

    def __call__(self, text: str) -> Spans:
        """Return where `text` has control tokens."""
        found = []
        end = 0
        while (head := self._heads.search(text, end)) is not None:
            start = head.start()
            sizes = self._sizes[head[0]]
            fits = (start + n for n in sizes if self._is_at(text, start, start + n))
            end = next(fits, 0)
            if end:
                found.append((start, end))
            else:
                end = start + 1
        return found

    def _is_at(self, text: str, start: int, end: int) -> bool:
        is_whole = self._is_whole.get(text[start:end])
        if not is_whole:
            return is_whole is not None
        around = (text[start - 1 : start], text[end : end + 1])
        return not any(c.isalnum() or c == "_" for c in around)


class _Twin(NamedTuple):
    """A tokenizer whose control tokens have secret names."""

    backend: tokenizers.Tokenizer
    secret: str  # the beginning of every name
    names: dict[str, str]  # by control token
    ids: dict[int, int]  # from the twin's added tokens to the tokenizer's


class TwinEncoder:
    """Encodes texts of which only given spans are control tokens.

    Parameters
    ----------
    backend : tokenizers.Tokenizer
    tokens : collection of str
        The control tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer, tokens: Collection[str]) -> None:
        self._backend = backend
        self._tokens = frozenset(tokens)
        self._twin: _Twin | None = None
        added = backend.get_added_tokens_decoder().items()
        self._control_ids = frozenset(i for i, token in added if token.content in self._tokens)

    def __call__(self, text: str, add_special_tokens: bool, spans: Spans) -> tuple[list[int], bool]:
        """Encode `text`; see `encode_worker.encode_here`."""
        with library_errors(RequestError, "the text cannot be encoded"):
            twin = self._twin
            while twin is None or twin.secret in text:
                twin = self._twin = self._build()
            pieces = []
            end = 0
            for start, stop in spans:
                pieces += [text[end:start], twin.names[text[start:stop]]]
                end = stop
            pieces.append(text[end:])
            # The batch call releases the GIL and computes no offsets.
            [found] = twin.backend.encode_batch_fast(["".join(pieces)], add_special_tokens=False)
            if add_special_tokens:
                found = self._backend.post_process(found)
            ids: list[int] = []
            for token_id, is_added in zip(found.ids, found.special_tokens_mask, strict=True):
                if is_added:
                    ids.append(token_id)
                else:
                    ids += self._own(token_id, twin)
        is_added = len(ids) > 1 and ids[0] == ids[1] and bool(found.special_tokens_mask[0])
        return ids, is_added

    def _build(self) -> _Twin:
        """Make a twin, with new names."""
        secret = "".join(chr(_FIRST_NAME + secrets.randbelow(_BASE)) for _ in range(8))
        added = sorted(self._backend.get_added_tokens_decoder().items())
        names = {
            token.content: _name(secret, number)
            for number, (_, token) in enumerate(added)
            if token.content in self._tokens
        }
        twin = tokenizers.Tokenizer(self._backend.model)  # shared, not copied
        # New tokens get the ids from the vocabulary's size on: skip those that are taken.
        vocab = twin.get_vocab(with_added_tokens=False)
        num_taken = max(vocab.values(), default=-1) + 1 - len(vocab)
        if num_taken > _MAX_TAKEN:
            raise RequestError("the text must not spell control tokens; the vocabulary has gaps")
        twin.add_tokens([_name(secret, len(added) + n) for n in range(num_taken)])
        for step in ("normalizer", "pre_tokenizer"):
            if getattr(self._backend, step) is not None:
                setattr(twin, step, getattr(self._backend, step))
        twin.add_tokens(
            [
                AddedToken(
                    names.get(token.content, token.content),
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                )
                for _, token in added
            ]
        )
        ids = {}
        for own, token in added:
            token_id = twin.token_to_id(names.get(token.content, token.content))
            if token_id is not None:
                ids[token_id] = own
        return _Twin(twin, secret, names, ids)

    def _own(self, token_id: int, twin: _Twin) -> list[int]:
        """Return the backend's ids for an id of the twin."""
        known = twin.ids.get(token_id)
        if known is not None:
            return [known]
        if token_id not in self._control_ids:
            return [token_id]
        # The merges made a control token of an ordinary text: take it apart.
        spelling = self._backend.id_to_token(token_id) or ""
        return [part.id for char in spelling for part in self._backend.model.tokenize(char)]


def _name(secret: str, number: int) -> str:
    high, low = divmod(number, _BASE)
    return secret + chr(_FIRST_NAME + high) + chr(_FIRST_NAME + low)
