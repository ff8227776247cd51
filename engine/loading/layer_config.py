"""Keys of a config.json that make layers differ, or that change their residual stream (Gemma)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.config import AltUpConfig, LayerSizes, PerLayerInputConfig
from engine.kernels._attention import MAX_HEAD_DIM
from engine.loading._fields import MAX_HEADS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, Fields
from engine.models.family import Family

__all__ = ["full_head_dim", "layer_fields"]

_MAX_STREAMS = 4
_FOR_FULL_LAYERS = ("global_head_dim", "num_global_key_value_heads")


def layer_fields(
    fields: Fields, kind: Family, sizes: Mapping[str, Any], layer_windows: Sequence[int]
) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that these keys determine; {} for most families.

    Parameters
    ----------
    fields : Fields
        The config.json.
    kind : Family
    sizes : mapping
        The model's sizes, under the names of `ModelConfig`.
    layer_windows : sequence of int
        Per layer: its sliding window; 0 for full attention.

    Raises
    ------
    ConfigError
        If a value is out of range, or a list has not one entry per layer.
    """
    is_sliding = [window > 0 for window in layer_windows]
    found: dict[str, Any] = {"v_norm": kind.v_norm, "layer_scale": kind.layer_scale}
    if "num_kv_shared_layers" in kind.defaults:
        default = kind.defaults["num_kv_shared_layers"]
        found["kv_sources"] = _kv_sources(fields, is_sliding, default)
    if kind.layers_differ:
        found |= _layer_sizes(fields, kind, sizes, is_sliding, found.get("kv_sources", ()))
    if kind.window_kv_factor > 1:
        found |= _window_sizes(fields, kind, sizes, is_sliding)
    if "hidden_size_per_layer_input" in kind.defaults:
        found["per_layer_input"] = _per_layer_input(fields)
    if "altup_num_inputs" in kind.defaults:
        found |= _altup(fields, len(is_sliding))
    return found


def full_head_dim(fields: Fields, kind: Family, head_dim: int) -> int:
    """Return the head dim of the layers with full attention; `head_dim` is the others'."""
    if not _has_wide_heads(kind):
        return head_dim
    if not fields.has("per_layer_config"):
        wide: int = fields.integer("global_head_dim", 2, MAX_HEAD_DIM, head_dim)
        if wide % 2:
            raise fields.error("global_head_dim", "even")
        return wide
    entries = _own_configs(fields).values()
    return max(
        (one.integer("head_dim", 2, MAX_HEAD_DIM, head_dim) for one in entries), default=head_dim
    )


def _own_configs(fields: Fields) -> dict[int, Fields]:
    """Return the objects of `per_layer_config` by layer; {} without that key.

    transformers pads the numbers with zeros to equal lengths.
    """
    key = "per_layer_config"
    if not fields.has(key):
        return {}
    listed = fields.child(key)
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    numbers = {str(layer): layer for layer in range(num_layers)}
    found = {}
    for name in listed.unread():
        number = str(name)
        layer = numbers.get(number.lstrip("0") or number[-1:])
        if layer is None or layer in found:
            raise fields.error(key, f"an object per layer, from 0 to {num_layers - 1}")
        found[layer] = listed.child(name)
    return found


def _kv_sources(fields: Fields, is_sliding: Sequence[bool], default: int) -> tuple[int, ...]:
    """Return each layer's source of keys and values: the last own layer of its kind.

    The family's `default` is for models with more layers than that; smaller ones share none.
    """
    num_layers = len(is_sliding)
    key = "num_kv_shared_layers"
    shared = fields.integer(key, 0, max(num_layers - 1, default), 0)
    if shared == default and shared >= num_layers:
        return ()
    if shared >= num_layers:
        raise fields.error(key, f"below the number of layers, {num_layers}")
    first = num_layers - shared
    last = {kind: layer for layer, kind in enumerate(is_sliding[:first])}
    if any(kind not in last for kind in is_sliding[first:]):
        raise fields.error(key, "such that the other layers are of both kinds")
    if not shared:
        return ()
    return (*range(first), *(last[kind] for kind in is_sliding[first:]))


def _has_wide_heads(kind: Family) -> bool:
    """Tell whether the layers with full attention have sizes of their own."""
    return "global_head_dim" in kind.defaults


