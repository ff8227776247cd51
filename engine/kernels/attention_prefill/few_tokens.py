"""attention_prefill for few tokens on Hopper (`attention_prefill_few_tokens_sm90.cu`).

With one split, up to 16 rows of a sequence take a CTA or several, if the device has enough
multiprocessors. The results have the bits of `sm90.launch`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from engine.dtypes import dtype_name
from engine.kernels._attention import ScoreRule
from engine.kernels._chip import HOPPER, HOPPER_DTYPES, sm_count
from engine.kernels._elementwise import element_strides
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._memory import overlaps
from engine.kernels._module import ModuleSpec
from engine.kernels._new_tokens import NO_NEW_TOKENS, NewTokens
from engine.kernels._new_tokens import PARAMS as NEW_TOKENS_PARAMS
from engine.kernels._pages import PageRows
from engine.kernels.attention_prefill.sm90 import (
    FEW_ROWS,
    HopperTile,
    choose_hopper_tile,
    lengths_of,
    maps_of,
    tiles_of,
)

__all__ = ["FewTokensTile", "can_fuse", "choose_tile", "launch", "new_token_specs", "specs"]

_PARAMS = (
    "q_map:tmap k_map:tmap v_map:tmap cu_seqlens_q:ptr cu_seqlens_k:ptr block_tables:ptr "
    "context_lens:ptr sinks:ptr out:ptr lse:ptr table_stride:i64 out_stride_t:i64 "
    "out_stride_h:i64 max_keys:i64 total_q:i32 num_heads:i32 num_kv_heads:i32 group:i32 "
    "value_dim:i32 tile_tokens:i32 q_bytes:i32 box_keys:i32 block_shift:i32 num_blocks:i32 "
    "page_rows:i32 head_rows:i32 token_rows:i32 num_pairs:i32 stages:i32 value_columns:i32 "
    "value_chunk:i32 causal:i32 window:i32 is_early:i32 score_inner:f32 score_factor:f32 "
    "new_q:ptr k_pages:ptr v_pages:ptr q_stride_b:i64 q_stride_h:i64 row_elements:i32 "
) + NEW_TOKENS_PARAMS
_NO_NEW_TOKENS: dict[str, Any] = NO_NEW_TOKENS | {
    **dict.fromkeys(("new_q", "k_pages", "v_pages")),
    **dict.fromkeys(("q_stride_b", "q_stride_h", "row_elements"), 0),
}
_KERNELS = {  # keyed by whether scores have a soft cap
    softcap: Kernel(
        "attention_prefill_few_tokens_sm90" + "_softcap" * softcap,
        _PARAMS,
        struct="AttentionPrefillFewTokensSm90Params",
    )
    for softcap in (False, True)
}

_PARTS = (4, 2, 1)
_NEW_TOKEN_DIMS = (64, 128)  # head dims of new tokens: 8 values a lane, twice
# See attention_prefill_few_tokens_smem_sm90.cuh.
_LOADER_WARPS = 4
_COLUMNS = 32
_PROB_STAGES = 8
_TOP_STAGES = 32


@dataclass(frozen=True)
class FewTokensTile:
    """How CTAs share a pair of sequence and key/value head.

    Attributes
    ----------
    tile : HopperTile
        The tile of many rows, for head dims and keys per tile.
    parts : int
        CTAs. Each loads all keys, and its columns of V.
    new_token : bool
        Whether norm, rotation and store of the newest tokens are fused.
    """

    tile: HopperTile
    parts: int
    new_token: bool = False

    @property
    def is_supported(self) -> bool:
        """Whether each CTA has whole boxes of columns, or one CTA has all."""
        columns = self.value_columns
        return self.parts == 1 or columns == _COLUMNS or columns % 64 == 0

    @property
    def value_columns(self) -> int:
        """Columns of V per CTA."""
        return self.tile.value_dim // self.parts

    @property
    def value_chunk(self) -> int:
        """Columns of a TMA box of V."""
        return min(64, self.value_columns)

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 32 * (_LOADER_WARPS + _score_warps(self.tile) + self.value_columns // _COLUMNS)

    @property
    def stages(self) -> int:
        """Pipeline stages of K, and of V: a power of two.

        So a stage has the same loader and the same score warps in every round.
        """
        free = HOPPER.shared_bytes - self.fixed_bytes(self.tile)
        count = min(free // (self._key_bytes + self._value_bytes), _score_warps(self.tile))
        assert count >= 2, "loaders advance by two stages"
        return 1 << count.bit_length() - 1

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory."""
        stages = self.stages * (self._key_bytes + self._value_bytes)
        return self.fixed_bytes(self.tile) + stages

    @property
    def _key_bytes(self) -> int:
        return self.tile.keys * 128 * ceil_div(self.tile.head_dim, 64)

    @property
    def _value_bytes(self) -> int:
        chunk = self.value_chunk
        return self.tile.keys * 2 * chunk * ceil_div(self.value_columns, chunk)

    @staticmethod
    def fixed_bytes(tile: HopperTile) -> int:
        """Shared memory besides the stages: Q, P, maxima, mbarriers, alignment to 1024 bytes."""
        q = FEW_ROWS * 128 * ceil_div(tile.head_dim, 64)
        probs = _PROB_STAGES * ((tile.keys // 16 + 1) * 512 + 64)
        rings = 2 * _TOP_STAGES + _PROB_STAGES + 4 * _score_warps(tile)
        return 1024 + q + probs + 64 * _TOP_STAGES + 8 * (1 + rings)

    def spec(self, dtype: str) -> ModuleSpec:
        """Return the module, whatever the number of parts."""
        macros = {
            "HEAD_DIM": self.tile.head_dim,
            "VALUE_DIM": self.tile.value_dim,
            "TILE_KEYS": self.tile.keys,
            "FIXED_BYTES": self.fixed_bytes(self.tile),
            **({"NEW_TOKEN": 1} if self.new_token else {}),
        }
        file = "attention_prefill/attention_prefill_few_tokens_sm90.cu"
        return ModuleSpec(file, dtype, tuple(macros.items()))


def _score_warps(tile: HopperTile) -> int:
    """Return kScoreWarps, also the maximum of the stages of K."""
    return 8 if tile.keys <= 80 and tile.value_dim <= 128 else 4


def specs(dtype: str, *, head_dim: int | None = None) -> tuple[ModuleSpec, ...]:
    """Return the modules for one head dim or all."""
    if dtype not in HOPPER_DTYPES:
        return ()
    return tuple(FewTokensTile(tile, 1).spec(dtype) for tile in tiles_of(dtype, head_dim))


def new_token_specs(dtype: str, *, head_dim: int | None = None) -> tuple[ModuleSpec, ...]:
    """Return the modules with fused norm, rotation and store, for one head dim or all."""
    if dtype not in HOPPER_DTYPES:
        return ()
    tiles = (t for t in tiles_of(dtype, head_dim) if t.head_dim in _NEW_TOKEN_DIMS)
    return tuple(FewTokensTile(tile, 1, new_token=True).spec(dtype) for tile in tiles)


def choose_tile(q: Any, keys: dict[str, Any], out: Any, max_q: int) -> FewTokensTile | None:
    """Choose as many parts as fit on half of the multiprocessors.

    None if there are more than 16 rows, or more pairs than multiprocessors. With more parts,
    launches that overlap waited for room and took up to 40 % longer.

    The arrays are those that `sm90.is_supported` accepts, without codes.
    """
    dtype = dtype_name(q.dtype)
    (total_q, num_heads, head_dim) = q.shape
    num_kv_heads = keys["k"].shape[1]
    pairs = (keys["cu_seqlens_q"].size - 1) * num_kv_heads
    if min(max_q, total_q) * (num_heads // num_kv_heads) > FEW_ROWS or pairs > sm_count():
        return None
    tile = choose_hopper_tile(dtype, head_dim, value_dim=out.shape[2])
    assert tile is not None
    return next(
        found
        for found in (FewTokensTile(tile, parts) for parts in _PARTS)
        if found.parts == 1
        or (
            found.is_supported
            and 2 * pairs * found.parts <= sm_count()
            # Every part reads whole queries, and writes its columns when it is done.
            and not overlaps(q, out)
        )
    )


def can_fuse(q: Any, new_tokens: NewTokens) -> bool:
    """Tell whether the kernel can normalise, rotate and store new tokens: q is (B, H, D)."""
    return q.shape[2] in _NEW_TOKEN_DIMS and new_tokens.are_vectors()


def launch(
    q: Any,
    keys: dict[str, Any],
    out: Any,
    lse: Any,
    causal: bool,
    rule: ScoreRule,
    chosen: FewTokensTile,
    sinks: Any = None,
    *,
    is_early: bool = False,
    new_tokens: NewTokens | None = None,
) -> None:
    """Launch what `choose_tile` returned.

    `is_early`: no kernel that still runs writes lengths, tables or older keys. `new_tokens`: those
    of all sequences, one each, if `can_fuse`.
    """
    total_q, num_heads, _ = q.shape
    num_kv_heads = keys["k"].shape[1]
    group = num_heads // num_kv_heads
    tile = replace(chosen.tile, is_few=True)  # for its rows
    dtype = dtype_name(q.dtype)
    pairs = (keys["cu_seqlens_q"].size - 1) * num_kv_heads
    strides = element_strides(out)
    lengths = lengths_of(keys, tile)
    del lengths["k_scale"], lengths["v_scale"]
    tile_tokens = FEW_ROWS // group
    fused = _NO_NEW_TOKENS
    if new_tokens is not None:
        chosen = replace(chosen, new_token=True)
        k = keys["k"]
        q_strides = element_strides(q)
        fused = new_tokens.launch_arguments() | {
            "new_q": q,
            "k_pages": k,
            "v_pages": keys["v"],
            "q_stride_b": q_strides[0],
            "q_stride_h": q_strides[1],
            "row_elements": PageRows.of(k).row_bytes // k.itemsize,
        }
    _KERNELS[bool(rule.softcap)].launch(
        chosen.spec(dtype),
        (chosen.parts, pairs),
        (chosen.threads,),
        chosen.shared_bytes,
        pdl=True,
        **maps_of(q, keys, dtype, tile, group, chosen.value_chunk),
        **lengths,
        sinks=sinks,
        out=out,
        lse=lse,
        out_stride_t=strides[0],
        out_stride_h=strides[1],
        total_q=total_q,
        num_heads=num_heads,
        group=group,
        value_dim=out.shape[2],
        tile_tokens=tile_tokens,
        q_bytes=tile_tokens * group * 128 * ceil_div(tile.head_dim, 64),
        num_pairs=pairs,
        stages=chosen.stages,
        value_columns=chosen.value_columns,
        value_chunk=chosen.value_chunk,
        causal=int(causal),
        window=rule.window if rule.window < lengths["max_keys"] else 0,  # 0 if it hides nothing
        is_early=int(is_early),
        score_inner=rule.inner,
        score_factor=rule.factor,
        **fused,
    )
