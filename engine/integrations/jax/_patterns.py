"""Attention patterns as options: values that hash, and that a call's attribute can hold."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from engine.integrations.jax._contract import TraceContract
from engine.kernels import BlockSparse, Periodic

__all__ = ["pattern_of", "pattern_option"]


def pattern_option(call: TraceContract, pattern: Any) -> tuple[Any, ...] | None:
    """Return the option for a pattern; `pattern_of` is its inverse."""
    if pattern is None:
        return None
    if isinstance(pattern, Periodic):
        return (pattern.period, pattern.width, pattern.offset)
    is_pattern = isinstance(pattern, BlockSparse)
    call.check("pattern", is_pattern, "BlockSparse, Periodic or None", type(pattern).__name__)
    bits = np.packbits(pattern.mask).tobytes().hex()
    return (bits, *pattern.mask.shape, pattern.block_q, pattern.block_k)


@lru_cache(maxsize=256)
def pattern_of(option: tuple[Any, ...] | None) -> BlockSparse | Periodic | None:
    """Return the pattern. One object a pattern: it keeps its bits on the device."""
    if option is None:
        return None
    if len(option) == 3:
        return Periodic(*option)
    bits, rows, columns, block_q, block_k = option
    flat = np.unpackbits(np.frombuffer(bytes.fromhex(bits), np.uint8), count=rows * columns)
    return BlockSparse(flat.reshape(rows, columns).astype(bool), block_q, block_k)
