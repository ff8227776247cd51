r"""Steps of a ``tokenizer.json`` that may run in this process: those known to be harmless.

A step is harmless if its time is linear in the text, it cannot panic, and it adds a bounded length.
The growth factors of successive normalizers multiply. A regular expression is harmless only if
listed here: a backtracking one may take exponential time, or quadratic time, like ``\s+$`` on a run
of spaces. The list holds the expressions of published models. Other steps are not rejected: they
run in a separate process, with limits (`engine.text.encode_worker`).

Steps are dicts with "type", as in ``tokenizer.json``. Their content is untrusted: no function here
may raise on any of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.text.pretokenizers import PRE_TOKENIZERS

__all__ = ["MAX_GROWTH", "growth", "is_linear_regex", "unknown_step"]

MAX_GROWTH = 64
"""Maximum product of the normalizers' growth factors (UTF-8 bytes after / before)."""

_MAX_STEPS = 16  # maximum steps in a Sequence
_MAX_PIECES = 64  # maximum pieces in a post-processor's template
_SYMBOLS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
# Of published models all the same: DeepSeek LLM's, SuperBPE's and Tiny Aya's.
_QUADRATIC_REGEXES = frozenset(
    [r"\s+$", r"(?=(\d{3})+(?!\d))", r"\d{1,3}(?=(?:\d{3})*\b)"],
)
_LINEAR_REGEXES = (
    frozenset([pattern for known in PRE_TOKENIZERS.values() for pattern in known.patterns])
    - _QUADRATIC_REGEXES
    | {
        r"\d",
        r"\d{1,3}",
        r"\p{N}{1,3}",
        r"[\r\n]",
        r" {2,}",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",  # DeepSeek-V3
        _SYMBOLS + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+",  # BLOOM
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",  # GPT-4, as tiktoken spells it
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"  # Qwen3.5
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)

# Growth factor: maximum UTF-8 bytes of output per byte of input.
_NORMALIZER_GROWTH = {
    "NFC": 3,
    "NFD": 3,
    "NFKC": 11,
    "NFKD": 11,
    "Lowercase": 2,
    "Strip": 1,
    "StripAccents": 1,
    "Nmt": 1,
    "ByteLevel": 2,
    "BertNormalizer": 12,  # spaces around each character, NFD, lower case
}
_PRE_TOKENIZERS = frozenset(
    [
        *("ByteLevel", "Digits", "Metaspace", "Whitespace", "WhitespaceSplit"),
        *("BertPreTokenizer", "Punctuation", "UnicodeScripts", "CharDelimiterSplit"),
    ]
)
_POST_PROCESSORS = frozenset(["ByteLevel", "BertProcessing", "RobertaProcessing"])


def unknown_step(spec: Mapping[str, Any]) -> str | None:
    """Return the name of the first step not known to be harmless; None if all are.

    Parameters
    ----------
    spec : mapping
        Holds "normalizer", "pre_tokenizer" and "post_processor", each a step or None.
    """
    for step in _leaves(spec.get("pre_tokenizer"), "pretokenizers"):
        kind = _kind(step)
        if kind not in _PRE_TOKENIZERS and not (kind == "Split" and _is_linear(step)):
            return f"pre-tokenizer {kind}"
    if not growth(spec.get("normalizer")) <= MAX_GROWTH:
        return "normalizer"
    for step in _leaves(spec.get("post_processor"), "processors"):
        kind = _kind(step)
        if kind not in _POST_PROCESSORS and not (
            kind == "TemplateProcessing" and _is_short_template(step)
        ):
            return f"post-processor {kind}"
    return None


def growth(normalizer: object) -> float:
    """Return the factor by which a text may grow, in bytes; infinity if unknown.

    Examples
    --------
    >>> growth({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    3.0
    >>> growth({"type": "Precompiled", "precompiled_charsmap": ""})
    inf
    """
    return math.prod(_step_growth(step) for step in _leaves(normalizer, "normalizers"))


def is_linear_regex(pattern: object) -> bool:
    """Tell whether a step's "pattern" is plain text or a listed regular expression."""
    if not isinstance(pattern, dict) or len(pattern) != 1:
        return False
    text = pattern.get("String")
    if isinstance(text, str):
        return bool(text)
    regex = pattern.get("Regex")
    return isinstance(regex, str) and regex in _LINEAR_REGEXES


def _leaves(step: object, key: str) -> list[object]:
    """Return the steps of a Sequence, or the step itself; nested Sequences are not flattened."""
    if step is None:
        return []
    if isinstance(step, dict) and step.get("type") == "Sequence":
        steps = step.get(key)
        return steps if isinstance(steps, list) and len(steps) <= _MAX_STEPS else [step]
    return [step]


def _kind(step: object) -> str:
    kind = step.get("type") if isinstance(step, dict) else None
    return kind[:40] if isinstance(kind, str) else "?"


def _is_linear(step: object) -> bool:
    return isinstance(step, dict) and is_linear_regex(step.get("pattern"))


def _step_growth(step: object) -> float:
    kind = _kind(step)
    if not isinstance(step, dict) or kind not in ("Prepend", "Replace"):
        return _NORMALIZER_GROWTH.get(kind, math.inf)
    text = step.get("prepend" if kind == "Prepend" else "content")
    if not isinstance(text, str) or (kind == "Replace" and not _is_linear(step)):
        return math.inf
    added = _num_bytes(text)
    if kind == "Prepend":  # once per part between two special tokens, which may be one byte long
        return 1.0 + added
    # A regular expression's match has at least one byte.
    return max(1.0, added / _num_bytes(step["pattern"].get("String", " ")))


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _is_short_template(step: object) -> bool:
    """Tell whether a template holds the text at most once, and few special tokens, all defined."""
    if not isinstance(step, dict):
        return False
    pieces = step.get("single")
    defined = step.get("special_tokens")
    if not isinstance(pieces, list) or len(pieces) > _MAX_PIECES or not isinstance(defined, dict):
        return False
    names = [piece["SpecialToken"] for piece in pieces if _has(piece, "SpecialToken")]
    texts = [piece for piece in pieces if _has(piece, "Sequence")]
    return (
        len(texts) <= 1
        and len(texts) + len(names) == len(pieces)
        and _num_ids(names, defined) <= _MAX_PIECES
    )


def _has(piece: object, key: str) -> bool:
    return isinstance(piece, dict) and len(piece) == 1 and isinstance(piece.get(key), dict)


def _num_ids(names: list[dict[str, Any]], defined: dict[str, Any]) -> float:
    """Return how many ids the named special tokens have; infinity if one is undefined."""
    total = 0
    for name in names:
        key = name.get("id")
        token = defined.get(key) if isinstance(key, str) else None
        ids = token.get("ids") if isinstance(token, dict) else None
        if not isinstance(ids, list):
            return math.inf
        total += len(ids)
    return total
