"""Operators inside torch's function transforms: `vmap`, `grad`, forward-mode AD, and vmap rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Function", "fold_rows", "is_transformed", "looped", "operator_of"]
__all__ += ["transformed_function"]

Function = Callable[..., Any]

_transformed: dict[str, Any] = {}  # autograd function of each operator


def transformed_function(
    name: str, backward: Function, setup_context: Function | None, vmap: Function
) -> Any:
    """Return the autograd function of a call inside `vmap`, `grad` or another transform.

    `torch.library.register_autograd` does not cover `torch.func.grad`.
    """

    def forward(*args: Any) -> Any:
        return getattr(torch.ops.engine, name)(*args)

    methods = {
        "forward": forward,
        "setup_context": setup_context or (lambda ctx, inputs, output: None),
        "backward": backward,
        "vmap": vmap,
    }
    methods = {method: staticmethod(function) for method, function in methods.items()}
    _transformed[name] = type(name, (torch.autograd.Function,), methods)
    return _transformed[name]


def is_transformed() -> bool:
    """Tell whether `vmap`, `grad` or another transform, or forward-mode AD, is active.

    The dispatcher would drop the tangents of forward-mode AD; an autograd function raises.
    """
    if torch.compiler.is_compiling():
        return False
    if torch._C._functorch.maybe_current_level() is not None:
        return True
    return torch.autograd.forward_ad._current_level >= 0


def operator_of(name: str) -> Function:
    """Return the function that calls an operator, inside or outside a transform.

    Inside nested transforms, the call is passed on to the next one.
    """
    return _transformed[name].apply if is_transformed() else getattr(torch.ops.engine, name)


def fold_rows(name: str, *rows: int) -> Function:
    """Return a vmap rule: the arguments `rows` take the mapped axis as a leading axis.

    If another argument is mapped too, the operator runs once per element of the axis.
    """

    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        if any(dim is not None and i not in rows for i, dim in enumerate(in_dims)):
            return looped(name)(info, in_dims, *args)
        ready = list(args)
        for i in rows:
            if isinstance(args[i], torch.Tensor):
                ready[i] = _leading(args[i], in_dims[i], info.batch_size)
        result = operator_of(name)(*ready)
        return result, (0,) * len(result) if isinstance(result, tuple) else 0

    return vmap


def looped(name: str) -> Function:
    """Return a vmap rule that runs the operator once per element of the mapped axis.

    For an axis of no element it runs on zeros, since only a result has the shapes to return.
    """

    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        operator = operator_of(name)
        size = info.batch_size
        results = []
        for index in range(max(size, 1)):
            taken = (
                a if dim is None else (a if size else _one_zero(a, dim)).select(dim, index)
                for a, dim in zip(args, in_dims, strict=True)
            )
            results.append(operator(*taken))
        if isinstance(results[0], tuple):
            stacked = tuple(torch.stack(parts)[:size] for parts in zip(*results, strict=True))
            return stacked, (0,) * len(stacked)
        return torch.stack(results)[:size], 0

    return vmap


def _one_zero(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Add an element of zeros to the empty axis `dim`; its gradient is empty."""
    shape = list(tensor.shape)
    shape[dim] = 1
    return torch.cat((tensor, tensor.new_zeros(shape)), dim)


def _leading(tensor: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    if dim is None:
        return tensor.expand(size, *tensor.shape)
    return tensor.movedim(dim, 0)
