"""Options that the commands for a user's kernel share."""

from __future__ import annotations

from typing import Any

from engine.errors import ConfigError

__all__ = ["dtype_names", "sizes_of"]


def sizes_of(text: str) -> dict[str, Any]:
    """Return the shape of "--sizes T=8192,N=4096".

    Raises
    ------
    ConfigError
        If the text has another form, or a size twice.

    Examples
    --------
    >>> sizes_of("T=8, N=4")
    {'T': 8, 'N': 4}
    """
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if name in found:
            raise ConfigError(f"--sizes must have each size once; got {name} twice in {text!r}")
        try:
            found[name] = int(value) if value.lstrip("-").isdigit() else float(value)
        except ValueError:
            raise ConfigError(f"--sizes must be like T=8192,N=4096; got {text!r}") from None
    return found


def dtype_names(text: str) -> tuple[str, ...]:
    """Return the names in "float16,bfloat16"."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
