"""Convert config.json to a `ModelConfig`.

Files are untrusted: every number's type and range are checked, so a corrupt file raises a
`ConfigError` that names the key and never causes a huge allocation.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from engine.checks import shown, warn_once
from engine.config import MlaConfig, ModelConfig, MoeConfig, RopeConfig
from engine.dtypes import FLOAT_NAMES
from engine.errors import ConfigError, WeightsError
from engine.kernels._attention import MAX_HEAD_DIM
from engine.layers.rotary import attention_factor
from engine.loading._fields import MAX_HEADS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, REQUIRED, Fields
from engine.loading.classifier import is_classifier
from engine.loading.config_keys import refuse_unread
from engine.loading.generation_config import generation_config
from engine.loading.layer_config import full_head_dim, layer_fields
from engine.loading.mixer_config import mixer_config, with_layer_types
from engine.loading.mla_config import latent_factors, mla_config, mla_scale, rope_width
from engine.loading.moe_config import is_dense, moe_config
from engine.loading.quantized.scheme import scheme_of
from engine.loading.rope_config import (
    MAX_POSITIONS,
    MAX_THETA,
    MIN_THETA,
    rope_configs,
    scaled_max_position,
)
from engine.loading.safetensors import SafetensorsDirectory, SafetensorsFile
from engine.loading.text_model import open_model, text_values, wrapper_of
from engine.loading.weight_factors import weight_factors
from engine.model_files import is_present, read_json
from engine.models.family import Family
from engine.models.registry import family, type_of

__all__ = ["build_config", "config_from_dict", "load_hf_config"]

_MAX_CHUNKS = 4096

# For these keys null means "use the family's default". For all others it means "none":
# `"sliding_window": null` turns the window off.
_NULL_IS_DEFAULT = ("rope_parameters", "attn_layer_indices")

_SWITCHED = ("switched", "max_window_layers", "even_layers", "layers_without_rope")

_NEW_FALCON = "new_decoder_architecture"

_ENDS = ("embed", "lm_head")

_ROWS_COMPARED = 1024  # rows of two matrices compared at a time

_STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}
_UNGATED_ACTIVATIONS = {**_ACTIVATIONS, "relu": "relu", "xielu": "xielu"}


def load_hf_config(directory: str | PathLike[str]) -> ModelConfig:
    """Read the configuration in `directory`; see `model_config.load_config`."""
    path = Path(directory)
    values = text_values(read_json(path / "config.json", root=path), str(path / "config.json"))
    generation = generation_config(path)
    if is_present(path / "adapter_config.json"):
        warn_once(f"{path}: adapter_config.json is not read: the model is used without its adapter")
    dense = path / "2_Dense" / "config.json"  # a module of sentence-transformers
    if is_present(dense):
        warn_once(f"{dense}: is not read: embeddings are used without this layer")
    more = {key: generation[key] for key in ("eos_token_id",) if key in generation}
    key = "torch_dtype" if values.get("dtype") is None else "dtype"
    if values.get(key) in (None, "auto"):
        more[key] = _stored_dtype(path)
    config = config_from_dict({**values, **more}, str(path / "config.json"))
    if is_classifier(path):  # its head replaces the output layer
        return replace(config, tie_word_embeddings=True, lm_head_bias=False)
    if wrapper_of(path) is not None:
        return replace(config, tie_word_embeddings=_is_tied(path, config))
    if config.tie_word_embeddings and _has_own_output(path, config):
        warn_once(
            f"{path}: the output layer is not tied to the embedding, since the checkpoint has "
            "another output layer; tie_word_embeddings should be false"
        )
        return replace(config, tie_word_embeddings=False)
    if config.tie_word_embeddings and (unread := _quantized_output(path, config)):
        warn_once(
            f"{path}: the quantized output layer ({', '.join(unread)}) is not read: the embedding "
            "serves as output layer, since tie_word_embeddings is true"
        )
    return config


def _quantized_output(directory: Path, config: ModelConfig) -> list[str]:
    """Return the names of a quantized output layer's tensors that only such a layer has."""
    checkpoint = _checkpoint(directory)
    names = [one.checkpoint for one in family(config.model_type).names if one.kind == "lm_head"]
    modules = tuple(name.removesuffix("weight") for name in names if name.endswith(".weight"))
    plain = {*names, *(f"{module}bias" for module in modules)}
    stored = () if checkpoint is None else checkpoint.names()
    return sorted(name for name in stored if name.startswith(modules) and name not in plain)


