"""vLLM's experts without quantization on the engine's grouped products.

vLLM's method keeps what it owns: the weights, their loading, the router and the reduction over
tensor-parallel ranks. Ours replaces the products of SwiGLU experts that all are on one rank; for
all others vLLM's own kernel runs. This is decided when the weights are loaded: for our products
they keep the checkpoint's layout.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from engine.integrations.torch import moe_experts

__all__ = ["EngineFusedMoEMethod"]


class EngineFusedMoEMethod(UnquantizedFusedMoEMethod):
    """Products of the experts of one layer."""

    is_ours = False  # whether the engine computes this layer

    @property
    def is_monolithic(self) -> bool:
        """Tell whether one kernel also computes the routing."""
        return not self.is_ours and bool(super().is_monolithic)

    @property
    def supports_internal_mk(self) -> bool:
        """Tell whether the method has its own products: vLLM then builds no modular kernel."""
        return self.is_ours or bool(super().supports_internal_mk)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave the weights as they are, or let vLLM convert them for its kernel."""
        self.is_ours = _is_supported(self.moe, layer)
        if self.is_ours:
            self.unquantized_backend = UnquantizedMoeBackend.OOT
        super().process_weights_after_loading(layer)

    def forward_native(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts (T, N); vLLM adds the shared ones."""
        if not self.is_ours:
            result: torch.Tensor = super().forward_native(
                layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input
            )
            return result
        return moe_experts(
            x, layer.w13_weight.data, layer.w2_weight.data, topk_ids, topk_weights.float()
        )


def _is_supported(moe: Any, layer: Any) -> bool:
    """Tell whether the layer has plain SwiGLU experts that all are on this rank."""
    parallel = moe.moe_parallel_config
    return (
        moe.activation == MoEActivation.SILU
        and not moe.has_bias
        and not moe.is_lora_enabled
        and moe.swiglu_limit is None
        and moe.swiglu_alpha is None
        and moe.swiglu_beta is None
        and moe.hidden_dim == moe.hidden_dim_unpadded
        and moe.intermediate_size_per_partition == moe.intermediate_size_per_partition_unpadded
        and not getattr(moe, "require_decomposed_backend", False)
        and not getattr(moe, "_defer_moe_finalize", False)
        and parallel.ep_size == parallel.dp_size == parallel.pcp_size == 1
        and not getattr(parallel, "is_sequence_parallel", False)
        and not parallel.enable_eplb
        and layer.expert_map is None
        and not layer.apply_router_weight_on_input
    )
