"""Quantized KV caches: dtypes and macros of the pages, and the check of their scales."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import KV_CODE_DTYPES
from engine.kernels._contract import FLOAT32, FLOATS, Contract
from engine.kernels._module import ModuleSpec

__all__ = ["KV_DTYPES", "checked_scales", "copy_spec", "kv_dtype_of", "kv_macros", "page_dtypes"]

_NAMES = {codes.dtype: name for name, codes in KV_CODE_DTYPES.items()}

KV_DTYPES: tuple[np.dtype[Any], ...] = (*FLOATS, *_NAMES)
"""Dtypes that KV pages may have, quantized or not."""


def kv_dtype_of(dtype: np.dtype[Any]) -> str:
    """Return the name in KV_CODE_DTYPES for pages of `dtype`, or "" if they are not quantized.

    Examples
    --------
    >>> [kv_dtype_of(np.dtype(dtype)) for dtype in (np.uint8, np.int8, np.float16)]
    ['fp8', 'int8', '']
    """
    return _NAMES.get(dtype, "")


def page_dtypes(dtype: np.dtype[Any]) -> tuple[np.dtype[Any], ...]:
    """Return the page dtypes allowed for new keys and values of `dtype`."""
    return (dtype, *_NAMES)


def kv_macros(kv_dtype: str) -> dict[str, int]:
    """Return the macros that a module needs for pages of `kv_dtype`; none for "".

    Examples
    --------
    >>> kv_macros("int8"), kv_macros("")
    ({'PAGE_CODES': 2}, {})
    """
    return {"PAGE_CODES": KV_CODE_DTYPES[kv_dtype].macro} if kv_dtype else {}


def copy_spec(file: str, dtype: str, kv_dtype: str) -> ModuleSpec:
    """Return the module that copies pages of `dtype`, or quantized pages of any `kv_dtype`."""
    if kv_dtype:
        return ModuleSpec(file, "float16", (("PAGE_CODES", 1),))
    return ModuleSpec(file, dtype)


def checked_scales(call: Contract, pages: Any, k_scale: Any, v_scale: Any) -> dict[str, Any]:
    """Check the scales (K,) of `pages` once the sizes are bound; return both by name.

    They are required for quantized pages and must be None for others. Their values are checked
    on NumPy arrays only.
    """
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    is_quantized = bool(kv_dtype_of(pages.dtype))
    for name, scale in scales.items():
        if not is_quantized:
            if scale is not None:
                call.check(name, False, f"None with pages of {pages.dtype}", scale)
            continue
        wanted = f"an array (K,) with pages of {pages.dtype} codes"
        call.check(name, scale is not None, wanted, None)
        scales[name] = call.array(name, scale, "K", FLOAT32)
        if call.on_cpu:
            is_usable = np.isfinite(scales[name]) & (scales[name] > 0)
            wanted = "positive and finite"
            call.check(name, bool(is_usable.all()), wanted, scales[name].tolist())
    return scales
