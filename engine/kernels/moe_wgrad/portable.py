"""moe_wgrad on any GPU from sm_80 on (`cuda_src/moe_wgrad/moe_wgrad.cu`)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.dtypes import dtype_name
from engine.kernels._elementwise import is_aligned, vector_width
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels.moe_wgrad.operands import WgradOperands

__all__ = ["WgradTile", "launch", "specs", "tiles"]

_PARAMS = (
    "dy:ptr x:ptr order:ptr offsets:ptr out:ptr num_pairs:i32 num_rows:i32 k:i32 top_k:i32 "
    "gathers_x:i32 is_vector:i32"
)
_NAMES = ("tile_128x128", "unaligned_64x64")
_KERNELS = {name: Kernel(f"moe_wgrad_{name}", _PARAMS, struct="MoeWgradParams") for name in _NAMES}
_ROW_BYTES = 64  # kTileRowBytes in CUDA


@dataclass(frozen=True)
class WgradTile:
    """Entry point and its tile.

    Attributes
    ----------
    kernel : str
        Entry point, without "moe_wgrad_".
    tile_m, tile_n : int
        Rows and columns of an expert's matrix per block.
    threads, stages : int
        Threads per block, and pipeline stages in its shared memory.
    """

    kernel: str
    tile_m: int
    tile_n: int
    threads: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        """Return the dynamic shared memory per block, in bytes."""
        return self.stages * (self.tile_m + self.tile_n) * _ROW_BYTES


_MMA = (
    WgradTile("tile_128x128", 128, 128, 128, 4),
    WgradTile("unaligned_64x64", 64, 64, 128, 3),
)
_SIMT = (
    WgradTile("tile_128x128", 128, 128, 256, 4),
    WgradTile("unaligned_64x64", 64, 64, 256, 3),
)


def tiles(dtype: str) -> tuple[WgradTile, ...]:
    """Return the tiles for aligned and for unaligned rows."""
    return _SIMT if dtype == "float32" else _MMA


def specs(dtype: str) -> tuple[ModuleSpec, ...]:
    """Return the modules that `launch` may launch for `dtype`."""
    return (ModuleSpec("moe_wgrad/moe_wgrad.cu", dtype),)


def launch(operands: WgradOperands) -> None:
    """Launch on CuPy arrays."""
    out = operands.out
    num_experts, num_rows, k = out.shape
    dtype = dtype_name(out.dtype)
    rows = (operands.dy, operands.x)
    fits = is_aligned(*rows) and all(n % vector_width(out) == 0 for n in (num_rows, k))
    tile = tiles(dtype)[0 if fits else 1]
    _KERNELS[tile.kernel].launch(
        specs(dtype)[0],
        (ceil_div(num_rows, tile.tile_m) * ceil_div(k, tile.tile_n), num_experts),
        (tile.threads,),
        tile.shared_bytes,
        pdl=True,  # the kernel waits before it accesses memory that others write
        out=out,
        gathers_x=operands.gather == "x",
        is_vector=k % 4 == 0 and out.data.ptr % (4 * out.itemsize) == 0,
        **operands.arguments(),
    )
