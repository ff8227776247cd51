"""attention_prefill_fp8 on Hopper (`attention_prefill_fp8_sm90.cu`): tile choice and launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.dtypes import dtype_name
from engine.kernels._attention import are_aligned, are_tensor_map_rows
from engine.kernels._chip import is_hopper, sm_count
from engine.kernels._elementwise import element_strides
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._tensor_map import tensor_map
from engine.kernels._workspace import counters

__all__ = ["Fp8Tile", "choose_fp8_tile", "is_supported", "launch", "specs"]

_KERNEL = Kernel(
    "attention_prefill_fp8_sm90",
    "q_map:tmap k_map:tmap v_map:tmap cu_seqlens_q:ptr cu_seqlens_k:ptr q_scale:ptr k_scale:ptr "
    "v_scale:ptr out:ptr lse:ptr counter:ptr out_stride_t:i64 out_stride_h:i64 max_keys:i64 "
    "total_q:i32 num_heads:i32 num_kv_heads:i32 head_dim:i32 num_pairs:i32 tiles_of_pair:i32 "
    "section:i32 causal:i32 factor:f32",
    struct="AttentionPrefillFp8Sm90Params",
)
_KEYS = 128
_Q_STAGES = 2
_L2_BYTES = 24 << 20  # maximum bytes of K and V per section, to stay in L2


@dataclass(frozen=True)
class Fp8Tile:
    """Tile shape of a CTA: macro values of the CUDA file.

    Attributes
    ----------
    head_dim : int
        Columns: D, padded.
    consumers : int
        Consumer warpgroups, of 64 query rows each.
    stages : int
        Pipeline stages of K, of V and of V's transpose.
    span : int
        Keys that a warpgroup processes at once: 64, or the whole tile of 128.
    turns : bool
        Whether the warpgroups compute P in turns.
    line_keys : int
        Bit w is set if P of the w-th 16 keys of a span is interpolated linearly
        (attention_prefill_fp8_softmax_sm90.cuh).
    sum_tiles : int
        Key tiles that the tensor cores accumulate before the sums are added to float32 sums in
        shared memory.
    """

    head_dim: int
    consumers: int
    stages: int
    span: int
    turns: bool
    line_keys: int
    sum_tiles: int

    @property
    def rows(self) -> int:
        """Query rows per CTA."""
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        """Threads per CTA: the producer warpgroup and the consumers."""
        return 128 * (self.consumers + 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: tiles aligned to 1024 bytes, work tiles and mbarriers."""
        keys = _KEYS * self.head_dim
        values = _KEYS * (self.head_dim + 8)
        tiles = _Q_STAGES * self.rows * self.head_dim
        tiles += self.stages * (2 * keys + values)
        if self.sum_tiles:
            tiles += 4 * self.rows * (self.head_dim + 8)
        barriers = 2 * _Q_STAGES + 6 * self.stages
        return 1024 + tiles + 64 * _Q_STAGES + 8 * barriers

    def spec(self, dtype: str) -> ModuleSpec:
        """Return the module compiled for this tile."""
        macros = {
            "HEAD_DIM": self.head_dim,
            "CONSUMERS": self.consumers,
            "STAGES": self.stages,
            "SPAN": self.span,
            "TURNS": int(self.turns),
            "LINE_KEYS": self.line_keys,
            "SUM_TILES": self.sum_tiles,
            "SHARED_BYTES": self.shared_bytes,
        }
        return ModuleSpec(
            "attention_prefill/attention_prefill_fp8_sm90.cu", dtype, tuple(macros.items())
        )


# One tile per head dim, whatever the lengths: the bits of a row must not depend on the other rows.
# To tune for another card, time `python -m tests.bench attention_prefill_fp8`.
# head_dim, consumer warpgroups, stages, span, turns, line_keys, sum_tiles
_TILES = (Fp8Tile(64, 3, 4, 128, False, 0x77, 4), Fp8Tile(128, 2, 2, 128, True, 0x55, 8))


def choose_fp8_tile(head_dim: int) -> Fp8Tile | None:
    """Return the tile for heads of `head_dim`, or None if the Hopper kernel has none.

    Examples
    --------
    >>> choose_fp8_tile(80).head_dim, choose_fp8_tile(72)
    (128, None)
    """
    if head_dim % 16:
        return None
    return next((tile for tile in _TILES if head_dim <= tile.head_dim), None)


def specs(dtype: str, *, head_dim: int | None = None) -> tuple[ModuleSpec, ...]:
    """Return the modules for results of `dtype`, for one head dim or all."""
    tiles = _TILES if head_dim is None else (choose_fp8_tile(head_dim),)
    return tuple(tile.spec(dtype) for tile in tiles if tile is not None)


def is_supported(q: Any, k: Any, v: Any, out: Any) -> bool:
    """Tell whether the Hopper kernel supports the problem on the current device."""
    tile = choose_fp8_tile(q.shape[2])
    return (
        tile is not None
        and is_hopper(dtype_name(out.dtype))
        and q.size > 0
        and k.size > 0
        and q.shape[1] // k.shape[1] <= tile.rows
        and are_tensor_map_rows(q, k, v)
        and are_aligned(out)
    )


def launch(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dtype: str,
    max_q: int,
    *,
    tile: Fp8Tile | None = None,
    **shared: Any,
) -> None:
    """Launch on arrays that `is_supported` accepts; `shared` are the arguments of both kernels."""
    total_q, num_heads, head_dim = q.shape
    tile = tile or choose_fp8_tile(head_dim)
    assert tile is not None
    max_keys, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    batch = shared["cu_seqlens_q"].size - 1
    pairs = batch * num_kv_heads
    tiles_of_pair = ceil_div(min(max_q, total_q), tile.rows // group)
    longest = ceil_div(max_keys, max(1, batch))
    strides = element_strides(out)
    _KERNEL.launch(
        tile.spec(dtype),
        (min(pairs * tiles_of_pair, sm_count()),),
        (tile.threads,),
        tile.shared_bytes,
        q_map=_query_map(q, tile, group),
        k_map=_key_map(k, tile),
        v_map=_key_map(v, tile),
        out=out,
        lse=lse,
        counter=counters(),
        out_stride_t=strides[0],
        out_stride_h=strides[1],
        max_keys=max_keys,
        total_q=total_q,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_pairs=pairs,
        tiles_of_pair=tiles_of_pair,
        section=min(max(1, _L2_BYTES // (2 * longest * head_dim)), max(pairs, 1)),
        **shared,
    )


def _query_map(q: Any, tile: Fp8Tile, group: int) -> Any:
    """Return the tensor map of q as (Tq, K, group, D)."""
    total_q, num_heads, head_dim = q.shape
    q_t, q_h, _ = q.strides
    sizes = (head_dim, group, num_heads // group, total_q)
    box = (tile.head_dim, group, 1, tile.rows // group)
    return tensor_map(
        q.data.ptr, "uint8", sizes, (q_h, q_h * group, q_t), box, swizzle=tile.head_dim
    )


def _key_map(x: Any, tile: Fp8Tile) -> Any:
    """Return the tensor map of k or v as (Tk, K, D)."""
    sizes = (x.shape[2], x.shape[1], x.shape[0])
    strides = (x.strides[1], x.strides[0])
    box = (tile.head_dim, 1, _KEYS)
    return tensor_map(x.data.ptr, "uint8", sizes, strides, box, swizzle=tile.head_dim)
