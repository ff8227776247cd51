"""Argument checks: bounded reading of sequences, and short texts of values for messages."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import numbers
import operator
import reprlib
import sys
from collections.abc import Iterable, Mapping, Sized
from typing import Any

from engine.errors import ConfigError, RequestError

__all__ = [
    "check_count",
    "checked_text",
    "is_integer",
    "items_of",
    "length_of",
    "parse_object",
    "request_ids_of",
    "shown",
    "shown_count",
    "shown_size",
    "shown_with_type",
    "token_ids_of",
    "warn_once",
]

_LOG = logging.getLogger("engine")
_MAX_SHOWN = 80


class _ShortRepr(reprlib.Repr):
    """`repr` whose time and length are bounded, whatever the value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _MAX_SHOWN
        self.maxlist = self.maxtuple = self.maxdict = 8

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        if len(x) > self.maxdict:  # reprlib would sort all keys
            x = dict(itertools.islice(x.items(), self.maxdict + 1))
        return super().repr_dict(x, level)

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 256:  # Python refuses to print very long ints
            return f"a whole number of about {int(x.bit_length() * 0.30103) + 1} digits"
        return repr(x)


_short_repr = _ShortRepr()


@functools.lru_cache(maxsize=256)
def warn_once(message: str) -> None:
    """Log a warning, unless this process has logged the same one before."""
    _LOG.warning("%s", message)


def shown(value: object) -> str:
    """Return `value` as text of at most 80 characters for an error message; never raises.

    Examples
    --------
    >>> shown("model"), len(shown("a" * 5000)), shown(10**5000)
    ("'model'", 80, 'a whole number of about 5001 digits')
    """
    try:
        text = _short_repr.repr(value)
    except Exception:  # the caller's __len__ or __iter__ may raise anything
        text = "an object"
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def shown_size(num_bytes: float) -> str:
    """Return the size of a file or a download with three digits, in decimal units.

    Examples
    --------
    >>> shown_size(98_362_432), shown_size(1536), shown_size(999_999), shown_size(7)
    ('98.4 MB', '1.54 kB', '1.00 MB', '7 B')
    """
    return _scaled(num_bytes, ("B", "kB", "MB", "GB", "TB"))


def shown_count(number: float) -> str:
    """Return a large count with three digits.

    Examples
    --------
    >>> shown_count(134_515_008), shown_count(8_030_261_248), shown_count(12)
    ('135 M', '8.03 B', '12')
    """
    return _scaled(number, ("", "K", "M", "B", "T"))


def _scaled(number: float, units: tuple[str, ...]) -> str:
    index = 0
    while number >= 999.5 and index < len(units) - 1:
        number /= 1000
        index += 1
    digits = 0 if index == 0 or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{digits}f} {units[index]}".rstrip()


def shown_with_type(value: object) -> str:
    """Return `shown(value)`, followed by the type unless `value` is a number.

    Examples
    --------
    >>> shown_with_type(1.5), shown_with_type("high"), shown_with_type([1, 2])
    ('1.5', "'high' (str)", '[1, 2] (list)')
    """
    if isinstance(value, numbers.Number) or value is None:
        return shown(value)
    return f"{shown(value)} ({type(value).__name__[:_MAX_SHOWN]})"


