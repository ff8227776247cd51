"""`IncrementalDetokenizer`: decode a stream of token ids to text."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from engine.text.token_bytes import strip_spaces

__all__ = ["DecodesBytes", "IncrementalDetokenizer", "TextOffsets", "TokenTexts", "known_bytes"]

_REPLACEMENT = "\ufffd"
_REPLACEMENT_BYTES = _REPLACEMENT.encode()
_LONGEST_PARTIAL = 3  # maximum bytes of an incomplete UTF-8 character
_REALIGN_CHARS = 32  # how far from its expected position a token's text is searched for


class DecodesBytes(Protocol):
    """Tokenizer interface required for detokenization."""

    @property
    def special_ids(self) -> Collection[int]:
        """Ids omitted by `skip_special_tokens`."""

    @property
    def strip_left(self) -> int:
        """Number of leading spaces that decoding strips from a text."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token."""


def known_bytes(tokenizer: DecodesBytes, token_id: int) -> bytes | None:
    """Return the bytes of a token; None if the tokenizer raises.

    For tokens that are only shown: the detokenizer reports those that belong to an answer's text.
    """
    try:
        return tokenizer.token_bytes(token_id)
    except Exception:
        return None


class TokenTexts(dict[int, "str | None"]):
    """Text of each single token, filled on first use; None if it holds a partial character.

    A token whose bytes are whole characters always adds the same text, so most tokens of a stream
    cost one lookup. Any number of streams may share a table.

    Parameters
    ----------
    tokenizer : DecodesBytes
    skip_special_tokens : bool
        Map special tokens to empty text.

    Examples
    --------
    >>> class Bytes:  # one token per byte
    ...     special_ids, strip_left = (), 0
    ...     def token_bytes(self, token_id):
    ...         return bytes([token_id])
    >>> texts = TokenTexts(Bytes())
    >>> texts[65], texts[0xC3]
    ('A', None)
    """

    def __init__(self, tokenizer: DecodesBytes, skip_special_tokens: bool = True) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self.skipped = tokenizer.special_ids if skip_special_tokens else frozenset()

    def __missing__(self, token_id: int) -> str | None:
        data = b"" if token_id in self.skipped else self._tokenizer.token_bytes(token_id)
        text: str | None
        try:
            text = data.decode()
        except UnicodeDecodeError:  # part of a character, or invalid
            text = None
        self[token_id] = text
        return text


class IncrementalDetokenizer:
    """Decodes one sequence piece by piece.

    The pieces returned by `push` and `finish` concatenate to the text of all ids after the prompt,
    however the ids are split over calls. A piece never ends inside a character and contains no
    character of the prompt, except one that the prompt left incomplete: it is returned once
    complete. The work per token does not depend on the sequence length.

    Parameters
    ----------
    tokenizer : DecodesBytes
        Usually a `Tokenizer`.
    prompt_ids : sequence of int
        Tokens before the stream; if empty, the text equals `tokenizer.decode(ids)`.
    skip_special_tokens : bool
        Omit special tokens.
    texts : TokenTexts, optional
        Table shared with other streams of the same tokenizer and `skip_special_tokens`.

    Examples
    --------
    >>> class Bytes:  # one token per byte
    ...     special_ids, strip_left = (), 0
    ...     def token_bytes(self, token_id):
    ...         return bytes([token_id])
    >>> stream = IncrementalDetokenizer(Bytes(), prompt_ids=[])
    >>> [stream.push([byte]) for byte in "né".encode()]
    ['n', '', 'é']
    >>> stream.push([0xC3]), stream.finish(), stream.text
    ('', '\ufffd', 'né\ufffd')
    """

    __slots__ = (
        "_is_between",
        "_num_shown",
        "_num_strip",
        "_pending",
        "_pieces",
        "_skipped",
        "_texts",
        "_tokenizer",
    )

    def __init__(
        self,
        tokenizer: DecodesBytes,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        texts: TokenTexts | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer, skip_special_tokens) if texts is None else texts
        self._skipped = self._texts.skipped
        self._pieces: list[str] = []
        tail = self._tail(prompt_ids)
        # bytes of an incomplete character
        self._pending = tail[codecs.utf_8_decode(tail, "replace", False)[1] :]
        # The prompt's text shows its incomplete last character as one U+FFFD, or as two for half a
        # surrogate. If the character stays incomplete, they belong to the prompt, not the output.
        self._num_shown = len(self._pending.decode("utf-8", "replace"))
        self._num_strip = 0 if tail else tokenizer.strip_left
        self._is_between = self._ends_between()

    @property
    def text(self) -> str:
        """All text returned so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens; return the text they complete."""
        skipped = self._skipped
        token_bytes = self._tokenizer.token_bytes
        data = b"".join([token_bytes(i) for i in ids if i not in skipped])
        return self._decode(data, final=False)

    def push_token(self, token_id: int) -> str:
        """Add one token; return the text it completes."""
        if self._is_between:
            text = self._texts[token_id]
            if text is not None:
                self._pieces.append(text)
                return text
        return self.push((token_id,))

    def finish(self) -> str:
        """Return the rest of the text: U+FFFD if the last character is incomplete."""
        return self._decode(b"", final=True)

    def num_broken(self, token_id: int) -> int:
        """Return how many U+FFFD the text gets before the next token, for a broken character."""
        data = b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)
        try:
            codecs.utf_8_decode(self._pending + data[:1], "strict", False)
        except UnicodeDecodeError:
            return max(0, len(self._pending.decode("utf-8", "replace")) - self._num_shown)
        return 0

    def _decode(self, data: bytes, final: bool) -> str:
        data = self._pending + data
        piece, used = codecs.utf_8_decode(data, "replace", final)
        self._pending = data[used:]
        if self._num_shown and (piece or final):
            piece = self._without_broken(piece, data)
        if self._num_strip and piece:
            # Strip leading spaces once; the first pieces may consist only of spaces.
            left = strip_spaces(piece, self._num_strip)
            self._num_strip = self._num_strip - (len(piece) - len(left)) if not left else 0
            piece = left
        if piece:
            self._pieces.append(piece)
        self._is_between = self._ends_between()
        return piece

    def _ends_between(self) -> bool:
        """Tell whether the next token's text is independent of everything before it."""
        return not (self._pending or self._num_shown or self._num_strip)

    def _without_broken(self, piece: str, data: bytes) -> str:
        """Return `piece` without the prompt's last character, if it stayed incomplete."""
        num_shown = self._num_shown
        self._num_shown = 0
        is_broken = piece.startswith(_REPLACEMENT) and not data.startswith(_REPLACEMENT_BYTES)
        return piece[num_shown:] if is_broken else piece

    def _tail(self, prompt_ids: Sequence[int]) -> bytes:
        """Return enough trailing bytes of the prompt to tell whether it ends inside a character."""
        tail = b""
        for token_id in reversed(prompt_ids):
            if token_id not in self._skipped:
                data = known_bytes(self._tokenizer, token_id)
                if data is None:
                    break
                tail = data + tail
            if len(tail) > _LONGEST_PARTIAL:
                break
        return tail


