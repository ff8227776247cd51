"""Hostile values for JSON, and changes of documents and bytes."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

__all__ = ["change_bytes", "change_document", "dump", "json_value"]

BYTES = [0, 1, 2, 3, 4, 8, 9, 16, 31, 32, 33, 34, 44, 58, 64, 91, 93, 123, 125, 127, 128, 255]
NUMBERS = [
    *(0, -1, 1, 2, 3, 7, 16, 255, 2**16, 2**24, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53 + 1),
    *(2**62, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 10**400, 10**5000),
    *(0.0, -0.0, 0.5, -1.5, 1e-320, 1e38, 1e308, float("nan"), float("inf"), float("-inf")),
]
TEXTS = [
    *("", " ", "a", "\0", "\ud800", "é", "😀", "../x", "/etc/passwd", "NaN", "1e309", "llama"),
    *("x" * 300, "x" * 5000, "{{ 7 }}", "<s>", "%s", "{0}", "\n", "\u202e", "None", "true"),
]


def json_value(rng: random.Random, depth: int = 0) -> Any:
    """Return a value that JSON can write, Python's NaN, surrogates and long integers included."""
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(NUMBERS)
    if kind < 0.7:
        return rng.choice(TEXTS)
    if kind < 0.8:
        return rng.choice([None, True, False, [], {}])
    if depth > 2:
        return 1
    if kind < 0.82:
        return _nested(rng.choice([60, 400, 3000]), as_list=rng.random() < 0.5)
    items = [json_value(rng, depth + 1) for _ in range(rng.randint(1, 4))]
    if kind < 0.9:
        return items * rng.choice([1, 1, 50])
    return {rng.choice(TEXTS): item for item in items}


class Raw:
    """Text that `dump` writes as it is."""

    def __init__(self, text: str) -> None:
        self.text = text


def _nested(depth: int, *, as_list: bool) -> Raw:
    return Raw("[" * depth + "]" * depth if as_list else '{"a":' * depth + "1" + "}" * depth)


def dump(value: Any) -> str:
    """Return JSON, also of what json.dumps refuses: long integers, `Raw`."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, int) and not isinstance(value, bool):
        power = f"1{'0' * 5000}"
        return power if value == 10**5000 else str(value)
    if isinstance(value, list):
        return f"[{', '.join(map(dump, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {dump(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def _places(value: Any, found: list[tuple[Any, Any]], limit: int = 4000) -> None:
    keys = value if isinstance(value, dict) else range(len(value))
    for key in keys:
        if len(found) >= limit:
            return
        found.append((value, key))
        if isinstance(value[key], (dict, list)):
            _places(value[key], found, limit)


def change_document(rng: random.Random, document: Any, keys: tuple[str, ...] = ()) -> Any:
    """Return a copy with one to three changes: a value replaced, removed, repeated or added.

    Parameters
    ----------
    rng : random.Random
    document : dict or list
    keys : tuple of str
        Keys to add.
    """
    result = copy.deepcopy(document)
    for _ in range(rng.choice([1, 1, 2, 3])):
        places: list[tuple[Any, Any]] = []
        _places(result, places)
        if (keys and rng.random() < 0.4) or not places:
            result[rng.choice(keys or ("x",))] = json_value(rng)
            continue
        owner, key = rng.choice(places)
        key = key if isinstance(owner, dict) else min(key, len(owner) - 1)
        way = rng.random()
        if way < 0.6:
            owner[key] = json_value(rng)
        elif way < 0.75:
            del owner[key]
        elif way < 0.9 and isinstance(owner, list):
            owner.extend(owner[key : key + 1] * rng.choice([1, 2, 40]))
        else:
            other, there = rng.choice(places)
            owner[key] = copy.deepcopy(other[there])
    return result


def change_bytes(rng: random.Random, whole: bytes, end: int | None = None) -> bytes:
    """Return a copy with a few bytes changed before `end`, sometimes truncated or longer."""
    mutant, end = bytearray(whole), max(min(end or len(whole), len(whole)), 1)
    for _ in range(rng.choice([1, 1, 2, 3, 8])):
        if mutant:
            mutant[rng.randrange(min(end, len(mutant)))] = rng.choice([*BYTES, rng.randrange(256)])
    way = rng.random()
    if way < 0.05 and mutant:
        del mutant[rng.randrange(len(mutant)) :]
    elif way < 0.1:
        start = rng.randrange(end)
        mutant[start:start] = mutant[start : start + rng.randrange(1, 64)]
    elif way < 0.12:
        mutant += bytes(rng.choice([1, 7, 4096]))
    return bytes(mutant)
