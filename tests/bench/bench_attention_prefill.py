"""attention_prefill, bfloat16: TFLOP/s of Q K^T and P V, half the square counted if causal.

Peers, if torch is installed: scaled_dot_product_attention with cuDNN and with FlashAttention-2.
"""

from __future__ import annotations

import importlib.util
from functools import partial

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import cu_seqlens, normal_on
from engine.testing.tolerances import assert_close
from tests.bench import sdpa

_CHECKED_ROWS = 64  # last rows of the last sequence: the mirror is too slow for a whole case


def _peers(batch: int, heads: int, kv_heads: int, head_dim: int, n: int, causal: bool):
    if heads != kv_heads or importlib.util.find_spec("torch") is None:
        return None
    shape = (batch, heads, head_dim, n, causal)
    return {
        name: partial(sdpa.prefill_seconds, backend, *shape)
        for name, backend in sdpa.BACKENDS.items()
    }


def _chunk_case(chunk: int, cached: int, heads: int, kv_heads: int, block_size: int) -> BenchCase:
    """The last `chunk` of `cached` paged tokens: too few tiles to fill the GPU without splits."""
    num_blocks, head_dim = cached // block_size, 128
    shape = (num_blocks, kv_heads, block_size, head_dim)

    def make(xp, seed):
        q = normal_on(xp, (chunk, heads, head_dim), "bfloat16", seed)
        pages = (normal_on(xp, shape, "bfloat16", seed + i) for i in (1, 2))
        table = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)[None]
        lens = np.array([cached], np.int32)
        return q, *pages, xp.asarray(table), xp.asarray(lens), xp.asarray(cu_seqlens([chunk]))

    def attend(op, q, k, v, table, lens, starts, **options):
        where = {"cu_seqlens_q": starts, "block_tables": table, "context_lens": lens}
        return op(q, k, v, **where, **options)

    def check(args, result):
        want = attend(reference.attention_prefill, *map(to_numpy, args))
        assert_close(result, want, reduction=cached)

    flops = 4 * heads * head_dim * (chunk * cached - chunk * (chunk - 1) // 2)
    nbytes = 2 * head_dim * (2 * chunk * heads + 2 * cached * kv_heads)
    name = f"chunk of {chunk} in {cached} H{heads}/{kv_heads} D{head_dim} pages of {block_size}"
    run = partial(attend, kernels.attention_prefill, max_seqlen_q=chunk)
    return BenchCase(name, make, run, nbytes=nbytes, flops=flops, check=check)


def _case(
    batch: int, heads: int, kv_heads: int, head_dim: int, n: int, causal: bool, value_dim: int = 0
) -> BenchCase:
    """Dense causal or full attention; `value_dim` is the width of narrower values."""
    shape, k_shape = (batch * n, heads, head_dim), (batch * n, kv_heads, head_dim)
    v_shape = (batch * n, kv_heads, value_dim or head_dim)

    def make(xp, seed):
        shapes = enumerate((shape, k_shape, v_shape))
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

    width = head_dim + v_shape[2]
    flops = 2 * batch * heads * width * n * n // (2 if causal else 1)
    nbytes = 2 * batch * n * width * (heads + kv_heads)
    peers = None if value_dim else _peers(batch, heads, kv_heads, head_dim, n, causal)
    dims = f"D{head_dim}" + f"/{value_dim}" * bool(value_dim)
    name = f"B{batch} H{heads}/{kv_heads} {dims} S{n} {'causal' if causal else 'full'}"
    return BenchCase(name, make, run, nbytes=nbytes, flops=flops, check=check, peers=peers)


def _pattern_case(n: int, head_dim: int, pattern: object, density: float, name: str) -> BenchCase:
    """Attention with a `density` share of visible pairs; only these are counted as FLOPs."""
    heads = 8
    shape = (n, heads, head_dim)

    def make(xp, seed):
        q, k, v = (normal_on(xp, shape, "bfloat16", seed + i) for i in range(3))
        return q, k, v, xp.asarray(cu_seqlens([n]))

    def attend(op, q, k, v, starts, **options):
        where = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        return op(q, k, v, **where, causal=False, pattern=pattern, **options)

    def check(args, result):
        one = [np.ascontiguousarray(to_numpy(x)[:, :1]) for x in args[:3]]
        want = attend(reference.attention_prefill, *one, to_numpy(args[3]))
        assert_close(result[:, :1].copy(), want, reduction=n)

    flops = int(4 * heads * head_dim * n * n * density)
    run = partial(attend, kernels.attention_prefill, max_seqlen_q=n)
    nbytes = int(2 * 4 * np.prod(shape))
    return BenchCase(f"{name} D{head_dim} S{n}", make, run, nbytes=nbytes, flops=flops, check=check)


def _quarter(n: int, head_dim: int) -> list[BenchCase]:
    """Full attention, and three patterns with a quarter of its pairs."""
    blocks = n // 128
    mask = np.random.default_rng(0).permuted(np.arange(blocks)[None].repeat(blocks, 0), axis=1)
    patterns = (
        (None, 1.0, "full H8"),
        (kernels.BlockSparse(mask < blocks // 4, 128, 128), 0.25, "blocks of 128, a quarter H8"),
        (kernels.Periodic(8192, 2048), 0.25, "period 8192, width 2048 H8"),
        (kernels.Periodic(4096, 1024), 0.25, "period 4096, width 1024 H8"),
    )
    return [_pattern_case(n, head_dim, *pattern) for pattern in patterns]


CASES = [
    *(_case(4, 8, 8, 64, n, causal) for n in (2048, 4096, 8192) for causal in (False, True)),
    _case(2, 32, 32, 128, 2048, True),
    _case(2, 32, 32, 128, 8192, True),
    _case(2, 32, 32, 128, 8192, False),
    _case(1, 32, 32, 128, 16384, True),
    *(_case(2, 16, 16, 256, 4096, causal) for causal in (False, True)),
    _case(16, 16, 8, 128, 4096, True),  # Qwen3-0.6B, the prefill of 16 prompts
    *(_case(1, 16, 16, 192, n, True, value_dim=128) for n in (4096, 16384)),  # DeepSeek, 8 ranks
    *(_chunk_case(256, 8192, 8, 1, block_size) for block_size in (16, 64)),
    *(case for head_dim in (64, 128) for case in _quarter(16384, head_dim)),
]
CPU_CASES = [_case(1, 8, 8, 64, 256, True), _chunk_case(64, 512, 8, 1, 16)]
