"""A kernel's result beside the reference's: which element differs, by how much, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.kernels._user.binding import dtype_text
from engine.kernels._user.op import Op
from engine.kernels._user.problem import Problem
from engine.testing.tolerances import Tolerance, tolerance

__all__ = ["Difference", "allowed_error", "compare", "region"]

_MAX_COMPARED = 1 << 26  # elements at once
_LONGER = (64, 1024)  # terms: one for each class of the table of tolerances


@dataclass(frozen=True)
class Difference:
    """Where a result differs from the reference.

    Attributes
    ----------
    text : str
    mask : np.ndarray
        bool, True where an element is wrong.
    """

    text: str
    mask: np.ndarray[Any, Any]


def allowed_error(op: Op, problem: Problem, dtype: str) -> Tolerance:
    """Return the error that a result of `dtype` may have: the definition's, or the table's."""
    if op.definition.tolerance is not None:
        return Tolerance(*op.definition.tolerance)
    return tolerance(dtype, int(op.definition.reduction.value(problem.values)))


def compare(
    op: Op, problem: Problem, name: str, got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]
) -> Difference | None:
    """Compare a result with the reference's; None if it is within the tolerance.

    Infinities and NaNs must be equal; integers and bools, too.
    """
    if want.size > _MAX_COMPARED:
        return _compare_parts(op, problem, name, got, want)
    dtype = dtype_text(want.dtype)
    if "float" not in dtype:
        mask = got != want
        limit = Tolerance(0, 0)
        allowed = None
    else:
        limit = allowed_error(op, problem, dtype)
        mask, allowed = _wrong(got, want, limit)
    if not mask.any():
        return None
    text = _described(name, got, want, mask, allowed)
    if allowed is not None:
        text += _advice(op, name, got, want, dtype)
    return Difference(text, mask)


def _compare_parts(
    op: Op, problem: Problem, name: str, got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]
) -> Difference | None:
    """Compare part by part, as float64 copies of a huge result would not fit; see `compare`."""
    flat = got.reshape(-1)
    right = want.reshape(-1)
    for start in range(0, want.size, _MAX_COMPARED):
        part = slice(start, start + _MAX_COMPARED)
        found = compare(op, problem, name, flat[part], right[part])
        if found is not None:
            index = np.unravel_index(start + int(np.argmax(found.mask)), want.shape)
            where = element(name, [int(i) for i in index])
            return Difference(
                f"{where} is the first wrong element; counted from {start}: {found.text}",
                found.mask,
            )
    return None


def _wrong(
    got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], limit: Tolerance
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return where the error is too large, and the error that is allowed."""
    a = got.astype(np.float64)
    b = want.astype(np.float64)
    finite = np.isfinite(b)
    rms = float(np.sqrt(np.mean(np.square(b[finite])))) if finite.any() else 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        allowed = limit.rtol * np.abs(b) + limit.atol * rms
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        return ~(same | (finite & (np.abs(a - b) <= allowed))), allowed


def _described(
    name: str,
    got: np.ndarray[Any, Any],
    want: np.ndarray[Any, Any],
    mask: np.ndarray[Any, Any],
    allowed: np.ndarray[Any, Any] | None,
) -> str:
    first = tuple(int(i) for i in np.argwhere(mask)[0])
    values = f"the kernel has {_number(got[first])}, the reference {_number(want[first])}"
    error = ""
    if allowed is not None and np.isfinite(float(want[first])) and np.isfinite(float(got[first])):
        size = abs(float(got[first]) - float(want[first]))
        error = f" (error {size:.3g}, allowed {allowed[first]:.2g})"
    count = int(mask.sum())
    text = f"{element(name, first)}: {values}{error}"
    if count > 1:
        text += f"\n{count} of {mask.size} elements differ, in {region(name, mask)}"
    if allowed is not None and np.isnan(got.astype(np.float64)[mask]).all():
        text += "\nall of them are NaN in the kernel's result, and numbers in the reference's"
    return text


def _advice(
    op: Op, name: str, got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], dtype: str
) -> str:
    """Return a hint if the error is one of a longer sum."""
    if op.definition.tolerance is not None:
        return "" if _ratio(got, want) is None else _factor(got, want)
    if op.definition.reduction.text != "1":  # the length of the sum is known
        return _factor(got, want)
    for terms in _LONGER:
        mask, _ = _wrong(got, want, tolerance(dtype, terms))
        if not mask.any():
            return (
                f"\na sum of {terms} terms or more may differ that much: if every element of "
                f"{name} sums, say, N of them, state reduction='N'"
            )
    return _factor(got, want)


def _factor(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> str:
    """Return a hint if the result is the reference times a number."""
    ratio = _ratio(got, want)
    return "" if ratio is None else f"\nthe result is {ratio:.6g} times the reference everywhere"


def _ratio(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> float | None:
    a = got.astype(np.float64).ravel()
    b = want.astype(np.float64).ravel()
    usable = np.isfinite(a) & np.isfinite(b) & (b != 0)
    if usable.sum() < 4 or not np.isfinite(a).all():
        return None
    ratios = a[usable] / b[usable]
    middle = float(np.median(ratios))
    is_constant = np.allclose(ratios, middle, rtol=0.02)
    return middle if is_constant and abs(middle - 1) > 0.05 and middle != 0 else None


def element(name: str, index: Sequence[int]) -> str:
    """Return "out[3, 60]"."""
    return f"{name}[{', '.join(map(str, index))}]" if index else name


def _number(value: Any) -> str:
    if isinstance(value, np.bool_ | np.integer):
        return str(value)
    return f"{float(value):.8g}"


def region(name: str, mask: np.ndarray[Any, Any]) -> str:
    """Return the smallest block that has every True element: "out[3, 60:63]"."""
    if mask.ndim == 0:
        return name
    places = np.argwhere(mask)
    low = places.min(axis=0)
    high = places.max(axis=0)
    parts = []
    for start, stop, size in zip(low, high, mask.shape, strict=True):
        if start == 0 and stop == size - 1 and size > 1:
            parts.append(":")
        else:
            parts.append(str(start) if start == stop else f"{start}:{stop + 1}")
    return f"{name}[{', '.join(parts)}]"
