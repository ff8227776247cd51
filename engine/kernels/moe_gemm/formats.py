"""What kernels of experts in several formats share: modules, and where the arrays are."""

from __future__ import annotations

from typing import Any

from engine.dtypes import dtype_name
from engine.kernels._module import ModuleSpec
from engine.kernels._packed import format_spec, format_specs, planes, scale_dtype
from engine.quantization import Format, Weight
from engine.quantization.formats import dense_format

__all__ = ["base_of", "bases", "format_of", "kind", "weight_arrays"]

_DENSE, _PACKED, _BYTES = 0, 1, 2  # WEIGHTS of the CUDA files


def kind(form: Format) -> int:
    """Return WEIGHTS of a module for weights of a format."""
    return _DENSE if form.is_dense else _PACKED if form.is_packed else _BYTES


def bases(dtype: str, form: Format) -> tuple[ModuleSpec, ...]:
    """Return modules whose macros say how the codes are read: one for each dtype of scales."""
    if form.is_packed:
        return format_specs("", dtype, (form.name,))
    if form.block is None:
        return (ModuleSpec("", dtype),)
    macros = {
        "IS_E4M3": int(form.code == "e4m3"),
        "BLOCK_ROWS": form.block[0],
        "BLOCK_COLUMNS": form.block[1],
    }
    return (ModuleSpec("", dtype, tuple(macros.items())),)


def format_of(weight: Any) -> Format:
    """Return the format of a weight, which may be an array."""
    return weight.format if isinstance(weight, Weight) else dense_format(dtype_name(weight.dtype))


def base_of(weight: Any, dtype: str) -> ModuleSpec:
    """Return the one of `bases` for a weight."""
    form = format_of(weight)
    if form.is_packed:
        return format_spec("", dtype, form, scale_dtype(weight))
    return bases(dtype, form)[0]


def weight_arrays(weight: Any) -> dict[str, Any]:
    """Return the kernel arguments that say where a weight is."""
    is_array = not isinstance(weight, Weight)
    if not is_array and weight.format.is_packed:
        return planes(weight)
    return {
        "data": weight if is_array else weight.data,
        "high": None,
        "scales": None if is_array else weight.scales,
        "supers": None,
        "groups": 0,
        "num_supers": 0,
    }
