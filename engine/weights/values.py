"""Pack codes and scales into a weight, and dequantize a weight to numbers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from engine.device import array_module
from engine.errors import WeightsError
from engine.weights.formats import Format, padded_shape
from engine.weights.packing import (
    pack_codes,
    tile_groups,
    unpack_codes,
    untile_groups,
)
from engine.weights.stack import matrices
from engine.weights.weight import Weight

__all__ = ["E2M1", "E4M3", "E8M0", "check_float16_scales", "pack_weight", "unpack_weight"]

_BYTES = np.arange(256, dtype=np.uint8)

E4M3 = _BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""Value of each e4m3 code: 1 sign bit, 4 exponent bits, 3 mantissa bits; two codes are NaN."""

E2M1 = _BYTES[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32)
"""Value of each e2m1 code: 1 sign bit, 2 exponent bits, 1 mantissa bit."""

E8M0 = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))
"""Scale of each e8m0 exponent; the last is NaN."""


def check_float16_scales(scales: Any) -> Any:
    """Return `scales`, checked to be at most the largest float16.

    Raises
    ------
    WeightsError
        If one is larger.
    """
    most = scales.max(initial=0)
    if most > np.finfo(np.float16).max:
        raise WeightsError(
            "array must have groups whose scales are at most 65504, the largest float16; got a "
            f"scale of {float(most):.3g}"
        )
    return scales


def pack_weight(
    form: Format,
    codes: Any,
    scales: Any,
    offsets: Any = None,
    super_scales: Any = None,
    permutation: Any = None,
) -> Weight:
    """Pack codes and scales into a weight.

    Parameters
    ----------
    form : Format
        A packed format.
    codes : (N, K) array of uint8, or int8 for 8 bits
    scales : (N, G) array
        G = ceil(K / group). float16 or bfloat16; uint8 exponents for "mxfp4"; with super-blocks
        uint8 or int8 factors.
    offsets : (N, G) array, optional
        Zero points (integers) or minimums, depending on the format.
    super_scales : (N, K / 256) or (N, K / 256, 2) array of float16, optional
        d, or d and dmin.
    permutation : (K,) array of int32, optional
        See `Weight`.

    Raises
    ------
    WeightsError
        If a shape or a dtype does not match the format.
    """
    rows, columns = codes.shape
    groups = -(-columns // form.group)
    _check("scales", scales, (rows, groups))
    if bool(form.offset) != (offsets is not None):
        wanted = "given" if form.offset else "None"
        raise WeightsError(f"offsets of {form.name} must be {wanted}")
    if offsets is not None:
        _check("offsets", offsets, (rows, groups))
        xp = array_module(codes)
        scales = xp.stack([scales, offsets.astype(scales.dtype)], axis=-1)
    if form.super_block:
        last = (2,) if form.offset else ()
        _check("super_scales", super_scales, (rows, -(-columns // form.super_block), *last))
    data, high = pack_codes(codes, form.bits)
    # Pad the groups so that every tile has scales.
    padded = padded_shape((rows, columns))[1]
    return Weight(
        form,
        data,
        (rows, columns),
        scales=tile_groups(_with_groups(scales, -(-padded // form.group))),
        high=high,
        super_scales=None if super_scales is None else tile_groups(super_scales),
        permutation=permutation,
    )


def unpack_weight(weight: Weight) -> Any:
    """Dequantize a weight of any format to float32, (N, K) or (E, N, K), in logical order."""
    if weight.parts:
        parts = [unpack_weight(part) for part in weight.parts]
        return array_module(*parts).concatenate(parts)
    if weight.panels is not None:
        return _in_logical_order(weight.panels.numbers(), weight.permutation)
    form = weight.format
    xp = array_module(weight.data)
    if form.is_dense:
        return weight.data.astype(np.float32)
    if len(weight.shape) > 2:
        numbers = [unpack_weight(matrix) for matrix in matrices(weight)]
        return xp.stack(numbers) if numbers else xp.zeros(weight.shape, np.float32)
    if form.activations:
        numbers = xp.asarray(E4M3)[weight.data.view("u1")]
        if form.code == "int":
            numbers = weight.data.astype(np.float32)
        return numbers * _expanded(weight.scales, form, weight.shape)
    rows, columns = weight.shape
    codes = unpack_codes(weight.data, weight.high, form.bits, (rows, columns))
    scales, offsets = _scales_of(weight)
    if form.code == "e2m1":
        numbers = xp.asarray(E2M1)[codes]
    else:
        numbers = codes.astype(np.float32) - np.float32(form.zero)
    if form.offset == "zero":
        numbers -= _repeated(offsets, form.group, columns)
    numbers *= _repeated(scales, form.group, columns)
    if form.offset == "min":
        numbers += _repeated(offsets, form.group, columns)
    return _in_logical_order(numbers, weight.permutation)


def _in_logical_order(numbers: Any, permutation: Any) -> Any:
    """Return the columns of a matrix (N, K) as they were before the permutation, if any."""
    if permutation is None:
        return numbers
    logical = array_module(numbers).empty_like(numbers)
    logical[:, permutation] = numbers
    return logical


def _scales_of(weight: Weight) -> tuple[Any, Any]:
    """Return the float32 scales and offsets (N, G) of a packed weight; offsets may be None."""
    form = weight.format
    xp = array_module(weight.data)
    rows = weight.shape[0]
    values = untile_groups(weight.scales, rows)
    if form.code == "e2m1":
        return xp.asarray(E8M0)[values], None
    values = values.astype(np.float32)
    if form.super_block:
        factors = untile_groups(weight.super_scales, rows).astype(np.float32)
        values = values * _repeated(factors, form.super_block // form.group, values.shape[1])
    if not form.offset:
        return values, None
    scales = values[..., 0]
    offsets = values[..., 1]
    return scales, -offsets if form.super_block else offsets


def _repeated(values: Any, count: int, length: int) -> Any:
    """Repeat each of `values` `count` times along axis 1, and truncate to `length`."""
    return array_module(values).repeat(values, count, axis=1)[:, :length]


def _expanded(scales: Any, form: Format, shape: tuple[int, ...]) -> Any:
    """Return row or block scales in a shape that broadcasts against the weight."""
    if form.block is None or form.block[1] == 0:
        return scales[:, None]
    high, wide = form.block
    rows = array_module(scales).repeat(scales, high, axis=0)[: shape[0]]
    return _repeated(rows, wide, shape[1])


def _with_groups(values: Any, groups: int) -> Any:
    """Append zeros for the padding groups to `values` (N, G, ...)."""
    missing = groups - values.shape[1]
    if missing <= 0:
        return values
    xp = array_module(values)
    rows, _, *rest = values.shape
    return xp.concatenate([values, xp.zeros((rows, missing, *rest), values.dtype)], axis=1)


def _check(name: str, array: Any, shape: tuple[int, ...]) -> None:
    if array is None or tuple(array.shape) != shape:
        got = None if array is None else tuple(array.shape)
        raise WeightsError(f"{name} must have shape {shape}; got {got}")
