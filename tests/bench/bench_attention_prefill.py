"""attention_prefill, bfloat16: TFLOP/s of Q K^T and P V, a causal square counted at half."""

from __future__ import annotations

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing.cases_attention import cu_seqlens, normal_on
from engine.testing.tolerances import assert_close
from tests.bench.case import BenchCase

_CHECKED_ROWS = 64  # the mirror takes minutes for a whole case: the last rows of the last sequence


def _case(batch: int, heads: int, kv_heads: int, head_dim: int, n: int, causal: bool) -> BenchCase:
    shape, kv_shape = (batch * n, heads, head_dim), (batch * n, kv_heads, head_dim)

    def make(xp, seed):
        shapes = enumerate((shape, kv_shape, kv_shape))
        q, k, v = (normal_on(xp, s, "bfloat16", seed + i) for i, s in shapes)
        return q, k, v, xp.asarray(cu_seqlens([n] * batch))

    def run(q, k, v, starts):
        return kernels.attention_prefill(
            q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=causal, max_seqlen_q=n
        )

    def check(args, result):
        q, k, v = (x[-rows:] for x, rows in zip(args, (_CHECKED_ROWS, n, n), strict=False))
        want = reference.attention_prefill(
            *map(to_numpy, (q, k, v)),
            cu_seqlens_q=cu_seqlens([_CHECKED_ROWS]),
            cu_seqlens_k=cu_seqlens([n]),
            causal=causal,
        )
        assert_close(result[-_CHECKED_ROWS:], want, reduction=n)

    flops = 4 * batch * heads * head_dim * n * n // (2 if causal else 1)
    nbytes = 2 * (2 * np.prod(shape) + 2 * np.prod(kv_shape))
    name = f"B{batch} H{heads}/{kv_heads} D{head_dim} S{n} {'causal' if causal else 'full'}"
    return BenchCase(name, make, run, nbytes=int(nbytes), flops=flops, check=check)


CASES = [
    *(_case(4, 8, 8, 64, n, causal) for n in (2048, 4096, 8192) for causal in (False, True)),
    _case(2, 32, 32, 128, 2048, True),
    _case(2, 32, 32, 128, 8192, True),
    _case(2, 32, 32, 128, 8192, False),
    _case(1, 32, 32, 128, 16384, True),
    _case(16, 16, 8, 128, 4096, True),  # Qwen3-0.6B, the prefill of 16 prompts
]
