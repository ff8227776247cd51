"""Rounding a weight to a format of fewer bits: to the nearest code, with scales from the data."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from engine.checks import shown
from engine.device import array_module
from engine.errors import WeightsError
from engine.quantization.formats import FORMATS, Format
from engine.quantization.values import E2M1, pack_weight
from engine.quantization.weight import Weight

__all__ = ["QUANTIZABLE", "quantize", "resolve_format"]

QUANTIZABLE: tuple[str, ...] = tuple(
    name
    for name, form in FORMATS.items()
    if not form.is_dense and not form.super_block and form.offset != "min" and form.bits != 5
)
"""Names of the formats that `quantize` can make."""

_ALIASES = {"int4": "int4_g128"}

# Scales tried for a group of 4 bits, as shares of the one that its largest number needs: cutting
# off a few numbers rounds all others less. With the first the largest number is a code itself.
_SHRINKS = (7.5 / 7, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)

_E4M3_MAX = np.float32(448)
_E2M1_MAX_EXPONENT = 2  # 6 = 1.5 * 2**2
# Half way between neighbouring e2m1 numbers; a tie goes to the even code.
_E2M1_EDGES = (E2M1[:7] + E2M1[1:8]) / 2


def resolve_format(name: str) -> Format:
    """Return the format that the option `quantization` names; "int4" is "int4_g128".

    Raises
    ------
    WeightsError
        If weights cannot be quantized to it; the message lists the names that there are.

    Examples
    --------
    >>> resolve_format("int4").name, resolve_format("fp8").name
    ('int4_g128', 'fp8')
    """
    name = _ALIASES.get(name, name)
    if name not in QUANTIZABLE:
        known = ", ".join((*_ALIASES, *QUANTIZABLE))
        raise WeightsError(f"quantization must be one of {known}; got {shown(name)}")
    return FORMATS[name]


def quantize(array: Any, form: Format) -> Weight:
    """Return a matrix in another format: each number as the nearest code of its group.

    Parameters
    ----------
    array : (N, K) array of float32, float16 or bfloat16
        NumPy or CuPy.
    form : Format
        One of `QUANTIZABLE`.

    Returns
    -------
    Weight
        On the array's device. Scales of groups are float16, those of rows and blocks float32. A
        group of zeros has scale 0.

    Raises
    ------
    WeightsError
        If the array is no matrix, or has numbers that are not finite.

    Notes
    -----
    The scale of a group maps its largest number to the largest code. With 4 bits several smaller
    scales are tried too, and the one with the least squared error is taken.

    Examples
    --------
    >>> from engine.quantization import unpack_weight
    >>> array = np.linspace(-1, 1, 64, dtype=np.float32)[None]
    >>> float(abs(unpack_weight(quantize(array, FORMATS["int8_g64"])) - array).max()) < 0.005
    True
    """
    if array.ndim != 2:
        raise WeightsError(f"array must be a matrix; got {array.ndim} dimensions")
    numbers = array.astype(np.float32)
    if not bool(array_module(array).isfinite(numbers).all()):
        raise WeightsError("array must have finite numbers only; it has others")
    if form.name == "fp8_block":
        return _quantize_blocks(numbers, form)
    if form.activations:
        return _quantize_rows(numbers, form)
    return _quantize_groups(numbers, form)


def _quantize_rows(numbers: Any, form: Format) -> Weight:
    most = _E4M3_MAX if form.code == "e4m3" else np.float32(127)
    scales = abs(numbers).max(axis=1) / most
    return Weight(form, _byte_codes(numbers, scales[:, None], form), numbers.shape, scales=scales)


def _quantize_blocks(numbers: Any, form: Format) -> Weight:
    xp = array_module(numbers)
    assert form.block is not None
    (rows, columns), (high, wide) = numbers.shape, form.block
    down, across = -(-rows // high), -(-columns // wide)
    padded = xp.zeros((down * high, across * wide), np.float32)
    padded[:rows, :columns] = numbers
    scales = abs(padded).reshape(down, high, across, wide).max(axis=(1, 3)) / _E4M3_MAX
    each = scales.repeat(high, axis=0)[:rows].repeat(wide, axis=1)[:, :columns]
    return Weight(form, _byte_codes(numbers, each, form), numbers.shape, scales=scales)


def _byte_codes(numbers: Any, scales: Any, form: Format) -> Any:
    """Return the codes of `numbers` / `scales` in one byte; of e4m3 its bits on CUDA."""
    xp = array_module(numbers)
    scaled = numbers / xp.where(scales == 0, np.float32(1), scales)
    if form.code == "int":
        return xp.clip(xp.rint(scaled), -127, 127).astype("i1")
    if xp is np:
        return scaled.astype(ml_dtypes.float8_e4m3fn)
    return _e4m3_bits(scaled)


def _e4m3_bits(x: Any) -> Any:
    """Return the bits of the nearest e4m3 numbers, ties to even, for |x| up to 448."""
    xp = array_module(x)
    size = abs(x)
    exponent = xp.clip(xp.floor(xp.log2(xp.maximum(size, np.float32(2.0**-9)))), -6, 8)
    # A rounded mantissa of 16 belongs to the next exponent, which the addition of codes does.
    steps = xp.rint(xp.ldexp(size, (3 - exponent).astype(np.int32)))
    codes = xp.where(exponent == -6, steps, (exponent + 6) * 8 + steps)
    return codes.astype("u1") | (xp.signbit(x).astype("u1") << 7)


def _quantize_groups(numbers: Any, form: Format) -> Weight:
    xp = array_module(numbers)
    rows, columns = numbers.shape
    groups = -(-columns // form.group)
    padded = xp.zeros((rows, groups * form.group), np.float32)
    padded[:, :columns] = numbers
    grouped = padded.reshape(rows, groups, form.group)
    if form.code == "e2m1":
        codes, scales, offsets = _e2m1_groups(grouped)
    else:
        codes, scales, offsets = _int_groups(grouped, form)
    return pack_weight(form, codes.reshape(rows, -1)[:, :columns], scales, offsets)


def _e2m1_groups(grouped: Any) -> tuple[Any, Any, None]:
    """Return codes and e8m0 exponents, as the OCP specification (section 6.3) makes them."""
    xp = array_module(grouped)
    most = abs(grouped).max(axis=2)
    exponents = xp.floor(xp.log2(xp.where(most == 0, np.float32(1), most)))
    exponents = xp.clip(exponents - _E2M1_MAX_EXPONENT, -127, 127).astype(np.int32)
    scaled = xp.ldexp(grouped, -exponents[..., None])
    size = abs(scaled)
    codes = xp.zeros(grouped.shape, "u1")
    for code, edge in enumerate(_E2M1_EDGES):
        codes += size > edge if code % 2 == 0 else size >= edge
    codes |= xp.signbit(scaled).astype("u1") << 3
    return codes, (exponents + 127).astype("u1"), None


def _int_groups(grouped: Any, form: Format) -> tuple[Any, Any, Any]:
    """Return codes, float16 scales, and zero points or None, with the least squared error."""
    xp = array_module(grouped)
    best: tuple[Any, Any, Any] | None = None
    least = None
    for shrink in _SHRINKS if form.bits == 4 else (1.0,):
        tried = _int_codes(grouped, form, np.float32(shrink))
        codes, scales, zeros = tried
        back = codes.astype(np.float32) - (form.zero if zeros is None else zeros[..., None])
        back *= scales.astype(np.float32)[..., None]
        error = ((back - grouped) ** 2).sum(axis=2)
        if best is None or least is None:
            best, least = tried, error
            continue
        better = error < least
        least = xp.where(better, error, least)
        best = (
            xp.where(better[..., None], codes, best[0]),
            xp.where(better, scales, best[1]),
            None if zeros is None else xp.where(better, zeros, best[2]),
        )
    assert best is not None
    return best


def _int_codes(grouped: Any, form: Format, shrink: Any) -> tuple[Any, Any, Any]:
    """Return codes, float16 scales and zero points, with scales `shrink` times the full ones."""
    xp = array_module(grouped)
    low = -128 if form.bits == 8 else 0
    high = low + (1 << form.bits) - 1
    if form.offset:
        bottom = xp.minimum(grouped.min(axis=2), np.float32(0)) * shrink
        top = xp.maximum(grouped.max(axis=2), np.float32(0)) * shrink
        scales = ((top - bottom) / (high - low)).astype(np.float16)
        zeros = xp.clip(xp.rint(low - _divided(bottom, scales)), low, high)
        shift = zeros[..., None]
    else:
        most = abs(grouped).max(axis=2) * shrink
        # With 127.5 the largest positive number would be half a step above the largest code.
        half = 127.0 if form.bits == 8 else (high - low) / 2
        scales = (most / np.float32(half)).astype(np.float16)
        zeros, shift = None, np.float32(form.zero)
    codes = xp.clip(xp.rint(_divided(grouped, scales[..., None]) + shift), low, high)
    return codes.astype("i1" if form.bits == 8 else "u1"), scales, zeros


def _divided(numbers: Any, scales: Any) -> Any:
    """Return numbers / scales; numbers where the scale is 0."""
    wide = scales.astype(np.float32)
    return numbers / array_module(numbers).where(wide == 0, np.float32(1), wide)
