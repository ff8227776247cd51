"""The calls that `check` makes: sizes, dtypes, optional arguments, scalars, views and special
values, derived from an op's signature; and their arguments."""

from __future__ import annotations

import dataclasses
import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from engine.errors import ConfigError
from engine.kernels._tools.check_sizes import (
    array_shape,
    check_sizes,
    holds,
    huge_sizes,
    scalar_value,
)
from engine.kernels._user.op import Op
from engine.kernels._user.problem import CHIPS, Chip, Problem
from engine.kernels._user.signature import DTYPES, ArrayArg, ScalarArg

__all__ = ["SPECIAL", "VIEWS", "Case", "all_cases", "case_problem", "huge_case", "make_inputs"]

SPECIAL = ("nan", "inf", "zero", "denormal", "large")
"""Values that may be put into float arguments."""

VIEWS = ("padded", "transposed", "misaligned", "in place")
"""Placements of arguments in memory: rows with a gap, axes in reverse order, addresses one element
behind an aligned one, and `out` in an argument's place."""

_FRACTION_SPECIAL = 0.1  # share of an array's elements
_MAX_DRAWN = (1 << 26) + 7  # numbers that are drawn for an array; a huge one repeats them


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes
    ----------
    kind : str
        See `check_sizes`.
    sizes : tuple of (str, int)
    dtype : str
        The file's `scalar_t`.
    dtypes : tuple of (str, str)
        Dtype of every array argument that is given.
    scalars : tuple of (str, number)
    view : str
        One of VIEWS; "" for contiguous, aligned arrays.
    special : tuple of str
        Of SPECIAL.
    omitted : tuple of str
        Optional arrays that are not given.
    changed : tuple of str
        Scalars that do not have their default.
    has_dtypes : bool
        Whether `dtype` is one of several.
    """

    kind: str
    sizes: tuple[tuple[str, int], ...]
    dtype: str
    dtypes: tuple[tuple[str, str], ...]
    scalars: tuple[tuple[str, Any], ...]
    view: str = ""
    special: tuple[str, ...] = ()
    omitted: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    has_dtypes: bool = True

    def __str__(self) -> str:
        parts = [f"{name}={size}" for name, size in self.sizes]
        parts += [self.dtype] if self.has_dtypes else []
        several = [f"{name} {dtype}" for name, dtype in self.dtypes if name in self._choices]
        parts += several
        parts += [f"{name}={value}" for name, value in self.scalars if name in self.changed]
        parts += [f"without {name}" for name in self.omitted]
        if self.view:
            parts.append(self.view if self.view == "in place" else f"{self.view} arguments")
        if self.special:
            parts.append(f"with {', '.join(self.special)}")
        return ", ".join(parts)

    @property
    def _choices(self) -> set[str]:
        """Arrays whose dtype the case's `dtype` does not tell: integers."""
        return {name for name, dtype in self.dtypes if "int" in dtype and dtype != "int32"}


def all_cases(
    op: Op,
    *,
    sizes: Mapping[str, int] | None = None,
    dtype: str = "",
    special: Sequence[str] = (),
) -> Iterator[Case]:
    """Yield the cases of an op, small ones first.

    Every shape is combined with every dtype of `scalar_t`. The other variations (dtypes of integer
    arrays, omitted arguments, scalars, views, special values) are made for two of the shapes;
    those of scalars for each shape with one long axis, too.

    Parameters
    ----------
    sizes : mapping, optional
        Only this shape, with all variations.
    dtype : str
        Only this dtype.
    special : sequence of str
        Special values to put into float arguments.
    """
    shapes = [("asked", dict(sizes))] if sizes else list(check_sizes(op))
    varied = _varied_kinds([kind for kind, _ in shapes])
    names = [dtype] if dtype else list(op.signature.scalar_dtypes)
    for kind, found in shapes:
        for name in names:
            plain = _case(op, kind, found, name)
            yield plain
            if kind in varied:
                yield from _variations(op, plain, special)
            elif kind.startswith("edge") and name == names[0]:
                yield from _other_scalars(op, plain)  # a flag may matter for these sizes alone


def huge_case(op: Op) -> Case | None:
    """Return a case whose largest array has more than 2**31 elements, in the smallest dtype."""
    sizes = huge_sizes(op)
    dtypes = op.signature.scalar_dtypes
    small = "float16" if "float16" in dtypes else dtypes[-1]
    return None if sizes is None else _case(op, "huge", sizes, small)


