"""attention_decode on any chip (`attention_decode.cu`): choice of tile and splits; launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from engine import device
from engine.dtypes import dtype_name
from engine.kernels._attention import Pages, ScoreRule, Tile, are_aligned
from engine.kernels._chip import sm_count
from engine.kernels._elementwise import element_strides, named_strides
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._pages import page_strides
from engine.kernels._quantized_kv import kv_macros

__all__ = ["choose_num_splits", "choose_tile", "launch", "spec"]

_PARAMS = (
    "q:ptr k_pages:ptr v_pages:ptr block_tables:ptr context_lens:ptr tree_masks:ptr sinks:ptr "
    "out:ptr lse:ptr partial_o:ptr partial_stats:ptr q_stride_b:i64 q_stride_t:i64 q_stride_h:i64 "
    "page_stride:i64 head_stride:i64 token_stride:i64 table_stride:i64 out_stride_b:i64 "
    "out_stride_t:i64 out_stride_h:i64 max_keys:i64 num_rows:i64 num_queries:i32 num_heads:i32 "
    "num_kv_heads:i32 group:i32 head_dim:i32 block_shift:i32 num_blocks:i32 window:i32 "
    "num_splits:i32 is_vector:i32 score_inner:f32 score_factor:f32 k_scale:ptr v_scale:ptr"
)
_KERNEL = Kernel("attention_decode", _PARAMS, struct="AttentionDecodeParams")
_COMBINE = Kernel("attention_decode_combine", _PARAMS, struct="AttentionDecodeParams")
_COMBINE_THREADS = 128  # kCombineThreads in CUDA: one warp per row

_SPLIT_GRAIN = 64  # kSplitGrain in CUDA: keys per split are a multiple
_MAX_SPLITS = 128
# Costs in units of a block's time for _SPLIT_GRAIN keys; tuned with
# `ENGINE_KERNEL_TIER=portable python -m tests.bench attention_decode`.
_WAVE_COST = 2.0
_COMBINE_COST = 4.0
_COMBINE_COST_OF_A_SPLIT = 0.1

# With up to 16 rows the warps divide the keys; with more, the rows. One warp has no registers for
# all columns of O of wide heads: warps divide those too.
_NARROW_16 = (
    Tile(64, warps_m=1, warps_n=4, row_tiles=1, keys=64, stages=3),
    Tile(128, warps_m=1, warps_n=4, row_tiles=1, keys=64, stages=2),
    Tile(256, warps_m=1, warps_n=2, row_tiles=1, keys=32, stages=2),
    Tile(512, warps_m=1, warps_n=1, row_tiles=1, keys=16, stages=2, column_warps=4),
)
_WIDE_16 = (
    Tile(64, warps_m=4, warps_n=1, row_tiles=1, keys=64, stages=3),
    Tile(128, warps_m=4, warps_n=1, row_tiles=1, keys=64, stages=2),
    Tile(256, warps_m=4, warps_n=1, row_tiles=1, keys=32, stages=2),
    Tile(512, warps_m=2, warps_n=1, row_tiles=1, keys=16, stages=2, column_warps=2),
)
_TILES_32 = (
    Tile(128, warps_m=4, warps_n=1, row_tiles=2, keys=32, stages=1),
    Tile(256, warps_m=4, warps_n=1, row_tiles=2, keys=32, stages=1),
    Tile(512, warps_m=4, warps_n=1, row_tiles=2, keys=32, stages=1),
)


def choose_tile(dtype: str, head_dim: int, num_rows: int) -> Tile:
    """Choose the tile for `num_rows` = Q * H / K rows that share their keys.

    Examples
    --------
    >>> choose_tile("bfloat16", 64, num_rows=3).warps_n, choose_tile("bfloat16", 64, 24).warps_m
    (4, 4)
    """
    tiles: tuple[Tile, ...] = _NARROW_16 if num_rows <= 16 else _WIDE_16
    if dtype == "float32":
        tiles = _TILES_32
    return next(tile for tile in tiles if head_dim <= tile.head_dim)


def spec(tile: Tile, dtype: str, kv_dtype: str) -> ModuleSpec:
    """Return the module of a tile, for pages of `kv_dtype` if they are quantized."""
    return tile.spec("attention_decode/attention_decode.cu", dtype, **kv_macros(kv_dtype))


@lru_cache(maxsize=4096)
def choose_num_splits(num_ctas: int, max_context_len: int, sm_count: int) -> int:
    """Choose the number of splits of the keys.

    Parameters
    ----------
    num_ctas : int
        Thread blocks per split: sequences * key/value heads * row tiles.
    max_context_len : int
        Upper bound of the sequence lengths.
    sm_count : int
        Multiprocessors, with two resident blocks each.

    Returns
    -------
    int
        The smallest count with the least estimated time: waves of blocks times keys per split, plus
        a fixed cost per wave and for the combining kernel.

    Examples
    --------
    >>> choose_num_splits(8, 16384, sm_count=132), choose_num_splits(1024, 16384, sm_count=132)
    (32, 1)
    """
    grains = ceil_div(max_context_len, _SPLIT_GRAIN)

    def cost(splits: int) -> float:
        waves = ceil_div(num_ctas * splits, 2 * sm_count)
        combine = _COMBINE_COST + _COMBINE_COST_OF_A_SPLIT * splits if splits > 1 else 0.0
        return waves * (ceil_div(grains, splits) + _WAVE_COST) + combine

    return min(range(1, max(1, min(grains, _MAX_SPLITS)) + 1), key=cost)


def launch(
    q: Any,
    pages: Pages,
    out: Any,
    lse: Any,
    rule: ScoreRule,
    num_splits: int | None,
    max_context_len: int,
    tree_mask: Any,
    sinks: Any,
) -> None:
    """Launch on CuPy arrays; a `num_splits` of None is chosen for `max_context_len` keys."""
    (batch, num_queries, num_heads, head_dim) = q.shape
    dtype = dtype_name(q.dtype)
    num_kv_heads = pages.k.shape[1]
    num_rows = num_queries * (num_heads // num_kv_heads)
    tile = choose_tile(dtype, head_dim, num_rows)
    module = spec(tile, dtype, pages.kv_dtype)
    row_tiles = ceil_div(num_rows, tile.rows(dtype))
    if num_splits is None:
        reach = rule.longest_reach
        keys = min(max_context_len, reach + num_queries) if reach else max_context_len
        rounded = ceil_div(keys, _SPLIT_GRAIN) * _SPLIT_GRAIN  # for lru_cache hits
        num_splits = choose_num_splits(batch * num_kv_heads * row_tiles, rounded, sm_count())
    arguments = _arguments(q, pages, out, lse, rule, num_splits)
    arguments |= {"tree_masks": tree_mask, "sinks": sinks}
    _KERNEL.launch(
        module,
        (batch, num_kv_heads, num_splits * row_tiles),
        (tile.threads,),
        tile.shared_bytes(dtype),
        **arguments,
    )
    if num_splits > 1:
        num_ctas = ceil_div(arguments["num_rows"], _COMBINE_THREADS // 32)
        _COMBINE.launch(module, (num_ctas,), (_COMBINE_THREADS,), **arguments)


def _arguments(
    q: Any, pages: Pages, out: Any, lse: Any, rule: ScoreRule, num_splits: int
) -> dict[str, Any]:
    """Return the kernels' arguments except masks and sinks, with scratch memory for splits."""
    batch, num_queries, num_heads, head_dim = q.shape
    num_blocks, num_kv_heads, block_size, _ = pages.k.shape
    partial_o, partial_stats = _scratch(q, num_splits)
    return {
        **named_strides("bth", q=q, out=out),
        "q": q,
        "k_pages": pages.k,
        "v_pages": pages.v,
        "block_tables": pages.block_tables,
        "context_lens": pages.context_lens,
        "out": out,
        "lse": lse,
        "partial_o": partial_o,
        "partial_stats": partial_stats,
        **page_strides(pages.k),
        "table_stride": element_strides(pages.block_tables)[0],
        "max_keys": pages.block_tables.shape[1] * block_size if pages.k.size else 0,
        "num_rows": batch * num_heads * num_queries,
        "num_queries": num_queries,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "group": num_heads // num_kv_heads,
        "head_dim": head_dim,
        "block_shift": block_size.bit_length() - 1,
        "num_blocks": num_blocks,
        "window": rule.window_argument,
        "num_splits": num_splits,
        "is_vector": int(are_aligned(q, pages.k, pages.v, out)),
        "score_inner": rule.inner,
        "score_factor": rule.factor,
        **pages.scales,
    }


def _scratch(q: Any, num_splits: int) -> tuple[Any, Any]:
    """Return memory for the splits' partial results and statistics; None for one split."""
    if num_splits == 1:
        return None, None
    batch, num_queries, num_heads, head_dim = q.shape
    xp = device.cupy()
    rows = (num_splits, batch * num_heads * num_queries)
    return xp.empty((*rows, head_dim), np.float32), xp.empty((*rows, 2), np.float32)
