"""Preemption costs on this machine, measured once when the engine is constructed.

Which request is preempted, and how it is restored, must depend only on the order of arrivals, so
nothing is measured while requests run. The costs are fixed before the first request arrives and
shown in `engine.config`; pass them as options to repeat a run exactly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.cache.kv_cache import KVCache
from engine.cache.swap import SwapSpace
from engine.core.resolve import ResolvedConfig
from engine.device import Device
from engine.layers.batch import ForwardBatch
from engine.runner.model_runner import RunnableModel

__all__ = ["measure_recompute", "measure_swap", "with_measured_costs"]

_SWAP_BYTES = 32 << 20  # bytes per measured transfer; enough to saturate the link
_PREFILL_TOKENS = {"cpu": 64, "cuda": 2048}  # prompt length to measure, in tokens
# Measurement stops at whichever limit is reached first.
_CALLS = 4
_SECONDS = 0.5


def with_measured_costs(
    config: ResolvedConfig, model: RunnableModel, kv: KVCache, swap: SwapSpace | None
) -> ResolvedConfig:
    """Return `config` with any missing preemption costs measured.

    Without host blocks, or with a fixed preemption mode, the costs have no effect and are not
    measured.

    Parameters
    ----------
    config : ResolvedConfig
    model : RunnableModel
    kv : KVCache
        Not yet in use; its blocks are overwritten.
    swap : SwapSpace or None
        Not yet in use; its blocks are overwritten.
    """
    limits = config.scheduler
    if swap is None or limits.preemption != "auto":
        return config
    reasons = dict(config.reasons)
    per_token = limits.recompute_us_per_token
    per_block = limits.swap_us_per_block
    if per_token is None:
        count = _num_prefill_tokens(config, kv)
        per_token = _rounded(measure_recompute(model, kv, count))
        reasons["recompute_us_per_token"] = f"{per_token:g}: measured on a prompt of {count} tokens"
    if per_block is None:
        per_block = _rounded(measure_swap(kv, swap))
        reasons["swap_us_per_block"] = f"{per_block:g}: measured, both ways"
    limits = replace(limits, recompute_us_per_token=per_token, swap_us_per_block=per_block)
    return replace(config, scheduler=limits, reasons=reasons)


def measure_recompute(model: RunnableModel, kv: KVCache, num_tokens: int) -> float:
    """Measure prefill, in microseconds per prompt token; overwrites the first blocks."""
    size = kv.geometry.block_size
    table = list(range(-(-num_tokens // size)))
    ids = [token % model.config.vocab_size for token in range(num_tokens)]
    slots = kv.first_slots(1)
    batch = ForwardBatch.build([ids], [0], [table], size, state_slots=slots).to(model.device)
    return _microseconds(lambda: model.forward(batch, kv.layers), model.device) / num_tokens


def measure_swap(kv: KVCache, swap: SwapSpace) -> float:
    """Measure swapping out and back in, in microseconds per block."""
    most = max(1, _SWAP_BYTES // max(1, kv.geometry.bytes_per_block))
    count = min(most, kv.num_blocks, swap.num_blocks)
    pairs = [(block, block) for block in range(count)]

    def swap_both_ways() -> None:
        swap.swap_blocks_to_cpu(pairs)
        swap.swap_blocks_from_cpu(pairs)
        swap.synchronize()

    return _microseconds(swap_both_ways, kv.device) / count


def _num_prefill_tokens(config: ResolvedConfig, kv: KVCache) -> int:
    limits = config.scheduler
    room = kv.num_blocks * limits.block_size
    most = min(limits.max_num_batched_tokens, limits.max_model_len - 1, room)
    return max(1, min(most, _PREFILL_TOKENS[kv.device.kind]))


def _rounded(cost: float) -> float:
    """Round to a power of two, so that two runs on one machine almost always agree.

    Examples
    --------
    >>> _rounded(47.0), _rounded(0.3)
    (64.0, 0.25)
    """
    return float(2.0 ** round(math.log2(max(cost, 1e-6))))


def _microseconds(call: Callable[[], Any], device: Device) -> float:
    """Return the time of the fastest of several calls; the first may include kernel loading."""
    times: list[float] = []
    while len(times) < _CALLS and sum(times) < _SECONDS:
        start = time.perf_counter()
        call()
        if device.is_cuda:
            device.xp.cuda.get_current_stream().synchronize()
        times.append(time.perf_counter() - start)
    return min(times) * 1e6
