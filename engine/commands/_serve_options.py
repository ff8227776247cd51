"""Options of `engine serve`, in the groups of its help."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

from engine.commands._overrides import KERNELS_HELP, PROCESSORS_HELP
from engine.commands._parallel import EXPERT_HELP, LAYERS_HELP, PARALLEL_OPTIONS
from engine.commands._parser import option_name
from engine.commands._speculation import SPECULATION_HELP
from engine.server.server_config import RANGES, ServerConfig

__all__ = ["ALIASES", "GROUPS", "LLM_OPTIONS", "add_serve_options", "shown_defaults"]

# Not derived from `EngineConfig`, which takes a third of a second to import. The engine process
# validates the values while this one opens the port.
LLM_OPTIONS: dict[str, tuple[type, str]] = {
    "device": (str, "cpu, cuda, cuda:1 or auto"),
    "dtype": (str, "float32, float16, bfloat16 or auto"),
    "load_format": (str, "dummy: random weights"),
    "quantization": (
        str,
        "quantize while loading: fp8, int8, int4 or another format (default: as stored)",
    ),
    "deterministic": (bool, "generate the same tokens in any batch; slower"),
    "attention_pattern": (
        str,
        "keys that a query sees: FILE.py:NAME of a BlockSparse or Periodic (default: all)",
    ),
    "max_model_len": (int, "maximum tokens per request, prompt plus output (default: the model's)"),
    "max_num_seqs": (
        int,
        "maximum number of running requests (default: 256 on CUDA, 16 on the CPU)",
    ),
    "max_num_batched_tokens": (
        int,
        "token budget per step (default: 8192 on CUDA, 512 on the CPU)",
    ),
    "kv_cache_dtype": (str, "fp8 or int8: halves the KV cache"),
    "state_dtype": (str, "auto, float32 or bfloat16: dtype of recurrent states"),
    "num_state_snapshots": (
        int,
        "snapshots of recurrent states for prefix caching (default: by memory)",
    ),
    "state_snapshot_interval": (int, "distance of the snapshots along a prompt, in tokens"),
    "block_size": (int, "tokens per KV block: 16, 32, 64 or 128"),
    "num_blocks": (int, "number of KV blocks (default: as many as fit)"),
    "memory_utilization": (
        float,
        "share of the device's memory to use (default: 0.9 on CUDA, 0.5 on the CPU)",
    ),
    "seed": (int, "seed for requests without a seed of their own"),
    "enable_prefix_caching": (bool, "cache computed prefixes and share them"),
    "max_blocks_per_salt": (int, "maximum cached blocks per cache_salt (default: no limit)"),
    "max_prefill_chunk": (int, "maximum prompt tokens per request and step; 0: no limit"),
    "speculative_config": (str, f"{SPECULATION_HELP} (default: none)"),
    "kernels": (tuple, f"{KERNELS_HELP} (default: none)"),
    "logits_processors": (tuple, f"{PROCESSORS_HELP} (default: none)"),
    "max_draft_tokens": (
        int,
        "maximum draft tokens per request and step; 0: by speculative_config",
    ),
    "scheduling_policy": (str, "fcfs, or lpm: longest cached prefix first"),
    "priority_window": (int, "number of later arrivals that one priority level outweighs"),
    "max_num_queued_requests": (int, "maximum waiting requests; more get 429 (default: no limit)"),
    "max_num_queued_tokens": (int, "maximum waiting prompt tokens (default: no limit)"),
    "watermark": (float, "share of blocks kept free for running requests"),
    "swap_space_gb": (float, "host memory for preempted requests and evicted prefixes, in GiB"),
    "preemption_mode": (str, "recompute, swap or auto"),
    "recompute_us_per_token": (float, "cost compared by preemption_mode auto (default: measured)"),
    "swap_us_per_block": (float, "cost compared by preemption_mode auto (default: measured)"),
    "async_scheduling": (
        bool,
        "launch each step before the previous one's tokens are known (default: on with CUDA)",
    ),
    "cuda_graphs": (bool, "replay decode steps from CUDA graphs (default: on with CUDA)"),
    "step_timeout": (float, "seconds after which a step counts as stuck (default: no limit)"),
    "raise_on_timeout": (bool, "abandon stuck steps"),
    **{name: (kind, text) for name, (_, kind, text) in PARALLEL_OPTIONS.items()},
    "pipeline_layers": (str, LAYERS_HELP),
    "enable_expert_parallel": (bool, EXPERT_HELP),
    "enable_lora": (bool, "reserve memory for LoRA adapters"),
    "max_loras": (int, "LoRA adapters that one step may use"),
    "max_lora_rank": (int, "largest rank of a LoRA adapter"),
    "lora_modules": (
        tuple,
        "NAME=PATH of a LoRA adapter to load at the start; repeatable (default: none)",
    ),
    "distributed_executor_backend": (
        str,
        "ray: the other stages are actors of a Ray cluster (default: processes)",
    ),
    "pipeline_address": (
        str,
        "HOST:PORT where stages on other hosts connect, engine stage (default: none do)",
    ),
    "collective_timeout": (float, "seconds after which an unresponsive process counts as dead"),
    "debug": (bool, "check all internal tables in each step; slow (default: ENGINE_DEBUG)"),
}
"""Name -> type and description; tuple: repeatable."""

_KEYS = {
    "api_key": (tuple, "an accepted API key; repeatable (default: none, everyone may call)"),
    "admin_api_key": (
        tuple,
        "enable the endpoints that change the engine, for this key only; repeatable "
        "(default: none)",
    ),
}
ALIASES = {"gpu_memory_utilization": "memory_utilization"}
"""vLLM's name -> ours."""

