"""Convert .gguf metadata to a `ModelConfig`.

Keys are renamed to their config.json equivalents, so one reader checks both formats; error messages
use the .gguf names.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np

from engine.checks import shown
from engine.config import ModelConfig
from engine.errors import ConfigError, WeightsError
from engine.loading.gguf import GgufFile
from engine.loading.hf_config import build_config
from engine.models.family import Family
from engine.models.mistral import MISTRAL
from engine.models.mixtral import MIXTRAL
from engine.models.moe_family import MoeFamily
from engine.models.olmo2 import OLMO3
from engine.models.registry import family_of_gguf

__all__ = ["gguf_config", "load_gguf_config"]

_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_MULTIPLIER_KEYS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_MOE_KEYS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_TOKEN_KEYS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
_NEUTRAL = {
    "expert_count": 0,
    "expert_shared_count": 0,
    "expert_shared_feed_forward_length": 0,
    "expert_group_count": 1,
    "expert_gating_func": 1,  # softmax
    "expert_weights_norm": True,
    "expert_weights_scale": 1.0,
    "leading_dense_block_count": 0,
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.scale": 0.0,
    "embedding_scale": 0.0,
    "logit_scale": 0.0,
    "residual_scale": 0.0,
}
# Architecture names shared by several families -> the family with windows, or with experts.
_WITH_WINDOW = {"llama": MISTRAL, "olmo2": OLMO3}
_WITH_EXPERTS = {"llama": MIXTRAL}
_PLAIN_DTYPES = {"F32": "float32", "F16": "float16"}


def load_gguf_config(path: str | PathLike[str]) -> ModelConfig:
    """Read the configuration inside the .gguf file `path`; see `gguf_config`."""
    return gguf_config(GgufFile(path))


def gguf_config(file: GgufFile) -> ModelConfig:
    """Return the configuration of the model in `file`.

    Its dtype is the embedding's, or bfloat16 if the embedding is quantized.

    Raises
    ------
    ConfigError
        If a key is missing, a value is invalid, or the architecture is not supported.
    WeightsError
        If a tensor that the configuration is derived from is missing.
    """
    where = str(file.path)
    arch = str(file.metadata.get("general.architecture", ""))
    try:
        family = family_of_gguf(arch)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if file.metadata.get(f"{arch}.expert_count"):
        family = _WITH_EXPERTS.get(arch, family)
    elif file.metadata.get(f"{arch}.attention.sliding_window"):
        family = _WITH_WINDOW.get(arch, family)
    values, names = _renamed(file.metadata, arch, family)
    _refuse_unsupported(file, arch, values, names)
    values.update(_from_tensors(file, family))
    values.update(_rope(file, arch, family, values))
    if "query_pre_attn_scalar" in family.defaults:
        values.update(_attention_scale(values))
    values.update(_window(file.metadata, arch))
    if family.moe is not None:
        values.update(_experts(file, arch, family.moe))
    return build_config(values, family, where, names)


def _renamed(
    metadata: Mapping[str, Any], arch: str, family: Family
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values under config.json keys, and the .gguf name of each key."""
    keys = _KEYS | (_MULTIPLIER_KEYS if family.multipliers else {})
    if family.layer_norm:
        keys[family.eps_key] = "attention.layer_norm_epsilon"
    if family.logit_scale:
        keys[family.logit_scale] = "logit_scale"
    if family.moe is not None:
        keys |= _MOE_KEYS
        if isinstance(family.moe.renormalize, str):
            keys[family.moe.renormalize] = "expert_weights_norm"
    names = {key: f"{arch}.{name}" for key, name in keys.items()} | _TOKEN_KEYS
    values = {key: metadata[name] for key, name in names.items() if name in metadata}
    ends = [metadata[key] for key in _EOS_KEYS if key in metadata]
    # A missing id means "none"; config.json's defaults do not apply.
    values.setdefault("bos_token_id", None)
    if family.multipliers:
        values.setdefault("attention_multiplier", None)
    values["eos_token_id"] = ends or None
    return values, names | {"eos_token_id": " and ".join(_EOS_KEYS)}


def _refuse_unsupported(
    file: GgufFile, arch: str, values: Mapping[str, Any], names: Mapping[str, str]
) -> None:
    """Reject unimplemented settings that would change the model's output."""
    metadata = file.metadata
    for key, neutral in _NEUTRAL.items():
        if f"{arch}.{key}" in names.values():
            continue
        value = metadata.get(f"{arch}.{key}", neutral)
        if value != neutral:
            raise ConfigError(
                f"{file.path}: {arch}.{key} must be {neutral} (nothing else is supported); "
                f"got {shown(value)}"
            )
    value_length = metadata.get(f"{arch}.attention.value_length")
    if value_length is not None and value_length != values.get("head_dim"):
        raise ConfigError(
            f"{file.path}: {arch}.attention.value_length must equal key_length "
            f"({values.get('head_dim')}); got {value_length}"
        )


