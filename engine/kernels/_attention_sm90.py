"""attention_prefill on Hopper: how `cuda_src/attention_prefill_sm90.cu` is cut up, and launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine import device, env
from engine.dtypes import dtype_name
from engine.kernels._attention import ScoreRule, are_aligned, element_strides
from engine.kernels._launch import Kernel, ceil_div, sm_count
from engine.kernels._module import ModuleSpec, current_architecture
from engine.kernels._tensor_map import tensor_map
from engine.kernels._workspace import counters, workspace

__all__ = ["HEAD_DIMS", "HopperTile", "choose_hopper_tile", "choose_splits", "is_hopper", "launch"]

_FILE = "attention_prefill_sm90.cu"
_PARAMS = (
    "q_map:tmap k_map:tmap v_map:tmap cu_seqlens_q:ptr cu_seqlens_k:ptr block_tables:ptr "
    "context_lens:ptr out:ptr lse:ptr partial:ptr counter:ptr table_stride:i64 out_stride_t:i64 "
    "out_stride_h:i64 max_keys:i64 total_q:i32 num_heads:i32 num_kv_heads:i32 head_dim:i32 "
    "box_keys:i32 block_shift:i32 num_blocks:i32 batch:i32 tiles_of_pair:i32 section:i32 "
    "splits:i32 causal:i32 window:i32 score_inner:f32 score_factor:f32"
)
_KERNELS = {
    False: Kernel("attention_prefill_sm90", _PARAMS),
    True: Kernel("attention_prefill_sm90_softcap", _PARAMS),
}
_COMBINE = Kernel(
    "attention_prefill_sm90_combine",
    "partial:ptr out:ptr lse:ptr out_stride_t:i64 out_stride_h:i64 rows:i64 num_heads:i32 "
    "head_dim:i32 splits:i32",
)

_L2_BYTES = 24 << 20  # of K and V that a section of the work may hold
_MAX_SPLITS = 16
_MIN_SPLIT_TILES = 4  # of keys: less is not worth the sum over splits


@dataclass(frozen=True)
class HopperTile:
    """How a block divides its work; what the macros of the CUDA file say.

    Attributes
    ----------
    head_dim : int
        Columns that are multiplied: D, padded.
    consumers : int
        Warpgroups of 64 rows.
    keys, stages, q_stages : int
        Keys of a tile, tiles of K and of V in shared memory, tiles of Q there.
    """

    head_dim: int
    consumers: int
    keys: int
    stages: int
    q_stages: int

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        """Threads of a block: a producer's warpgroup and the consumers'."""
        return 128 * (self.consumers + 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: tiles, aligned to 1024 bytes, work items and mbarriers."""
        row = 128 * ceil_div(self.head_dim, 64)
        tiles = self.q_stages * self.rows * row + 2 * self.stages * self.keys * row
        return 1024 + tiles + 32 * self.q_stages + 8 * (2 * self.q_stages + 4 * self.stages + 1)

    def spec(self, dtype: str) -> ModuleSpec:
        """Return the module compiled for this tile."""
        macros = {
            "HEAD_DIM": self.head_dim,
            "CONSUMERS": self.consumers,
            "TILE_KEYS": self.keys,
            "STAGES": self.stages,
            "Q_STAGES": self.q_stages,
            "SHARED_BYTES": self.shared_bytes,
        }
        return ModuleSpec(_FILE, dtype, tuple(macros.items()))


_TILES = (
    HopperTile(64, 2, 128, 3, 2),
    HopperTile(128, 2, 128, 2, 1),
)
HEAD_DIMS = tuple(tile.head_dim for tile in _TILES)


