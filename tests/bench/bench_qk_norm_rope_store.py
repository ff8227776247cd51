"""qk_norm_rope_store, bfloat16, vs the separate ops: GB/s of rows in, rows and pages out."""

from __future__ import annotations

import numpy as np

from engine import kernels
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on
from engine.testing.cases_elementwise import cos_sin_table
from engine.testing.tolerances import assert_close

_BLOCK_SIZE = 16


def _case(tokens: int, heads: int, kv_heads: int, head_dim: int, has_norm: bool) -> BenchCase:
    def make(xp, seed):
        qkv = normal_on(xp, (tokens, heads + 2 * kv_heads, head_dim), "bfloat16", seed)
        blocks = -(-tokens // _BLOCK_SIZE)
        pages = xp.zeros((2, blocks, kv_heads, _BLOCK_SIZE, head_dim), qkv.dtype)
        weight = cases.normal((head_dim,), "bfloat16", seed + 1, mean=1.0)
        places = np.arange(tokens, dtype=np.int32), cos_sin_table(tokens, head_dim)
        return qkv, pages, *cases.to_module(xp, weight, *places, np.arange(tokens))

    def split(qkv):
        return qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]

    def run(qkv, pages, weight, positions, table, slots):
        weights = {"q_weight": weight, "k_weight": weight} if has_norm else {}
        rows = split(qkv)
        kernels.qk_norm_rope_store(*rows, positions, table, *pages, slots, **weights)

    def separate(qkv, pages, weight, positions, table, slots):
        q, k, v = split(qkv)
        if has_norm:
            kernels.rmsnorm(q, weight, out=q)
            kernels.rmsnorm(k, weight, out=k)
        kernels.rope(q, k, positions, table, out=(q, k))
        kernels.kv_store(k, v, *pages, slots)

    def check(args, result):
        # The queries are already rotated: rotate them once more, both ways.
        qkv, pages, *rest = args
        both = [(qkv.copy(), pages.copy()) for _ in "ab"]
        run(*both[0], *rest)
        separate(*both[1], *rest)
        for got, want in ((both[0][0][:, :heads], both[1][0][:, :heads]), (both[0][1], both[1][1])):
            assert_close(got.copy(), to_numpy(want.copy()), reduction=head_dim)

    nbytes = 2 * tokens * (heads + 2 * kv_heads) * head_dim * 2 + tokens * head_dim * 4
    norm = "norms" if has_norm else "no norms"
    name = f"T {tokens}, {heads}+{kv_heads} heads, D {head_dim}, {norm}"
    return BenchCase(
        name, make, run, nbytes=nbytes, baselines={"separate ops": separate}, check=check
    )


CASES = [
    _case(tokens, heads, 8, 128, has_norm)
    for tokens in (1, 64, 8192)
    for heads, has_norm in ((16, True), (32, False))
]
