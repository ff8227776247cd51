"""Attention of the newest tokens against pages: `cuda_src/attention_decode.cu`, `*_sm90.cu`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from engine import device, reference
from engine.dtypes import dtype_name
from engine.kernels import _decode_sm90
from engine.kernels._attention import (
    MAX_HEAD_DIM,
    Pages,
    ScoreRule,
    Tile,
    are_aligned,
    check_count,
    check_heads,
    element_strides,
)
from engine.kernels._contract import FLOATS, Contract
from engine.kernels._launch import Kernel, ceil_div, sm_count
from engine.kernels._module import ModuleSpec

__all__ = ["attention_decode", "choose_num_splits", "choose_tile", "specs"]

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
_TREE_BITS = 64  # of a mask

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


def specs(
    dtype: str, *, head_dim: int | None = None, num_rows: int | None = None, **_: Any
) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch: for one head dim and number of rows, or for all.

    `num_rows` is Q * H / K; None stands for any.
    """
    dims = range(1, MAX_HEAD_DIM + 1) if head_dim is None else (head_dim,)
    rows = (1, 17) if num_rows is None else (num_rows,)
    tiles = dict.fromkeys(choose_tile(dtype, dim, n) for n in rows for dim in dims)
    portable = tuple(tile.spec("attention_decode.cu", dtype) for tile in tiles)
    return portable + _decode_sm90.specs(dtype, head_dim=head_dim, num_rows=num_rows)


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


