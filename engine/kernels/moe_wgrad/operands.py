"""Checked arguments of one call of moe_wgrad."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.reference import Routing

__all__ = ["WgradOperands"]


@dataclass(frozen=True)
class WgradOperands:
    """CuPy arrays and options of `moe_wgrad`."""

    dy: Any
    x: Any
    routing: Routing
    out: Any
    gather: str

    def arguments(self) -> dict[str, Any]:
        """Return the arguments common to both kernels."""
        _, num_rows, k = self.out.shape
        return {
            "dy": self.dy,
            "x": self.x,
            "order": self.routing.order,
            "offsets": self.routing.offsets,
            "num_pairs": self.routing.order.shape[0],
            "num_rows": num_rows,
            "k": k,
            "top_k": self.routing.experts.shape[1],
        }
