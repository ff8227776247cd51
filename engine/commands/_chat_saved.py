"""Saved conversations of `engine chat`: one JSON file each, which only the user may read."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from engine import env
from engine.checks import shown
from engine.commands._options import SAMPLING_TYPES
from engine.errors import ConfigError, did_you_mean
from engine.model_files import read_json

__all__ = ["load_conversation", "save_conversation", "saved_names"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ROLES = ("system", "user", "assistant")


def saved_names() -> list[str]:
    """Return the names of the saved conversations, sorted."""
    return sorted(path.stem for path in _folder().glob("*.json"))


def save_conversation(name: str, record: dict[str, Any]) -> Path:
    """Write a conversation to the cache, over one of the same name; return its file.

    `record` has "model", "messages" and "sampling".

    Raises
    ------
    ConfigError
        If the name is no plain file name, or the file cannot be written.
    """
    file = _file(name)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # mkstemp creates it with mode 0600.
        descriptor, part = tempfile.mkstemp(dir=file.parent, prefix=".save-")
        try:
            with open(descriptor, "w", encoding="utf-8") as out:
                json.dump(record, out, ensure_ascii=False, indent=1)
            os.replace(part, file)
        except BaseException:
            os.unlink(part)
            raise
    except (OSError, UnicodeEncodeError) as error:
        raise ConfigError(f"{file} cannot be written: {error}") from error
    return file


def load_conversation(name: str) -> dict[str, Any]:
    """Return a saved conversation.

    Raises
    ------
    ConfigError
        If there is none of this name, or its file is damaged.
    """
    file = _file(name)
    if not file.exists():
        names = saved_names()
        hint = did_you_mean(name, names, f"saved are {', '.join(names[:20]) or 'none'}")
        raise ConfigError(f"there is no conversation {name!r:.100}{hint}")
    record = read_json(file, root=_folder())
    messages = record.get("messages")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise ConfigError(f"{file}: messages must be a list of roles and texts")
    sampling = record.get("sampling")
    if not isinstance(sampling, dict):
        raise ConfigError(f"{file}: sampling must be an object; got {shown(sampling)}")
    for name in sampling.keys() - SAMPLING_TYPES.keys():
        hint = did_you_mean(name, SAMPLING_TYPES)
        raise ConfigError(f"{file}: there is no sampling parameter {name!r:.100}{hint}")
    return record


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"role", "content"}
        and value["role"] in _ROLES
        and isinstance(value["content"], str)
    )


def _folder() -> Path:
    return env.cache_dir() / "chats"


def _file(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"a conversation's name must be letters, digits, '.', '_' and '-'; got {name!r:.100}"
        )
    return _folder() / f"{name}.json"