_SHORT = {"quantization": "-q"} | {name: flag for name, (flag, *_) in PARALLEL_OPTIONS.items()}

GROUPS = {
    "address and processes": (
        *("host", "port", "root_path", "api_server_count", "shutdown_timeout", "hang_timeout"),
    ),
    "keys and access": (
        *("api_key", "api_key_file", "admin_api_key", "allowed_hosts"),
        *("share_prefixes_between_keys", "weights_root"),
    ),
    "TLS": ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"),
    "CORS": ("allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials"),
    "conversations": (
        *("served_model_name", "chat_template", "allow_special_in_content"),
        *("enable_auto_tool_choice", "tool_call_parser", "reasoning_parser", "reranker"),
        "ignore_unknown_fields",
    ),
    "limits of requests": (
        *("max_body_bytes", "max_header_bytes", "max_connections", "max_concurrent_requests"),
        *("max_requests_per_key", "max_prompts", "max_n", "max_logprobs", "max_answer_logprobs"),
        *("max_embedding_values", "max_tools", "max_stored_responses", "max_stored_bytes"),
        "max_watchers",
    ),
    "timeouts of connections": (
        *("request_timeout", "body_timeout", "send_timeout", "timeout_keep_alive"),
        "sse_keep_alive",
    ),
    "pages, metrics and log": (
        *("enable_page", "enable_metrics", "enable_tokenizer_info_endpoint", "access_log"),
        *("log_stats_interval", "json_logs", "log_prompts", "log_level"),
    ),
    "model": (
        *("device", "dtype", "load_format", "quantization", "max_model_len", "attention_pattern"),
        *("kernels", "logits_processors", "seed", "deterministic"),
    ),
    "memory and KV cache": (
        *("memory_utilization", "gpu_memory_utilization", "kv_cache_dtype", "block_size"),
        *("num_blocks", "enable_prefix_caching", "max_blocks_per_salt", "swap_space_gb"),
        *("state_dtype", "num_state_snapshots", "state_snapshot_interval"),
    ),
    "scheduling": (
        *("max_num_seqs", "max_num_batched_tokens", "max_prefill_chunk", "scheduling_policy"),
        *("priority_window", "max_num_queued_requests", "max_num_queued_tokens", "watermark"),
        *("preemption_mode", "recompute_us_per_token", "swap_us_per_block", "async_scheduling"),
        "cuda_graphs",
    ),
    "speculative decoding": ("speculative_config", "max_draft_tokens"),
    "parallelism": (
        *("tensor_parallel_size", "pipeline_parallel_size", "pipeline_layers"),
        *("data_parallel_size", "enable_expert_parallel", "nodes"),
        *("distributed_executor_backend", "pipeline_address", "collective_timeout"),
    ),
    "LoRA": ("enable_lora", "max_loras", "max_lora_rank", "lora_modules", "lora_root"),
    "faults": ("step_timeout", "raise_on_timeout", "debug"),
}
"""Title -> options, in the order of the help."""


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the server and of the engine."""
    options: dict[str, tuple[type, str]] = {**_KEYS, **LLM_OPTIONS}
    for field in dataclasses.fields(ServerConfig):
        if "help" in field.metadata:
            options[field.name] = _kind(field.name, field.default), field.metadata["help"]
    for alias, name in ALIASES.items():
        options[alias] = LLM_OPTIONS[name][0], f"vLLM's name of --{name.replace('_', '-')}"
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            _add(group, name, *options[name])


def shown_defaults() -> Mapping[str, Any]:
    """Return the defaults of all options."""
    # Imported lazily: only the help needs them.
    from engine.engine_config import CONFIG_OPTIONS
    from engine.model import LOAD_OPTIONS

    engine = {name: option.default for name, option in (LOAD_OPTIONS | CONFIG_OPTIONS).items()}
    server = {field.name: field.default for field in dataclasses.fields(ServerConfig)}
    return engine | server


def _add(group: Any, name: str, kind: type, text: str) -> None:
    """Declare an option."""
    flag = option_name(name)
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    elif kind is tuple:
        group.add_argument(flag, action="append", metavar="TEXT", help=text)
    else:
        short = [_SHORT[name]] if name in _SHORT else []
        group.add_argument(*short, flag, type=kind, metavar=kind.__name__.upper(), help=text)


def _kind(name: str, default: Any) -> type:
    if isinstance(default, tuple):
        return tuple
    if name in RANGES:
        return int if RANGES[name].integer else float
    return bool if isinstance(default, bool) else str
