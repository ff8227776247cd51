"""moe_gemm on any GPU from sm_80 on (`cuda_src/moe_gemm/moe_gemm.cu`)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.dtypes import dtype_name
from engine.kernels._elementwise import is_aligned, vector_width
from engine.kernels._launch import Kernel, ceil_div, round_up
from engine.kernels._module import ModuleSpec
from engine.kernels.moe_gemm.operands import MoeOperands

__all__ = ["TileConfig", "choose_config", "launch", "specs", "tile_configs"]

_PARAMS = (
    "x:ptr weight:ptr order:ptr offsets:ptr pair_weights:ptr bias:ptr out:ptr num_pairs:i32 "
    "num_experts:i32 num_rows:i32 k:i32 top_k:i32 activation:i32 alpha:f32 limit:f32 "
    "scatters:i32 is_vector:i32"
)
_NAMES = ("tile_32x128", "tile_64x64", "tile_128x128", "unaligned_64x64")
_KERNELS = {name: Kernel(f"moe_gemm_{name}", _PARAMS, struct="MoeGemmParams") for name in _NAMES}
_ROW_BYTES = 64  # kTileRowBytes in CUDA
_MANY_FROM = 64  # minimum average pairs per expert for the larger tile


@dataclass(frozen=True)
class TileConfig:
    """Entry point and its tile.

    Attributes
    ----------
    kernel : str
        Entry point, without "moe_gemm_".
    tile_m, tile_n : int
        Rows of x and of the weight per block.
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

    def grid(self, num_pairs: int, num_experts: int, num_rows: int) -> tuple[int, int]:
        """Return the blocks along the pairs (an upper bound on tiles) and along the weight rows.

        Examples
        --------
        >>> TileConfig("tile_32x128", 32, 128, 128, 6).grid(64, 128, 1536)
        (64, 12)
        """
        row_tiles = min(num_pairs, num_pairs // self.tile_m + num_experts)
        return row_tiles, ceil_div(num_rows, self.tile_n)


_MMA = (
    TileConfig("tile_32x128", 32, 128, 128, 6),
    TileConfig("tile_128x128", 128, 128, 128, 4),
    TileConfig("unaligned_64x64", 64, 64, 128, 3),
)
_SIMT = (
    TileConfig("tile_64x64", 64, 64, 256, 4),
    TileConfig("tile_128x128", 128, 128, 256, 4),
    TileConfig("unaligned_64x64", 64, 64, 256, 3),
)


def tile_configs(dtype: str) -> tuple[TileConfig, ...]:
    """Return the tiles for few tokens per expert, for many, and for unaligned rows."""
    return _SIMT if dtype == "float32" else _MMA


def specs(dtype: str, *, transposed: bool = False) -> tuple[ModuleSpec, ...]:
    """Return the modules that `launch` may launch for `dtype`."""
    return (ModuleSpec("moe_gemm/moe_gemm.cu", dtype, (("TRANSPOSED", int(transposed)),)),)


def choose_config(
    num_pairs: int, num_experts: int, dtype: str, *, is_aligned: bool = True
) -> TileConfig:
    """Choose the tile for `num_pairs` pairs (token, expert).

    Examples
    --------
    >>> [choose_config(p, 128, "bfloat16").kernel for p in (8, 32768)]
    ['tile_32x128', 'tile_128x128']
    """
    few, many, unaligned = tile_configs(dtype)
    if not is_aligned:
        return unaligned
    return many if num_pairs >= _MANY_FROM * num_experts else few


def launch(operands: MoeOperands) -> None:
    """Launch on CuPy arrays."""
    x = operands.x
    weight = operands.weight
    out = operands.out
    (num_experts, num_rows, k) = operands.matrices
    dtype = dtype_name(x.dtype)
    pairs, columns = out.shape
    # Rows of x and, transposed or not, of the weight are whole vectors.
    fits = all(n % vector_width(x) == 0 for n in (k, weight.shape[2])) and is_aligned(x, weight)
    config = choose_config(operands.expected_pairs, num_experts, dtype, is_aligned=fits)
    # A gated tile has equal numbers of gate and up rows; in the last tile both may be incomplete.
    product_columns = num_rows if operands.activation is None else 2 * round_up(columns, 8)
    _KERNELS[config.kernel].launch(
        specs(dtype, transposed=operands.transposed)[0],
        config.grid(pairs, num_experts, product_columns),
        (config.threads,),
        config.shared_bytes,
        pdl=True,  # the kernel waits before it accesses memory that others write
        x=x,
        weight=weight,
        num_pairs=pairs,
        scatters=operands.scatter,
        is_vector=columns % 4 == 0 and out.data.ptr % (4 * out.itemsize) == 0,
        **operands.arguments(),
    )
