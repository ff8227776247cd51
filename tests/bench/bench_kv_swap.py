"""kv_swap, bfloat16: GB/s of packing scattered blocks of every layer, vs fancy indexing."""

from __future__ import annotations

import numpy as np

from engine import kernels
from engine.device import to_numpy
from engine.dtypes import BFLOAT16
from engine.testing.bench_case import BenchCase
from engine.testing.cases_elementwise import assert_same


def _indexing(pages, packed, pairs):
    packed.view(np.uint16)[:, pairs[:, 1]] = pages.view(np.uint16)[:, pairs[:, 0]]


def _case(layers: int, num_pairs: int, kv_heads: int, head_dim: int) -> BenchCase:
    num_blocks = 2 * num_pairs + 8
    block = (kv_heads, 16, head_dim)

    def make(xp, seed):
        rng = np.random.default_rng(seed)
        bits = rng.integers(0, 0x7F00, (num_blocks, *block), np.uint16)  # finite bfloat16 values
        pages = xp.asarray(np.repeat(bits[None], 2 * layers, axis=0)).view(BFLOAT16)
        packed = xp.zeros((num_pairs, 2 * layers, *block), np.uint16).view(BFLOAT16)
        ids = rng.permutation(num_blocks)[:num_pairs]
        pairs = np.stack([ids, np.arange(num_pairs)], axis=1).astype(np.int32)
        return pages, packed.swapaxes(0, 1), xp.asarray(pairs)

    def check(args, result):
        pages, packed, pairs = map(to_numpy, args)
        assert_same(np.ascontiguousarray(packed), pages[:, pairs[:, 0]])

    return BenchCase(
        f"{layers} layers, {num_pairs} blocks, K {kv_heads}, D {head_dim}",
        make,
        kernels.kv_swap,
        nbytes=2 * 2 * num_pairs * 2 * layers * kv_heads * 16 * head_dim,
        baselines={"indexing": _indexing},
        check=check,
    )


CASES = [_case(32, 1, 8, 128), _case(16, 16, 8, 128), _case(16, 100, 8, 128)]