def attention_decode(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    *,
    block_tables: Any,
    context_lens: Any,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    tree_mask: Any = None,
    num_splits: int | None = None,
    max_context_len: int | None = None,
    overlap: bool = False,
    out: Any = None,
    return_lse: bool = False,
) -> Any:
    """Attend from the newest Q tokens of every sequence to its pages: softmax(scale Q Kᵀ) V.

    Parameters
    ----------
    q : (B, Q, H, D) array of float32, float16 or bfloat16
        The last Q tokens of each sequence, D <= 256. A view whose last axis is contiguous is taken
        as it is.
    k_pages, v_pages : (P, K, block_size, D) arrays of q's dtype
        Contiguous. H is a multiple of K: query head h reads head h // (H // K). block_size is 16,
        32, 64 or 128.
    block_tables : (B, NB) array of int32
        Ids of each sequence's pages. Entries past its length are never read.
    context_lens : (B,) array of int32
        Keys of each sequence, the Q query tokens included: query i of Q sees keys 0 to len - Q + i.
    scale : float, optional
        Factor of the scores; D**-0.5 by default.
    window : int
        Each query sees only its last `window` keys, its own included; 0 means no limit.
    softcap : float
        Replaces a scaled score s by softcap * tanh(s / softcap); 0 means not to.
    tree_mask : (B, Q) array of uint64, optional
        Bit j of tree_mask[b, i] says whether query i sees query j, of those up to itself (bits
        beyond i are ignored); all see the tokens before the Q queries. So a tree of drafts is
        verified at once: its tokens in an order where parents come first, each with the bits of its
        ancestors and its own [2]_. Not together with `window`; Q <= 64.
    num_splits : int, optional
        Into how many parts the keys of a sequence are cut, each worked on by a block of its own.
        The cut then depends on the sequence's own length alone, and so its result, bit by bit, not
        on the rest of the batch. By default the cut is what keeps all blocks busy. The result
        depends on it by rounding only.
    max_context_len : int, optional
        Bound of `context_lens`, NB * block_size by default. Only `num_splits` is chosen by it.
    overlap : bool
        Say that the kernel in front on the stream is `qk_norm_rope_store`, and so that nobody who
        is still running writes `block_tables` or `context_lens`: these are then read while it ends.
    out : (B, Q, H, D) array of q's dtype, optional
        Where to put the result; may be `q`.
    return_lse : bool
        Return the log-sum-exp too.

    Returns
    -------
    out : (B, Q, H, D) array of q's dtype
        0 where a query sees no key.
    lse : (B, Q, H) array of float32
        Natural logarithm of the sum of exp(score); -inf where a query sees no key.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract. Lengths and block ids are checked on the CPU only; on
        CUDA they are clamped to the arrays.

    Notes
    -----
    Scores, softmax and sums are float32; exp(score - running max) is rounded to q's dtype before it
    multiplies V; the parts are combined by their log-sum-exp in float32, always in the same order,
    and the result is rounded once [1]_.

    References
    ----------
    .. [1] Dao, Haziza, Massa, Sizov: Flash-Decoding for long-context inference, 2023.
    .. [2] Miao et al.: SpecInfer, tree-based speculative inference and verification, 2023.

    Examples
    --------
    >>> import numpy as np
    >>> pages = np.arange(4 * 16, dtype=np.float32).reshape(4, 1, 16, 1)
    >>> tables, lens = np.array([[3, 1]], np.int32), np.array([17], np.int32)
    >>> q = np.zeros((1, 1, 1, 1), np.float32)
    >>> attention_decode(q, pages, pages, block_tables=tables, context_lens=lens).round(3)
    array([[[[53.176]]]], dtype=float32)
    """
    call = Contract("attention_decode")
    q = call.array("q", q, "B Q H D", FLOATS, layout="rows")
    pages = Pages.checked(
        call, {"k_pages": k_pages, "v_pages": v_pages}, q.dtype, block_tables, context_lens
    )
    check_heads(call)
    rule = ScoreRule.checked(call, call["D"], scale, window, softcap)
    tree_mask = _checked_tree(call, tree_mask, window)
    if num_splits is not None:
        check_count(call, "num_splits", num_splits)
        call.check("num_splits", 1 <= num_splits <= 1024, "from 1 to 1024", num_splits)
    if max_context_len is not None:
        check_count(call, "max_context_len", max_context_len)
    if call.on_cpu:
        result = reference.attention_decode(
            q,
            pages.k,
            pages.v,
            block_tables=pages.block_tables,
            context_lens=pages.context_lens,
            scale=rule.scale,
            window=rule.window,
            softcap=rule.softcap,
            tree_mask=tree_mask,
            return_lse=True,
        )
        out = call.finish(out, result[0])
        return (out, result[1]) if return_lse else out
    out = call.output("out", out, q.shape, q.dtype, layout="rows")
    lse = call.xp.empty(q.shape[:3], np.float32) if return_lse else None
    if _decode_sm90.takes(q, pages, out):
        _decode_sm90.launch(
            q, pages, out, lse, rule, num_splits, overlap=overlap, tree_mask=tree_mask
        )
        return out if lse is None else (out, lse)
    bound = pages.block_tables.shape[1] * call["block_size"]
    if max_context_len is not None:
        bound = min(bound, max_context_len)
    _launch(q, pages, out, lse, rule, num_splits, bound, tree_mask)
    return out if lse is None else (out, lse)


def _checked_tree(call: Contract, tree_mask: Any, window: int) -> Any:
    """Return the checked `tree_mask`."""
    if tree_mask is None:
        return None
    call.check("tree_mask", window == 0, "None with a window", "a mask")
    call.check("Q", call["Q"] <= _TREE_BITS, f"at most {_TREE_BITS} with a tree_mask", call["Q"])
    return call.array("tree_mask", tree_mask, "B Q", np.dtype(np.uint64))


def _launch(
    q: Any,
    pages: Pages,
    out: Any,
    lse: Any,
    rule: ScoreRule,
    num_splits: int | None,
    bound: int,
    tree_mask: Any,
) -> None:
    (batch, num_queries, num_heads, head_dim), dtype = q.shape, dtype_name(q.dtype)
    num_kv_heads = pages.k.shape[1]
    num_rows = num_queries * (num_heads // num_kv_heads)
    tile = choose_tile(dtype, head_dim, num_rows)
    spec, row_tiles = tile.spec("attention_decode.cu", dtype), ceil_div(num_rows, tile.rows(dtype))
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
