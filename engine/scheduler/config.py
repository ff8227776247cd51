"""The scheduler's limits and choices, frozen and checked once."""

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
    "max_draft_tokens",
    "priority_window",
    "recompute_us_per_token",
    "swap_us_per_block",
)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What one scheduler may hand out, and how it chooses.

    Parameters
    ----------
    num_blocks : int
        KV blocks on the device.
    max_model_len : int
        Most tokens (prompt and output) of one request.
    block_size : int
        Tokens in a block: 16, 32, 64 or 128.
    max_num_seqs : int
        Most requests that run at once.
    max_num_batched_tokens : int
        Token budget of one step; at least `max_num_seqs`, so that every decode fits.
    max_prefill_chunk : int
        Most tokens of one prefill in one step; 0 = as many as the budget allows.
    max_draft_tokens : int
        Most drafts of a sequence that one step verifies (`Scheduler.propose`).
    draft_trees : bool
        Whether drafts may be trees; if not, they are cut to the chain that they begin with.
    watermark : float
        Share of the blocks that an admission leaves free while others run, as room to grow.
    policy : str
        Who of the waiting comes next: "fcfs" = who came first; "lpm" = of the `lpm_window` first,
        the one with the longest known prefix (nobody is passed over more than `lpm_window` times).
    priority_window : int
        A request of priority p stands in the queue as if `p * priority_window` more requests had
        come before it. So it is overtaken by a bounded number of later ones, and never starves.
        0 ignores priorities.
    prefix_caching : bool
        Whether computed prefixes are kept and shared.
    max_blocks_per_salt : int, optional
        Most blocks that are kept for one cache salt while nobody may be using them.
    num_host_blocks : int
        KV blocks in host memory, for swapped requests and evicted prefixes; 0 = none.
    preemption : str
        What becomes of the blocks that are taken from a request: "recompute", "swap" (to the host,
        as long as it has room), or "auto" = the cheaper one by the two costs below.
    recompute_us_per_token, swap_us_per_block : float, optional
        Costs in microseconds: of one prefill token, and of one block's way out and back. The engine
        measures what is left out (`engine.calibration`); a scheduler by itself takes 50 and 100.
    max_num_queued_requests, max_num_queued_tokens : int, optional
        What may wait; a request beyond that is refused when it is added.
    debug : bool
        Check all invariants after each call, and list freed blocks in every output.

    Raises
    ------
    ConfigError
        If a value is out of its range.

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
    draft_trees: bool = True
    watermark: float = 0.01
    policy: str = "fcfs"
    lpm_window: int = 16
    priority_window: int = 256
    prefix_caching: bool = True
    max_blocks_per_salt: int | None = None
    num_host_blocks: int = 0
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
        _require(self, "watermark", 0.0 <= self.watermark < 1.0, "in [0, 1)")
        _require(self, "policy", self.policy in POLICIES, f"one of {POLICIES}")
        _require(self, "preemption", self.preemption in PREEMPTIONS, f"one of {PREEMPTIONS}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), so "
                f"that every running request can decode; got {self.max_num_batched_tokens}"
            )
        if self.preemption == "swap" and not self.num_host_blocks:
            raise ConfigError("preemption='swap' needs num_host_blocks of at least 1; got 0")

    @property
    def watermark_blocks(self) -> int:
        """Blocks that an admission leaves free while others run."""
        return math.ceil(self.watermark * self.num_blocks)


def _require(config: SchedulerConfig, name: str, holds: bool, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"{name} must be {wanted}; got {getattr(config, name)!r}")
