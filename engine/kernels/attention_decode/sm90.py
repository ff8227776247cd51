"""attention_decode on Hopper (`attention_decode_sm90.cu`): tile choice and launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from engine.dtypes import KV_CODE_DTYPES, dtype_name
from engine.kernels._attention import Pages, ScoreRule, are_aligned
from engine.kernels._chip import HOPPER_DTYPES, is_hopper, sm_count
from engine.kernels._elementwise import element_strides, named_strides
from engine.kernels._launch import Kernel
from engine.kernels._module import ModuleSpec
from engine.kernels._new_tokens import NO_NEW_TOKENS, NewTokens
from engine.kernels._new_tokens import PARAMS as _NEW_TOKEN_PARAMS
from engine.kernels._quantized_kv import kv_macros
from engine.kernels._tensor_map import tensor_map
from engine.kernels._workspace import counters, workspace

__all__ = [
    "HopperTile",
    "can_quantize",
    "choose_hopper_tile",
    "is_supported",
    "launch",
    "specs",
]

_PARAMS = (
    "k_map:tmap v_map:tmap q:ptr k_pages:ptr v_pages:ptr block_tables:ptr context_lens:ptr "
    "tree_masks:ptr sinks:ptr out:ptr lse:ptr partial_o:ptr partial_stats:ptr counters:ptr "
    "q_stride_b:i64 q_stride_t:i64 q_stride_h:i64 table_stride:i64 out_stride_b:i64 "
    "out_stride_t:i64 out_stride_h:i64 max_keys:i64 batch:i32 num_queries:i32 num_heads:i32 "
    "num_kv_heads:i32 group:i32 block_shift:i32 num_blocks:i32 page_rows:i32 head_rows:i32 "
    "token_rows:i32 row_elements:i32 window:i32 num_splits:i32 token_parts:i32 "
    f"score_inner:f32 score_factor:f32 {_NEW_TOKEN_PARAMS} k_scale:ptr v_scale:ptr "
    "codes:ptr scales:ptr"
)
_KERNEL = Kernel("attention_decode_sm90", _PARAMS, struct="AttentionDecodeSm90Params")


@dataclass(frozen=True)
class HopperTile:
    """Tile shape of a CTA: macro values of attention_decode_config_sm90.cuh.

    Attributes
    ----------
    head_dim : int
        D: 64 or 128.
    box_keys : int
        Tokens per TMA box. A tile is 8 boxes.
    stages : int
        Pipeline stages, each one tile of K and one of V.
    row_tiles : int
        Tiles of 16 query rows (token, head of the group).
    consumer_warps : int
        Warps that share a tile's keys: 4 or 8.
    cluster : int
        CTAs that share one sequence and key/value head; 1 means the persistent schedule.
    new_token : bool
        Whether the kernel normalises, rotates and stores the new token.
    ctas_per_sm : int
        Resident CTAs per multiprocessor: 1 or 2.
    kv_dtype : str
        Dtype of a quantized KV cache, a name in KV_CODE_DTYPES; "" if it is not quantized.
    strided_tokens : bool
        Whether a head's tokens in a page are not adjacent; always False without clusters.
    quantizes_out : bool
        Whether the result is e4m3 codes, with a scale per row.
    """

    head_dim: int
    box_keys: int
    stages: int
    row_tiles: int
    consumer_warps: int
    cluster: int = 1
    new_token: bool = False
    ctas_per_sm: int = 1
    kv_dtype: str = ""
    strided_tokens: bool = False
    quantizes_out: bool = False

    @property
    def rows(self) -> int:
        """Query rows per CTA: tokens * heads of a group."""
        return _ROWS * self.row_tiles

    @property
    def has_new_token_warps(self) -> bool:
        """Whether dedicated warps compute the new tokens."""
        return self.new_token and self.ctas_per_sm > 1 and self.cluster == 1

    @property
    def threads(self) -> int:
        """Threads per CTA: the consumer warps and the producer warp or warpgroup."""
        has_many_values = bool(self.kv_dtype) and self.ctas_per_sm == 2
        needs_registers = self.consumer_warps == 8 or self.new_token or has_many_values
        moves_registers = needs_registers and self.cluster == 1
        return 32 * (self.consumer_warps + (4 if moves_registers else 1))

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory, laid out in attention_decode_config_sm90.cuh."""
        padding = 0 if self.cluster == 1 or self.strided_tokens else 16
        page_row = self.head_dim * (1 if self.kv_dtype else 2)
        ring = 2 * self.stages * 8 * (self.box_keys * page_row + padding)
        probs = 2 * self.rows * (8 * self.box_keys * 2 + 16)
        exchange = 3 * self.rows * self.consumer_warps * 4
        in_registers = self.row_tiles * self.head_dim <= 256
        buffers = 1 if in_registers and not self.has_new_token_warps else 2
        queries = buffers * self.rows * (self.head_dim * 2 + 16)
        barriers = (4 * self.stages + 2 * buffers) * 8
        schedules = (self.consumer_warps + (3 if self.has_new_token_warps else 0)) * 64
        new_kv = buffers * (2 * page_row + 16) if self.new_token else 0
        inbound = self.rows * (self.head_dim * 4 + self.cluster * 8) + 16
        if self.cluster == 1 or self.row_tiles > 1:
            inbound = 0
        flag = 16
        return ring + probs + exchange + barriers + queries + flag + schedules + new_kv + inbound

    def can_compute_new_token(self, group: int) -> bool:
        """Tell whether there are enough threads for a new token: one per 16 values of a head."""
        heads = 32 * self.consumer_warps // (self.head_dim // 16)
        return self.row_tiles == 1 and group + 2 <= heads

    def spec(self, dtype: str) -> ModuleSpec:
        """Return the module compiled for this tile."""
        macros = {
            "HEAD_DIM": self.head_dim,
            "BOX_KEYS": self.box_keys,
            "STAGES": self.stages,
            "ROW_TILES": self.row_tiles,
            "CONSUMER_WARPS": self.consumer_warps,
            "CLUSTER": self.cluster,
            "NEW_TOKEN": int(self.new_token),
            "CTAS_PER_SM": self.ctas_per_sm,
            "STRIDED_TOKENS": int(self.strided_tokens),
            "SHARED_BYTES": self.shared_bytes,
        } | kv_macros(self.kv_dtype)
        macros |= {"QUANTIZES_OUT": 1} if self.quantizes_out else {}
        return ModuleSpec("attention_decode/attention_decode_sm90.cu", dtype, tuple(macros.items()))


