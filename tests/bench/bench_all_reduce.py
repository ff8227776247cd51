"""all_reduce, bfloat16 on two GPUs: us per call in a CUDA graph, one-shot and two-shot, vs NCCL."""

from __future__ import annotations

import importlib
from functools import partial

from tests.bench.ranks import NCCL_BFLOAT16, measure

DEVICE = "GPU"
SIZES = tuple(1 << k for k in range(13, 27))


def main(device):
    if not device.is_cuda:
        raise SystemExit("all_reduce needs GPUs; run it with --device cuda")
    return measure("all_reduce", device)


def rows(bench):
    """Yield a row for each message size."""
    module = importlib.import_module("engine.kernels.all_reduce")
    choose = module.choose_kernel
    for num_bytes in SIZES:
        x, want = bench.values((num_bytes // 2,))
        out = bench.xp.zeros_like(x)
        call = partial(bench.group.all_reduce, x, out=out)
        row = {"case": f"{num_bytes >> 10} KB", "bytes": num_bytes}
        for way in ("one_shot", "two_shot"):
            module.choose_kernel = lambda *_, way=way: way
            call()
            assert (out.view("u2") == want.view("u2")).all(), f"{way} of {num_bytes} bytes is wrong"
            row[f"{way} us"] = bench.microseconds(call)
        module.choose_kernel = choose
        if bench.nccl is not None:
            args = (x.data.ptr, out.data.ptr, x.size, NCCL_BFLOAT16, 0, bench.stream.ptr)
            row["NCCL us"] = bench.microseconds(partial(bench.nccl.allReduce, *args))
        yield row
