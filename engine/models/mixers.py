"""Builders of the mixers that replace attention, from the weights of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from engine.config import ModelConfig
from engine.device import array_module
from engine.layers.gated_delta import GatedDelta
from engine.layers.lightning import Lightning
from engine.layers.linear import Linear
from engine.layers.mamba2 import Mamba2
from engine.layers.mixer import Mixer
from engine.layers.norm import Norm
from engine.layers.short_conv import ShortConv
from engine.models.sharding import WholeParts
from engine.weights import Weight

__all__ = ["MIXERS", "build_lightning"]

_GetWeight = Callable[[str], Weight]
_MakeLinear = Callable[..., Linear]


def _taps(weight: Weight) -> Any:
    """Return a convolution's taps (C, K); a Conv1d stores them as (C, 1, K)."""
    channels, _, size = weight.data.shape
    return weight.data.reshape(channels, size)


def _gated_delta(
    config: ModelConfig, layer: str, weight: _GetWeight, linear: _MakeLinear, parts: WholeParts
) -> GatedDelta:
    delta = config.gated_delta
    assert delta is not None
    steps = weight(f"{layer}delta_dt").data
    return GatedDelta(
        delta,
        linear(f"{layer}delta_in", False),
        _taps(weight(f"{layer}delta_conv")),
        weight(f"{layer}delta_decay").data,
        steps.reshape(delta.num_value_heads, -1) if delta.channel_gate else steps,
        Norm(weight(f"{layer}delta_norm").data, delta.norm_eps or config.rms_norm_eps),
        linear(f"{layer}delta_out", False, parts.down),
        linear(f"{layer}delta_z_up", False) if delta.gate_rank else None,
        linear(f"{layer}delta_a_up", False) if delta.gate_rank else None,
    )


def build_lightning(
    config: ModelConfig,
    index: int,
    cos_sin: Any,
    weight: _GetWeight,
    linear: _MakeLinear,
    parts: WholeParts,
) -> Lightning:
    """Return layer `index`'s lightning attention, which rotates queries and keys by `cos_sin`."""
    c = config.lightning
    assert c is not None
    layer = f"layers.{index}."
    eps = config.rms_norm_eps
    xp = array_module(cos_sin)
    rates = np.asarray(c.slopes) * c.layer_factors[index]
    norms = [
        Norm(weight(f"{layer}lightning_{part}_norm").data, eps) if c.qk_norm else None
        for part in "qk"
    ]
    return Lightning(
        c,
        linear(f"{layer}lightning_in", False),
        xp.asarray(np.log(rates), np.float32),
        xp.zeros(c.num_heads, np.float32),
        cos_sin,
        # norm(D^-1/2 x) of an epsilon is norm(x) of D times it.
        Norm(weight(f"{layer}lightning_norm").data, eps * c.head_dim),
        linear(f"{layer}lightning_out", False, parts.down),
        *norms,
    )


def _short_conv(
    config: ModelConfig, layer: str, weight: _GetWeight, linear: _MakeLinear, parts: WholeParts
) -> ShortConv:
    conv = config.short_conv
    assert conv is not None
    return ShortConv(
        linear(f"{layer}conv_in", conv.bias),
        _taps(weight(f"{layer}conv_taps")),
        linear(f"{layer}conv_out", conv.bias, parts.down),
        weight(f"{layer}conv_taps_bias").data if conv.bias else None,
    )


def _mamba2(
    config: ModelConfig, layer: str, weight: _GetWeight, linear: _MakeLinear, parts: WholeParts
) -> Mamba2:
    mamba = config.mamba2
    assert mamba is not None
    return Mamba2(
        mamba,
        linear(f"{layer}mamba_in", mamba.proj_bias),
        _taps(weight(f"{layer}mamba_conv")),
        weight(f"{layer}mamba_conv_bias").data if mamba.conv_bias else None,
        weight(f"{layer}mamba_decay").data,
        weight(f"{layer}mamba_skip").data,
        weight(f"{layer}mamba_step").data,
        None
        if mamba.norm == "none"
        else Norm(weight(f"{layer}mamba_norm").data, config.rms_norm_eps),
        linear(f"{layer}mamba_out", mamba.out_bias, parts.down),
    )


MIXERS: dict[str, Callable[..., Mixer]] = {
    "gated_delta": _gated_delta,
    "short_conv": _short_conv,
    "mamba2": _mamba2,
}
"""Kind of layer -> function of the config, the prefix of the layer's weights, and of functions that
return a weight and a linear layer by name, and of the `WholeParts` that divide it."""
