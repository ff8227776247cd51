"""Read the keys of a config.json that declare layers without attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from engine.checks import shown
from engine.config import GatedDeltaConfig, Mamba2Config, ShortConvConfig
from engine.errors import ConfigError
from engine.loading._fields import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Fields
from engine.loading.lightning_config import lightning_config
from engine.models.mixer_family import FULL_ATTENTION, MixerFamily

__all__ = ["mixer_config", "with_layer_types"]

_MAX_HEAD_DIM = 1024
_MAX_DELTA_DIM = 256  # features of a head that `kernels.gated_delta` supports
_MAX_STATE = 256  # columns that `kernels.mamba2` supports
_MAX_CONV = 4  # taps that `kernels.causal_conv` supports
_MAX_SHORT_CONV = 7  # taps that `ShortConvConfig.convolutions` divides among several of these
_INFINITY = {"__float__": "Infinity"}  # as transformers 5 writes it


def mixer_config(fields: Fields, kind: MixerFamily | None, num_layers: int) -> dict[str, Any]:
    """Return `layer_kinds` and the configs of those kinds, for a family that declares `kind`.

    Empty for a family whose layers all have attention.

    Raises
    ------
    ConfigError
        If a key is missing or a number is out of range.
    """
    if kind is None:
        return {}
    kinds = _layer_kinds(fields, kind, num_layers)
    readers: dict[str, Callable[[Fields], Any]] = {
        "gated_delta": partial(_kimi_delta if kind.is_kda else _gated_delta, kind=kind),
        "lightning": partial(lightning_config, num_layers=num_layers),
        "short_conv": _short_conv,
        "mamba2": partial(_mamba2, kind=kind),
    }
    parts = {one.removeprefix("attention_") for one in kinds}
    found = {name: read(fields) for name, read in readers.items() if name in parts}
    return {"layer_kinds": kinds, "single_branch": kind.single_branch, **found}


def with_layer_types(
    values: Mapping[str, Any], kind: MixerFamily | None, where: str
) -> Mapping[str, Any]:
    """Return a config.json in which another declaration of kinds is spelled out as `layer_types`.

    `num_hidden_layers` is the length of a pattern of letters, whatever the file says.

    Raises
    ------
    ConfigError
        If the pattern is no string, or has an unknown letter; or lists of layers are damaged.
    """
    if kind is None:
        return values
    if kind.config_key:
        return _with_listed_layers(values, kind.config_key, where)
    if not kind.pattern:
        return values
    types = values.get("layer_types")
    if types is None:
        pattern = values.get(kind.pattern)
        if not isinstance(pattern, str) or not set(pattern) <= kind.letters.keys():
            known = ", ".join(map(repr, kind.letters))
            raise ConfigError(
                f"{where}: {kind.pattern} must be a string of {known}; got {shown(pattern)}"
            )
        types = [kind.letters[letter] for letter in pattern]
    count = len(types) if isinstance(types, list) else 0
    return {**values, "layer_types": types, "num_hidden_layers": count}


_LINEAR_KEYS = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def _with_listed_layers(values: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """Return a config.json with the content of its object `key` under the keys of other files."""
    given = values.get(key)
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"{where}: {key} must be an object; got {shown(given)}")
    listed = given or {}
    sizes = {own: listed[name] for name, own in _LINEAR_KEYS.items() if name in listed}
    count = values.get("num_hidden_layers")
    if values.get("layer_types") is not None:
        return {**values, **sizes}
    if not isinstance(count, int) or not 0 < count <= MAX_LAYERS:  # refused later, with the others
        return {**values, **sizes}
    is_full = [layer > 0 and layer % 4 == 0 for layer in range(count)]
    full = listed.get("full_attn_layers")
    others = listed.get("kda_layers")
    if full is not None and others is not None:
        is_list = isinstance(full, list) and isinstance(others, list)
        if not is_list or sorted(map(str, full + others)) != sorted(map(str, range(1, count + 1))):
            raise ConfigError(
                f"{where}: {key} must name each of {count} layers once, from 1 on, in "
                f"full_attn_layers or kda_layers; got {shown([full, others])}"
            )
        is_full = [layer + 1 in full for layer in range(count)]
    types = [FULL_ATTENTION if full else "linear_attention" for full in is_full]
    return {**values, **sizes, "layer_types": types}


def _layer_kinds(fields: Fields, kind: MixerFamily, num_layers: int) -> tuple[str, ...]:
    """Return the kind of each layer."""
    is_full = _full_layers(fields, kind, num_layers)
    if not fields.has("layer_types"):
        if "sliding_attention" in kind.kinds:
            raise fields.error("layer_types", f"given, {num_layers} of {' or '.join(kind.kinds)}")
        attention = kind.kinds.get(FULL_ATTENTION, "attention")
        other = next(name for name in kind.kinds.values() if name != attention)
        return tuple(attention if full else other for full in is_full)
    types = fields.raw("layer_types")
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or any(not isinstance(one, str) or one not in kind.kinds for one in types)
    ):
        raise fields.error("layer_types", f"{num_layers} of {' or '.join(kind.kinds)}")
    return tuple(kind.kinds[one] for one in types)


def _full_layers(fields: Fields, kind: MixerFamily, num_layers: int) -> list[bool]:
    """Return one flag per layer: whether it has full attention, by the keys of old files."""
    if kind.interval:
        interval = fields.integer(kind.interval, 1, 1 << 31)
        is_full = [(layer + 1) % interval == 0 for layer in range(num_layers)]
        is_full[-1] |= kind.attends_last and not any(is_full)
        if kind.attends_in_rest and (rest := num_layers % interval):
            is_full[-rest:] = [True] * rest
        return is_full
    if not kind.full_layers:
        return [False] * num_layers
    given = fields.raw(kind.full_layers)
    if given is None:
        return [True] * num_layers
    if not isinstance(given, list) or any(type(one) is not int for one in given):
        raise fields.error(kind.full_layers, "a list of layers")
    return [layer in given for layer in range(num_layers)]


def _check_activation(fields: Fields, kind: MixerFamily, layers: str) -> None:
    """Refuse a convolution's activation other than the one that its kernel has."""
    key = kind.conv_activation
    if fields.text(key, "silu") not in ("silu", "swish"):
        raise fields.error(key, f"silu in a model with {layers}")