def _from_tensors(file: GgufFile, family: Family) -> dict[str, Any]:
    """Return the settings derived from the tensors: V, tied embeddings, biases, layout, dtype."""
    embed = file.tensors.get("token_embd.weight")
    if embed is None:
        raise WeightsError(f"{file.path}: tensor 'token_embd.weight' is missing")
    plain = embed.format.name
    biases = ((family.qkv_bias, "attn_q"), (family.mlp_bias, "ffn_up"))
    found = {key: f"blk.0.{name}.bias" in file.tensors for key, name in biases if type(key) is str}
    if isinstance(family.parallel, str):
        found[family.parallel] = "blk.0.ffn_norm.weight" not in file.tensors
    return {
        **found,
        "vocab_size": embed.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _PLAIN_DTYPES.get(plain, "bfloat16"),
    }


def _window(metadata: Mapping[str, Any], arch: str) -> dict[str, Any]:
    window = metadata.get(f"{arch}.attention.sliding_window") or None
    return {"sliding_window": window, "use_sliding_window": window is not None}


def _experts(file: GgufFile, arch: str, moe: MoeFamily) -> dict[str, Any]:
    """Return the expert settings missing from .gguf files; expert counts must be present."""
    for name in (_MOE_KEYS["num_experts"], _MOE_KEYS["num_experts_per_tok"]):
        if f"{arch}.{name}" not in file.metadata:
            raise ConfigError(f"{file.path}: {arch}.{name} must be a whole number; got nothing")
    key = f"{arch}.expert_weights_norm"
    if not isinstance(moe.renormalize, str) or key in file.metadata:
        return {}
    return {moe.renormalize: moe.gguf_renormalize}


def _head_dim(values: Mapping[str, Any]) -> int | None:
    """Return D, or None if the metadata is invalid, which a later check reports."""
    heads = values.get("num_attention_heads")
    hidden = values.get("hidden_size")
    head_dim = values.get("head_dim")
    if head_dim is None and type(heads) is int and type(hidden) is int and heads > 0:
        return hidden // heads
    return head_dim if type(head_dim) is int else None


def _attention_scale(values: Mapping[str, Any]) -> dict[str, Any]:
    """Derive Gemma's `query_pre_attn_scalar`, missing from .gguf files.

    N / H in the largest Gemma 2 and 3 (46 and 62 layers); the head dim in all others.
    """
    head_dim = _head_dim(values)
    if values.get("num_hidden_layers") in (46, 62):
        head_dim = _head_dim({**values, "head_dim": None})
    return {"query_pre_attn_scalar": head_dim}


def _rope(file: GgufFile, arch: str, family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rope settings under config.json keys: scaling, frequency factors, rotary dim."""
    metadata = file.metadata
    result = _scaling(file, arch, values, family)
    if f"{arch}.rope.freq_base_swa" in metadata:
        result["rope_local_base_freq"] = metadata[f"{arch}.rope.freq_base_swa"]
    rotary = metadata.get(f"{arch}.rope.dimension_count")
    head_dim = _head_dim(values)
    if rotary is None or head_dim is None:
        return result
    is_partial = family.has_partial_rope
    lowest = 1 if is_partial else head_dim
    if type(rotary) is not int or not lowest <= rotary <= head_dim:
        raise ConfigError(
            f"{file.path}: {arch}.rope.dimension_count must be the head's {head_dim} features"
            f"{' or fewer' if is_partial else ''}; got {shown(rotary)}"
        )
    return {**result, "partial_rotary_factor": rotary / head_dim}


def _scaling(
    file: GgufFile, arch: str, values: Mapping[str, Any], family: Family
) -> dict[str, Any]:
    """Return the rope scaling under config.json keys."""
    metadata = file.metadata
    prefix = f"{arch}.rope.scaling"
    original = metadata.get(f"{prefix}.original_context_length")
    kind = metadata.get(f"{prefix}.type")
    scaling: dict[str, Any] = {"rope_type": "default"}
    if "rope_factors_long.weight" in file.tensors:
        scaling = {
            "rope_type": "longrope",
            "short_factor": _factors(file, "rope_factors_short.weight"),
            "long_factor": _factors(file, "rope_factors_long.weight"),
            "attention_factor": metadata.get(f"{prefix}.attn_factor"),
        }
    elif "rope_freqs.weight" in file.tensors:
        # Llama 3's scaling, converted to one divisor per frequency: equivalent to longrope with a
        # single set of factors and no cos/sin scale.
        factors = _factors(file, "rope_freqs.weight")
        scaling = {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
        }
        original = values.get("max_position_embeddings")
    elif kind not in (None, "none"):
        scaling = {
            "rope_type": kind,
            "factor": metadata.get(f"{prefix}.factor"),
            "beta_fast": metadata.get(f"{prefix}.yarn_beta_fast"),
            "beta_slow": metadata.get(f"{prefix}.yarn_beta_slow"),
            "truncate": family.defaults.get("rope_parameters", {}).get("truncate"),
        }
    return {"rope_scaling": scaling, "original_max_position_embeddings": original}


def _factors(file: GgufFile, name: str) -> list[float]:
    if name not in file.tensors:
        raise WeightsError(f"{file.path}: tensor {name!r} is missing")
    shape = file.shape(name)
    if len(shape) != 1 or shape[0] > 1024:
        raise WeightsError(
            f"{file.path}: tensor {name!r} must be a vector of at most 1024; got shape {shape}"
        )
    numbers: list[float] = file.read(name, 0, shape[0]).astype(np.float32).tolist()
    return numbers
