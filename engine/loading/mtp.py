"""Load the MTP head of a MiMo checkpoint: tensors "model.mtp_layers.0.*".

The files are untrusted: sizes are range-checked as in `hf_config`, and every tensor's shape is
checked against the config before it is read.
"""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.loading.head_tensors import HeadTensors
from engine.loading.hf_config import load_hf_config

__all__ = ["load_mtp_config", "load_mtp_weights"]

_PREFIX = "model.mtp_layers.0."
_MODEL_TYPES = ("mimo",)
_NORMS = {
    "token_layernorm": "embed_norm",
    "hidden_layernorm": "hidden_norm",
    "input_layernorm": "attn_norm",
    "final_layernorm": "final_norm",
}
_SAME = ("hidden_size", "vocab_size")


def load_mtp_config(directory: str | PathLike[str], target: ModelConfig) -> ModelConfig:
    """Read the config.json of a model with an MTP head and return the config of the head's layer.

    Raises
    ------
    ConfigError
        If no MTP head of a known layout is declared, or a size differs from the target's (the
        message then names both sizes).
    """
    config = load_hf_config(directory)
    where = Path(directory) / "config.json"
    if config.model_type not in _MODEL_TYPES:
        raise ConfigError(
            f"{where}: model_type must be {' or '.join(map(repr, _MODEL_TYPES))} for an MTP head; "
            f"got {config.model_type!r}"
        )
    if not config.num_extra_layers:
        raise ConfigError(f"{where}: num_nextn_predict_layers must be at least 1; got 0")
    if any(config.layer_windows):
        raise ConfigError(f"{where}: use_sliding_window must be false for an MTP head; got true")
    if config.rope.scaling == "longrope":
        raise ConfigError(f"{where}: rope_scaling must not be longrope in a draft head")
    for key in _SAME:
        if (got := getattr(config, key)) != (wanted := getattr(target, key)):
            raise ConfigError(f"{where}: {key} must be that of the model, {wanted}; got {got}")
    return replace(config, num_layers=1, layer_windows=(0,), num_extra_layers=0)


def load_mtp_weights(
    directory: str | PathLike[str], config: ModelConfig, device: Any, dtype: str
) -> dict[str, Any]:
    """Load the first MTP layer in `dtype` onto `device`, under `MtpHead`'s names.

    Raises
    ------
    WeightsError
        If a file is damaged, or a tensor of the layer is missing, unexpected, or has the wrong
        shape or dtype.
    """
    tensors = HeadTensors(directory, device, dtype)
    n = config.hidden_size
    weights = tensors.layer(_PREFIX, config, width=n)
    for name, kind in _NORMS.items():
        weights[kind] = tensors.read(f"{_PREFIX}{name}.weight", (n,))
    weights["proj"] = tensors.read(f"{_PREFIX}input_proj.weight", (n, 2 * n))
    tensors.ignore(prefix=_PREFIX)  # the model's own tensors, and additional MTP heads
    tensors.finish("an MTP head")
    return weights
