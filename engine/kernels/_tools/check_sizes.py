"""Sizes to check an op with: a search for values of its symbols that its conditions allow.

A symbol's candidates are small numbers, the neighbours of powers of two, and multiples of the
constants in the conditions ("N % 96 == 0"). For each kind of shape the search prefers the
candidates near a target, and takes the first combination that satisfies every condition.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from engine.checks import is_integer, shown
from engine.errors import ConfigError
from engine.kernels._user.expressions import Expression
from engine.kernels._user.op import Op
from engine.kernels._user.signature import BATCH, ArrayArg, ScalarArg

__all__ = [
    "are_allowed",
    "array_shape",
    "check_op",
    "check_sizes",
    "checked_sizes",
    "holds",
    "huge_sizes",
    "scalar_value",
]

Sizes = dict[str, int]

_SMALL = range(17)
_POWERS = [2**n for n in range(5, 17)]
_ODD = (3, 5, 7, 2, 11, 13, 17, 19)  # one for each symbol, so that swapped axes differ
_UNEVEN = (67, 131, 37, 23, 19, 17, 13, 11)
_EVEN = (256, 512, 64, 32, 16, 16, 16, 16)
_WARPS = (96, 160, 32, 16, 16, 16, 16, 16)  # odd multiples of 32, then of 128: which blocks fit
_BLOCKS = (384, 640, 128, 16, 16, 16, 16, 16)
_MAX_STEPS = 20_000  # candidates the search looks at for one kind
_MAX_ELEMENTS = 1 << 18  # limit for the largest array; the large shape has its own
_LARGE_ELEMENTS = 1 << 22
_HUGE_ELEMENTS = 1 << 31
_HUGE_TRIES = 4096  # sizes, of which a condition such as "N % 1024 == 0" may refuse most


def check_op(op: Any) -> None:
    """Raise `ConfigError` if `op` is not what `define` returns."""
    if not isinstance(op, Op):
        raise ConfigError(f"op: must be what kernels.define returns; got {type(op).__name__}")


def checked_sizes(op: Op, sizes: Mapping[str, Any]) -> Sizes:
    """Return sizes of the caller's, complete, as Python's numbers: they do not overflow, suit JSON.

    Scalar arguments may be among them.

    Raises
    ------
    ConfigError
        If it is no mapping, or one is missing, unknown, or violates the definition's conditions.
    """
    if not isinstance(sizes, Mapping):
        raise ConfigError(f"{op.name}: sizes: must be a mapping; got {shown(sizes)}")
    given = {n: v.item() if isinstance(v, np.generic) else v for n, v in sizes.items()}
    symbols = op.signature.symbols
    scalars = op.signature.scalars
    defaults = {s.name: s.default for s in scalars if s.name in symbols and s.default is not None}
    needed = [symbol for symbol in symbols if symbol not in defaults]
    known = {*symbols, *(scalar.name for scalar in scalars)}
    if not set(needed) <= set(given) <= known:
        others = ", ".join(sorted(known - set(needed)))
        also = f", and may have {others}" if others else ""
        raise ConfigError(f"{op.name}: sizes: must have {', '.join(needed)}{also}; got {given}")
    complete = defaults | given
    for name in symbols:
        if not is_integer(complete[name]) or complete[name] < 0:
            raise ConfigError(
                f"{op.name}: sizes: {name}: must be an integer of at least 0; "
                f"got {shown(complete[name])}"
            )
    if not are_allowed(op, complete):
        conditions = ", ".join(part.text for part in op.definition.where) or op.signature.text
        raise ConfigError(f"{op.name}: sizes: must satisfy {conditions}; got {complete}")
    return complete


def are_allowed(op: Op, sizes: Mapping[str, Any]) -> bool:
    """Tell whether arrays have these sizes, and every condition of the definition is satisfied."""
    known = {scalar.name: scalar_value(scalar) for scalar in op.signature.scalars} | dict(sizes)
    arrays = (*op.signature.arrays, *op.signature.outputs)
    has_shapes = all(array_shape(array, known) is not None for array in arrays)
    return has_shapes and all(holds(condition, known) for condition in op.definition.where)


def array_shape(array: ArrayArg, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    """Return an array's shape; None if a size is no integer of at least 0."""
    shape = _lead(sizes[BATCH]) if array.has_batch else []
    for dim in array.dims:
        try:
            size = dim.value(sizes)
        except ConfigError:  # divides by 0
            return None
        if not isinstance(size, int) or size < 0:
            return None
        shape.append(size)
    return tuple(shape)


