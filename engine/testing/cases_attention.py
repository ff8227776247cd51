"""Sequences, pages and shapes for the tests of the attention kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.dtypes import KV_CODE_DTYPES, np_dtype
from engine.reference._quantized_kv import quantize_kv
from engine.testing.cases import normal, to_module

__all__ = [
    "DECODE",
    "DECODE_SINKS",
    "PAGE_LAYOUTS",
    "PREFILL",
    "PREFILL_SINKS",
    "AttentionCase",
    "as_codes",
    "cu_seqlens",
    "in_layout",
    "normal_on",
    "paged_cache",
]

Array = np.ndarray[Any, Any]

_POISONS = {codes.dtype: codes.poison for codes in KV_CODE_DTYPES.values()}
_NO_BLOCK = 2**30  # block id of table entries that must not be read: outside every cache


@dataclass(frozen=True)
class AttentionCase:
    """Sequences of `lens_k` tokens, of which `lens_q` are new; `block_size` 0 means dense keys.

    `sinks` are repeated over the heads; an empty tuple means no sinks.
    """

    lens_q: tuple[int, ...]
    lens_k: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 0
    causal: bool = True
    scale: float | None = None
    window: int = 0
    softcap: float = 0.0
    sinks: tuple[float, ...] = ()
    chunk: int = 0

    @property
    def rule(self) -> dict[str, Any]:
        """Keyword arguments that determine how the op computes scores."""
        rule = {"scale": self.scale, "window": self.window, "softcap": self.softcap}
        return rule | ({"chunk": self.chunk} if self.chunk else {})

    @property
    def head_sinks(self) -> Array:
        """Sink per head, (H,) float32."""
        return np.resize(np.asarray(self.sinks, np.float32), self.num_heads)

    @property
    def reduction(self) -> int:
        """Length of the reduction per element of the result: D for a score, then the keys."""
        return self.head_dim + max(self.lens_k, default=0)

    def __str__(self) -> str:
        mask = "" if self.causal else "-full"
        extra = f"{mask}-w{self.window}-c{self.softcap:g}-s{self.scale}"
        extra += f"-k{self.chunk}" if self.chunk else ""
        extra += "".join(f"-{sink:g}" for sink in self.sinks)
        q, k = ("_".join(map(str, lens)) for lens in (self.lens_q, self.lens_k))
        heads = f"H{self.num_heads}K{self.num_kv_heads}D{self.head_dim}"
        return f"q{q}-k{k}-{heads}-bs{self.block_size}{extra}"


def cu_seqlens(lens: Sequence[int]) -> Array:
    """Return the start of each sequence, and the end of the last: (B+1,) int32.

    Examples
    --------
    >>> cu_seqlens([3, 0, 2])
    array([0, 3, 3, 5], dtype=int32)
    """
    return np.concatenate([[0], np.cumsum(lens, dtype=np.int32)]).astype(np.int32)


def normal_on(xp: Any, shape: Sequence[int], dtype: str, seed: int) -> Any:
    """Return random values in module `xp`, generated there because copying gigabytes is slow.

    Examples
    --------
    >>> normal_on(np, (2, 3), "bfloat16", seed=0).shape
    (2, 3)
    """
    if xp is np:
        return normal(shape, dtype, seed)
    values = xp.random.default_rng(seed).standard_normal(tuple(shape), dtype=xp.float32)
    return values.astype(np_dtype(dtype))


def paged_cache(
    lens: Sequence[int],
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: str,
    seed: int,
    *,
    num_shared: int = 0,
) -> tuple[Array, Array, Array, Array]:
    """Return (k_pages, v_pages, block_tables, context_lens) with blocks in random order.

    The first `num_shared` blocks are common to all sequences. Everything that belongs to no
    sequence is poisoned: pages and page tails with NaN, table entries with ids outside the cache.
    """
    rng = np.random.default_rng(seed)
    counts = [-(-length // block_size) for length in lens]
    own = [max(0, n - num_shared) for n in counts]
    ids = rng.permutation(sum(own) + num_shared + 2).astype(np.int32)
    tables = np.full((len(lens), max(counts, default=0) + 1), _NO_BLOCK, np.int32)
    shape = (len(ids), num_kv_heads, block_size, head_dim)
    is_used = np.zeros((len(ids), block_size), bool)
    taken = num_shared
    for b, (length, count, new) in enumerate(zip(lens, counts, own, strict=True)):
        tables[b, :count] = [*ids[: count - new], *ids[taken : taken + new]]
        taken += new
        slots = np.arange(length)
        is_used[tables[b, slots // block_size], slots % block_size] = True
    pages = []
    for i in (1, 2):
        values = normal(shape, dtype, seed + i)
        values.transpose(0, 2, 1, 3)[~is_used] = np.nan
        pages.append(values)
    return pages[0], pages[1], tables, np.asarray(lens, np.int32)


# Orders of the axes of keys and values in one buffer: 2 for the two of them, P, K, N (block_size),
# D (plus the last number, padding), and L for the pages of several layers.
PAGE_LAYOUTS = (
    "P2KND0",  # layout that engine.integrations.vllm requests
    "PKN2D0",  # vLLM 0.33: [blocks, kv_heads, block_size, 2 * head]
    "P2NKD0",  # vLLM 0.24: [blocks, 2, block_size, kv_heads, head]
    "2PNKD0",  # [2, blocks, block_size, kv_heads, head]
    "KP2ND0",
    "PLN2KD0",
    "PK2ND8",  # rows longer than D, 16-byte aligned
    "P2NKD1",  # unaligned rows
)


def in_layout(xp: Any, k_pages: Array, v_pages: Array, layout: str) -> tuple[Any, Any]:
    """Return the pages as two views, in module `xp`, of one buffer in a layout of `PAGE_LAYOUTS`.

    The rest of the buffer is poisoned.

    Examples
    --------
    >>> pages = np.zeros((3, 2, 16, 8), np.float32)
    >>> [view.strides for view in in_layout(np, pages, pages, "PKN2D0")]
    [(2048, 1024, 64, 4), (2048, 1024, 64, 4)]
    """
    order = layout[:-1]
    pages, heads, tokens, head_dim = k_pages.shape
    width = head_dim + int(layout[-1])
    sizes = {"2": 2, "P": pages, "K": heads, "N": tokens, "D": width, "L": 3}
    poison = _POISONS.get(k_pages.dtype, np.nan)
    buffer = np.full([sizes[axis] for axis in order], poison, k_pages.dtype)
    for i, values in enumerate((k_pages, v_pages)):
        _both(buffer, order, head_dim)[i][...] = values
    both = _both(to_module(xp, buffer), order, head_dim)
    return both[0], both[1]


def _both(buffer: Any, order: str, head_dim: int) -> Any:
    """Return the view (2, P, K, N, D) of a buffer whose axes have this order."""
    axes = [order.index(axis) for axis in "2PKND"]
    if "L" in order:
        layers = order.index("L")
        return buffer.transpose([layers, *axes])[1][..., :head_dim]
    return buffer.transpose(axes)[..., :head_dim]


_BASE = AttentionCase((70, 33), (70, 200))

# Lengths around multiples of the tile sizes (32, 64, 128), empty sequences, and every option.
PREFILL: tuple[AttentionCase, ...] = (
    AttentionCase((1,), (1,)),
    AttentionCase((1, 2, 31, 32, 33), (1, 63, 64, 65, 129), 3, 3),
    AttentionCase((64, 65, 127, 0, 128), (64, 65, 127, 0, 128), 4, 4),
    AttentionCase((0, 5, 0), (10, 0, 0)),
    AttentionCase((40, 3), (7, 300), 8, 2, causal=True),
    _BASE,
    replace(_BASE, block_size=16),
    replace(_BASE, block_size=32, window=50),
    replace(_BASE, block_size=64, softcap=5.0),
    replace(_BASE, block_size=128, causal=False),
    replace(_BASE, window=1),
    replace(_BASE, window=64, softcap=20.0),
    replace(_BASE, causal=False, scale=0.25),
    replace(_BASE, lens_q=(129, 17), lens_k=(640, 17), num_heads=9, num_kv_heads=3),  # SmolLM2
    replace(_BASE, num_heads=8, num_kv_heads=1, head_dim=256),  # Gemma
    replace(_BASE, num_heads=8, num_kv_heads=1, head_dim=512, block_size=16),  # Gemma 4
    replace(_BASE, num_heads=2, num_kv_heads=2, head_dim=512, window=50, softcap=5.0),
    replace(_BASE, num_heads=2, num_kv_heads=1, head_dim=330, block_size=16),
    replace(_BASE, num_heads=8, num_kv_heads=1, head_dim=32),
    replace(_BASE, num_heads=2, num_kv_heads=2, head_dim=80, block_size=16),
    replace(_BASE, num_heads=3, num_kv_heads=1, head_dim=96),  # Phi-3
    replace(_BASE, num_heads=4, num_kv_heads=1, head_dim=128, block_size=16),  # Llama 3
    replace(_BASE, num_heads=2, num_kv_heads=1, head_dim=192),
    replace(_BASE, num_heads=2, num_kv_heads=1, head_dim=36),  # unaligned rows: scalar loads
    replace(_BASE, num_heads=2, num_kv_heads=2, head_dim=7, block_size=16, window=20),
)

# Decode cases: all sequences have the same number of new tokens.
DECODE: tuple[AttentionCase, ...] = (
    AttentionCase((1,), (1,), block_size=16),
    AttentionCase((1,) * 6, (0, 1, 15, 16, 17, 64), block_size=16),
    AttentionCase((1,) * 4, (63, 65, 127, 129), 3, 3, block_size=32),
    AttentionCase((1,) * 2, (1000, 300), 9, 3, block_size=16),  # SmolLM2
    AttentionCase((1,), (700,), 32, 8, 128, block_size=16),  # Llama 3
    AttentionCase((2, 2), (200, 1), 8, 8, 64, block_size=64),
    AttentionCase((3, 3), (100, 2), 8, 1, 96, block_size=16),
    AttentionCase((4, 4), (300, 64), 8, 2, 128, block_size=128),
    AttentionCase((5, 5), (70, 500), 16, 2, 64, block_size=16),
    AttentionCase((6,), (90,), 4, 1, 256, block_size=32),
    AttentionCase((7,), (130,), 6, 2, 80, block_size=16, window=33),
    AttentionCase((8, 8), (300, 8), 12, 1, 128, block_size=16),
    AttentionCase((1, 1), (400, 20), 4, 2, 64, block_size=16, window=100),
    AttentionCase((1, 1), (400, 20), 4, 1, 192, block_size=16, softcap=5.0, scale=0.2),
    AttentionCase((2, 2), (150, 31), 4, 4, 32, block_size=16, window=1),
    AttentionCase((2, 2), (150, 31), 2, 1, 36, block_size=16),
    AttentionCase((1, 1), (150, 31), 8, 1, 256, block_size=16),
    AttentionCase((1,) * 3, (700, 0, 31), 8, 1, 512, block_size=16),  # Gemma 4
    AttentionCase((6,), (90,), 4, 1, 512, block_size=32),
    AttentionCase((2, 2), (150, 31), 4, 2, 330, block_size=16, window=40),
)

# Sinks near, far above and far below the scores, and none. In rows without keys, the sink alone
# (-1e5) is the log-sum-exp.
_MIXED = (0.5, 2.0, -1.0, 1e4, -1e4, 0.0, -np.inf)
_HUGE = (1e5, 3e37)
_TINY = (-1e5, -3e37)
_SINKS = replace(_BASE, num_heads=8, num_kv_heads=1, sinks=_MIXED)
PREFILL_SINKS: tuple[AttentionCase, ...] = (
    _SINKS,
    replace(_SINKS, sinks=_HUGE),
    replace(_SINKS, sinks=_TINY),
    replace(_SINKS, lens_q=(1,), lens_k=(1,)),
    replace(_SINKS, lens_q=(40, 3, 5), lens_k=(7, 300, 0)),  # some rows see no key
    replace(_SINKS, lens_q=(40, 3), lens_k=(7, 300), sinks=_TINY, block_size=16),
    replace(_SINKS, block_size=16, window=20),
    replace(_SINKS, block_size=32, window=1, softcap=5.0),
    replace(_SINKS, causal=False, block_size=64),
    replace(_SINKS, lens_q=(5, 1), lens_k=(2100, 900), head_dim=128, block_size=16),  # uses splits
    replace(_SINKS, lens_q=(7,), lens_k=(1500,), num_heads=9, num_kv_heads=3, block_size=64),
    replace(_SINKS, num_heads=64, num_kv_heads=8, lens_q=(200,), lens_k=(330,), window=128),
    replace(_SINKS, num_heads=4, num_kv_heads=2, head_dim=128),
    replace(_SINKS, num_heads=2, num_kv_heads=2, head_dim=36),
    replace(_SINKS, num_heads=2, num_kv_heads=1, head_dim=256),
    replace(_SINKS, num_heads=2, num_kv_heads=1, head_dim=512),
)
_NEW = replace(_SINKS, block_size=16, lens_q=(1, 1), lens_k=(400, 20))
DECODE_SINKS: tuple[AttentionCase, ...] = (
    _NEW,
    replace(_NEW, sinks=_HUGE),
    replace(_NEW, sinks=_TINY),
    replace(_NEW, lens_q=(1,), lens_k=(1,)),
    replace(_NEW, lens_q=(1,) * 6, lens_k=(0, 1, 15, 16, 17, 64)),
    replace(_NEW, lens_q=(1,) * 3, lens_k=(0, 3000, 5), head_dim=128, num_kv_heads=2),
    replace(_NEW, lens_q=(1,) * 3, lens_k=(0, 70, 5), sinks=_TINY),
    replace(_NEW, window=100),
    replace(_NEW, softcap=5.0, scale=0.2, window=30),
    replace(_NEW, num_heads=64, num_kv_heads=8, lens_k=(2000, 300), window=128),
    replace(_NEW, lens_q=(1,) * 70, lens_k=tuple(range(0, 700, 10)), num_kv_heads=4),  # persistent
    replace(_NEW, lens_q=(1,) * 40, lens_k=(900, 0) * 20, num_kv_heads=4, head_dim=128),
    replace(_NEW, lens_q=(4, 4), lens_k=(300, 2), num_kv_heads=2, head_dim=128),  # empty rows
    replace(_NEW, lens_q=(8,), lens_k=(1500,), num_kv_heads=2, window=40),  # query tokens split
    replace(_NEW, lens_q=(8,) * 3, lens_k=(600, 90, 8)),
    replace(_NEW, lens_q=(2, 2), lens_k=(150, 31), num_heads=2, head_dim=36),
    replace(_NEW, lens_k=(150, 31), head_dim=256),
    replace(_NEW, lens_k=(150, 31), head_dim=512),
)


def as_codes(pages: Array, seed: int, codes: str = "fp8") -> tuple[Array, Array]:
    """Quantize pages (P, K, block_size, D); return the codes and the heads' scales (K,).

    The scales of some heads are so small that their largest values saturate. NaN becomes the code
    `poison`.
    """
    kind = KV_CODE_DTYPES[codes]
    num_blocks, num_heads, block_size, head_dim = pages.shape
    rows = pages.transpose(0, 2, 1, 3).reshape(-1, num_heads, head_dim)
    factors = np.random.default_rng(seed).uniform(0.3, 2.0, num_heads)
    scale = (factors * 3.0 / kind.largest).astype(np.float32)
    stored = quantize_kv(rows, scale, kind.dtype)
    stored[np.isnan(rows)] = kind.poison
    stored = stored.reshape(num_blocks, block_size, num_heads, head_dim)
    return np.ascontiguousarray(stored.transpose(0, 2, 1, 3)), scale
