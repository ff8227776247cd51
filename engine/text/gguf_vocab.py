"""Tokenizer of a .gguf file, built from its metadata as `TokenizerParts`.

Two kinds are supported: "gpt2", byte-level BPE with merges, and "llama", sentencepiece BPE with
scores instead of merges. Keys and defaults follow the GGUF specification:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import enum
import math
import numbers
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from engine.checks import shown, warn_once
from engine.errors import ConfigError
from engine.text.encode_worker import WorkerEncoder
from engine.text.known_steps import is_linear_regex
from engine.text.library_errors import library_errors
from engine.text.parts import TokenizerParts, set_bos_eos
from engine.text.pretokenizers import PreTokenizer, find_pre_tokenizer
from engine.text.tokenizer_json import check_added

__all__ = ["UNSUPPORTED_KEYS", "parts_from_gguf"]

_PREFIX = "tokenizer.ggml."
_MAX_CUT_CHARS = 1 << 30  # maximum characters copied to derive merges from scores: sum of length**2
_MAX_MERGES = 1 << 20  # maximum merges derived from scores, twice the largest known vocabularies'
_SPACE = "▁"  # sentencepiece's visible space
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_NAMED_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # (sic) as the specification spells it
}
UNSUPPORTED_KEYS = (
    "add_sep_token",
    "remove_extra_whitespaces",
    "precompiled_charsmap",
    "suppress_tokens",
    "normalizer.lowercase",
    "normalizer.strip_accents",
    "escape_whitespaces",
    "treat_whitespace_as_suffix",
)
"""Keys below "tokenizer.ggml." that change the ids or the text; refused unless off or empty."""

_MARKER = re.compile(r"<.+>|\[.+\]", re.DOTALL)
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
_END_OF_HARMONY = ("<|return|>", "<|call|>")  # in gpt-oss, where "<|end|>" ends one of its messages


class TokenType(enum.IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class _Metadata:
    """Typed access to the metadata; every error names its key."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.tokens: list[str] = self.array("tokens", str)
        if not self.tokens:
            raise ConfigError("tokenizer.ggml.tokens, the vocabulary, is missing or empty")
        types = self.array("token_type", int) or [TokenType.NORMAL] * len(self.tokens)
        self.types: list[int] = self._as_long_as_tokens("token_type", types)

    def get(self, key: str) -> Any:
        return self.values.get(_PREFIX + key)

    def array(self, key: str, kind: Callable[[Any], Any]) -> list[Any]:
        value = self.get(key)
        if value is None:
            return []
        if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
            raise ConfigError(f"{_PREFIX}{key} must be an array; got {type(value).__name__}")
        if kind is str:
            for i, item in enumerate(value):
                if not isinstance(item, str):
                    got = type(item).__name__
                    raise ConfigError(f"{_PREFIX}{key}[{i}] must be a string; got {got}")
            return list(value)
        try:
            return [kind(item) for item in value]
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(f"{_PREFIX}{key} must be numbers; got {shown(value)}") from None

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        return default if value is None else bool(value)

    def token_id(self, key: str) -> int | None:
        """Return the id under `key`; None if it is absent or, with a warning, has no token."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, numbers.Integral):
            raise ConfigError(f"{_PREFIX}{key} must be a token id; got {shown(value)}")
        if not 0 <= int(value) < len(self.tokens):
            warn_once(
                f"{_PREFIX}{key} is ignored: it must be in [0, {len(self.tokens)}) (the "
                f"vocabulary); got {shown(value)}"
            )
            return None
        return int(value)

    def scores(self) -> list[float]:
        scores = self._as_long_as_tokens("scores", self.array("scores", float))
        if any(map(math.isnan, scores)):
            raise ConfigError(f"{_PREFIX}scores must be numbers; one is NaN")
        return scores

    def of_type(self, *types: TokenType) -> list[int]:
        return [i for i, kind in enumerate(self.types) if kind in types]

    def _as_long_as_tokens(self, key: str, items: list[Any]) -> list[Any]:
        if len(items) != len(self.tokens):
            raise ConfigError(
                f"{_PREFIX}{key} must have {len(self.tokens)} entries, one per token; "
                f"got {len(items)}"
            )
        return items


def parts_from_gguf(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Build a tokenizer from the metadata of a .gguf file.

    Parameters
    ----------
    metadata : mapping of str to value
        The file's metadata; arrays as lists or 1-d NumPy arrays.

    Raises
    ------
    ConfigError
        If the vocabulary is missing or inconsistent, or its kind or pre-tokenizer is unsupported.
    """
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    kind = metadata.get(_PREFIX + "model")
    if not isinstance(kind, str) or kind not in builders:
        raise ConfigError(
            f"tokenizer.ggml.model must be one of {', '.join(sorted(builders))}; got {shown(kind)}"
        )
    meta = _Metadata(metadata)
    _refuse_unsupported(meta, kind)
    with library_errors(ConfigError, "the vocabulary of the .gguf file is invalid"):
        backend, add_bos = builders[kind](meta)
        _add_whole_tokens(backend, meta)
    bos = meta.token_id("bos_token_id")
    eos = meta.token_id("eos_token_id")
    for name, token_id in (("bos", bos), ("eos", eos)):
        if token_id is None and meta.flag(f"add_{name}_token", False):
            raise ConfigError(
                f"{_PREFIX}{name}_token_id must be a token's id, since add_{name}_token is true; "
                f"got {shown(meta.get(f'{name}_token_id'))}"
            )
    set_bos_eos(
        backend,
        bos if meta.flag("add_bos_token", add_bos) else None,
        eos if meta.flag("add_eos_token", False) else None,
    )
    encoder = None
    if kind == "gpt2" and not _is_linear(find_pre_tokenizer(meta.get("pre"))):
        encoder = WorkerEncoder(backend.to_str().encode(), (), "pre-tokenizer Split")
    templates = _chat_templates(metadata)
    return TokenizerParts(
        backend=backend,
        encoder=encoder,
        bos_token_id=bos,
        eos_token_ids=_end_ids(meta, templates),
        special_tokens=_named_tokens(meta),
        chat_templates=templates,
    )


