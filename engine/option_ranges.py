"""The ranges of the engine's options: of numbers, and of those with a few values."""

from __future__ import annotations

from typing import Any

from engine.cache.kv_cache import KV_CACHE_DTYPES
from engine.checks import shown
from engine.drafts import MAX_QUERY_LEN
from engine.errors import ConfigError, RequestError
from engine.sampling_params import NumberRange
from engine.scheduler.config import POLICIES, PREEMPTIONS

__all__ = ["OPTIONS", "checked_option"]

_INT32 = 2**31 - 1
_RANGES = {
    "max_model_len": NumberRange(1, _INT32, integer=True, optional=True),
    "max_num_seqs": NumberRange(1, 2**16, integer=True, optional=True),
    "max_num_batched_tokens": NumberRange(1, _INT32, integer=True, optional=True),
    "block_size": NumberRange(16, 128, integer=True),
    "num_blocks": NumberRange(1, _INT32, integer=True, optional=True),
    "memory_utilization": NumberRange(0.0, 1.0, optional=True, low_open=True),
    "seed": NumberRange(0, 2**63 - 1, integer=True),
    "max_blocks_per_salt": NumberRange(1, _INT32, integer=True, optional=True),
    "max_prefill_chunk": NumberRange(0, _INT32, integer=True),
    "max_draft_tokens": NumberRange(0, MAX_QUERY_LEN - 1, integer=True),
    "priority_window": NumberRange(0, _INT32, integer=True),
    "max_num_queued_requests": NumberRange(1, 2**63 - 1, integer=True, optional=True),
    "max_num_queued_tokens": NumberRange(1, 2**63 - 1, integer=True, optional=True),
    "watermark": NumberRange(0.0, 1.0),
    "swap_space_gb": NumberRange(0.0, 2.0**20),
    "recompute_us_per_token": NumberRange(0.0, 1e12, optional=True),
    "swap_us_per_block": NumberRange(0.0, 1e12, optional=True),
    "step_timeout": NumberRange(0.0, 1e9, optional=True, low_open=True),
    "tensor_parallel_size": NumberRange(1, 64, integer=True),
    "pipeline_parallel_size": NumberRange(1, 64, integer=True),
    "collective_timeout": NumberRange(0.0, 1e9, low_open=True),
}
"""Range of every numeric option."""

_FLAGS = {
    "enable_prefix_caching": (True, False),
    "async_scheduling": (True, False, None),
    "cuda_graphs": (True, False, None),
    "raise_on_timeout": (True, False),
    "distributed_executor_backend": (None, "mp", "ray"),
    "debug": (True, False, None),
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "scheduling_policy": POLICIES,
    "preemption_mode": PREEMPTIONS,
}
"""Every other checked option -> its allowed values."""

OPTIONS = (*_RANGES, *_FLAGS)
"""Names of all checked options."""


def checked_option(name: str, value: Any) -> Any:
    """Return the value of an option, a number as its type.

    Raises
    ------
    ConfigError
        If it is not in its range.

    Examples
    --------
    >>> checked_option("block_size", 32)
    32
    """
    if name in _RANGES:
        try:
            return _RANGES[name].check(name, value)
        except RequestError as error:
            raise ConfigError(str(error)) from None
    # By type too: 1 == True, but 1 is not a flag.
    if not any(type(value) is type(c) and value == c for c in _FLAGS[name]):
        wanted = ", ".join(map(repr, _FLAGS[name]))
        raise ConfigError(f"{name} must be one of {wanted}; got {shown(value)}")
    return value
