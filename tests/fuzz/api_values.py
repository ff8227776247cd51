"""Arguments of every wrong type and size, by name, so that a case can be kept as JSON."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["VALUES", "CallersError"]


def _itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def _dict_itself() -> dict[str, Any]:
    value: dict[str, Any] = {"role": "user"}
    value["content"] = value
    return value


def _deep(depth: int) -> list[Any]:
    value: list[Any] = [5]
    for _ in range(depth):
        value = [value]
    return value


def _generator() -> Iterator[int]:
    yield 5
    yield 6


def _raising() -> Iterator[int]:
    yield 5
    raise CallersError("while it was read")


class CallersError(Exception):
    """What a caller's own iterator raises, and gets back."""


class _Unprintable:
    def __repr__(self) -> str:
        raise ValueError("no repr")


class _LongerThanItSays(list[int]):
    def __len__(self) -> int:
        return 1


class _Text(str):
    __slots__ = ()


class _Number(int):
    pass


_LITERALS: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        2,
        3,
        5,
        16,
        -1,
        -2,
        255,
        619,
        620,
        2**16,
        2**31 - 1,
        2**31,
        -(2**31),
    ),
    *(2**32, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 0.0, -0.0, 0.5, 1.0, 1.5, -1.0, 1e-320),
    *(1e-5, 1e38, 1e308, 1e400, -1e400, 1j, b"", b"ab", bytearray(b"x"), "", "a", "Hello", " "),
    *("\0", "\ud800", "😀", "x" * 300, "x" * 5000, "1e309", "nan", "r0", (), [], {}, set()),
    *([5], [5, 6], (5, 6), [[5]], [[5], [6]], [True], [1.0], [-1], [620], [2**63], ["a"], ["a", 5]),
    *([None], [[]], [""], [b"a"], ["\ud800"], {5: 1}, {5: 200.0}, {-1: 1}, {"a": 1}, {5: "a"}),
    *({620: 1.0}, {"prompt": "Hello"}, {"prompt": 5}, {"prompt_token_ids": [5]}, {"x": 1}),
    *({"prompt_token_ids": "a"}, {"prompt": "a", "prompt_token_ids": [5], "cache_salt": 5}),
    *([{"role": "user", "content": "Hi"}], [{"role": "user"}], [{"content": "Hi"}], [{}]),
    *([{"role": 5, "content": "Hi"}], [{"role": "user", "content": 5}], {"role": "user"}),
    *([{"role": "user", "content": [{"type": "image_url"}]}], [{5: 6}], [[{"role": "user"}]]),
    *(
        frozenset([5]),
        range(3),
        range(10**8),
        range(10**30),
        slice(1),
        ...,
        int,
        len,
        NotImplemented,
    ),
]
_MADE: dict[str, Callable[[], Any]] = {
    "10**5000": lambda: 10**5000,
    "-10**5000": lambda: -(10**5000),
    "[10**5000]": lambda: [10**5000],
    "{10**5000: 1}": lambda: {10**5000: 1},
    "{5: 10**5000}": lambda: {5: 10**5000},
    "nan": lambda: float("nan"),
    "[nan]": lambda: [float("nan")],
    "{5: nan}": lambda: {5: float("nan")},
    "count()": itertools.count,
    "repeat(5)": lambda: itertools.repeat(5),
    "repeat('a')": lambda: itertools.repeat("a"),
    "repeat([5])": lambda: iter([[5]] * 50),
    "generator": _generator,
    "raising generator": _raising,
    "itself": _itself,
    "dict of itself": _dict_itself,
    "[dict of itself]": lambda: [_dict_itself()],
    "deep": lambda: _deep(200),
    "very deep": lambda: _deep(20_000),
    "['x'] * 2**21": lambda: ["x"] * 2**21,
    "[5] * 10**6": lambda: [5] * 10**6,
    "'a' * 2 * 10**5": lambda: "a" * (2 * 10**5),
    "unprintable": _Unprintable,
    "[unprintable]": lambda: [_Unprintable()],
    "longer than it says": lambda: _LongerThanItSays([5] * 5000),
    "str of another class": lambda: _Text("Hello"),
    "int of another class": lambda: _Number(2),
    "mapping proxy": lambda: MappingProxyType({"prompt": "Hello"}),
    "lock": threading.Lock,
    "lambda": lambda: lambda ids, logits: None,
    "[lambda]": lambda: [lambda ids, logits: None],
    "[raises]": lambda: [lambda ids, logits: 1 // 0],
    "[returns a text]": lambda: [lambda ids, logits: "x"],
    "[fills nan]": lambda: [lambda ids, logits: logits.fill(float("nan"))],
    "[fills -inf]": lambda: [lambda ids, logits: logits.fill(float("-inf"))],
    "np.zeros(0)": lambda: np.zeros(0, np.int64),
    "np.arange(3)": lambda: np.arange(3),
    "np.arange(3, float)": lambda: np.arange(3.0),
    "np.zeros((2, 2), int)": lambda: np.zeros((2, 2), np.int64),
    "np.array(1)": lambda: np.array(1),
    "np.array('a')": lambda: np.array("a"),
    "np.array([None])": lambda: np.array([None]),
    "np.array([2**63])": lambda: np.array([2**63], np.uint64),
    "np.array([b'a'])": lambda: np.array([b"a"]),
    "np.array([complex])": lambda: np.array([1j]),
    "np.array record": lambda: np.zeros(2, [("a", "i4")]),
    "np.bool_": lambda: np.bool_(True),
    "np.int8(5)": lambda: np.int8(5),
    "np.uint64(2**63)": lambda: np.uint64(2**63),
    "np.float16": lambda: np.float16(0.5),
    "np.float32(nan)": lambda: np.float32("nan"),
    "np.longdouble": lambda: np.longdouble("1e400"),
    "bfloat16": lambda: ml_dtypes.bfloat16(0.5),
    "np.timedelta64": lambda: np.timedelta64(1, "s"),
    "[np.timedelta64]": lambda: [np.timedelta64(1, "s")],
    "np.datetime64": lambda: np.datetime64("2020"),
    "np.str_": lambda: np.str_("Hello"),
    "memoryview": lambda: memoryview(b"abc"),
}

VALUES: dict[str, Callable[[], Any]] = _MADE | {
    f"{index} {value!r:.40}": (lambda value=value: value) for index, value in enumerate(_LITERALS)
}
"""What to call for a value -> by its name."""