def _varied_kinds(kinds: Sequence[str]) -> set[str]:
    wanted = [kind for kind in ("odd", "uneven", "asked") if kind in kinds]
    return set(wanted or kinds[-1:])


def _case(op: Op, kind: str, sizes: Mapping[str, int], dtype: str) -> Case:
    problem_sizes = tuple((symbol, sizes[symbol]) for symbol in op.signature.symbols)
    dtypes = {array.name: _dtype(op, array, dtype, 0) for array in op.signature.arrays}
    scalars = {scalar.name: scalar_value(scalar) for scalar in op.signature.scalars}
    scalars |= {name: sizes[name] for name in scalars if name in sizes}
    has_dtypes = len(op.signature.scalar_dtypes) > 1
    arguments = (tuple(dtypes.items()), tuple(scalars.items()))
    return Case(kind, problem_sizes, dtype, *arguments, has_dtypes=has_dtypes)


def _dtype(op: Op, array: ArrayArg, dtype: str, turn: int) -> str:
    if array.like:
        [other] = [other for other in op.signature.arrays if other.name == array.like]
        return _dtype(op, other, dtype, turn)
    return dtype if array.is_scalar_t else array.dtypes[turn % len(array.dtypes)]


def _variations(op: Op, plain: Case, special: Sequence[str]) -> Iterator[Case]:
    yield from _other_dtypes(op, plain)
    for omitted in _omissions(op):
        kept = tuple((name, d) for name, d in plain.dtypes if name not in omitted)
        if kept:
            yield dataclasses.replace(plain, dtypes=kept, omitted=omitted)
    yield from _other_scalars(op, plain)
    for view in VIEWS:
        if _has_view(op, view):
            yield dataclasses.replace(plain, view=view)
    if any("float" in name for _, name in plain.dtypes):
        for value in special:
            yield dataclasses.replace(plain, special=(value,))


def _omissions(op: Op) -> Iterator[tuple[str, ...]]:
    """Yield arrays that a call may omit: each with those that are like it, and all."""
    optional = [array for array in op.signature.arrays if array.is_optional]
    each = (tuple(a.name for a in optional if one.name in (a.name, a.like)) for one in optional)
    yield from dict.fromkeys([*each, *([tuple(a.name for a in optional)] if optional else [])])


def _other_dtypes(op: Op, plain: Case) -> Iterator[Case]:
    most = max((len(a.dtypes) for a in op.signature.arrays if not a.is_scalar_t), default=1)
    for turn in range(1, most):
        dtypes = tuple((a.name, _dtype(op, a, plain.dtype, turn)) for a in op.signature.arrays)
        if dtypes != plain.dtypes:
            yield dataclasses.replace(plain, dtypes=dtypes)


def _other_scalars(op: Op, plain: Case) -> Iterator[Case]:
    sizes = dict(plain.sizes)
    for scalar in op.signature.scalars:
        if scalar.name not in sizes and scalar.name not in op.definition.inputs:
            other = (_with_scalar(plain, scalar.name, v) for v in _other_values(scalar))
            yield from (case for case in other if _is_allowed(op, case))


def _other_values(scalar: ScalarArg) -> list[Any]:
    """Return values besides the usual one; an integer may be a count, so it stays as it is."""
    usual = scalar_value(scalar)
    if scalar.dtype == "bool":
        return [not usual]
    return [usual * 2 or 0.25] if scalar.dtype.startswith("float") else []


def _with_scalar(case: Case, name: str, value: Any) -> Case:
    scalars = tuple((key, value if key == name else old) for key, old in case.scalars)
    return dataclasses.replace(case, scalars=scalars, changed=(name,))


def _is_allowed(op: Op, case: Case) -> bool:
    known = dict(case.sizes) | dict(case.scalars)
    return all(holds(condition, known) for condition in op.definition.where)


def _has_view(op: Op, view: str) -> bool:
    if view == "in place":
        return bool(op.definition.in_place) and bool(op.signature.outputs)
    if view == "transposed":
        arrays = [array for array in op.signature.arrays if not array.is_inout]
        return any(len(array.dims) + array.has_batch > 1 for array in arrays)
    return True


