"""NumPy mirror of `engine.kernels.attention_prefill_fp8`: its specification."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from engine.dtypes import np_dtype

__all__ = ["attention_prefill_fp8"]

Array = np.ndarray[Any, Any]

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def attention_prefill_fp8(
    q: Array,
    k: Array,
    v: Array,
    *,
    q_scale: Array,
    k_scale: Array,
    v_scale: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    causal: bool = True,
    scale: float | None = None,
    dtype: str = "bfloat16",
    return_lse: bool = False,
) -> Any:
    """softmax(scale Q K^T q_scale k_scale) V v_scale of e4m3 codes; P is rounded to e4m3 too."""
    out = np.zeros(q.shape, np_dtype(dtype))
    lse = np.full(q.shape[:2], -np.inf, np.float32)
    group = q.shape[1] // k.shape[1]
    factor = (q.shape[-1] ** -0.5 if scale is None else scale) * np.log2(np.e)
    for b in range(len(cu_seqlens_q) - 1):
        rows = slice(*cu_seqlens_q[b : b + 2])
        keys = slice(*cu_seqlens_k[b : b + 2])
        n = rows.stop - rows.start
        m = keys.stop - keys.start
        if m == 0:
            continue
        hidden = np.arange(m) > np.arange(m - n, m)[:, None] if causal else np.zeros((n, m), bool)
        for h in range(q.shape[1]):
            xq, xk, xv = (
                x.view(_E4M3).astype(np.float32)
                for x in (q[rows, h], k[keys, h // group], v[keys, h // group])
            )
            score = xq @ xk.T * np.float32(factor * q_scale[h] * k_scale[h // group])
            score[hidden] = -np.inf
            top = np.ceil(
                score.max(axis=1, keepdims=True)
            )  # integer, so that the factor 2^-top is exact
            top[np.isneginf(top)] = 0
            p = np.exp2(score - top + 4).astype(_E4M3).astype(np.float32)
            total = p.sum(axis=1, keepdims=True)
            out[rows, h] = p @ xv / np.where(total == 0, 1, total) * v_scale[h // group]
            with np.errstate(divide="ignore"):
                lse[rows, h] = ((np.log2(total) + top - 4) * np.log(2))[:, 0]
    return (out, lse) if return_lse else out
