"""Store each shared expert behind the others, so that the experts' kernels compute it too."""

from __future__ import annotations

from engine.config import ModelConfig, MoeConfig
from engine.device import Device
from engine.kernels.moe_route import MAX_EXPERTS, MAX_TOP_K
from engine.weights import Weight
from engine.weights.stack import append

__all__ = ["join_shared_experts"]

_PAIRS = (
    ("experts_gate_up", "shared_gate_up"),
    ("experts_down", "shared_down"),
    ("router", "shared_gate"),
)


def join_shared_experts(weights: dict[str, Weight], config: ModelConfig, device: Device) -> None:
    """Move shared experts behind the experts, and their gates behind the routers, layer by layer.

    The weights keep their names and shapes, but become views of one array for each pair:
    `models.moe_layer` then builds a mixture in which the shared expert is every token's last one. A
    layer is left as it is if its shared expert differs in size or format, or if a second copy of
    its experts does not fit on the device.
    """
    for layer in range(config.num_layers):
        if not _is_alike(config.moe_of(layer), config.activation):
            continue
        pairs = [(f"layers.{layer}.{first}", f"layers.{layer}.{last}") for first, last in _PAIRS]
        if any(weights[first].format != weights[last].format for first, last in pairs):
            continue
        try:
            for first, last in pairs:
                weights[first], weights[last] = append(weights[first], weights[last])
        except MemoryError:
            return
        finally:
            if device.is_cuda:  # the pool cannot reuse blocks slightly too small
                device.xp.get_default_memory_pool().free_all_blocks()


def _is_alike(moe: MoeConfig | None, activation: str) -> bool:
    """Tell whether the shared expert computes what an expert does, scaled by a gate."""
    if moe is None or not moe.shared_gate or moe.shared_size != moe.intermediate_size:
        return False
    is_plain = not (moe.shared_bias or moe.expert_bias or moe.router_bias or moe.scales_input)
    is_plain = is_plain and not moe.num_identity
    is_same = moe.shared_scale == 1.0 and (activation, moe.activation) == ("silu", "swiglu")
    has_room = moe.num_experts < MAX_EXPERTS and moe.top_k < MAX_TOP_K
    return is_plain and is_same and has_room
