"""Round-to-nearest weight quantization; scales are computed from the weight itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from engine.checks import shown
from engine.device import array_module
from engine.errors import WeightsError
from engine.weights.formats import FORMATS, Format
from engine.weights.q6_k import round_q6_k
from engine.weights.stack import stack_matrices
from engine.weights.values import E2M1, E4M3, E8M0, check_float16_scales, pack_weight
from engine.weights.weight import Weight

__all__ = ["QUANTIZABLE", "Codes", "dequantize_codes", "quantize", "resolve_format"]
__all__ += ["round_groups", "round_to_codes"]

QUANTIZABLE: tuple[str, ...] = tuple(
    name
    for name, form in FORMATS.items()
    if name == "q6_k"
    or not (form.is_dense or form.super_block or form.offset == "min" or form.bits == 5)
)
"""Names of the formats that `quantize` supports."""

_ALIASES = {"int4": "int4_g128"}

_PART_ROWS = 1 << 15  # rows of a large matrix quantized at a time

# Candidate scales of a 4-bit group, relative to the scale that just covers its largest number:
# clipping a few numbers reduces the rounding error of all others. The first represents the largest
# number exactly.
_SHRINKS = (7.5 / 7, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)

_E4M3_MAX = np.float32(448)
_E2M1_MAX_EXPONENT = 2  # 6 = 1.5 * 2**2
# Midpoints of neighbouring e2m1 numbers; a tie is rounded to the even code.
_E2M1_EDGES = (E2M1[:7] + E2M1[1:8]) / 2


def resolve_format(name: str) -> Format:
    """Return the format named by the `quantization` option; "int4" means "int4_g128".

    Raises
    ------
    WeightsError
        If quantizing to this format is not supported; the message lists the supported names.

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


class Codes(NamedTuple):
    """A matrix (N, K) as codes and scales, in logical order.

    Attributes
    ----------
    codes : (N, K) array
        uint8 for 4 bits, int8 for 8 bits; e4m3 numbers, or their bits as uint8.
    scales : array
        Per row (N,), per block (ceil(N / 128), ceil(K / 128)), or per group (N, G). float32 values
        that the requested dtype represents exactly; uint8 exponents for "mxfp4".
    offsets : (N, G) array of float32 or None
        Zero points; None for a symmetric format.
    """

    codes: Any
    scales: Any
    offsets: Any = None


def quantize(array: Any, form: Format) -> Weight:
    """Quantize a matrix: round each number to the nearest code of its group.

    Parameters
    ----------
    array : (N, K) or (E, N, K) array of float32, float16 or bfloat16
        NumPy or CuPy; see `stack` for several matrices.
    form : Format
        One of `QUANTIZABLE`.

    Returns
    -------
    Weight
        On the array's device. Group scales are float16, row and block scales float32. The scale of
        a group of zeros is 0.

    Raises
    ------
    WeightsError
        If `form` is not one of `QUANTIZABLE`, or the array is not a matrix or stack of matrices, or
        contains a NaN or infinity.

    Notes
    -----
    A group's scale maps its largest number to the largest code. With 4 bits, several smaller scales
    are tried too, and the one with the least squared error wins.

    Examples
    --------
    >>> from engine.weights import unpack_weight
    >>> array = np.linspace(-1, 1, 64, dtype=np.float32)[None]
    >>> float(abs(unpack_weight(quantize(array, FORMATS["int8_g64"])) - array).max()) < 0.005
    True
    """
    if form.name not in QUANTIZABLE:
        raise WeightsError(f"form must be one of {', '.join(QUANTIZABLE)}; got {form.name!r}")
    if array.ndim == 3 and len(array):
        return stack_matrices([quantize(matrix, form) for matrix in array])
    if form.is_packed and array.ndim == 2 and len(array) > _PART_ROWS:
        rows = range(0, len(array), _PART_ROWS)
        return _joined([quantize(array[first : first + _PART_ROWS], form) for first in rows])
    if form.super_block:
        codes, scales, supers = round_q6_k(_numbers(array))
        return pack_weight(form, codes, scales, super_scales=supers)
    return _weight_of_codes(form, round_to_codes(array, form))


