"""Reads ``tokenizer.json``: checks it, then passes it to the `tokenizers` library in parts.

The library's own reader never sees the file, because some files make its Rust code panic or abort.
It receives the checked vocabulary and merges, and a small document with the other steps, written
by this module. This is also faster: the library's reader parses the model twice.

Truncation, padding and dropout belong to training and are omitted on purpose.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from engine.checks import shown
from engine.errors import ConfigError
from engine.text.known_steps import unknown_step
from engine.text.library_errors import library_errors

__all__ = ["build_backend", "check_added", "check_ids", "check_steps", "parse"]

MAX_ADDED_TOKENS = 1 << 18  # as many as a whole vocabulary
MAX_ADDED_BYTES = 4 << 20  # the library's search structure takes about 30 times as much
_MAX_ID = (1 << 22) - 1  # the largest known vocabularies have a million tokens
_MAX_AFFIX = 64  # characters per word prefix or suffix
_MAX_PIECE = 512  # characters per Unigram piece: encoding tries that many at every position
_MAX_WORD = 200  # characters per WordPiece word: time is cubic in its length
_STEPS = ("normalizer", "pre_tokenizer", "post_processor")
_DECODERS = frozenset(
    [
        *("ByteLevel", "Metaspace", "ByteFallback", "Fuse", "Strip", "Replace"),
        *("WordPiece", "BPEDecoder", "CTC"),
    ]
)
_Fields = dict[str, Any]


def parse(data: bytes) -> _Fields:
    """Parse the file; only its outer structure is checked.

    Raises
    ------
    ConfigError
        If the file is not a JSON object with a model.
    """
    with library_errors(ConfigError, "is not valid JSON"):
        spec = json.loads(data.decode("utf-8"))
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        raise ConfigError(f"must be an object with an object model; got {shown(spec)}")
    return spec


def build_backend(spec: _Fields, with_steps: bool) -> tokenizers.Tokenizer:
    """Build the library's tokenizer.

    Parameters
    ----------
    spec : dict
        From `parse`.
    with_steps : bool
        False omits normalizer, pre-tokenizer and post-processor: the result knows all tokens but
        cannot encode.

    Raises
    ------
    ConfigError
        If a part is invalid; the message names it.
    """
    steps = {name: spec.get(name) if with_steps else None for name in _STEPS}
    shell = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        **steps,
        "decoder": _decoder(spec.get("decoder")),
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    with library_errors(ConfigError, "its steps are invalid"):
        backend = tokenizers.Tokenizer.from_str(json.dumps(shell))
    backend.model = _model(spec["model"])
    tokens = _added_tokens(spec.get("added_tokens"))
    with library_errors(ConfigError, "added_tokens are invalid"):
        backend.add_tokens(tokens)
    return backend


def check_steps(backend: tokenizers.Tokenizer) -> None:
    """Check a backend that is to run in this process.

    The library may have read a step as a different kind than its "type" says, so this checks the
    steps it built, and the ids its post-processor adds.

    Raises
    ------
    ConfigError
    """
    with library_errors(ConfigError, "its steps are invalid"):
        steps = {name: getattr(backend, name) for name in _STEPS}
        seen = {name: json.loads(step.__getstate__()) for name, step in steps.items() if step}
        name = unknown_step(seen)
        if name is not None:
            raise ConfigError(f"{name} must be one step with its own fields; got {shown(seen)}")
        check_ids(backend, backend.encode("").ids)


def check_ids(backend: tokenizers.Tokenizer, ids: Iterable[int]) -> None:
    """Raise ConfigError if the post-processor adds an id that has no token."""
    for i in ids:
        if backend.id_to_token(i) is None:
            raise ConfigError(f"post_processor must add ids of the vocabulary; got {i}")


def check_added(contents: Iterable[str], where: str) -> None:
    """Raise ConfigError if there are too many added tokens, or their total size is too large."""
    texts = list(contents)
    if len(texts) > MAX_ADDED_TOKENS:
        raise ConfigError(
            f"{where} must have at most {MAX_ADDED_TOKENS} tokens to add; got {len(texts)}"
        )
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    if size > MAX_ADDED_BYTES:
        raise ConfigError(
            f"{where} must have at most {MAX_ADDED_BYTES} bytes of tokens to add; got {size}"
        )


def _decoder(step: object) -> object:
    """Check that a decoder has known steps only; it never runs, only its fields are read."""
    if step is None:
        return None
    steps = step.get("decoders") if _kind(step) == "Sequence" else [step]  # type: ignore[attr-defined]
    for one in steps if isinstance(steps, list) else [step]:
        pattern = one.get("pattern", {}) if isinstance(one, dict) else None
        if _kind(one) not in _DECODERS or not isinstance(pattern, dict) or "Regex" in pattern:
            raise ConfigError(f"cannot decode with this tokenizer's decoder step {shown(one)}")
    return step


def _kind(step: object) -> str | None:
    kind = step.get("type") if isinstance(step, dict) else None
    return kind if isinstance(kind, str) else None


def _added_tokens(listed: object) -> list[AddedToken]:
    if listed is None:
        return []
    if not isinstance(listed, list):
        raise ConfigError(f"added_tokens must be an array; got {shown(listed)}")
    for i, token in enumerate(listed):
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise ConfigError(f"added_tokens[{i}] must be an object with content; {_got(token)}")
    check_added((token["content"] for token in listed), "added_tokens")
    with library_errors(ConfigError, "added_tokens are invalid"):
        return [_added_token(token) for token in listed]


def _added_token(token: _Fields) -> AddedToken:
    special = token.get("special", False)
    return AddedToken(
        token["content"],
        single_word=token.get("single_word", False),
        lstrip=token.get("lstrip", False),
        rstrip=token.get("rstrip", False),
        normalized=token.get("normalized", not special),
        special=special,
    )


def _model(fields: _Fields) -> models.Model:
    builders: dict[str, Callable[[_Fields], models.Model]] = {
        "BPE": _bpe,
        "Unigram": _unigram,
        "WordPiece": _word_piece,
        "WordLevel": _word_level,
    }
    kind = fields.get("type", _guessed_kind(fields))
    if not isinstance(kind, str) or kind not in builders:
        raise ConfigError(f"model.type must be one of {', '.join(builders)}; {_got(kind)}")
    with library_errors(ConfigError, "model is invalid"):
        return builders[kind](fields)


def _guessed_kind(fields: _Fields) -> str:
    """Return the kind of a model without "type", as in old files."""
    if "merges" in fields:
        return "BPE"
    if isinstance(fields.get("vocab"), list):
        return "Unigram"
    return "WordPiece" if "max_input_chars_per_word" in fields else "WordLevel"


def _bpe(fields: _Fields) -> models.Model:
    # The library panics on a token shorter than this prefix, and a panic in its destructor aborts
    # the process. No language model uses such a prefix.
    if fields.get("continuing_subword_prefix") not in (None, ""):
        raise ConfigError(
            "model.continuing_subword_prefix must be empty or null for BPE; "
            + _got(fields["continuing_subword_prefix"])
        )
    texts = {
        "unk_token": _text(fields, "unk_token"),
        "continuing_subword_prefix": fields.get("continuing_subword_prefix"),
        "end_of_word_suffix": _affix(fields, "end_of_word_suffix"),
    }
    return models.BPE(
        vocab=_vocab(fields),
        merges=_merges(fields.get("merges")),
        **{name: text for name, text in texts.items() if text is not None},
        fuse_unk=_flag(fields, "fuse_unk"),
        byte_fallback=_flag(fields, "byte_fallback"),
        ignore_merges=_flag(fields, "ignore_merges"),
    )


def _unigram(fields: _Fields) -> models.Model:
    pieces = fields.get("vocab")
    unknown = fields.get("unk_id")
    if not isinstance(pieces, list) or not pieces:
        raise ConfigError(f"model.vocab must be an array of pieces and scores; {_got(pieces)}")
    vocab = [_piece(i, item) for i, item in enumerate(pieces)]
    if unknown is not None and not (type(unknown) is int and 0 <= unknown < len(vocab)):
        raise ConfigError(f"model.unk_id must be in [0, {len(vocab)}) or null; {_got(unknown)}")
    return models.Unigram(vocab, unknown, _flag(fields, "byte_fallback"))


def _piece(index: int, item: object) -> tuple[str, float]:
    where = f"model.vocab[{index}]"
    if not isinstance(item, list) or len(item) != 2 or not isinstance(item[0], str):
        raise ConfigError(f"{where} must be a piece and its score; {_got(item)}")
    text, score = item
    if type(score) not in (int, float) or not math.isfinite(score):
        raise ConfigError(f"{where} must have a finite score; {_got(score)}")
    if len(text) > _MAX_PIECE:
        raise ConfigError(f"{where} must have at most {_MAX_PIECE} characters; got {len(text)}")
    return text, float(score)


def _word_piece(fields: _Fields) -> models.Model:
    longest = fields.get("max_input_chars_per_word", 100)
    if type(longest) is not int or not 0 <= longest <= _MAX_WORD:
        raise ConfigError(
            f"model.max_input_chars_per_word must be in [0, {_MAX_WORD}]; {_got(longest)}"
        )
    prefix = _affix(fields, "continuing_subword_prefix")
    return models.WordPiece(
        vocab=_vocab(fields),
        unk_token=_text(fields, "unk_token") or "[UNK]",
        max_input_chars_per_word=longest,
        continuing_subword_prefix="##" if prefix is None else prefix,
    )


def _word_level(fields: _Fields) -> models.Model:
    return models.WordLevel(_vocab(fields), _text(fields, "unk_token") or "<unk>")


def _vocab(fields: _Fields) -> dict[str, int]:
    vocab = fields.get("vocab")
    if not isinstance(vocab, dict):
        raise ConfigError(f"model.vocab must be an object of tokens and ids; {_got(vocab)}")
    ids = vocab.values()
    if not set(map(type, ids)) <= {int} or (ids and not 0 <= min(ids) <= max(ids) <= _MAX_ID):
        token = next(t for t, i in vocab.items() if type(i) is not int or not 0 <= i <= _MAX_ID)
        raise ConfigError(
            f"model.vocab must have ids in [0, {_MAX_ID}]; token {shown(token)} has "
            f"{shown(vocab[token])}"
        )
    return vocab


def _merges(listed: object) -> list[tuple[str, str]]:
    """Return the merges; files hold pairs or, if older, strings separated by a space."""
    if not isinstance(listed, list):
        raise ConfigError(f"model.merges must be an array; {_got(listed)}")
    kinds = set(map(type, listed))
    if kinds == {str}:
        return _split_merges(listed)
    if not kinds <= {list}:
        raise ConfigError("model.merges must be pairs of tokens, or texts; it has other items")
    if not set(map(len, listed)) <= {2}:
        index = next(i for i, pair in enumerate(listed) if len(pair) != 2)
        raise ConfigError(f"model.merges[{index}] must be two tokens; {_got(listed[index])}")
    return list(map(tuple, listed))


def _split_merges(lines: list[str]) -> list[tuple[str, str]]:
    joined = " ".join(lines)
    if "#version" in joined:  # a header line; the library skips it at any position
        lines = [line for line in lines if not line.startswith("#version")]
        joined = " ".join(lines)
    if not set(map(str.count, lines, itertools.repeat(" "))) <= {1}:
        index = next(i for i, line in enumerate(lines) if line.count(" ") != 1)
        raise ConfigError(f"model.merges[{index}] must be two tokens; {_got(lines[index])}")
    # One split of all lines: a list per line would take three times as long.
    words = joined.split(" ") if lines else []
    return list(zip(words[::2], words[1::2], strict=True))


def _text(fields: _Fields, key: str) -> str | None:
    value = fields.get(key)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"model.{key} must be a text or null; {_got(value)}")
    return value


def _affix(fields: _Fields, key: str) -> str | None:
    value = _text(fields, key)
    if value is not None and len(value) > _MAX_AFFIX:
        raise ConfigError(
            f"model.{key} must have at most {_MAX_AFFIX} characters; got {len(value)}"
        )
    return value


def _flag(fields: _Fields, key: str) -> bool:
    value = fields.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"model.{key} must be true or false; {_got(value)}")
    return bool(value)


def _got(value: object) -> str:
    return f"got {shown(value)}"
