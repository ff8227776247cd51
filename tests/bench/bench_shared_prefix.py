"""Decode attention with a shared prefix, bfloat16, vs attention_decode over full block tables."""

from __future__ import annotations

import numpy as np

from engine import kernels
from engine.device import to_numpy
from engine.layers.shared_prefix import attention_shared_prefix
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on
from engine.testing.tolerances import assert_close

_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 32, 8, 128, 16


def _case(batch: int, prefix: int, own: int, num_queries: int = 1) -> BenchCase:
    shared, each = prefix // _BLOCK_SIZE, own // _BLOCK_SIZE
    blocks = shared + batch * each

    def make(xp, seed):
        q = cases.normal((batch, num_queries, _HEADS, _HEAD_DIM), "bfloat16", seed)
        pages = (blocks, _KV_HEADS, _BLOCK_SIZE, _HEAD_DIM)
        k, v = (normal_on(xp, pages, "bfloat16", seed + i) for i in (1, 2))
        ids = np.random.default_rng(seed).permutation(blocks).astype(np.int32)
        tables = np.concatenate(
            [np.tile(ids[:shared], (batch, 1)), ids[shared:].reshape(batch, each)], axis=1
        )
        lens = [np.full(n, x, np.int32) for n, x in ((1, prefix), (batch, own))]
        q, tables, prefix_len, own_lens = cases.to_module(xp, q, tables, *lens)
        return q, k, v, tables, prefix_len, own_lens, own_lens + np.int32(prefix)

    def run(q, k, v, tables, prefix_len, own_lens, lens):
        return attention_shared_prefix(
            q,
            k,
            v,
            prefix_blocks=tables[0, :shared],
            prefix_len=prefix_len,
            block_tables=tables[:, shared:],
            context_lens=own_lens,
            max_context_len=own,
        )

    def without_sharing(q, k, v, tables, prefix_len, own_lens, lens):
        return kernels.attention_decode(
            q, k, v, block_tables=tables, context_lens=lens, max_context_len=prefix + own
        )

    def check(args, result):
        assert_close(result, to_numpy(without_sharing(*args)), reduction=prefix + own)

    nbytes = 2 * (prefix + batch * own) * _KV_HEADS * _HEAD_DIM * 2
    flops = 4 * batch * num_queries * _HEADS * _HEAD_DIM * (prefix + own)
    name = f"B{batch} prefix{prefix} own{own} Q{num_queries}"
    baselines = {"decode": without_sharing}
    return BenchCase(name, make, run, nbytes, flops, baselines, check=check)


CASES = [
    _case(64, 8192, 512),
    _case(64, 8192, 128),
    _case(16, 8192, 512),
    _case(4, 8192, 512),
    _case(128, 2048, 512),
    _case(64, 512, 512),
    _case(16, 8192, 512, 4),
    _case(64, 32768, 512),
]
CPU_CASES = [_case(4, 512, 64)]
