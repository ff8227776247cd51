"""Pooling of embeddings that a model's files ask for."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from engine.checks import shown, warn_once
from engine.loading.gguf import GgufFile
from engine.model_files import is_present, read_json

__all__ = ["default_pooling"]

_FLAG = "pooling_mode_"
_BY_NAME = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}  # sentence-transformers'
_BY_NUMBER = {0: "last", 1: "mean", 3: "last"}  # llama.cpp's; 0 is no pooling


def default_pooling(path: str | PathLike[str]) -> str:
    """Return the pooling of embeddings whose request names none: "last" or "mean".

    A pooling that the engine does not support is a warning, and "last" is returned.

    Parameters
    ----------
    path : str or path
        Model directory with or without sentence-transformers' 1_Pooling/config.json; or a .gguf
        file, whose pooling_type is read.

    Raises
    ------
    ConfigError
        If the file is damaged.
    """
    root = Path(path)
    file = root / "1_Pooling" / "config.json"
    found: str | None = "last"
    given: Any = None
    if root.suffix == ".gguf":
        metadata = GgufFile(root).metadata
        given = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
        found = _BY_NUMBER.get(given) if isinstance(given, int) else None
        file = root
    elif is_present(file):
        given = _kinds(read_json(file, root=root))
        found = _BY_NAME.get(given[0]) if len(given) == 1 else None
    if found is None:
        warn_once(
            f"{file}: embeddings pool the last token unless a request has pooling: the model's own "
            f"is not supported; got {shown(given)}"
        )
    return found or "last"


def _kinds(values: Mapping[str, Any]) -> list[str]:
    """Return the names of the poolings whose results sentence-transformers concatenates."""
    if isinstance(values.get("pooling_mode"), str):
        return [values["pooling_mode"]]
    flags = [key for key in values if key.startswith(_FLAG) and values[key] is True]
    return [key.removeprefix(_FLAG) for key in flags]
