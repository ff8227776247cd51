"""log2 and 2**x, bitwise equal in NumPy and in CUDA (`sample/exact_math.cuh`).

Library functions differ in their last bits between machines, and one bit can change the sampled
token. These are polynomials, evaluated in float32 with one rounding per operation and without fused
multiply-adds, so that the kernels reproduce them exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["MASS_BITS", "log2", "log2_one_plus", "mass", "ordered_key"]

Array = np.ndarray[Any, Any]

MASS_BITS = 40
"""Probability masses are integers in units of 2**-40, so sums do not depend on the order."""

# Minimax fits: log2(1 + t) = t P(t) on [sqrt(1/2) - 1, sqrt(2) - 1], relative error 2e-7;
# 2**f = 1 + f Q(f) on [0, 1], relative error 1e-8.
_LOG2 = (
    1.442694902420044,
    -0.7213528156280518,
    0.48092323541641235,
    -0.3602396249771118,
    0.2870987057685852,
    -0.2488768845796585,
    0.23404230177402496,
    -0.1458115130662918,
)
_EXP2 = (
    0.6931471824645996,
    0.2402271330356598,
    0.055496569722890854,
    0.009650635533034801,
    0.0012710212031379342,
    0.00020745005167555064,
)
_SQRT_HALF_BITS = np.uint32(0x3F3504F3)
_BELOW_TWO = np.float32(1.9999999)


def _horner(coefficients: tuple[float, ...], t: Array) -> Array:
    value = np.full_like(t, coefficients[-1])
    for c in coefficients[-2::-1]:
        value *= t
        value += np.float32(c)
    return value


def log2_one_plus(t: Array) -> Array:
    """Return log2(1 + t) for float32 `t` in [sqrt(1/2) - 1, sqrt(2) - 1]; 0 for 0."""
    return t * _horner(_LOG2, t)


def log2(y: Array) -> Array:
    """Return log2 of positive, normal float32 `y`."""
    bits = y.view(np.uint32)
    exponent = (bits - _SQRT_HALF_BITS).view(np.int32) >> 23
    mantissa = (bits - (exponent << 23).view(np.uint32)).view(np.float32)
    result: Array = exponent.astype(np.float32) + log2_one_plus(mantissa - np.float32(1))
    return result


def mass(x: Array) -> Array:
    """Return 2**x for float32 `x` <= 0 in units of 2**-40, rounded down; 0 below x = -40."""
    whole = np.floor(np.maximum(x, np.float32(-64)))
    f = np.maximum(x, np.float32(-64)) - whole
    power = np.minimum(np.float32(1) + f * _horner(_EXP2, f), _BELOW_TWO)
    significand = (power.view(np.uint32) & np.uint32(0x7FFFFF)) | np.uint32(0x800000)
    shift = (-whole).astype(np.uint64)
    scaled = significand.astype(np.uint64) << np.uint64(MASS_BITS - 23) >> np.minimum(shift, 63)
    result: Array = np.where(x >= -MASS_BITS, scaled, np.uint64(0))
    return result


def ordered_key(x: Array) -> Array:
    """Return uint32 keys that compare like the float32 `x`; -0 equals 0, NaN is not allowed."""
    bits = (x + np.float32(0)).view(np.uint32)
    keys: Array = bits ^ np.where(bits >> 31, np.uint32(0xFFFFFFFF), np.uint32(0x80000000))
    return keys
