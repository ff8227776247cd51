"""MXFP4: 4-bit numbers in groups of 32 that share a power of two as their scale.

OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 (E2M1) and 5.4.1 (E8M0).
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["FP4", "SCALES", "dequantize_mxfp4"]

Array = np.ndarray[Any, Any]

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The number for each code: 1 bit of sign, 2 of exponent, 1 of mantissa."""

SCALES = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))
"""The scale for each exponent; the last is NaN."""

# The two numbers of a byte, low half first, as one item: one lookup is several times faster.
_PAIRS = np.stack([np.tile(FP4, 16), np.repeat(FP4, 16)], axis=1).view(np.uint64)[:, 0]


def dequantize_mxfp4(blocks: Array, scales: Array) -> Array:
    """Return the numbers (R, 32 B) float32 of blocks (R, B, 16) and scales (R, B), both uint8.

    The two numbers of a byte are neighbours, the one of its low half first.

    Examples
    --------
    >>> blocks = np.zeros((1, 1, 16), np.uint8)
    >>> blocks[0, 0, :2] = 0x21, 0x0F
    >>> dequantize_mxfp4(blocks, np.array([[128]], np.uint8))[0, :4]
    array([  1.,   2., -12.,   0.], dtype=float32)
    """
    values: Array = _PAIRS[blocks].view(np.float32)  # (R, B, 32)
    with np.errstate(over="ignore"):
        values *= SCALES[scales][:, :, None]
    return values.reshape(len(blocks), -1)
