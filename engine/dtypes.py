"""The engine's dtypes, by name, for both array modules.

bfloat16 is `ml_dtypes.bfloat16` everywhere: NumPy and CuPy (>= 14) accept it as an array dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from engine.checks import shown
from engine.errors import DTypeError

__all__ = [
    "BFLOAT16",
    "FLOAT_NAMES",
    "KV_CODE_DTYPES",
    "KVCodeDtype",
    "accumulation_dtype",
    "dtype_name",
    "itemsize",
    "np_dtype",
    "page_dtype",
]

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)

_BY_NAME: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": BFLOAT16,
}


@dataclass(frozen=True)
class KVCodeDtype:
    """One-byte dtype of a quantized KV cache: value = code * scale, with one scale per head.

    Attributes
    ----------
    name : str
        Name as a `kv_cache_dtype`.
    dtype : np.dtype
        Array dtype, by which kernels and mirrors recognise the codes (CuPy has no fp8).
    largest : float
        Largest magnitude a code can represent; larger values saturate.
    poison : int
        Code that no finite value is stored as; fills blocks that must not be read.
    macro : int
        Value of the CUDA macro PAGE_CODES.
    """

    name: str
    dtype: np.dtype[Any]
    largest: float
    poison: int
    macro: int


KV_CODE_DTYPES: dict[str, KVCodeDtype] = {
    codes.name: codes
    for codes in (
        KVCodeDtype("fp8", np.dtype(np.uint8), largest=448.0, poison=0x7F, macro=1),  # e4m3; NaN
        KVCodeDtype("int8", np.dtype(np.int8), largest=127.0, poison=-128, macro=2),
    )
}
"""Dtypes of a quantized KV cache, by name."""

FLOAT_NAMES: tuple[str, ...] = tuple(_BY_NAME)


def np_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype called `name`: "float32", "float16" or "bfloat16".

    Raises
    ------
    DTypeError
        If `name` is none of these.

    Examples
    --------
    >>> np_dtype("bfloat16").itemsize
    2
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        known = ", ".join(FLOAT_NAMES)
        raise DTypeError(f"dtype must be one of {known}; got {shown(name)}") from None


def page_dtype(name: str) -> np.dtype[Any]:
    """Return the array dtype of a KV cache of dtype `name` (a float or one of KV_CODE_DTYPES).

    Examples
    --------
    >>> page_dtype("fp8")
    dtype('uint8')
    """
    return KV_CODE_DTYPES[name].dtype if name in KV_CODE_DTYPES else np_dtype(name)


def dtype_name(dtype: Any) -> str:
    """Return the engine's name for `dtype` (one of its float dtypes).

    Examples
    --------
    >>> dtype_name(np.float16)
    'float16'
    """
    wanted = np.dtype(dtype)
    for name, known in _BY_NAME.items():
        if known == wanted:
            return name
    raise DTypeError(f"dtype must be one of {', '.join(FLOAT_NAMES)}; got {wanted}")


def accumulation_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the dtype in which a mirror computes: float32, or float64 for float64 arrays.

    Examples
    --------
    >>> accumulation_dtype(np.float16), accumulation_dtype(np.float64)
    (dtype('float32'), dtype('float64'))
    """
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def itemsize(name: str) -> int:
    """Return the size of an element of dtype `name`, in bytes."""
    return np_dtype(name).itemsize