# The tiles and constants below are tuned on an H200 (132 multiprocessors) with
# `python -m tests.bench attention_decode`; the figures are in docs/benchmarks/attention_decode.md.

# Tiles with one CTA per SM, by head dim, then by rows: 16, 32, 64.
_TILES = (
    HopperTile(64, box_keys=16, stages=6, row_tiles=1, consumer_warps=4),
    HopperTile(64, box_keys=16, stages=6, row_tiles=2, consumer_warps=4),
    HopperTile(64, box_keys=8, stages=8, row_tiles=4, consumer_warps=4),
    HopperTile(128, box_keys=16, stages=3, row_tiles=1, consumer_warps=8),
    HopperTile(128, box_keys=16, stages=3, row_tiles=2, consumer_warps=8),
    HopperTile(128, box_keys=16, stages=2, row_tiles=4, consumer_warps=8),
)
# For many sequences of up to 16 rows: while one of two CTAs per SM ends a sequence, the other one's
# copies keep memory busy.
_MANY_TILES = {
    64: HopperTile(64, box_keys=16, stages=3, row_tiles=1, consumer_warps=4, ctas_per_sm=2),
    128: HopperTile(128, box_keys=8, stages=3, row_tiles=1, consumer_warps=4, ctas_per_sm=2),
}
# Tiles for a quantized KV cache and up to 16 rows, with as many bytes in flight as above.
_CODE_TILES = (
    HopperTile(64, box_keys=16, stages=8, row_tiles=1, consumer_warps=4),
    HopperTile(128, box_keys=16, stages=6, row_tiles=1, consumer_warps=8),
)
_MANY_CODE_TILES = {
    64: replace(_CODE_TILES[0], stages=6, ctas_per_sm=2),
    128: replace(_CODE_TILES[1], box_keys=8, stages=5, consumer_warps=4, ctas_per_sm=2),
}
_CLUSTER = 8  # CTAs per cluster
_ROWS = 16  # query rows per row tile
# Clusters for few keys: tiles of 64 keys keep more of the CTAs busy. Two CTAs fit on an SM, or one
# beside a block of the product that follows.
_SHORT_TILES = {
    64: HopperTile(64, box_keys=8, stages=2, row_tiles=1, consumer_warps=4, cluster=_CLUSTER),
    128: HopperTile(128, box_keys=8, stages=2, row_tiles=1, consumer_warps=4, cluster=_CLUSTER),
}
_SHORT_CODE_TILES = {dim: replace(tile, stages=4) for dim, tile in _SHORT_TILES.items()}
# By kv_dtype: tiles by number of rows, tiles for many sequences of up to 16 rows, and tiles for
# few keys.
_CHOICES = {"": (_TILES, _MANY_TILES, _SHORT_TILES)} | {
    name: (
        tuple(replace(tile, kv_dtype=name) for tile in _CODE_TILES),
        {dim: replace(tile, kv_dtype=name) for dim, tile in _MANY_CODE_TILES.items()},
        {dim: replace(tile, kv_dtype=name) for dim, tile in _SHORT_CODE_TILES.items()},
    )
    for name in KV_CODE_DTYPES
}
# Maximum number of keys for which _SHORT_TILES are faster, by CTAs per cluster.
_SHORT_KEYS = {_CLUSTER: 2048, _CLUSTER // 2: 1024, _CLUSTER // 4: 1024}
# Maximum number of keys for clusters of four. Up to here they are as fast as clusters of eight even
# for a single sequence of eight heads, which leaves most of the chip idle.
_HALF_CLUSTER_KEYS = 4096


def choose_hopper_tile(
    dtype: str, head_dim: int, num_rows: int, kv_dtype: str = ""
) -> HopperTile | None:
    """Return the tile for `num_rows` = Q * H / K rows that share their keys, or None.

    None means that the Hopper kernel does not support the problem. `kv_dtype` names the dtype of a
    quantized KV cache.

    Examples
    --------
    >>> choose_hopper_tile("bfloat16", 128, 4).rows, choose_hopper_tile("float16", 80, 4)
    (16, None)
    """
    if dtype not in HOPPER_DTYPES:
        return None
    fits = (t for t in _CHOICES[kv_dtype][0] if t.head_dim == head_dim and t.rows >= num_rows)
    return next(fits, None)


def specs(
    dtype: str,
    *,
    head_dim: int | None = None,
    num_rows: int | None = None,
    kv_dtype: str = "",
    strided_tokens: bool = False,
    quantizes_out: bool = False,
) -> tuple[ModuleSpec, ...]:
    """Return the modules for one head dim and number of rows; None means all.

    `strided_tokens` selects the modules for pages in which a head's tokens are not adjacent;
    `quantizes_out` adds those that quantize the result.
    """
    all_tiles = _CHOICES[kv_dtype][0]
    dims = {t.head_dim for t in all_tiles} if head_dim is None else {head_dim}
    rows = {t.rows for t in all_tiles} if num_rows is None else {num_rows}
    tiles: dict[HopperTile, None] = {}
    for dim in sorted(dims):
        for n in sorted(rows):
            tile = choose_hopper_tile(dtype, dim, n, kv_dtype)
            if tile is not None:
                found = _variants(tile)
                coded = [replace(one, quantizes_out=True) for one in found if _can_quantize(one)]
                tiles |= dict.fromkeys([*found, *coded] if quantizes_out else found)
    return tuple(_with_layout(tile, strided_tokens).spec(dtype) for tile in tiles)


def _with_layout(tile: HopperTile, strided_tokens: bool) -> HopperTile:
    """Return the tile for pages with this layout: only clusters depend on it."""
    return replace(tile, strided_tokens=strided_tokens and tile.cluster > 1)


def _can_quantize(tile: HopperTile) -> bool:
    """Tell whether a variant with this tile quantizes the result: for many sequences only."""
    is_many = tile.cluster == 1 and tile.ctas_per_sm == 2
    return is_many and tile.head_dim == 128 and not tile.kv_dtype


def _variants(tile: HopperTile) -> list[HopperTile]:
    """Return every tile the launch may pick once the row count has selected `tile`: the number of
    keys and sequences decides among them."""
    many, short = _many_and_short(tile)
    found = [tile, replace(tile, cluster=_CLUSTER), replace(tile, cluster=_CLUSTER // 2)]
    for other in _TILES:  # chosen if clusters divide the query tokens
        if other.head_dim == tile.head_dim and other.row_tiles < tile.row_tiles:
            found.append(replace(other, cluster=_CLUSTER))
    if tile.row_tiles > 1:
        found.append(short)
    else:
        found += [many, short]
        found += [replace(short, cluster=n, ctas_per_sm=2) for n in (_CLUSTER // 2, _CLUSTER // 4)]
        found += [replace(each, new_token=True) for each in found]
    return found


def _many_and_short(tile: HopperTile) -> tuple[HopperTile, HopperTile]:
    """Return the tiles of up to 16 rows for many sequences and for few keys."""
    _, many, short = _CHOICES[tile.kv_dtype]
    return many[tile.head_dim], short[tile.head_dim]


def is_supported(q: Any, pages: Pages, out: Any, new_tokens: NewTokens | None = None) -> bool:
    """Tell whether the Hopper kernel supports the problem on the current device."""
    group = q.shape[2] // pages.k.shape[1]
    dtype = dtype_name(q.dtype)
    num_rows = q.shape[1] * group
    tile = choose_hopper_tile(dtype, q.shape[3], num_rows, pages.kv_dtype)
    return (
        tile is not None
        and is_hopper(dtype)
        and are_aligned(q, pages.k, pages.v, out)
        and pages.rows.is_supported
        and (new_tokens is None or (tile.can_compute_new_token(group) and new_tokens.are_vectors()))
    )


def _room(sm_count: int) -> int:
    """Return the number of clusters that are resident with one CTA per SM.

    15 on 132 multiprocessors (measured: a 16th runs after them). A cluster lies within one GPC, and
    some GPCs have fewer multiprocessors than two clusters need.
    """
    return sm_count // _CLUSTER - 1


def choose_cluster(num_pairs: int, sm_count: int, max_context_len: int) -> tuple[int, int]:
    """Return the CTAs per cluster and the CTAs per SM.

    `num_pairs` is the number of pairs (sequence, key/value head); sequences have up to
    `max_context_len` keys. (1, 1) means the persistent schedule, without clusters.

    Examples
    --------
    >>> [choose_cluster(n, sm_count=132, max_context_len=1000) for n in (15, 30, 60, 132, 133)]
    [(8, 1), (4, 1), (4, 2), (2, 2), (1, 1)]
    >>> [choose_cluster(n, sm_count=132, max_context_len=4096) for n in (15, 30, 60, 90, 91)]
    [(8, 1), (4, 1), (4, 2), (2, 2), (1, 1)]
    """
    room = _room(sm_count)
    if num_pairs <= room:
        return _CLUSTER, 1
    if max_context_len > _HALF_CLUSTER_KEYS:
        return 1, 1
    if num_pairs <= 4 * room:
        return _CLUSTER // 2, 1 if num_pairs <= 2 * room else 2
    # Clusters of two hold more pairs at once. With many keys the persistent schedule is as fast.
    cluster = _CLUSTER // 4
    if num_pairs <= (sm_count if max_context_len <= _SHORT_KEYS[cluster] else 6 * room):
        return cluster, 2
    return 1, 1


def choose_token_parts(
    batch: int, num_queries: int, num_heads: int, num_kv_heads: int, sm_count: int
) -> int:
    """Return the number of parts into which clusters divide a sequence's query tokens.

    A few sequences with many tokens leave most of the chip idle. Several clusters then divide
    the tokens: each has fewer rows, and they share reads of the keys through L2.

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
    dtype: str,
    shape: tuple[int, ...],
    num_kv_heads: int,
    max_context_len: int,
    *,
    kv_dtype: str,
    may_use_clusters: bool,
) -> HopperTile:
    """Choose the tile for q of `shape` and up to `max_context_len` keys.

    Without `may_use_clusters` the choice does not depend on the batch.
    """
    batch, num_queries, num_heads, head_dim = shape
    group = num_heads // num_kv_heads
    tile = choose_hopper_tile(dtype, head_dim, num_queries * group, kv_dtype)
    assert tile is not None
    many, short = _many_and_short(tile)
    # can_compute_new_token is required even without a new token, so that both give the same bits.
    if not may_use_clusters or batch * num_kv_heads > sm_count():
        return many if tile.row_tiles == 1 and many.can_compute_new_token(group) else tile
    cluster, ctas_per_sm = choose_cluster(batch * num_kv_heads, sm_count(), max_context_len)
    is_short = ctas_per_sm == 2 or max_context_len <= _SHORT_KEYS.get(cluster, 0)
    if is_short and tile.row_tiles == 1 and short.can_compute_new_token(group):
        return replace(short, cluster=cluster, ctas_per_sm=1 if cluster == _CLUSTER else 2)
    # Two CTAs of the large tiles do not fit on an SM.
    return tile if ctas_per_sm == 2 else replace(tile, cluster=cluster)


def _page_maps(pages: Pages, dtype: str, box_keys: int) -> dict[str, Any]:
    """Return the tensor maps of the pages, with boxes of `box_keys` tokens of one head."""
    head_dim = pages.k.shape[3]
    if pages.kv_dtype:
        dtype = "uint8"
    width = min(128 // pages.k.itemsize, head_dim)  # the swizzle spans at most 128 bytes
    chunks = head_dim // width
    tokens, rows = pages.rows.map_sizes(box_keys)
    token_stride, row_stride = pages.rows.map_strides
    k, v = (
        tensor_map(
            array.data.ptr,
            dtype,
            (width, tokens, chunks, rows),
            (token_stride, 128, row_stride),
            (width, tokens, chunks, 1),
            promote=0,
            swizzle=width * array.itemsize,
        )
        for array in (pages.k, pages.v)
    )
    return {"k_map": k, "v_map": v}


def _chosen(
    q: Any,
    pages: Pages,
    num_splits: int | None,
    max_context_len: int,
    new_tokens: NewTokens | None,
) -> tuple[HopperTile, int]:
    """Return the tile, and the number of parts into which clusters divide the query tokens."""
    (batch, num_queries, num_heads, head_dim) = q.shape
    num_kv_heads = pages.k.shape[1]
    parts = 1
    if num_splits is None:
        parts = choose_token_parts(batch, num_queries, num_heads, num_kv_heads, sm_count())
    tile = _choose(
        dtype_name(q.dtype),
        (batch * parts, num_queries // parts, num_heads, head_dim),
        num_kv_heads,
        max_context_len,
        kv_dtype=pages.kv_dtype,
        may_use_clusters=num_splits is None,
    )
    tile = _with_layout(tile, not pages.rows.has_adjacent_tokens)
    return replace(tile, new_token=new_tokens is not None), parts


def can_quantize(
    q: Any,
    pages: Pages,
    num_splits: int | None,
    max_context_len: int,
    new_tokens: NewTokens | None,
) -> bool:
    """Tell whether `launch` can quantize the result, of arrays that `is_supported` accepts."""
    return _can_quantize(_chosen(q, pages, num_splits, max_context_len, new_tokens)[0])


def launch(
    q: Any,
    pages: Pages,
    out: Any,
    lse: Any,
    rule: ScoreRule,
    num_splits: int | None,
    max_context_len: int,
    *,
    pdl: bool,
    tree_mask: Any = None,
    sinks: Any = None,
    new_tokens: NewTokens | None = None,
    scales: Any = None,
) -> None:
    """Launch on arrays that `is_supported` accepts; with `num_splits` None, CTAs share all tiles.

    With `scales` (B, Q, H), `out` is codes (B, Q, H, D), both contiguous: see `can_quantize`.
    """
    tile, token_parts = _chosen(q, pages, num_splits, max_context_len, new_tokens)
    tile = replace(tile, quantizes_out=scales is not None)
    batch = q.shape[0] * token_parts
    num_queries = q.shape[1] // token_parts
    (num_heads, head_dim) = q.shape[2:]
    num_kv_heads = pages.k.shape[1]
    group = num_heads // num_kv_heads
    num_rows = num_queries * group
    dtype = dtype_name(q.dtype)
    num_cta_groups = max(1, sm_count() * tile.ctas_per_sm // num_kv_heads)
    grid_rows = batch if tile.cluster > 1 else num_cta_groups * min(batch, 1)
    # SplitOf.partial in decode_scheduler.cuh: one per split, or two per CTA group.
    partials = (batch * num_splits if num_splits else 2 * num_cta_groups) * num_kv_heads
    scratch = workspace(partials * num_rows * (head_dim + 2))
    _KERNEL.launch(
        tile.spec(dtype),
        (tile.cluster * num_kv_heads, grid_rows),
        (tile.threads,),
        tile.shared_bytes,
        pdl=pdl,
        **_page_maps(pages, dtype, tile.box_keys),
        **_arrays(q, pages, out, lse),
        tree_masks=tree_mask,
        sinks=sinks,
        partial_o=scratch,
        partial_stats=scratch[partials * num_rows * head_dim :],
        counters=counters(max(num_cta_groups, batch) * num_kv_heads),
        batch=batch,
        num_queries=num_queries,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        group=group,
        window=rule.window_argument,
        num_splits=num_splits or 0,
        token_parts=token_parts,
        score_inner=rule.inner,
        score_factor=rule.factor,
        codes=out,
        scales=scales,
        **pages.scales,
        **(NO_NEW_TOKENS if new_tokens is None else new_tokens.launch_arguments()),
    )


def _arrays(q: Any, pages: Pages, out: Any, lse: Any) -> dict[str, Any]:
    """Return the kernel arguments that describe the arrays: pointers, strides and sizes."""
    return {
        **named_strides("bth", q=q, out=out),
        "q": q,
        "k_pages": pages.k,
        "v_pages": pages.v,
        "block_tables": pages.block_tables,
        "context_lens": pages.context_lens,
        "out": out,
        "lse": lse,
        "table_stride": element_strides(pages.block_tables)[0],
        "max_keys": pages.block_tables.shape[1] * pages.k.shape[2] if pages.k.size else 0,
        "block_shift": pages.k.shape[2].bit_length() - 1,
        "num_blocks": pages.k.shape[0],
        "row_elements": pages.rows.row_bytes // pages.k.itemsize,
        **pages.rows.launch_arguments(),
    }
