"""Tolerances between a kernel's result and its mirror's: one table, and the comparison.

The allowed error is ``rtol * |want| + atol * rms(want)``. The first term covers the rounding of the
result; the second covers a different order of summation, whose effect grows with the length of the
reduction and does not shrink if terms cancel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.device import to_numpy
from engine.errors import DTypeError

__all__ = ["TOLERANCES", "Tolerance", "assert_close", "tolerance"]


@dataclass(frozen=True)
class Tolerance:
    """Allowed error relative to the element (`rtol`) and to the array's rms (`atol`)."""

    rtol: float
    atol: float


# (dtype of the result, class of reduction length) -> allowed error. Half a unit in the last place
# (ulp) is 6e-8, 4.9e-4 and 3.9e-3; a value near a rounding boundary may be off by a whole ulp.
TOLERANCES: dict[tuple[str, str], Tolerance] = {
    ("float32", "none"): Tolerance(2e-6, 1e-6),
    ("float32", "short"): Tolerance(4e-6, 4e-6),
    ("float32", "long"): Tolerance(1e-5, 2e-5),
    ("float32", "chained"): Tolerance(1e-5, 2e-5),
    ("float16", "none"): Tolerance(1e-3, 1e-4),
    ("float16", "short"): Tolerance(1e-3, 1e-3),
    ("float16", "long"): Tolerance(2e-3, 2e-3),
    ("float16", "chained"): Tolerance(6e-3, 6e-3),
    ("bfloat16", "none"): Tolerance(8e-3, 1e-3),
    ("bfloat16", "short"): Tolerance(8e-3, 8e-3),
    ("bfloat16", "long"): Tolerance(1.6e-2, 1.6e-2),
    ("bfloat16", "chained"): Tolerance(4.8e-2, 4.8e-2),
    **{("float64", length): Tolerance(1e-12, 1e-12) for length in ("none", "short", "long")},
}

_SHORT = 256


def tolerance(dtype: Any, reduction: float = 1) -> Tolerance:
    """Return the allowed error of a result of `dtype` that sums `reduction` terms.

    `math.inf` stands for a chain of products that each round their operands, as a recurrence's.

    Raises
    ------
    DTypeError
        If the table has no such dtype.

    Examples
    --------
    >>> tolerance("float32", 64)
    Tolerance(rtol=4e-06, atol=4e-06)
    """
    length = "none" if reduction <= 1 else "short" if reduction <= _SHORT else "long"
    if reduction == math.inf:
        length = "chained"
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if (name, length) not in TOLERANCES:
        known = ", ".join(dict.fromkeys(each for each, _ in TOLERANCES))
        raise DTypeError(f"dtype must be one of {known}; got {name}")
    return TOLERANCES[name, length]


def assert_close(
    got: Any, want: Any, *, reduction: float = 1, name: str = "result", dtype: Any = None
) -> None:
    """Assert that a result matches the mirror's in value, dtype, shape and contiguity.

    Parameters
    ----------
    got : array
        NumPy or CuPy.
    want : np.ndarray
    reduction : int or math.inf
        Terms summed per element: K of a GEMM, N of a norm. See `tolerance`.
    name : str
        Name for the error message.
    dtype : optional
        Dtype to look up in the table, if the result is wider than its operands.

    Raises
    ------
    AssertionError
        Reports the largest error, the allowed error, and the first index that differs.
    """
    host = to_numpy(got)
    assert host.dtype == want.dtype, f"{name}: dtype {host.dtype}, wanted {want.dtype}"
    assert host.shape == want.shape, f"{name}: shape {host.shape}, wanted {want.shape}"
    assert got.flags.c_contiguous == want.flags.c_contiguous, f"{name}: contiguity differs"
    if not np.issubdtype(want.dtype, np.floating) and want.dtype.kind != "V":
        np.testing.assert_array_equal(host, want, err_msg=name)
        return
    if want.size == 0 or _is_same(host, want):
        return
    limit = tolerance(dtype if dtype is not None else want.dtype, reduction)
    a = host.astype(np.float64)
    b = want.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))  # infinities and NaNs must agree exactly
    finite = np.isfinite(b)
    rms = float(np.sqrt(np.mean(np.square(b[finite])))) if finite.any() else 0.0
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(a - b))
        bad = ~(same | (finite & (error <= limit.rtol * np.abs(b) + limit.atol * rms)))
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        raise AssertionError(
            f"{name}: {int(bad.sum())} of {bad.size} differ; largest error "
            f"{error[bad].max():.3g} (rms {rms:.3g}); first at {first}: got {a[first]!r}, "
            f"wanted {b[first]!r}; allowed rtol {limit.rtol:g}, atol {limit.atol:g} rms"
        )


def _is_same(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Tell whether two arrays are bitwise equal, as a fast path for equal results."""
    bytes_a, bytes_b = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
    return bool(np.array_equal(bytes_a, bytes_b))
