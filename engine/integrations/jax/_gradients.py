"""Gradients: by a backward operator, or by XLA from a formula in jnp."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from engine.integrations.jax._operators import Operator, varying_alike

__all__ = ["accumulation_dtype", "differentiable", "formulas_gradient", "product"]

Function = Callable[..., Any]


def differentiable(
    operator: Operator,
    formula: Function,
    backward: Function | None = None,
    keep: Function = lambda arrays, results: arrays,
) -> Any:
    """Return ``run(options, *arrays)``: the operator with a gradient.

    Parameters
    ----------
    operator : Operator
    formula : callable
        The operator in jnp: called with its arrays (None for an absent one) and options, returns
        the results. Traced for gradients only.
    backward : callable, optional
        Called with the options, what was kept and the results' cotangents; returns the arrays'
        gradients. By default XLA differentiates the formula.
    keep : callable
        Takes the arrays and the results; returns what the backward pass needs, by default the
        arrays.
    """

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def run(options: Any, *arrays: Any) -> Any:
        return operator(*arrays, **dict(options))

    def forward(options: Any, *arrays: Any) -> Any:
        results = run(options, *arrays)
        return results, keep(arrays, results)

    def pull_back(options: Any, kept: Any, cotangents: Any) -> Any:
        if backward is None:
            return formulas_gradient(formula, dict(options), kept, cotangents)
        return tuple(backward(options, kept, cotangents))

    run.defvjp(forward, pull_back)
    return lambda options, *arrays: run(options, *varying_alike(arrays))


def formulas_gradient(
    formula: Function, options: dict[str, Any], arrays: Any, cotangents: Any
) -> Any:
    """Return the gradients of the formula's results, weighted by `cotangents`."""
    _, pull_back = jax.vjp(lambda *a: tuple(formula(*a, **options)), *arrays)
    return pull_back(tuple(cotangents))


def accumulation_dtype(x: Any) -> Any:
    """Return the dtype in which the kernels and mirrors compute with arrays of x's dtype."""
    return jnp.dtype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


def product(a: Any, b: Any, dtype: Any) -> Any:
    """Return XLA's product of two matrices, summed and returned in `dtype`."""
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None  # no TF32
    return jnp.matmul(a, b, precision=exact, preferred_element_type=dtype)
