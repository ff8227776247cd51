"""attention_prefill on Hopper (`attention_prefill_sm90.cu`): tile choice and launch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from engine.dtypes import KV_CODE_DTYPES, dtype_name
from engine.kernels._attention import ScoreRule, are_aligned, are_tensor_map_rows
from engine.kernels._attention_pattern import PARAMS, BlockSparse, Pattern, arguments
from engine.kernels._chip import HOPPER, HOPPER_DTYPES, is_hopper, sm_count
from engine.kernels._elementwise import element_strides
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._pages import PageRows
from engine.kernels._quantized_kv import kv_dtype_of, kv_macros
from engine.kernels._tensor_map import tensor_map
from engine.kernels._workspace import counters, workspace
from engine.kernels.attention_prefill.work import (
    choose_cut,
    choose_num_splits,
    choose_section,
    cut_into_tiles,
)

__all__ = [
    "FEW_ROWS",
    "HopperTile",
    "choose_hopper_tile",
    "is_supported",
    "launch",
    "lengths_of",
    "maps_of",
    "specs",
    "tiles_of",
]

_PARAMS = (
    "q_map:tmap k_map:tmap v_map:tmap cu_seqlens_q:ptr cu_seqlens_k:ptr block_tables:ptr "
    "context_lens:ptr sinks:ptr out:ptr lse:ptr partial:ptr counter:ptr table_stride:i64 "
    "out_stride_t:i64 out_stride_h:i64 max_keys:i64 total_q:i32 num_heads:i32 num_kv_heads:i32 "
    "group:i32 value_dim:i32 tile_tokens:i32 q_bytes:i32 box_keys:i32 block_shift:i32 "
    "num_blocks:i32 page_rows:i32 head_rows:i32 token_rows:i32 num_pairs:i32 tiles_of_pair:i32 "
    "long_tiles:i32 short_tokens:i32 total:i32 "
    "section:i32 splits:i32 causal:i32 window:i32 score_inner:f32 score_factor:f32"
)
_KERNELS = {  # keyed by whether scores have a soft cap
    softcap: Kernel(
        "attention_prefill_sm90" + "_softcap" * softcap,
        _PARAMS + PARAMS + " k_scale:ptr v_scale:ptr",
        struct="AttentionPrefillSm90Params",
    )
    for softcap in (False, True)
}
_COMBINE = Kernel(
    "attention_prefill_sm90_combine",
    "partial:ptr sinks:ptr out:ptr lse:ptr out_stride_t:i64 out_stride_h:i64 rows:i64 "
    "num_heads:i32 value_dim:i32 splits:i32",
)

_CODE_STAGES = 4  # kCodeStages in CUDA
FEW_ROWS = 16
_WHERE = ("cu_seqlens_q", "cu_seqlens_k", "block_tables", "context_lens", "k_scale", "v_scale")


@dataclass(frozen=True)
class HopperTile:
    """Tile shape of a CTA: macro values of the CUDA file.

    Attributes
    ----------
    head_dim : int
        Columns of Q and K: D, padded.
    consumers : int
        Consumer warpgroups, of 64 query rows each.
    keys, stages, q_stages : int
        Keys per tile, pipeline stages of K and V, pipeline stages of Q.
    is_patterned : bool
        Whether the module supports patterns.
    kv_dtype : str
        Dtype of a quantized KV cache, a name in KV_CODE_DTYPES; "" if it is not quantized.
    narrow_value_dim : int
        Columns of V, padded, if they are fewer than K's; else 0.
    is_few : bool
        Whether a CTA has 16 query rows, which one warpgroup shares.
    """

    head_dim: int
    consumers: int
    keys: int
    stages: int
    q_stages: int
    is_patterned: bool = False
    kv_dtype: str = ""
    narrow_value_dim: int = 0
    is_few: bool = False

    @property
    def value_dim(self) -> int:
        """Columns of V and of the result, padded."""
        return self.narrow_value_dim or self.head_dim

    @property
    def rows(self) -> int:
        """Query rows per CTA."""
        return FEW_ROWS if self.is_few else 64 * self.consumers

    @property
    def threads(self) -> int:
        """Threads per CTA: the producer warpgroup and the consumers."""
        return 128 * (self.consumers + 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: tiles aligned to 1024 bytes, work tiles, mbarriers, key tiles."""
        row, value_row = (128 * ceil_div(dim, 64) for dim in (self.head_dim, self.value_dim))
        tiles = self.q_stages * self.rows * row + self.stages * self.keys * (row + value_row)
        boxes = self.keys // 16  # TMA boxes per tile with the smallest pages
        barriers = 3 * self.q_stages + 5 * self.stages + 1
        codes = _CODE_STAGES * (self.keys * self.head_dim + 20) if self.kv_dtype else 0
        others = 64 * self.q_stages + 8 * barriers + 4 * self.stages * (1 + boxes)
        return 1024 + tiles + others + codes

    @property
    def blocks(self) -> int:
        """CTAs that share a multiprocessor."""
        return 2 if self.is_few and self.shared_bytes <= HOPPER.shared_per_block(2) else 1

    def few_rows(self, *, is_alone: bool) -> HopperTile:
        """Return the tile for few rows whose results have the bits of this one's.

        It has up to four stages of K and V. With `is_alone` they fill a multiprocessor; otherwise
        two CTAs share one, if two stages of each leave room.
        """
        tiles = [
            replace(self, consumers=1, stages=stages, q_stages=2, is_few=True)
            for stages in (4, 3, 2)
        ]
        fits = [tile for tile in tiles if tile.shared_bytes <= HOPPER.shared_bytes]
        shares = [] if is_alone else [tile for tile in tiles if tile.blocks == 2]
        return (shares or fits)[0]

    def spec(self, dtype: str) -> ModuleSpec:
        """Return the module compiled for this tile."""
        macros = {
            "HEAD_DIM": self.head_dim,
            "VALUE_DIM": self.value_dim,
            "CONSUMERS": self.consumers,
            "TILE_KEYS": self.keys,
            "STAGES": self.stages,
            "Q_STAGES": self.q_stages,
            "SHARED_BYTES": self.shared_bytes,
            "PATTERN": int(self.is_patterned),
        } | kv_macros(self.kv_dtype)
        if self.is_few:
            macros["FEW_ROWS"] = 1
        return ModuleSpec(
            "attention_prefill/attention_prefill_sm90.cu", dtype, tuple(macros.items())
        )


