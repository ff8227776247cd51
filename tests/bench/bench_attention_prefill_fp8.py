"""attention_prefill_fp8: TFLOP/s of Q K^T and P V, half the square counted if causal.

Peers: the bfloat16 kernel; this kernel including quantization of Q, K and V from bfloat16; and, if
torch is installed, its default (FlashAttention-2) and cuDNN, both bfloat16.
"""

from __future__ import annotations

import numpy as np

from engine import kernels
from engine.device import to_numpy
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import cu_seqlens, normal_on
from tests.bench.bench_attention_prefill import _peers

_CHECKED_ROWS = 64  # last rows of the last sequence, compared with float64
_ERROR = 0.08  # relative, normal inputs; 5.5 % measured, 4.8 % of it from rounding Q, K and V


def _quantized(q, k, v):
    named = {}
    for name, x in (("q", q), ("k", k), ("v", v)):
        named[name], named[f"{name}_scale"] = kernels.quantize_heads(x)
    return named


def _case(batch: int, heads: int, head_dim: int, n: int, causal: bool) -> BenchCase:
    shape = (batch * n, heads, head_dim)

    def make(xp, seed):
        q, k, v = (normal_on(xp, shape, "bfloat16", seed + i) for i in range(3))
        return _quantized(q, k, v), (q, k, v), xp.asarray(cu_seqlens([n] * batch))

    def attend(op, starts, *arrays, **named):
        where = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": n}
        return op(*arrays, **named, **where, causal=causal)

    def run(named, _, starts):
        return attend(kernels.attention_prefill_fp8, starts, **named)

    def bfloat16(_, exact, starts):
        return attend(kernels.attention_prefill, starts, *exact)

    def with_quantize(_, exact, starts):
        return attend(kernels.attention_prefill_fp8, starts, **_quantized(*exact))

    def check(args, result):
        q, k, v = (to_numpy(x[-n:]).astype(np.float64) for x in args[1])
        score = np.einsum("ihd,jhd->hij", q[-_CHECKED_ROWS:], k) / np.sqrt(head_dim)
        if causal:
            score[:, np.arange(n) > np.arange(n - _CHECKED_ROWS, n)[:, None]] = -np.inf
        p = np.exp(score - score.max(-1, keepdims=True))
        want = np.einsum("hij,jhd->ihd", p / p.sum(-1, keepdims=True), v)
        got = to_numpy(result[-_CHECKED_ROWS:]).astype(np.float64)
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert error < _ERROR, f"relative error {error:.4f}"

    return BenchCase(
        f"B{batch} H{heads} D{head_dim} S{n} {'causal' if causal else 'full'}",
        make,
        run,
        nbytes=5 * int(np.prod(shape)),  # three 1-byte arrays, one 2-byte array
        flops=4 * batch * heads * head_dim * n * n // (2 if causal else 1),
        baselines={"bfloat16": bfloat16, "with quantize_heads": with_quantize},
        peers=_peers(batch, heads, heads, head_dim, n, causal),
        check=check,
        arithmetic="fp8",
    )


CASES = [
    *(_case(4, 8, 64, n, causal) for n in (2048, 4096, 8192) for causal in (False, True)),
    _case(2, 16, 128, 8192, False),
    _case(2, 16, 128, 8192, True),
]
CPU_CASES = [_case(1, 4, 64, 256, False), _case(1, 4, 64, 256, True)]
