"""Tokens of a text that stands behind other text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["ids_behind"]

_BEFORE = "\x02"  # a text whose tokens do not depend on what follows


def ids_behind(
    tokenizer: Any, text: str, spelled: Callable[[Sequence[int]], bytes | None]
) -> list[int] | None:
    """Return the tokens of a text behind other text; None if the tokenizer has none that spell it.

    A tokenizer of sentencepiece begins each text that it encodes with a space.

    Parameters
    ----------
    tokenizer : Tokenizer
    text : str
        Not empty.
    spelled : callable
        Returns the bytes of token ids; None if they cannot be those of a text.

    Examples
    --------
    >>> class Spaced:  # one token per character; a space before each text
    ...     def encode(self, text, add_special_tokens=True):
    ...         return [ord(c) for c in " " + text]
    >>> ids_behind(Spaced(), "no", bytes)
    [110, 111]
    """
    data = text.encode()
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    found = spelled(ids)
    if found == data:
        return ids
    if found != b" " + data:
        return None
    before = tokenizer.encode(_BEFORE, add_special_tokens=False)
    ids = tokenizer.encode(_BEFORE + text, add_special_tokens=False)
    count = len(before)
    return ids[count:] if ids[:count] == before and spelled(ids[count:]) == data else None
