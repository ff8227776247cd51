"""Pages of 8 bits: which codes pages may hold, and the check of their scales."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import PAGE_CODES
from engine.kernels._contract import FLOAT32, FLOATS, Contract
from engine.kernels._module import ModuleSpec

__all__ = ["ANY_PAGES", "checked_scales", "code_macros", "codes_of", "copy_spec", "page_dtypes"]

_NAMES = {codes.dtype: name for name, codes in PAGE_CODES.items()}

ANY_PAGES: tuple[np.dtype[Any], ...] = (*FLOATS, *_NAMES)
"""Dtypes of pages."""


def codes_of(dtype: np.dtype[Any]) -> str:
    """Return which codes pages of `dtype` hold, a name of PAGE_CODES; "": none.

    Examples
    --------
    >>> codes_of(np.dtype(np.uint8)), codes_of(np.dtype(np.int8)), codes_of(np.dtype(np.float16))
    ('fp8', 'int8', '')
    """
    return _NAMES.get(dtype, "")


def page_dtypes(dtype: np.dtype[Any]) -> tuple[np.dtype[Any], ...]:
    """Return the dtypes that pages of keys and values of `dtype` may have."""
    return (dtype, *_NAMES)


def code_macros(page_codes: str) -> dict[str, int]:
    """Return the macros of a module for pages of these codes; none for "".

    Examples
    --------
    >>> code_macros("int8"), code_macros("")
    ({'PAGE_CODES': 2}, {})
    """
    return {"PAGE_CODES": PAGE_CODES[page_codes].macro} if page_codes else {}


def copy_spec(file: str, dtype: str, page_codes: str) -> ModuleSpec:
    """Return the module that copies pages of `dtype`, or of codes: bytes, whatever they are."""
    if page_codes:
        return ModuleSpec(file, "float16", (("PAGE_CODES", 1),))
    return ModuleSpec(file, dtype)


def checked_scales(call: Contract, pages: Any, k_scale: Any, v_scale: Any) -> dict[str, Any]:
    """Check the scales (K,) of `pages`, after the sizes are bound; return both by name.

    Pages of codes need them, other pages have none. Values are checked on NumPy arrays.
    """
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    for name, scale in scales.items():
        if not codes_of(pages.dtype):
            call.check(name, scale is None, f"None with pages of {pages.dtype}", scale)
            continue
        wanted = f"an array (K,) with pages of {pages.dtype} codes"
        call.check(name, scale is not None, wanted, None)
        scales[name] = call.array(name, scale, "K", FLOAT32)
        if call.on_cpu:
            is_usable = np.isfinite(scales[name]) & (scales[name] > 0)
            wanted = "positive and finite"
            call.check(name, bool(is_usable.all()), wanted, scales[name].tolist())
    return scales
