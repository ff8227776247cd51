"""Norm of q, k and v and RoPE of q and k, fused with the store of k and v to pages.

`cuda_src/qk_norm_rope_store.cu`, mirror `reference/qk_norm_rope_store.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._chip import sm_count
from engine.kernels._contract import FLOAT32, FLOATS, INT32, INT64, Contract
from engine.kernels._elementwise import is_aligned, named_strides, vector_width
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._pages import page_strides, written_pages
from engine.kernels._quantized_kv import checked_scales, kv_dtype_of, kv_macros

__all__ = ["Config", "choose_config", "qk_norm_rope_store", "specs"]

_THREADS = 128
_WARPS = _THREADS // 32
_HEADS_AT_ONCE = 3  # kHeads in CUDA
# Maximum tokens per SM for which a block takes few heads; tuned with
# `python -m tests.bench qk_norm_rope_store`.
_FEW_TOKENS = 2
_PARAMS = (
    "q:ptr k:ptr v:ptr positions:ptr cos_sin:ptr k_pages:ptr v_pages:ptr slot_mapping:ptr "
    "q_weight:ptr k_weight:ptr v_weight:ptr q_stride_t:i64 q_stride_h:i64 k_stride_t:i64 "
    "k_stride_h:i64 v_stride_t:i64 v_stride_h:i64 page_stride:i64 head_stride:i64 token_stride:i64 "
    "num_slots:i64 num_positions:i32 num_q_heads:i32 "
    "num_kv_heads:i32 head_dim:i32 rotary_dim:i32 block_size:i32 heads_per_block:i32 eps:f32 "
    "weight_offset:f32 k_scale:ptr v_scale:ptr q_factors:ptr"
)
_KERNELS = {
    (pairing, access): Kernel(
        f"qk_norm_rope_store_{pairing}_{access}", _PARAMS, struct="QkNormRopeStoreParams"
    )
    for pairing in ("half", "interleaved")
    for access in ("vector", "scalar")
}


@dataclass(frozen=True)
class Config:
    """Access width ("vector" or "scalar"), and heads of a token per block."""

    access: str
    heads_per_block: int


def specs(
    dtype: str,
    *,
    kv_dtype: str = "",
    norm_after_rope: bool = False,
    q_factors: bool = False,
    patterns: bool = False,
    **_: Any,
) -> tuple[ModuleSpec, ...]:
    """Return the modules for `dtype` and pages of `kv_dtype`; with `patterns`, all variants.

    With `q_factors` some layers have factors on queries, and others may have none.
    """
    orders = (False, True) if patterns else (norm_after_rope,)
    found = [_spec(dtype, kv_dtype, norm_after_rope=order, q_factors=False) for order in orders]
    if q_factors or patterns:
        found.append(_spec(dtype, kv_dtype, norm_after_rope=False, q_factors=True))
    return tuple(found)


def _spec(dtype: str, kv_dtype: str, *, norm_after_rope: bool, q_factors: bool) -> ModuleSpec:
    macros = kv_macros(kv_dtype) | ({"NORM_AFTER_ROPE": 1} if norm_after_rope else {})
    macros |= {"Q_FACTORS": 1} if q_factors else {}
    return ModuleSpec("qk_norm_rope_store.cu", dtype, tuple(macros.items()))


def choose_config(
    num_tokens: int,
    head_dim: int,
    rotary_dim: int,
    *,
    vector_width: int,
    can_vectorise: bool,
    has_norm: bool,
    num_sms: int,
) -> Config:
    """Choose the access width and the heads per block, which are fewer for few tokens.

    Examples
    --------
    >>> choose_config(1, 128, 128, vector_width=8, can_vectorise=True, has_norm=True, num_sms=132)
    Config(access='vector', heads_per_block=16)
    """
    threads = head_dim // (2 * vector_width)  # threads per head
    fits = can_vectorise and head_dim % (2 * vector_width) == 0 and 0 < threads <= _THREADS
    fits = fits and rotary_dim // 2 % vector_width == 0
    if has_norm:  # neighbouring lanes reduce with shuffles
        fits = fits and threads <= 32 and threads & (threads - 1) == 0
    if not fits:
        return Config("scalar", _WARPS)
    heads = _THREADS // threads
    return Config(
        "vector", heads if num_tokens <= _FEW_TOKENS * num_sms else heads * _HEADS_AT_ONCE
    )


def qk_norm_rope_store(
    q: Any,
    k: Any,
    v: Any,
    positions: Any,
    cos_sin: Any,
    k_pages: Any,
    v_pages: Any,
    slot_mapping: Any,
    *,
    q_weight: Any = None,
    k_weight: Any = None,
    v_weight: Any = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    norm_after_rope: bool = False,
    interleaved: bool = False,
    k_scale: Any = None,
    v_scale: Any = None,
    q_factors: Any = None,
) -> None:
    """Normalise and rotate q in place, and store normalised, rotated keys and values to pages.

    Equals `rmsnorm` of each head of q, k and v, `rope` of q and k, and `kv_store`. `k` and `v` are
    not modified, and may be the same array.

    Parameters
    ----------
    q : (T, H, D) array of float32, float16 or bfloat16
        Written in place. Token and head strides are arbitrary (a view of fused qkv rows).
    k, v : (T, K, D) array of q's dtype
        Strides as for `q`; must not overlap `q`.
    positions : (T,) array of int32
        Each token's row of `cos_sin`.
    cos_sin : (P, R) array of float32
        R/2 cosines, then R/2 sines; R is even and at most D. Features from R on are not rotated.
    k_pages, v_pages : (P, K, block_size, D) array of q's dtype, uint8 or int8
        Written in place. Layout and quantized pages: see `kv_store`.
    slot_mapping : (T,) array of int64
        ``block_id * block_size + offset`` of each token, all distinct; -1 stores nothing.
    q_weight, k_weight, v_weight : (D,) array of q's dtype, optional
        Weights of the norms of q, k and v; None means no norm.
    eps : float
        Added to the mean square.
    weight_offset : float
        Added to the weights (Gemma stores w - 1).
    norm_after_rope : bool
        Rotate first, then normalise (Hunyuan). The root mean square is that of the features before
        the rotation, which keeps it, so scales in `cos_sin` remain in the result.
    interleaved : bool
        Rotate pairs (2i, 2i+1) instead of (i, i + R/2).
    k_scale, v_scale : (K,) array of float32, optional
        Scales of a quantized KV cache. See `kv_store`.
    q_factors : (P,) array of float32, optional
        Each position's factor on the rotated queries (Ministral 3).

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract. Positions and slots are checked on NumPy arrays; on
        the GPU, a position outside the table makes the rotated features NaN, and a slot outside
        the pages is skipped.

    Notes
    -----
    Results are rounded to q's dtype after the norm and after the rotation, as in the separate ops
    (once, at the end, with `norm_after_rope`), and again after the factor; and then quantized if
    the pages are quantized.

    Examples
    --------
    >>> import numpy as np
    >>> q, k = np.array([[[1.0, 0.0]]], np.float32), np.array([[[0.0, 2.0]]], np.float32)
    >>> k_pages, v_pages = np.zeros((2, 1, 1, 1, 2), np.float32)
    >>> quarter_turn = np.array([[0.0, 1.0]], np.float32)  # cos, sin of position 0
    >>> zero = np.zeros(1, np.int64)
    >>> qk_norm_rope_store(q, k, k, zero.astype(np.int32), quarter_turn, k_pages, v_pages, zero)
    >>> [a.ravel().tolist() for a in (q, k_pages, v_pages)]
    [[0.0, 1.0], [-2.0, 0.0], [0.0, 2.0]]
    """
    call = Contract("qk_norm_rope_store")
    q = call.written("q", q, "T H D", FLOATS, layout="rows")
    k = call.array("k", k, "T K D", q.dtype, layout="rows")
    v = call.array("v", v, "T K D", q.dtype, layout="rows")
    positions = call.array("positions", positions, "T", INT32)
    cos_sin = call.array("cos_sin", cos_sin, "P R", FLOAT32)
    k_pages, v_pages = written_pages(call, k_pages, v_pages, "pages K block_size D", q.dtype)
    slot_mapping = call.array("slot_mapping", slot_mapping, "T", INT64)
    if q_weight is not None:
        q_weight = call.array("q_weight", q_weight, "D", q.dtype)
    if k_weight is not None:
        k_weight = call.array("k_weight", k_weight, "D", q.dtype)
    if v_weight is not None:
        v_weight = call.array("v_weight", v_weight, "D", q.dtype)
    call.number("eps", eps, low=0.0)
    call.number("weight_offset", weight_offset)
    fits = call["R"] % 2 == 0 and call["R"] <= call["D"]
    call.check("cos_sin", fits, f"(P, R), R even and at most D = {call['D']}", cos_sin.shape)
    arrays = {"q": q, "k": k, "v": v, "positions": positions, "cos_sin": cos_sin}
    arrays |= {"k_pages": k_pages, "v_pages": v_pages, "slot_mapping": slot_mapping}
    arrays |= {"q_weight": q_weight, "k_weight": k_weight, "v_weight": v_weight}
    arrays |= checked_scales(call, k_pages, k_scale, v_scale)
    if q_factors is not None:
        q_factors = call.array("q_factors", q_factors, "P", FLOAT32)
    arrays["q_factors"] = q_factors
    if call.on_cpu:
        _check_values(call, positions, slot_mapping)
        reference.qk_norm_rope_store(
            **arrays,
            eps=eps,
            weight_offset=weight_offset,
            norm_after_rope=norm_after_rope,
            interleaved=interleaved,
        )
        return
    spec = _spec(
        dtype_name(q.dtype),
        kv_dtype_of(k_pages.dtype),
        norm_after_rope=bool(norm_after_rope),
        q_factors=q_factors is not None,
    )
    pairing = "interleaved" if interleaved else "half"
    _launch(call, arrays, spec, pairing, eps, weight_offset)


def _check_values(call: Contract, positions: Any, slot_mapping: Any) -> None:
    if not positions.size:
        return
    low = int(positions.min())
    high = int(positions.max())
    ok = low >= 0 and high < call["P"]
    limit = call["P"]
    call.check("positions", ok, f"in [0, {limit}), the rows of cos_sin", (low, high))
    low = int(slot_mapping.min())
    high = int(slot_mapping.max())
    limit = call["pages"] * call["block_size"]
    ok = low >= -1 and high < limit
    call.check("slot_mapping", ok, f"-1 or in [0, {limit}), the slots", (low, high))


def _launch(
    call: Contract,
    arrays: dict[str, Any],
    spec: ModuleSpec,
    pairing: str,
    eps: float,
    weight_offset: float,
) -> None:
    names = ("q_weight", "k_weight", "v_weight")
    weights = [arrays[name] for name in names if arrays[name] is not None]
    rows = [arrays[name] for name in ("q", "k", "v")]
    places = [arrays[name] for name in ("cos_sin", "k_pages", "v_pages")]
    config = choose_config(
        call["T"],
        call["D"],
        call["R"],
        vector_width=vector_width(rows[0]),
        can_vectorise=is_aligned(*rows, *places, *weights),
        has_norm=bool(weights),
        num_sms=sm_count(),
    )
    _KERNELS[pairing, config.access].launch(
        spec,
        (call["T"], ceil_div(call["H"] + 2 * call["K"], config.heads_per_block)),
        (_THREADS,),
        pdl=True,
        **arrays,
        **named_strides("th", **{name: arrays[name] for name in "qkv"}),
        **page_strides(places[1]),
        num_slots=call["pages"] * call["block_size"],
        num_positions=call["P"],
        num_q_heads=call["H"],
        num_kv_heads=call["K"],
        head_dim=call["D"],
        rotary_dim=call["R"],
        block_size=call["block_size"],
        heads_per_block=config.heads_per_block,
        eps=eps,
        weight_offset=weight_offset,
    )
