"""Tokenizer of a model directory in Hugging Face layout, read as `TokenizerParts`.

It reads ``tokenizer.json`` and, if present, ``tokenizer_config.json``, ``special_tokens_map.json``,
``added_tokens.json``, ``config.json``, ``generation_config.json``, ``chat_template.jinja``,
``chat_template.json`` and ``additional_chat_templates/*.jinja``. `hf_tokens` decides which special
tokens they add. Nothing in the directory is executed except templates, in their sandbox.
`engine.model_files` opens the files and limits their size.

``tokenizer.json`` alone decides whether BOS and EOS are added to a text, as in transformers 5;
``add_bos_token`` in ``tokenizer_config.json`` only applies to tokenizers without that file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from engine.checks import shown, warn_once
from engine.errors import ConfigError
from engine.model_files import is_present, read_file, read_json
from engine.text.chat_template import MAX_SOURCE_CHARS
from engine.text.encode_worker import WorkerEncoder
from engine.text.hf_tokens import tokens_beside
from engine.text.known_steps import unknown_step
from engine.text.library_errors import library_errors
from engine.text.parts import TokenizerParts
from engine.text.tokenizer_json import build_backend, check_added, check_ids, check_steps, parse

__all__ = ["parts_from_directory"]

_MAX_TOKENIZER_BYTES = 64 << 20  # the largest known files are about 35 MB
_MAX_TEMPLATES = 64
_RESPONSE_FORMATS = ("response_template", "response_schema")
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
    data, spec, backend, step = _read_backend(path, directory)
    config = _read_json(directory, "tokenizer_config.json")
    known = {t.content: t.special for t in backend.get_added_tokens_decoder().values()}
    special_map = _read_json(directory, "special_tokens_map.json")
    listed = _read_json(directory, "added_tokens.json")
    added, special = tokens_beside(spec, known, config, special_map, listed)
    _add_tokens(backend, known, added)
    _warn_of_ids(backend, config.get("added_tokens_decoder") or {}, directory)
    splits = config.get("split_special_tokens") is True
    backend.encode_special_tokens = splits
    bos = _id_of(backend, special.get("bos_token"))
    eos = _id_of(backend, special.get("eos_token"))
    hints = [_read_json(directory, name) for name in ("generation_config.json", "config.json")]
    if isinstance(text := hints[-1].get("text_config"), dict):  # of a multimodal model
        hints.append(text)
    with _named(path):
        encoder = None if step is None else WorkerEncoder(data, added, step, splits)
        check_ids(backend, encoder("", True)[0] if encoder else ())
    return TokenizerParts(
        backend=backend,
        encoder=encoder,
        bos_token_id=bos if bos is not None else _first_bos(hints),
        eos_token_ids=_end_ids(eos, hints),
        special_tokens=special,
        chat_templates=_chat_templates(directory, config),
        chat_control_tokens=_chat_control_tokens(config),
        response_format=_response_format(config),
    )


def _read_backend(
    path: Path, directory: Path
) -> tuple[bytes, dict[str, Any], tokenizers.Tokenizer, str | None]:
    """Return the file, its content, its backend, and any step that must not run in this process."""
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
    return data, spec, backend, step


def _warn_of_ids(backend: tokenizers.Tokenizer, listed: Mapping[str, Any], directory: Path) -> None:
    """Warn of the first token whose id differs from the one in `listed`."""
    for key, value in listed.items():
        content = value["content"] if isinstance(value, dict) else value
        token_id = backend.token_to_id(content)
        if token_id != int(key):
            warn_once(
                f"{directory}: added_tokens_decoder gives {shown(content)} the id {key}, which is "
                f"ignored: with tokenizer.json it has {token_id}"
            )
            return


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


def _id_of(backend: tokenizers.Tokenizer, text: str | None) -> int | None:
    token_id: int | None = None if text is None else backend.token_to_id(text)
    return token_id


def _add_tokens(
    backend: tokenizers.Tokenizer, known: Collection[str], added: list[AddedToken]
) -> None:
    contents = [*known, *(token.content for token in added if token.content not in known)]
    check_added(contents, "tokenizer.json and the files beside it")
    # In one call: each call rebuilds the search structure for all added tokens.
    with library_errors(ConfigError, "the tokens beside tokenizer.json cannot be added"):
        backend.add_tokens(added)


def _ids(value: object) -> list[int]:
    """Return ids that a file gives as a number, a list of numbers, or null."""
    items: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    items = [int(one) if type(one) is float and one.is_integer() else one for one in items]
    if any(type(one) is not int for one in items):
        raise ConfigError(f"bos_token_id and eos_token_id must be token ids; got {shown(value)}")
    return [one for one in items if 0 <= one < 1 << 31]  # the configuration warns of others


def _first_bos(configs: Iterable[Mapping[str, Any]]) -> int | None:
    return next((i for config in configs for i in _ids(config.get("bos_token_id"))), None)


def _end_ids(eos: int | None, configs: Iterable[Mapping[str, Any]]) -> tuple[int, ...]:
    named = [] if eos is None else [eos]
    return tuple(dict.fromkeys(named + [i for c in configs for i in _ids(c.get("eos_token_id"))]))


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name; separate files replace those of tokenizer_config.json."""
    listed = config.get("chat_template")
    if listed is None:  # an older place, of multimodal models
        listed = _read_json(directory, "chat_template.json").get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(listed, str):
        templates["default"] = listed
    elif isinstance(listed, list):
        for i, entry in enumerate(listed):
            if not isinstance(entry, dict) or not {"name", "template"} <= entry.keys():
                raise ConfigError(
                    f"chat_template[{i}] must have name and template; got {shown(entry)}"
                )
            if not isinstance(entry["name"], str) or not isinstance(entry["template"], str):
                raise ConfigError(
                    f"chat_template[{i}] must have strings as name and template; got {shown(entry)}"
                )
            templates[entry["name"]] = entry["template"]
    elif isinstance(listed, dict) and all(isinstance(text, str) for text in listed.values()):
        templates = listed
    elif listed is not None:
        raise ConfigError(
            "chat_template must be a string, a list of named ones, or an object of them; got "
            f"{shown(listed)}"
        )
    more = list(directory.glob("additional_chat_templates/*.jinja"))
    if len(more) > _MAX_TEMPLATES:
        raise ConfigError(
            f"{directory}: additional_chat_templates must have at most {_MAX_TEMPLATES} files; "
            f"got {len(more)}"
        )
    files = {"default": directory / "chat_template.jinja"}
    files |= {path.stem: path for path in more}
    found = {n: _read_template(path, directory) for n, path in files.items() if is_present(path)}
    return found or templates


def _chat_control_tokens(config: Mapping[str, Any]) -> tuple[str, ...]:
    listed = config.get("chat_control_tokens") or []
    if not isinstance(listed, list) or not all(isinstance(token, str) for token in listed):
        raise ConfigError(f"chat_control_tokens must be a list of strings; got {shown(listed)}")
    return tuple(listed)


def _response_format(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """Return the first format of answers that is declared."""
    given = ((key, config.get(key)) for key in _RESPONSE_FORMATS)
    return next(((key, value) for key, value in given if isinstance(value, dict)), None)


def _read_template(path: Path, directory: Path) -> str:
    data = read_file(path, _MAX_TEMPLATE_BYTES, directory)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: must be UTF-8 ({error})") from None
