"""attention_backward, bfloat16: TFLOP/s of its five GEMMs, visible pairs of query and key counted.

Peers, if torch is installed: the backward pass of scaled_dot_product_attention with cuDNN and with
FlashAttention-2.
"""

from __future__ import annotations

import importlib.util
import statistics
from functools import partial

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import cu_seqlens, normal_on
from engine.testing.tolerances import assert_close

_CHECKED = 32  # last rows of the last sequence: the mirror would take minutes for a whole case


def _sdpa_seconds(
    backend: str, batch: int, heads: int, head_dim: int, n: int, causal: bool
) -> float:
    """Return the median seconds of torch's backward pass on random values of these shapes."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    shape = (batch, heads, n, head_dim)
    make = partial(torch.randn, shape, device="cuda", dtype=torch.bfloat16)
    qkv = [make(requires_grad=True) for _ in range(3)]
    dout, times, launches = make(), [], 10
    with sdpa_kernel(getattr(SDPBackend, backend)):
        out = scaled_dot_product_attention(*qkv, is_causal=causal)
        for repeat in range(6):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(launches):
                torch.autograd.grad(out, qkv, dout, retain_graph=True)
            stop.record()
            stop.synchronize()
            if repeat:
                times.append(start.elapsed_time(stop) * 1e-3 / launches)
    return statistics.median(times)


def _peers(batch: int, heads: int, kv_heads: int, head_dim: int, n: int, causal: bool):
    if heads != kv_heads or importlib.util.find_spec("torch") is None:
        return None
    shape = (batch, heads, head_dim, n, causal)
    return {
        "cudnn": partial(_sdpa_seconds, "CUDNN_ATTENTION", *shape),
        "flash2": partial(_sdpa_seconds, "FLASH_ATTENTION", *shape),
    }


def _mirror(rule, dout, q, k, v, out, lse):
    starts = {"cu_seqlens_q": cu_seqlens([len(q)]), "cu_seqlens_k": cu_seqlens([len(k)])}
    return reference.attention_backward(dout, q, k, v, out, lse, **starts, **rule)


def _case(
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    n: int,
    causal: bool,
    deterministic: bool,
    window: int = 0,
    has_sinks: bool = False,
) -> BenchCase:
    rule = {"causal": causal, "window": window}
    shape, kv_shape = (batch * n, heads, head_dim), (batch * n, kv_heads, head_dim)

    def make(xp, seed):
        shapes = enumerate((shape, shape, kv_shape, kv_shape))
        dout, q, k, v = (normal_on(xp, s, "bfloat16", seed + i) for i, s in shapes)
        starts = xp.asarray(cu_seqlens([n] * batch))
        sinks = xp.linspace(-1, 3, heads, dtype=np.float32) if has_sinks else None
        where = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "sinks": sinks, **rule}
        out, lse = kernels.attention_prefill(q, k, v, **where, max_seqlen_q=n, return_lse=True)
        return dout, q, k, v, out, lse, starts, sinks

    def run(dout, q, k, v, out, lse, starts, sinks):
        where = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "sinks": sinks, **rule}
        options = {"max_seqlen_q": n, "max_seqlen_k": n, "deterministic": deterministic}
        return kernels.attention_backward(dout, q, k, v, out, lse, **where, **options)

    def check(args, result):
        # Given the log-sum-exp, a subset of queries yields their dQ, a subset of keys dK and dV.
        group, last = heads // kv_heads, slice(-_CHECKED, None)
        args = [*(x[:, :group] for x in args[:2]), *(x[:, :1] for x in args[2:4]), *args[4:6]]
        dout, q, k, v, out, lse = (to_numpy(x[-n:, :group]) for x in args)
        dq, dk, dv = (np.ascontiguousarray(to_numpy(x[last])) for x in result[:3])
        few = [x[last] if causal else x for x in (dout, q, out, lse)]
        by_query = _mirror(rule, *(x[last] for x in (dout, q)), k, v, out[last], lse[last])[0]
        by_key = _mirror(rule, *few[:2], k[last], v[last], *few[2:])[1:]
        got = dq[:, :group], dk[:, :1], dv[:, :1]
        for name, x, want in zip(("dq", "dk", "dv"), got, (by_query, *by_key), strict=True):
            x, want = np.ascontiguousarray(x), np.ascontiguousarray(want[last])
            assert_close(x, want, reduction=3 * head_dim + n * group, name=name)

    pairs = window * n if window else n * n // 2 if causal else n * n
    flops = 10 * batch * heads * head_dim * pairs
    nbytes = 2 * (4 * np.prod(shape) + 4 * np.prod(kv_shape))
    peers = None if window else _peers(batch, heads, kv_heads, head_dim, n, causal)
    order = "" if deterministic else " any order"
    mask = f"window {window}" if window else "causal" if causal else "full"
    mask += " sinks" if has_sinks else ""
    name = f"B{batch} H{heads}/{kv_heads} D{head_dim} S{n} {mask}{order}"
    return BenchCase(name, make, run, nbytes=int(nbytes), flops=flops, check=check, peers=peers)


CASES = [
    _case(*shape, deterministic)
    for shape in (
        *((4, 8, 8, 64, n, causal) for n in (2048, 4096, 8192) for causal in (False, True)),
        (2, 32, 32, 128, 2048, True),
        (2, 32, 32, 128, 8192, True),
        (2, 32, 32, 128, 8192, False),
        (1, 32, 32, 128, 16384, True),
        (2, 32, 8, 128, 4096, True),
    )
    for deterministic in (True, False)
]
CASES += [
    _case(1, 64, 8, 64, 8192, True, True, window=128, has_sinks=True),  # gpt-oss
    _case(1, 32, 8, 128, 8192, True, True, window=1024),
]
CPU_CASES = [_case(1, 2, 2, 64, 128, True, False)]
