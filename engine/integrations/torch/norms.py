"""RMSNorm and LayerNorm on tensors, with a fused residual add."""

from __future__ import annotations

from typing import Any

import torch

from engine import kernels
from engine.errors import ContractError
from engine.integrations.torch._core import define
from engine.integrations.torch._transforms import fold_rows

__all__ = ["layernorm", "rmsnorm"]


def _norm(
    x: Any, weight: Any, bias: Any, eps: float, weight_offset: float, subtract_mean: bool
) -> Any:
    return kernels.rmsnorm(
        x, weight, eps=eps, weight_offset=weight_offset, subtract_mean=subtract_mean, bias=bias
    )


def _add_norm(
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    eps: float,
    x_scale: float,
    weight_offset: float,
    subtract_mean: bool,
) -> Any:
    return kernels.rmsnorm(
        x,
        weight,
        eps=eps,
        residual=residual,
        x_scale=x_scale,
        weight_offset=weight_offset,
        subtract_mean=subtract_mean,
        bias=bias,
    )


def _norm_backward(dy: Any, h: Any, weight: Any, dh: Any, eps: float, weight_offset: float) -> Any:
    return kernels.rmsnorm_backward(dy, h, weight, dh=dh, eps=eps, weight_offset=weight_offset)


def _layernorm_backward(
    dy: Any, h: Any, weight: Any, dh: Any, eps: float, weight_offset: float
) -> Any:
    return kernels.rmsnorm_backward(
        dy, h, weight, dh=dh, eps=eps, weight_offset=weight_offset, subtract_mean=True
    )


_BACKWARD_ARGUMENTS = (
    "(Tensor dy, Tensor h, Tensor weight, Tensor? dh, float eps, float weight_offset)"
)
_RMSNORM_BACKWARD = define(
    f"rmsnorm_backward{_BACKWARD_ARGUMENTS} -> (Tensor, Tensor)",
    _norm_backward,
    lambda dy, h, weight, *_: (h.new_empty(h.shape), weight.new_empty(weight.shape)),
)
_LAYERNORM_BACKWARD = define(
    f"layernorm_backward{_BACKWARD_ARGUMENTS} -> (Tensor, Tensor, Tensor)",
    _layernorm_backward,
    lambda dy, h, weight, *_: (
        h.new_empty(h.shape),
        weight.new_empty(weight.shape),
        weight.new_empty(weight.shape),
    ),
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, ctx.eps, ctx.weight_offset, ctx.subtract_mean = inputs
    ctx.save_for_backward(x, weight)
    ctx.has_bias = bias is not None


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    dx, dweight, dbias = _gradients(ctx, dy, None)
    return dx, dweight, dbias, None, None, None


def _setup_add(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    weight, bias, ctx.eps, ctx.x_scale, ctx.weight_offset, ctx.subtract_mean = inputs[2:]
    ctx.save_for_backward(output[1], weight)
    ctx.has_bias = bias is not None
    ctx.set_materialize_grads(False)


def _backward_add(ctx: Any, dy: Any, dh: Any) -> tuple[Any, ...]:
    dweight = dbias = None
    if dy is not None:
        dh, dweight, dbias = _gradients(ctx, dy, dh)
    dx = dh if ctx.x_scale == 1.0 or dh is None else dh * ctx.x_scale
    return dx, dh, dweight, dbias, None, None, None, None


def _gradients(ctx: Any, dy: torch.Tensor, dh: torch.Tensor | None) -> tuple[Any, Any, Any]:
    """Return the gradients with respect to h, weight and bias."""
    h, weight = ctx.saved_tensors
    arguments = (dy, h, weight, dh, ctx.eps, ctx.weight_offset)
    if not ctx.subtract_mean:
        return *_RMSNORM_BACKWARD(*arguments), None
    dx, dweight, dbias = _LAYERNORM_BACKWARD(*arguments)
    return dx, dweight, dbias if ctx.has_bias else None


_NORM = define(
    "rmsnorm(Tensor x, Tensor weight, Tensor? bias, float eps, float weight_offset, "
    "bool subtract_mean) -> Tensor",
    _norm,
    lambda x, *_: x.new_empty(x.shape),
    backward=_backward,
    setup_context=_setup,
    vmap=fold_rows("rmsnorm", 0),
)
_ADD_NORM = define(
    "add_rmsnorm(Tensor x, Tensor residual, Tensor weight, Tensor? bias, float eps, "
    "float x_scale, float weight_offset, bool subtract_mean) -> (Tensor, Tensor)",
    _add_norm,
    lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)),
    backward=_backward_add,
    setup_context=_setup_add,
    vmap=fold_rows("add_rmsnorm", 0, 1),
)


def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    x_scale: float = 1.0,
    weight_offset: float = 0.0,
) -> Any:
    """Normalise the last axis by its root mean square. See `engine.kernels.rmsnorm`.

    Parameters
    ----------
    x : (..., N) tensor of float32, float16 or bfloat16
    weight : (N,) tensor
        Cast to x's dtype if it has another one, as under autocast.
    eps : float
        Added to the mean square.
    residual : (..., N) tensor of x's dtype, optional
        Added to ``x_scale * x`` first; the sum is rounded to x's dtype.
    x_scale : float
        Factor on `x` in that sum; must be 1 without `residual`.
    weight_offset : float
        Added to `weight` (Gemma stores w - 1).

    Returns
    -------
    y : (..., N) tensor of x's dtype
    h : (..., N) tensor of x's dtype
        The sum ``x_scale * x + residual``; returned only if `residual` is given.

    Examples
    --------
    >>> rmsnorm(torch.tensor([[3.0, 4.0]]), torch.ones(2), eps=0.0)
    tensor([[0.8485, 1.1314]])
    """
    return _normalised(x, weight, None, eps, residual, x_scale, weight_offset, False)


def layernorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: torch.Tensor | None = None,
    x_scale: float = 1.0,
    weight_offset: float = 0.0,
) -> Any:
    """Normalise the last axis to mean 0 and variance 1. See `rmsnorm` for the other parameters.

    Parameters
    ----------
    bias : (N,) tensor, optional
        Added last; cast to x's dtype if it has another one.

    Examples
    --------
    >>> layernorm(torch.tensor([[1.0, 3.0]]), torch.ones(2), eps=0.0)
    tensor([[-1.,  1.]])
    """
    return _normalised(x, weight, bias, eps, residual, x_scale, weight_offset, True)


def _normalised(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    x_scale: float,
    weight_offset: float,
    subtract_mean: bool,
) -> Any:
    if residual is None and x_scale != 1.0:
        name = "layernorm" if subtract_mean else "rmsnorm"
        raise ContractError(f"{name}: x_scale: must be 1 without residual; got {x_scale}")
    if weight.dtype != x.dtype:
        weight = weight.to(x.dtype)
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)
    if residual is None:
        return _NORM(x, weight, bias, eps, weight_offset, subtract_mean)
    return _ADD_NORM(x, residual, weight, bias, eps, x_scale, weight_offset, subtract_mean)
