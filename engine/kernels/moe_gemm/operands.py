"""Checked arguments of one call of moe_gemm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.kernels._launch import ceil_div
from engine.reference import Routing

__all__ = ["ACTIVATIONS", "MoeOperands", "Summed"]

ACTIVATIONS: tuple[str | None, ...] = (None, "swiglu", "swiglu_clamped", "geglu")
"""Activations, in the order of `enum MoeActivation`."""


@dataclass(frozen=True)
class Summed:
    """Terms that `moe_gemm_combine` adds to each token's sum of expert outputs."""

    shared: Any = None
    shared_gate: Any = None
    residual: Any = None


@dataclass(frozen=True)
class MoeOperands:
    """CuPy arrays and options of `moe_gemm` or, with `summed`, of `moe_gemm_combine`.

    With `out_scales`, `out` are codes.
    """

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
    num_experts: int
    summed: Summed | None = None
    transposed: bool = False
    weighted: bool = True
    out_scales: Any = None

    @property
    def matrices(self) -> tuple[int, int, int]:
        """Return (E, R, K), also if the weight is transposed in memory."""
        num_experts, rows, k = self.weight.shape
        return (num_experts, k, rows) if self.transposed else (num_experts, rows, k)

    @property
    def expected_pairs(self) -> int:
        """Expected number of pairs routed to the experts in `weight`, out of `num_experts`."""
        return ceil_div(int(self.out.shape[0]) * int(self.weight.shape[0]), self.num_experts)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments common to all moe_gemm kernels."""
        num_experts, num_rows, k = self.matrices
        return {
            "order": self.routing.order,
            "offsets": self.routing.offsets,
            "pair_weights": self.routing.weights if self.scatter and self.weighted else None,
            "bias": self.bias,
            "out": self.out,
            "num_experts": num_experts,
            "num_rows": num_rows,
            "k": k,
            "top_k": self.top_k,
            "activation": ACTIVATIONS.index(self.activation),
            "alpha": self.alpha,
            "limit": self.limit,
        }

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return int(self.routing.experts.shape[1])
