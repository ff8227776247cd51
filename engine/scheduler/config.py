"""The scheduler's limits and choices, frozen and checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.errors import ConfigError

__all__ = ["SchedulerConfig"]

_BLOCK_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class SchedulerConfig:
    """What one scheduler may hand out.

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
        Most prompt tokens of one request in one step; 0 = as many as the budget allows.
    watermark : float
        Share of the blocks that an admission leaves free while others run, as room to grow.

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
    watermark: float = 0.01

    def __post_init__(self) -> None:
        for name in ("num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            _require(self, name, getattr(self, name) >= 1, "at least 1")
        _require(self, "block_size", self.block_size in _BLOCK_SIZES, f"one of {_BLOCK_SIZES}")
        _require(self, "max_prefill_chunk", self.max_prefill_chunk >= 0, "0 (no limit) or more")
        _require(self, "watermark", 0.0 <= self.watermark < 1.0, "in [0, 1)")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), so "
                f"that every running request can decode; got {self.max_num_batched_tokens}"
            )

    @property
    def watermark_blocks(self) -> int:
        """Blocks that an admission leaves free while others run."""
        return math.ceil(self.watermark * self.num_blocks)


def _require(config: SchedulerConfig, name: str, holds: bool, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"{name} must be {wanted}; got {getattr(config, name)!r}")
