"""Softmax attention of one sequence, shared by the attention mirrors."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype
from engine.reference._quantized_kv import dequantize_kv

__all__ = ["attend", "gather_pages", "pattern_sees"]

Array = np.ndarray[Any, Any]

# Maximum scores per chunk: bounds the memory for long sequences and fits the CPU's cache.
_MAX_SCORES = 1 << 20


def attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool,
    scale: float,
    window: int,
    softcap: float,
    tree: Array | None = None,
    pattern: Any = None,
    sinks: Array | None = None,
) -> tuple[Array, Array]:
    """Return softmax(cap(scale Q K^T)) V in q's dtype, and the log-sum-exp of each row's scores.

    q (n, H, D) holds the last n queries of a sequence with k (K, m, D) and v (K, m, Dv). Computed
    in float32 (float64 for float64), except that P = exp(score - max) is rounded to q's dtype
    before P V, as tensor cores require; the result is divided by the sum of P before that rounding.
    `tree` (n,) holds bit masks: among the last n keys, query i sees key j only if bit j of tree[i]
    is set.
    `sinks` (H,) holds one extra score per head, without a value, which counts in the log-sum-exp.
    """
    (n, num_heads, _) = q.shape
    (_, m, _) = k.shape
    out = np.zeros((n, num_heads, v.shape[-1]), q.dtype)
    lse = np.full((n, num_heads), -np.inf, accumulation_dtype(q.dtype))
    step = max(1, _MAX_SCORES // max(1, num_heads * m))
    for start in range(0, n, step):
        rows = slice(start, min(n, start + step))
        last = np.arange(m - n, m)[rows] if causal else np.full(n, m - 1)[rows]  # last visible key
        low = max(0, last[0] - window + 1) if window else 0
        high = last[-1] + 1
        if high > low:
            scores = _scores(q[rows], k[:, low:high], scale, softcap)  # (K, H/K, rows, keys)
            keys = np.arange(low, high)
            hidden = keys > last[:, None]
            if window:
                hidden |= keys <= last[:, None] - window
            if tree is not None:
                bits = np.maximum(keys - (m - n), 0).astype(np.uint64)
                hidden |= (keys >= m - n) & (tree[rows, None] >> bits & np.uint64(1) == 0)
            if pattern is not None:
                hidden = hidden | ~pattern_sees(
                    pattern, last if causal else np.arange(n)[rows], keys
                )
            if hidden.any():
                np.copyto(scores, -np.inf, where=hidden)
            out[rows], lse[rows] = _softmax_product(scores, v[:, low:high], q.dtype, sinks)
        elif sinks is not None:
            lse[rows] = sinks
    return out, lse


def _add_sinks(product: Array, total: Array, top: Array, sinks: Array) -> tuple[Array, ...]:
    """Add (K, H/K) sinks; return P V, the sum of P, and the score both are relative to."""
    sinks = sinks[..., None, None]
    top = np.where(total == 0, top.dtype.type(-np.inf), top)
    high = np.maximum(top, sinks)
    base = np.where(np.isneginf(high), high.dtype.type(0), high)
    weight = np.exp(top - base)
    return product * weight, total * weight + np.exp(sinks - base), base


def pattern_sees(pattern: Any, positions: Array, keys: Array) -> Array:
    """Return the mask (positions, keys): True if the pattern lets a position see a key."""
    if hasattr(pattern, "period"):
        distance = positions[:, None] - keys + pattern.offset
        found: Array = distance % pattern.period < pattern.width
        return found
    rows = positions // pattern.block_q
    columns = keys // pattern.block_k
    num_rows, num_columns = pattern.mask.shape
    seen: Array = np.zeros((len(rows), len(columns)), bool)
    row_ok = (rows >= 0) & (rows < num_rows)
    column_ok = columns < num_columns
    seen[np.ix_(row_ok, column_ok)] = pattern.mask[np.ix_(rows[row_ok], columns[column_ok])]
    return seen


def _scores(q: Array, k: Array, scale: float, softcap: float) -> Array:
    (n, _, head_dim) = q.shape
    (num_kv_heads, m, _) = k.shape
    wide = accumulation_dtype(q.dtype)
    grouped = q.reshape(n, num_kv_heads, -1, head_dim).transpose(1, 2, 0, 3)
    grouped = grouped.astype(wide).reshape(num_kv_heads, -1, head_dim) * wide.type(scale)
    scores: Array = grouped @ k.astype(wide, copy=False).transpose(0, 2, 1)
    if softcap:
        scores = np.tanh(scores / wide.type(softcap)) * wide.type(softcap)
    return scores.reshape(num_kv_heads, -1, n, m)


def _softmax_product(
    scores: Array, v: Array, dtype: Any, sinks: Array | None
) -> tuple[Array, Array]:
    """Return softmax(scores) V (n, H, D) and the log-sum-exp (n, H); 0 and -inf without keys."""
    n, m = scores.shape[2:]
    top = scores.max(axis=-1, keepdims=True)
    top[np.isneginf(top)] = 0.0
    scores -= top
    p = np.exp(scores, out=scores)
    total = p.sum(axis=-1, keepdims=True)
    p = p.astype(dtype, copy=False).astype(scores.dtype, copy=False)
    product = p.reshape(len(v), -1, m) @ v.astype(scores.dtype, copy=False)
    product = product.reshape(*scores.shape[:3], -1)
    if sinks is not None:
        sinks = sinks.reshape(scores.shape[:2])
        product, total, top = _add_sinks(product, total, top, sinks)
    out = product / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    return out.reshape(-1, n, out.shape[-1]).transpose(1, 0, 2), lse.reshape(-1, n).T


def gather_pages(
    pages: Array, block_table: Array, length: int, scale: Array | None = None
) -> Array:
    """Gather the first `length` tokens of a sequence, (K, length, D), from its pages.

    With a `scale` (K,) the pages are quantized, and the result is float32.
    """
    _, num_kv_heads, block_size, head_dim = pages.shape
    blocks = block_table[: -(-length // block_size)]
    tokens: Array = pages[blocks, np.arange(num_kv_heads)[:, None]]  # (K, blocks, block_size, D)
    tokens = tokens.reshape(num_kv_heads, -1, head_dim)[:, :length]
    return tokens if scale is None else dequantize_kv(tokens, scale)
