"""Cross-entropy of logits on tensors, with its gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from engine import kernels
from engine.errors import ContractError, ShapeError
from engine.integrations.torch._core import define
from engine.integrations.torch._tensors import accumulation_dtype, check_integers

__all__ = ["LossOptions", "check_reduction", "check_target", "cross_entropy", "reduced"]

_REDUCTIONS = ("mean", "sum", "none")

_OPTIONS = "int ignore_index, float softcap, float z_loss, float label_smoothing"


class LossOptions(NamedTuple):
    """Options of `kernels.cross_entropy`, in the order of the operators' arguments."""

    ignore_index: int
    softcap: float
    z_loss: float
    label_smoothing: float


def reduced(
    losses: torch.Tensor, target: torch.Tensor, ignore_index: int, reduction: str
) -> torch.Tensor:
    """Return the losses, their sum, or their mean over the targets that are not ignored."""
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (target != ignore_index).sum()


def check_reduction(name: str, reduction: str) -> None:
    """Raise a ContractError unless `reduction` is known."""
    if reduction not in _REDUCTIONS:
        raise ContractError(f"{name}: reduction: must be one of {_REDUCTIONS}; got {reduction!r}")


def check_target(name: str, target: torch.Tensor, rows: torch.Tensor) -> None:
    """Raise an error unless `target` has one integer per row of `rows` (..., N)."""
    check_integers(name, "target", target)
    if rows.dim() == 0:
        x = "logits" if name == "cross_entropy" else "x"
        raise ShapeError(f"{name}: {x}: must be of at least one axis; got ()")
    if target.shape != rows.shape[:-1]:
        wanted = tuple(rows.shape[:-1])
        raise ShapeError(f"{name}: target: must have shape {wanted}; got {tuple(target.shape)}")


def _losses(logits: Any, target: Any, *options: Any) -> Any:
    return kernels.cross_entropy(logits, target, **LossOptions(*options)._asdict())[0]


def _gradient(dloss: Any, logits: Any, target: Any, *options: Any) -> Any:
    results = kernels.cross_entropy(logits, target, dloss=dloss, **LossOptions(*options)._asdict())
    return results[2]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    logits, target, *ctx.options = inputs
    ctx.save_for_backward(logits, target)


def _backward(ctx: Any, dloss: torch.Tensor) -> tuple[Any, ...]:
    logits, target = ctx.saved_tensors
    return _GRADIENT(dloss, logits, target, *ctx.options), *(None,) * 5


_GRADIENT = define(
    f"cross_entropy_backward(Tensor dloss, Tensor logits, Tensor target, {_OPTIONS}) -> Tensor",
    _gradient,
    lambda dloss, logits, *_: logits.new_empty(logits.shape),
)
_LOSSES = define(
    f"cross_entropy(Tensor logits, Tensor target, {_OPTIONS}) -> Tensor",
    _losses,
    lambda logits, *_: logits.new_empty(logits.shape[:1], dtype=accumulation_dtype(logits.dtype)),
    backward=_backward,
    setup_context=_setup,
)


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    softcap: float = 0.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the cross-entropy of logits along their last axis.

    Parameters
    ----------
    logits : (..., V) tensor of float32, float16 or bfloat16
        On the CPU also float64. Class axis last, unlike `torch.nn.functional.cross_entropy`.
    target : (...) tensor of int64 or int32
        Class of each row. One outside [0, V) yields NaN.
    ignore_index : int
        Rows with this target have loss and gradient 0, and do not count in the mean.
    reduction : {"mean", "sum", "none"}
    softcap, z_loss, label_smoothing : float
        See `engine.kernels.cross_entropy`.

    Returns
    -------
    loss : () tensor, or (...) with "none", of float32 (float64 for float64 logits)
        The mean over no targets is NaN, as in torch.

    Raises
    ------
    ContractError, ShapeError, DTypeError

    Examples
    --------
    >>> cross_entropy(torch.tensor([[0.0, 0.0], [1.0, 9.0]]), torch.tensor([1, -100]))
    tensor(0.6931)
    """
    check_reduction("cross_entropy", reduction)
    check_target("cross_entropy", target, logits)
    rows = logits.reshape(target.numel(), logits.shape[-1])
    flat = target.reshape(-1)
    losses = _LOSSES(rows, flat, ignore_index, softcap, z_loss, label_smoothing)
    if reduction == "none":
        return losses.view(target.shape)
    return reduced(losses, flat, ignore_index, reduction)
