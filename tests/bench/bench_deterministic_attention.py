"""Cost of batch invariance: attention of single tokens in both modes, bfloat16, D = 128."""

from __future__ import annotations

from functools import partial

import numpy as np

from engine import kernels
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import cu_seqlens, normal_on

_HEAD_DIM, _BLOCK_SIZE = 128, 16
_HEADS = {"qwen3-0.6b": (16, 8), "llama-3.1-8b": (32, 8)}  # heads of queries, heads of keys
_BATCHES = ((1, 192), (1, 640), (1, 2048), (1, 16384), (4, 640), (8, 640), (16, 192), (16, 640),
            (16, 2048), (64, 512), (256, 192), (256, 1024))  # fmt: skip


def _run(q, k, v, starts, tables, lens):
    own = {"cu_seqlens_q": starts, "block_tables": tables, "context_lens": lens}
    return kernels.attention_prefill(q, k, v, **own, max_seqlen_q=1, num_splits=1, pdl=True)


def _default(context, q, k, v, starts, tables, lens):
    own = {"block_tables": tables, "context_lens": lens, "max_context_len": context}
    return kernels.attention_decode(q[:, None], k, v, pdl=True, **own)


def _case(name: str, batch: int, context: int) -> BenchCase:
    num_heads, num_kv_heads = _HEADS[name]
    blocks = batch * context // _BLOCK_SIZE

    def make(xp, seed):
        q = cases.normal((batch, num_heads, _HEAD_DIM), "bfloat16", seed)
        tables = np.random.default_rng(seed).permutation(blocks).astype(np.int32)
        lens = np.full(batch, context, np.int32)
        shape = blocks, num_kv_heads, _BLOCK_SIZE, _HEAD_DIM
        k, v = (normal_on(xp, shape, "bfloat16", seed + i) for i in (1, 2))
        starts = cu_seqlens([1] * batch)
        return cases.to_module(xp, q, k, v, starts, tables.reshape(batch, -1), lens)

    return BenchCase(
        f"{name} B{batch} ctx{context}",
        make,
        _run,
        nbytes=2 * batch * context * num_kv_heads * _HEAD_DIM * 2,
        flops=4 * batch * num_heads * _HEAD_DIM * context,
        baselines={"default": partial(_default, context)},
    )


CASES = [_case(name, *batch) for name in _HEADS for batch in _BATCHES]