def _is_tied(directory: Path, config: ModelConfig) -> bool:
    """Tell whether the output layer of a multimodal model is its embedding.

    The keys of such models contradict each other, between `text_config` and the whole model, and
    between releases: an output layer in the checkpoint decides. Without one, `config` does.
    """
    stated = config.tie_word_embeddings
    checkpoint = _checkpoint(directory)
    if checkpoint is None:
        return stated
    stored = {name for name in checkpoint.names() if name.startswith("lm_head.")}
    if stored != {"lm_head.weight"}:  # none, or a quantized one
        return not stored
    return stated and not _has_own_output(directory, config)


def _checkpoint(directory: Path) -> SafetensorsFile | SafetensorsDirectory | None:
    """Return the checkpoint; None if there is none, or if it cannot be opened."""
    if not any(directory.glob("*.safetensors")):
        return None
    try:
        return open_model(directory)
    except WeightsError:  # reported when the weights are loaded
        return None


def _has_own_output(directory: Path, config: ModelConfig) -> bool:
    """Tell whether an output layer is stored beside the embedding, with other values."""
    checkpoint = _checkpoint(directory)
    if checkpoint is None:
        return False
    kind = family(config.model_type)
    wanted = {part: [one.checkpoint for one in kind.names if one.kind == part] for part in _ENDS}
    names = [next((one for one in wanted[part] if one in checkpoint), "") for part in _ENDS]
    if not all(one and checkpoint.dtype(one) in _STORED_DTYPES for one in names):
        return False
    shape = checkpoint.shape(names[0])
    if len(shape) != 2 or checkpoint.shape(names[1]) != shape:
        return False
    for first in range(0, shape[0], _ROWS_COMPARED):
        embed, output = (checkpoint.read(one, first, first + _ROWS_COMPARED) for one in names)
        if not np.array_equal(embed.astype(np.float32), output.astype(np.float32)):
            return True
    return False


def config_from_dict(values: Mapping[str, Any], where: str = "config") -> ModelConfig:
    """Return the configuration for the parsed content of a config.json.

    Parameters
    ----------
    values : mapping
        The JSON object.
    where : str
        The file's name, for messages.

    Raises
    ------
    ConfigError
        See `model_config.load_config`.

    Examples
    --------
    >>> config_from_dict({"model_type": "llama", "vocab_size": 64, "hidden_size": 32,
    ...     "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}).head_dim
    8
    """
    values = text_values(values, where)
    try:
        kind = family(type_of(values))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return build_config(values, kind, where)


