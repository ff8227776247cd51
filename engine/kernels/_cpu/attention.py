"""Attention of one new token a sequence, on float32 pages: in C, or in few NumPy calls."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine import reference, threads
from engine.kernels._cpu import compiled
from engine.kernels._cpu.compiled import Kernels
from engine.kernels._cpu.norms import normalised

__all__ = ["attention_decode"]

Array = np.ndarray[Any, Any]

_FLOAT32 = np.dtype(np.float32)
# Multiply-adds of scores from which on the C kernel shares its work with helpers: about 0.1 ms.
_MIN_SHARED = 1 << 20
# If every score is -inf, so are their differences to the lowest float, and the result is 0.
_LOWEST = np.finfo(np.float32).min
_TINY = np.finfo(np.float32).tiny


def attention_decode(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    *,
    block_tables: Array,
    context_lens: Array,
    k: Array | None = None,
    v: Array | None = None,
    positions: Array | None = None,
    cos_sin: Array | None = None,
    slot_mapping: Array | None = None,
    q_weight: Array | None = None,
    k_weight: Array | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    chunk: int = 0,
    tree_mask: Array | None = None,
    sinks: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    return_lse: bool = False,
) -> Any:
    """See `engine.kernels.attention_decode`."""
    is_plain = q.shape[1] == 1 and sinks is None and tree_mask is None
    is_plain = is_plain and not softcap and not return_lse
    if not is_plain or q.dtype != _FLOAT32 or k_pages.dtype != _FLOAT32:
        return reference.attention_decode(
            q,
            k_pages,
            v_pages,
            block_tables=block_tables,
            context_lens=context_lens,
            k=k,
            v=v,
            positions=positions,
            cos_sin=cos_sin,
            slot_mapping=slot_mapping,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=eps,
            weight_offset=weight_offset,
            scale=scale,
            window=window,
            softcap=softcap,
            chunk=chunk,
            tree_mask=tree_mask,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            return_lse=return_lse,
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kernels = compiled.kernels()
    pages = (k_pages, v_pages, block_tables, context_lens)
    new_tokens = (k, v, positions, cos_sin, slot_mapping, q_weight, k_weight)
    if kernels is not None and q.size and _are_aligned(q, *pages, *new_tokens):
        numbers = (eps, weight_offset, scale, window, chunk)
        return _attend_in_c(kernels, q, pages, new_tokens, numbers)
    queries = q[:, 0]
    if k is not None:
        assert v is not None and positions is not None
        assert cos_sin is not None and slot_mapping is not None
        keys = k[:, 0]
        if q_weight is not None:
            queries = normalised(queries, q_weight, eps, weight_offset)
        if k_weight is not None:
            keys = normalised(keys, k_weight, eps, weight_offset)
        rows = cos_sin[positions][:, None]
        queries = _rotated(queries, rows)
        _store(_rotated(keys, rows), v[:, 0], k_pages, v_pages, slot_mapping)
    out = np.zeros(q.shape, np.float32)
    queries = queries * np.float32(scale)
    for b, length in enumerate(context_lens.tolist()):
        reach = (length - 1) % chunk + 1 if chunk else window or length
        if length:
            first = max(0, length - reach)
            sequence = _Keys(block_tables[b], first, length, k_pages.shape[2])
            _attend(queries[b], sequence, k_pages, v_pages, out[b, 0])
    return out


def _are_aligned(*arrays: Array | None) -> bool:
    """Tell whether addresses and strides of the arrays are whole numbers of elements."""
    return all(x is None or x.flags.aligned for x in arrays)


def _attend_in_c(
    kernels: Kernels,
    q: Array,
    pages: tuple[Array, ...],
    new_tokens: tuple[Any, ...],
    numbers: tuple[float, float, float, int, int],
) -> Array:
    k_pages, v_pages, block_tables, context_lens = pages
    k, v, positions, cos_sin, slot_mapping, q_weight, k_weight = new_tokens
    eps, weight_offset, scale, window, chunk = numbers
    batch, _, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_pages.shape
    scratch = np.empty(q.shape, np.float32)
    out = np.empty(q.shape, np.float32)
    arguments = (
        *(out.ctypes.data, scratch.ctypes.data),
        *(*_heads(q), *_heads(k), *_heads(v)),
        *(_address(positions), _address(cos_sin), 0 if cos_sin is None else cos_sin.shape[1]),
        *(_address(slot_mapping), _address(q_weight), _address(k_weight), eps, weight_offset),
        *(k_pages.ctypes.data, v_pages.ctypes.data),
        *(step // k_pages.itemsize for step in k_pages.strides[:3]),
        *(block_size, block_tables.ctypes.data, block_tables.strides[0] // block_tables.itemsize),
        *(context_lens.ctypes.data, batch, num_heads, num_kv_heads, head_dim),
        *(scale, window, chunk),
    )
    num_keys = sum(min(length, window or length) for length in context_lens.tolist())
    if num_keys * num_heads * head_dim < _MIN_SHARED or not threads.are_own():
        kernels.attend(*arguments, 1)
        return out
    with kernels.helpers.at_work(batch * num_heads) as num_threads:
        kernels.attend(*arguments, num_threads)
    return out


def _address(x: Array | None) -> int | None:
    return None if x is None else x.ctypes.data


def _heads(x: Array | None) -> tuple[int | None, int, int]:
    """Return the address and the strides, in floats, of sequences and heads (B, 1, H, D)."""
    if x is None:
        return None, 0, 0
    return x.ctypes.data, x.strides[0] // x.itemsize, x.strides[2] // x.itemsize


def _rotated(x: Array, cos_sin: Array) -> Array:
    """Return the heads (B, H, D) rotated by rows [cos | sin] (B, 1, R): see `rope`."""
    half = cos_sin.shape[2] // 2
    cos = cos_sin[..., :half]
    sin = cos_sin[..., half:]
    first = x[..., :half]
    second = x[..., half : 2 * half]
    y = np.empty(x.shape, np.float32)
    np.subtract(first * cos, second * sin, out=y[..., :half])
    np.add(second * cos, first * sin, out=y[..., half : 2 * half])
    if 2 * half < x.shape[2]:
        y[..., 2 * half :] = x[..., 2 * half :]
    return y


def _store(k: Array, v: Array, k_pages: Array, v_pages: Array, slot_mapping: Array) -> None:
    """Write k and v (B, K, D) to their slots; a negative slot stores nothing."""
    block_size = k_pages.shape[2]
    for b, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            k_pages[block, :, offset] = k[b]
            v_pages[block, :, offset] = v[b]


class _Keys:
    """The keys [first, length) of a sequence in its pages."""

    __slots__ = ("_blocks", "_rows")

    def __init__(self, table: Array, first: int, length: int, block_size: int) -> None:
        start = first // block_size
        blocks = table[start : -(-length // block_size)]
        ids = blocks.tolist()
        low = ids[0]
        is_run = ids == list(range(low, low + len(ids)))
        self._blocks: Any = slice(low, low + len(ids)) if is_run else blocks
        self._rows = slice(first - start * block_size, length - start * block_size)

    def gather(self, pages: Array) -> Array:
        """Return the rows (K, keys, D)."""
        found = pages[self._blocks].transpose(1, 0, 2, 3)
        rows: Array = found.reshape(len(found), -1, found.shape[3])[:, self._rows]
        return rows


def _attend(q: Array, keys: _Keys, k_pages: Array, v_pages: Array, out: Array) -> None:
    """Write softmax(q Kᵀ) V of the scaled queries (H, D) to `out` (H, D)."""
    num_heads, head_dim = q.shape
    k = keys.gather(k_pages)
    scores = np.matmul(q.reshape(len(k), -1, head_dim), k.transpose(0, 2, 1))  # (K, H/K, keys)
    scores -= np.maximum.reduce(scores, axis=2, keepdims=True, initial=_LOWEST)
    np.exp(scores, out=scores)
    total = np.add.reduce(scores, axis=2, keepdims=True)
    product = np.matmul(scores, keys.gather(v_pages))
    product /= np.maximum(total, _TINY, out=total)
    out[...] = product.reshape(num_heads, head_dim)
