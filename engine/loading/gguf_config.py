"""Convert .gguf metadata to a `ModelConfig`.

Keys are renamed to their config.json equivalents, so one reader checks both formats; error messages
use the .gguf names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np

from engine.checks import shown, warn_once
from engine.config import ModelConfig
from engine.errors import ConfigError, WeightsError
from engine.loading.gguf import GgufFile
from engine.loading.gguf_keys import FILE_KEYS, INERT_KEYS, MODEL_KEYS, is_neutral
from engine.loading.hf_config import build_config, config_from_dict
from engine.model_files import excerpt
from engine.models.family import Family
from engine.models.granitemoe import GRANITEMOESHARED
from engine.models.mistral import MISTRAL
from engine.models.mixtral import MIXTRAL
from engine.models.moe_family import MoeFamily
from engine.models.olmo2 import OLMO3
from engine.models.registry import family_of_gguf

__all__ = ["gguf_config", "gguf_config_json", "load_gguf_config"]

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
# Architecture names shared by several families -> the family with windows, with experts, or with a
# shared expert beside these.
_WITH_WINDOW = {"llama": MISTRAL, "olmo2": OLMO3}
_WITH_EXPERTS = {"llama": MIXTRAL}
_WITH_SHARED_EXPERT = {"granitemoe": GRANITEMOESHARED}
# Rule of the layers with experts -> key of the first one.
_FIRST_SPARSE = {"after_first": "first_k_dense_replace", "interval": "moe_layer_start_index"}
# Rules of config.json whose layers a .gguf records only as a pattern.
_UNRECORDED = ("max_window_layers", "even_layers", "last_layers")
_ROPE_TYPES = ("none", "linear", "yarn", "longrope")
_PLAIN_DTYPES = {"F32": "float32", "F16": "float16"}
# model_type -> name of the class in transformers without "ForCausalLM", if the rule gives another.
_CLASS_NAMES = {
    "gemma3_text": "Gemma3",
    "smollm3": "SmolLM3",
    "stablelm": "StableLm",
    "ernie4_5": "Ernie4_5",
    "ernie4_5_moe": "Ernie4_5_Moe",
    "minimax_m2": "MiniMaxM2",
    "gpt_bigcode": "GPTBigCode",
}


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
    return _read(file)[0]


def gguf_config_json(file: GgufFile) -> tuple[ModelConfig, dict[str, Any]]:
    """Return the configuration of the model in `file`, and the config.json that says the same.

    Raises
    ------
    ConfigError
        As in `gguf_config`, or if the configuration cannot be said in a config.json.
    WeightsError
        See `gguf_config`.
    """
    config, values, family = _read(file)
    own = {shared: key for key, shared in family.key_aliases.items()}
    stated = {own.get(key, key): value for key, value in values.items()}
    rope = {key: one for key, one in (stated.pop("rope_scaling", None) or {}).items() if one}
    if rope.get("rope_type", "default") != "default":
        stated["rope_scaling"] = rope
    stated |= {"model_type": family.model_type, "architectures": [_class_name(family)]}
    # Null has a meaning of its own for some keys: it is written only if the default is another.
    short = {key: value for key, value in stated.items() if value is not None}
    for found in (short, stated):
        if config_from_dict(json.loads(json.dumps(found)), str(file.path)) == config:
            return config, found
    raise ConfigError(
        f"{file.path}: the configuration of a {family.model_type} model in this file cannot be "
        "written as a config.json"
    )


def _class_name(family: Family) -> str:
    """Return the class of the model in transformers, by which other engines choose their own."""
    name = family.model_type
    words = "".join(word.capitalize() for word in name.split("_"))
    return f"{_CLASS_NAMES.get(name, words)}ForCausalLM"


def _read(file: GgufFile) -> tuple[ModelConfig, dict[str, Any], Family]:
    """Return the configuration, its values under the keys of config.json, and the family."""
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
    if file.metadata.get(f"{arch}.expert_shared_feed_forward_length"):
        family = _WITH_SHARED_EXPERT.get(arch, family)
    keys = _Keys(file, arch)
    values, names = _renamed(keys, family)
    values.update(_from_tensors(file, family))
    values.update(_rope(keys, family, values))
    if "query_pre_attn_scalar" in family.defaults:
        values.update(_attention_scale(values))
    values.update(_windows(keys, family, values))
    if family.moe is not None:
        values.update(_experts(keys, family.moe))
    if family.mrope:
        for key in ("rope.dimension_sections", "n_deepstack_layers"):  # of images alone
            keys.get(key)
    config = build_config(values, family, where, names)
    keys.refuse_unread(_implied(config, family))
    return config, values, family


class _Keys:
    """The keys below the architecture's name, and which of them were read."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        self.file = file
        self.arch = arch
        self._read: set[str] = set()

    def name(self, key: str) -> str:
        return f"{self.arch}.{key}"

    def get(self, key: str) -> Any:
        """Return the value of `key`, which counts as read; None if it is absent."""
        self._read.add(key)
        return self.file.metadata.get(self.name(key))

    def error(self, key: str, wanted: str) -> ConfigError:
        name = self.name(key)
        got = shown(self.file.metadata[name]) if name in self.file.metadata else "nothing"
        return ConfigError(f"{self.file.path}: {name} must be {wanted}; got {got}")

    def refuse_unread(self, implied: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse unread keys that change the result; `implied` replaces their neutral values.

        A key that is on no list is a warning.
        """
        metadata = self.file.metadata
        for key, neutral in FILE_KEYS.items():
            if key in metadata and not is_neutral(metadata[key], neutral):
                raise ConfigError(
                    f"{self.file.path}: {key} must be {neutral[0]} (nothing else is supported); "
                    f"got {shown(metadata[key])}"
                )
        for name in metadata:
            key = name.removeprefix(f"{self.arch}.")
            if key == name or key in self._read or key in INERT_KEYS:
                continue
            if key not in MODEL_KEYS:
                warn_once(f"{self.file.path}: {excerpt(name)} is unknown and not read")
                continue
            neutral = implied.get(key, MODEL_KEYS[key])
            if not is_neutral(metadata[name], neutral):
                wanted = neutral[0] if neutral else "absent"
                raise self.error(key, f"{wanted} (nothing else is supported)")


def _implied(config: ModelConfig, family: Family) -> dict[str, tuple[Any, ...]]:
    """Return the values of unread keys that say what the model's other keys say."""
    local = config.rope if config.rope_local is None else config.rope_local
    width = (config.head_dim,)
    implied: dict[str, tuple[Any, ...]] = {
        "embedding_length_out": (config.hidden_size, 0),
        "use_parallel_residual": (config.parallel,),
        "attention.value_length": width,
        "attention.key_length_swa": width,
        "attention.value_length_swa": width,
        "attention.scale": (0, config.attn_scale or config.head_dim**-0.5),
        "rope.dimension_count": (config.rope.rotary_dim,),
        "rope.dimension_count_swa": (local.rotary_dim,),
        "rope.freq_base_swa": (local.theta,),
        "rope.global.freq_base": (config.rope.theta,),
        "rope.local.freq_base": (local.theta,),
    }
    if family.gguf_interleaved_rope:
        implied["tensor_data_layout"] = ("Meta AI original pth", "")
    if config.moe is None:  # counts and sizes of experts that do not exist
        implied |= dict.fromkeys(("expert_used_count", "expert_feed_forward_length"), (0,))
    else:
        implied["expert_feed_forward_length"] = (config.moe.intermediate_size, 0)
        implied["expert_shared_feed_forward_length"] = (config.moe.shared_size, 0)
        if config.moe.score == "sigmoid":
            implied["expert_gating_func"] = (2, 0)
        elif config.moe.renormalize:
            # 3 is softmax over the chosen experts: the same after division by the sum.
            implied["expert_gating_func"] = (1, 0, 3)
    return implied


def _renamed(keys: _Keys, family: Family) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values under config.json keys, and the .gguf name of each key."""
    table = _KEYS | (_MULTIPLIER_KEYS if family.multipliers else {})
    if family.layer_norm:
        table[family.eps_key] = "attention.layer_norm_epsilon"
    if family.logit_scale:
        table[family.logit_scale] = "logit_scale"
    if family.moe is not None:
        table |= _MOE_KEYS | _routing_keys(family.moe)
        if family.moe.width in _KEYS:
            del table["moe_intermediate_size"]
        if isinstance(family.moe.renormalize, str):
            table[family.moe.renormalize] = "expert_weights_norm"
    metadata = keys.file.metadata
    values = {
        key: _of_all_layers(keys.get(name))
        for key, name in table.items()
        if keys.name(name) in metadata
    }
    values |= {key: metadata[name] for key, name in _TOKEN_KEYS.items() if name in metadata}
    names = {key: keys.name(name) for key, name in table.items()} | _TOKEN_KEYS
    ends = [metadata[key] for key in _EOS_KEYS if key in metadata]
    # Missing keys have llama.cpp's defaults, not those of config.json: no id, a KV head per query
    # head, heads of hidden_size / heads.
    for key in ("bos_token_id", "num_key_value_heads", "head_dim"):
        values.setdefault(key, None)
    if family.multi_query:
        values["multi_query"] = values["num_key_value_heads"] == 1
    if family.moe is not None:
        values.update(_routing(family.moe, values))
    if family.extra_layers:
        values.update(_without_extra_layers(keys, family, values))
    if "rope_theta" not in values:
        values["rope_theta"] = keys.get("rope.global.freq_base") or 10000.0
    if keys.get(table[family.eps_key]) is None:
        raise keys.error(table[family.eps_key], "a number")
    if family.multipliers:
        values.setdefault("attention_multiplier", None)
    values["eos_token_id"] = ends or None
    return values, names | {
        "eos_token_id": " and ".join(_EOS_KEYS),
        "layer_types": keys.name("attention.sliding_window_pattern"),
        "sliding_window": keys.name("attention.sliding_window"),
    }


def _of_all_layers(value: Any) -> Any:
    """Return the one value of a list that holds it once a layer; any other value as it is."""
    if isinstance(value, list) and value and all(one == value[0] for one in value):
        return value[0]
    return value


def _from_tensors(file: GgufFile, family: Family) -> dict[str, Any]:
    """Return the settings derived from the tensors: V, tied embeddings, biases, layout, dtype."""
    embed = file.tensors.get("token_embd.weight")
    if embed is None:
        raise WeightsError(f"{file.path}: tensor 'token_embd.weight' is missing")
    plain = embed.format.name
    signs = (
        (family.qkv_bias, ("attn_q.bias", "attn_qkv.bias")),
        (family.mlp_bias, ("ffn_up.bias",)),
        (family.qk_norm, ("attn_q_norm.weight",)),
    )
    found = {
        key: any(f"blk.0.{name}" in file.tensors for name in names)
        for key, names in signs
        if type(key) is str
    }
    if isinstance(family.parallel, str):
        found[family.parallel] = "blk.0.ffn_norm.weight" not in file.tensors
    return {
        **found,
        "vocab_size": embed.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _PLAIN_DTYPES.get(plain, "bfloat16"),
    }


def _windows(keys: _Keys, family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window, and which layers have it if the file says so."""
    if family.windows == "never":
        return {}
    window = keys.get("attention.sliding_window") or None
    found = {"sliding_window": window, "use_sliding_window": window is not None}
    layers = values.get("num_hidden_layers")
    if family.windows == "switched" or type(layers) is not int:
        return found
    pattern = keys.get("attention.sliding_window_pattern")
    if pattern is None:
        if family.windows in _UNRECORDED and _is_short(window, values):
            wanted = f"absent, or {keys.name('attention.sliding_window_pattern')} given"
            raise keys.error("attention.sliding_window", wanted)
        return found
    if type(pattern) is int and pattern >= 0:
        # All but every n-th layer; 0 means all.
        pattern = [pattern == 0 or (i + 1) % pattern != 0 for i in range(min(layers, 1024))]
    is_list = isinstance(pattern, list) and all(one in (0, 1) for one in pattern)
    if not is_list or len(pattern) != layers:
        wanted = f"a number, or true or false for each of {layers} layers"
        raise keys.error("attention.sliding_window_pattern", wanted)
    names = ("full_attention", "sliding_attention")
    return {**found, "layer_types": [names[bool(one)] for one in pattern]}


def _is_short(window: Any, values: Mapping[str, Any]) -> bool:
    """Tell whether a window is shorter than the longest sequence."""
    positions = values.get("max_position_embeddings")
    return type(window) is int and type(positions) is int and window < positions


def _experts(keys: _Keys, moe: MoeFamily) -> dict[str, Any]:
    """Return the expert settings missing from .gguf files; expert counts must be present."""
    for name in (_MOE_KEYS["num_experts"], _MOE_KEYS["num_experts_per_tok"]):
        if keys.get(name) is None:
            raise keys.error(name, "a whole number")
    key = "expert_weights_norm"
    if not isinstance(moe.renormalize, str) or keys.name(key) in keys.file.metadata:
        return {}
    return {moe.renormalize: moe.gguf_renormalize}


def _without_extra_layers(keys: _Keys, family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of layers without those of multi-token prediction, and their number."""
    count = keys.get("nextn_predict_layers") or 0
    layers = values.get("num_hidden_layers")
    if type(count) is not int or type(layers) is not int:
        return {family.extra_layers: count}
    return {family.extra_layers: count, "num_hidden_layers": layers - count}


def _routing_keys(moe: MoeFamily) -> dict[str, str]:
    """Return the .gguf names of keys that only some families with experts have."""
    named = {
        moe.scale: "expert_weights_scale",
        moe.shared_count: "expert_shared_count",
        moe.shared_width: "expert_shared_feed_forward_length",
        _FIRST_SPARSE.get(moe.sparse_layers, ""): "leading_dense_block_count",
    }
    if moe.sparse_layers == "interval":
        named["moe_layer_interval"] = "interleave_moe_layer_step"
    if moe.has_groups:
        named |= {"n_group": "expert_group_count", "topk_group": "expert_group_used_count"}
    return {key: name for key, name in named.items() if key}


def _routing(moe: MoeFamily, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return these keys with llama.cpp's defaults, which are not those of config.json."""
    first = _FIRST_SPARSE.get(moe.sparse_layers)
    found = {key: values.get(key) or None for key in _routing_keys(moe)}
    return found if first is None else {**found, first: values.get(first, 0)}


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


def _rope(keys: _Keys, family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rope settings under config.json keys: scaling, frequency factors, rotary dim."""
    result = _scaling(keys, values, family)
    if family.local_rope:
        base = keys.get("rope.freq_base_swa") or keys.get("rope.local.freq_base")
        result |= {} if base is None else {"rope_local_base_freq": base}
    head_dim = _head_dim(values)
    rotary = keys.get("rope.dimension_count")
    if rotary is None:
        rotary = head_dim
    if head_dim is None:
        return result
    is_partial = family.has_partial_rope
    lowest = 1 if is_partial else head_dim
    if type(rotary) is not int or not lowest <= rotary <= head_dim:
        raise keys.error(
            "rope.dimension_count",
            f"the head's {head_dim} features{' or fewer' if is_partial else ''}",
        )
    return {**result, "partial_rotary_factor": rotary / head_dim}


def _scaling(keys: _Keys, values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the rope scaling under config.json keys.

    As llama.cpp reads it: the type is linear unless given, and its factor may have an old name.
    """
    file = keys.file
    original = keys.get("rope.scaling.original_context_length")
    kind = keys.get("rope.scaling.type") or "linear"
    if kind not in _ROPE_TYPES:
        raise keys.error("rope.scaling.type", f"one of {', '.join(_ROPE_TYPES)}")
    factor = _rope_factor(keys)
    attn_factor = keys.get("rope.scaling.attn_factor") or None
    scaling: dict[str, Any] = {"rope_type": "default", "attn_factor": attn_factor}
    if "rope_factors_long.weight" in file.tensors:
        _refuse_scaling(keys, factor, kind, "longrope")
        scaling = {
            "rope_type": "longrope",
            "short_factor": _factors(file, "rope_factors_short.weight"),
            "long_factor": _factors(file, "rope_factors_long.weight"),
            "attention_factor": attn_factor,
        }
    elif "rope_freqs.weight" in file.tensors:
        # Llama 3's scaling, converted to one divisor per frequency: equivalent to longrope with a
        # single set of factors and no cos/sin scale.
        _refuse_scaling(keys, factor, kind, "linear")
        factors = _factors(file, "rope_freqs.weight")
        scaling = {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0 if attn_factor is None else attn_factor,
        }
        original = values.get("max_position_embeddings")
    elif kind == "longrope" or kind in family.rope_aliases:
        raise keys.error("rope.scaling.type", "another one without rope_factors_long.weight")
    elif kind == "yarn":
        scaling = {
            "rope_type": kind,
            "factor": 1.0 if factor is None else factor,
            "beta_fast": keys.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": keys.get("rope.scaling.yarn_beta_slow"),
            "truncate": family.defaults.get("rope_parameters", {}).get("truncate"),
            "attn_factor": _beyond_yarn(attn_factor, factor),
        }
        if family.q_scale:
            all_dim = keys.get("rope.scaling.yarn_log_multiplier") or None
            scaling |= {"mscale": None if all_dim is None else 1.0, "mscale_all_dim": all_dim}
    elif kind == "linear" and factor not in (None, 1.0):
        scaling |= {"rope_type": "linear", "factor": factor}
    if family.q_scale:
        scaling["llama_4_scaling_beta"] = keys.get("attention.temperature_scale")
    # Outside the object it overrides a family's default, but ropes by kind of layer read it within.
    length = {"original_max_position_embeddings": original}
    return {"rope_scaling": scaling | length, **length}


def _rope_factor(keys: _Keys) -> Any:
    """Return the factor under its name, or its old one; None (also stored as 0) if not given."""
    factor = keys.get("rope.scaling.factor") or None
    old = keys.get("rope.scale_linear") or None
    if factor is not None and old is not None and factor != old:
        raise keys.error("rope.scale_linear", f"{factor}, as rope.scaling.factor says")
    return old if factor is None else factor


def _refuse_scaling(keys: _Keys, factor: Any, kind: str, implied: str) -> None:
    """Refuse a scaling in metadata beside the frequency factors in a tensor."""
    if factor not in (None, 1.0):
        named = "rope.scaling.factor"
        if keys.name(named) not in keys.file.metadata:
            named = "rope.scale_linear"
        raise keys.error(named, "1 beside a tensor of frequency factors")
    if kind not in ("none", "linear", implied):
        raise keys.error("rope.scaling.type", f"{implied} beside a tensor of frequency factors")


def _beyond_yarn(attn_factor: Any, factor: Any) -> Any:
    """Return the factor on cos and sin beside YaRN's own.

    The converter of OLMo 3 writes YaRN's own factor, 1 + log(factor) / 10, under the same key.
    """
    if type(attn_factor) is not float or type(factor) is not float or factor <= 1:
        return attn_factor
    own = 1 + 0.1 * math.log(factor)
    return None if math.isclose(attn_factor, own, rel_tol=1e-5) else attn_factor


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
