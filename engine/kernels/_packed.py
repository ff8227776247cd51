"""Shared code of the ops on packed weights: modules by format, checks, kernel arguments."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import BFLOAT16, dtype_name
from engine.errors import DTypeError, ShapeError
from engine.kernels._contract import INT32, Contract
from engine.kernels._launch import round_up
from engine.kernels._module import ModuleSpec
from engine.weights import FORMATS, Format, Weight
from engine.weights.formats import TILE_COLUMNS, TILE_ROWS

__all__ = ["SAMPLE", "check_planes", "check_weight", "format_spec", "format_specs", "planes"]
__all__ += ["scale_dtype", "stage_tiles", "weight_stage_bytes"]

_OFFSETS = ("", "zero", "min")
_SCALE_TYPES = {"float16": 0, "bfloat16": 1}
_E8M0 = 2
_BYTES = 3

SAMPLE = ("int4_g128", "int4_g32_zp", "int8_g64", "mxfp4", "q4_k", "q5_1", "q6_k")
"""Packed formats that together use every decoder: those that tests compile."""


def format_spec(file: str, dtype: str, form: Format, scales: str = "float16") -> ModuleSpec:
    """Return the module of a file in `cuda_src/gemm_wna16` for weights of a packed format.

    `scales` is the dtype of the scales, for formats with floating-point scales.
    """
    kind = _BYTES if form.super_block else _E8M0 if form.code == "e2m1" else _SCALE_TYPES[scales]
    macros = {
        "BITS": form.bits,
        "E2M1": int(form.code == "e2m1"),
        "ZERO": form.zero,
        "GROUP": form.group,
        "SUPER_BLOCK": form.super_block,
        "OFFSET": _OFFSETS.index(form.offset),
        "SCALE_TYPE": kind,
    }
    return ModuleSpec(f"gemm_wna16/{file}", dtype, tuple(macros.items()))


def format_specs(file: str, dtype: str, formats: tuple[str, ...] = ()) -> tuple[ModuleSpec, ...]:
    """Return the modules for the packed formats in `formats`, one per dtype of scales.

    GGUF formats have float16 scales only; checkpoint formats and `quantize` also use bfloat16.
    """
    specs = []
    for form in (FORMATS[name] for name in formats if FORMATS[name].is_packed):
        has_floats = form.code != "e2m1" and not form.name.startswith("q")
        for scales in ("float16", "bfloat16") if has_floats else ("float16",):
            specs.append(format_spec(file, dtype, form, scales))
    return tuple(dict.fromkeys(specs))


def stage_tiles(form: Format) -> int:
    """Return the number of 64-column tiles per stage (see common/weight_stage.cuh)."""
    return 2 if form.bits == 8 else 4


def weight_stage_bytes(form: Format) -> int:
    """Return the bytes per stage: codes, scales and super-scales, in whole lines of 128."""
    columns = stage_tiles(form) * TILE_COLUMNS
    codes = TILE_ROWS * columns * form.bits // 8
    size = 1 if form.super_block or form.code == "e2m1" else 2
    last = 2 if form.offset else 1
    scales = columns // form.group * TILE_ROWS * size * last
    supers = TILE_ROWS * 2 * last if form.super_block else 0
    return round_up(codes + scales + supers, 128)


def check_weight(call: Contract, weight: Any, *, is_packed: bool = True) -> Weight:
    """Check a quantized weight, packed unless `is_packed` is False, and bind N and K.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If it is not a `Weight`, or an array does not match its format.
    """
    if not isinstance(weight, Weight):
        raise DTypeError(f"{call.op}: weight: must be a Weight; got {type(weight).__name__}")
    form = weight.format
    ok = weight.format.is_packed or not (is_packed or weight.format.is_dense)
    wanted = "a packed format" if is_packed else "a format that is not dense"
    call.check("weight", ok and len(weight.shape) == 2, f"a matrix in {wanted}", form.name)
    n, k = weight.shape
    for symbol, size in (("N", n), ("K", k)):
        if call.bind(symbol, size, "weight") != size:
            raise ShapeError(
                f"{call.op}: weight: must have shape (N, K) with {symbol} = {call[symbol]}; "
                f"got {weight.shape}"
            )
    if weight.panels is not None:
        call.array("weight.panels.codes", weight.panels.codes, "* 64", np.dtype(np.int8))
    elif form.is_packed:
        check_planes(call, weight, -(-n // TILE_ROWS), -(-k // TILE_COLUMNS))
    else:
        code = np.dtype(np.int8 if form.code == "int" else np.uint8)
        assert form.block is not None
        groups = (-(-n // form.block[0]), *([-(-k // form.block[1])] if form.block[1] else []))
        call.array("weight.data", weight.data, f"{n} {k}", code)
        call.array("weight.scales", weight.scales, _text(groups), np.dtype(np.float32))
    return weight


def check_planes(call: Contract, weight: Weight, high: int, wide: int) -> None:
    """Check the arrays of a packed weight of `high` x `wide` tiles."""
    form = weight.format
    columns = wide * TILE_COLUMNS
    last = (2,) if form.offset else ()
    data = 1024 if form.bits == 8 else 512
    groups = -(-columns // form.group)
    scales = _scale_dtypes(form)
    code = np.dtype(np.uint8)
    call.array("weight.data", weight.data, f"{high} {wide} {data}", code)
    call.array("weight.scales", weight.scales, _text((high, groups, 8, 2, *last)), scales)
    if form.bits in (5, 6):
        size = {5: 128, 6: 256}[form.bits]
        call.array("weight.high", weight.high, f"{high} {wide} {size}", code)
    if form.super_block:
        supers = -(-weight.shape[-1] // form.super_block)
        shape = _text((high, supers, 8, 2, *last))
        call.array("weight.super_scales", weight.super_scales, shape, np.dtype(np.float16))
    if weight.permutation is not None:
        call.array("weight.permutation", weight.permutation, f"{weight.shape[-1]}", INT32)


def _scale_dtypes(form: Format) -> tuple[np.dtype[Any], ...]:
    if form.super_block:
        return (np.dtype(np.uint8 if form.offset else np.int8),)
    if form.code == "e2m1":
        return (np.dtype(np.uint8),)
    return (np.dtype(np.float16), BFLOAT16)


def _text(shape: tuple[int, ...]) -> str:
    return " ".join(map(str, shape))


def planes(weight: Weight) -> dict[str, Any]:
    """Return the kernel arguments of a packed weight: its planes and their sizes."""
    supers = weight.super_scales
    return {
        "data": weight.data,
        "high": weight.high,
        "scales": weight.scales,
        "supers": supers,
        "groups": weight.scales.shape[1],
        "num_supers": 0 if supers is None else supers.shape[1],
    }


def scale_dtype(weight: Weight) -> str:
    """Return the `scales` argument of `format_spec` for a weight."""
    return dtype_name(weight.scales.dtype) if weight.scales.dtype.itemsize == 2 else "float16"
