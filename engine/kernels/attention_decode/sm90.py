"""attention_decode on Hopper: which problems `attention_decode_sm90.cu` takes, and its launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from engine import device, env
from engine.dtypes import dtype_name
from engine.kernels._attention import Pages, ScoreRule, are_aligned, element_strides
from engine.kernels._launch import Kernel, sm_count
from engine.kernels._module import ModuleSpec, current_architecture
from engine.kernels._tensor_map import tensor_map
from engine.kernels._workspace import counters, workspace
from engine.kernels.attention_decode.new_tokens import PARAMS as _FRESH_PARAMS
from engine.kernels.attention_decode.new_tokens import FreshTokens

__all__ = ["HopperTile", "choose_hopper_tile", "is_supported", "launch", "specs"]

_ENTRY = "attention_decode_sm90"
_PARAMS = (
    "k_map:tmap v_map:tmap q:ptr k:ptr v:ptr block_tables:ptr context_lens:ptr tree_masks:ptr "
    "out:ptr lse:ptr partial_o:ptr partial_stats:ptr counters:ptr q_stride_b:i64 q_stride_t:i64 "
    "q_stride_h:i64 table_stride:i64 out_stride_b:i64 out_stride_t:i64 out_stride_h:i64 "
    "max_keys:i64 batch:i32 num_queries:i32 num_heads:i32 num_kv_heads:i32 block_shift:i32 "
    "num_blocks:i32 window:i32 num_splits:i32 token_parts:i32 score_inner:f32 score_factor:f32"
)
_KERNELS = {
    False: Kernel(_ENTRY, _PARAMS),
    True: Kernel(_ENTRY, f"{_PARAMS} {_FRESH_PARAMS}"),  # with FRESH
}
_DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class HopperTile:
    """The macros of `common/decode_ring.cuh`."""

    head_dim: int
    unit_keys: int
    stages: int
    row_tiles: int
    key_warps: int
    cluster: int = 1
    is_fresh: bool = False
    blocks_per_sm: int = 1

    @property
    def rows(self) -> int:
        """Query rows of a block: tokens * heads of a group."""
        return _ROWS * self.row_tiles

    @property
    def threads(self) -> int:
        """Threads of a block: the computing warps and the copying one, or its warpgroup."""
        moves_registers = (self.key_warps == 8 or self.is_fresh) and self.cluster == 1
        return 32 * (self.key_warps + (4 if moves_registers else 1))

    @property
    def shared_bytes(self) -> int:
        """Shared memory as decode_ring.cuh lays it out."""
        padding = 0 if self.cluster == 1 else 16
        ring = 2 * self.stages * 8 * (self.unit_keys * self.head_dim * 2 + padding)
        probs = 2 * self.rows * (8 * self.unit_keys * 2 + 16)
        exchange = 3 * self.rows * self.key_warps * 4
        makes_ahead = self.is_fresh and self.blocks_per_sm > 1 and self.cluster == 1
        in_registers = self.row_tiles * self.head_dim <= 256
        buffers = 1 if in_registers and not makes_ahead else 2
        queries = buffers * self.rows * (self.head_dim * 2 + 16)
        barriers = (4 * self.stages + 2 * buffers) * 8
        progress = (self.key_warps + (3 if makes_ahead else 0)) * 64
        fresh = buffers * (2 * self.head_dim * 2 + 16) if self.is_fresh else 0
        inbox = self.rows * (self.head_dim * 4 + self.cluster * 8) + 16
        if self.cluster == 1 or self.row_tiles > 1:
            inbox = 0
        return ring + probs + exchange + barriers + queries + 16 + progress + fresh + inbox

    def takes_fresh(self, group: int) -> bool:
        """Tell whether it can make the newest tokens' rows: a thread has 16 values of one head."""
        return self.row_tiles == 1 and group + 2 <= 32 * self.key_warps // (self.head_dim // 16)

    def spec(self, dtype: str) -> ModuleSpec:
        """Return the module compiled for this tile."""
        macros = {
            "HEAD_DIM": self.head_dim,
            "UNIT_KEYS": self.unit_keys,
            "STAGES": self.stages,
            "ROW_TILES": self.row_tiles,
            "KEY_WARPS": self.key_warps,
            "CLUSTER": self.cluster,
            "FRESH": int(self.is_fresh),
            "BLOCKS_PER_SM": self.blocks_per_sm,
            "SHARED_BYTES": self.shared_bytes,
        }
        return ModuleSpec("attention_decode/attention_decode_sm90.cu", dtype, tuple(macros.items()))


