"""NumPy mirror of `engine.kernels.swiglu_quantize`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference.quantize_rows import quantize_rows
from engine.reference.swiglu import swiglu

__all__ = ["swiglu_quantize"]

Array = np.ndarray[Any, Any]


def swiglu_quantize(x: Array, *, dtype: str = "fp8", group: int = 0) -> tuple[Array, Array]:
    """quantize_rows(swiglu(x)); silu(gate) * up is rounded to x's dtype in between."""
    return quantize_rows(swiglu(x), dtype=dtype, group=group)
