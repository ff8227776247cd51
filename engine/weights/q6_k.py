"""Round to "q6_k": 6-bit codes, with one integer scale per group of 16."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.device import array_module
from engine.weights.formats import FORMATS
from engine.weights.values import check_float16_scales

__all__ = ["round_q6_k"]

_FORM = FORMATS["q6_k"]
_LOW = -_FORM.zero
_HIGH = _FORM.zero - 1


def round_q6_k(numbers: Any) -> tuple[Any, Any, Any]:
    """Return the nearest codes of a matrix, their scales, and the super-block scales.

    Two's complement integers reach one further below zero than above. So a group's number of
    largest magnitude maps to the lowest code, and a super-block's scale of largest magnitude to the
    lowest integer; the scales carry the signs.

    Parameters
    ----------
    numbers : (N, K) array of float32
        NumPy or CuPy, finite.

    Returns
    -------
    codes : (N, K) array of uint8
    scales : (N, ceil(K / 16)) array of int8
    super_scales : (N, ceil(K / 256)) array of float16

    Examples
    --------
    >>> codes, scales, supers = round_q6_k(np.array([[64.0, -2.0, 0.0]], np.float32))
    >>> codes.tolist(), scales.tolist(), supers.tolist()
    ([[0, 33, 32]], [[-128]], [[0.015625]])
    """
    xp = array_module(numbers)
    (rows, columns) = numbers.shape
    group = _FORM.group
    blocks = -(-columns // _FORM.super_block)
    padded = xp.zeros((rows, blocks * _FORM.super_block), np.float32)
    padded[:, :columns] = numbers
    groups = padded.reshape(rows, -1, group)
    wanted = _extreme(groups) / np.float32(_LOW)
    of_block = wanted.reshape(rows, blocks, -1)
    supers = _extreme(of_block) / np.float32(-128)
    check_float16_scales(abs(supers))
    supers = supers.astype(np.float16)
    d = supers.astype(np.float32)[..., None]
    scales = xp.clip(xp.rint(_divided(of_block, d)), -128, 127)
    steps = (d * scales).reshape(rows, -1, 1)
    codes = xp.clip(xp.rint(_divided(groups, steps)), _LOW, _HIGH) + np.float32(_FORM.zero)
    codes = codes.astype("u1").reshape(rows, -1)[:, :columns]
    return codes, scales.astype("i1").reshape(rows, -1)[:, : -(-columns // group)], supers


def _extreme(values: Any) -> Any:
    """Return the number with the largest magnitude along the last axis."""
    high = values.max(axis=-1)
    low = values.min(axis=-1)
    return array_module(values).where(high > -low, high, low)


def _divided(numbers: Any, steps: Any) -> Any:
    """Return numbers / steps, or 0 for a step of 0."""
    xp = array_module(numbers)
    return xp.where(steps == 0, np.float32(0), numbers / xp.where(steps == 0, np.float32(1), steps))
