"""Bytes of each token, for both spellings that vocabularies use."""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

from engine.checks import is_integer, shown, shown_with_type
from engine.errors import ConfigError, RequestError

__all__ = ["TokenBytes", "byte_alphabet", "strip_spaces"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: printable character -> the byte it stands for.

    Printable Latin-1 bytes are spelled as themselves; the rest, in order, as the characters from
    U+0100 on.

    Examples
    --------
    >>> byte_alphabet()["Ġ"], len(byte_alphabet())
    (32, 256)
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


_ALPHABET = byte_alphabet()


class TokenBytes(dict[int, bytes]):
    """Bytes of each token by id, computed on first use.

    A dict, for a fast lookup per generated token.

    Parameters
    ----------
    backend : tokenizers.Tokenizer
        Its decoder shows how tokens are spelled: byte-level, or with a visible space.

    Raises
    ------
    ConfigError
        If the decoder is neither; such a tokenizer cannot decode incrementally.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        vocab = backend.get_vocab()
        self.vocab_size = max(vocab.values(), default=-1) + 1
        # Each byte is spelled with at least one character, so no spelling is shorter than its text.
        self.max_token_chars = max(map(len, vocab), default=1)
        self._space, self._has_bytes, self.strip_left = _read_decoder(backend.decoder)

    def __missing__(self, token_id: int) -> bytes:
        known = self._compute(token_id)
        if token_id < self.vocab_size:  # otherwise arbitrary ids would grow the dict
            self[token_id] = known
        return known

    def spelling(self, token_id: int) -> str | None:
        """Return the token as spelled in the vocabulary; None for an id without a token."""
        if not is_integer(token_id):
            raise RequestError(f"a token id must be an integer; got {shown_with_type(token_id)}")
        if token_id < 0:
            raise RequestError(f"a token id must be at least 0; got {shown(token_id)}")
        if token_id >= self.vocab_size:
            return None
        token: str | None = self._backend.id_to_token(int(token_id))
        return token

    def _compute(self, token_id: int) -> bytes:
        token = self.spelling(token_id)
        if token is None:
            return b""
        if self._space is None:
            is_spelled = token_id not in self._added and all(c in _ALPHABET for c in token)
            return bytes(_ALPHABET[c] for c in token) if is_spelled else token.encode()
        is_byte = _BYTE_TOKEN.fullmatch(token) if self._has_bytes else None
        if is_byte:
            return bytes([int(is_byte[1], 16)])
        return token.replace(self._space, " ").encode()


def strip_spaces(text: str, most: int) -> str:
    """Strip up to `most` leading spaces from `text`.

    Examples
    --------
    >>> strip_spaces("  a", 1)
    ' a'
    """
    return text[min(most, len(text) - len(text.lstrip(" "))) :]


def _read_decoder(decoder: Any) -> tuple[str | None, bool, int]:
    """Return (visible space, or None if byte-level; has byte tokens; leading spaces to strip)."""
    if decoder is None:
        raise ConfigError("the tokenizer must have a decoder, to give its tokens text; it has none")
    state = json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    space: str | None = None
    has_bytes = False
    strip = 0
    for step in steps:
        kind = step["type"]
        if kind == "Metaspace":
            space = step["replacement"]
            strip = int(step.get("prepend_scheme") != "never")
        elif kind == "Replace" and step["content"] == " " and "String" in step["pattern"]:
            space = step["pattern"]["String"]
        elif kind == "ByteFallback":
            has_bytes = True
        elif kind == "Strip" and step["content"] == " " and not step["stop"]:
            strip = step["start"]
        elif kind not in ("ByteLevel", "Fuse"):
            raise ConfigError(f"cannot decode with this tokenizer's decoder step {shown(step)}")
    if space is None and has_bytes:
        raise ConfigError(f"cannot decode with this tokenizer's decoder {shown(state)}")
    return space, has_bytes, strip
