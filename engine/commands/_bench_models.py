"""Models of `engine bench`: built-in configurations with random weights, or real models."""

from __future__ import annotations

import argparse
import sys
from functools import cache
from typing import Any

from engine.commands._overrides import override_options
from engine.commands._parallel import parallel_option
from engine.commands._quantization import quantization_option
from engine.commands._speculation import speculation_option
from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.llm_engine import LLMEngine
from engine.loading.built_in import built_in_names, config_folder
from engine.loading.download import ModelSource, resolve_model
from engine.loading.model_config import load_config

__all__ = ["built_in_config", "built_in_names", "config_folder", "make_engine", "named_config"]

_STARTUP_LEN = 2048  # default sequence length, in tokens


@cache
def built_in_config(name: str) -> ModelConfig:
    """Return a built-in configuration."""
    return load_config(config_folder(name))


def named_config(name: str) -> tuple[ModelConfig, ModelSource | None]:
    """Return a model's configuration and source files (None for a built-in configuration)."""
    if name in built_in_names():
        return built_in_config(name), None
    source = resolve_model(name, progress=sys.stderr.isatty(), others=built_in_names())
    return load_config(source), source


def make_engine(
    arguments: argparse.Namespace, *, max_model_len: int | None, max_num_seqs: int
) -> Any:
    """Load the chosen model, and build an engine for sequences of `max_model_len` tokens.

    If `max_model_len` is None, it is 2048 or the model's limit, whichever is less.

    Raises
    ------
    ConfigError
        If `max_model_len` exceeds the model's limit.
    """
    name, loading = _loading(arguments, max_model_len)
    options: dict[str, Any] = {
        "max_num_seqs": arguments.max_num_seqs or max_num_seqs,
        "max_num_batched_tokens": arguments.max_num_batched_tokens,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "cuda_graphs": False if arguments.no_cuda_graphs else None,
        **speculation_option(arguments),
        **override_options(arguments),
        **parallel_option(arguments),
    }
    if arguments.no_async:
        options["async_scheduling"] = False
    given = {k: v for k, v in options.items() if v is not None}
    return LLMEngine.from_name(name, **loading, **given)


def _loading(
    arguments: argparse.Namespace, max_model_len: int | None
) -> tuple[str, dict[str, Any]]:
    """Return the model's name and the keyword arguments for `load`."""
    name = arguments.model
    is_built_in = arguments.model in built_in_names()
    config = named_config(name)[0]
    most = config.max_position_embeddings
    if max_model_len is not None and max_model_len > most:
        raise ConfigError(
            f"--prompt-len plus --output-len must be at most {most}, the limit of {name}; "
            f"got {max_model_len}"
        )
    load_format = arguments.load_format
    if is_built_in and load_format == "auto":
        load_format = "dummy"
    return name, {
        "config": config,
        "load_format": load_format,
        "max_model_len": min(_STARTUP_LEN, most) if max_model_len is None else max_model_len,
        "device": arguments.device,
        "dtype": arguments.dtype,
        **quantization_option(arguments),
    }
