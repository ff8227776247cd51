"""Activations on tensors: gated ones on packed rows [gate | up], and their ungated forms."""

from __future__ import annotations

from typing import Any

import torch

from engine import kernels
from engine.integrations.torch._core import define, fold_rows

__all__ = ["geglu", "swiglu"]


def _half(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _whole(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


_SWIGLU = define("swiglu(Tensor x) -> Tensor", kernels.swiglu, _half, vmap=fold_rows("swiglu", 0))
_GEGLU = define(
    "geglu(Tensor x, str approximate) -> Tensor",
    lambda x, approximate: kernels.geglu(x, approximate=approximate),
    _half,
    vmap=fold_rows("geglu", 0),
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