# One tile per head dim, whatever the lengths: the bits of a row must not depend on the other rows
# (`few_rows` has the same bits). Scores, P and O of a tile take keys / 2 + keys / 4 + value_dim / 2
# registers of a consumer thread, which has 160 with three warpgroups, else 232. To tune for another
# card: `python -m tests.bench attention_prefill`.
_TILES = (
    HopperTile(64, consumers=3, keys=128, stages=4, q_stages=2),
    HopperTile(96, consumers=3, keys=112, stages=2, q_stages=1),
    HopperTile(128, consumers=3, keys=80, stages=3, q_stages=1),
    HopperTile(192, consumers=3, keys=80, stages=3, q_stages=1, narrow_value_dim=128),
    HopperTile(192, consumers=2, keys=112, stages=2, q_stages=1),
    HopperTile(256, consumers=2, keys=80, stages=2, q_stages=1),
)

# Tiles for a quantized KV cache. The producer warps need more registers and leave the consumers
# 152. TMA cannot swizzle rows of other head dims.
_CODE_TILES = {
    name: (
        HopperTile(64, consumers=3, keys=112, stages=4, q_stages=2, kv_dtype=name),
        HopperTile(128, consumers=3, keys=80, stages=3, q_stages=1, kv_dtype=name),
    )
    for name in KV_CODE_DTYPES
}

