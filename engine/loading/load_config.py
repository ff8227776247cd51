"""`LoadConfig`: the resolved load options, with the reason for each choice."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.checks import check_count, shown
from engine.config import ModelConfig
from engine.device import Device
from engine.dtypes import FLOAT_NAMES
from engine.errors import ConfigError, WeightsError
from engine.loading.download import ModelSource
from engine.weights import FORMATS
from engine.weights.quantize import resolve_format

__all__ = ["LoadConfig", "expert_count", "resolve_load_config"]


_MAX_LORA = 256  # maximum of adapters per step, and of their rank


@dataclass(frozen=True)
class LoadConfig:
    """The resolved options of `load`, with the reason for each value chosen automatically.

    Attributes
    ----------
    device : Device
    dtype : str
        Dtype of weights, activations and KV cache pages.
    max_model_len : int
        Maximum sequence length in tokens.
    load_format : str
        "auto" (checkpoint weights) or "dummy" (random weights).
    quantization : str or None
        Format the layers' matrices are quantized to; None: as stored in the checkpoint; "none":
        dequantized.
    deterministic : bool
        Produce bitwise identical results at any batch composition and chunk size.
    enable_expert_parallel : bool
        Use expert parallelism: each rank holds some of the experts, undivided.
    enable_lora : bool
        Whether LoRA adapters may change the layers' matrices.
    max_loras, max_lora_rank : int
        Number of adapters that a step may use, and their largest rank.
    reasons : mapping of str to str
        Option -> the reason for its value.
    """

    device: Device
    dtype: str
    max_model_len: int
    load_format: str
    quantization: str | None = None
    deterministic: bool = False
    enable_expert_parallel: bool = False
    enable_lora: bool = False
    max_loras: int = 8
    max_lora_rank: int = 16
    reasons: Mapping[str, str] = field(default_factory=dict)


def resolve_load_config(
    config: ModelConfig,
    source: ModelSource | None,
    device: tuple[Device, str],
    dtype: Any,
    load_format: str,
    max_model_len: int | None,
    quantization: str | None = None,
    deterministic: bool = False,
    enable_expert_parallel: bool = False,
    enable_lora: bool = False,
    max_loras: int = 8,
    max_lora_rank: int = 16,
) -> LoadConfig:
    """Choose values for the options that the user left unset.

    Parameters
    ----------
    config : ModelConfig
        The model's configuration.
    source : ModelSource or None
        The model's files, if any.
    device : (Device, str)
        The device, and why it was chosen.
    dtype, load_format, max_model_len, quantization, deterministic, enable_expert_parallel
        See `load`.
    enable_lora, max_loras, max_lora_rank
        See `load`.

    Raises
    ------
    ConfigError
        If the dtype or format is unknown, the length exceeds the model's maximum, a flag is not a
        bool, or `enable_expert_parallel` is set for a model without experts.
    """
    flags = {"deterministic": deterministic, "enable_expert_parallel": enable_expert_parallel}
    flags["enable_lora"] = enable_lora
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ConfigError(f"{name} must be True or False; got {shown(flag)}")
    if enable_expert_parallel:
        expert_count(config)
    check_count("max_loras", max_loras, _MAX_LORA)
    check_count("max_lora_rank", max_lora_rank, _MAX_LORA)
    if isinstance(dtype, type | np.dtype):
        dtype = np.dtype(dtype).name  # accepts np.float32, ml_dtypes.bfloat16, array.dtype
    reasons = {"device": device[1]}
    # isinstance first: comparing an array with a str yields an array.
    if isinstance(dtype, str) and dtype == "auto":
        dtype, reasons["dtype"] = _choose_dtype(config, source, device[0])
    elif not isinstance(dtype, str) or dtype not in FLOAT_NAMES:
        raise ConfigError(
            f"dtype must be one of auto, {', '.join(FLOAT_NAMES)}; got {shown(dtype)}"
        )
    form = _format_name(quantization, load_format)
    limit = config.max_position_embeddings
    if max_model_len is None:
        max_model_len = limit
        reasons["max_model_len"] = "the model's own"
    elif isinstance(max_model_len, bool) or not isinstance(max_model_len, numbers.Integral):
        raise ConfigError(f"max_model_len must be a whole number; got {shown(max_model_len)}")
    elif not 1 <= max_model_len <= limit:
        raise ConfigError(
            f"max_model_len must be from 1 to the model's own {limit}; "
            f"got {shown(int(max_model_len))}"
        )
    return LoadConfig(
        device[0],
        dtype,
        int(max_model_len),
        load_format,
        form,
        deterministic,
        enable_expert_parallel,
        enable_lora,
        int(max_loras),
        int(max_lora_rank),
        reasons,
    )


def expert_count(config: ModelConfig) -> int:
    """Return the number of experts that `enable_expert_parallel` distributes.

    Raises
    ------
    ConfigError
        If the model has no experts.
    """
    if config.moe is None:
        raise ConfigError(
            "enable_expert_parallel must be False for a model without experts: "
            f"{config.model_type} is dense, and tensor_parallel_size divides all of it; got True"
        )
    return config.moe.num_experts


def _format_name(quantization: Any, load_format: str) -> str | None:
    """Return the name of the format that the option `quantization` selects."""
    if quantization is None or (isinstance(quantization, str) and quantization == "none"):
        return quantization
    if not isinstance(quantization, str):
        raise ConfigError(f"quantization must be a name or None; got {shown(quantization)}")
    try:
        if load_format == "dummy" and quantization in FORMATS:  # includes load-only formats
            return FORMATS[quantization].name
        return resolve_format(quantization).name
    except WeightsError as error:
        raise ConfigError(str(error)) from None


def _choose_dtype(
    config: ModelConfig, source: ModelSource | None, device: Device
) -> tuple[str, str]:
    if not device.is_cuda:
        return "float32", "the CPU computes in float32"
    if source is not None and source.kind == "gguf":
        return "bfloat16", "the weights are dequantized"
    if config.dtype in ("float16", "bfloat16"):
        return config.dtype, "the checkpoint's own"
    return "bfloat16", f"the checkpoint's {config.dtype} would be slow"