def build_config(
    values: Mapping[str, Any], kind: Family, where: str, names: Mapping[str, str] | None = None
) -> ModelConfig:
    """Return the configuration of a model of family `kind`; `names` renames keys in messages."""
    _warn_of_contradictions(values, kind, where)
    values, names = _with_shared_names(values, kind, names)
    values = with_layer_types(values, kind.mixers, where)
    present = {key: value for key, value in values.items() if value is not None}
    defaults = {
        key: value
        for key, value in kind.defaults.items()
        if key not in values or key in _NULL_IS_DEFAULT
    }
    fields = Fields(ChainMap(present, defaults), where, names)
    if fields.raw("quantization_config") not in (None, {}):
        scheme_of(fields.child("quantization_config"))  # raises if it is not supported
    mla = mla_config(fields, kind)
    sizes = _sizes(fields, kind, 0 if mla is None else mla.nope_dim + mla.rope_dim)
    if kind.moe is not None and is_dense(fields, kind.moe):
        sizes["intermediate_size"] = fields.integer(kind.moe.dense_width, 1, MAX_WIDTH)
    if kind.adjusts_width:
        sizes["intermediate_size"] = _adjusted_width(fields, sizes["intermediate_size"])
    positions = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
    width = sizes["head_dim"] if mla is None else rope_width(fields, mla)
    wide = full_head_dim(fields, kind, width)
    rope, rope_local = rope_configs(fields, kind, wide, positions, width)
    if mla is not None and rope.rotary_dim != mla.rope_dim:
        raise fields.error("qk_rope_head_dim", f"the {rope.rotary_dim} features that rope rotates")
    positions = scaled_max_position(rope, positions, kind)
    rope, epsilons = _epsilons(fields, kind, rope)
    rope_layers = _rope_layers(fields, kind, sizes["num_layers"])
    layer_windows = _layer_windows(fields, kind, rope_layers, positions)
    moe = moe_config(fields, kind.moe, sizes["num_layers"])
    rope_layers = _with_rope_in_windows(fields, kind, rope_layers, layer_windows, moe)
    thetas = _rope_thetas(fields, kind, sizes["num_layers"])
    has_long = rope.has_two_ropes or (rope_local is not None and rope_local.has_two_ropes)
    if has_long and (rope_local is not None or thetas or not all(rope_layers)):
        key = "rope_scaling" if fields.has("rope_scaling") else "rope_parameters"
        raise fields.error(key, "not longrope, since layers differ in their rope")
    config = ModelConfig(
        model_type=kind.model_type,
        **{**sizes, **layer_fields(fields, kind, sizes, layer_windows)},
        max_position_embeddings=positions,
        **epsilons,
        rope=rope,
        rope_local=rope_local,
        rope_thetas=thetas,
        layer_windows=layer_windows,
        layer_chunks=_layer_chunks(fields, kind, rope_layers, positions),
        rope_layers=() if all(rope_layers) else rope_layers,
        no_rope=_no_rope(fields, kind),
        **_switches(fields, kind),
        **mixer_config(fields, kind.mixers, sizes["num_layers"]),
        moe=moe,
        num_extra_layers=fields.integer(kind.extra_layers, 0, 64, 0) if kind.extra_layers else 0,
        **_scales(fields, kind, sizes["hidden_size"])
        | _latent_attention(mla, kind, rope if any(rope_layers) else None, sizes["num_layers"])
        | (latent_factors(fields, mla) if mla is not None and kind.latent_scales else {}),
        **_tokens(fields, sizes["vocab_size"]),
        dtype=_dtype(fields),
    )
    refuse_unread(fields, present, kind, config)
    return config


def _with_shared_names(
    values: Mapping[str, Any], kind: Family, names: Mapping[str, str] | None
) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """Rename the family's own keys to the shared ones; messages keep the file's names."""
    own = {key: shared for key, shared in kind.key_aliases.items() if key in values}
    renamed = {key: value for key, value in values.items() if key not in own}
    renamed |= {shared: values[key] for key, shared in own.items()}  # these take precedence
    return renamed, {shared: key for key, shared in own.items()} | dict(names or {})


def _warn_of_contradictions(values: Mapping[str, Any], kind: Family, where: str) -> None:
    """Log shared names of keys whose values differ from those under the family's own names."""
    for key, shared in kind.key_aliases.items():
        if kind.shortcut and shared == "num_hidden_layers":  # transformers counts them twice
            continue
        own = values.get(key)
        other = values.get(shared)
        if key in values and other is not None and own != other:
            warn_once(
                f"{where}: {key} is read, not {shared}, which differs; "
                f"got {shown(own)} and {shown(other)}"
            )


def _epsilons(fields: Fields, kind: Family, rope: RopeConfig) -> tuple[RopeConfig, dict[str, Any]]:
    """Return the norms' epsilons, and the rope without a factor that norms after it undo."""
    eps: float = fields.real(_eps_key(fields, kind), 1e-12, 1.0)
    # Bare norms are computed before the rotation, but the model has them after it.
    is_normed = kind.bare_qk_norm and _is_declared(fields, kind.qk_norm)
    if not (kind.qk_norm_after_rope or is_normed):
        return rope, {"rms_norm_eps": eps}
    factor = attention_factor(rope)  # norm(f x) of an epsilon is norm(x) of epsilon / f^2
    return replace(rope, attention_factor=1.0), {
        "rms_norm_eps": eps,
        "qk_norm_eps": eps / factor**2,
    }


