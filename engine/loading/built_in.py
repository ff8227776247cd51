"""Built-in configurations: sizes of published models, without their weights."""

from __future__ import annotations

from pathlib import Path

__all__ = ["built_in_names", "config_folder"]

_FOLDER = Path(__file__).parents[1] / "testing" / "configs"


def built_in_names() -> list[str]:
    """Return the names of the built-in configurations.

    Examples
    --------
    >>> built_in_names()[:3]
    ['gpt-oss-120b', 'gpt-oss-20b', 'llama-3.1-70b']
    """
    return sorted(path.parent.name for path in _FOLDER.glob("*/config.json"))


def config_folder(name: str) -> Path:
    """Return the folder of a built-in configuration, in Hugging Face's layout."""
    return _FOLDER / name
