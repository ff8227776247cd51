"""kv_copy, bfloat16: GB/s of reading and writing blocks in every layer, vs fancy indexing."""

from __future__ import annotations

import numpy as np

from engine import kernels
from engine.device import to_numpy
from engine.dtypes import BFLOAT16
from engine.testing.bench_case import BenchCase
from engine.testing.cases_elementwise import assert_same


def _indexing(pages, pairs):
    bits = pages.view(np.uint16)
    bits[:, pairs[:, 1]] = bits[:, pairs[:, 0]]


def _case(layers: int, num_pairs: int, kv_heads: int, head_dim: int) -> BenchCase:
    num_blocks = 2 * num_pairs + 8
    shape = (2 * layers, num_blocks, kv_heads, 16, head_dim)

    def make(xp, seed):
        rng = np.random.default_rng(seed)
        ids = rng.permutation(num_blocks)[: 2 * num_pairs].astype(np.int32)
        bits = rng.integers(0, 0x7F00, shape[1:], np.uint16)  # finite bfloat16 values
        pages = xp.asarray(np.repeat(bits[None], shape[0], axis=0)).view(BFLOAT16)
        return pages, xp.asarray(ids.reshape(2, num_pairs).T.copy())

    def check(args, result):
        pages, pairs = map(to_numpy, args)
        assert_same(pages[:, pairs[:, 1]], pages[:, pairs[:, 0]])

    nbytes = 2 * 2 * num_pairs * shape[0] * kv_heads * 16 * head_dim
    return BenchCase(
        f"{layers} layers, {num_pairs} blocks, K {kv_heads}, D {head_dim}",
        make,
        kernels.kv_copy,
        nbytes=nbytes,
        baselines={"indexing": _indexing},
        check=check,
    )


CASES = [_case(32, 1, 8, 128), _case(16, 16, 8, 128), _case(16, 100, 8, 128)]
