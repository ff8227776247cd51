"""Build the mixture of experts of one layer from its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from engine.config import MoeConfig
from engine.device import array_module, to_numpy
from engine.layers.linear import Linear
from engine.layers.mlp import MLP
from engine.layers.moe import DenseAndExperts, Experts, MoE, RoutingParams
from engine.layers.norm import Norm
from engine.models.sharding import WholeParts
from engine.weights import Weight
from engine.weights.stack import appended

__all__ = ["build_dense_and_experts", "build_moe", "scaled_router_norm"]


def build_moe(
    config: MoeConfig,
    activation: str,
    layer: str,
    weight: Callable[[str], Weight],
    *,
    deterministic: bool,
    parts: WholeParts,
) -> MoE:
    """Return the mixture of experts of one layer.

    Parameters
    ----------
    config : MoeConfig
    activation : str
        Activation of the shared expert. See `MLP`.
    layer : str
        Prefix of its weights, such as "layers.3".
    weight : callable
        Returns the weight of a name; raises WeightsError if it is missing.
    deterministic : bool
    parts : WholeParts
        Builds the layers that may be divided among ranks.
    """

    def optional(kind: str, exists: bool) -> Weight | None:
        return weight(f"{layer}.{kind}") if exists else None

    def linear(kind: str, has_bias: bool = False) -> Linear:
        bias = optional(f"{kind}_bias", has_bias)
        return Linear(weight(f"{layer}.{kind}"), bias, deterministic=deterministic)

    def shared_expert() -> MLP:
        bias = optional("shared_down_bias", config.shared_bias)
        down = weight(f"{layer}.shared_down")
        return MLP(
            linear("shared_gate_up", config.shared_bias),
            parts.shared_down(down, bias, deterministic=deterministic),
            activation,
            is_gated=config.is_gated,
        )

    def latent() -> tuple[Linear, Linear]:
        bias = optional("moe_latent_out_bias", config.latent_bias)
        out_of = weight(f"{layer}.moe_latent_out")
        return (
            linear("moe_latent_in", config.latent_bias),
            parts.shared_down(out_of, bias, deterministic=deterministic),
        )

    expert_scale = optional("router_scale", config.beside_mlp)
    router = linear("router", config.router_bias)
    stored = optional("router_correction", config.correction)
    correction = _correction(config, stored, router.weight)
    experts = Experts(
        weight(f"{layer}.experts_gate_up"),
        weight(f"{layer}.experts_down"),
        optional("experts_gate_up_bias", config.expert_bias),
        optional("experts_down_bias", config.expert_bias),
        config.activation,
        config.alpha,
        config.limit,
        config.num_identity,
    )
    shared = shared_expert() if config.shared_size else None
    shared_gate = linear("shared_gate") if config.shared_gate else None
    joined = _joined(router, experts, shared, shared_gate)
    if joined is not None:
        router, experts = joined
        shared = shared_gate = None
    return parts.moe(
        RoutingParams(
            config.top_k,
            config.score,
            config.num_groups,
            config.top_groups,
            config.renormalize,
            config.scale,
            num_shared=0 if joined is None else 1,
            scales_input=config.scales_input,
            jitter=config.jitter,
        ),
        router,
        experts,
        correction=correction,
        expert_scale=None if expert_scale is None else expert_scale.data,
        shared=shared,
        shared_scale=config.shared_scale,
        shared_gate=shared_gate,
        latent=latent() if config.latent_size else None,
        deterministic=deterministic,
    )


def scaled_router_norm(weight: Any) -> Any:
    """Return a router norm's weight times N^-0.5, by which the router's input is scaled."""
    stored = to_numpy(weight)
    scaled = stored.astype(np.float32) * np.float32(stored.size**-0.5)
    return array_module(weight).asarray(scaled.astype(stored.dtype))


def _correction(config: MoeConfig, stored: Weight | None, router: Weight) -> Any:
    """Return what is added to the scores for the choice; zeros make groups rank by two scores."""
    if stored is not None:
        return stored.data
    is_needed = config.sums_groups and config.num_groups > 1
    xp = array_module(router.data)
    return xp.zeros(config.num_choices, np.float32) if is_needed else None


def _joined(
    router: Linear, experts: Experts, shared: MLP | None, gate: Linear | None
) -> tuple[Linear, Experts] | None:
    """Return a router and experts of which the shared expert is the last one, or None.

    None if the weights do not lie side by side. See `loading.shared_experts`.
    """
    if shared is None or gate is None:
        return None
    matrix = appended(router.weight, gate.weight)
    gate_up = appended(experts.gate_up, shared.gate_up.weight)
    down = appended(experts.down, shared.down.weight)
    if matrix is None or gate_up is None or down is None:
        return None
    joined = replace(experts, gate_up=gate_up, down=down)
    return Linear(matrix, deterministic=router.deterministic), joined


def build_dense_and_experts(
    dense: MLP, moe: MoE, layer: str, norm: Callable[[str], Norm]
) -> DenseAndExperts:
    """Return an MLP beside experts; `norm` returns the norm with the weight of a name."""
    router_norm = norm(f"{layer}.router_norm")
    return DenseAndExperts(
        dense,
        moe,
        router_norm=Norm(scaled_router_norm(router_norm.weight), router_norm.eps),
        moe_norm=norm(f"{layer}.moe_norm"),
        post_dense_norm=norm(f"{layer}.post_dense_norm"),
        post_moe_norm=norm(f"{layer}.post_moe_norm"),
    )