def _is_declared(fields: Fields, value: bool | str) -> bool:
    """Return a flag of a family, or the value of its key in the file."""
    return fields.flag(value, False) if isinstance(value, str) else value


def _eps_key(fields: Fields, kind: Family) -> str:
    has_other = bool(kind.rms_norm_key) and fields.has(kind.rms_norm_key)
    return kind.rms_norm_key if has_other else kind.eps_key


def _latent_attention(
    mla: MlaConfig | None, kind: Family, rope: RopeConfig | None, num_layers: int
) -> dict[str, Any]:
    if mla is None:
        return {}
    name = "shortcut" if kind.shortcut else "mla"
    kinds = {} if kind.mixers else {"layer_kinds": (name,) * num_layers}
    return {"mla": mla, "attn_scale": mla_scale(mla, rope), **kinds}


def _sizes(fields: Fields, kind: Family, latent_head_dim: int) -> dict[str, Any]:
    """Return the model's dimensions, checked for consistency.

    `latent_head_dim`: D of a model with latent attention, which has keys of its own for it; else 0.
    """
    hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
    width = kind.mlp_width if fields.has(kind.mlp_width) else "intermediate_size"
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    kv_heads = _num_kv_heads(fields, kind, heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of the {heads} query heads")
    if not latent_head_dim and not fields.has("head_dim") and hidden % heads:
        raise fields.error("hidden_size", f"a multiple of the {heads} heads, or head_dim given")
    head_dim = latent_head_dim or fields.integer("head_dim", 2, MAX_HEAD_DIM, hidden // heads)
    if not 2 <= head_dim <= MAX_HEAD_DIM or head_dim % 2:
        raise fields.error("head_dim", f"even and from 2 to {MAX_HEAD_DIM} (it is {head_dim})")
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    return {
        "vocab_size": fields.integer("vocab_size", 1, MAX_VOCAB),
        "hidden_size": hidden,
        "num_layers": num_layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": max(
            fields.per_layer(width, num_layers, 1, MAX_WIDTH, kind.mlp_ratio * hidden or REQUIRED)
        ),
    }


def _num_kv_heads(fields: Fields, kind: Family, heads: int) -> int:
    """Return the number of key/value heads: a flag decides it in Falcon's old layers."""
    if kind.multi_query and not fields.flag(_NEW_FALCON, False):
        return 1 if fields.flag("multi_query", True) else heads
    num_kv_heads: int = fields.integer("num_key_value_heads", 1, MAX_HEADS, heads)
    return num_kv_heads


def _has_parallel_norms(fields: Fields, kind: Family, is_parallel: bool) -> bool:
    """Tell whether each branch of a parallel block has a norm of its own."""
    key = kind.parallel_norms
    if not isinstance(key, str):
        return is_parallel and key
    is_new = fields.flag(_NEW_FALCON, False)
    if is_new and not is_parallel:
        raise fields.error("parallel_attn", f"true with {_NEW_FALCON}")
    is_separate = fields.integer(key, 1, 2, 2 if is_new else 1) == 2 and is_parallel
    if is_separate and not is_new:
        raise fields.error(key, f"1 without {_NEW_FALCON}")
    return is_separate


def _adjusted_width(fields: Fields, width: int) -> int:
    """Return two thirds of the width, scaled and rounded up, unless the config turns it off."""
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return width
    factor = fields.real("block_ffn_dim_multiplier", 1e-3, 1e3, 1.0)
    multiple = fields.integer("block_multiple_of", 1, MAX_WIDTH)
    return -(-int(factor * int(2 * width / 3)) // multiple) * multiple


def _switches(fields: Fields, kind: Family) -> dict[str, Any]:
    """Return the flags for optional weights, and the activation."""
    declared = partial(_is_declared, fields)
    key = "hidden_activation" if fields.has("hidden_activation") else "hidden_act"
    name = fields.text(key, "silu")
    name = kind.activation_aliases.get(name, name)
    activations = _ACTIVATIONS if kind.gated_mlp else _UNGATED_ACTIVATIONS
    if name not in activations:
        raise fields.error(key, f"one of {', '.join(activations)}")
    return {
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "interleaved_rope": _is_interleaved(fields, kind),
        "qkv_bias": declared(kind.qkv_bias),
        "o_bias": declared(kind.o_bias),
        "mlp_bias": declared(kind.mlp_bias),
        "lm_head_bias": declared(kind.lm_head_bias),
        "qk_norm": declared(kind.qk_norm),
        "whole_qk_norm": kind.whole_qk_norm,
        "own_qk_norms": kind.own_qk_norms,
        # A norm without a weight commutes with the rotation.
        "qk_norm_after_rope": kind.qk_norm_after_rope and kind.norm_weight,
        "bare_qk_norm": kind.bare_qk_norm,
        "pre_norms": kind.pre_norms,
        "post_norms": declared(kind.post_norms),
        "inner_norms": kind.inner_norms,
        "norms_by_kind": kind.norms_by_kind,
        "layer_norm": kind.layer_norm and _eps_key(fields, kind) == kind.eps_key,
        "norm_weight": kind.norm_weight,
        "embed_norm": kind.embed_norm,
        "norm_bias": kind.norm_bias,
        "learned_positions": kind.learned_positions,
        "parallel": (parallel := declared(kind.parallel)),
        "parallel_norms": _has_parallel_norms(fields, kind, parallel),
        "gated_mlp": kind.gated_mlp,
        "v_head_dim": _v_head_dim(fields, kind),
        "sinks": bool(kind.sinks),
        "attn_gate": kind.attn_gate if _has_gate(fields, kind) else "",
        "activation": activations[name],
    }


def _has_gate(fields: Fields, kind: Family) -> bool:
    """Tell whether the output of attention has the family's gate."""
    return not kind.attn_gate_key or fields.flag(kind.attn_gate_key, True)


def _is_interleaved(fields: Fields, kind: Family) -> bool:
    """Tell whether the checkpoint stores rotated rows interleaved."""
    key = kind.interleaved_rope
    return fields.flag(key, True) if isinstance(key, str) else key


def _v_head_dim(fields: Fields, kind: Family) -> int:
    """Return the features of a head's values; 0 if they are as many as those of its key."""
    if kind.mla or "v_head_dim" not in kind.defaults:
        return 0
    head_dim = fields.integer("head_dim", 2, MAX_HEAD_DIM)
    v_head_dim: int = fields.integer("v_head_dim", 1, head_dim)
    return 0 if v_head_dim == head_dim else v_head_dim


def _scales(fields: Fields, kind: Family, hidden_size: int) -> dict[str, Any]:

    def own(key: str, low: float) -> float:
        """Return a number that only some families read: 0 in others, or if it is null."""
        value: float = fields.real(key, low, 1e6, 0.0) if key in kind.defaults else 0.0
        return value

    scalar = own("query_pre_attn_scalar", 1e-6)
    scales = {"attn_scale": scalar**-0.5 if scalar else kind.attn_scale}
    if "scale_attn_weights" in kind.defaults and not fields.flag("scale_attn_weights", True):
        scales["attn_scale"] = 1.0
    if (key := "scale_attn_by_inverse_layer_idx") in kind.defaults:
        scales["attn_scale_by_layer"] = fields.flag(key, False)
    scaled = kind.scale_embedding
    if _is_declared(fields, scaled):
        # NOTE: float32; `Embedding` may round it to the weights' dtype, as Hugging Face does.
        scales["embed_scale"] = float(np.float32(math.sqrt(hidden_size)))
    if kind.multipliers:
        scales |= _multipliers(fields)
    if kind.depth_scales:
        scales |= _depth_scales(fields, hidden_size)
    if kind.weight_multipliers:
        heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
        head_dim = fields.integer("head_dim", 2, MAX_HEAD_DIM, hidden_size // heads)
        scales |= weight_factors(fields, head_dim)
    if kind.logit_scale:
        scales["logits_scale"] = fields.real(kind.logit_scale, 1e-6, 1e6, 1.0)
    return {
        "norm_weight_offset": kind.norm_weight_offset,
        "rounds_embed_scale": scaled is True,
        **scales,
        "clip_qkv": own("clip_qkv", 0.0),
        "v_scale": own("attention_value_scale", 1e-6) or 1.0,
        "attn_softcap": own("attn_logit_softcapping", 0.0),
        "final_softcap": own("final_logit_softcapping", 0.0),
    }


def _multipliers(fields: Fields) -> dict[str, float]:
    """Return Granite's multipliers; logits_scaling in the file is a divisor."""

    def factor(key: str, default: float = 1.0) -> float:
        value: float = fields.real(key, 1e-6, 1e6, default)
        return value

    return {
        "embed_scale": factor("embedding_multiplier"),
        "branch_scale": factor("residual_multiplier"),
        "attn_scale": factor("attention_multiplier", 0.0),
        "logits_scale": 1.0 / factor("logits_scaling"),
    }


def _depth_scales(fields: Fields, hidden_size: int) -> dict[str, float]:
    """Return MiniCPM's factors; a key that is null is none."""
    depth = fields.real("scale_depth", 1e-6, 1e6, 0.0)
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    return {
        "embed_scale": fields.real("scale_emb", 1e-6, 1e6, 1.0),
        "branch_scale": depth / math.sqrt(num_layers) if depth else 1.0,
        "logits_scale": fields.integer("dim_model_base", 1, MAX_WIDTH, hidden_size) / hidden_size,
    }


def _tokens(fields: Fields, vocab_size: int) -> dict[str, Any]:
    is_no_pad = fields.raw("pad_token_id") == -1  # means none in old files
    pad = () if is_no_pad else fields.token_ids("pad_token_id", vocab_size)
    return {
        "bos_token_id": next(iter(fields.token_ids("bos_token_id", vocab_size)), None),
        "eos_token_ids": fields.token_ids("eos_token_id", vocab_size),
        "pad_token_id": next(iter(pad), None),
    }


def _dtype(fields: Fields) -> str:
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    name = fields.text(key, "float32").removeprefix("torch.")
    name = {"half": "float16", "float": "float32"}.get(name, name)  # PyTorch's other names
    if name == "auto":  # A mapping has no files; see `load_hf_config`
        return "float32"
    if name not in FLOAT_NAMES:
        raise fields.error(key, f"one of {', '.join(FLOAT_NAMES)}, auto")
    return name


def _stored_dtype(directory: Path) -> str:
    """Return the dtype of the checkpoint's first matrix that is not quantized.

    It is "float32" if the directory has no weights, as for random ones, or damaged ones.
    """
    checkpoint = _checkpoint(directory)
    if checkpoint is None:
        return "float32"
    matrices = (name for name in checkpoint.names() if len(checkpoint.shape(name)) > 1)
    names = (_STORED_DTYPES.get(checkpoint.dtype(name)) for name in matrices)
    return next((name for name in names if name is not None), "float32")


def _rope_layers(fields: Fields, kind: Family, num_layers: int) -> tuple[bool, ...]:
    """Return one flag per layer: whether rope applies. True unless the family has NoPE layers."""
    if kind.rope_layers == "none":
        return (False,) * num_layers
    if kind.rope_layers == "position_embedding_type":
        return (fields.raw("position_embedding_type") == "rope",) * num_layers
    if kind.rope_layers == "rope_theta":
        given = fields.raw("rope_scaling") or fields.raw("rope_parameters")
        theta = {"rope_theta": fields.raw("rope_theta"), **(given or {})}["rope_theta"]
        return (theta is not None,) * num_layers
    if thetas := _rope_thetas(fields, kind, num_layers):
        return tuple(map(bool, thetas))
    if kind.rope_layers != "no_rope_layers":
        return (True,) * num_layers
    if fields.raw("no_rope_layers") in (None, []):
        interval = fields.integer("no_rope_layer_interval", 1, MAX_LAYERS)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    given = fields.raw("no_rope_layers")
    if (
        not isinstance(given, list)
        or len(given) != num_layers
        or any(type(one) is not int or one not in (0, 1) for one in given)
    ):
        raise fields.error("no_rope_layers", f"{num_layers} of 1 (has rope) or 0")
    return tuple(map(bool, given))


def _rope_thetas(fields: Fields, kind: Family, num_layers: int) -> tuple[float, ...]:
    """Return the base of each layer's rope, 0 for none; () if the file does not list them."""
    key = "layer_rope_theta"
    if kind.rope_layers != key or not fields.has(key):
        return ()
    thetas = fields.reals(key, num_layers, 0.0, MAX_THETA)
    if any(0.0 < theta < MIN_THETA for theta in thetas):
        raise fields.error(key, f"0 or at least {MIN_THETA} in each layer")
    return thetas


def _no_rope(fields: Fields, kind: Family) -> RopeConfig:
    """Return the factors on queries in layers without rope."""
    config = RopeConfig(scaling="none")
    if not kind.scales_unrotated_q or not fields.raw("attn_temperature_tuning"):  # old: a number
        return config
    beta = fields.real("attn_scale", 0.0, 1e3)
    length = fields.integer("floor_scale", 1, MAX_POSITIONS)
    return replace(config, q_scale_beta=beta, q_scale_length=length, q_scale_start=1)


def _with_rope_in_windows(
    fields: Fields,
    kind: Family,
    rope_layers: tuple[bool, ...],
    layer_windows: tuple[int, ...],
    moe: MoeConfig | None,
) -> tuple[bool, ...]:
    """Return `rope_layers`, or the layers with a window for families that rotate in these only."""
    rule = kind.rope_layers
    if not rule.startswith("windows") or (
        rule == "windows_if_set" and not fields.has("sliding_window")
    ):
        return rope_layers
    has_window = tuple(window > 0 for window in layer_windows)
    if rule != "windows_and_dense" or _dense_pattern(fields) != 1:
        return has_window
    is_sparse = (False,) * len(has_window) if moe is None else moe.sparse_layers
    return tuple(a or not b for a, b in zip(has_window, is_sparse, strict=True))


def _layer_windows(
    fields: Fields, kind: Family, rope_layers: tuple[bool, ...], positions: int
) -> tuple[int, ...]:
    """Return the window of every layer; 0 if it has none or covers the longest sequence."""
    num_layers = len(rope_layers)
    if kind.windows == "never":
        return (0,) * num_layers
    is_off = kind.windows in _SWITCHED and not fields.flag("use_sliding_window", False)
    has_types = kind.windows != "switched" and fields.has("layer_types")
    if is_off and has_types and any(_layer_types(fields, num_layers)):
        raise fields.error(
            "layer_types", '"full_attention" for every layer if use_sliding_window is false'
        )
    if is_off:
        return (0,) * num_layers
    window = fields.integer("sliding_window", 1, 1 << 31, 0)
    if kind.past_window and fields.has(kind.past_window):
        window = fields.integer(kind.past_window, 0, 1 << 31) + 1
    is_sliding = _sliding_layers(fields, kind, rope_layers, window)
    if kind.last_is_full:
        is_sliding[-1] = False
    if any(is_sliding) and not window:
        raise fields.error("sliding_window", "given, since some layers have a window")
    selects_rope = kind.local_rope or kind.rope_layers.startswith("windows")
    if window >= positions and not selects_rope:
        window = 0
    return tuple(window if sliding else 0 for sliding in is_sliding)


def _sliding_layers(
    fields: Fields, kind: Family, rope_layers: tuple[bool, ...], window: int
) -> list[bool]:
    """Return one flag per layer: whether it uses the sliding window."""
    num_layers = len(rope_layers)
    if fields.has("layer_types") and kind.windows != "switched":
        return _layer_types(
            fields, num_layers, known=tuple(kind.mixers.kinds if kind.mixers else ())
        )
    if kind.windows in ("every_layer", "switched"):
        return [bool(window)] * num_layers
    if kind.windows == "layer_types":
        return [False] * num_layers
    if kind.windows == "attention_types":
        return _local_layers(fields, num_layers)
    if kind.windows in ("max_window_layers", "last_layers"):
        first = fields.integer("max_window_layers", 0, MAX_LAYERS)
        return [bool(window) and layer >= first for layer in range(num_layers)]
    if kind.windows == "layers_without_rope":
        return [bool(window) and not has_rope for has_rope in rope_layers]
    if kind.windows == "even_layers":
        end = fields.integer("max_window_layers", 0, MAX_LAYERS)
        return [bool(window) and layer % 2 == 0 and layer < end for layer in range(num_layers)]
    if kind.rope_layers == "windows_if_set" and not window:
        return [False] * num_layers
    if kind.windows == "pattern_after_dense":
        first = min(fields.integer("first_k_dense_replace", 0, MAX_LAYERS), num_layers)
        dense = [bool((layer + 1) % _dense_pattern(fields)) for layer in range(first)]
        return dense + _pattern(fields, num_layers - first)
    is_sliding = _pattern(fields, num_layers)
    if kind.windows == "pattern_from_first":
        return [False, *is_sliding[: num_layers - 1]]
    if kind.windows == "first_and_pattern":
        is_sliding[0] = False
    return is_sliding


def _local_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Return the flags for GPT-Neo's `attention_layers`, or for its `attention_types`.

    The first lists "global" or "local" for each layer, the second lists of them with a number of
    repetitions, such as [[["global", "local"], 12]]. Without both, the layers alternate.
    """
    groups = fields.raw("attention_types")
    layers = fields.raw("attention_layers")
    if layers is not None:
        groups = [[layers, 1]]
    elif groups is None:
        return [bool(layer % 2) for layer in range(num_layers)]
    types: list[Any] = []
    for group in groups if isinstance(groups, list) else ():
        match group:
            case [list(names), int(count)] if len(names) * count <= num_layers >= len(types):
                types += names * count
            case _:
                types = []
                break
    if len(types) != num_layers or any(one not in ("global", "local") for one in types):
        key = "attention_types" if layers is None else "attention_layers"
        raise fields.error(key, f"global or local for each of {num_layers} layers")
    return [one == "local" for one in types]


def _pattern(fields: Fields, num_layers: int) -> list[bool]:
    """Return the flags for `sliding_window_pattern`: n (all but every n-th), or such as "LLLG"."""
    key = "sliding_window_pattern"
    pattern = fields.raw(key)
    if isinstance(pattern, str):
        if not pattern or not set(pattern) <= set("LG"):
            raise fields.error(key, "a whole number, or a string of L (window) and G (full)")
        return [pattern[layer % len(pattern)] == "L" for layer in range(num_layers)]
    every = fields.integer(key, 1, MAX_LAYERS)
    return [bool((layer + 1) % every) for layer in range(num_layers)]


def _layer_chunks(
    fields: Fields, kind: Family, rope_layers: tuple[bool, ...], positions: int
) -> tuple[int, ...]:
    """Return the chunk of every layer; () if none has one, or one covers the longest sequence."""
    if not kind.chunks:
        return ()
    # The pattern of a layer holds a bit for every two chunks.
    chunk = fields.integer("attention_chunk_size", -(-positions // _MAX_CHUNKS), 1 << 31, 0)
    is_chunked: Iterable[bool] = rope_layers
    if fields.has("layer_types"):
        is_chunked = _layer_types(fields, len(rope_layers), "chunked_attention")
        if any(is_chunked) and not chunk:
            raise fields.error("attention_chunk_size", "given, since some layers have chunks")
    if not 0 < chunk < positions or not any(is_chunked):
        return ()
    return tuple(chunk if chunked else 0 for chunked in is_chunked)


def _dense_pattern(fields: Fields) -> int:
    """Return n: of the dense layers in front, every n-th has full attention."""
    pattern: int = fields.integer("prefix_dense_sliding_window_pattern", 1, MAX_LAYERS)
    return pattern


def _layer_types(
    fields: Fields,
    num_layers: int,
    partial: str = "sliding_attention",
    known: tuple[str, ...] = (),
) -> list[bool]:
    """Return one flag per layer: whether `layer_types` calls it `partial`.

    The others have full attention, or another type in `known`.
    """
    types = fields.raw("layer_types")
    known = known or ("full_attention", partial)
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or any(t not in known for t in types)
    ):
        raise fields.error("layer_types", f"{num_layers} of {' or '.join(known)}")
    return [one == partial for one in types]
