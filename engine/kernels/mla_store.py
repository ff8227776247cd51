"""Norm of the latent, RoPE and store to pages: `cuda_src/mla_store.cu`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._contract import FLOAT32, FLOATS, INT32, INT64, Contract
from engine.kernels._elementwise import is_aligned, named_strides, vector_width
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec

__all__ = ["mla_store", "specs"]

_THREADS = 128  # kThreads in CUDA
_ITEMS = 4  # kItems in CUDA
_MAX_LATENT = 512  # kMaxLatent in CUDA
_PARAMS = (
    "q_rope:ptr kv:ptr weight:ptr positions:ptr cos_sin:ptr pages:ptr slot_mapping:ptr "
    "q_rope_stride_t:i64 q_rope_stride_h:i64 kv_stride_t:i64 page_stride:i64 num_slots:i64 "
    "num_positions:i32 num_heads:i32 latent:i32 rope:i32 block_size:i32 eps:f32"
)
_VECTOR = Kernel("mla_store_vector", _PARAMS, struct="MlaStoreParams")
_SCALAR = Kernel("mla_store_scalar", _PARAMS, struct="MlaStoreParams")


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("mla_store.cu", dtype),)


def mla_store(
    q_rope: Any,
    kv: Any,
    weight: Any,
    positions: Any,
    cos_sin: Any,
    pages: Any,
    slot_mapping: Any,
    *,
    eps: float = 1e-6,
) -> None:
    """Normalise latents, rotate queries and keys, all in place, and store latents and keys.

    Equals `rmsnorm` of the latents, `rope` of `q_rope` and of the keys, and a store of the rows of
    `kv` to their pages: all that `mla_decode` needs [1]_.

    Parameters
    ----------
    q_rope : (T, H, R) array of float32, float16 or bfloat16
        The part of the queries that is rotated. Written in place; token and head strides are
        arbitrary (a view of the queries).
    kv : (T, L + R) array of q_rope's dtype
        Each token's latent and, after it, the key that all heads share. Written in place; rows may
        lie apart (a view of a fused product). L <= 512.
    weight : (L,) array of q_rope's dtype
        Weight of the latents' norm.
    positions : (T,) array of int32
        Each token's row of `cos_sin`.
    cos_sin : (P, R) array of float32
        R/2 cosines, then R/2 sines, of the pairs (i, i + R/2). R is even.
    pages : (pages, block_size, L + R) array of q_rope's dtype
        Written in place. The tokens of a page are contiguous.
    slot_mapping : (T,) array of int64
        ``block_id * block_size + offset`` of each token, all distinct; -1 stores nothing.
    eps : float
        Added to the mean square.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract. Positions and slots are checked on NumPy arrays; on
        the GPU, a position outside the table makes the rotated features NaN, and a slot outside
        the pages is skipped.

    Notes
    -----
    Results are rounded to q_rope's dtype after the norm and after the rotation.

    References
    ----------
    .. [1] DeepSeek-AI: DeepSeek-V2, arXiv:2405.04434, section 2.1.

    Examples
    --------
    >>> import numpy as np
    >>> kv = np.array([[2.0, 3.0, 4.0]], np.float32)  # L = 1, R = 2
    >>> q_rope, weight = np.array([[[1.0, 0.0]]], np.float32), np.ones(1, np.float32)
    >>> quarter_turn = np.array([[0.0, 1.0]], np.float32)  # cos, sin of position 0
    >>> pages, slots = np.zeros((2, 16, 3), np.float32), np.array([17], np.int64)
    >>> mla_store(q_rope, kv, weight, np.zeros(1, np.int32), quarter_turn, pages, slots)
    >>> q_rope.tolist(), pages[1, 1].round(3).tolist()
    ([[[0.0, 1.0]]], [1.0, -4.0, 3.0])
    """
    call = Contract("mla_store")
    q_rope = call.written("q_rope", q_rope, "T H R", FLOATS, layout="rows")
    kv = call.written("kv", kv, "T W", q_rope.dtype, layout="rows")
    weight = call.array("weight", weight, "L", q_rope.dtype)
    positions = call.array("positions", positions, "T", INT32)
    cos_sin = call.array("cos_sin", cos_sin, "P R", FLOAT32)
    pages = call.written("pages", pages, "pages block_size W", q_rope.dtype, layout="rows")
    slot_mapping = call.array("slot_mapping", slot_mapping, "T", INT64)
    call.number("eps", eps, low=0.0)
    _check_sizes(call, pages)
    arrays = (q_rope, kv, weight, positions, cos_sin, pages, slot_mapping)
    if call.on_cpu:
        _check_range(call, "positions", positions, 0, call["P"])
        _check_range(call, "slot_mapping", slot_mapping, -1, call["pages"] * call["block_size"])
        reference.mla_store(*arrays, eps=eps)
        return
    _launch(call, *arrays, eps=eps)


def _check_sizes(call: Contract, pages: Any) -> None:
    latent = call["L"]
    rope = call["R"]
    call.check("weight", 0 < latent <= _MAX_LATENT, f"of length 1 to {_MAX_LATENT}", latent)
    call.check("cos_sin", rope > 0 and rope % 2 == 0, "(P, R), R even", rope)
    call.check("kv", call["W"] == latent + rope, f"of width L + R = {latent + rope}", call["W"])
    is_dense = not pages.size or pages.strides[1] == call["W"] * pages.itemsize
    call.check("pages", is_dense, "pages of contiguous tokens", f"strides {pages.strides}")


def _check_range(call: Contract, name: str, values: Any, low: int, high: int) -> None:
    if values.size and not (values.min() >= low and values.max() < high):
        found = int(values.min()), int(values.max())
        call.check(name, False, f"in [{low}, {high})", found)


def _launch(
    call: Contract,
    q_rope: Any,
    kv: Any,
    weight: Any,
    positions: Any,
    cos_sin: Any,
    pages: Any,
    slot_mapping: Any,
    *,
    eps: float,
) -> None:
    """Launch on CuPy arrays: block 0 of a token for its key, the others for its query heads."""
    latent = call["L"]
    rope = call["R"]
    width = vector_width(q_rope)
    key = kv[:, latent:]
    aligned = is_aligned(q_rope, key, cos_sin, pages[:, :, latent:])
    is_vector = rope // 2 % width == 0 and rope // 2 <= _THREADS * width and aligned
    lanes = rope // 2 // (width if is_vector else 1)
    blocks = 1 + ceil_div(call["H"] * lanes, _THREADS * _ITEMS)
    (_VECTOR if is_vector else _SCALAR).launch(
        specs(dtype_name(q_rope.dtype))[0],
        (call["T"], blocks),
        (_THREADS,),
        pdl=True,
        **named_strides("th", q_rope=q_rope),
        **named_strides("t", kv=kv),
        q_rope=q_rope,
        kv=kv,
        weight=weight,
        positions=positions,
        cos_sin=cos_sin,
        pages=pages,
        slot_mapping=slot_mapping,
        page_stride=pages.strides[0] // pages.itemsize,
        num_slots=call["pages"] * call["block_size"],
        num_positions=call["P"],
        num_heads=call["H"],
        latent=latent,
        rope=rope,
        block_size=call["block_size"],
        eps=eps,
    )
