"""NumPy mirror of `engine.kernels.attention_backward`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype
from engine.reference._attention import pattern_sees

__all__ = ["attention_backward"]

Array = np.ndarray[Any, Any]


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    causal: bool = True,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    pattern: Any = None,
    sinks: Array | None = None,
    dlse: Array | None = None,
) -> tuple[Array, ...]:
    """Return dQ, dK, dV (and dsinks, with sinks) of sum(dout * out) + sum(dlse * lse).

    out, lse = attention_prefill(q, k, v, return_lse=True). Computed in float32, or in float64 for
    float64 arrays.
    """
    wide = accumulation_dtype(q.dtype)
    group = q.shape[1] // k.shape[1]
    scale = wide.type(q.shape[2] ** -0.5 if scale is None else scale)
    dq, dk, dv = (np.zeros(x.shape, q.dtype) for x in (q, k, v))
    delta = np.sum(dout.astype(wide) * out.astype(wide), axis=-1)
    if dlse is not None:
        delta -= dlse
    for b in range(len(cu_seqlens_q) - 1):
        rows, keys = (slice(*ends[b : b + 2]) for ends in (cu_seqlens_q, cu_seqlens_k))
        seen = _seen(len(q[rows]), len(k[keys]), causal, window, pattern)
        for kv_head in range(k.shape[1]):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            q_, dout_ = (x[rows, heads].astype(wide).swapaxes(0, 1) for x in (q, dout))
            k_, v_ = (x[keys, kv_head].astype(wide) for x in (k, v))
            scores = scale * (q_ @ k_.T)  # (H/K, queries, keys)
            slope = wide.type(1)
            if softcap:
                tanh = np.tanh(scores / wide.type(softcap))
                scores = wide.type(softcap) * tanh
                slope = 1 - tanh * tanh
            top = np.where(np.isneginf(lse[rows, heads]), np.inf, lse[rows, heads]).T[..., None]
            p = np.exp(np.where(seen, scores, -np.inf).astype(wide, copy=False) - top)
            ds = p * (dout_ @ v_.T - delta[rows, heads].T[..., None]) * slope
            p, ds = (x.astype(q.dtype).astype(wide, copy=False) for x in (p, ds))
            dq[rows, heads] = (scale * (ds @ k_)).swapaxes(0, 1)
            dk[keys, kv_head] = scale * np.einsum("hij,hid->jd", ds, q_, optimize=True)
            dv[keys, kv_head] = np.einsum("hij,hid->jd", p, dout_, optimize=True)
    if sinks is None:
        return dq, dk, dv
    weight = np.exp(sinks - np.where(np.isneginf(sinks), 0, lse))
    return dq, dk, dv, -np.sum(weight * delta, axis=0)


def _seen(num_queries: int, num_keys: int, causal: bool, window: int, pattern: Any) -> Array:
    """Return the mask of visible (query, key) pairs; if `causal`, the last query sees all keys."""
    key = np.arange(num_keys)
    query = np.arange(num_queries)
    position = query + num_keys - num_queries if causal else query
    last = (position if causal else np.full_like(query, num_keys - 1))[:, None]
    seen: Array = (key <= last) & (key > last - window if window else np.True_)
    return seen if pattern is None else seen & pattern_sees(pattern, position, key)
