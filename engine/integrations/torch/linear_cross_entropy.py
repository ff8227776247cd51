"""Linear layer with cross-entropy as one operator: only some rows of logits exist at a time.

For each chunk of rows, one product computes logits; `kernels.cross_entropy` turns them, in place,
into losses and the logits' gradient; and two products compute the gradients of x and of the weight.
The backward pass only scales them. The method is Liger's (Hsu et
al., arXiv:2410.10989).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine import kernels
from engine.errors import ContractError, ShapeError
from engine.integrations.torch._core import define_composite, on_tensors, to_autocast_dtype
from engine.integrations.torch._tensors import accumulation_dtype
from engine.integrations.torch._transforms import is_transformed
from engine.integrations.torch.cross_entropy import (
    LossOptions,
    check_reduction,
    check_target,
    reduced,
)

__all__ = ["default_chunk_rows", "linear_cross_entropy"]

_ROWS_MULTIPLE = 256  # rows: whole tiles of the products, and aligned slices
_MIN_LOGITS = 64 << 20  # minimum logits per chunk
# A vocabulary of another size (50,257) is extended by rows of zeros: cuBLAS is several times as
# slow if rows of logits are not aligned to 16 bytes, or if their number of columns is odd.
_VOCAB_MULTIPLE = 8


def default_chunk_rows(num_rows: int, vocab: int, hidden: int) -> int:
    """Return the number of rows of logits that exist at once.

    The logits take as much memory as x, or an eighth of the weight if that is more: little beside
    the gradients of both. With fewer rows, the memory traffic of the weight's gradient, a sum over
    chunks, would take longer than its products. A chunk has at least 128 MB of 16-bit logits, so
    that the products of small models fill a GPU.

    Examples
    --------
    >>> default_chunk_rows(16384, 128256, 4096), default_chunk_rows(16384, 32768, 768)
    (512, 2048)
    """
    rows = max(num_rows // -(-vocab // hidden), hidden // 8, _MIN_LOGITS // vocab)
    return min(max(round(rows / _ROWS_MULTIPLE), 1) * _ROWS_MULTIPLE, num_rows)


def _cross_entropy_of(
    logits: Any, target: Any, losses: Any, dloss: Any, *options: Any
) -> tuple[()]:
    """Write the losses; with `dloss`, turn the logits into their gradient."""
    kernels.cross_entropy(
        logits,
        target,
        dloss=dloss,
        out=losses,
        dlogits_out=None if dloss is None else logits,
        **LossOptions(*options)._asdict(),
    )
    return ()


def _scale(x: Any, factors: Any) -> tuple[()]:
    kernels.scale_rows(x, factors, out=x)
    return ()


_LOSSES_ = on_tensors("cross_entropy_", _cross_entropy_of)
_SCALE_ = on_tensors("scale_rows_", _scale)


class _Product(NamedTuple):
    """Operands of one call; `weight` and `bias` are extended to a multiple of `_VOCAB_MULTIPLE`."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    options: LossOptions
    chunk_rows: int  # 0: `default_chunk_rows`
    vocab: int

    @classmethod
    def of(
        cls, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any
    ) -> _Product:
        *options, chunk_rows = rest
        vocab = len(weight)
        if missing := -vocab % _VOCAB_MULTIPLE:
            weight = torch.nn.functional.pad(weight, (0, 0, 0, missing))
            bias = None if bias is None else torch.nn.functional.pad(bias, (0, missing))
        return cls(x, weight, bias, target, LossOptions(*options), chunk_rows, vocab)

    def chunks(self, losses: Tensor, dloss: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of rows with their logits or, with `dloss`, their logits' gradient.

        All chunks share one buffer. `losses` and `dloss` have one element per row; `dloss` may have
        a single one.
        """
        num_rows, hidden = self.x.shape
        chosen = self.chunk_rows or default_chunk_rows(num_rows, self.vocab, hidden)
        step = max(min(chosen, num_rows), 1)
        buffer = self.x.new_empty(step, len(self.weight))
        for first in range(0, num_rows, step):
            rows = slice(first, min(first + step, num_rows))
            logits = buffer[: rows.stop - first]
            if self.bias is None:
                torch.mm(self.x[rows], self.weight.t(), out=logits)
            else:
                torch.addmm(self.bias, self.x[rows], self.weight.t(), out=logits)
            part = dloss if dloss is None or len(dloss) == 1 else dloss[rows]
            known = logits[:, : self.vocab]
            _LOSSES_(known, self.target[rows], losses[rows], part, *self.options)
            yield rows, logits

    def losses(self) -> Tensor:
        """Return the loss of each row."""
        losses = self.x.new_empty(len(self.x), dtype=accumulation_dtype(self.x.dtype))
        for _ in self.chunks(losses, None):
            pass
        return losses

    def gradients(
        self, dloss: Tensor, needs: tuple[bool, ...], sum_dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Return the loss of each row, and the gradients of x, weight and bias for `dloss`.

        A gradient that is not needed is an empty tensor.
        """
        losses = self.x.new_empty(len(self.x), dtype=accumulation_dtype(self.x.dtype))
        empty = self.x.new_empty
        dx = empty(self.x.shape) if needs[0] else empty(0)
        dweight = empty(self.weight.shape, dtype=sum_dtype) if needs[1] else empty(0)
        dbias = losses.new_zeros(len(self.weight)) if needs[2] else empty(0)
        if not len(self.x):
            dweight.zero_()
        for rows, dlogits in self.chunks(losses, dloss):
            if needs[0]:
                torch.mm(dlogits, self.weight, out=dx[rows])
            if needs[1]:
                _add_product(dweight, dlogits, self.x[rows], is_first=rows.start == 0)
            if needs[2]:
                dbias += dlogits.sum(0, dtype=dbias.dtype)
        dweight = dweight[: self.vocab].to(self.weight.dtype)
        return losses, dx, dweight, dbias[: self.vocab].to(self.x.dtype)


def _add_product(total: Tensor, dlogits: Tensor, x: Tensor, *, is_first: bool) -> None:
    """Add dlogitsᵀ x to `total`, whose first contents are arbitrary."""
    if is_first and total.dtype == x.dtype:
        torch.mm(dlogits.t(), x, out=total)
        return
    if is_first:
        total.zero_()
    if total.dtype == x.dtype:
        torch.addmm(total, dlogits.t(), x, out=total)
    elif x.is_cuda:
        torch.addmm(total, dlogits.t(), x, out_dtype=total.dtype, out=total)
    else:
        total += dlogits.t().to(total.dtype) @ x.to(total.dtype)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Return the loss, 1 / (number of averaged losses), and the gradients for dloss = `_boost`.

    With "none" each row has its own dloss, and sums over rows need it: then only dx can be computed
    in the forward pass.
    """
    *options, need_dx, need_dweight, need_dbias, sum_dtype, reduction = rest
    product = _Product.of(x, weight, bias, target, *options)
    count = (target != product.options.ignore_index).sum().to(accumulation_dtype(x.dtype))
    inverse = 1 / count.clamp(min=1) if reduction == "mean" else torch.ones_like(count)
    needs = (need_dx, need_dweight, need_dbias)
    if reduction == "none" and (need_dweight or need_dbias):
        needs = (False, False, False)
    if any(needs):
        dloss = (inverse * _boost(x, reduction)).view(1)
        losses, *gradients = product.gradients(dloss, needs, sum_dtype)
    else:
        losses = product.losses()
        gradients = [x.new_empty(0) for _ in needs]
    loss = reduced(losses, target, product.options.ignore_index, reduction)
    return loss, inverse.view(1), *gradients


def _boost(x: Tensor, reduction: str) -> float:
    """Return the dloss for which the forward pass computes gradients.

    It is 1, but for a mean in float16 about the number of rows: the gradient of a logit would
    underflow. It is a power of two, so dividing by it is exact.
    """
    is_small = x.dtype == torch.float16 and reduction == "mean"
    return 2.0 ** len(x).bit_length() if is_small else 1.0


def _fake_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any
) -> Any:
    need_dx, need_dweight, need_dbias, _, reduction = rest[5:]
    is_late = reduction == "none" and (need_dweight or need_dbias)
    dtype = accumulation_dtype(x.dtype)
    return (
        x.new_empty(target.shape if reduction == "none" else (), dtype=dtype),
        x.new_empty(1, dtype=dtype),
        x.new_empty(x.shape if need_dx and not is_late else 0),
        weight.new_empty(weight.shape if need_dweight and not is_late else 0),
        x.new_empty(weight.shape[0] if need_dbias and not is_late else 0),
    )


def _gradients(
    dloss: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Return the gradients of x, weight and bias for one dloss per row, or for a common one."""
    *options, need_dx, need_dweight, need_dbias, sum_dtype = rest
    product = _Product.of(x, weight, bias, target, *options)
    needs = (need_dx, need_dweight, need_dbias)
    return product.gradients(dloss.contiguous(), needs, sum_dtype)[1:]


def _fake_gradients(
    dloss: Tensor, x: Tensor, weight: Tensor, bias: Any, target: Tensor, *rest: Any
) -> Any:
    need_dx, need_dweight, need_dbias, _ = rest[5:]
    return (
        x.new_empty(x.shape if need_dx else 0),
        weight.new_empty(weight.shape if need_dweight else 0),
        x.new_empty(weight.shape[0] if need_dbias else 0),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, target, *ctx.options = inputs
    _, inverse, *gradients = output
    ctx.save_for_backward(x, weight, bias, target, inverse)
    # Not among the saved tensors: the first backward pass scales and returns them.
    is_kept = any(gradient.numel() for gradient in gradients)
    ctx.gradients = [gradient.detach() for gradient in gradients] if is_kept else None
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # zeros in place of their gradients would double the memory


def _backward(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    """Scale the gradients from the forward pass, or compute them.

    They are computed here if each row has its own dloss, and in a second pass over a retained
    graph.
    """
    if dloss is None:
        return (None,) * (4 + len(ctx.options))
    x, weight, bias, target, inverse = ctx.saved_tensors
    *options, _, _, _, sum_dtype, reduction = ctx.options
    needs = ctx.needs_input_grad[:3]
    gradients = ctx.gradients
    ctx.gradients = None
    # With create_graph, an operator without a derivative: a second derivative is an error.
    if gradients is None or torch.is_grad_enabled():
        factors = (dloss * inverse).reshape(-1)
        arguments = (x, weight, bias, target, *options, *needs, sum_dtype)
        gradients = _LINEAR_CROSS_ENTROPY_BACKWARD(factors, *arguments)
    else:
        factors = (dloss / _boost(x, reduction)).reshape(-1)
        scale = _scaled_in_place if _is_plain(dloss) else _scaled
        gradients = [scale(g, factors.contiguous()) if g.numel() else g for g in gradients]
    ready = [g if needed else None for g, needed in zip(gradients, needs, strict=True)]
    return *ready, *(None,) * (1 + len(ctx.options))


def _is_plain(dloss: Tensor) -> bool:
    """Tell whether dloss is a plain tensor: not traced, and no batch of `is_grads_batched`."""
    if type(dloss) is not Tensor or torch.compiler.is_compiling() or is_transformed():
        return False
    return not torch._C._functorch.is_legacy_batchedtensor(dloss)


def _scaled(gradient: Tensor, factors: Tensor) -> Tensor:
    shape = (-1, *(1,) * (gradient.dim() - 1))
    return (gradient * factors.view(shape)).to(gradient.dtype)


def _scaled_in_place(gradient: Tensor, factors: Tensor) -> Tensor:
    _SCALE_(gradient if gradient.dim() == 2 else gradient[None], factors)
    return gradient


_ARGUMENTS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor target, int ignore_index, float softcap, "
    "float z_loss, float label_smoothing, int chunk_rows, bool need_dx, bool need_dweight, "
    "bool need_dbias, ScalarType sum_dtype"
)
_LINEAR_CROSS_ENTROPY = define_composite(
    f"linear_cross_entropy({_ARGUMENTS}, str reduction) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
    backward=_backward,
    setup_context=_setup,
)
_LINEAR_CROSS_ENTROPY_BACKWARD = define_composite(
    f"linear_cross_entropy_backward(Tensor dloss, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    _gradients,
    _fake_gradients,
)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    softcap: float = 0.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    sum_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
) -> Tensor:
    """Return ``cross_entropy(linear(x, weight, bias), target)`` without the logits in memory.

    Parameters
    ----------
    x : (..., K) tensor of float32, float16 or bfloat16
        On the CPU also float64. Cast to autocast's dtype, with `weight` and `bias`.
    weight : (V, K) tensor of x's dtype
    target : (...) tensor of int64 or int32
        Class of each row. One outside [0, V) yields NaN.
    bias : (V,) tensor of x's dtype, optional
    ignore_index : int
        Rows with this target have loss and gradient 0, and do not count in the mean.
    reduction : {"mean", "sum", "none"}
    softcap, z_loss, label_smoothing : float
        See `engine.kernels.cross_entropy`.
    sum_dtype : torch.dtype, optional
        Dtype in which the weight's gradient is summed over chunks of rows: the weight's (the
        default), or torch.float32, which takes more memory and time.
    chunk_rows : int, optional
        Rows of logits that exist at once; see `default_chunk_rows`. The weight's gradient is
        rounded once per chunk.

    Returns
    -------
    loss : () tensor, or (...) with "none", of float32 (float64 for float64 x)
        The mean over no targets is NaN, as in torch.

    Raises
    ------
    ContractError, ShapeError, DTypeError
    NotImplementedError
        In a second derivative.

    Notes
    -----
    The logits are rounded to x's dtype, as a linear layer's are. Gradients are computed in the
    forward pass, if any is needed: 3 products. The backward pass multiplies them by the loss's
    gradient, in place, which rounds them again unless that is a power of two. With "none" the
    gradient of the weight depends on each row's factor, so the logits are computed again in the
    backward pass: 4 products.

    Examples
    --------
    >>> x, weight = torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    >>> linear_cross_entropy(x, weight, torch.tensor([0, 1]), reduction="none")
    tensor([0.3133, 0.6931])
    """
    check_reduction("linear_cross_entropy", reduction)
    check_target("linear_cross_entropy", target, x)
    x, weight, bias = to_autocast_dtype(x, weight, bias)
    _check_parameters(x, weight, bias)
    if chunk_rows is not None and chunk_rows < 1:
        raise ContractError(f"linear_cross_entropy: chunk_rows: must be positive; got {chunk_rows}")
    if sum_dtype not in (None, weight.dtype, torch.float32):
        wanted = f"linear_cross_entropy: sum_dtype: must be {weight.dtype} or torch.float32"
        raise ContractError(f"{wanted}; got {sum_dtype}")
    options = (ignore_index, softcap, z_loss, label_smoothing, chunk_rows or 0)
    kind = (weight.dtype if sum_dtype is None else sum_dtype, reduction)
    tensors = (x.reshape(target.numel(), x.shape[-1]), weight, bias, target.reshape(-1))
    # Below a transform, all gradients are computed in the backward pass.
    is_recorded = torch.is_grad_enabled() and not is_transformed()
    needs = [is_recorded and t is not None and t.requires_grad for t in (x, weight, bias)]
    loss = _LINEAR_CROSS_ENTROPY(*tensors, *options, *needs, *kind)[0]
    return loss.view(target.shape) if reduction == "none" else loss


def _check_parameters(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise ContractError(
                f"linear_cross_entropy: {name}: must be {x.dtype}, as x is; got {tensor.dtype}"
            )
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        wanted = f"linear_cross_entropy: weight: must have shape (V, {x.shape[-1]}), as x has"
        raise ShapeError(f"{wanted}; got {tuple(weight.shape)}")
    if 0 in weight.shape:
        wanted = "linear_cross_entropy: weight: must be of at least one element"
        raise ShapeError(f"{wanted}; got {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        wanted = f"linear_cross_entropy: bias: must have shape ({len(weight)},)"
        raise ShapeError(f"{wanted}; got {tuple(bias.shape)}")
