"""Types of the engine's keywords, for type checkers and editors; written by `tests/options.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from engine.config import ModelConfig
from engine.device import Device

__all__ = ["EngineOptions", "LLMOptions"]


class EngineOptions(TypedDict, total=False):
    """Keywords of `LLMEngine`: the fields of `EngineConfig`, which describes them."""

    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    kv_cache_dtype: str
    state_dtype: str
    num_state_snapshots: int | None
    state_snapshot_interval: int
    block_size: int
    num_blocks: int | None
    memory_utilization: float | None
    seed: int
    enable_prefix_caching: bool
    max_blocks_per_salt: int | None
    max_prefill_chunk: int
    max_draft_tokens: int
    speculative_config: Any
    logits_processors: Any
    scheduling_policy: str
    priority_window: int
    max_num_queued_requests: int | None
    max_num_queued_tokens: int | None
    watermark: float
    swap_space_gb: float
    preemption_mode: str
    recompute_us_per_token: float | None
    swap_us_per_block: float | None
    async_scheduling: bool | None
    cuda_graphs: bool | None
    step_timeout: float | None
    raise_on_timeout: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    pipeline_layers: Any
    distributed_executor_backend: str | None
    pipeline_address: str | None
    collective_timeout: float
    lora_modules: Any
    debug: bool | None
    gpu_memory_utilization: float | None  # vLLM's name of memory_utilization


class LLMOptions(EngineOptions, total=False):
    """Keywords of `LLM` and `from_name`: those of `load` too, which describes them."""

    device: str | Device
    dtype: str
    load_format: Literal["auto", "dummy"]
    quantization: str | None
    deterministic: bool
    enable_expert_parallel: bool
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    kernels: Mapping[str, Any] | None
    attention_pattern: Any
    progress: bool | None
    config: ModelConfig | None