def _short_conv(fields: Fields) -> ShortConvConfig:
    return ShortConvConfig(
        fields.integer("hidden_size", 1, MAX_WIDTH),
        fields.integer("conv_L_cache", 2, _MAX_SHORT_CONV),
        fields.flag("conv_bias", False),
    )


def _mamba2(fields: Fields, kind: MixerFamily) -> Mamba2Config:
    _check_activation(fields, kind, "Mamba-2")
    heads = fields.integer("mamba_n_heads", 1, MAX_HEADS)
    groups = fields.integer("mamba_n_groups", 1, heads)
    if heads % groups:
        raise fields.error("mamba_n_groups", f"a divisor of the {heads} heads")
    hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
    expanded = fields.integer("mamba_expand", 1, 64) * hidden
    inner = fields.integer("mamba_d_ssm", 1, 1 << 26, expanded)
    is_auto = fields.raw("mamba_d_head") == "auto"
    if is_auto and inner % heads:
        raise fields.error("mamba_n_heads", f"a divisor of the {inner} features of all heads")
    head_dim = inner // heads if is_auto else fields.integer("mamba_d_head", 1, _MAX_HEAD_DIM)
    if fields.has("mamba_d_ssm") and head_dim * heads != inner:
        raise fields.error("mamba_d_ssm", f"{heads} heads of {head_dim} features")
    proj_bias = fields.flag("mamba_proj_bias", False)
    low, high = _step_limit(fields)
    return Mamba2Config(
        heads,
        head_dim,
        groups,
        fields.integer("mamba_d_state", 1, _MAX_STATE),
        fields.integer("mamba_d_conv", 2, _MAX_CONV),
        fields.flag("mamba_conv_bias", True),
        proj_bias,
        fields.flag("projectors_bias", proj_bias),
        _mamba2_norm(fields),
        low,
        high,
    )


def _mamba2_norm(fields: Fields) -> str:
    """Return `Mamba2Config.norm`; only Falcon-H1 has keys of it."""
    if not fields.flag("mamba_rms_norm", True):
        return "none"
    return "norm_first" if fields.flag("mamba_norm_before_gate", False) else "gate_first"


def _step_limit(fields: Fields) -> tuple[float, float]:
    """Return the bounds of the time step; JSON has no infinity, but Python's files do.

    transformers' nemotron_h clamps to (time_step_min, inf) instead; NVIDIA's own code reads this.
    """
    given = fields.raw("time_step_limit")
    if given is None:
        return 0.0, math.inf
    is_pair = isinstance(given, list | tuple) and len(given) == 2
    if is_pair and given[1] == _INFINITY:
        given = [given[0], math.inf]
    if not is_pair or any(type(one) not in (int, float) for one in given):
        raise fields.error("time_step_limit", "two numbers")
    low, high = map(float, given)
    if not 0.0 <= low <= high:
        raise fields.error("time_step_limit", "two numbers from 0 up, in order")
    return low, high


def _kimi_delta(fields: Fields, kind: MixerFamily) -> GatedDeltaConfig:
    _check_activation(fields, kind, "Kimi delta attention")
    if not fields.flag("no_kda_lora", True):
        raise fields.error("no_kda_lora", "true")
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    heads = fields.integer("linear_num_heads", 1, MAX_HEADS, heads)
    width = fields.integer("head_dim", 1, _MAX_DELTA_DIM, 128)
    width = fields.integer("linear_head_dim", 1, _MAX_DELTA_DIM, width)
    is_bounded = fields.flag("kda_safe_gate", False)
    return GatedDeltaConfig(
        heads,
        heads,
        width,
        width,
        fields.integer("linear_conv_kernel_dim", 2, _MAX_CONV, 4),
        norm_activation="sigmoid",
        channel_gate=True,
        gate_rank=width if kind.has_gate_latents else 0,
        gate_bound=fields.real("kda_lower_bound", -1e3, -1e-3) if is_bounded else 0.0,
    )


def _gated_delta(fields: Fields, kind: MixerFamily) -> GatedDeltaConfig:
    _check_activation(fields, kind, "gated delta nets")
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    key_heads = fields.integer("linear_num_key_heads", 1, MAX_HEADS, heads)
    value_heads = fields.integer("linear_num_value_heads", 1, MAX_HEADS, heads)
    if value_heads % key_heads:
        raise fields.error("linear_num_value_heads", f"a multiple of the {key_heads} key heads")
    hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
    key_dim = fields.integer(
        "linear_key_head_dim", 1, _MAX_HEAD_DIM, max(1, 3 * hidden // (4 * key_heads))
    )
    return GatedDeltaConfig(
        key_heads,
        value_heads,
        key_dim,
        fields.integer("linear_value_head_dim", 1, _MAX_HEAD_DIM, 2 * key_dim),
        fields.integer("linear_conv_kernel_dim", 2, _MAX_CONV),
        2.0 if fields.flag("linear_allow_neg_eigval", False) else 1.0,
        kind.norm_eps,
    )
