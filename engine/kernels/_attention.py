"""What attention_prefill and attention_decode have in common: contract, and how D is padded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.errors import ShapeError
from engine.kernels._contract import INT32, Contract

__all__ = ["BLOCK_SIZES", "MAX_HEAD_DIM", "Pages", "ScoreRule", "check_heads", "is_aligned"]

MAX_HEAD_DIM = 256
BLOCK_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class ScoreRule:
    """How a score is made and which keys count: `scale` > 0; 0 means no `window`, no `softcap`."""

    scale: float
    window: int
    softcap: float

    @classmethod
    def checked(
        cls, call: Contract, head_dim: int, scale: float | None, window: int, softcap: float
    ) -> ScoreRule:
        """Check the three numbers; a `scale` of None is head_dim**-0.5."""
        scale = head_dim**-0.5 if scale is None else call.number("scale", scale)
        call.check("scale", 0 < scale < math.inf, "positive and finite", scale)
        check_count(call, "window", window)
        softcap = call.number("softcap", softcap, low=0.0)
        call.check("softcap", softcap < math.inf, "finite", softcap)
        return cls(scale, int(window), softcap)


@dataclass(frozen=True)
class Pages:
    """K and V in pages (P, K, block_size, D), and which of them each sequence owns."""

    k: Any
    v: Any
    block_tables: Any
    context_lens: Any

    @classmethod
    def checked(
        cls, call: Contract, pages: dict[str, Any], dtype: Any, tables: Any, lens: Any
    ) -> Pages:
        """Check the arrays (`pages`: K's and V's by name); on the CPU their values too."""
        arrays = []
        for name, value in pages.items():
            array = call.array(name, value, "P K block_size D", dtype, layout="any")
            if not array.flags.c_contiguous:  # to copy a whole cache in silence would be a trap
                raise ShapeError(
                    f"{call.op}: {name}: must be C-contiguous; strides {array.strides}"
                )
            arrays.append(array)
        size = call["block_size"]
        call.check("block_size", size in BLOCK_SIZES, f"one of {BLOCK_SIZES}", size)
        tables = call.array("block_tables", tables, "B NB", INT32, layout="rows")
        lens = call.array("context_lens", lens, "B", INT32)
        found = cls(arrays[0], arrays[1], tables, lens)
        if call.on_cpu:
            found._check_values(call)
        return found

    def _check_values(self, call: Contract) -> None:
        """Check lengths and the block ids they make valid (on the GPU that would be a sync)."""
        num_blocks, _, block_size, _ = self.k.shape
        limit = self.block_tables.shape[1] * block_size
        lens = self.context_lens
        if lens.size and not (lens.min() >= 0 and lens.max() <= limit):
            call.check("context_lens", False, f"from 0 to NB * block_size = {limit}", lens.tolist())
        used = np.arange(self.block_tables.shape[1]) * block_size < lens[:, None]
        ids = self.block_tables[used]
        if ids.size and not (ids.min() >= 0 and ids.max() < num_blocks):
            bad = ids[(ids < 0) | (ids >= num_blocks)]
            call.check("block_tables", False, f"ids from 0 to {num_blocks - 1}", int(bad[0]))


def check_heads(call: Contract) -> None:
    """Check the sizes H, K and D that the arrays have bound."""
    h, k, d = call["H"], call["K"], call["D"]
    call.check("K", k > 0 and h % k == 0, f"a divisor of the number of query heads, {h}", k)
    call.check("D", 0 < d <= MAX_HEAD_DIM, f"from 1 to {MAX_HEAD_DIM}", d)


def check_count(call: Contract, name: str, value: Any) -> None:
    """Check an int that counts something: 0 or more, and small enough for CUDA's int."""
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    call.check(name, is_int and 0 <= value < 2**31, "an int of 0 or more", value)


def is_aligned(array: Any) -> bool:
    """Tell whether every row of the last axis starts at, and has the size of, 16-byte words."""
    steps = [array.shape[-1] * array.itemsize, array.data.ptr, *array.strides[:-1]]
    return all(step % 16 == 0 for step in steps)
