"""What the kernels of quantized experts share: the module of a format, where its arrays are."""

from __future__ import annotations

from typing import Any

from engine.kernels._module import ModuleSpec
from engine.kernels._packed import format_spec, format_specs, planes, scale_dtype
from engine.quantization import Format, Weight

__all__ = ["base_of", "bases", "kind", "weight_arrays"]

_PACKED, _BYTES = 1, 2  # WEIGHTS of the CUDA files


def kind(form: Format) -> int:
    """Return WEIGHTS of a module for weights of a format."""
    return _PACKED if form.is_packed else _BYTES


def bases(dtype: str, form: Format) -> tuple[ModuleSpec, ...]:
    """Return modules whose macros say how the codes are read: one for each dtype of scales."""
    if form.is_packed:
        return format_specs("", dtype, (form.name,))
    assert form.block is not None
    macros = {
        "IS_E4M3": int(form.code == "e4m3"),
        "BLOCK_ROWS": form.block[0],
        "BLOCK_COLUMNS": form.block[1],
    }
    return (ModuleSpec("", dtype, tuple(macros.items())),)


def base_of(weight: Weight, dtype: str) -> ModuleSpec:
    """Return the one of `bases` for a weight."""
    form = weight.format
    if form.is_packed:
        return format_spec("", dtype, form, scale_dtype(weight))
    return bases(dtype, form)[0]


def weight_arrays(weight: Weight) -> dict[str, Any]:
    """Return the kernel arguments that say where a weight is."""
    if weight.format.is_packed:
        return planes(weight)
    return {
        "data": weight.data,
        "high": None,
        "scales": weight.scales,
        "supers": None,
        "groups": 0,
        "num_supers": 0,
    }