def _is_linear(pre: PreTokenizer) -> bool:
    return all(is_linear_regex({"Regex": pattern}) for pattern in pre.patterns)


def _refuse_unsupported(meta: _Metadata, kind: str) -> None:
    keys = UNSUPPORTED_KEYS if kind == "llama" else (*UNSUPPORTED_KEYS, "add_space_prefix")
    for key in keys:
        value = meta.get(key)
        if value is not None and (len(value) if hasattr(value, "__len__") else value):
            raise ConfigError(
                f"{_PREFIX}{key} must be absent, false or empty for {_PREFIX}model = {kind!r} "
                f"(it is not supported); got {shown(value)}"
            )


def _byte_level(meta: _Metadata) -> tuple[tokenizers.Tokenizer, bool]:
    """Return the backend of a "gpt2" vocabulary, and whether it adds BOS by default."""
    pre = find_pre_tokenizer(meta.get("pre"))
    merges = [_split_merge(i, merge) for i, merge in enumerate(meta.array("merges", str))]
    if not merges:
        raise ConfigError("tokenizer.ggml.merges must hold a gpt2 vocabulary's merges; it is empty")
    backend = _backend(_numbered(meta.tokens), merges, ignore_merges=pre.ignore_merges)
    normalizer = pre.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre.backend()
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentencepiece(meta: _Metadata) -> tuple[tokenizers.Tokenizer, bool]:
    """Return the backend of a "llama" vocabulary, and whether it adds BOS by default."""
    tokens = [_visible(token, kind) for token, kind in zip(meta.tokens, meta.types, strict=True)]
    vocab = _numbered(tokens)
    # A user-defined piece's score is not a rank. If runs of spaces are user-defined (Gemma), merges
    # follow vocabulary order.
    ordered = tokens == meta.tokens
    ranks = [-score for score in meta.scores()] if ordered else [float(i) for i in vocab.values()]
    unknown = meta.token_id("unknown_token_id")
    backend = _backend(
        vocab,
        _merges_of_scores(tokens, meta.types, vocab, ranks),
        unk_token=tokens[0 if unknown is None else unknown],
        fuse_unk=True,
        byte_fallback=any(_BYTE_TOKEN.fullmatch(token) for token in tokens),
    )
    add_space = meta.flag("add_space_prefix", True)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE)] if add_space else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    strip: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if add_space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend, True


def _backend(
    vocab: dict[str, int], merges: Sequence[tuple[str, str]], **options: Any
) -> tokenizers.Tokenizer:
    with library_errors(ConfigError, "the vocabulary and its merges do not match"):
        return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=list(merges), **options))


def _numbered(tokens: Sequence[str]) -> dict[str, int]:
    vocab: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        first = vocab.setdefault(token, token_id)
        if first != token_id:
            raise ConfigError(
                f"tokenizer.ggml.tokens must be unique; {shown(token)} has ids {first} and "
                f"{token_id}"
            )
    return vocab


def _split_merge(index: int, merge: str) -> tuple[str, str]:
    # Search from index 1: the left half may itself be a space.
    at = merge.find(" ", 1)
    if at < 0 or at == len(merge) - 1:
        raise ConfigError(f"tokenizer.ggml.merges[{index}] must be two tokens; got {shown(merge)}")
    return merge[:at], merge[at + 1 :]


def _visible(token: str, kind: int) -> str:
    """Spell a user-defined run of spaces as in normalised text."""
    is_spaces = kind == TokenType.USER_DEFINED and bool(token) and not token.strip(" ")
    return _SPACE * len(token) if is_spaces else token


