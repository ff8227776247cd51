"""rope in place on views of fused bfloat16 rows: GB/s of reading and writing q and k."""

from __future__ import annotations

import numpy as np

from engine import kernels, reference
from engine.device import array_module, to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on
from engine.testing.cases_elementwise import cos_sin_table
from engine.testing.tolerances import assert_close


def _case(tokens: int, heads: int, kv_heads: int, head_dim: int) -> BenchCase:
    def make(xp, seed):
        qkv = normal_on(xp, (tokens, heads + 2 * kv_heads, head_dim), "bfloat16", seed)
        positions = np.arange(tokens, dtype=np.int32)
        return qkv, *cases.to_module(xp, positions, cos_sin_table(tokens, head_dim))

    def run(qkv, positions, table):
        q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        return kernels.rope(q, k, positions, table, out=(q, k))

    def check(args, result):
        # The arguments are already rotated: rotate a fresh copy of them once more.
        few = slice(0, 1024)
        qkv, positions, table = to_numpy(args[0][few]), to_numpy(args[1][few]), to_numpy(args[2])
        q, k = qkv[:, :heads].copy(), qkv[:, heads : heads + kv_heads].copy()
        got = kernels.rope(*cases.to_module(array_module(args[0]), q, k), args[1][few], args[2])
        for a, b in zip(got, reference.rope(q, k, positions, table), strict=True):
            assert_close(a, b, reduction=2)

    nbytes = 2 * tokens * (heads + kv_heads) * head_dim * 2 + tokens * head_dim * 4
    name = f"T {tokens}, {heads}+{kv_heads} heads, D {head_dim}"
    return BenchCase(name, make, run, nbytes=nbytes, check=check)


CASES = [
    _case(1, 32, 8, 128),
    _case(64, 32, 8, 128),
    _case(256, 32, 8, 64),
    _case(8192, 32, 8, 128),
    _case(16384, 32, 8, 128),
]
