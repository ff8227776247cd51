"""Load published EAGLE-3 heads: config.json and tensors.

Tensor names are as in the raw checkpoints ("midlayer.*" or "layers.0.*", "fc", "norm", "lm_head",
"d2t"). The files are untrusted: sizes are range-checked as in `hf_config`, and every tensor's
shape is checked against the config before it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from engine.checks import shown
from engine.config import ModelConfig
from engine.errors import ConfigError, WeightsError
from engine.loading._fields import MAX_WIDTH, Fields
from engine.loading.head_tensors import HeadTensors
from engine.loading.hf_config import config_from_dict
from engine.model_files import read_json
from engine.models.draft_heads import Eagle3Config

__all__ = ["load_eagle3_config", "load_eagle3_weights"]

_MAX_FEATURES = 16
_UNSUPPORTED = ("fc_norm", "norm_before_fc", "norm_output", "quantization_config")
_PREFIXES = ("midlayer.", "layers.0.")


def load_eagle3_config(
    directory: str | PathLike[str], target: ModelConfig, num_layers: int | None = None
) -> Eagle3Config:
    """Read a head's config.json and check it against the target model.

    Parameters
    ----------
    directory : str or path
    target : ModelConfig
        The target's, or that of one of its pipeline stages.
    num_layers : int, optional
        Number of layers of the whole target; by default those of `target`.

    Raises
    ------
    ConfigError
        If a value is missing, out of range or unsupported, or differs from the target's (the
        message then names both values), or if the target has several residual streams.
    """
    if target.altup is not None:
        raise ConfigError(
            "an EAGLE-3 head needs a model with one residual stream; "
            f"{target.model_type} has {target.altup.num_streams}"
        )
    root = Path(directory)
    where = str(root / "config.json")
    values = read_json(root / "config.json", root=root)
    nested = values.get("transformer_layer_config")
    is_speculators = isinstance(nested, Mapping)
    if isinstance(nested, Mapping):  # config format of the "speculators" library
        values = {**nested, **{key: value for key, value in values.items() if key != "model_type"}}
    fields = Fields({**values, "num_hidden_layers": values.get("num_hidden_layers", 1)}, where)
    for key in _UNSUPPORTED:
        if fields.raw(key):
            raise fields.error(key, "absent, null or false (it is not implemented)")
    if fields.integer("num_hidden_layers", 1, 1024) != 1:
        raise fields.error("num_hidden_layers", "1")
    layer = _layer_config(values, target, where)
    width = fields.integer("target_hidden_size", 1, MAX_WIDTH, layer.hidden_size)
    if width != target.hidden_size:
        key = "target_hidden_size" if fields.has("target_hidden_size") else "hidden_size"
        raise _differs(where, key, width, target.hidden_size)
    if layer.vocab_size != target.vocab_size:
        raise _differs(where, "vocab_size", layer.vocab_size, target.vocab_size)
    count = fields.integer("draft_vocab_size", 1, target.vocab_size, target.vocab_size)
    residual = fields.flag("norm_before_residual", is_speculators)
    layers = _feature_layers(fields, num_layers or target.num_layers)
    return Eagle3Config(layer, count, layers, width, residual)


def load_eagle3_weights(
    directory: str | PathLike[str], config: Eagle3Config, device: Any, dtype: str
) -> dict[str, Any]:
    """Load a head's tensors in `dtype` onto `device`, under `Eagle3Head`'s names.

    Raises
    ------
    WeightsError
        If a file is damaged, or a tensor is missing, unexpected, or has the wrong shape or dtype.
    """
    tensors = HeadTensors(directory, device, dtype)
    prefix = next((p for p in _PREFIXES if f"{p}input_layernorm.weight" in tensors), _PREFIXES[0])
    c = config.layer
    n = config.layer.hidden_size
    tensors.ignore("t2d")
    weights = tensors.layer(prefix, c, width=2 * n)
    norms = {"norm": "final_norm", f"{prefix}input_layernorm": "attn_norm"}
    norms |= {f"{prefix}hidden_norm": "hidden_norm"}
    weights |= {kind: tensors.read(f"{name}.weight", (n,)) for name, kind in norms.items()}
    fc = n, len(config.feature_layers) * config.target_hidden_size
    weights["fc"] = tensors.read("fc.weight", fc)
    if "embed_tokens.weight" in tensors or n != config.target_hidden_size:
        weights["embed"] = tensors.read("embed_tokens.weight", (c.vocab_size, n))
    is_whole = config.draft_vocab_size == c.vocab_size
    if "lm_head.weight" in tensors or not is_whole or n != config.target_hidden_size:
        weights["lm_head"] = tensors.read("lm_head.weight", (config.draft_vocab_size, n))
    if "d2t" in tensors or not is_whole:
        weights["target_ids"] = device.xp.asarray(_target_ids(tensors, config))
    tensors.finish("an EAGLE-3 head")
    return weights


def _layer_config(values: Mapping[str, Any], target: ModelConfig, where: str) -> ModelConfig:
    """Return the config of the head's layer, a Llama layer."""
    absent = {"model_type", "num_hidden_layers", "layer_types", "bos_token_id", "eos_token_id"}
    given = {key: value for key, value in values.items() if key not in absent}
    given.setdefault("vocab_size", target.vocab_size)
    one = {"model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": False}
    config = config_from_dict({**given, **one}, where)
    if config.rope.scaling == "longrope":
        raise ConfigError(f"{where}: rope_scaling must not be longrope in a draft head")
    return config


def _feature_layers(fields: Fields, last: int) -> tuple[int, ...]:
    """Return the layers whose inputs the head reads; by default EAGLE-3's three."""
    key = "eagle_aux_hidden_state_layer_ids"
    if not fields.has(key) and fields.has("eagle_config"):
        fields = fields.child("eagle_config")
        if not fields.flag("use_aux_hidden_state", True):
            raise fields.error("use_aux_hidden_state", "true or absent")
    if not fields.has(key):
        layers = (2, last // 2, last - 3)
        if last < 3:
            raise ConfigError(
                "an EAGLE-3 head without eagle_aux_hidden_state_layer_ids needs a model of at "
                f"least 3 layers; it has {last}"
            )
        return layers
    given = fields.raw(key)
    if (
        not isinstance(given, list)
        or not 0 < len(given) <= _MAX_FEATURES
        or any(type(one) is not int or not 0 <= one <= last for one in given)
    ):
        raise fields.error(key, f"up to {_MAX_FEATURES} layers from 0 to {last}")
    return tuple(given)


def _target_ids(tensors: HeadTensors, config: Eagle3Config) -> np.ndarray[Any, Any]:
    """Return the target token id of each draft id; the file stores the differences."""
    count = config.draft_vocab_size
    size = config.layer.vocab_size
    offsets = tensors.integers("d2t", (count,))
    ids: np.ndarray[Any, Any] = np.arange(count) + np.clip(offsets, -size, size)
    if ids.min() < 0 or ids.max() >= size or len(np.unique(ids)) != count:
        bad = ids[(ids < 0) | (ids >= size)][:1].tolist() or ["one id twice"]
        raise WeightsError(
            f"{tensors.path}: tensor 'd2t' must map to different ids in [0, {size}); got {bad[0]}"
        )
    return ids


def _differs(where: str, key: str, got: int, wanted: int) -> ConfigError:
    return ConfigError(f"{where}: {key} must be that of the model, {wanted}; got {shown(got)}")
