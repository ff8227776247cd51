"""Activations on tensors: gated ones on packed rows [gate | up], and their ungated forms."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from engine import kernels
from engine.errors import ContractError
from engine.integrations.torch._core import define
from engine.integrations.torch._transforms import fold_rows

__all__ = ["geglu", "gelu", "relu", "silu", "swiglu"]


_KERNELS: dict[str, Any] = {
    "silu": kernels.silu,
    "gelu": partial(kernels.gelu, approximate="none"),
    "gelu_tanh": partial(kernels.gelu, approximate="tanh"),
    "relu": kernels.relu,
}


def _half(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _like_x(dout: torch.Tensor, x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.options = inputs[1:]


_SWIGLU_BACKWARD = define(
    "swiglu_backward(Tensor dout, Tensor x) -> Tensor",
    kernels.swiglu_backward,
    _like_x,
    vmap=fold_rows("swiglu_backward", 0, 1),
)
_SWIGLU = define(
    "swiglu(Tensor x) -> Tensor",
    kernels.swiglu,
    _half,
    backward=lambda ctx, dout: _SWIGLU_BACKWARD(dout, *ctx.saved_tensors),
    setup_context=_setup,
    vmap=fold_rows("swiglu", 0),
)
_GEGLU_BACKWARD = define(
    "geglu_backward(Tensor dout, Tensor x, str approximate) -> Tensor",
    lambda dout, x, approximate: kernels.geglu_backward(dout, x, approximate=approximate),
    _like_x,
    vmap=fold_rows("geglu_backward", 0, 1),
)
_GEGLU = define(
    "geglu(Tensor x, str approximate) -> Tensor",
    lambda x, approximate: kernels.geglu(x, approximate=approximate),
    _half,
    backward=lambda ctx, dout: (
        _GEGLU_BACKWARD(dout, *ctx.saved_tensors, *ctx.options),
        None,
    ),
    setup_context=_setup,
    vmap=fold_rows("geglu", 0),
)
_ACTIVATION_BACKWARD = define(
    "activation_backward(Tensor dout, Tensor x, str activation) -> Tensor",
    lambda dout, x, activation: kernels.activation_backward(dout, x, activation),
    _like_x,
    vmap=fold_rows("activation_backward", 0, 1),
)
_ACTIVATION = define(
    "activation(Tensor x, str activation) -> Tensor",
    lambda x, activation: _KERNELS[activation](x),
    lambda x, activation: x.new_empty(x.shape),
    backward=lambda ctx, dout: (
        _ACTIVATION_BACKWARD(dout, *ctx.saved_tensors, *ctx.options),
        None,
    ),
    setup_context=_setup,
    vmap=fold_rows("activation", 0),
)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Multiply the upper half of each row by the SiLU of the lower half.

    Parameters
    ----------
    x : (..., 2F) tensor of float32, float16 or bfloat16
        Rows [gate | up].

    Returns
    -------
    out : (..., F) tensor of x's dtype

    Examples
    --------
    >>> swiglu(torch.tensor([[0.0, 100.0, 5.0, 2.0]]))
    tensor([[  0., 200.]])
    """
    result: torch.Tensor = _SWIGLU(x)
    return result


def geglu(x: torch.Tensor, *, approximate: str = "tanh") -> torch.Tensor:
    """Multiply the upper half of each row by the GELU of the lower half.

    Parameters
    ----------
    x : (..., 2F) tensor of float32, float16 or bfloat16
        Rows [gate | up].
    approximate : {"tanh", "none"}
        "none" is the exact GELU, based on erf.

    Returns
    -------
    out : (..., F) tensor of x's dtype

    Examples
    --------
    >>> geglu(torch.tensor([[0.0, 100.0, 5.0, 2.0]]))
    tensor([[  0., 200.]])
    """
    result: torch.Tensor = _GEGLU(x, approximate)
    return result


def silu(x: torch.Tensor) -> torch.Tensor:
    """Multiply every element by its sigmoid.

    Examples
    --------
    >>> silu(torch.tensor([0.0, 100.0]))
    tensor([  0., 100.])
    """
    return _activated(x, "silu")


def gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """Apply the Gaussian error linear unit to every element.

    Parameters
    ----------
    x : tensor of float32, float16 or bfloat16
    approximate : {"none", "tanh"}
        "none" is the exact function, based on erf.

    Raises
    ------
    ContractError
        If `approximate` is neither.

    Examples
    --------
    >>> gelu(torch.tensor([0.0, 100.0]))
    tensor([  0., 100.])
    """
    if approximate not in ("none", "tanh"):
        raise ContractError(f"gelu: approximate: must be 'none' or 'tanh'; got {approximate!r}")
    return _activated(x, "gelu" if approximate == "none" else "gelu_tanh")


def relu(x: torch.Tensor) -> torch.Tensor:
    """Replace negative elements by zero; NaN stays NaN.

    Examples
    --------
    >>> relu(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """
    return _activated(x, "relu")


def _activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    result: torch.Tensor = _ACTIVATION(x, activation)
    return result
