"""NumPy mirror of `engine.kernels.attention_backward`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

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
) -> tuple[Array, Array, Array]:
    """Return dQ, dK, dV of sum(dout * attention_prefill(q, k, v)), given its `out` and `lse`."""
    (_, num_heads, head_dim) = q.shape
    num_kv_heads = k.shape[1]
    scale = np.float32(head_dim**-0.5 if scale is None else scale)
    dq, dk, dv = (np.zeros(x.shape, q.dtype) for x in (q, k, v))
    for b in range(len(cu_seqlens_q) - 1):
        rows, keys = (slice(*ends[b : b + 2]) for ends in (cu_seqlens_q, cu_seqlens_k))
        for kv_head in range(num_kv_heads):
            first = kv_head * (num_heads // num_kv_heads)
            heads = slice(first, first + num_heads // num_kv_heads)
            q_, dout_, out_ = (_float32(x[rows, heads]).swapaxes(0, 1) for x in (q, dout, out))
            k_ = _float32(k[keys, kv_head])
            v_ = _float32(v[keys, kv_head])
            scores = scale * (q_ @ k_.T)  # (H/K, queries, keys)
            slope = np.float32(1.0)
            if softcap:
                tanh = np.tanh(scores / np.float32(softcap))
                scores = np.float32(softcap) * tanh
                slope = 1 - tanh * tanh
            top = np.where(np.isneginf(lse[rows, heads]), np.inf, lse[rows, heads]).T[..., None]
            hidden = _hidden(scores.shape[1], len(k_), causal, window)
            p = np.exp(np.where(hidden, np.float32(-np.inf), scores) - top)
            delta = np.sum(dout_ * out_, axis=-1, keepdims=True)
            ds = _float32((p * (dout_ @ v_.T - delta) * slope).astype(q.dtype))
            dq[rows, heads] = (scale * (ds @ k_)).swapaxes(0, 1)
            dk[keys, kv_head] = scale * np.einsum("hij,hid->jd", ds, q_, optimize=True)
            p = _float32(p.astype(q.dtype))
            dv[keys, kv_head] = np.einsum("hij,hid->jd", p, dout_, optimize=True)
    return dq, dk, dv


def _hidden(num_queries: int, num_keys: int, causal: bool, window: int) -> Array:
    """Return the mask of hidden (query, key) pairs; if `causal`, the last query sees all keys."""
    key = np.arange(num_keys)
    query = np.arange(num_queries)[:, None]
    last = query + num_keys - num_queries if causal else np.full_like(query, num_keys - 1)
    return (key > last) | (key <= last - window if window else np.False_)


def _float32(x: Array) -> Array:
    return x.astype(np.float32, copy=False)