def choose_hopper_tile(dtype: str, head_dim: int) -> HopperTile | None:
    """Choose the tile for heads of `head_dim`, or None: then the portable kernel has to do.

    Examples
    --------
    >>> choose_hopper_tile("bfloat16", 128).keys
    128
    >>> choose_hopper_tile("float32", 128) is None
    True
    """
    if dtype == "float32" or head_dim % 8:
        return None
    return next((tile for tile in _TILES if tile.head_dim // 2 < head_dim <= tile.head_dim), None)


def choose_splits(tiles: int, key_tiles: int, processors: int) -> int:
    """Choose how many blocks share the keys of a tile, so that all processors have work.

    Examples
    --------
    >>> choose_splits(tiles=16, key_tiles=64, processors=132)
    8
    """
    if 2 * tiles > processors:
        return 1
    return max(1, min(processors // max(tiles, 1), key_tiles // _MIN_SPLIT_TILES, _MAX_SPLITS))


def is_hopper() -> bool:
    """Tell whether the current device runs, and the environment allows, kernels for Hopper."""
    if env.kernel_tier() != "auto":
        return False
    return current_architecture(device.cupy().cuda.runtime.getDevice()) == "sm_90a"


def fits(q: Any, keys: dict[str, Any], out: Any) -> bool:
    """Tell whether the Hopper kernel takes these arrays."""
    k, v = keys["k"], keys["v"]
    tile = choose_hopper_tile(dtype_name(q.dtype), q.shape[2])
    if tile is None or not (q.size and k.size):
        return False
    group = q.shape[1] // k.shape[1]
    return group <= tile.rows and are_aligned(q, k, v, out)


def launch(
    q: Any,
    keys: dict[str, Any],
    out: Any,
    lse: Any,
    causal: bool,
    rule: ScoreRule,
    max_q: int,
    tile: HopperTile | None = None,
    splits: int | None = None,
) -> None:
    """Launch the kernel, and the sum over splits where there are some."""
    (total_q, num_heads, head_dim), dtype = q.shape, dtype_name(q.dtype)
    tile = tile or choose_hopper_tile(dtype, head_dim)
    assert tile is not None
    k, v, tables = keys["k"], keys["v"], keys["block_tables"]
    is_paged, num_kv_heads = tables is not None, k.shape[1]
    batch, group = keys["cu_seqlens_q"].size - 1, num_heads // num_kv_heads
    tile_tokens = tile.rows // group
    tiles_of_pair = ceil_div(min(max_q, total_q), tile_tokens)
    max_keys = tables.shape[1] * k.shape[2] if is_paged else k.shape[0]
    longest = max_keys if is_paged else ceil_div(max_keys, max(batch, 1))
    tiles = batch * num_kv_heads * tiles_of_pair
    if tiles == 0:
        return
    if splits is None:
        splits = choose_splits(tiles, ceil_div(longest, tile.keys), sm_count())
    partial = workspace(splits * total_q * num_heads * (head_dim + 1)) if splits > 1 else None
    maps = _maps(q, k, v, dtype, tile, group, is_paged)
    _KERNELS[bool(rule.softcap)].launch(
        tile.spec(dtype),
        (min(tiles * splits, sm_count()),),
        (tile.threads,),
        tile.shared_bytes,
        **maps,
        cu_seqlens_q=keys["cu_seqlens_q"],
        cu_seqlens_k=keys["cu_seqlens_k"],
        block_tables=tables,
        context_lens=keys["context_lens"],
        out=out,
        lse=lse,
        partial=partial,
        counter=counters(),
        table_stride=element_strides(tables)[0] if is_paged else 0,
        out_stride_t=element_strides(out)[0],
        out_stride_h=element_strides(out)[1],
        max_keys=max_keys,
        total_q=total_q,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        box_keys=min(k.shape[2], tile.keys) if is_paged else tile.keys,
        block_shift=k.shape[2].bit_length() - 1 if is_paged else 0,
        num_blocks=k.shape[0] if is_paged else 0,
        batch=batch,
        tiles_of_pair=tiles_of_pair,
        section=min(max(1, _L2_BYTES // (4 * longest * head_dim)), batch * num_kv_heads),
        splits=splits,
        causal=int(causal),
        window=rule.window,
        score_inner=rule.inner,
        score_factor=rule.factor,
    )
    if splits > 1:
        _COMBINE.launch(
            tile.spec(dtype),
            (ceil_div(total_q * num_heads, 8),),
            (256,),
            partial=partial,
            out=out,
            lse=lse,
            out_stride_t=element_strides(out)[0],
            out_stride_h=element_strides(out)[1],
            rows=total_q * num_heads,
            num_heads=num_heads,
            head_dim=head_dim,
            splits=splits,
        )


def _maps(
    q: Any, k: Any, v: Any, dtype: str, tile: HopperTile, group: int, is_paged: bool
) -> dict[str, Any]:
    """Describe q as (Tq, K, group, D) and k, v as (rows, K or 1, D) to TMA."""
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
    for name, x in (("k_map", k), ("v_map", v)):
        if is_paged:
            row = head_dim * x.itemsize
            sizes, strides = (head_dim, 1, x.size // head_dim), (row, row)
            box = (64, 1, min(x.shape[2], tile.keys))
        else:
            sizes, strides = (head_dim, x.shape[1], x.shape[0]), (x.strides[1], x.strides[0])
            box = (64, 1, tile.keys)
        maps[name] = tensor_map(x.data.ptr, dtype, sizes, strides, box)
    return maps

