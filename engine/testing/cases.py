"""Shapes and random inputs for the tests of all kernels.

Shapes: one row, sizes not divisible by any vector width, real model shapes, empty arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from engine.dtypes import FLOAT_NAMES, np_dtype

__all__ = ["DTYPES", "ROWS", "guarded", "normal", "to_module"]

DTYPES: tuple[str, ...] = FLOAT_NAMES

# (rows, features): one row; odd sizes; SmolLM2, Qwen and Llama widths; empty.
ROWS: tuple[tuple[int, int], ...] = (
    (1, 64),
    (3, 63),
    (5, 576),
    (7, 1),
    (2, 1025),
    (33, 1536),
    (4, 4096),
    (0, 64),
)

_MAX_CACHED = 2**25  # maximum elements per cached array


def normal(
    shape: Sequence[int], dtype: str, seed: int, *, scale: float = 1.0, mean: float = 0.0
) -> np.ndarray[Any, Any]:
    """Return normally distributed values of `dtype`, determined by the arguments.

    Examples
    --------
    >>> normal((2, 3), "float16", seed=0).shape
    (2, 3)
    """
    draw = _normal if math.prod(shape) <= _MAX_CACHED else _normal.__wrapped__
    array: np.ndarray[Any, Any] = draw(tuple(shape), dtype, seed, scale, mean)
    return np.copy(array)  # the caller may write into it


@lru_cache(maxsize=8)  # consecutive tests mostly reuse the same arrays
def _normal(
    shape: tuple[int, ...], dtype: str, seed: int, scale: float, mean: float
) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng([seed, *shape])
    values: np.ndarray[Any, Any] = rng.standard_normal(shape, np.float32) * scale + mean
    return values.astype(np_dtype(dtype))


def to_module(xp: Any, *arrays: Any) -> Any:
    """Return `arrays` in module `xp` (None stays None): a list, or the array if there is one."""
    moved = [None if a is None else xp.asarray(a) for a in arrays]
    return moved[0] if len(moved) == 1 else moved


def guarded(xp: Any, shape: Sequence[int], dtype: Any, guard: int = 64) -> tuple[Any, Any]:
    """Return an output filled with NaN and its enclosing buffer, to detect stray writes.

    The buffer's first and last `guard` elements must still be NaN after the launch.
    """
    size = int(np.prod(shape))
    buffer = xp.full(size + 2 * guard, float("nan"), dtype)
    return buffer[guard : guard + size].reshape(tuple(shape)), buffer
