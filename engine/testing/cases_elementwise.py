"""Test cases of the elementwise ops: flat arrays, packed rows, heads to rotate, pages."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.device import to_numpy
from engine.dtypes import np_dtype

__all__ = [
    "FLAT_SHAPES",
    "PAGES",
    "ROPE",
    "assert_guards",
    "assert_same",
    "cos_sin_table",
    "extremes",
    "misaligned",
]

# One element, sizes not divisible by a vector, 0-d, empty, more than one thread block.
FLAT_SHAPES: tuple[tuple[int, ...], ...] = (
    (1,),
    (7,),
    (3, 63),
    (5, 576),
    (2, 3, 130),
    (0, 64),
    (),
    (129, 515),
)

# (T, H, K, D, R): SmolLM2, Qwen2.5, Llama, Phi-3, Phi-4-mini (partial), Gemma, then odd ones.
ROPE: tuple[tuple[int, int, int, int, int], ...] = (
    (1, 9, 3, 64, 64),
    (5, 14, 2, 64, 64),
    (7, 32, 8, 128, 128),
    (3, 32, 32, 96, 96),
    (4, 24, 8, 128, 96),
    (33, 4, 1, 256, 256),
    (2, 2, 2, 80, 32),
    (3, 3, 1, 22, 12),
    (2, 1, 1, 2, 2),
    (2, 2, 1, 8, 0),
    (0, 4, 2, 64, 64),
)

# (P, K, block_size, D): SmolLM2, Llama, Gemma, then sizes not divisible by a vector.
PAGES: tuple[tuple[int, int, int, int], ...] = (
    (11, 3, 16, 64),
    (5, 8, 32, 128),
    (6, 1, 16, 256),
    (9, 2, 3, 20),
    (4, 1, 1, 1),
)


def cos_sin_table(
    num_positions: int, rotary_dim: int, theta: float = 10000.0
) -> np.ndarray[Any, Any]:
    """Return the (P, R) float32 table of `rope`: cosines, then sines, of p * theta**(-2i/R).

    Examples
    --------
    >>> cos_sin_table(2, 2).round(4)
    array([[1.    , 0.    ],
           [0.5403, 0.8415]], dtype=float32)
    """
    half = rotary_dim // 2
    frequencies = theta ** (-np.arange(half) / max(half, 1))
    angles = np.arange(num_positions)[:, None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def extremes(dtype: str) -> np.ndarray[Any, Any]:
    """Return zeros, values far in the tails of activations, infinities and NaN of `dtype`.

    Examples
    --------
    >>> int(np.isnan(extremes("float16")).sum())
    1
    """
    finite = [0.0, 1e-6, 0.5, 1.0, 3.0, 5.0, 9.0, 14.0, 20.0, 88.0, 100.0]
    values = [*finite, np.inf, np.nan]
    return np.array([*values, *(-v for v in values[:-1])], np.float32).astype(np_dtype(dtype))


def misaligned(xp: Any, array: np.ndarray[Any, Any]) -> Any:
    """Return `array` in module `xp`, contiguous but one element past an aligned address."""
    buffer = xp.empty(array.size + 1, array.dtype)
    view = buffer[1:].reshape(array.shape)
    view[...] = xp.asarray(array)
    return view


def assert_guards(buffer: Any, guard: int = 64) -> None:
    """Check that nothing was written before or after the output of `cases.guarded`."""
    host = to_numpy(buffer).astype(np.float32)
    edges = np.concatenate([host[:guard], host[-guard:]])
    assert np.isnan(edges).all(), f"{int((~np.isnan(edges)).sum())} values outside the output"


def assert_same(got: Any, want: np.ndarray[Any, Any]) -> None:
    """Check that `got` equals `want` in dtype, shape and every value; NaN equals NaN."""
    host = to_numpy(got)
    assert host.dtype == want.dtype, f"dtype {host.dtype}, wanted {want.dtype}"
    # NumPy does not recognise bfloat16's NaN; float32 represents every bfloat16.
    np.testing.assert_array_equal(host.astype(np.float32), want.astype(np.float32), strict=True)
