"""Tokenizer of a model directory in Hugging Face layout, read as `TokenizerParts`.

It reads ``tokenizer.json`` and, if present, ``tokenizer_config.json``, ``special_tokens_map.json``,
``added_tokens.json``, ``config.json``, ``generation_config.json``, ``chat_template.jinja`` and
``additional_chat_templates/*.jinja``. Nothing in the directory is executed except templates, in
their sandbox. `engine.model_files` opens the files and limits their size.

``tokenizer.json`` alone decides whether BOS and EOS are added to a text, as in transformers 5;
``add_bos_token`` in ``tokenizer_config.json`` only applies to tokenizers without that file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from engine.checks import shown
from engine.errors import ConfigError
from engine.model_files import is_present, read_file, read_json
from engine.text.chat_template import MAX_SOURCE_CHARS
from engine.text.encode_worker import WorkerEncoder
from engine.text.known_steps import unknown_step
from engine.text.library_errors import library_errors
from engine.text.parts import SPECIAL_NAMES, TokenizerParts
from engine.text.tokenizer_json import build_backend, check_added, check_ids, check_steps, parse

__all__ = ["parts_from_directory"]

_MAX_TOKENIZER_BYTES = 64 << 20  # the largest known files are about 35 MB
_MAX_TEMPLATES = 64
_MAX_TEMPLATE_BYTES = 4 * MAX_SOURCE_CHARS  # UTF-8 takes at most 4 bytes per character


def parts_from_directory(directory: Path) -> TokenizerParts:
    """Read the tokenizer of a model directory.

    Parameters
    ----------
    directory : Path
        Must contain a ``tokenizer.json``.

    Raises
    ------
    ConfigError
        If a file is missing or damaged, or contradicts another; the message names it.
    """
    path = directory / "tokenizer.json"
    data, backend, step = _read_backend(path, directory)
    config = _read_json(directory, "tokenizer_config.json")
    added = _add_missing_tokens(backend, config, _read_json(directory, "added_tokens.json"))
    special = _special_tokens(directory, config)
    bos = _id_of(backend, "bos_token", special)
    eos = _id_of(backend, "eos_token", special)
    hints = [_read_json(directory, name) for name in ("generation_config.json", "config.json")]
    with _named(path):
        encoder = None if step is None else WorkerEncoder(data, added, step)
        check_ids(backend, encoder("", True)[0] if encoder else ())
    return TokenizerParts(
        backend=backend,
        encoder=encoder,
        bos_token_id=bos if bos is not None else _first_id(hints, "bos_token_id"),
        eos_token_ids=_end_ids(eos, hints),
        special_tokens=special,
        chat_templates=_chat_templates(directory, config),
    )


def _read_backend(path: Path, directory: Path) -> tuple[bytes, tokenizers.Tokenizer, str | None]:
    """Return the file, its backend, and any step that must not run in this process."""
    if not is_present(path):
        others = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
        found = [name for name in others if is_present(directory / name)]
        hint = f"; {', '.join(found)} alone is not enough" if found else ""
        raise ConfigError(f"no tokenizer.json in {directory}{hint}")
    data = read_file(path, _MAX_TOKENIZER_BYTES, directory)
    with _named(path):
        spec = parse(data)
        step = unknown_step(spec)
        backend = build_backend(spec, with_steps=step is None)
        if step is None:
            check_steps(backend)
    return data, backend, step


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Prefix error messages with the file's name."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    path = directory / name
    return read_json(path, root=directory) if is_present(path) else {}


def _text_of(value: object, where: str) -> str | None:
    """Return a token's text, given as a string or as an object with "content"."""
    content = value.get("content") if isinstance(value, dict) else value
    if content is not None and not isinstance(content, str):
        raise ConfigError(f"{where} must be a string or an object with content; got {shown(value)}")
    if content is not None and not _is_unicode(content):
        raise ConfigError(f"{where} must be valid Unicode; got {shown(content)}")
    return content


def _is_unicode(text: str) -> bool:
    """Tell whether `text` has no unpaired surrogate, which JSON can spell but UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named special tokens; tokenizer_config.json takes precedence."""
    older = _read_json(directory, "special_tokens_map.json")
    found = {}
    for name in SPECIAL_NAMES:
        text = _text_of(config.get(name, older.get(name)), f"{name} in tokenizer_config.json")
        if text is not None:
            found[name] = text
    return found


