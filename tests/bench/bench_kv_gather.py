"""kv_gather, bfloat16: GB/s of reading pages and writing dense rows, vs fancy indexing."""

from __future__ import annotations

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.cases_elementwise import assert_same

_BLOCK_SIZE = 16


def _indexing(k_pages, v_pages, tables, lens, cu):
    """Gather whole blocks as rows; correct if every length fills its last block."""
    num_heads, head_dim = k_pages.shape[1], k_pages.shape[3]
    return tuple(
        pages.view(np.uint16)[tables.ravel()].swapaxes(1, 2).reshape(-1, num_heads, head_dim)
        for pages in (k_pages, v_pages)
    )


def _case(sequences: int, length: int, kv_heads: int, head_dim: int) -> BenchCase:
    columns = length // _BLOCK_SIZE
    num_blocks = sequences * columns
    shape = (num_blocks, kv_heads, _BLOCK_SIZE, head_dim)

    def make(xp, seed):
        k_pages, v_pages = (cases.normal(shape, "bfloat16", seed + i) for i in (0, 1))
        ids = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)
        lens = np.full(sequences, length, np.int32)
        cu = np.arange(sequences + 1, dtype=np.int32) * length
        tables = ids.reshape(sequences, columns)
        return tuple(cases.to_module(xp, k_pages, v_pages, tables, lens, cu))

    def run(*args):
        return kernels.kv_gather(*args, total_tokens=sequences * length)

    def check(args, result):
        for got, want in zip(result, reference.kv_gather(*map(to_numpy, args)), strict=True):
            assert_same(got, want)

    return BenchCase(
        f"B {sequences}, length {length}, K {kv_heads}, D {head_dim}",
        make,
        run,
        nbytes=2 * 2 * 2 * sequences * length * kv_heads * head_dim,
        baselines={"indexing": _indexing},
        check=check,
    )


CASES = [_case(1, 1024, 8, 128), _case(8, 2048, 8, 128)]
