"""Choice between swapping out a preempted request and recomputing it."""

from __future__ import annotations

from engine.cache.block_manager import BlockManager
from engine.request import Request
from engine.scheduler.config import SchedulerConfig

__all__ = ["prefers_swap"]

# Defaults without a measurement; about right for a model of a few billion parameters.
_RECOMPUTE_US_PER_TOKEN = 50.0
_SWAP_US_PER_BLOCK = 100.0


def prefers_swap(request: Request, blocks: BlockManager, config: SchedulerConfig) -> bool:
    """Tell whether swapping `request` out and in is possible and cheaper than recomputing it.

    Recomputing costs per token. Blocks shared with other requests stay on the device and will
    match again, so they need no recomputation; a swap copies them anyway, since they may be freed
    before the request resumes.
    """
    if config.preemption == "recompute" or not blocks.can_swap_out(request):
        return False
    if config.preemption == "swap":
        return True
    num_shared = sum(blocks.allocator.num_owners(block) > 1 for block in request.block_table)
    num_lost = max(0, request.num_computed_tokens - num_shared * blocks.block_size)
    num_saved: float = blocks.num_blocks_for(request.num_computed_tokens)
    if blocks.states is not None:  # blocks alone do not shorten a computation
        num_lost = blocks.states.num_lost(request)
        num_saved += config.blocks_per_state_slot
    per_token = config.recompute_us_per_token
    per_block = config.swap_us_per_block
    recompute_us = num_lost * (_RECOMPUTE_US_PER_TOKEN if per_token is None else per_token)
    return num_saved * (_SWAP_US_PER_BLOCK if per_block is None else per_block) < recompute_us
