"""Shared code of the kernels for quantized experts: modules by format, kernel arguments."""

from __future__ import annotations

from typing import Any

from engine.kernels._module import ModuleSpec
from engine.kernels._packed import format_spec, format_specs, planes, scale_dtype
from engine.kernels._tensor_map import tensor_map
from engine.weights import Format, Weight
from engine.weights.formats import TILE_COLUMNS

__all__ = ["MAPS", "base_of", "bases", "kind", "plane_maps", "weight_arrays"]

# Values of the macro WEIGHT_KIND.
_PACKED = 1
_BYTES = 2
MAPS = ("map_data", "map_high", "map_scales", "map_supers")
"""Names of the kernels' maps of a packed weight's planes."""

_BOX_TILES = 4  # row tiles per TMA box: 64 rows
_DATA_ROW = 256  # bytes per row of map_data: the maximum extent of a TMA box


def kind(form: Format) -> int:
    """Return the value of WEIGHT_KIND for weights of a format."""
    return _PACKED if form.is_packed else _BYTES


def bases(dtype: str, form: Format) -> tuple[ModuleSpec, ...]:
    """Return one spec with the decoder's macros per dtype of scales."""
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
    """Return the spec of `bases` that matches a weight."""
    form = weight.format
    if form.is_packed:
        return format_spec("", dtype, form, scale_dtype(weight))
    return bases(dtype, form)[0]


def weight_arrays(weight: Weight) -> dict[str, Any]:
    """Return the kernel arguments of a weight: its arrays and their sizes."""
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


def plane_maps(weight: Weight, depth: int) -> dict[str, Any]:
    """Return the tensor maps of a packed weight's planes; a box spans `depth` tiles of k."""
    form = weight.format
    tile = 1024 if form.bits == 8 else 512
    groups = max(1, depth * TILE_COLUMNS // form.group)
    boxes = (_DATA_ROW, depth * tile // _DATA_ROW), (0, depth), (0, groups), (0, 1)
    planes = weight.data, weight.high, weight.scales, weight.super_scales
    maps: dict[str, Any] = {}
    for name, array, (row, rows) in zip(MAPS, planes, boxes, strict=True):
        if array is None:
            maps[name] = maps["map_data"]
            continue
        tile_bytes = int(array.nbytes) // array.shape[0]
        row = row or tile_bytes // array.shape[1]
        sizes = (row, tile_bytes // row, array.shape[0])
        strides = (row, tile_bytes)
        box = (row, rows, _BOX_TILES)
        pointer = int(array.data.ptr)
        maps[name] = tensor_map(pointer, "uint8", sizes, strides, box, promote=128, swizzle=0)
    return maps
