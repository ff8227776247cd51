"""mla_decode, bfloat16, L = 512, R = 64: GB/s of the latents read, TFLOP/s with 128 heads.

Launched with `pdl`, as in a model.
"""

from __future__ import annotations

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on
from engine.testing.tolerances import assert_close

_LATENT, _ROPE, _BLOCK_SIZE = 512, 64, 16
_SCALE = 192**-0.5


def _case(batch: int, context: int, num_heads: int, num_queries: int = 1) -> BenchCase:
    blocks = batch * context // _BLOCK_SIZE
    shape = (batch, num_queries, num_heads)

    def make(xp, seed):
        q = cases.normal((*shape, _LATENT), "bfloat16", seed)
        q_rope = cases.normal((*shape, _ROPE), "bfloat16", seed + 1)
        tables = np.random.default_rng(seed).permutation(blocks).astype(np.int32)
        lens = np.full(batch, context, np.int32)
        pages = normal_on(xp, (blocks, _BLOCK_SIZE, _LATENT + _ROPE), "bfloat16", seed + 2)
        return (
            *cases.to_module(xp, q, q_rope),
            pages,
            *cases.to_module(xp, tables.reshape(batch, -1), lens),
        )

    def run(q, q_rope, pages, tables, lens):
        where = {"block_tables": tables, "context_lens": lens}
        options = {"scale": _SCALE, "max_context_len": context, "pdl": True}
        return kernels.mla_decode(q, q_rope, pages, **where, **options)

    def check(args, result):
        q, q_rope, pages, tables, lens = args
        want = reference.mla_decode(
            to_numpy(q[-1:]),
            to_numpy(q_rope[-1:]),
            to_numpy(pages[tables[-1]]),
            block_tables=np.arange(context // _BLOCK_SIZE, dtype=np.int32)[None],
            context_lens=to_numpy(lens[-1:]),
            scale=_SCALE,
        )
        assert_close(result[-1:], want, reduction=context + _LATENT + _ROPE)

    rows = batch * num_queries * num_heads
    nbytes = batch * context * (_LATENT + _ROPE) * 2 + rows * (2 * _LATENT + _ROPE) * 2
    flops = 2 * rows * context * (2 * _LATENT + _ROPE)
    name = f"B {batch}, {context} keys, H {num_heads}, Q {num_queries}"
    return BenchCase(name, make, run, nbytes=nbytes, flops=flops, check=check)


CASES = [
    *(_case(batch, 4096, num_heads) for num_heads in (16, 64) for batch in (1, 16, 32, 64, 128)),
    *(_case(batch, 4096, 128) for batch in (16, 64, 128)),
    *(_case(128, 8192, 128, num_queries) for num_queries in (1, 2)),
    _case(64, 4096, 16, num_queries=4),
    _case(16, 32768, 20),
]
CPU_CASES = [_case(2, 256, 16)]