class TextOffsets:
    """Finds where each token begins in the text of its sequence, in characters.

    A token that begins inside a character has that character's offset. A token for which the
    tokenizer raises counts as one without text.

    Parameters
    ----------
    tokenizer : DecodesBytes
    prompt_ids : sequence of int
        Tokens before the first one; their text is not counted.
    skip_special_tokens : bool
        Whether the text omits special tokens.
    text : str, optional
        The text that was encoded to these tokens, if it is known. It may lack special tokens, and
        differ from the tokens' text if the tokenizer normalizes.

    Examples
    --------
    >>> class Bytes:  # one token per byte
    ...     special_ids, strip_left = (), 0
    ...     def token_bytes(self, token_id):
    ...         return bytes([token_id])
    >>> offsets = TextOffsets(Bytes())
    >>> [offsets.push(byte) for byte in "néa".encode()]
    [0, 1, 1, 2]
    """

    def __init__(
        self,
        tokenizer: DecodesBytes,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        text: str | None = None,
    ) -> None:
        self._tokenizer = _Known(tokenizer)
        self._stream = IncrementalDetokenizer(self._tokenizer, prompt_ids, skip_special_tokens)
        self._text = text
        self._end = 0  # length of the text of the tokens so far, less an incomplete character

    def push(self, token_id: int) -> int:
        """Add a token; return its offset."""
        if self._text is not None and self._is_added(token_id, self._text):
            return min(self._end, len(self._text))
        start = self._end + self._stream.num_broken(token_id)
        piece = self._stream.push_token(token_id)
        self._end += len(piece)
        if self._text is None:
            return start
        if not self._text.startswith(piece, self._end - len(piece)):
            piece = piece.strip(" ")
            found = self._text.find(piece, start, start + len(piece) + _REALIGN_CHARS)
            if piece and found >= 0:
                start = found
                self._end = found + len(piece)
        return min(start, len(self._text))

    def _is_added(self, token_id: int, text: str) -> bool:
        """Return whether this is a special token that is not written in the text."""
        if token_id not in self._tokenizer.special_ids:
            return False
        return not text.startswith(self._tokenizer.token_bytes(token_id).decode(), self._end)


class _Known:
    """A tokenizer that has no bytes for the tokens for which `tokenizer` raises."""

    def __init__(self, tokenizer: DecodesBytes) -> None:
        self.special_ids = tokenizer.special_ids
        self.strip_left = tokenizer.strip_left
        self._tokenizer = tokenizer

    def token_bytes(self, token_id: int) -> bytes:
        return known_bytes(self._tokenizer, token_id) or b""