def parse_object(data: str | bytes) -> dict[str, Any] | None:
    """Return a JSON object sent by another process; None if `data` is anything else.

    Examples
    --------
    >>> parse_object(b'{"ready": true}'), parse_object("[" * 100_000), parse_object(bytes([255]))
    ({'ready': True}, None, None)
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def items_of(name: str, value: object, kind: str, limit: int) -> list[Any]:
    """Read a sequence (list, tuple, range, set, 1-d array) into a list.

    Parameters
    ----------
    name : str
        Name of the argument.
    value : object
    kind : str
        Description of the items, for error messages.
    limit : int
        Maximum number of items; at most one more is read.

    Raises
    ------
    RequestError
        If `value` is a text, a mapping, a 0-d array, an iterator (which may be endless and can
        be read only once), or longer than `limit`.
    """
    count = length_of(value)
    if count is None or isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        raise RequestError(f"{name} must be a sequence of {kind}; got {shown_with_type(value)}")
    if count <= limit:
        items = _read(name, value, kind, limit)
        count = len(items)
    if count > limit:
        raise RequestError(
            f"{name} must have at most {limit} entries; got {shown_with_type(count)}"
        )
    return items


def length_of(value: object) -> int | None:
    """Return the number of items; None if `value` has no length or is not iterable."""
    if not isinstance(value, Sized) or not hasattr(value, "__iter__"):
        return None
    try:
        return len(value)
    except OverflowError:
        return sys.maxsize + 1  # range(10**30)
    except Exception:  # a 0-d array, or a failing __len__
        return None


def _read(name: str, value: Any, kind: str, limit: int) -> list[Any]:
    """Read at most `limit` + 1 items, since `__len__` may be wrong."""
    dtype = getattr(value, "dtype", None)
    if getattr(dtype, "kind", "") in "iu" and dtype is not None and hasattr(value, "tolist"):
        value = value.tolist()  # Python ints: much faster than iterating over the array
    try:
        return list(itertools.islice(value, limit + 1))
    except Exception as error:
        got = f"{type(error).__name__} while it was read"
        raise RequestError(f"{name} must be a sequence of {kind}; got {got}") from error


def token_ids_of(name: str, items: list[Any], below: int, wanted: str) -> list[int]:
    """Return `items` as Python ints, after checking that they lie in [0, `below`).

    Parameters
    ----------
    name : str
        Name of the argument; the message names the first invalid item as "name[index]".
    items : list
        Ints or NumPy integers.
    below : int
    wanted : str
        Description of a valid item, for error messages.

    Raises
    ------
    RequestError
    """
    ids = items if set(map(type, items)) <= {int} else [_index(item) for item in items]
    if ids and (min(ids) < 0 or max(ids) >= below):
        index = next(i for i, number in enumerate(ids) if not 0 <= number < below)
        got = shown_with_type(items[index])
        raise RequestError(f"{name}[{index}] must be {wanted}; got {got}")
    return ids


def is_integer(value: object) -> bool:
    """Tell whether `value` is an int or a NumPy integer, but not a bool."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except TypeError:  # np.timedelta64 registers as Integral
        return False
    return True


def check_count(name: str, value: Any, limit: int) -> None:
    """Verify that an option is a whole number from 1 to `limit`.

    Raises
    ------
    ConfigError
        Otherwise; the message names the option, the limit and the value.
    """
    if not (is_integer(value) and 1 <= value <= limit):
        raise ConfigError(f"{name} must be a whole number from 1 to {limit}; got {shown(value)}")


def _index(item: Any) -> int:
    """Return an integer as a Python int; -1 for a bool or anything else."""
    return operator.index(item) if is_integer(item) else -1


def checked_text(name: str, value: object) -> str:
    """Return `value`, after checking that it is a str that UTF-8 can encode.

    Raises
    ------
    RequestError
        If it is not a str, or contains an unpaired surrogate.
    """
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a str; got {shown_with_type(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} must be valid Unicode; got {error}") from None
    return value


def request_ids_of(value: str | Iterable[str]) -> list[str]:
    """Return one or several request ids as a list; an iterator may yield at most 2**20.

    Raises
    ------
    RequestError
        If `value` is neither a str nor an iterable of str.
    """
    if isinstance(value, str):
        return [value]
    limit = 2**20
    try:
        ids = list(itertools.islice(value, limit + 1))
    except TypeError:
        ids = [None]  # type: ignore[list-item]
    if not all(isinstance(i, str) for i in ids):
        raise RequestError(
            f"request_ids must be a str or an iterable of them; got {shown_with_type(value)}"
        )
    if len(ids) > limit:
        raise RequestError(f"request_ids must have at most {limit} entries; got more")
    return ids