def _joined(parts: list[Weight]) -> Weight:
    """Concatenate packed matrices along the rows; all but the last consist of whole row tiles."""
    xp = array_module(parts[0].data)
    planes = {
        name: xp.concatenate([dict(part.arrays())[name] for part in parts])
        for name, _ in parts[0].arrays()
    }
    rows = sum(part.shape[0] for part in parts)
    return replace(parts[0], shape=(rows, parts[0].shape[1]), **planes)


def round_to_codes(array: Any, form: Format, scale_dtype: str = "") -> Codes:
    """Return the codes and scales that `quantize` computes, unpacked.

    Parameters
    ----------
    array, form
        See `quantize`.
    scale_dtype : str
        Dtype that scales are rounded to; default: float16 for groups, else float32.
    """
    numbers = _numbers(array)
    if form.name == "fp8_block":
        return _round_blocks(numbers, form, scale_dtype or "float32")
    if form.activations:
        return _round_rows(numbers, form, scale_dtype or "float32")
    xp = array_module(numbers)
    rows, columns = numbers.shape
    groups = -(-columns // form.group)
    padded = xp.zeros((rows, groups * form.group), np.float32)
    padded[:, :columns] = numbers
    made = round_groups(padded.reshape(rows, groups, form.group), form, scale_dtype)
    return made._replace(codes=made.codes.reshape(rows, -1)[:, :columns])


def _numbers(array: Any) -> Any:
    """Check the array's shape and values, and return it in float32."""
    if array.ndim != 2:
        raise WeightsError(f"array must be a matrix, or several; got {array.ndim} dimensions")
    numbers = array.astype(np.float32)
    if not bool(array_module(array).isfinite(numbers).all()):
        raise WeightsError("array must have finite numbers only; it has others")
    return numbers


def round_groups(grouped: Any, form: Format, scale_dtype: str = "") -> Codes:
    """Quantize float32 groups (N, G, group) to codes of that shape, scales and offsets."""
    if form.code == "e2m1":
        return _e2m1_groups(grouped)
    return _int_groups(grouped, form, scale_dtype or "float16")


def _weight_of_codes(form: Format, made: Codes) -> Weight:
    """Return the codes as a weight; group scales must be representable in float16."""
    if not form.is_packed:
        return Weight(form, made.codes, made.codes.shape, scales=made.scales)
    scales = made.scales if form.code == "e2m1" else made.scales.astype(np.float16)
    return pack_weight(form, made.codes, scales, made.offsets)


def dequantize_codes(form: Format, made: Codes) -> Any:
    """Dequantize the codes to float32 (N, K)."""
    xp = array_module(made.codes)
    rows, columns = made.codes.shape
    if form.code == "int":
        numbers = made.codes.astype(np.float32) - np.float32(form.zero)
    else:
        table = E4M3 if form.code == "e4m3" else E2M1
        numbers = xp.asarray(table)[made.codes.view("u1")]
    scales = xp.asarray(E8M0)[made.scales] if form.code == "e2m1" else made.scales
    if scales.ndim == 1:
        return numbers * scales[:, None]
    if made.offsets is not None:
        numbers -= made.offsets.repeat(form.group, axis=1)[:, :columns]
    assert form.block is not None
    high, wide = form.block
    numbers *= scales.repeat(high, axis=0)[:rows].repeat(wide, axis=1)[:, :columns]
    return numbers


def _round_rows(numbers: Any, form: Format, scale_dtype: str) -> Codes:
    most = _E4M3_MAX if form.code == "e4m3" else np.float32(127)
    scales = _exact_in(abs(numbers).max(axis=1) / most, scale_dtype)
    return Codes(_byte_codes(numbers, scales[:, None], form), scales)


def _round_blocks(numbers: Any, form: Format, scale_dtype: str) -> Codes:
    xp = array_module(numbers)
    assert form.block is not None
    (rows, columns) = numbers.shape
    (high, wide) = form.block
    down = -(-rows // high)
    across = -(-columns // wide)
    padded = xp.zeros((down * high, across * wide), np.float32)
    padded[:rows, :columns] = numbers
    most = abs(padded).reshape(down, high, across, wide).max(axis=(1, 3))
    scales = _exact_in(most / _E4M3_MAX, scale_dtype)
    each = scales.repeat(high, axis=0)[:rows].repeat(wide, axis=1)[:, :columns]
    return Codes(_byte_codes(numbers, each, form), scales)


def _exact_in(scales: Any, dtype: str) -> Any:
    """Round float32 scales to values representable in `dtype`; return float32."""
    if dtype == "float32":
        return scales
    if dtype == "float16":
        return check_float16_scales(scales).astype(np.float16).astype(np.float32)
    bits = scales.view(np.uint32)  # positive and finite
    bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def _byte_codes(numbers: Any, scales: Any, form: Format) -> Any:
    """Return the 8-bit codes of `numbers` / `scales`; e4m3 codes as bits."""
    xp = array_module(numbers)
    scaled = numbers / xp.where(scales == 0, np.float32(1), scales)
    if form.code == "int":
        return xp.clip(xp.rint(scaled), -127, 127).astype("i1")
    scaled = xp.clip(scaled, -_E4M3_MAX, _E4M3_MAX)  # the scale may have been rounded down
    if xp is np:
        return scaled.astype(ml_dtypes.float8_e4m3fn).view("u1")
    return _e4m3_bits(scaled)


def _e4m3_bits(x: Any) -> Any:
    """Return the bits of the nearest e4m3 numbers, ties to even, for |x| up to 448."""
    xp = array_module(x)
    size = abs(x)
    exponent = xp.clip(xp.floor(xp.log2(xp.maximum(size, np.float32(2.0**-9)))), -6, 8)
    # A mantissa rounded up to 16 carries into the exponent when the codes are added.
    steps = xp.rint(xp.ldexp(size, (3 - exponent).astype(np.int32)))
    codes = xp.where(exponent == -6, steps, (exponent + 6) * 8 + steps)
    return codes.astype("u1") | (xp.signbit(x).astype("u1") << 7)


def _e2m1_groups(grouped: Any) -> Codes:
    """Return codes and e8m0 exponents (OCP specification, section 6.3)."""
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
    return Codes(codes, (exponents + 127).astype("u1"))


def _int_groups(grouped: Any, form: Format, scale_dtype: str) -> Codes:
    """Return codes, scales, and zero points or None, minimising the squared error."""
    xp = array_module(grouped)
    best: Codes | None = None
    least = None
    for shrink in _SHRINKS if form.bits == 4 else (1.0,):
        tried = _int_codes(grouped, form, np.float32(shrink), scale_dtype)
        codes, scales, zeros = tried
        back = codes.astype(np.float32) - (form.zero if zeros is None else zeros[..., None])
        back *= scales[..., None]
        error = ((back - grouped) ** 2).sum(axis=2)
        if best is None or least is None:
            best = tried
            least = error
            continue
        better = error < least
        least = xp.where(better, error, least)
        best = Codes(
            xp.where(better[..., None], codes, best.codes),
            xp.where(better, scales, best.scales),
            None if zeros is None else xp.where(better, zeros, best.offsets),
        )
    assert best is not None
    return best


def _int_codes(grouped: Any, form: Format, shrink: Any, scale_dtype: str) -> Codes:
    """Return codes, scales and zero points for scales multiplied by `shrink`."""
    xp = array_module(grouped)
    low, high = form.code_range
    if form.offset:
        bottom = xp.minimum(grouped.min(axis=2), np.float32(0)) * shrink
        top = xp.maximum(grouped.max(axis=2), np.float32(0)) * shrink
        scales = _exact_in((top - bottom) / np.float32(high - low), scale_dtype)
        zeros = xp.clip(xp.rint(low - _divided(bottom, scales)), low, high)
        shift = zeros[..., None]
    else:
        most = abs(grouped).max(axis=2) * shrink
        # Not 127.5: the largest positive number would be half a step above the largest code.
        half = 127.0 if form.bits == 8 else (high - low) / 2
        scales = _exact_in(most / np.float32(half), scale_dtype)
        zeros = None
        shift = np.float32(form.zero)
    codes = xp.clip(xp.rint(_divided(grouped, scales[..., None]) + shift), low, high)
    return Codes(codes.astype("i1" if form.bits == 8 else "u1"), scales, zeros)


def _divided(numbers: Any, scales: Any) -> Any:
    """Return numbers / scales; the numbers themselves if the scale is 0."""
    return numbers / array_module(numbers).where(scales == 0, np.float32(1), scales)
