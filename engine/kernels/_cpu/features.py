"""Instruction sets of this machine's CPU, as NumPy has found them."""

from __future__ import annotations

import importlib
from functools import cache

__all__ = ["cpu_features"]


@cache
def cpu_features() -> frozenset[str]:
    """Return the instruction sets by NumPy's names, such as "AVX512_SKX"."""
    core = importlib.import_module("numpy._core._multiarray_umath")  # as numpy.show_runtime does
    features: dict[str, bool] = getattr(core, "__cpu_features__", {})
    return frozenset(name for name, is_there in features.items() if is_there)
