"""Attention of e4m3 Q, K and V: `cuda_src/attention_prefill/attention_prefill_fp8*`."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from engine import reference
from engine.dtypes import np_dtype
from engine.errors import DTypeError
from engine.kernels._attention import (
    check_heads,
    checked_longest,
    checked_scale,
    checked_starts,
)
from engine.kernels._chip import HOPPER_DTYPES
from engine.kernels._contract import FLOAT32, Contract
from engine.kernels._elementwise import named_strides
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels.attention_prefill_fp8 import sm90

__all__ = ["attention_prefill_fp8", "specs"]

_KERNEL = Kernel(
    "attention_prefill_fp8",
    "q:ptr k:ptr v:ptr cu_seqlens_q:ptr cu_seqlens_k:ptr q_scale:ptr k_scale:ptr v_scale:ptr "
    "out:ptr lse:ptr q_stride_t:i64 q_stride_h:i64 k_stride_t:i64 k_stride_h:i64 v_stride_t:i64 "
    "v_stride_h:i64 out_stride_t:i64 out_stride_h:i64 max_keys:i64 total_q:i32 num_heads:i32 "
    "group:i32 head_dim:i32 causal:i32 factor:f32",
    struct="AttentionPrefillFp8Params",
)
_MAX_HEAD_DIM = 256
_ROWS = 4  # query rows per block, one per warp
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_CODES = (np.dtype(np.uint8), _E4M3)


def specs(dtype: str, *, head_dim: int | None = None, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for results of `dtype`; none for float32."""
    if dtype not in HOPPER_DTYPES:
        return ()
    portable = ModuleSpec("attention_prefill/attention_prefill_fp8.cu", dtype)
    return (portable, *sm90.specs(dtype, head_dim=head_dim))


def attention_prefill_fp8(
    q: Any,
    k: Any,
    v: Any,
    *,
    q_scale: Any,
    k_scale: Any,
    v_scale: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    causal: bool = True,
    scale: float | None = None,
    dtype: str = "bfloat16",
    max_seqlen_q: int | None = None,
    out: Any = None,
    return_lse: bool = False,
) -> Any:
    """Attend over e4m3 queries, keys and values with one scale per head. See `attention_prefill`.

    Parameters
    ----------
    q : (Tq, H, D) array of uint8 or float8_e4m3fn
        Query tokens of all sequences in e4m3: query head h represents ``q[:, h] * q_scale[h]``.
        CuPy lacks 8-bit floats, so its arrays hold their bits as uint8. D <= 256. A view whose last
        axis is contiguous is not copied.
    k, v : (Tk, K, D) arrays of uint8 or float8_e4m3fn
        Keys and values likewise. H is a multiple of K: query head h reads head h // (H // K).
    q_scale : (H,) array of float32
        Positive.
    k_scale, v_scale : (K,) arrays of float32
        Positive.
    cu_seqlens_q, cu_seqlens_k : (B+1,) arrays of int32
        Sequence b's queries are ``q[cu_seqlens_q[b]:cu_seqlens_q[b + 1]]``, and its keys likewise;
        they rise from 0 to Tq and to Tk.
    causal : bool
        If True, query i of n sees keys 0 to len - n + i; otherwise every query sees all keys.
    scale : float, optional
        Factor on the scores, by default D**-0.5.
    dtype : "bfloat16" or "float16"
        Dtype of the result.
    max_seqlen_q : int, optional
        Upper bound of the queries per sequence. If omitted on CUDA, computing it synchronises.
    out : (Tq, H, D) array of `dtype`, optional
        Array for the result.
    return_lse : bool
        Also return the log-sum-exp.

    Returns
    -------
    out : (Tq, H, D) array of `dtype`
        0 for a query that sees no key.
    lse : (Tq, H) array of float32
        Natural logarithm of the sum of exp(score), with the exponentials rounded as below; -inf for
        a query that sees no key.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract. Lengths and signs of scales are checked on the CPU only;
        on CUDA lengths are clamped to the arrays.

    Notes
    -----
    Products are exact, sums float32. P = 2^(log2(e) score - n), with an integer n per row, is
    rounded to e4m3 before P V, and the result is divided by the sum of the rounded P [1]_. On
    Hopper, part of P (three quarters for D <= 64, else half) is interpolated linearly
    between powers of two, with an rms error of 3.2 % instead of the 2.7 % of rounding alone; and
    sums over 512 keys (1024 for D > 64) are accumulated by the tensor cores, with about 14 bits,
    before they are added in float32. `quantize_heads` produces the codes and scales.

    References
    ----------
    .. [1] Shah et al.: FlashAttention-3, arXiv:2407.08608, section 3.3.

    Examples
    --------
    >>> import numpy as np
    >>> from ml_dtypes import float8_e4m3fn
    >>> q = k = np.ones((2, 1, 4), float8_e4m3fn)
    >>> v = np.array([[[0, 0, 0, 0]], [[2, 4, 6, 8]]], float8_e4m3fn)
    >>> ends, one = np.array([0, 2], np.int32), np.ones(1, np.float32)
    >>> scales = dict(q_scale=one, k_scale=one, v_scale=one)
    >>> y = attention_prefill_fp8(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, **scales)
    >>> y[:, 0].astype(np.float32)
    array([[0., 0., 0., 0.],
           [1., 2., 3., 4.]], dtype=float32)
    """
    call = Contract("attention_prefill_fp8")
    return_lse = bool(return_lse)  # an array raises here, before anything is written
    arrays = _check_arrays(call, q, k, v, q_scale, k_scale, v_scale, cu_seqlens_q, cu_seqlens_k)
    check_heads(call, _MAX_HEAD_DIM)
    scale = checked_scale(call, call["D"], scale)
    if not isinstance(dtype, str) or dtype not in HOPPER_DTYPES:
        raise DTypeError(f"{call.op}: dtype: must be one of {HOPPER_DTYPES}; got {dtype!r}")
    max_q = checked_longest(call, "max_seqlen_q", max_seqlen_q, arrays["cu_seqlens_q"])
    if call.on_cpu:
        result = reference.attention_prefill_fp8(
            **arrays, causal=causal, scale=scale, dtype=dtype, return_lse=True
        )
        out = call.finish(out, result[0], layout="rows")
        return (out, result[1]) if return_lse else out
    q = arrays["q"]
    out = call.output("out", out, q.shape, np_dtype(dtype), layout="rows")
    lse = call.xp.empty(q.shape[:2], np.float32) if return_lse else None
    shared: dict[str, Any] = {"causal": int(causal), "factor": scale * math.log2(math.e)}
    if sm90.is_supported(q, arrays["k"], arrays["v"], out):
        sm90.launch(**arrays, **shared, out=out, lse=lse, dtype=dtype, max_q=max_q)
    else:
        _launch(**arrays, **shared, out=out, lse=lse, dtype=dtype, max_q=max_q)
    return out if lse is None else (out, lse)