# By head dim, then by rows: 16, 32, 64.
_TILES = (
    HopperTile(64, 16, 6, 1, 4),
    HopperTile(64, 16, 6, 2, 4),
    HopperTile(64, 8, 8, 4, 4),
    HopperTile(128, 16, 3, 1, 8),
    HopperTile(128, 16, 3, 2, 8),
    HopperTile(128, 16, 2, 4, 8),
)
# Of up to 16 rows, where a block has several sequences: two blocks share a multiprocessor, and
# while one ends a sequence the other one's tiles keep memory busy.
_MANY_TILES = {
    64: HopperTile(64, 16, 3, 1, 4, blocks_per_sm=2),
    128: HopperTile(128, 8, 3, 1, 4, blocks_per_sm=2),
}
_CLUSTER = 8
_ROWS = 16  # of a row tile
# Of clusters, for up to _SHORT_KEYS keys: with tiles of 64 keys more of their blocks have any. They
# are small enough for two blocks a multiprocessor.
_SHORT_TILES = {
    64: HopperTile(64, 8, 2, 1, 4, _CLUSTER),
    128: HopperTile(128, 8, 2, 1, 4, _CLUSTER),
}
_SHORT_KEYS = 1024
_HALF_CLUSTER_KEYS = 4096  # up to which clusters of four are taken


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
    tiles: dict[HopperTile, None] = {}
    for dim in sorted(dims):
        for n in sorted(rows):
            tile = choose_hopper_tile(dtype, dim, n)
            if tile is not None:
                tiles |= dict.fromkeys(_variants(tile))
    return tuple(tile.spec(dtype) for tile in tiles)


