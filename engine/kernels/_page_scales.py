"""Pages of 8 bits: which dtypes pages may have, and the check of their scales."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.kernels._contract import FLOAT32, Contract
from engine.kernels._module import ModuleSpec

__all__ = ["CODES", "checked_scales", "copy_spec", "page_dtypes"]

CODES: np.dtype[Any] = np.dtype(np.uint8)
"""Dtype of pages that hold e4m3 codes, on both array modules: CuPy has no fp8 dtype."""


def page_dtypes(dtype: np.dtype[Any]) -> tuple[np.dtype[Any], ...]:
    """Return the dtypes that pages of keys and values of `dtype` may have."""
    return (dtype, CODES)


def copy_spec(file: str, dtype: str) -> ModuleSpec:
    """Return the module that copies pages of `dtype`, which may be "uint8"."""
    if dtype == str(CODES):
        return ModuleSpec(file, "float16", (("PAGE_CODES", 1),))
    return ModuleSpec(file, dtype)


def checked_scales(call: Contract, pages: Any, k_scale: Any, v_scale: Any) -> dict[str, Any]:
    """Check the scales (K,) of `pages`, after the sizes are bound; return both by name.

    Pages of codes need them, other pages have none. Values are checked on NumPy arrays.
    """
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    for name, scale in scales.items():
        if pages.dtype != CODES:
            call.check(name, scale is None, f"None with pages of {pages.dtype}", scale)
            continue
        call.check(name, scale is not None, "an array (K,) with pages of uint8 codes", None)
        scales[name] = call.array(name, scale, "K", FLOAT32)
        if call.on_cpu:
            is_usable = np.isfinite(scales[name]) & (scales[name] > 0)
            wanted = "positive and finite"
            call.check(name, bool(is_usable.all()), wanted, scales[name].tolist())
    return scales