# Tiles for patterns: two warpgroups, since their rows mostly lie in one block of the pattern.
_PATTERNED = (
    HopperTile(64, consumers=2, keys=128, stages=4, q_stages=2, is_patterned=True),
    HopperTile(96, consumers=2, keys=128, stages=2, q_stages=1, is_patterned=True),
    HopperTile(128, consumers=2, keys=128, stages=2, q_stages=1, is_patterned=True),
    HopperTile(192, consumers=2, keys=64, stages=3, q_stages=1, is_patterned=True),
    HopperTile(256, consumers=2, keys=64, stages=2, q_stages=1, is_patterned=True),
)
# Tiles for pattern blocks that are not multiples of 128 keys: smaller tiles read fewer hidden keys,
# and 64 divides more block sizes. Heads of up to 64 keep tiles of 128 keys, which were faster with
# blocks of 128; for heads of 96 neither was measured.
_SMALL_BLOCKS = (
    *_PATTERNED[:2],
    HopperTile(128, consumers=2, keys=64, stages=4, q_stages=1, is_patterned=True),
    *_PATTERNED[3:],
)


def choose_hopper_tile(
    dtype: str,
    head_dim: int,
    pattern: Pattern | None = None,
    kv_dtype: str = "",
    value_dim: int | None = None,
) -> HopperTile | None:
    """Return the tile for keys of `head_dim` and values of `value_dim`, by default as wide.

    None if the Hopper kernel has no such tile.

    Examples
    --------
    >>> choose_hopper_tile("bfloat16", 80).head_dim, choose_hopper_tile("float32", 64)
    (96, None)
    >>> [choose_hopper_tile("bfloat16", 192, value_dim=n).value_dim for n in (128, 160)]
    [128, 192]
    """
    value_dim = head_dim if value_dim is None else value_dim
    if dtype not in HOPPER_DTYPES or head_dim % 8 or head_dim <= 32 or value_dim % 8:
        return None
    if kv_dtype:
        found = (tile for tile in _CODE_TILES[kv_dtype] if head_dim == tile.head_dim)
        return next(found, None) if pattern is None else None
    tiles = _TILES if pattern is None else _PATTERNED
    if isinstance(pattern, BlockSparse) and pattern.block_k % 128:
        tiles = _SMALL_BLOCKS
    fits = (tile for tile in tiles if head_dim <= tile.head_dim and value_dim <= tile.value_dim)
    return next(fits, None)


def tiles_of(
    dtype: str, head_dim: int | None, *, patterns: bool = False, kv_dtype: str = ""
) -> tuple[HopperTile, ...]:
    """Return the tiles for one head dim or all; with `patterns` also those for patterns."""
    tiles = _TILES + tuple(dict.fromkeys(_PATTERNED + _SMALL_BLOCKS)) * patterns
    if kv_dtype:
        tiles = _CODE_TILES[kv_dtype]
    if head_dim is None:
        return tiles
    wanted = choose_hopper_tile(dtype, head_dim, kv_dtype=kv_dtype)
    return tuple(t for t in tiles if wanted is not None and t.head_dim == wanted.head_dim)


def specs(
    dtype: str,
    *,
    head_dim: int | None = None,
    patterns: bool = False,
    kv_dtype: str = "",
    deterministic: bool = False,
) -> tuple[ModuleSpec, ...]:
    """Return the modules for one head dim or all.

    `patterns` adds those for patterns, `deterministic` those for few rows with one split.
    """
    if dtype not in HOPPER_DTYPES:
        return ()
    tiles = tiles_of(dtype, head_dim, patterns=patterns, kv_dtype=kv_dtype)
    if deterministic:
        plain = [tile for tile in tiles if not tile.is_patterned]
        # Alone, few rows without codes take few_tokens.py.
        kinds = (False, True) if kv_dtype else (False,)
        few = (tile.few_rows(is_alone=alone) for tile in plain for alone in kinds)
        tiles += tuple(dict.fromkeys(few))
    return tuple(tile.spec(dtype) for tile in tiles)


