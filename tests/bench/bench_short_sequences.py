"""Decode steps of many short sequences: attention_decode with each one's new token, GB/s.

bfloat16, 32 query heads, D = 128, pages of 16 tokens, launched with `pdl`, as in a model. Lengths
are equal, or uniform between 100 and 1,100. CTAs of one launch share all sequences, so what a step
costs beyond reading keys and values depends on how the lengths divide.
"""

from __future__ import annotations

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on
from engine.testing.cases_elementwise import cos_sin_table
from engine.testing.tolerances import assert_close

_HEADS, _HEAD_DIM, _BLOCK_SIZE, _POSITIONS = 32, 128, 16, 1200
_NEW_TOKEN = ("k", "v", "block_tables", "context_lens", "positions", "cos_sin", "slot_mapping")


def _case(batch: int, kv_heads: int, lens: np.ndarray, label: str) -> BenchCase:
    blocks = -(-lens // _BLOCK_SIZE)
    begins = np.cumsum(blocks) - blocks
    pages = (int(blocks.sum()), kv_heads, _BLOCK_SIZE, _HEAD_DIM)

    def make(xp, seed):
        qkv = cases.normal((batch, 1, _HEADS + 2 * kv_heads, _HEAD_DIM), "bfloat16", seed)
        ids = np.random.default_rng(seed).permutation(pages[0]).astype(np.int32)
        tables = np.zeros((batch, blocks.max()), np.int32)
        for b in range(batch):
            tables[b, : blocks[b]] = ids[begins[b] : begins[b] + blocks[b]]
        last = lens - 1
        slots = tables[np.arange(batch), last // _BLOCK_SIZE].astype(np.int64) * _BLOCK_SIZE
        k, v = (normal_on(xp, pages, "bfloat16", seed + i) for i in (1, 2))
        where = (tables, lens.astype(np.int32), last.astype(np.int32))
        table = cos_sin_table(_POSITIONS, _HEAD_DIM)
        qkv, *others = cases.to_module(xp, qkv, *where, table, slots + last % _BLOCK_SIZE)
        new_k, new_v = _HEADS, _HEADS + kv_heads
        return qkv[:, :, :new_k], qkv[:, :, new_k:new_v], qkv[:, :, new_v:], k, v, *others

    def run(q, new_k, new_v, k, v, *others):
        new_tokens = dict(zip(_NEW_TOKEN, (new_k, new_v, *others), strict=True))
        longest = int(lens.max())
        return kernels.attention_decode(q, k, v, **new_tokens, max_context_len=longest, pdl=True)

    def check(args, result):
        q, new_k, new_v, k, v, tables, *others, table, slots = (to_numpy(array) for array in args)
        rows = (array[-1:] for array in (new_k, new_v, tables, *others))
        new_tokens = dict(zip(_NEW_TOKEN, (*rows, table, slots[-1:]), strict=True))
        want = reference.attention_decode(q[-1:], k, v, **new_tokens)
        assert_close(result[-1:], want, reduction=int(lens[-1]))

    nbytes = 2 * int(lens.sum()) * kv_heads * _HEAD_DIM * 2
    flops = 4 * int(lens.sum()) * _HEADS * _HEAD_DIM
    name = f"B{batch} K{kv_heads} {label}"
    return BenchCase(name, make, run, nbytes=nbytes, flops=flops, check=check)


def _lens(batch: int, label: str) -> np.ndarray:
    if label == "100 to 1,100 keys":
        return np.random.default_rng(batch).integers(100, 1101, batch)
    return np.full(batch, int(label.removesuffix(" keys")))


CASES = [
    _case(batch, kv_heads, _lens(batch, label), label)
    for kv_heads in (4, 8)
    for label in ("130 keys", "577 keys", "100 to 1,100 keys")
    for batch in (40, 64, 128, 256)
]
