"""all_reduce_rmsnorm, bfloat16 on two GPUs: us per call in a CUDA graph, vs the separate ops."""

from __future__ import annotations

import numpy as np

from engine import kernels
from tests.bench.ranks import measure

DEVICE = "GPU"
N = 4096


def main(device):
    if not device.is_cuda:
        raise SystemExit("all_reduce_rmsnorm needs GPUs; run it with --device cuda")
    return measure("all_reduce_rmsnorm", device)


def rows(bench):
    """Yield a row for each row count; a row has 8 KB."""
    xp, group = bench.xp, bench.group
    for num_rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096):
        x, _ = bench.values((num_rows, N))
        residual, out, total = (xp.zeros_like(x) for _ in range(3))
        weight = xp.ones(N, np.float32).astype(x.dtype)

        def fused(x=x, residual=residual, weight=weight, out=out):
            group.all_reduce_rmsnorm(x, residual, weight, 1e-5, out=out)

        def two_ops(x=x, residual=residual, weight=weight, out=out, total=total):
            group.all_reduce(x, out=total)
            kernels.rmsnorm(
                total, weight, residual=residual, eps=1e-5, out=out, residual_out=residual
            )

        yield {
            "case": f"({num_rows}, {N})",
            "bytes": x.nbytes,
            "us": bench.microseconds(fused),
            "two ops us": bench.microseconds(two_ops),
        }
