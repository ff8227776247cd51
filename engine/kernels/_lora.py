"""Shared code of the LoRA ops: the adapters of a batch's tokens, and the grid over their tiles."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.kernels._contract import INT32, Contract

__all__ = ["MAX_ADAPTERS", "MAX_TOKENS", "THREADS", "checked_order", "max_tiles", "tile_tokens"]

MAX_ADAPTERS = 256
MAX_TOKENS = 1 << 19
THREADS = 128  # kThreads in CUDA

_FEW_TOKENS = 128  # tokens up to which tiles have 16


def checked_order(call: Contract, order: Any, offsets: Any) -> tuple[Any, Any]:
    """Check `order` (T,) and `offsets` (S + 1,) for the bound sizes T and S; return both.

    Their values are checked on NumPy arrays only.
    """
    num_tokens = call["T"]
    num_adapters = call["S"]
    call.check("T", num_tokens <= MAX_TOKENS, f"at most {MAX_TOKENS}", num_tokens)
    in_range = 1 <= num_adapters <= MAX_ADAPTERS
    call.check("S", in_range, f"from 1 to {MAX_ADAPTERS}", num_adapters)
    order = call.array("order", order, "T", INT32)
    offsets = call.array("offsets", offsets, str(num_adapters + 1), INT32)
    if call.on_cpu:
        ends = (int(offsets[0]), int(offsets[-1]))
        is_ascending = bool((offsets[1:] >= offsets[:-1]).all())  # differences would overflow
        call.check("offsets", is_ascending, "ascending", offsets.tolist())
        call.check("offsets", ends[0] == 0, "0 at the first adapter", ends[0])
        call.check("offsets", ends[1] <= num_tokens, f"at most T = {num_tokens}", ends[1])
        wanted = f"a permutation of range({num_tokens})"
        outside = order[(order < 0) | (order >= num_tokens)]
        call.check("order", outside.size == 0, wanted, outside[:1].tolist())
        times = np.bincount(order, minlength=num_tokens)
        if times.max(initial=0) > 1:
            token = int(times.argmax())
            call.check("order", False, wanted, f"token {token} {int(times[token])} times")
    return order, offsets


def tile_tokens(num_tokens: int) -> int:
    """Return the tokens per tile, of one adapter, of a kernel for `num_tokens` tokens."""
    return 16 if num_tokens <= _FEW_TOKENS else 64


def max_tiles(num_tokens: int, num_groups: int, tile: int) -> int:
    """Return the most tiles of `tile` tokens that groups of `num_tokens` tokens can fill.

    Each group, whose size the host does not know, begins a tile of its own.

    Examples
    --------
    >>> max_tiles(64, 16, 16), max_tiles(1, 256, 16), max_tiles(0, 4, 16)
    (19, 1, 0)
    """
    groups = min(num_groups, num_tokens)
    return (num_tokens + groups * (tile - 1)) // tile