def _merges_of_scores(
    tokens: Sequence[str], types: Sequence[int], vocab: Mapping[str, int], ranks: Sequence[float]
) -> list[tuple[str, str]]:
    """List every pair of tokens that concatenates to a token, best score first.

    Sentencepiece merges the neighbours whose concatenation scores best; a list of merges in score
    order is equivalent, unless tokens share a score: of these it merges the leftmost pair, which a
    list cannot express. That is a warning.
    """
    size = sum(len(token) ** 2 for token in tokens)
    if size > _MAX_CUT_CHARS:
        raise ConfigError(
            f"tokenizer.ggml.tokens must have lengths whose squares sum up to at most "
            f"{_MAX_CUT_CHARS}; got {size}"
        )
    found: list[tuple[float, int, int, str, str]] = []
    num_merged: Counter[float] = Counter()  # rank -> tokens that merges give
    for token, kind, rank in zip(tokens, types, ranks, strict=True):
        is_space_run = kind == TokenType.USER_DEFINED and not token.strip(_SPACE)
        if kind != TokenType.NORMAL and not is_space_run:
            continue
        before = len(found)
        for cut in range(1, len(token)):
            left = vocab.get(token[:cut])
            right = vocab.get(token[cut:])
            if left is not None and right is not None:
                found.append((rank, left, right, token[:cut], token[cut:]))
        num_merged[rank] += len(found) > before
        if len(found) > _MAX_MERGES:
            raise ConfigError(f"tokenizer.ggml.tokens must give at most {_MAX_MERGES} merges")
    if tied := sum(count for count in num_merged.values() if count > 1):
        warn_once(
            f"tokenizer.ggml.scores: {tied} tokens share their score with another; where these "
            "overlap in a text, its ids may differ from sentencepiece's"
        )
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


def _add_whole_tokens(backend: tokenizers.Tokenizer, meta: _Metadata) -> None:
    """Declare the tokens to match in the text before normalisation and splitting."""
    is_phi3 = meta.values.get("general.architecture") == "phi3" and meta.get("model") == "llama"

    def whole(token_id: int, special: bool) -> AddedToken:
        content = meta.tokens[token_id]
        # Phi-3's markers strip the spaces after them, which .gguf cannot express.
        strips = is_phi3 and content.startswith("<|") and content != "<|endoftext|>"
        return AddedToken(content, normalized=False, special=special, rstrip=strips)

    control = _control_ids(meta)
    defined = set(meta.of_type(TokenType.USER_DEFINED)).difference(control)
    user = sorted(i for i in defined if meta.tokens[i].strip(" "))
    check_added((meta.tokens[i] for i in control + user), "tokenizer.ggml.tokens")
    backend.add_special_tokens([whole(i, True) for i in control])
    backend.add_tokens([whole(i, False) for i in user])
    for i in control + user:
        if backend.token_to_id(meta.tokens[i]) != i:
            raise ConfigError(
                f"token {i} ({shown(meta.tokens[i])}) cannot be added as a whole token"
            )


def _control_ids(meta: _Metadata) -> list[int]:
    """List the special tokens: control tokens, and markers that begin or end a text or a turn.

    Some files give the latter another type; llama.cpp and transformers read them as special, too.
    """
    ends = [meta.token_id(f"{name}_token_id") for name in ("bos", "eos", "eot", "eom")]
    named = {i for i in ends if i is not None and _MARKER.fullmatch(meta.tokens[i])}
    written = {
        i
        for i in meta.of_type(TokenType.NORMAL, TokenType.USER_DEFINED)
        if i in named or meta.tokens[i] in _END_OF_TURN
    }
    return sorted({*meta.of_type(TokenType.CONTROL, TokenType.UNKNOWN), *written})


def _named_tokens(meta: _Metadata) -> dict[str, str]:
    ids = {name: meta.token_id(key) for name, key in _NAMED_IDS.items()}
    return {name: meta.tokens[i] for name, i in ids.items() if i is not None}


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    # Filter by name first: iterating over items would decode every array of a lazy mapping.
    names = [name for name in metadata if name == key or name.startswith(key + ".")]
    found = {name: metadata[name] for name in names}
    for name, text in found.items():
        if not isinstance(text, str):
            raise ConfigError(f"{name} must be a string; got {type(text).__name__}")
    return {name[len(key) + 1 :] or "default": text for name, text in found.items()}


def _end_ids(meta: _Metadata, templates: Mapping[str, str]) -> tuple[int, ...]:
    """List the ids that end a sequence.

    These are the ids the file names, plus the end-of-turn markers its chat template writes: files
    older than ``eot_token_id`` name only one of the two.
    """
    named = [meta.token_id(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    written = "".join(templates.values())
    texts = {i: meta.tokens[i] for i in _control_ids(meta)}
    of_turn = _END_OF_HARMONY if set(_END_OF_HARMONY) <= set(texts.values()) else _END_OF_TURN
    marks = [i for i, text in texts.items() if text in of_turn and text in written]
    return tuple(dict.fromkeys([i for i in named if i is not None] + marks))