def _variants(tile: HopperTile) -> list[HopperTile]:
    """Return all that may be launched in the place of `tile`."""
    short = _SHORT_TILES[tile.head_dim]
    found = [tile, replace(tile, cluster=_CLUSTER), replace(tile, cluster=_CLUSTER // 2)]
    for other in _TILES:  # of parts of the tokens
        if other.head_dim == tile.head_dim and other.row_tiles < tile.row_tiles:
            found.append(replace(other, cluster=_CLUSTER))
    if tile.row_tiles > 1:
        found.append(short)
    else:
        found += [_MANY_TILES[tile.head_dim], short]
        found.append(replace(short, cluster=_CLUSTER // 2, blocks_per_sm=2))
        found += [replace(each, is_fresh=True) for each in found]
    return found


def is_supported(q: Any, pages: Pages, out: Any, fresh: FreshTokens | None = None) -> bool:
    """Tell whether the current device and the problem are for the Hopper kernel."""
    group = q.shape[2] // pages.k.shape[1]
    tile = choose_hopper_tile(dtype_name(q.dtype), q.shape[3], q.shape[1] * group)
    return (
        tile is not None
        and env.kernel_tier() == "auto"
        and current_architecture(device.cupy().cuda.runtime.getDevice()) == "sm_90a"
        and are_aligned(q, pages.k, pages.v, out)
        and 0 < pages.k.size // q.shape[3] < 2**31  # rows of the pages: TMA counts them in int32
        and (fresh is None or (tile.takes_fresh(group) and fresh.are_vectors()))
    )


def _room(sm_count: int) -> int:
    """Return how many clusters find room at once, of one block a multiprocessor.

    15 on 132 multiprocessors, as was measured; a 16th runs after them. A cluster lies in one GPC,
    and some GPC seems to have fewer than two clusters' worth.
    """
    return sm_count // _CLUSTER - 1


def choose_cluster(num_heads: int, sm_count: int, bound: int) -> tuple[int, int]:
    """Return how many blocks share a sequence and head, and how many of them a multiprocessor.

    (1, 1): none, teams divide all keys. Clusters of four are for up to so many keys (`bound`) that
    even one sequence of eight heads alone, most of the chip being idle, does not take longer.

    Examples
    --------
    >>> [choose_cluster(heads, sm_count=132, bound=1000) for heads in (15, 30, 60, 61)]
    [(8, 1), (4, 1), (4, 2), (1, 1)]
    >>> [choose_cluster(heads, sm_count=132, bound=2000) for heads in (15, 30, 60, 61)]
    [(8, 1), (4, 1), (1, 1), (1, 1)]
    """
    room = _room(sm_count)
    if num_heads <= room:
        return _CLUSTER, 1
    if num_heads <= 2 * room and bound <= _HALF_CLUSTER_KEYS:
        return _CLUSTER // 2, 1
    if num_heads <= 4 * room and bound <= _SHORT_KEYS:
        return _CLUSTER // 2, 2
    return 1, 1


def choose_token_parts(
    batch: int, num_queries: int, num_heads: int, num_kv_heads: int, sm_count: int
) -> int:
    """Return into how many parts clusters divide a sequence's query tokens.

    Few sequences with many tokens leave most of the chip idle. Clusters that read the same keys for
    some of the tokens each get them from L2, and have fewer rows to work on.

    Examples
    --------
    >>> choose_token_parts(1, 8, num_heads=16, num_kv_heads=4, sm_count=132)
    2
    >>> choose_token_parts(1, 8, num_heads=32, num_kv_heads=8, sm_count=132)  # 16 clusters
    1
    """
    rows = num_queries * (num_heads // num_kv_heads)
    fit = [
        parts
        for parts in range(1, num_queries + 1)
        if num_queries % parts == 0 and batch * parts * num_kv_heads <= _room(sm_count)
    ]
    return min(fit, key=lambda parts: (-(-rows // parts // _ROWS), parts), default=1)


def _choose(
    dtype: str, shape: tuple[int, ...], num_kv_heads: int, bound: int, *, may_share: bool
) -> HopperTile:
    """Choose for q of this shape and up to `bound` keys; `may_share`: blocks may share a head.

    Without `may_share` it is the same tile whatever the batch.
    """
    batch, num_queries, num_heads, head_dim = shape
    tile = choose_hopper_tile(dtype, head_dim, num_queries * (num_heads // num_kv_heads))
    assert tile is not None
    group = num_heads // num_kv_heads
    many, short = _MANY_TILES[head_dim], _SHORT_TILES[head_dim]
    # takes_fresh, not only for newest tokens: the bits are then the same with and without them.
    if not may_share or batch * num_kv_heads > sm_count():
        return many if tile.row_tiles == 1 and many.takes_fresh(group) else tile
    cluster, blocks_per_sm = choose_cluster(batch * num_kv_heads, sm_count(), bound)
    is_short = blocks_per_sm == 2 or (cluster == _CLUSTER and bound <= _SHORT_KEYS)
    if is_short and tile.row_tiles == 1 and short.takes_fresh(group):
        return replace(short, cluster=cluster, blocks_per_sm=blocks_per_sm)
    # There is no room for two of the large blocks.
    return tile if blocks_per_sm == 2 else replace(tile, cluster=cluster)


def _page_maps(pages: Pages, dtype: str, unit_keys: int) -> dict[str, Any]:
    """Return maps of pages (P, K, block_size, D), of which a copy brings `unit_keys` tokens."""
    num_blocks, num_kv_heads, block_size, head_dim = pages.k.shape
    sizes = (64, num_blocks * num_kv_heads * block_size, head_dim // 64)
    strides, box = (head_dim * 2, 128), (64, unit_keys, head_dim // 64)
    k, v = (
        tensor_map(array.data.ptr, dtype, sizes, strides, box, promote=0)
        for array in (pages.k, pages.v)
    )
    return {"k_map": k, "v_map": v}


def launch(
    q: Any,
    pages: Pages,
    out: Any,
    lse: Any,
    rule: ScoreRule,
    num_splits: int | None,
    bound: int,
    *,
    pdl: bool,
    tree_mask: Any = None,
    fresh: FreshTokens | None = None,
) -> None:
    """Launch on arrays that `is_supported` accepts; num_splits None: equal work for all blocks."""
    (batch, num_queries, num_heads, head_dim), num_kv_heads = q.shape, pages.k.shape[1]
    token_parts = 1
    if num_splits is None:
        token_parts = choose_token_parts(batch, num_queries, num_heads, num_kv_heads, sm_count())
    batch, num_queries = batch * token_parts, num_queries // token_parts
    num_rows, dtype = num_queries * (num_heads // num_kv_heads), dtype_name(q.dtype)
    shape = batch, num_queries, num_heads, head_dim
    tile = _choose(dtype, shape, num_kv_heads, bound, may_share=num_splits is None)
    tile = replace(tile, is_fresh=fresh is not None)
    num_teams = max(1, sm_count() * tile.blocks_per_sm // num_kv_heads)
    num_blocks = (num_teams if tile.cluster == 1 else batch * tile.cluster) * num_kv_heads
    # decode_plan.cuh: two slots a team, or one a part
    slots = (batch * num_splits if num_splits else 2 * num_teams) * num_kv_heads
    scratch = workspace(slots * num_rows * (head_dim + 2))
    _KERNELS[tile.is_fresh].launch(
        tile.spec(dtype),
        (num_blocks if batch else 0,),
        (tile.threads,),
        tile.shared_bytes,
        pdl=pdl,
        **_page_maps(pages, dtype, tile.unit_keys),
        **_arrays(q, pages, out, lse),
        tree_masks=tree_mask,
        partial_o=scratch,
        partial_stats=scratch[slots * num_rows * head_dim :],
        counters=counters(max(num_teams, batch) * num_kv_heads),
        batch=batch,
        num_queries=num_queries,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        window=rule.window,
        num_splits=num_splits or 0,
        token_parts=token_parts,
        score_inner=rule.inner,
        score_factor=rule.factor,
        **({} if fresh is None else fresh.launch_arguments()),
    )


def _arrays(q: Any, pages: Pages, out: Any, lse: Any) -> dict[str, Any]:
    """Return the arrays, and how they lie."""
    q_strides, out_strides = element_strides(q), element_strides(out)
    return {
        "q": q,
        "k": pages.k,
        "v": pages.v,
        "block_tables": pages.block_tables,
        "context_lens": pages.context_lens,
        "out": out,
        "lse": lse,
        "q_stride_b": q_strides[0],
        "q_stride_t": q_strides[1],
        "q_stride_h": q_strides[2],
        "table_stride": element_strides(pages.block_tables)[0],
        "out_stride_b": out_strides[0],
        "out_stride_t": out_strides[1],
        "out_stride_h": out_strides[2],
        "max_keys": pages.block_tables.shape[1] * pages.k.shape[2] if pages.k.size else 0,
        "block_shift": pages.k.shape[2].bit_length() - 1,
        "num_blocks": pages.k.shape[0],
    }
