"""Typed, range-checked access to untrusted key-value files; errors name the file and the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from engine.checks import shown, warn_once
from engine.errors import ConfigError

__all__ = ["MAX_HEADS", "MAX_LAYERS", "MAX_VOCAB", "MAX_WIDTH", "REQUIRED", "Fields"]

# Largest sizes of a model that files may give.
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 24

_T = TypeVar("_T")


class _Required:
    """Marks a key as required."""


REQUIRED = _Required()


class Fields:
    """Typed, range-checked access to a mapping read from a file.

    A null value counts as absent, as in Hugging Face's files. A whole number may be written as a
    float.

    Parameters
    ----------
    values : mapping
        The content of the file.
    where : str
        The file's name, for messages.
    names : mapping, optional
        Key -> the file's own name for it, for messages. Unlisted keys keep their name.
    """

    def __init__(
        self, values: Mapping[str, Any], where: str, names: Mapping[str, str] | None = None
    ) -> None:
        self._values = values
        self._where = where
        self._names = names or {}
        self._read: set[str] = set()

    def error(self, key: str, wanted: str) -> ConfigError:
        """Return the ConfigError "`key` must be `wanted`; got <value>"."""
        name = self._names.get(key, key)
        got = shown(self._values[key]) if key in self._values else "nothing"
        return ConfigError(f"{self._where}: {name} must be {wanted}; got {got}")

    def warn(self, key: str, message: str) -> None:
        """Log "`key` `message`; got <value>", once."""
        name = self._names.get(key, key)
        warn_once(f"{self._where}: {name} {message}; got {shown(self._values.get(key))}")

    def unread(self) -> list[str]:
        """Return the keys that no method has returned the value of, in the file's order."""
        return [key for key in self._values if key not in self._read]

    def has(self, key: str) -> bool:
        """Tell whether `key` is present and not null."""
        return self.raw(key) is not None

    def raw(self, key: str) -> Any:
        """Return the unchecked value, None if absent."""
        self._read.add(key)
        return self._values.get(key)

    def _absent(self, key: str, default: _T | _Required, wanted: str) -> _T:
        if isinstance(default, _Required):
            raise self.error(key, wanted)
        return default

    def integer(
        self, key: str, low: int, high: int, default: _T | _Required = REQUIRED
    ) -> int | _T:
        """Return an integer in [low, high]; bools, and floats with a fraction, are rejected."""
        wanted = f"a whole number from {low} to {high}"
        if not self.has(key):
            return self._absent(key, default, wanted)
        value = _whole(self._values[key])
        if type(value) is not int or not low <= value <= high:
            raise self.error(key, wanted)
        return value

    def per_layer(
        self, key: str, num_layers: int, low: int, high: int, default: int | _Required = REQUIRED
    ) -> tuple[int, ...]:
        """Return an integer in [low, high] per layer; the file has one for all, or a list."""
        value = self.raw(key)
        if not isinstance(value, list):
            return (self.integer(key, low, high, default),) * num_layers
        whole = tuple(map(_whole, value))
        if len(whole) != num_layers or any(
            type(one) is not int or not low <= one <= high for one in whole
        ):
            raise self.error(key, f"{num_layers} whole numbers from {low} to {high}, or one")
        return whole

    def real(
        self, key: str, low: float, high: float, default: _T | _Required = REQUIRED
    ) -> float | _T:
        """Return a finite number in [low, high]."""
        wanted = f"a number from {low:g} to {high:g}"
        if not self.has(key):
            return self._absent(key, default, wanted)
        value = self._values[key]
        if type(value) not in (int, float) or not low <= value <= high:  # NaN fails
            raise self.error(key, wanted)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a bool."""
        if not self.has(key):
            return default
        value = self._values[key]
        if type(value) is not bool:
            raise self.error(key, "true or false")
        return value

    def text(self, key: str, default: str | _Required = REQUIRED) -> str:
        """Return a string."""
        if not self.has(key):
            return self._absent(key, default, "a string")
        value = self._values[key]
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def reals(self, key: str, count: int, low: float, high: float) -> tuple[float, ...]:
        """Return exactly `count` finite numbers in [low, high]."""
        wanted = f"{count} numbers from {low:g} to {high:g}"
        value = self.raw(key)
        if not isinstance(value, list | tuple) or len(value) != count:
            got = f"{len(value)} of them" if isinstance(value, list | tuple) else shown(value)
            name = self._names.get(key, key)
            raise ConfigError(f"{self._where}: {name} must be {wanted}; got {got}")
        if any(type(one) not in (int, float) or not low <= one <= high for one in value):
            raise self.error(key, wanted)
        return tuple(float(one) for one in value)

    def token_ids(self, key: str, vocab_size: int, default: Sequence[int] = ()) -> tuple[int, ...]:
        """Return token ids, stored as an int or as a list.

        Ids outside the vocabulary are left out with a warning: no token can equal them.
        """
        if not self.has(key):
            return tuple(default)
        value = self._values[key]
        ids = [_whole(one) for one in (value if isinstance(value, list | tuple) else [value])]
        if len(ids) > 1024 or any(type(one) is not int for one in ids):
            raise self.error(key, f"token ids from 0 to {vocab_size - 1}")
        known = [one for one in ids if 0 <= one < vocab_size]
        if len(known) < len(ids):
            self.warn(key, f"has ids that are ignored, since the vocabulary has {vocab_size}")
        return tuple(dict.fromkeys(known))

    def child(self, key: str) -> Fields:
        """Return the object under `key`."""
        value = self.raw(key)
        if not isinstance(value, Mapping):
            raise self.error(key, "an object")
        return Fields(value, f"{self._where}: {self._names.get(key, key)}", self._names)

    def beside(self, values: Mapping[str, Any], what: str) -> Fields:
        """Return a `Fields` over `values` from the same file; messages call it `what`."""
        return Fields(values, f"{self._where}: {what}", self._names)


def _whole(value: Any) -> Any:
    """Return a float without a fraction as an int, and any other value unchanged."""
    return int(value) if type(value) is float and value.is_integer() else value
