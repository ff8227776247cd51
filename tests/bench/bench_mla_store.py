"""mla_store, bfloat16, L = 512, R = 64: GB/s of keys and rotated queries."""

from __future__ import annotations

import numpy as np

from engine import kernels, reference
from engine.device import array_module, to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on
from engine.testing.tolerances import assert_close

_LATENT, _ROPE, _BLOCK_SIZE = 512, 64, 16


def _case(num_tokens: int, num_heads: int, name: str = "") -> BenchCase:
    width = _LATENT + _ROPE

    def make(xp, seed):
        rng = np.random.default_rng(seed)
        q_rope = normal_on(xp, (num_tokens, num_heads, _ROPE), "bfloat16", seed)
        kv = normal_on(xp, (num_tokens, width), "bfloat16", seed + 1)
        weight, table, positions, slots = cases.to_module(
            xp,
            cases.normal((_LATENT,), "bfloat16", seed + 2),
            rng.uniform(-1, 1, (1024, _ROPE)).astype(np.float32),
            rng.integers(0, 1024, num_tokens).astype(np.int32),
            rng.permutation(num_tokens).astype(np.int64),
        )
        blocks = -(-num_tokens // _BLOCK_SIZE)
        pages = normal_on(xp, (blocks, _BLOCK_SIZE, width), "bfloat16", seed + 3)
        return q_rope, kv, weight, positions, table, pages, slots

    def run(*arguments):
        kernels.mla_store(*arguments)
        return arguments

    def check(args, result):
        if num_tokens > 256:  # the mirror would take seconds
            return
        fresh = [to_numpy(x) for x in make(array_module(result[0]), 0)]
        reference.mla_store(*fresh)
        for index in (0, 1, 5):
            assert_close(to_numpy(result[index]), fresh[index], reduction=_LATENT)

    nbytes = num_tokens * (2 * num_heads * _ROPE + 3 * width) * 2
    return BenchCase(
        name or f"T {num_tokens}, H {num_heads}", make, run, nbytes=nbytes, check=check
    )


CASES = [_case(1, 16), _case(64, 16), _case(256, 128), _case(8192, 16), _case(8192, 128)]
CPU_CASES = [_case(16, 16)]
