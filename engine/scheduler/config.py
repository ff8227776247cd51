"""The scheduler's limits and policies: immutable, validated on construction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.errors import ConfigError

__all__ = ["POLICIES", "PREEMPTIONS", "SchedulerConfig"]

_BLOCK_SIZES = (16, 32, 64, 128)
POLICIES = ("fcfs", "lpm")
PREEMPTIONS = ("auto", "recompute", "swap")
_AT_LEAST_ONE = (
    "num_blocks",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "lpm_window",
    "max_num_queued_requests",
    "max_num_queued_tokens",
    "max_blocks_per_salt",
)
_AT_LEAST_ZERO = (
    "max_prefill_chunk",
    "num_host_blocks",
    "num_state_slots",
    "num_host_state_slots",
    "state_interval",
    "max_draft_tokens",
    "max_adapters",
    "priority_window",
    "recompute_us_per_token",
    "swap_us_per_block",
)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits and policies of one scheduler.

    Parameters
    ----------
    num_blocks : int
        KV blocks on the device.
    max_model_len : int
        Maximum length of a request in tokens, prompt plus output.
    block_size : int
        Tokens per block: 16, 32, 64 or 128.
    max_num_seqs : int
        Maximum number of running requests.
    max_num_batched_tokens : int
        Token budget of one step; at least `max_num_seqs`, so that every decode fits.
    max_prefill_chunk : int
        Maximum tokens per prefill in one step; 0 = limited by the budget only.
    max_draft_tokens : int
        Maximum drafts per sequence that one step verifies (`Scheduler.propose`).
    max_adapters : int
        Maximum number of LoRA adapters among running requests.
    draft_trees : bool
        Whether drafts may form trees; if not, a tree is truncated to its leading chain.
    watermark : float
        Fraction of the blocks an admission must leave free for running requests to grow into.
    policy : str
        How to pick the next waiting request: "fcfs" = first come, first served; "lpm" = longest
        prefix match among the first `lpm_window` (no request is passed over more than `lpm_window`
        times).
    lpm_window : int
        See `policy`.
    priority_window : int
        A request of priority p is queued as if `p * priority_window` more requests had arrived
        before it. So only a bounded number of later requests can overtake it, and none starves. 0
        ignores priorities.
    prefix_caching : bool
        Whether to keep and share computed prefixes.
    max_blocks_per_salt : int, optional
        Maximum blocks the prefix tree keeps per cache salt.
    num_host_blocks : int
        KV blocks in host memory, for swapped requests and evicted prefixes; 0 = none.
    num_state_slots : int
        State slots on the device, at least `max_num_seqs`; 0 = no layer has a state.
    num_host_state_slots : int
        State slots in host memory, for swapped requests.
    state_chunk : int
        Tokens per chunk in which recurrent layers compute a prompt, a power of two.
    state_interval : int
        Distance of the snapshots along a prompt, in tokens; 0 = only before its last token and
        where it parts from known prompts.
    preemption : str
        How to save a preempted request: "recompute", "swap" (to the host, while it has free
        blocks), or "auto" = whichever is cheaper by the two costs below.
    blocks_per_state_slot : float
        Size of a state slot in blocks, for the cost of swapping it.
    recompute_us_per_token, swap_us_per_block : float, optional
        Costs in microseconds: computing one prefill token, and swapping one block out and in. The
        engine measures omitted costs (`engine.core.preemption_costs`); a stand-alone scheduler
        assumes 50 and 100.
    max_num_queued_requests, max_num_queued_tokens : int, optional
        Maximum number of waiting requests and of their prompt tokens; beyond it, new requests are
        rejected.
    debug : bool
        Check all invariants after each call, and list the freed blocks in every output.

    Raises
    ------
    ConfigError
        If a value is out of range.

    Examples
    --------
    >>> SchedulerConfig(num_blocks=64, max_model_len=512).watermark_blocks
    1
    """

    num_blocks: int
    max_model_len: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_prefill_chunk: int = 0
    max_draft_tokens: int = 0
    max_adapters: int = 0
    draft_trees: bool = True
    watermark: float = 0.01
    policy: str = "fcfs"
    lpm_window: int = 16
    priority_window: int = 256
    prefix_caching: bool = True
    max_blocks_per_salt: int | None = None
    num_host_blocks: int = 0
    num_state_slots: int = 0
    num_host_state_slots: int = 0
    state_chunk: int = 64
    state_interval: int = 4096
    blocks_per_state_slot: float = 0.0
    preemption: str = "auto"
    recompute_us_per_token: float | None = None
    swap_us_per_block: float | None = None
    max_num_queued_requests: int | None = None
    max_num_queued_tokens: int | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            _require(self, name, value is None or value >= 1, "at least 1")
        for name in _AT_LEAST_ZERO:
            value = getattr(self, name)
            _require(self, name, value is None or value >= 0, "at least 0")
        _require(self, "block_size", self.block_size in _BLOCK_SIZES, f"one of {_BLOCK_SIZES}")
        _require(self, "watermark", 0.0 <= self.watermark <= 1.0, "in [0, 1]")
        _require(self, "policy", self.policy in POLICIES, f"one of {POLICIES}")
        _require(self, "preemption", self.preemption in PREEMPTIONS, f"one of {PREEMPTIONS}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), so "
                f"that every running request can decode; got {self.max_num_batched_tokens}"
            )
        if 0 < self.num_state_slots < self.max_num_seqs:
            raise ConfigError(
                f"num_state_slots must be 0 or at least max_num_seqs = {self.max_num_seqs}; "
                f"got {self.num_state_slots}"
            )
        if self.preemption == "swap" and not self.num_host_blocks:
            raise ConfigError("num_host_blocks must be at least 1 for preemption='swap'; got 0")

    @property
    def state_grid(self) -> int:
        """Snapshots of states are taken at multiples of this number of tokens.

        Both a block and a chunk end there.
        """
        return max(self.state_chunk, self.block_size)

    @property
    def watermark_blocks(self) -> int:
        """Blocks that an admission leaves free while other requests run."""
        return math.ceil(self.watermark * self.num_blocks)


def _require(config: SchedulerConfig, name: str, holds: bool, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"{name} must be {wanted}; got {getattr(config, name)!r}")