def case_problem(op: Op, case: Case, chip: Chip | None = None) -> Problem:
    """Return the problem of a case, on an H100 by default; needs no GPU."""
    return Problem(
        op.name,
        case.sizes,
        case.scalars,
        case.dtype,
        case.dtypes,
        case.view in ("", "in place"),
        chip or CHIPS["sm_90a"],
    )


def make_inputs(op: Op, case: Case, seed: int) -> dict[str, Any]:
    """Return the arguments of a case by name, in the signature's order.

    NumPy arrays, numbers, None where omitted.

    Floats are drawn from a normal distribution, bytes and unsigned integers from their whole range,
    signed ones from the indices that are valid for every axis. `inputs=` of the definition decides
    about the arguments it names.

    Raises
    ------
    ConfigError
        If a function in `inputs=` fails, or returns another shape.
    """
    problem = case_problem(op, case)
    dtypes = dict(case.dtypes)
    values: dict[str, Any] = dict(case.scalars)
    for array in op.signature.arrays:
        if array.name in case.omitted:
            values[array.name] = None
            continue
        rng = np.random.default_rng([seed, zlib.crc32(array.name.encode())])
        if array.name in op.definition.inputs:
            drawn = np.asarray(_given(op, array.name, rng, problem), order="C")
            wanted = array_shape(array, dict(case.sizes) | dict(case.scalars))
            if drawn.shape != wanted:
                raise ConfigError(
                    f"{op.name}: inputs: the function for {array.name!r} must return shape "
                    f"{array.shape_text} = {wanted}; got {drawn.shape}"
                )
            values[array.name] = drawn.astype(DTYPES[dtypes[array.name]], copy=False)
        else:
            values[array.name] = _drawn(op, array, dtypes[array.name], case, rng)
    for scalar in op.signature.scalars:
        if scalar.name in op.definition.inputs:
            rng = np.random.default_rng([seed, zlib.crc32(scalar.name.encode())])
            values[scalar.name] = _given(op, scalar.name, rng, problem)
    return {arg.name: values[arg.name] for arg in op.signature.args if arg.name in values}


def _given(op: Op, name: str, rng: np.random.Generator, problem: Problem) -> Any:
    try:
        return op.definition.inputs[name](rng, problem)
    except Exception as error:
        sizes = ", ".join(f"{key}={value}" for key, value in problem.sizes)
        raise ConfigError(
            f"{op.name}: inputs: the function for {name!r} fails with {sizes}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _drawn(op: Op, array: ArrayArg, dtype: str, case: Case, rng: np.random.Generator) -> Any:
    sizes = dict(case.sizes) | dict(case.scalars)
    shape = array_shape(array, sizes)
    if shape is None:
        raise ConfigError(
            f"{op.name}: sizes: {array.name} has no shape {array.shape_text} with {case}"
        )
    numpy_dtype = DTYPES[dtype]
    if "float" in dtype:
        count = math.prod(shape)
        few = rng.standard_normal(min(count, _MAX_DRAWN), np.float32).astype(numpy_dtype)
        drawn = np.resize(few, shape) if count else np.empty(shape, numpy_dtype)
        return _with_special(drawn, case.special, rng)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(np.bool_)
    limits = np.iinfo(numpy_dtype)
    if numpy_dtype.itemsize == 1 or dtype.startswith("u"):
        return rng.integers(limits.min, limits.max, shape, numpy_dtype, endpoint=True)
    lengths = [size for _, size in case.sizes if size > 0]
    return rng.integers(0, min([*lengths, 100], default=1), shape).astype(numpy_dtype)


def _with_special(array: Any, special: Sequence[str], rng: np.random.Generator) -> Any:
    """Put each of the special values, with both signs, at random places."""
    finfo: Any = ml_dtypes.finfo(array.dtype)  # type: ignore[no-untyped-call]
    values = {
        "nan": (np.nan,),
        "inf": (np.inf, -np.inf),
        "zero": (0.0, -0.0),
        "denormal": (float(finfo.smallest_subnormal) * 3, -float(finfo.tiny) / 2),
        "large": (float(finfo.max) / 2, -float(finfo.max) / 2),
    }
    for value in itertools.chain.from_iterable(values[name] for name in special):
        chosen = rng.random(array.shape) < _FRACTION_SPECIAL
        array = np.where(chosen, np.asarray(value, array.dtype), array).astype(array.dtype)
    return array
