"""The arrays of one product, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.weights import Weight

__all__ = ["ACTIVATIONS", "SWIGLU", "Norm", "Operands", "row_stride"]

SWIGLU = "swiglu"

# But for the last, by their numbers in `enum Activation`; "swiglu" is kSiluAndMul.
ACTIVATIONS: tuple[str | None, ...] = (None, "silu", "gelu", "gelu_tanh", "relu", SWIGLU)


@dataclass(frozen=True)
class Operands:
    """The arrays of one product; rows of x, residual and out may lie apart.

    x has the columns in the order of the weight's data.
    """

    x: Any
    weight: Weight
    out: Any
    bias: Any = None
    residual: Any = None
    activation: str | None = None
    deterministic: bool = False
    pdl: bool = False


@dataclass(frozen=True)
class Norm:
    """The norm before the product: its weight (K,), epsilon and the weight's offset."""

    weight: Any
    eps: float
    weight_offset: float


def row_stride(array: Any) -> int:
    """Return the elements from one row to the next."""
    return int(array.strides[0]) // int(array.itemsize)
