"""The product of a stacked weight: one product for each part, side by side in the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine import kernels
from engine.device import empty_like
from engine.weights import Weight

__all__ = ["stacked_product"]


def stacked_product(
    product_of: Callable[[Weight], Callable[..., Any]],
    x: Any,
    weight: Weight,
    *,
    bias: Any = None,
    residual: Any = None,
    activation: str | None = None,
    out: Any = None,
    out_dtype: Any = None,
    deterministic: bool = False,
) -> Any:
    """Return activation(x Wᵀ + b) + residual, as `kernels.gemm`, for a stacked weight.

    Parameters
    ----------
    product_of : callable
        Returns the op that multiplies by a part.
    x, weight, bias, residual, activation, out, out_dtype, deterministic
        As `Linear` passes them to a product.

    Notes
    -----
    With "swiglu", whose gate and up may be in different parts, the product is rounded to x's dtype
    before the activation.
    """
    is_gated = activation == "swiglu"
    columns = weight.shape[0]
    y = out
    if y is None or is_gated:
        y = empty_like(x, out_dtype, (x.shape[0], columns))
    first = 0
    for part in weight.parts:
        last = first + part.shape[0]
        product_of(part)(
            x,
            part,
            bias=None if bias is None else bias[first:last],
            residual=None if residual is None or is_gated else residual[:, first:last],
            activation=None if is_gated else activation,
            out=y[:, first:last],
            out_dtype=out_dtype,
            deterministic=deterministic,
        )
        first = last
    return kernels.swiglu(y, out=out) if is_gated else y
