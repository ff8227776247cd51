"""attention_decode on any chip, `attention_decode.cu`: its tiles and its launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from engine import device
from engine.dtypes import dtype_name
from engine.kernels._attention import Pages, ScoreRule, Tile, are_aligned, element_strides
from engine.kernels._launch import Kernel, ceil_div, sm_count

__all__ = ["choose_num_splits", "choose_tile", "launch"]

_KERNEL = Kernel(
    "attention_decode",
    "q:ptr k:ptr v:ptr block_tables:ptr context_lens:ptr tree_masks:ptr out:ptr lse:ptr "
    "partial_o:ptr partial_stats:ptr q_stride_b:i64 q_stride_t:i64 q_stride_h:i64 page_stride:i64 "
    "table_stride:i64 out_stride_b:i64 out_stride_t:i64 out_stride_h:i64 max_keys:i64 "
    "num_queries:i32 num_heads:i32 group:i32 head_dim:i32 block_shift:i32 num_blocks:i32 "
    "window:i32 num_splits:i32 is_vector:i32 score_inner:f32 score_factor:f32",
)
_COMBINE = Kernel(
    "attention_decode_combine",
    "partial_o:ptr partial_stats:ptr context_lens:ptr out:ptr lse:ptr out_stride_b:i64 "
    "out_stride_t:i64 out_stride_h:i64 max_keys:i64 num_slots:i64 num_queries:i32 num_heads:i32 "
    "num_kv_heads:i32 head_dim:i32 window:i32 num_splits:i32",
)
_COMBINE_THREADS = 128  # kCombineThreads: one warp a row

_SPLIT_GRAIN = 64  # kSplitGrain
_MAX_SPLITS = 128

# Up to 16 rows: the warps divide the keys. More rows: the warps divide the rows.
_NARROW_16 = (Tile(64, 1, 4, 1, 64, 3), Tile(128, 1, 4, 1, 64, 2), Tile(256, 1, 2, 1, 32, 2))
_WIDE_16 = (Tile(64, 4, 1, 1, 64, 3), Tile(128, 4, 1, 1, 64, 2), Tile(256, 4, 1, 1, 32, 2))
_TILES_32 = (Tile(128, 4, 1, 2, 32, 1), Tile(256, 4, 1, 2, 32, 1))


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


@lru_cache(maxsize=4096)
def choose_num_splits(num_blocks: int, max_context_len: int, sm_count: int) -> int:
    """Choose into how many parts the keys are cut.

    Parameters
    ----------
    num_blocks : int
        Thread blocks of one split: sequences * key/value heads * tiles of rows.
    max_context_len : int
        Longest sequence.
    sm_count : int
        Multiprocessors, each of which keeps two blocks busy.

    Returns
    -------
    int
        The smallest count with the least estimated time: rounds over the chip times the keys of a
        split, with a fixed cost for every round and for the combining kernel.

    Examples
    --------
    >>> choose_num_splits(8, 16384, sm_count=132), choose_num_splits(1024, 16384, sm_count=132)
    (32, 1)
    """
    grains = ceil_div(max_context_len, _SPLIT_GRAIN)

    def cost(splits: int) -> float:
        rounds = ceil_div(num_blocks * splits, 2 * sm_count)
        combine = 4.0 + 0.1 * splits if splits > 1 else 0.0
        return rounds * (ceil_div(grains, splits) + 2.0) + combine

    return min(range(1, max(1, min(grains, _MAX_SPLITS)) + 1), key=cost)


def launch(
    q: Any,
    pages: Pages,
    out: Any,
    lse: Any,
    rule: ScoreRule,
    num_splits: int | None,
    bound: int,
    tree_mask: Any,
) -> None:
    """Launch on CuPy arrays; num_splits None: chosen for lengths up to `bound`."""
    (batch, num_queries, num_heads, head_dim), dtype = q.shape, dtype_name(q.dtype)
    num_kv_heads = pages.k.shape[1]
    num_rows = num_queries * (num_heads // num_kv_heads)
    tile = choose_tile(dtype, head_dim, num_rows)
    spec, row_tiles = (
        tile.spec("attention_decode/attention_decode.cu", dtype),
        ceil_div(num_rows, tile.rows(dtype)),
    )
    if num_splits is None:
        keys = min(bound, rule.window + num_queries) if rule.window else bound
        rounded = ceil_div(keys, _SPLIT_GRAIN) * _SPLIT_GRAIN  # so that the cache of choices hits
        num_splits = choose_num_splits(batch * num_kv_heads * row_tiles, rounded, sm_count())
    shared = _shared_arguments(q, pages, out, lse, rule, num_splits)
    q_strides = element_strides(q)
    _KERNEL.launch(
        spec,
        (batch, num_kv_heads, num_splits * row_tiles),
        (tile.threads,),
        tile.shared_bytes(dtype),
        q=q,
        k=pages.k,
        v=pages.v,
        block_tables=pages.block_tables,
        tree_masks=tree_mask,
        q_stride_b=q_strides[0],
        q_stride_t=q_strides[1],
        q_stride_h=q_strides[2],
        page_stride=element_strides(pages.k)[0],
        table_stride=element_strides(pages.block_tables)[0],
        group=num_heads // num_kv_heads,
        block_shift=pages.k.shape[2].bit_length() - 1,
        num_blocks=pages.k.shape[0],
        is_vector=int(are_aligned(q, pages.k, pages.v, out)),
        score_inner=rule.inner,
        score_factor=rule.factor,
        **shared,
    )
    if num_splits > 1:
        slots = batch * num_heads * num_queries
        grid, block = (ceil_div(slots, _COMBINE_THREADS // 32),), (_COMBINE_THREADS,)
        _COMBINE.launch(spec, grid, block, num_slots=slots, num_kv_heads=num_kv_heads, **shared)


def _shared_arguments(
    q: Any, pages: Pages, out: Any, lse: Any, rule: ScoreRule, num_splits: int
) -> dict[str, Any]:
    """Return what both kernels take, the splits' scratch memory among it."""
    partial_o, partial_stats = _scratch(q, num_splits)
    strides = element_strides(out)
    return {
        "context_lens": pages.context_lens,
        "out": out,
        "lse": lse,
        "partial_o": partial_o,
        "partial_stats": partial_stats,
        "out_stride_b": strides[0],
        "out_stride_t": strides[1],
        "out_stride_h": strides[2],
        "max_keys": pages.block_tables.shape[1] * pages.k.shape[2] if pages.k.size else 0,
        "num_queries": q.shape[1],
        "num_heads": q.shape[2],
        "head_dim": q.shape[3],
        "window": rule.window,
        "num_splits": num_splits,
    }


def _scratch(q: Any, num_splits: int) -> tuple[Any, Any]:
    """Return memory for the splits' unfinished rows and their statistics; None for one split."""
    if num_splits == 1:
        return None, None
    batch, num_queries, num_heads, head_dim = q.shape
    xp = device.cupy()
    slots = (num_splits, batch * num_heads * num_queries)
    return xp.empty((*slots, head_dim), np.float32), xp.empty((*slots, 2), np.float32)
