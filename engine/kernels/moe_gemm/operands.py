"""The arguments of one call of moe_gemm, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.reference import Routing

__all__ = ["ACTIVATIONS", "MoeOperands"]

ACTIVATIONS: tuple[str | None, ...] = (None, "swiglu", "swiglu_clamped")
"""In the order of `enum MoeActivation`."""


@dataclass(frozen=True)
class MoeOperands:
    """CuPy arrays and options, as `moe_gemm` takes them."""

    x: Any
    weight: Any
    routing: Routing
    out: Any
    bias: Any
    activation: str | None
    alpha: float
    limit: float
    scatter: bool
    deterministic: bool
    pdl: bool
    quantize_x: bool = False

    @property
    def top_k(self) -> int:
        """Experts of a token."""
        return int(self.routing.experts.shape[1])
