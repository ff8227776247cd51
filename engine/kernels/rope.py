"""Rotary position embedding of q and k: `cuda_src/rope.cu`, mirror `reference/rope.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._chip import sm_count
from engine.kernels._contract import FLOAT32, INT32, MIRROR_FLOATS, Contract
from engine.kernels._elementwise import (
    is_aligned,
    is_large,
    named_strides,
    vector_width,
)
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec

__all__ = ["Config", "choose_config", "rope", "specs"]

_THREADS = 128
_HEADS_AT_ONCE = 3  # kHeads in CUDA
# Maximum tokens per SM for which a block takes few heads; tuned with `python -m tests.bench rope`.
_FEW_TOKENS = 2
_PARAMS = (
    "q:ptr k:ptr positions:ptr cos_sin:ptr q_out:ptr k_out:ptr q_stride_t:i64 q_stride_h:i64 "
    "k_stride_t:i64 k_stride_h:i64 q_out_stride_t:i64 q_out_stride_h:i64 k_out_stride_t:i64 "
    "k_out_stride_h:i64 num_positions:i32 num_q_heads:i32 num_k_heads:i32 rotary_dim:i32 "
    "items_per_head:i32 heads_per_block:i32 is_inverse:i32 is_large:i32"
)
_KERNELS = {
    (pairing, access): Kernel(f"rope_{pairing}_{access}", _PARAMS, struct="RopeParams")
    for pairing in ("half", "interleaved")
    for access in ("vector", "scalar")
}


@dataclass(frozen=True)
class Config:
    """Work division: `items_per_head` threads per head, `width` pairs (or features) per thread."""

    width: int
    items_per_head: int


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("rope.cu", dtype),)


def choose_config(
    head_dim: int, rotary_dim: int, *, vector_width: int, can_vectorise: bool, in_place: bool
) -> Config:
    """Choose the width; in place, features beyond `rotary_dim` need no thread.

    Examples
    --------
    >>> choose_config(128, 96, vector_width=8, can_vectorise=True, in_place=False)
    Config(width=8, items_per_head=10)
    """
    half = rotary_dim // 2
    rest = head_dim - rotary_dim
    fits = can_vectorise and half % vector_width == 0 and rest % vector_width == 0
    width = vector_width if fits else 1
    return Config(width, half // width + (0 if in_place else rest // width))


def rope(
    q: Any,
    k: Any,
    positions: Any,
    cos_sin: Any,
    *,
    interleaved: bool = False,
    inverse: bool = False,
    out: Any = None,
) -> Any:
    """Rotate the feature pairs of each head by the angles of its token's position.

    Parameters
    ----------
    q : (T, H, D) array of float32, float16 or bfloat16 (NumPy: or float64)
        Token and head strides are arbitrary (a view of fused qkv rows).
    k : (T, K, D) array of q's dtype
        Strides as for `q`; K may differ from H.
    positions : (T,) array of int32
        Each token's row of `cos_sin`.
    cos_sin : (P, R) array of float32
        R/2 cosines, then R/2 sines; R is even and at most D. Features from R on are not rotated.
    interleaved : bool
        Rotate pairs (2i, 2i+1) instead of (i, i + R/2).
    inverse : bool
        Rotate by the negative angles, as the backward pass does: applied to the gradients of q'
        and k', the result is the gradients of q and k.
    out : (q_out, k_out), optional
        Arrays for the results; may be ``(q, k)``, but must not overlap them otherwise.

    Returns
    -------
    q', k' : arrays of the shapes and dtype of `q` and `k`

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract. Positions are checked on NumPy arrays; on the GPU, a
        position outside the table makes the rotated features NaN.

    Notes
    -----
    (a, b) becomes (a cos - b sin, b cos + a sin), in float32, rounded once [1]_.

    References
    ----------
    .. [1] Su et al.: RoFormer, arXiv:2104.09864.

    Examples
    --------
    >>> import numpy as np
    >>> q = np.array([[[1.0, 0.0]]], np.float32)
    >>> quarter_turn = np.array([[0.0, 1.0]], np.float32)  # cos, sin of position 0
    >>> rope(q, q, np.zeros(1, np.int32), quarter_turn)[0]
    array([[[0., 1.]]], dtype=float32)
    """
    call = Contract("rope")
    q = call.array("q", q, "T H D", MIRROR_FLOATS, layout="rows")
    k = call.array("k", k, "T K D", q.dtype, layout="rows")
    positions = call.array("positions", positions, "T", INT32)
    cos_sin = call.array("cos_sin", cos_sin, "P R", FLOAT32)
    rotary_dim = call["R"]
    fits = rotary_dim % 2 == 0 and rotary_dim <= call["D"]
    call.check("cos_sin", fits, f"(P, R), R even and at most D = {call['D']}", cos_sin.shape)
    is_pair = out is None or (isinstance(out, tuple | list) and len(out) == 2)
    call.check("out", is_pair, "None or a pair (q_out, k_out)", type(out).__name__)
    outs = (None, None) if out is None else out
    if call.on_cpu:
        _check_positions(call, positions)
        results = reference.rope(q, k, positions, cos_sin, interleaved=interleaved, inverse=inverse)
        targets = [
            call.target(o, r, name, layout="rows")
            for o, r, name in zip(outs, results, ("out[0]", "out[1]"), strict=True)
        ]
        return tuple(map(call.fill, targets, results))
    q_out = call.output("out[0]", outs[0], q.shape, q.dtype, layout="rows")
    k_out = call.output("out[1]", outs[1], k.shape, k.dtype, layout="rows")
    pairing = "interleaved" if interleaved else "half"
    _launch(q, k, positions, cos_sin, q_out, k_out, pairing, inverse)
    return q_out, k_out


def _check_positions(call: Contract, positions: Any) -> None:
    if positions.size:
        low = int(positions.min())
        high = int(positions.max())
        limit = call["P"]
        ok = low >= 0 and high < limit
        call.check("positions", ok, f"in [0, {limit}), the rows of cos_sin", (low, high))


def _is_same(a: Any, b: Any) -> bool:
    return bool(a.data.ptr == b.data.ptr and a.strides == b.strides)


def _launch(
    q: Any,
    k: Any,
    positions: Any,
    cos_sin: Any,
    q_out: Any,
    k_out: Any,
    pairing: str,
    inverse: bool,
) -> None:
    num_tokens, num_q_heads, head_dim = q.shape
    num_positions, rotary_dim = cos_sin.shape
    config = choose_config(
        head_dim,
        rotary_dim,
        vector_width=vector_width(q),
        can_vectorise=is_aligned(q, k, q_out, k_out, cos_sin),
        in_place=_is_same(q, q_out) and _is_same(k, k_out),
    )
    num_heads = num_q_heads + k.shape[1]
    items = config.items_per_head
    # Few tokens: one block takes as many heads as its threads cover. Many tokens: _HEADS_AT_ONCE
    # times that, to keep more loads in flight.
    heads_per_block = _THREADS // min(max(items, 1), _THREADS)
    if num_tokens > _FEW_TOKENS * sm_count():
        heads_per_block *= _HEADS_AT_ONCE
    _KERNELS[pairing, "scalar" if config.width == 1 else "vector"].launch(
        specs(dtype_name(q.dtype))[0],
        (num_tokens, ceil_div(num_heads, heads_per_block), ceil_div(items, _THREADS)),
        (_THREADS,),
        q=q,
        k=k,
        positions=positions,
        cos_sin=cos_sin,
        q_out=q_out,
        k_out=k_out,
        **named_strides("th", q=q, k=k, q_out=q_out, k_out=k_out),
        num_positions=num_positions,
        num_q_heads=num_q_heads,
        num_k_heads=k.shape[1],
        rotary_dim=rotary_dim,
        items_per_head=items,
        heads_per_block=heads_per_block,
        is_inverse=inverse,
        is_large=is_large(q_out, k_out),
    )
