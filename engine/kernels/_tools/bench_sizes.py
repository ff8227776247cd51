"""Sizes and dtypes that `bench` and `profile` use: the definition's, the caller's, or chosen."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.errors import ConfigError
from engine.kernels._tools.check_cases import Case, all_cases, case_problem, make_inputs
from engine.kernels._tools.check_sizes import are_allowed, check_op, checked_sizes
from engine.kernels._user.op import Op

__all__ = ["Shape", "bench_dtypes", "bench_shapes", "case_of", "cpu_case"]

_DEFAULT_BYTES = 1 << 28  # bytes that bench aims at: several times any L2 cache
_DEFAULT_FLOPS = 1 << 40
_CPU_SECONDS = 0.2
_CPU_BYTES = 1 << 26
_LEAST_BYTES = 1 << 14


@dataclass(frozen=True)
class Shape:
    """Sizes, and who chose them.

    Attributes
    ----------
    sizes : dict of str to int
    note : str
        "" if the definition or the caller states them.
    """

    sizes: Mapping[str, int]
    note: str = ""


def bench_shapes(
    op: Op, sizes: Mapping[str, int] | Sequence[Mapping[str, int]] | None = None
) -> list[Shape]:
    """Return the shapes to measure: `sizes`, those in the definition, or one that is large.

    Raises
    ------
    ConfigError
        If a size is missing, unknown, or violates the definition's conditions, or `op` is no op.
    """
    check_op(op)
    is_several = isinstance(sizes, list | tuple | None)
    given: list[Any] = list(sizes or op.definition.bench) if is_several else [sizes]
    if not given:
        return [_default_shape(op)]
    return [Shape(checked_sizes(op, each)) for each in given]


def _default_shape(op: Op) -> Shape:
    """Return the largest shape with all sizes equal to a power of two that is not too large."""
    symbols = op.signature.symbols
    for size in (2**power for power in range(27, 4, -1)):
        sizes = dict.fromkeys(symbols, size)
        if not are_allowed(op, sizes):
            continue
        problem = case_problem(op, case_of(op, sizes, bench_dtypes(op, ())[0]))
        if op.nbytes(problem) <= _DEFAULT_BYTES and op.flops(problem) <= _DEFAULT_FLOPS:
            return Shape(sizes, "sizes chosen by bench: the definition has no bench=")
    example = ",".join(f"{symbol}=4096" for symbol in symbols)
    raise ConfigError(
        f"{op.name}: the definition has no bench=, and no power of two fits all sizes; "
        f"state bench= in it, or pass sizes (--sizes {example})"
    )


def bench_dtypes(op: Op, dtypes: Sequence[str]) -> tuple[str, ...]:
    """Return the dtypes of `scalar_t` to measure: `dtypes`, else float32 and one of 16 bits.

    Raises
    ------
    ConfigError
        If the op does not support one.
    """
    known = op.signature.scalar_dtypes
    for name in dtypes:
        if name not in known:
            raise ConfigError(f"{op.name}: dtypes must be of {', '.join(known)}; got {name!r}")
    if dtypes:
        return tuple(dtypes)
    halves = [name for name in known if name in ("float16", "bfloat16")]
    return tuple(name for name in known if name not in halves[1:])


def case_of(op: Op, sizes: Mapping[str, int], dtype: str) -> Case:
    """Return the call with these sizes: contiguous arrays, nothing omitted."""
    return next(all_cases(op, sizes=sizes, dtype=dtype))


def cpu_case(op: Op, sizes: Mapping[str, int], dtype: str) -> tuple[Case, float]:
    """Return the largest shrunk shape that the reference runs in 0.2 s, and its seconds.

    The largest size is halved again and again, as far as the conditions allow.
    """
    chain = [dict(sizes)]
    while (
        op.nbytes(case_problem(op, case_of(op, chain[-1], dtype))) > _LEAST_BYTES
        and (less := _halved(op, chain[-1])) is not None
    ):
        chain.append(less)
    found = None
    for each in reversed(chain):  # from small to large: a slow reference is noticed early
        case = case_of(op, each, dtype)
        if found and op.nbytes(case_problem(op, case)) > _CPU_BYTES:
            break
        seconds = _reference_seconds(op, case)
        if found and seconds > _CPU_SECONDS:
            break
        found = case, seconds
        if 2 * seconds > _CPU_SECONDS:
            break
    assert found is not None  # the chain has one shape at least
    return found


def _halved(op: Op, sizes: Mapping[str, int]) -> dict[str, int] | None:
    """Return the sizes with the largest one halved; the next one if a condition forbids it."""
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        value = sizes[name]
        less = {**sizes, name: value // 2}
        if isinstance(value, int) and value > 1 and are_allowed(op, less):
            return less
    return None


def _reference_seconds(op: Op, case: Case) -> float:
    inputs = make_inputs(op, case, 0)
    start = time.perf_counter()
    with np.errstate(all="ignore"):
        op(**inputs)
    return time.perf_counter() - start
