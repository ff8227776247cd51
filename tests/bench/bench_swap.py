"""KV block swapping: GB/s out and in, vs one plain copy of the same size over the same link."""

from __future__ import annotations

import numpy as np

from engine import kernels
from engine.cache.kv_cache import KVCache, KVGeometry
from engine.cache.memory_pool import MemoryPool
from engine.cache.swap import SwapSpace
from engine.device import to_numpy
from engine.testing.timing import time_cpu

# Llama-3.1-8B and SmolLM2-135M, bfloat16: blocks of 2 MiB and of 360 KiB.
_MODELS = {
    "8B": KVGeometry.uniform(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16"),
    "135M": KVGeometry.uniform(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16"),
}


def _build(geometry, num_blocks, device):
    kv = KVCache(geometry, 2 * num_blocks, MemoryPool(device))
    swap = SwapSpace(kv, num_blocks)
    kv.slab.view(np.uint16)[...] = (
        device.xp.arange(2 * num_blocks, dtype=np.uint16).reshape(1, 1, -1, 1, 1, 1) + 1
    )
    blocks = np.random.default_rng(0).permutation(2 * num_blocks)[:num_blocks].tolist()
    return kv, swap, blocks


def _verify(kv, swap, blocks):
    out = [(block, host) for host, block in enumerate(blocks)]
    swap.swap_blocks_to_cpu(out)
    kv.slab.view(np.uint16)[:, :, blocks] = 0
    swap.swap_blocks_from_cpu([(host, block) for block, host in out])
    found = to_numpy(kv.slab.view(np.uint16)[:, :, blocks])
    assert (found == np.array(blocks, np.uint16).reshape(1, 1, -1, 1, 1, 1) + 1).all()
    return out


def _link(num_bytes, device):
    """Return (out, in) seconds of one plain copy of `num_bytes`, the link's upper bound."""
    if not device.is_cuda:
        source, target = np.ones((2, num_bytes), np.uint8)
        seconds = time_cpu(lambda: np.copyto(target, source), repeats=5)
        return seconds, seconds
    cp = device.xp
    runtime, array = cp.cuda.runtime, cp.ones(num_bytes, np.uint8)
    memory = cp.cuda.PinnedMemory(num_bytes)

    def copy(target, source, kind):
        runtime.memcpyAsync(target, source, num_bytes, kind, cp.cuda.get_current_stream().ptr)
        cp.cuda.get_current_stream().synchronize()

    pinned, pages = memory.ptr, array.data.ptr
    return (
        time_cpu(lambda: copy(pinned, pages, runtime.memcpyDeviceToHost)),
        time_cpu(lambda: copy(pages, pinned, runtime.memcpyHostToDevice)),
    )


def _overlap(device, move, way, seconds, swap):
    """Return the share of swap time hidden behind GEMMs of about the same duration.

    Same order as in an engine step: blocks go out before the step computes, and come in during the
    previous step.
    """
    x = device.xp.ones((8192, 8192), np.float16)  # large: few launches keep the GPU busy

    def compute(count):
        for _ in range(count):
            kernels.gemm(x, x)

    def timed(call):
        def run():
            call()
            swap.synchronize()
            device.xp.cuda.get_current_stream().synchronize()

        return time_cpu(run, repeats=5)

    compute(1)
    count = max(1, round(seconds / (timed(lambda: compute(5)) / 5)))
    alone = timed(lambda: compute(count))
    parts = (move, lambda: compute(count)) if way == "out" else (lambda: compute(count), move)
    both = timed(lambda: [part() for part in parts])
    return {
        "compute us": alone * 1e6,
        "both us": both * 1e6,
        "% hidden": 100 * (alone + seconds - both) / min(alone, seconds),
    }


def _rows(name, geometry, device):
    num_blocks = 256 if device.is_cuda else 32
    kv, swap, blocks = _build(geometry, num_blocks, device)
    out = _verify(kv, swap, blocks)
    back = [(host, block) for block, host in out]
    num_bytes = num_blocks * geometry.bytes_per_block

    def run(call, pairs):
        call(pairs)
        swap.synchronize()
        if device.is_cuda:
            device.xp.cuda.get_current_stream().synchronize()

    ways = (("out", swap.swap_blocks_to_cpu, out), ("in", swap.swap_blocks_from_cpu, back))
    for (way, call, pairs), link in zip(ways, _link(num_bytes, device), strict=True):
        seconds = time_cpu(lambda c=call, p=pairs: run(c, p), repeats=10)
        row = {
            "op": "swap",
            "case": f"{name}, {num_blocks} blocks {way}",
            "us": seconds * 1e6,
            "GB/s": num_bytes / seconds * 1e-9,
            "link GB/s": num_bytes / link * 1e-9,
            "% of link": 100 * link / seconds,
        }
        if device.is_cuda:
            row |= _overlap(device, lambda c=call, p=pairs: c(p), way, seconds, swap)
        yield row
    swap.close()
    kv.close()


def main(device):
    """Measure, print, and return the rows."""
    rows = [row for name, geometry in _MODELS.items() for row in _rows(name, geometry, device)]
    for row in rows:
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else v for k, v in row.items()))
    return rows
