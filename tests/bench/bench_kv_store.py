"""kv_store from fused bfloat16 rows: GB/s of reading k and v and writing them into pages."""

from __future__ import annotations

import numpy as np

from engine import kernels
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.cases_elementwise import assert_same

_BLOCK_SIZE = 16


def _case(tokens: int, kv_heads: int, head_dim: int) -> BenchCase:
    num_blocks = max(1024, tokens // _BLOCK_SIZE)
    shape = (num_blocks, kv_heads, _BLOCK_SIZE, head_dim)

    def make(xp, seed):
        rows = cases.normal((tokens, 6 * kv_heads, head_dim), "bfloat16", seed)
        slots = np.random.default_rng(seed).permutation(num_blocks * _BLOCK_SIZE)[:tokens]
        pages = (xp.zeros(shape, rows.dtype) for _ in "kv")
        return *cases.to_module(xp, rows, slots.astype(np.int64)), *pages

    def run(rows, slots, k_pages, v_pages):
        k, v = rows[:, 4 * kv_heads : 5 * kv_heads], rows[:, 5 * kv_heads :]
        kernels.kv_store(k, v, k_pages, v_pages, slots)

    def check(args, result):
        rows, slots, _, v_pages = map(to_numpy, args)
        block, offset = np.divmod(slots, _BLOCK_SIZE)
        assert_same(v_pages[block, :, offset], rows[:, 5 * kv_heads :])

    nbytes = tokens * (2 * 2 * kv_heads * head_dim * 2 + 8)
    name = f"T {tokens}, K {kv_heads}, D {head_dim}"
    return BenchCase(name, make, run, nbytes=nbytes, check=check)


CASES = [_case(1, 8, 128), _case(256, 8, 128), _case(8192, 8, 128)]
