"""`engine doctor --plan MODEL`: where a device's memory goes, and how many tokens fit."""

from __future__ import annotations

from dataclasses import replace

from engine.cache.kv_cache import KV_CACHE_DTYPES, KVGeometry, MemoryBudget, kv_dtype
from engine.cache.memory_pool import device_memory, format_bytes
from engine.commands._bench_models import built_in_config, built_in_names
from engine.config import ModelConfig
from engine.device import resolve_device
from engine.engine_config import activation_bytes
from engine.errors import ConfigError
from engine.loading.download import resolve_model
from engine.loading.model_config import load_config
from engine.loading.weight_memory import weight_bytes
from engine.models.decoder import rope_bytes
from engine.quantization.quantize import resolve_format

__all__ = ["plan_lines"]

_WEIGHTS = (None, "fp8", "int8", "int4")
_TOKENS, _SEQUENCES = 8192, 256  # of a step: the defaults on CUDA


def plan_lines(name: str, memory_gb: float | None = None) -> list[str]:
    """Return the lines of the plan for a model, by the format of its weights and its pages.

    Parameters
    ----------
    name : str
        A built-in configuration, or a model as for `engine.load`; weights are not read.
    memory_gb : float, optional
        Memory of the device in GiB; by default that of the one here.

    Raises
    ------
    ConfigError
        If `memory_gb` is not positive.
    """
    if memory_gb is not None and not memory_gb > 0:
        raise ConfigError(f"--memory-gb must be above 0; got {memory_gb}")
    is_built_in = name in built_in_names()
    config = built_in_config(name) if is_built_in else load_config(resolve_model(name).path)
    dtype = "float16" if config.dtype == "float16" else "bfloat16"
    budget = _budget(config, dtype, memory_gb)
    lines = [
        f"{name}: {config.num_layers} layers, {config.num_kv_heads} key/value heads of "
        f"{config.head_dim}, {dtype}",
        f"memory {format_bytes(budget.total)}, of which {100 * budget.utilization:.3g}% may be "
        f"used; activations of {_TOKENS} tokens {format_bytes(budget.activations)}",
        f"{'weights':10} {'size':>12}   {'pages':10} {'a token':>12} {'tokens':>12}",
    ]
    for quantization in _WEIGHTS:
        form = None if quantization is None else resolve_format(quantization)
        weights = weight_bytes(config, dtype, quantization=form)
        left = replace(budget, weights=budget.weights + weights).left
        for option in KV_CACHE_DTYPES:
            geometry = _geometry(config, kv_dtype(option, dtype))
            fitting = max(0, left) // geometry.bytes_per_block * geometry.block_size
            lines.append(
                f"{quantization or dtype:10} {format_bytes(weights):>12}   {geometry.dtype:10} "
                f"{format_bytes(geometry.bytes_per_token):>12} {fitting or 'none':>12}"
            )
    return lines


def _geometry(config: ModelConfig, dtype: str) -> KVGeometry:
    return KVGeometry(config.num_layers, config.num_kv_heads, config.head_dim, dtype=dtype)


def _budget(config: ModelConfig, dtype: str, memory_gb: float | None) -> MemoryBudget:
    """Return the budget without weights, but with the rope tables in their place."""
    if memory_gb is None:
        total, _ = device_memory(resolve_device("auto")[0])
    else:
        total = int(memory_gb * 2**30)
    return MemoryBudget(
        total=total,
        others=0,
        weights=rope_bytes(config, config.max_position_embeddings),
        activations=activation_bytes(config, dtype, _TOKENS, _SEQUENCES),
    )