def is_supported(q: Any, k: Any, v: Any, out: Any, pattern: Pattern | None = None) -> bool:
    """Tell whether the Hopper kernel supports the problem on the current device."""
    kv_dtype = kv_dtype_of(k.dtype)
    value_dim = out.shape[2]
    tile = choose_hopper_tile(dtype_name(q.dtype), q.shape[2], pattern, kv_dtype, value_dim)
    return (
        tile is not None
        and is_hopper(dtype_name(q.dtype))
        and q.size > 0
        and (k.ndim == 3 or PageRows.of(k).is_supported)
        and k.size > 0
        and q.shape[1] // k.shape[1] <= tile.rows
        and are_tensor_map_rows(q, k, v)
        and are_aligned(out)
    )


def launch(
    q: Any,
    keys: dict[str, Any],
    out: Any,
    lse: Any,
    causal: bool,
    rule: ScoreRule,
    max_q: int,
    num_splits: int | None = None,
    pattern: Pattern | None = None,
    sinks: Any = None,
) -> None:
    """Launch on arrays that `is_supported` accepts; `num_splits` None fills the device."""
    (total_q, num_heads, head_dim) = q.shape
    value_dim = out.shape[2]
    dtype = dtype_name(q.dtype)
    kv_dtype = kv_dtype_of(keys["k"].dtype)
    tile = choose_hopper_tile(dtype, head_dim, pattern, kv_dtype, value_dim)
    assert tile is not None
    pairs = (keys["cu_seqlens_q"].size - 1) * keys["k"].shape[1]
    group = num_heads // keys["k"].shape[1]
    tokens = min(max_q, total_q)
    if num_splits == 1 and pattern is None and tokens * group <= FEW_ROWS:
        tile = tile.few_rows(is_alone=pairs <= sm_count())
    spec = tile.spec(dtype)
    longest = _longest(keys)
    tile_tokens = tile.rows // group
    key_tiles = ceil_div(longest, tile.keys)
    tiles = pairs * ceil_div(tokens, tile_tokens)
    splits = min(num_splits or choose_num_splits(tiles, key_tiles, sm_count()), key_tiles)
    can_cut = not causal and splits == 1 and not tile.is_few  # work tiles take the same time
    cut = choose_cut(tokens, tile_tokens, pairs, tile.consumers, sm_count()) if can_cut else None
    work = cut_into_tiles(tokens, tile_tokens, pairs, splits, cut)
    rows = total_q * num_heads
    partial = workspace(splits * rows * (value_dim + 1)) if splits > 1 else None
    strides = element_strides(out)
    lengths = lengths_of(keys, tile)
    shared = {
        "out": out,
        "lse": lse,
        "partial": partial,
        "out_stride_t": strides[0],
        "out_stride_h": strides[1],
        "num_heads": num_heads,
        "value_dim": value_dim,
        "splits": splits,
    }
    _KERNELS[bool(rule.softcap)].launch(
        spec,
        (min(work["total"], tile.blocks * sm_count()),),
        (tile.threads,),
        tile.shared_bytes,
        pdl=tile.is_few,
        **maps_of(q, keys, dtype, tile, group),
        **lengths,
        **shared,
        sinks=sinks if splits == 1 else None,  # splits add each sink once, in _COMBINE
        counter=counters(),
        total_q=total_q,
        group=group,
        **work,
        q_bytes=tile_tokens * group * 128 * ceil_div(tile.head_dim, 64),
        section=choose_section(pairs, 2 * longest * (head_dim + value_dim)),
        causal=int(causal),
        window=rule.window if rule.window < lengths["max_keys"] else 0,  # 0 if it hides nothing
        score_inner=rule.inner,
        score_factor=rule.factor,
        **arguments(pattern),
    )
    if splits > 1:
        _COMBINE.launch(spec, (ceil_div(rows, 8),), (256,), **shared, sinks=sinks, rows=rows)


