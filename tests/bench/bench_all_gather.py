"""all_gather, bfloat16 on two GPUs: us per call in a CUDA graph, for logits, vs NCCL."""

from __future__ import annotations

from functools import partial

from tests.bench.ranks import NCCL_BFLOAT16, measure

DEVICE = "GPU"
N = 64_128  # half of Llama 3.1's vocabulary


def main(device):
    if not device.is_cuda:
        raise SystemExit("all_gather needs GPUs; run it with --device cuda")
    return measure("all_gather", device)


def rows(bench):
    """Yield a row for each row count; NCCL's output has another row order."""
    for num_rows in (1, 4, 16, 64, 256):
        x, _ = bench.values((num_rows, N))
        out = bench.xp.zeros((num_rows, bench.size * N), x.dtype)
        args = (x.data.ptr, out.data.ptr, x.size, NCCL_BFLOAT16, bench.stream.ptr)
        row = {"case": f"({num_rows}, {N})", "bytes": x.nbytes}
        row["us"] = bench.microseconds(partial(bench.group.all_gather, x, out=out))
        if bench.nccl is not None:
            row["NCCL us"] = bench.microseconds(partial(bench.nccl.allGather, *args))
        yield row
