"""Options that the commands for a user's kernel share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.errors import ConfigError

__all__ = ["dtype_names", "sizes_of"]


def sizes_of(texts: Sequence[str]) -> list[dict[str, Any]] | None:
    """Return the shapes of "--sizes T=8192,N=4096 --sizes T=1,N=4096"; None without any.

    Examples
    --------
    >>> sizes_of(["T=8, N=4"])
    [{'T': 8, 'N': 4}]
    """
    return [_sizes(text) for text in texts] or None


def _sizes(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        try:
            found[name] = int(value) if value.lstrip("-").isdigit() else float(value)
        except ValueError:
            raise ConfigError(f"--sizes must be like T=8192,N=4096; got {text!r}") from None
    return found


def dtype_names(text: str) -> tuple[str, ...]:
    """Return the names in "float16,bfloat16"."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
