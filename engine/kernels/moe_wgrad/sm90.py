"""moe_wgrad on Hopper (`cuda_src/moe_wgrad/moe_wgrad_sm90.cu`)."""

from __future__ import annotations

from engine.dtypes import dtype_name
from engine.kernels._chip import HOPPER_DTYPES, is_hopper, sm_count
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._tensor_map import tensor_map, tensor_map_2d
from engine.kernels.moe_wgrad.operands import WgradOperands

__all__ = ["is_supported", "launch", "specs"]

_KERNEL = Kernel(
    "moe_wgrad_sm90",
    "map_sorted:tmap map_out:tmap dy:ptr x:ptr order:ptr offsets:ptr num_experts:i32 "
    "num_pairs:i32 num_rows:i32 k:i32 top_k:i32",
    struct="MoeWgradSm90Params",
)
_TILE = (128, 256)  # columns of the gathered and of the sorted operand per work tile
_CLUSTER = 2  # CTAs with neighbouring tiles of the gathered operand
_STAGES = 4
_SLAB_ROWS = 64  # rows of the sum per stage
_CHUNK = 64  # columns per TMA box: 128 bytes, the widest swizzle
_WARPGROUPS = 2  # consumers
_THREADS = 384
_STAGE_BYTES = _SLAB_ROWS * 2 * sum(_TILE)
_STAGING_BYTES = _WARPGROUPS * 2 * 64 * 2 * _CHUNK
_SHARED_BYTES = _STAGES * (_STAGE_BYTES + 16) + _STAGING_BYTES + 1024  # alignment


def specs(dtype: str) -> tuple[ModuleSpec, ...]:
    """Return the modules that `launch` may launch for `dtype`."""
    return tuple(_spec(dtype, gather) for gather in ("x", "dy")) if dtype in HOPPER_DTYPES else ()


def _spec(dtype: str, gather: str) -> ModuleSpec:
    macros = {
        "GATHERS_X": int(gather == "x"),
        "THREADS": _THREADS,
        "SHARED_BYTES": _SHARED_BYTES,
    }
    return ModuleSpec("moe_wgrad/moe_wgrad_sm90.cu", dtype, tuple(macros.items()))


def is_supported(operands: WgradOperands) -> bool:
    """Tell whether the kernel supports the current device and these operands."""
    arrays = (operands.dy, operands.x, operands.out)
    if not is_hopper(dtype_name(operands.out.dtype)) or any(a.size == 0 for a in arrays):
        return False
    return all(n % 16 == 0 for a in arrays for n in (a.shape[-1] * a.itemsize, int(a.data.ptr)))


def launch(operands: WgradOperands) -> None:
    """Launch on CuPy arrays."""
    out = operands.out
    num_experts, num_rows, k = out.shape
    dtype = dtype_name(out.dtype)
    step = out.itemsize
    map_out = tensor_map(
        out.data.ptr,
        dtype,
        (k, num_rows, num_experts),
        (k * step, num_rows * k * step),
        (_CHUNK, 64 if operands.gather == "x" else 16, 1),  # results of a warpgroup, or of a warp
    )
    ordered = operands.dy if operands.gather == "x" else operands.x
    widths = (k, num_rows) if operands.gather == "x" else (num_rows, k)
    clusters = (
        num_experts * ceil_div(widths[0], _CLUSTER * _TILE[0]) * ceil_div(widths[1], _TILE[1])
    )
    _KERNEL.launch(
        _spec(dtype, operands.gather),
        (min(sm_count() // _CLUSTER, clusters) * _CLUSTER,),
        (_THREADS,),
        _SHARED_BYTES,
        pdl=True,  # the kernel waits before it accesses memory that others write
        map_sorted=tensor_map_2d(ordered, dtype, (_SLAB_ROWS, _CHUNK)),
        map_out=map_out,
        num_experts=num_experts,
        **operands.arguments(),
    )
