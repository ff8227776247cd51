"""attention_decode, bfloat16, 32 query and 8 key/value heads, D = 128: GB/s of K and V read.

Peers, if torch is installed: scaled_dot_product_attention with cuDNN and with FlashAttention-2, on
dense keys and values (B, K, S, D), since they do not support pages; heads grouped by enable_gqa.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on
from engine.testing.tolerances import assert_close
from tests.bench import sdpa

_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 32, 8, 128, 16


def _peers(batch: int, context: int, num_queries: int, nbytes: int):
    shapes = (batch, _HEADS, num_queries, _HEAD_DIM), (batch, _KV_HEADS, context, _HEAD_DIM)
    return {
        name: partial(sdpa.decode_seconds, backend, *shapes, nbytes)
        for name, backend in sdpa.BACKENDS.items()
    }


def _case(batch: int, context: int, num_queries: int, num_splits: int | None = None) -> BenchCase:
    blocks = batch * context // _BLOCK_SIZE
    pages = (blocks, _KV_HEADS, _BLOCK_SIZE, _HEAD_DIM)

    def make(xp, seed):
        q = cases.normal((batch, num_queries, _HEADS, _HEAD_DIM), "bfloat16", seed)
        tables = np.random.default_rng(seed).permutation(blocks).astype(np.int32)
        lens = np.full(batch, context, np.int32)
        k, v = (normal_on(xp, pages, "bfloat16", seed + i) for i in (1, 2))
        return cases.to_module(xp, q, k, v, tables.reshape(batch, -1), lens)

    def run(q, k, v, tables, lens):
        return kernels.attention_decode(
            q,
            k,
            v,
            block_tables=tables,
            context_lens=lens,
            max_context_len=context,
            num_splits=num_splits,
        )

    def check(args, result):
        q, k, v, tables, lens = args
        used = tables[-1]
        want = reference.attention_decode(
            to_numpy(q[-1:]),
            to_numpy(k[used]),
            to_numpy(v[used]),
            block_tables=np.arange(len(used), dtype=np.int32)[None],
            context_lens=to_numpy(lens[-1:]),
        )
        assert_close(result[-1:], want, reduction=context)

    nbytes = 2 * batch * context * _KV_HEADS * _HEAD_DIM * 2
    flops = 4 * batch * num_queries * _HEADS * _HEAD_DIM * context
    name = f"B{batch} ctx{context} Q{num_queries}" + f" splits {num_splits}" * bool(num_splits)
    peers = None if num_splits else _peers(batch, context, num_queries, nbytes)
    return BenchCase(name, make, run, nbytes=nbytes, flops=flops, check=check, peers=peers)


CASES = [
    *(_case(b, context, 1) for b in (1, 16, 64, 128) for context in (1024, 4096, 16384)),
    *(_case(b, context, 1) for b, context in ((2, 1024), (2, 4096), (4, 1024), (7, 1024))),
    *(
        _case(b, context, n)
        for b, context in ((1, 4096), (16, 4096), (64, 4096))
        for n in (2, 4, 8)
    ),
    *(_case(b, context, 1, n) for b, context, n in ((64, 4096, 8), (16, 16384, 4), (128, 4096, 1))),
]
