"""Build the layers that need the whole residual stream, or several streams, from their weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.config import ModelConfig
from engine.layers.altup import AltUp, AltUpStreams, Laurel
from engine.layers.attention import Attention
from engine.layers.embedding import Embedding
from engine.layers.linear import Linear
from engine.layers.norm import Norm
from engine.layers.per_layer_input import PerLayerGate, PerLayerInput
from engine.models.altup_layer import AltUpLayer
from engine.models.sandwich_layer import SandwichLayer
from engine.weights import Weight

__all__ = ["Parts", "build_input", "build_stream_layer", "build_streams"]

_NORMS = ("attn_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm")


@dataclass(frozen=True)
class Parts:
    """Functions that build parts of a layer from the name of their weight.

    Attributes
    ----------
    weight, linear, norm : callable
        They raise WeightsError if the weight is missing.
    """

    weight: Callable[[str], Weight]
    linear: Callable[[str], Linear]
    norm: Callable[[str], Norm]


def build_stream_layer(
    config: ModelConfig, name: str, parts: Parts, attn: Attention, mlp: Any
) -> SandwichLayer | AltUpLayer:
    """Return layer `name`, such as "layers.3", around its attention and MLP."""
    norms = {norm: parts.norm(f"{name}.{norm}") for norm in _NORMS}
    gate = None
    if config.per_layer_input is not None:
        gate = PerLayerGate(
            parts.linear(f"{name}.per_layer_gate"),
            parts.linear(f"{name}.per_layer_output"),
            parts.norm(f"{name}.per_layer_output_norm"),
            config.activation,
        )
    if config.altup is None:
        scale = parts.weight(f"{name}.layer_scale").data if config.layer_scale else None
        return SandwichLayer(attn, mlp, **norms, per_layer=gate, scale=scale)
    laurel = Laurel(
        parts.linear(f"{name}.laurel_left"),
        parts.linear(f"{name}.laurel_right"),
        parts.norm(f"{name}.laurel_norm"),
    )
    altup = _altup(config, name, parts)
    return AltUpLayer(altup, attn, laurel, mlp, **norms, per_layer=gate)


def _altup(config: ModelConfig, name: str, parts: Parts) -> AltUp:
    assert config.altup is not None
    return AltUp(
        parts.norm(f"{name}.altup_router_norm"),
        parts.weight(f"{name}.altup_router").data,
        parts.weight(f"{name}.altup_prediction").data,
        parts.weight(f"{name}.altup_correction").data,
        parts.weight(f"{name}.altup_scale").data if config.altup.scales_output else None,
    )


def build_streams(config: ModelConfig, parts: Parts) -> AltUpStreams | None:
    """Return the entry and exit of several residual streams; None if there is one."""
    if config.altup is None:
        return None
    others = range(1, config.altup.num_streams)
    entries = [parts.linear(f"altup_entry_{stream}") for stream in others]
    exits = [parts.linear(f"altup_exit_{stream}") for stream in others]
    return AltUpStreams(entries, exits)


def build_input(config: ModelConfig, parts: Parts) -> PerLayerInput | None:
    """Return the second embedding, which every layer reads; None if there is none."""
    if config.per_layer_input is None:
        return None
    scale = config.per_layer_input.size**0.5
    return PerLayerInput(
        Embedding(parts.weight("embed_per_layer"), scale, rounds_scale=True),
        parts.linear("per_layer_projection"),
        parts.norm("per_layer_norm"),
    )