def _id_of(backend: tokenizers.Tokenizer, name: str, special: Mapping[str, str]) -> int | None:
    if name not in special:
        return None
    token_id = backend.token_to_id(special[name])
    if token_id is None:
        raise ConfigError(
            f"{name} must be in tokenizer.json's vocabulary; got {shown(special[name])}"
        )
    return token_id


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], older: Mapping[str, Any]
) -> list[AddedToken]:
    """Add the tokens that only the other files define, in id order; return them."""
    listed = config.get("added_tokens_decoder") or {
        str(token_id): content for content, token_id in older.items()
    }
    if not isinstance(listed, Mapping):
        raise ConfigError(
            f"added_tokens_decoder in tokenizer_config.json must be an object; got {shown(listed)}"
        )
    known = backend.get_added_tokens_decoder()
    missing = {}
    for key in sorted(listed, key=_as_id):
        token = _added_token(listed[key], key)
        have = known.get(_as_id(key))
        if have is None or have.content != token.content or have.special != token.special:
            missing[key] = token
    contents = [token.content for token in (*known.values(), *missing.values())]
    check_added(contents, "tokenizer.json and the files beside it")
    # In one call: each call rebuilds the search structure for all added tokens.
    with library_errors(ConfigError, "the tokens beside tokenizer.json cannot be added"):
        backend.add_tokens(list(missing.values()))
    for key, token in missing.items():
        if backend.token_to_id(token.content) != _as_id(key):
            raise ConfigError(
                f"added token {shown(token.content)} must have id {key}; in tokenizer.json it has "
                f"{backend.token_to_id(token.content)}"
            )
    return list(missing.values())


def _as_id(key: str) -> int:
    if not key.isdecimal() or len(key) > 9:
        raise ConfigError(
            f"an added token's id must be a whole number of at most 9 digits; got {shown(key)}"
        )
    return int(key)


def _added_token(value: Any, key: str) -> AddedToken:
    content = _text_of(value, f"added token {key}")
    if not content:
        raise ConfigError(f"added token {key} must have content; it has none")
    fields = value if isinstance(value, dict) else {}
    special = bool(fields.get("special", False))
    return AddedToken(
        content,
        single_word=bool(fields.get("single_word", False)),
        lstrip=bool(fields.get("lstrip", False)),
        rstrip=bool(fields.get("rstrip", False)),
        normalized=bool(fields.get("normalized", not special)),
        special=special,
    )


def _ids(value: object) -> list[int]:
    """Return ids that a file gives as a number, a list of numbers, or null."""
    items: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    items = [int(one) if type(one) is float and one.is_integer() else one for one in items]
    if any(type(one) is not int for one in items):
        raise ConfigError(f"bos_token_id and eos_token_id must be token ids; got {shown(value)}")
    return [one for one in items if 0 <= one < 1 << 31]  # the configuration warns of others


def _first_id(configs: Iterable[Mapping[str, Any]], key: str) -> int | None:
    return next((i for config in configs for i in _ids(config.get(key))), None)


def _end_ids(eos: int | None, configs: Iterable[Mapping[str, Any]]) -> tuple[int, ...]:
    named = [] if eos is None else [eos]
    return tuple(dict.fromkeys(named + [i for c in configs for i in _ids(c.get("eos_token_id"))]))


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name; separate files override tokenizer_config.json."""
    listed = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(listed, str):
        templates["default"] = listed
    elif isinstance(listed, list):
        for i, entry in enumerate(listed):
            if not isinstance(entry, dict) or not {"name", "template"} <= entry.keys():
                raise ConfigError(
                    f"chat_template[{i}] must have name and template; got {shown(entry)}"
                )
            templates[str(entry["name"])] = str(entry["template"])
    elif listed is not None:
        raise ConfigError(f"chat_template must be a string or a list; got {type(listed).__name__}")
    more = list(directory.glob("additional_chat_templates/*.jinja"))
    if len(more) > _MAX_TEMPLATES:
        raise ConfigError(
            f"{directory}: additional_chat_templates must have at most {_MAX_TEMPLATES} files; "
            f"got {len(more)}"
        )
    files = {"default": directory / "chat_template.jinja"}
    files |= {path.stem: path for path in more}
    for name, path in files.items():
        if is_present(path):
            templates[name] = _read_template(path, directory)
    return templates


def _read_template(path: Path, directory: Path) -> str:
    data = read_file(path, _MAX_TEMPLATE_BYTES, directory)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: must be UTF-8 ({error})") from None
