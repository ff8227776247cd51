"""attention_decode on Hopper: which problems `attention_decode_sm90.cu` takes, and its launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine import device, env
from engine.dtypes import dtype_name
from engine.kernels._attention import Pages, ScoreRule, are_aligned, element_strides
from engine.kernels._launch import Kernel, sm_count
from engine.kernels._module import ModuleSpec, current_architecture
from engine.kernels._workspace import counters, workspace

__all__ = ["HopperTile", "choose_hopper_tile", "launch", "specs", "takes"]

_KERNEL = Kernel(
    "attention_decode_sm90",
    "q:ptr k:ptr v:ptr block_tables:ptr context_lens:ptr out:ptr lse:ptr partial_o:ptr "
    "partial_stats:ptr counters:ptr q_stride_b:i64 q_stride_t:i64 q_stride_h:i64 page_stride:i64 "
    "table_stride:i64 out_stride_b:i64 out_stride_t:i64 out_stride_h:i64 max_keys:i64 batch:i32 "
    "num_queries:i32 num_heads:i32 num_kv_heads:i32 block_shift:i32 num_blocks:i32 window:i32 "
    "num_splits:i32 score_inner:f32 score_factor:f32",
)
_KEY_WARPS = 4  # kKeyWarps
_DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class HopperTile:
    """The macros of `common/decode_ring.cuh`; `blocks_per_sm` of them share a multiprocessor."""

    head_dim: int
    unit_keys: int
    stages: int
    row_tiles: int
    warps_m: int
    blocks_per_sm: int

    @property
    def rows(self) -> int:
        """Query rows of a block: tokens * heads of a group."""
        return 16 * self.row_tiles * self.warps_m

    @property
    def threads(self) -> int:
        """Threads of a block: the computing warps and one that copies."""
        return 32 * (_KEY_WARPS * self.warps_m + 1)

    @property
    def shared_bytes(self) -> int:
        """Shared memory as decode_ring.cuh lays it out."""
        tile = 8 * (self.unit_keys * self.head_dim * 2 + 16)
        probs = self.rows * (8 * self.unit_keys * 2 + 16)
        exchange = self.rows * _KEY_WARPS * 4
        return self.stages * (2 * tile + 4 * 8) + 2 * probs + 3 * exchange + 16

    def spec(self, dtype: str) -> ModuleSpec:
        """Return the module compiled for this tile."""
        macros = {
            "HEAD_DIM": self.head_dim,
            "UNIT_KEYS": self.unit_keys,
            "STAGES": self.stages,
            "ROW_TILES": self.row_tiles,
            "WARPS_M": self.warps_m,
            "BLOCKS_PER_SM": self.blocks_per_sm,
            "SHARED_BYTES": self.shared_bytes,
        }
        return ModuleSpec("attention_decode_sm90.cu", dtype, tuple(macros.items()))


# By head dim, then by rows: 16, 32, 64.
_TILES = (
    HopperTile(64, 8, 6, 1, 1, 2),
    HopperTile(64, 8, 6, 2, 1, 2),
    HopperTile(64, 8, 11, 2, 2, 1),
    HopperTile(128, 8, 3, 1, 1, 2),
    HopperTile(128, 8, 3, 2, 1, 2),
    HopperTile(128, 8, 6, 2, 2, 1),
)


def choose_hopper_tile(dtype: str, head_dim: int, num_rows: int) -> HopperTile | None:
    """Return the tile for `num_rows` = Q * H / K rows that share their keys; None: not for Hopper.

    Examples
    --------
    >>> choose_hopper_tile("bfloat16", 128, 4).rows, choose_hopper_tile("float16", 80, 4)
    (16, None)
    """
    if dtype not in _DTYPES:
        return None
    fits = (t for t in _TILES if t.head_dim == head_dim and t.rows >= num_rows)
    return next(fits, None)


def specs(
    dtype: str, *, head_dim: int | None = None, num_rows: int | None = None
) -> tuple[ModuleSpec, ...]:
    """Return the modules for one head dim and number of rows, or for all (None)."""
    dims = {t.head_dim for t in _TILES} if head_dim is None else {head_dim}
    rows = {t.rows for t in _TILES} if num_rows is None else {num_rows}
    tiles = [choose_hopper_tile(dtype, dim, n) for dim in sorted(dims) for n in sorted(rows)]
    return tuple(dict.fromkeys(tile.spec(dtype) for tile in tiles if tile is not None))


def takes(q: Any, pages: Pages, out: Any) -> bool:
    """Tell whether the current device and the problem are for the Hopper kernel."""
    rows = q.shape[1] * (q.shape[2] // pages.k.shape[1])
    return (
        choose_hopper_tile(dtype_name(q.dtype), q.shape[3], rows) is not None
        and env.kernel_tier() == "auto"
        and current_architecture(device.cupy().cuda.runtime.getDevice()) == "sm_90a"
        and are_aligned(q, pages.k, pages.v, out)
    )


def launch(
    q: Any, pages: Pages, out: Any, lse: Any, rule: ScoreRule, num_splits: int | None
) -> None:
    """Launch on arrays that `takes` said yes to; num_splits None: equal work for all blocks."""
    (batch, num_queries, num_heads, head_dim), dtype = q.shape, dtype_name(q.dtype)
    num_kv_heads = pages.k.shape[1]
    num_rows = num_queries * (num_heads // num_kv_heads)
    tile = choose_hopper_tile(dtype, head_dim, num_rows)
    assert tile is not None
    num_blocks = tile.blocks_per_sm * sm_count()
    # decode_plan.cuh: two slots a block, or one a part
    slots = batch * num_kv_heads * num_splits if num_splits else 2 * num_blocks
    num_counters = max(num_blocks, batch * num_kv_heads)
    scratch = workspace(slots * num_rows * (head_dim + 2))
    q_strides, out_strides = element_strides(q), element_strides(out)
    _KERNEL.launch(
        tile.spec(dtype),
        (num_blocks if batch else 0,),
        (tile.threads,),
        tile.shared_bytes,
        q=q,
        k=pages.k,
        v=pages.v,
        block_tables=pages.block_tables,
        context_lens=pages.context_lens,
        out=out,
        lse=lse,
        partial_o=scratch,
        partial_stats=scratch[slots * num_rows * head_dim :],
        counters=counters(num_counters),
        q_stride_b=q_strides[0],
        q_stride_t=q_strides[1],
        q_stride_h=q_strides[2],
        page_stride=element_strides(pages.k)[0],
        table_stride=element_strides(pages.block_tables)[0],
        out_stride_b=out_strides[0],
        out_stride_t=out_strides[1],
        out_stride_h=out_strides[2],
        max_keys=pages.block_tables.shape[1] * pages.k.shape[2] if pages.k.size else 0,
        batch=batch,
        num_queries=num_queries,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_shift=pages.k.shape[2].bit_length() - 1,
        num_blocks=pages.k.shape[0],
        window=rule.window,
        num_splits=num_splits or 0,
        score_inner=rule.inner,
        score_factor=rule.factor,
    )