def _check_arrays(
    call: Contract,
    q: Any,
    k: Any,
    v: Any,
    q_scale: Any,
    k_scale: Any,
    v_scale: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
) -> dict[str, Any]:
    """Check all arrays; return them by name, codes as uint8."""
    arrays = {
        "q": call.array("q", q, "Tq H D", _CODES, layout="rows"),
        "k": call.array("k", k, "Tk K D", _CODES, layout="rows"),
        "v": call.array("v", v, "Tk K D", _CODES, layout="rows"),
    }
    arrays = {name: x.view(np.uint8) for name, x in arrays.items()}
    arrays["q_scale"] = call.array("q_scale", q_scale, "H", FLOAT32)
    arrays["k_scale"] = call.array("k_scale", k_scale, "K", FLOAT32)
    arrays["v_scale"] = call.array("v_scale", v_scale, "K", FLOAT32)
    if call.on_cpu:
        for name in ("q_scale", "k_scale", "v_scale"):
            # NaN is allowed: quantize_heads returns it for a head that contains NaN.
            ok = not bool(np.any(arrays[name] <= 0))
            call.check(name, ok, "positive", arrays[name].tolist())
    arrays["cu_seqlens_q"] = checked_starts(call, "cu_seqlens_q", cu_seqlens_q, call["Tq"])
    arrays["cu_seqlens_k"] = checked_starts(call, "cu_seqlens_k", cu_seqlens_k, call["Tk"])
    return arrays


def _launch(
    q: Any, k: Any, v: Any, out: Any, lse: Any, dtype: str, max_q: int, **shared: Any
) -> None:
    total_q, num_heads, head_dim = q.shape
    _KERNEL.launch(
        specs(dtype)[0],
        (ceil_div(min(max_q, total_q), _ROWS), num_heads, shared["cu_seqlens_q"].size - 1),
        (32 * _ROWS,),
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        max_keys=k.shape[0],
        total_q=total_q,
        num_heads=num_heads,
        group=num_heads // k.shape[1],
        head_dim=head_dim,
        **named_strides("th", q=q, k=k, v=v, out=out),
        **shared,
    )
