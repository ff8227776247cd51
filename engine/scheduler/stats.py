"""Scheduler counters, for metrics and logs."""

from __future__ import annotations

from dataclasses import dataclass

from engine.cache.block_manager import BlockManager
from engine.cache.tree_node import TreeStats

__all__ = ["SchedulerStats", "collect"]


@dataclass(frozen=True)
class SchedulerStats:
    """A snapshot of current sizes and counters, under vLLM's metric names if it has them.

    Attributes
    ----------
    num_requests_running, num_requests_waiting : int
        Current number of requests in each state.
    num_blocks, num_free_blocks, num_cached_blocks : int
        Current device blocks; those neither free nor cached are in use.
    num_host_blocks, num_free_host_blocks : int
        Current host blocks.
    num_steps, num_preemptions, num_swaps, num_retries : int
        Counters: steps scheduled, requests preempted, preempted requests swapped out, and requests
        requeued by failed steps.
    prefix_cache_queries, prefix_cache_hits, prefix_cache_host_hits : int
        Counters: tokens looked up, tokens found, and tokens found on the host.
    num_evicted_blocks, num_offloaded_blocks : int
        Counters: blocks evicted from the prefix tree, and evicted blocks copied to the host.
    num_state_slots, num_free_state_slots, num_state_snapshots : int
        Current state slots, and how many of them are free or hold a snapshot in the prefix tree; 0
        without recurrent layers.
    num_taken_snapshots, num_evicted_snapshots : int
        Counters: snapshots of states that entered the prefix tree, and snapshots evicted.
    """

    num_requests_running: int
    num_requests_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_host_blocks: int
    num_free_host_blocks: int
    num_steps: int
    num_preemptions: int
    num_swaps: int
    num_retries: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    prefix_cache_host_hits: int
    num_evicted_blocks: int
    num_offloaded_blocks: int
    num_state_slots: int = 0
    num_free_state_slots: int = 0
    num_state_snapshots: int = 0
    num_taken_snapshots: int = 0
    num_evicted_snapshots: int = 0

    @property
    def kv_cache_usage(self) -> float:
        """Fraction of the blocks held by requests, 0 to 1."""
        return 1.0 - (self.num_free_blocks + self.num_cached_blocks) / self.num_blocks


def collect(blocks: BlockManager, **counts: int) -> SchedulerStats:
    """Combine the scheduler's own `counts` with the sizes and counters of `blocks`."""
    device = blocks.allocator
    host = blocks.host_allocator
    tree = blocks.tree.stats if blocks.tree else TreeStats()
    return SchedulerStats(
        num_blocks=device.num_blocks,
        num_free_blocks=device.num_free,
        num_cached_blocks=device.num_cached,
        num_host_blocks=host.num_blocks if host else 0,
        num_free_host_blocks=host.num_free if host else 0,
        prefix_cache_queries=tree.queried_tokens,
        prefix_cache_hits=tree.hit_tokens,
        prefix_cache_host_hits=tree.host_hit_tokens,
        num_evicted_blocks=tree.evicted_blocks,
        num_offloaded_blocks=tree.offloaded_blocks,
        **_state_counts(blocks),
        **counts,
    )


def _state_counts(blocks: BlockManager) -> dict[str, int]:
    states = blocks.states
    if states is None:
        return {}
    counts = {
        "num_state_slots": states.allocator.num_blocks,
        "num_free_state_slots": states.allocator.num_free,
    }
    if blocks.tree is not None and (snapshots := blocks.tree.snapshots) is not None:
        counts["num_state_snapshots"] = len(snapshots)
        counts["num_taken_snapshots"] = snapshots.num_taken
        counts["num_evicted_snapshots"] = snapshots.num_evicted
    return counts