def _lead(batch: int) -> list[int]:
    """Return axes for "...": two, if the number allows it."""
    for first in (2, 3):
        if batch > first and batch % first == 0:
            return [first, batch // first]
    return [batch]


def scalar_value(scalar: ScalarArg) -> Any:
    """Return the value with which an op is checked: the default, if there is one."""
    if scalar.default is not None:
        return scalar.default
    return {"b": False, "f": 0.5}.get(scalar.dtype[0], 1)


def huge_sizes(op: Op) -> Sizes | None:
    """Return sizes with which the largest array has a little more than 2**31 elements."""
    symbols = op.signature.symbols
    if not symbols:
        return None
    first, *others = symbols
    search = _Search(op)
    small = search.nearest(dict.fromkeys(symbols, 1) | dict.fromkeys(others[-1:], 1024))
    if small is None:
        return None
    arrays = (*op.signature.arrays, *op.signature.outputs)
    per_unit = max(
        math.prod(array_shape(array, small) or (0,)) / small[first]
        for array in arrays
        if first in _symbols_of(array)
    )
    for extra in range(_HUGE_TRIES):
        fixed = small | {first: math.ceil(_HUGE_ELEMENTS / per_unit) + 1 + extra}
        if (found := search.nearest(fixed, None, fixed=fixed)) is not None:
            return found
    return None


def check_sizes(op: Op) -> Iterator[tuple[str, Sizes]]:
    """Yield (kind, sizes): each kind of shape for which the conditions can be satisfied, once.

    The kinds are "one", "odd", "uneven", "even", "32s", "128s", "model" and "large"; for each
    symbol S "edge S", "long S" and "empty S"; and "given": `sizes=` of the definition.
    """
    seen: set[tuple[tuple[str, int], ...]] = set()
    for kind, sizes in _all_kinds(op):
        key = tuple(sorted(sizes.items()))
        if key not in seen:
            seen.add(key)
            yield kind, sizes


def _all_kinds(op: Op) -> Iterator[tuple[str, Sizes]]:
    symbols = op.signature.symbols
    search = _Search(op)
    odd = dict(zip(symbols, itertools.cycle(_ODD), strict=False))
    kinds: list[tuple[str, Mapping[str, int]]] = [
        ("one", dict.fromkeys(symbols, 1)),
        ("odd", odd),
        ("uneven", dict(zip(symbols, itertools.cycle(_UNEVEN), strict=False))),
        ("even", dict(zip(symbols, itertools.cycle(_EVEN), strict=False))),
        ("32s", dict(zip(symbols, itertools.cycle(_WARPS), strict=False))),
        ("128s", dict(zip(symbols, itertools.cycle(_BLOCKS), strict=False))),
        *((f"edge {symbol}", odd | {symbol: 257}) for symbol in symbols),
        *((f"long {symbol}", odd | {symbol: 1025}) for symbol in symbols),
    ]
    for kind, target in kinds:
        if (found := search.nearest(target)) is not None:
            yield kind, found
    for symbol in symbols:
        is_allowed = 0 in op.definition.sizes.get(symbol, (0,))
        found = search.nearest(odd | {symbol: 0}, fixed={symbol: 0}) if is_allowed else None
        if found is not None:
            yield f"empty {symbol}", found
    yield from (("given", sizes) for sizes in _given(op, search, odd))
    if symbols:
        last = symbols[-1]
        wide = {symbol: 33 for symbol in symbols} | {last: 4096}
        if (found := search.nearest(wide)) is not None:
            yield "model", found
        per_symbol = max(2, round(_LARGE_ELEMENTS ** (1 / len(symbols))) - 3)
        large = dict.fromkeys(symbols, per_symbol) | {symbols[0]: per_symbol + 4}
        if (found := search.nearest(large, _LARGE_ELEMENTS)) is not None:
            yield "large", found


def _given(op: Op, search: _Search, odd: Sizes) -> Iterator[Sizes]:
    """Yield combinations that have every value of `sizes=` at least once."""
    listed = op.definition.sizes
    for index in range(max((len(values) for values in listed.values()), default=0)):
        fixed = {name: int(values[index % len(values)]) for name, values in listed.items()}
        found = search.nearest(odd | fixed, None, fixed=fixed)
        if found is not None:
            yield found


class _Search:
    """Finds sizes that satisfy the conditions of an op."""

    def __init__(self, op: Op) -> None:
        self._op = op
        self._symbols = op.signature.symbols
        scalars = (s for s in op.signature.scalars if s.name not in self._symbols)
        self._scalars = {scalar.name: scalar_value(scalar) for scalar in scalars}
        arrays = (*op.signature.arrays, *op.signature.outputs)
        self._arrays = [array for array in arrays if array.dims or array.has_batch]
        dims = [dim for array in arrays for dim in array.dims if not dim.is_symbol]
        self._dims = [dim for dim in dims if dim.symbols]
        self._where = op.definition.where
        self._candidates = _candidates([*self._where, *self._dims])
        self._steps = 0

    def nearest(
        self,
        target: Mapping[str, int],
        most: int | None = _MAX_ELEMENTS,
        *,
        fixed: Mapping[str, int] | None = None,
    ) -> Sizes | None:
        """Return sizes near `target`, with arrays of at most `most` elements; None without any.

        `sizes=` of the definition are the only candidates of their symbols.
        """
        self._steps = 0
        listed = self._op.definition.sizes
        lists = []
        for symbol in self._symbols:
            if fixed and symbol in fixed:
                lists.append([fixed[symbol]])
            else:
                values = [int(v) for v in listed.get(symbol, ())] or self._candidates
                wanted = target[symbol]
                near = sorted(values, key=lambda value: (_distance(value, wanted), value))
                lists.append([value for value in near if value > 0 or symbol in listed])
        return self._extend({}, lists, most)

    def _extend(
        self, sizes: Sizes, lists: Sequence[Sequence[int]], most: int | None
    ) -> Sizes | None:
        if len(sizes) == len(self._symbols):
            return dict(sizes)
        symbol = self._symbols[len(sizes)]
        for value in lists[len(sizes)]:
            self._steps += 1
            if self._steps > _MAX_STEPS:
                return None
            sizes[symbol] = value
            if self._is_possible(sizes, most):
                found = self._extend(sizes, lists, most)
                if found is not None:
                    return found
            del sizes[symbol]
        return None

    def _is_possible(self, sizes: Sizes, most: int | None) -> bool:
        """Tell whether every condition whose symbols are all known is satisfied."""
        known = self._scalars | sizes
        for condition in self._where:
            if condition.symbols <= set(known) and not holds(condition, known):
                return False
        for array in self._arrays:
            if not _symbols_of(array) <= set(known):
                continue
            shape = array_shape(array, known)
            if shape is None or (most is not None and math.prod(shape) > most):
                return False
        return True


def _symbols_of(array: ArrayArg) -> set[str]:
    found = {symbol for dim in array.dims for symbol in dim.symbols}
    return found | ({BATCH} if array.has_batch else set())


def holds(condition: Expression, sizes: Mapping[str, Any]) -> bool:
    """Tell whether a condition is satisfied."""
    try:
        return bool(condition.value(sizes))
    except ConfigError:  # divides by 0
        return False


def _distance(value: int, target: int) -> float:
    return abs(math.log2(value + 1) - math.log2(target + 1))


def _candidates(conditions: Sequence[Expression]) -> list[int]:
    """Return sizes that conditions with these constants may want."""
    found = {*_SMALL, *_UNEVEN, *_WARPS, *_BLOCKS, 100, 1000, 257, 1025}
    found |= {power + step for power in _POWERS for step in (-1, 0, 1)}
    for text in (condition.text for condition in conditions):
        for constant in map(int, re.findall(r"\b\d+\b", text)):
            if 0 < constant <= 1 << 16:
                multiples = (1, 2, 3, 5, 7, 8, 16, 17, 33, 64, 67, 131, 257)
                found |= {constant * factor for factor in multiples}
                found |= {constant - 1, constant + 1}
    return sorted(found)
