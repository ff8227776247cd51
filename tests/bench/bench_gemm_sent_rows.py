"""Products whose results are summed over two GPUs: us with rows sent during the product, or after.

The product of `o` or `down` of Llama-3.1-8B on two GPUs, then the sum over the ranks, residual and
norm together (with 8-bit weights: the sum alone). In a CUDA graph.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from engine import kernels
from tests.bench.ranks import measure

DEVICE = "GPU"
N = 4096
LAYERS = {"o": 2048, "down": 7168}
ROWS = (1024, 2048, 4096, 8192)
TIMING = {"calls": 10, "replays": 4}


def main(device):
    if not device.is_cuda:
        raise SystemExit("gemm_sent_rows needs GPUs; run it with --device cuda")
    return measure("gemm_sent_rows", device)


def rows(bench):
    """Yield a row for each format, layer and number of rows."""
    for form in ("bfloat16", "fp8"):
        for layer, k in LAYERS.items():
            for m in ROWS:
                yield {"case": f"{form} {layer} ({m}, {N}, {k})", **_times(bench, form, m, k)}


def _times(bench, form, m, k):
    peers = bench.group.peers
    product, total = _calls(bench, form, m, k)

    def both(peers):
        product(peers=peers)
        total()

    product(peers=peers)
    sent = 0 if peers.sent is None else peers.sent.num_sent // N
    total()
    return {
        "rows sent": sent,
        "us": bench.microseconds(partial(both, peers), **TIMING),
        "in turn us": bench.microseconds(partial(both, None), **TIMING),
        "product us": bench.microseconds(partial(product, peers=None), **TIMING),
        "sum us": bench.microseconds(total, **TIMING),
    }


def _calls(bench, form, m, k):
    """Return ``product(peers=)`` and ``total()``, on arrays of their own."""
    xp, group = bench.xp, bench.group
    random = xp.random.default_rng(bench.rank)

    def normal(shape):
        return random.standard_normal(shape, np.float32).astype(residual.dtype)

    residual, y, out = (bench.values((m, N))[0] for _ in range(3))
    x, weight = normal((m, k)), normal((N, k))
    options = {"pdl": True, "out": y}
    if form == "fp8":
        codes, scales = kernels.quantize_rows(weight, dtype="fp8")
        x, x_scales = kernels.quantize_rows(x, dtype="fp8")
        options |= {"x_scales": x_scales, "out_dtype": y.dtype}
        product = partial(kernels.gemm_fp8, x, codes, scales.reshape(-1), **options)
        return product, partial(group.all_reduce, y, out=out)
    norm = xp.ones(N, np.float32).astype(y.dtype)
    total = partial(group.all_reduce_rmsnorm, y, residual, norm, 1e-5, out=out)
    return partial(kernels.gemm, x, weight, **options), total
