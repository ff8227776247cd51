"""The checked arrays of one call to mla_decode, and the launch arguments both tiers share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.kernels._attention import BLOCK_SIZES, check_count, checked_scale
from engine.kernels._contract import INT32, Contract
from engine.kernels._elementwise import element_strides, named_strides

__all__ = ["MAX_SPLITS", "SHARED_PARAMS", "Problem"]

MAX_SPLITS = 1024

SHARED_PARAMS = (
    "pages:ptr block_tables:ptr context_lens:ptr out:ptr lse:ptr partial_o:ptr "
    "partial_stats:ptr splits:ptr {q_strides}out_stride_b:i64 "
    "out_stride_t:i64 out_stride_h:i64 table_stride:i64 max_keys:i64 batch:i32 num_queries:i32 "
    "num_heads:i32 block_shift:i32 num_blocks:i32 {sizes}num_splits:i32 "
    "{options}score_factor:f32"
)
"""Kernel parameters that both tiers share; each adds how it addresses q and the pages."""


@dataclass(frozen=True)
class Problem:
    """Arrays and options of one call.

    Attributes
    ----------
    q, q_rope : (B, Q, H, L) and (B, Q, H, R) arrays
    pages : (P, block_size, L + R) array
    block_tables, context_lens : (B, NB) and (B,) arrays
    out, lse : (B, Q, H, L) and (B, Q, H) arrays
        Set once they are allocated; `lse` is None if it was not requested.
    scale : float
    num_splits : int or None
    max_context_len : int
    """

    q: Any
    q_rope: Any
    pages: Any
    block_tables: Any
    context_lens: Any
    scale: float
    num_splits: int | None
    max_context_len: int
    out: Any = None
    lse: Any = None

    @property
    def num_rows(self) -> int:
        """Rows of a sequence: Q * H."""
        return int(self.q.shape[1] * self.q.shape[2])

    def arguments(self) -> dict[str, Any]:
        """Return the launch arguments that both tiers share, except those of the splits."""
        batch, num_queries, num_heads, _ = self.q.shape
        num_blocks, block_size, _ = self.pages.shape
        tables = self.block_tables
        return {
            "pages": self.pages,
            "block_tables": tables,
            "context_lens": self.context_lens,
            "out": self.out,
            "lse": self.lse,
            **named_strides("bth", out=self.out),
            "table_stride": element_strides(tables)[0],
            "max_keys": tables.shape[1] * block_size if self.pages.size else 0,
            "batch": batch,
            "num_queries": num_queries,
            "num_heads": num_heads,
            "block_shift": block_size.bit_length() - 1,
            "num_blocks": num_blocks,
            "score_factor": self.scale * math.log2(math.e),
        }


def checked_problem(call: Contract, arrays: dict[str, Any], options: dict[str, Any]) -> Problem:
    """Check the arguments of mla_decode but `out`; on the CPU, also the values of the tables."""
    q = arrays["q"]
    pages = call.array("pages", arrays["pages"], "P block_size W", q.dtype, layout="any")
    _check_sizes(call)
    _check_rows(call, pages)
    tables = call.array("block_tables", arrays["block_tables"], "B NB", INT32, layout="rows")
    lens = call.array("context_lens", arrays["context_lens"], "B", INT32)
    limit = call["NB"] * call["block_size"]
    if call.on_cpu:
        _check_values(call, tables, lens, limit)
    num_splits = options["num_splits"]
    longest = options["max_context_len"]
    if num_splits is not None:
        num_splits = check_count(call, "num_splits", num_splits)
        ok = 1 <= num_splits <= MAX_SPLITS
        call.check("num_splits", ok, f"from 1 to {MAX_SPLITS}", num_splits)
    longest = limit if longest is None else check_count(call, "max_context_len", longest)
    scale = checked_scale(call, 1, options["scale"])
    return Problem(q, arrays["q_rope"], pages, tables, lens, scale, num_splits, min(limit, longest))


def _check_sizes(call: Contract) -> None:
    """Check the sizes bound to H, L, R, W and block_size."""
    call.check("H", call["H"] > 0, "1 or more", call["H"])
    latent = call["L"]
    rope = call["R"]
    call.check("L", 0 < latent <= 512, "from 1 to 512", latent)
    call.check("R", 0 < rope <= 64, "from 1 to 64", rope)
    call.check("pages", call["W"] == latent + rope, f"of width L + R = {latent + rope}", call["W"])
    size = call["block_size"]
    call.check("block_size", size in BLOCK_SIZES, f"one of {BLOCK_SIZES}", size)


def _check_rows(call: Contract, pages: Any) -> None:
    """Check that the tokens of a page lie next to each other. A copy would duplicate the cache."""
    width = call["W"] * pages.itemsize
    is_dense = not pages.size or pages.strides[1:] == (width, pages.itemsize)
    call.check("pages", is_dense, "pages of contiguous tokens", f"strides {pages.strides}")


def _check_values(call: Contract, tables: Any, lens: Any, limit: int) -> None:
    """Check the lengths and the block ids they cover (on a GPU this would synchronise)."""
    if lens.size and not (lens.min() >= 0 and lens.max() <= limit):
        call.check("context_lens", False, f"from 0 to NB * block_size = {limit}", lens.tolist())
    used = np.arange(tables.shape[1]) * call["block_size"] < lens[:, None]
    ids = tables[used]
    bad = ids[(ids < 0) | (ids >= call["P"])]
    if bad.size:
        call.check("block_tables", False, f"ids from 0 to {call['P'] - 1}", int(bad[0]))
