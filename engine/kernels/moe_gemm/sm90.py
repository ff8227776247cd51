"""moe_gemm of dense weights on Hopper (`cuda_src/moe_gemm/moe_gemm_sm90.cu`)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.dtypes import dtype_name
from engine.kernels._chip import HOPPER, HOPPER_DTYPES, is_hopper, sm_count
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._tensor_map import tensor_map, tensor_map_2d
from engine.kernels.moe_gemm.operands import MoeOperands
from engine.kernels.moe_route import MAX_EXPERTS

__all__ = ["MOE_CONFIGS", "MoeTileConfig", "choose_config", "is_supported", "launch", "specs"]

_KERNEL = Kernel(
    "moe_gemm_sm90",
    "map_w:tmap map_x:tmap x:ptr order:ptr offsets:ptr pair_weights:ptr bias:ptr out:ptr "
    "num_experts:i32 num_rows:i32 k:i32 top_k:i32 activation:i32 alpha:f32 limit:f32 "
    "scatters:i32 is_early:i32",
    struct="MoeGemmSm90Params",
)
_SLAB_K = 64  # values of k per 128 bytes, the widest swizzle
_MMA_ROWS = 64
_SWIZZLE_ROWS = 8  # rows after which the swizzle repeats
_STAGING_TOKENS = 64
_RECORDS = 2  # tile records: the producer runs at most this many tiles ahead
_FILE = "moe_gemm/moe_gemm_sm90.cu"


@dataclass(frozen=True)
class MoeTileConfig:
    """Tile of one module of moe_gemm_sm90.cu; CUDA checks the sizes derived from it.

    Attributes
    ----------
    warpgroups : int
        Consumer warpgroups; each multiplies `mma_tiles` m-tiles of 64 weight rows.
    tokens : int
        Maximum tokens of one expert per tile.
    depth : int
        Slabs per stage; a slab is 64 values of k.
    mma_tiles : int
        2, or 1 for packed weights. In gated products two m-tiles are gate and up; a single one
        holds both, 8 rows of each alternately.
    blocks : int
        CTAs per multiprocessor.
    """

    warpgroups: int
    tokens: int
    depth: int
    mma_tiles: int = 2
    blocks: int = 1

    @property
    def threads(self) -> int:
        """Return the threads per CTA."""
        return self.warpgroups * 128 + 128

    @property
    def box_rows(self) -> int:
        """Return the sorted rows of x per TMA box: at most four boxes, which are slow to issue.

        Examples
        --------
        >>> [MoeTileConfig(2, tokens, 1).box_rows for tokens in (16, 80, 144, 256)]
        [16, 40, 48, 64]
        """
        sizes = range(16, self.tokens + 1, _SWIZZLE_ROWS)
        return next(size for size in sizes if self.tokens % size == 0 and self.tokens <= 4 * size)

    @property
    def rows(self) -> int:
        """Return the weight rows per tile."""
        return self.warpgroups * self.mma_tiles * _MMA_ROWS

    def stages(self, weight_bytes: int | None = None, scale_bytes: int = 0) -> int:
        """Return the number of stages that fit, each with these bytes of weight and of scales."""
        free = HOPPER.shared_per_block(self.blocks) - self._beside_stages - 1024
        return free // (self._stage_bytes(weight_bytes) + 32 + scale_bytes)

    def shared_bytes(self, weight_bytes: int | None = None, scale_bytes: int = 0) -> int:
        """Return the bytes of dynamic shared memory: `MoeShared` and its alignment."""
        stage = self._stage_bytes(weight_bytes) + 32 + scale_bytes
        return self.stages(weight_bytes, scale_bytes) * stage + self._beside_stages + 1024

    def _stage_bytes(self, weight_bytes: int | None) -> int:
        row = self.depth * _SLAB_K * 2
        return (self.rows * row if weight_bytes is None else weight_bytes) + self.tokens * row

    @property
    def _beside_stages(self) -> int:
        staging = self.warpgroups * min(self.tokens, _STAGING_TOKENS) * _MMA_ROWS * 2
        records = _RECORDS * (16 + 8 * self.tokens + 16)
        return staging + records + 2 * 4 * (MAX_EXPERTS + 1) + 8

    def macros(self, weight_bytes: int | None = None, scale_bytes: int = 0) -> dict[str, int]:
        """Return the macros of a module of this tile."""
        return {
            "WARPGROUPS": self.warpgroups,
            "MMA_TILES": self.mma_tiles,
            "TOKENS": self.tokens,
            "BOX_ROWS": self.box_rows,
            "DEPTH": self.depth,
            "STAGES": self.stages(weight_bytes, scale_bytes),
            "BLOCKS": self.blocks,
            "THREADS": self.threads,
            "SHARED_BYTES": self.shared_bytes(weight_bytes, scale_bytes),
        }

    def spec(self, dtype: str, *, transposed: bool = False) -> ModuleSpec:
        """Return the module for dense weights of `dtype`, transposed in memory or not."""
        kind = ("WEIGHT_KIND", 0), ("TRANSPOSED", int(transposed))
        return ModuleSpec(_FILE, dtype, (*self.macros().items(), *kind))

    def grid(self, pairs: int, num_experts: int, columns: int, *, is_gated: bool) -> int:
        """Return the CTAs of the grid for a result (pairs, columns)."""
        tile_rows = self.rows // 2 if is_gated else self.rows
        token_tiles = min(pairs, num_experts + pairs // self.tokens)
        return min(sm_count() * self.blocks, token_tiles * ceil_div(columns, tile_rows))


# For one token, CTAs with half of the shared memory make a layer faster (docs/lab-notebook.md).
_ONE = MoeTileConfig(1, 16, 1, blocks=2)
_FEW = MoeTileConfig(1, 16, 2)
_SOME = MoeTileConfig(1, 64, 2)
_MANY = MoeTileConfig(2, 144, 1)
MOE_CONFIGS = (_ONE, _FEW, _SOME, _MANY)
_ONE_TO = 8  # maximum pairs for _ONE
# Above these averages of tokens per expert, a larger tile pays.
_SOME_FROM = 4
_MANY_FROM = 32


def specs(dtype: str, *, transposed: bool = False) -> tuple[ModuleSpec, ...]:
    """Return the modules that `launch` may launch for `dtype`."""
    if dtype not in HOPPER_DTYPES:
        return ()
    return tuple(config.spec(dtype, transposed=transposed) for config in MOE_CONFIGS)


def choose_config(num_pairs: int, num_experts: int) -> MoeTileConfig:
    """Choose the tile for `num_pairs` pairs (token, expert).

    Examples
    --------
    >>> choose_config(512, 128)
    MoeTileConfig(warpgroups=1, tokens=16, depth=2, mma_tiles=2, blocks=1)
    >>> choose_config(2048, 128)
    MoeTileConfig(warpgroups=1, tokens=64, depth=2, mma_tiles=2, blocks=1)
    >>> choose_config(32768, 128)
    MoeTileConfig(warpgroups=2, tokens=144, depth=1, mma_tiles=2, blocks=1)
    """
    if num_pairs > _MANY_FROM * num_experts:
        return _MANY
    if num_pairs > _SOME_FROM * num_experts:
        return _SOME
    return _ONE if num_pairs <= _ONE_TO else _FEW


def is_supported(operands: MoeOperands) -> bool:
    """Tell whether the kernel supports the current device and these operands."""
    x = operands.x
    weight = operands.weight
    out = operands.out
    if not is_hopper(dtype_name(x.dtype)) or weight.shape[0] > MAX_EXPERTS:
        return False
    if weight.size == 0 or out.size == 0:
        return False
    rows = [array.shape[-1] * array.itemsize for array in (x, weight, out)]
    places = [int(array.data.ptr) for array in (x, weight, out)]
    return all(step % 16 == 0 for step in (*rows, *places))


def launch(operands: MoeOperands) -> None:
    """Launch on CuPy arrays."""
    x = operands.x
    weight = operands.weight
    (num_experts, length, width) = weight.shape
    dtype = dtype_name(x.dtype)
    pairs, columns = operands.out.shape
    config = choose_config(operands.expected_pairs, num_experts)
    step = weight.itemsize
    map_w = tensor_map(
        weight.data.ptr,
        dtype,
        (width, length, num_experts),
        (width * step, length * width * step),
        (_SLAB_K, _MMA_ROWS, 1),
        promote=128,
    )
    _KERNEL.launch(
        config.spec(dtype, transposed=operands.transposed),
        (config.grid(pairs, num_experts, columns, is_gated=operands.activation is not None),),
        (config.threads,),
        config.shared_bytes(),
        pdl=True,  # the kernel waits before it accesses memory that others write
        map_w=map_w,
        map_x=tensor_map_2d(x, dtype, (config.box_rows, _SLAB_K)),
        x=x,
        scatters=operands.scatter,
        is_early=operands.pdl and operands.scatter,
        **operands.arguments(),
    )
