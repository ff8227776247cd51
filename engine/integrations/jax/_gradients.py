"""Gradients of operators that have no backward kernel: XLA differentiates a formula in jnp."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from engine.integrations.jax._operators import Operator, varying_alike

__all__ = ["accumulation_dtype", "differentiable"]


def differentiable(operator: Operator, formula: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run(options, *arrays)``: the operator, whose gradient is that of `formula`.

    Parameters
    ----------
    operator : Operator
    formula : callable
        Called with the operator's arrays (None for an absent one) and options; returns the list of
        results. It is traced for the gradient only.
    """

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def run(options: Any, *arrays: Any) -> Any:
        return operator(*arrays, **dict(options))

    def forward(options: Any, *arrays: Any) -> Any:
        return run(options, *arrays), arrays

    def backward(options: Any, arrays: Any, cotangents: Any) -> Any:
        _, pull_back = jax.vjp(lambda *a: tuple(formula(*a, **dict(options))), *arrays)
        return pull_back(cotangents)

    run.defvjp(forward, backward)
    return lambda options, *arrays: run(options, *varying_alike(arrays))


def accumulation_dtype(x: Any) -> Any:
    """Return the dtype in which the kernels and mirrors compute with arrays of x's dtype."""
    return jnp.promote_types(x.dtype, jnp.float32)