def _layer_sizes(
    fields: Fields,
    kind: Family,
    sizes: Mapping[str, Any],
    is_sliding: Sequence[bool],
    sources: Sequence[int],
) -> dict[str, Any]:
    """Return `layer_sizes`, and the model's sizes: the largest of them."""
    is_wide = has_no_values = False
    if _has_wide_heads(kind):
        for key in _FOR_FULL_LAYERS:
            fields.raw(key)  # may be given in vain
        is_wide = fields.flag("use_double_wide_mlp", False)
        has_no_values = fields.flag("attention_k_eq_v", False)
    layers = []
    own = _own_configs(fields) if _has_wide_heads(kind) else {}
    widths = fields.per_layer("intermediate_size", len(is_sliding), 1, MAX_WIDTH)
    for layer, (slides, width) in enumerate(zip(is_sliding, widths, strict=True)):
        heads = sizes["num_kv_heads"]
        head_dim = sizes["head_dim"]
        if _has_wide_heads(kind):
            heads, head_dim = _heads_of(fields, sizes, own.get(layer), slides=slides)
        is_shared = bool(sources) and sources[layer] != layer
        features = 2 * width if is_wide and is_shared else width
        layers.append(LayerSizes(heads, head_dim, features, has_no_values and not slides))
    largest = {
        name: max(getattr(one, name) for one in layers)
        for name in ("num_kv_heads", "head_dim", "intermediate_size")
    }
    if len(set(layers)) == 1:
        return largest | {"values_from_keys": layers[0].values_from_keys}
    return largest | {"layer_sizes": tuple(layers)}


def _window_sizes(
    fields: Fields, kind: Family, sizes: Mapping[str, Any], is_sliding: Sequence[bool]
) -> dict[str, Any]:
    """Return `layer_sizes` if layers with a window have more key/value heads, and maybe sinks."""
    few = sizes["num_kv_heads"]
    many = few * kind.window_kv_factor
    if any(is_sliding) and sizes["num_heads"] % many:
        key = "num_key_value_heads"
        raise fields.error(key, f"such that {many} divide the {sizes['num_heads']} query heads")
    layers = tuple(
        LayerSizes(
            many if slides else few,
            sizes["head_dim"],
            sizes["intermediate_size"],
            sinks=slides and kind.sinks == "windows",
        )
        for slides in is_sliding
    )
    return {"num_kv_heads": max(one.num_kv_heads for one in layers), "layer_sizes": layers}


def _heads_of(
    fields: Fields, sizes: Mapping[str, Any], own: Fields | None, *, slides: bool
) -> tuple[int, int]:
    """Return (num_kv_heads, head_dim) of a layer.

    They are in its `own` object of `per_layer_config`, or given for all layers with full attention.
    """
    heads_key = "num_key_value_heads"
    dim_key = "head_dim"
    if own is None and fields.has("per_layer_config"):
        own = fields.beside({}, "layer")
    elif own is None and not slides:
        dim_key = "global_head_dim"
        if fields.flag("attention_k_eq_v", False):
            heads_key = "num_global_key_value_heads"
    given = fields if own is None else own
    heads = given.integer(heads_key, 1, MAX_HEADS, sizes["num_kv_heads"])
    head_dim = given.integer(dim_key, 2, MAX_HEAD_DIM, sizes["head_dim"])
    if own is not None and (unread := own.unread()):
        raise own.error(unread[0], f"absent: a layer has {heads_key} and {dim_key} of its own")
    if sizes["num_heads"] % heads:
        raise given.error(heads_key, f"a divisor of the {sizes['num_heads']} query heads")
    if head_dim % 2:
        raise given.error(dim_key, "even")
    return heads, head_dim


def _per_layer_input(fields: Fields) -> PerLayerInputConfig | None:
    size = fields.integer("hidden_size_per_layer_input", 0, MAX_WIDTH)
    if not size:
        return None
    key = "hidden_activation"
    if fields.text(key, "") == "relu2":  # no kernel takes the gate and its factor apart
        raise fields.error(key, "silu or gelu in a model with per-layer inputs")
    return PerLayerInputConfig(size, fields.integer("vocab_size_per_layer_input", 1, MAX_VOCAB))


def _altup(fields: Fields, num_layers: int) -> dict[str, Any]:
    """Return the residual streams, and the activation sparsity of each layer."""
    count = fields.integer("altup_num_inputs", 2, _MAX_STREAMS)
    fields.integer("altup_active_idx", 0, 0, 0)  # all models have the first stream
    scales = fields.flag("altup_correct_scale", True)
    altup = AltUpConfig(count, scales, fields.integer("laurel_rank", 1, MAX_WIDTH))
    key = "activation_sparsity_pattern"
    sparse = 10 if num_layers > 10 else 0
    sparsity = (0.95,) * sparse + (0.0,) * (num_layers - sparse)
    if fields.has(key):
        given = fields.raw(key)
        if not isinstance(given, list) or len(given) != num_layers:
            raise fields.error(key, f"a list of {num_layers} numbers")
        sparsity = fields.reals(key, num_layers, 0.0, 0.999)
    return {"altup": altup, "activation_sparsity": sparsity if any(sparsity) else ()}
