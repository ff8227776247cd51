"""Store new keys and values in pages: `cuda_src/kv_store.cu`, `reference/kv_store.py`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._contract import FLOATS, INT64, Contract
from engine.kernels._elementwise import ROW_THREADS, is_aligned, named_strides, vector_width
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._pages import page_strides, written_pages
from engine.kernels._quantized_kv import checked_scales, kv_dtype_of, kv_macros

__all__ = ["kv_store", "specs"]

_PARAMS = (
    "k:ptr v:ptr k_pages:ptr v_pages:ptr slot_mapping:ptr num_slots:i64 num_heads:i32 "
    "head_dim:i32 block_size:i32 page_stride:i64 head_stride:i64 token_stride:i64 k_stride_t:i64 "
    "k_stride_h:i64 v_stride_t:i64 v_stride_h:i64 "
    "k_scale:ptr v_scale:ptr"
)
_VECTOR = Kernel("kv_store_vector", _PARAMS, struct="KvStoreParams")
_SCALAR = Kernel("kv_store_scalar", _PARAMS, struct="KvStoreParams")


def specs(dtype: str, *, kv_dtype: str = "", **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype` and pages of `kv_dtype`."""
    return (ModuleSpec("kv_store.cu", dtype, tuple(kv_macros(kv_dtype).items())),)


def kv_store(
    k: Any,
    v: Any,
    k_pages: Any,
    v_pages: Any,
    slot_mapping: Any,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
) -> None:
    """Write the keys and values of new tokens to the paged KV cache.

    Parameters
    ----------
    k, v : (T, K, D) array of float32, float16 or bfloat16
        Any token and head strides (views into the fused qkv rows).
    k_pages, v_pages : (P, K, block_size, D) array of k's dtype, uint8 or int8
        Written in place. Views with equal strides whose last axis is contiguous: any order of
        pages, heads and tokens in memory, also two slices of one array. uint8 pages hold e4m3
        codes, int8 pages integer codes.
    slot_mapping : (T,) array of int64
        ``block_id * block_size + offset`` of each token; -1 skips it. Slots must be distinct: if
        two tokens share one, either may be kept.
    k_scale, v_scale : (K,) array of float32, optional
        Scales of a quantized KV cache, positive and finite: a code is value / scale, rounded to
        nearest even and saturated at 448 or 127. NaN stays NaN in e4m3 and becomes 0 in int8.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract. Slots are checked on NumPy arrays; on the GPU a slot
        outside the pages is skipped.

    Examples
    --------
    >>> import numpy as np
    >>> k_pages, v_pages = np.zeros((2, 2, 1, 2, 1), np.float32)  # 2 blocks of 2 slots
    >>> rows = np.array([[[7.0]], [[8.0]]], np.float32)
    >>> kv_store(rows, -rows, k_pages, v_pages, np.array([3, -1]))
    >>> k_pages.ravel(), v_pages.ravel()
    (array([0., 0., 0., 7.], dtype=float32), array([ 0.,  0.,  0., -7.], dtype=float32))
    """
    call = Contract("kv_store")
    k = call.array("k", k, "T K D", FLOATS, layout="rows")
    v = call.array("v", v, "T K D", k.dtype, layout="rows")
    k_pages, v_pages = written_pages(call, k_pages, v_pages, "P K block_size D", k.dtype)
    slot_mapping = call.array("slot_mapping", slot_mapping, "T", INT64)
    scales = checked_scales(call, k_pages, k_scale, v_scale)
    num_slots = call["P"] * call["block_size"]
    if call.on_cpu:
        _check_slots(call, slot_mapping, num_slots)
        reference.kv_store(k, v, k_pages, v_pages, slot_mapping, **scales)
        return
    fits = call["D"] % vector_width(k) == 0 and is_aligned(k, v, k_pages, v_pages)
    items = 2 * call["K"] * (call["D"] // vector_width(k) if fits else call["D"])
    (_VECTOR if fits else _SCALAR).launch(
        specs(dtype_name(k.dtype), kv_dtype=kv_dtype_of(k_pages.dtype))[0],
        (call["T"], ceil_div(items, ROW_THREADS)),
        (ROW_THREADS,),
        k=k,
        v=v,
        k_pages=k_pages,
        v_pages=v_pages,
        slot_mapping=slot_mapping,
        num_slots=num_slots,
        num_heads=call["K"],
        head_dim=call["D"],
        block_size=call["block_size"],
        **page_strides(k_pages),
        **named_strides("th", k=k, v=v),
        **scales,
    )


def _check_slots(call: Contract, slot_mapping: Any, num_slots: int) -> None:
    if slot_mapping.size:
        low = int(slot_mapping.min())
        high = int(slot_mapping.max())
        ok = low >= -1 and high < num_slots
        call.check("slot_mapping", ok, f"-1 or in [0, {num_slots}), the slots", (low, high))
