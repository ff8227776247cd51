"""Parts of a tokenizer, independent of the file format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

__all__ = ["SPECIAL_NAMES", "TokenizerParts", "set_bos_eos"]

SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
"""Named special tokens, available to chat templates as variables."""


@dataclass(frozen=True)
class TokenizerParts:
    """A vocabulary with its special tokens and chat templates.

    Attributes
    ----------
    backend : tokenizers.Tokenizer
        Splits text, merges, and maps to ids; its post-processor adds BOS and EOS.
    encoder : callable, optional
        (text, add_special_tokens, pair) -> (ids, is_added), see `encode_worker.encode_here`; pair
        may be left out. If None, `backend` encodes.
    bos_token_id : int or None
    eos_token_ids : tuple of int
        Tokens that end a sequence, the tokenizer's own first.
    special_tokens : mapping of str to str
        Texts of the named special tokens ("bos_token": "<s>", ...).
    chat_templates : mapping of str to str
        Jinja sources by name; "default" is the main one.
    chat_control_tokens : tuple of str
        Added tokens that only a template may write, besides those that `control_tokens` finds.
    response_format : (str, mapping), optional
        How the model's answers are read, as the model declares it: the key, and its value.
    """

    backend: tokenizers.Tokenizer
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    encoder: Callable[..., tuple[list[int], bool]] | None = None
    chat_control_tokens: tuple[str, ...] = ()
    response_format: tuple[str, Mapping[str, Any]] | None = None


def set_bos_eos(backend: tokenizers.Tokenizer, bos_id: int | None, eos_id: int | None) -> None:
    """Make `backend` add BOS before and EOS after a text; None adds nothing."""
    pieces = ["$A"]
    if bos_id is not None:
        pieces.insert(0, "BOS")
    if eos_id is not None:
        pieces.append("EOS")
    ids = {"BOS": bos_id, "EOS": eos_id}
    used = [{"id": name, "ids": [ids[name]], "tokens": [name]} for name in pieces if name in ids]
    backend.post_processor = TemplateProcessing(single=pieces, special_tokens=used)
