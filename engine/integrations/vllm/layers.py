"""vLLM's norms, gated activations and experts on the engine's kernels, as out-of-tree layers.

vLLM builds these classes wherever a model asks for `RMSNorm`, `GemmaRMSNorm`, `SiluAndMul`,
`GeluAndMul` or (see `experts.py`) `UnquantizedFusedMoEMethod`. They call operators of
`torch.library`: `torch.compile` neither breaks its graph at them nor fuses them with others.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from engine.integrations.torch import geglu, rmsnorm, swiglu
from engine.integrations.vllm.experts import EngineFusedMoEMethod

__all__ = ["register_layers"]


class EngineRMSNorm(RMSNorm):
    """RMSNorm, with the residual add fused."""

    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Return the normalised `x`; with a residual also the sum of both."""
        if self.variance_size_override is not None or not self.has_weight:
            return super().forward_native(x, residual)
        return rmsnorm(x, self.weight.data, self.variance_epsilon, residual=residual)

    def forward_cuda(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """See `forward_native`."""
        return self.forward_native(x, residual)


class EngineGemmaRMSNorm(GemmaRMSNorm):
    """RMSNorm of Gemma, whose weights are stored minus 1."""

    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Return the normalised `x`; with a residual also the sum of both."""
        eps = self.variance_epsilon
        return rmsnorm(x, self.weight.data, eps, residual=residual, weight_offset=1.0)

    def forward_cuda(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """See `forward_native`."""
        return self.forward_native(x, residual)


class EngineSiluAndMul(SiluAndMul):
    """silu(gate) * up of rows [gate | up]."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**(options | {"compile_native": False}))

    @staticmethod
    def forward_native(x: torch.Tensor) -> torch.Tensor:
        """Return the product, (..., d) of x (..., 2 d)."""
        return swiglu(x)

    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        """See `forward_native`."""
        return swiglu(x)


class EngineGeluAndMul(GeluAndMul):
    """gelu(gate) * up of rows [gate | up]."""

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, (..., d) of x (..., 2 d)."""
        return geglu(x, approximate=self.approximate)

    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        """See `forward_native`."""
        return self.forward_native(x)


_LAYERS: dict[Any, Any] = {
    RMSNorm: EngineRMSNorm,
    GemmaRMSNorm: EngineGemmaRMSNorm,
    SiluAndMul: EngineSiluAndMul,
    GeluAndMul: EngineGeluAndMul,
    UnquantizedFusedMoEMethod: EngineFusedMoEMethod,
}


def register_layers() -> None:
    """Make vLLM build the layers above. May run several times in a process."""
    for theirs, ours in _LAYERS.items():
        if op_registry_oot.get(theirs.__name__) is not ours:
            theirs.register_oot(ours)
            # vLLM's switches name its own layers: custom_ops=["+rms_norm"].
            ours.name = theirs.name