def _longest(keys: dict[str, Any]) -> int:
    """Estimate the keys of the longest sequence: the upper bound if paged, the mean if dense."""
    k = keys["k"]
    tables = keys["block_tables"]
    batch = max(1, keys["cu_seqlens_q"].size - 1)
    bound = ceil_div(k.shape[0], batch) if tables is None else tables.shape[1] * k.shape[2]
    return max(1, int(bound))


def lengths_of(keys: dict[str, Any], tile: HopperTile) -> dict[str, Any]:
    """Return the kernel arguments that locate each sequence's keys."""
    k = keys["k"]
    tables = keys["block_tables"]
    where = {name: keys[name] for name in _WHERE}
    if tables is None:
        return where | {
            "table_stride": 0,
            "max_keys": k.shape[0],
            "num_kv_heads": k.shape[1],
            "box_keys": tile.keys,
            "block_shift": 0,
            "num_blocks": 0,
            "page_rows": 0,
            "head_rows": 0,
            "token_rows": 0,
        }
    num_blocks, num_kv_heads, block_size, _ = k.shape
    return where | {
        "table_stride": element_strides(tables)[0],
        "max_keys": tables.shape[1] * block_size,
        "num_kv_heads": num_kv_heads,
        "box_keys": _box_keys(block_size, tile),
        "block_shift": block_size.bit_length() - 1,
        "num_blocks": num_blocks,
        **PageRows.of(k).launch_arguments(),
    }


def _box_keys(block_size: int, tile: HopperTile) -> int:
    """Return the keys per TMA box: a divisor of both the page and the tile."""
    return math.gcd(block_size, tile.keys)


def maps_of(
    q: Any,
    keys: dict[str, Any],
    dtype: str,
    tile: HopperTile,
    group: int,
    value_columns: int = 64,
) -> dict[str, Any]:
    """Return the tensor maps of q as (Tq, K, group, D) and of k, v: pages, or (Tk, K, D).

    A box of v has `value_columns` columns, and swizzles as many bytes as a row of it has.
    """
    total_q, num_heads, head_dim = q.shape
    q_t, q_h, _ = q.strides
    q_map = tensor_map(
        q.data.ptr,
        dtype,
        (head_dim, group, num_heads // group, total_q),
        (q_h, q_h * group, q_t),
        (64, group, 1, tile.rows // group),
    )
    maps = {"q_map": q_map}
    for name, columns in (("k", 64), ("v", value_columns)):
        x = keys[name]
        if keys["block_tables"] is not None:
            maps[f"{name}_map"] = _page_map(x, dtype, tile, columns)
            continue
        sizes = (x.shape[2], x.shape[1], x.shape[0])
        strides = (x.strides[1], x.strides[0])
        box = (columns, 1, tile.keys)
        maps[f"{name}_map"] = tensor_map(
            x.data.ptr, dtype, sizes, strides, box, swizzle=2 * columns
        )
    return maps


def _page_map(pages: Any, dtype: str, tile: HopperTile, columns: int) -> Any:
    """Return the tensor map of pages as (page rows, box_keys, D)."""
    head_dim = pages.shape[3]
    rows = PageRows.of(pages)
    box_keys = _box_keys(pages.shape[2], tile)
    sizes = (head_dim, *rows.map_sizes(box_keys))
    if tile.kv_dtype:
        box = (head_dim, box_keys, 1)
        strides = rows.map_strides
        return tensor_map(pages.data.ptr, "uint8", sizes, strides, box, swizzle=head_dim)
    box = (columns, box_keys, 1)
    return tensor_map(pages.data.ptr, dtype, sizes, rows.map_strides, box, swizzle=2 * columns)
