"""Paged attention and kv_store on contiguous pages and on views of other frameworks' caches.

Microseconds, bfloat16, 32 query and 8 key/value heads of 128. "contiguous" is the engine's own
cache; the other layouts are those of `engine.testing.cases_attention.PAGE_LAYOUTS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from engine import device as devices
from engine import kernels
from engine.dtypes import BFLOAT16
from engine.testing.timing import measure_gpu, num_copies

DEVICE = "GPU"
LAYOUTS = ("contiguous", "P2KND", "PKN2D", "P2NKD")
_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK = 32, 8, 128, 16
_DECODE = ((1, 512), (1, 2048), (4, 1024), (8, 2048), (16, 1024), (64, 2048), (256, 1024))
_PREFILL = (((4096,), 4096), ((512, 512), 8192), ((2048, 2048), 2048))
_STORE = (1, 256, 8192)


def _normal(shape: tuple[int, ...]) -> Any:
    cupy = devices.cupy()
    values = cupy.random.default_rng(0).standard_normal(shape, dtype=cupy.float32)
    return values.astype(BFLOAT16)


def _pages(count: int, layout: str) -> Any:
    """Return keys and values (P, K, block_size, D)."""
    shape = (count, _KV_HEADS, _BLOCK, _HEAD_DIM)
    if layout == "contiguous":
        return _normal(shape), _normal(shape)
    sizes = {"2": 2, **dict(zip("PKND", shape, strict=True))}
    buffer = _normal(tuple(sizes[axis] for axis in layout))
    return tuple(buffer.transpose([layout.index(axis) for axis in "2PKND"]))


def _sequences(batch: int, context: int, layout: str) -> dict[str, Any]:
    """Return random tables, lengths, and the pages under both ops' names."""
    cupy = devices.cupy()
    width = context // _BLOCK
    order = np.random.default_rng(1).permutation(batch * width).astype(np.int32)
    k, v = _pages(batch * width, layout)
    where = {"block_tables": cupy.asarray(order.reshape(batch, width))}
    return {"k": k, "v": v, "where": where | {"context_lens": cupy.full(batch, context, "i4")}}


def _decode(batch: int, context: int, layout: str) -> list[Callable[[], Any]]:
    q = _normal((batch, 1, _HEADS, _HEAD_DIM))
    copies = min(8, num_copies(4 * batch * context * _KV_HEADS * _HEAD_DIM))
    made = [_sequences(batch, context, layout) for _ in range(copies)]
    return [lambda m=m: kernels.attention_decode(q, m["k"], m["v"], **m["where"]) for m in made]


def _prefill(lens: tuple[int, ...], context: int, layout: str) -> list[Callable[[], Any]]:
    made = _sequences(len(lens), context, layout)
    starts = devices.cupy().asarray(np.cumsum([0, *lens]).astype(np.int32))
    options = {"cu_seqlens_q": starts, "max_seqlen_q": max(lens), **made["where"]}
    q = _normal((sum(lens), _HEADS, _HEAD_DIM))
    return [lambda: kernels.attention_prefill(q, made["k"], made["v"], **options)]


def _store(tokens: int, layout: str) -> list[Callable[[], Any]]:
    rows = _normal((tokens, 2, _KV_HEADS, _HEAD_DIM))
    k, v = _pages(4096, layout)
    slots = np.random.default_rng(1).permutation(4096 * _BLOCK)[:tokens]
    slots = devices.cupy().asarray(slots.astype(np.int64))
    return [lambda: kernels.kv_store(rows[:, 0], rows[:, 1], k, v, slots)]


def _rows(layout: str) -> dict[str, float]:
    """Return microseconds by case."""
    cases = {f"decode {b} x {n}": _decode(b, n, layout) for b, n in _DECODE}
    cases |= {f"prefill {len(q)} x {q[0]} of {n}": _prefill(q, n, layout) for q, n in _PREFILL}
    cases |= {f"kv_store {n}": _store(n, layout) for n in _STORE}
    return {
        name: 1e6 * measure_gpu(calls, replays=15, min_launches=10).median
        for name, calls in cases.items()
    }


def main(device: Any) -> list[dict[str, Any]]:
    """Measure, print, and return a row for each case: microseconds by layout."""
    if not device.is_cuda:
        raise SystemExit("page_layouts takes a GPU: the mirrors copy pages of any layout")
    found = {layout: _rows(layout) for layout in LAYOUTS}
    rows = []
    for name in found["contiguous"]:
        times = {layout: found[layout][name] for layout in LAYOUTS}
        print(f"{name:24}" + "".join(f"{time:10.2f}" for time in times.values()))
        rows.append({"case": name, **times})
    return rows
