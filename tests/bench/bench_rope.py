"""rope in place on views of fused bfloat16 rows: GB/s of reading and writing q and k."""

from __future__ import annotations

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.cases_elementwise import cos_sin_table
from engine.testing.tolerances import assert_close
from tests.bench.case import BenchCase


def _case(tokens: int, heads: int, kv_heads: int, head_dim: int) -> BenchCase:
    def make(xp, seed):
        q = cases.normal((tokens, heads, head_dim), "bfloat16", seed)
        k = cases.normal((tokens, kv_heads, head_dim), "bfloat16", seed + 1)
        qkv = xp.asarray(np.concatenate([q, k, k], axis=1))
        positions = np.arange(tokens, dtype=np.int32)
        return qkv, *cases.to_module(xp, positions, cos_sin_table(tokens, head_dim))

    def run(qkv, positions, table):
        q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        return kernels.rope(q, k, positions, table, out=(q, k))

    def check(args, result):
        # The arguments are rotated by now: rotate a fresh copy of them once more.
        qkv, positions, table = map(to_numpy, args)
        q, k = qkv[:, :heads].copy(), qkv[:, heads : heads + kv_heads].copy()
        got = kernels.rope(args[0][:, :heads], args[0][:, heads : heads + kv_heads], *args[1:])
        for a, b in zip(got, reference.rope(q, k, positions, table), strict=True):
            assert_close(a, b, reduction=2)

    nbytes = 2 * tokens * (heads + kv_heads) * head_dim * 2 + tokens * head_dim * 4
    name = f"T {tokens}, {heads}+{kv_heads} heads, D {head_dim}"
    return BenchCase(name, make, run, nbytes=nbytes, check=check)


CASES = [_case(1, 32, 8, 128), _case(256, 32, 8, 64), _case(8192, 32, 8, 128)]
