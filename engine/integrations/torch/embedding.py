"""Embedding lookup on tensors, with its gradient.

The gradient sums the rows of each id in a fixed order, so it is reproducible.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine import kernels
from engine.errors import ContractError
from engine.integrations.torch._core import define, define_composite, on_tensors
from engine.integrations.torch._tensors import as_int32, check_integers

__all__ = ["embedding"]


def _table_gradient(
    dout: Tensor, token_ids: Tensor, vocab: int, scale: float, padding_idx: int
) -> Tensor:
    ids, order = torch.sort(token_ids, stable=True)
    gradient: Tensor = _SUM(dout, ids, order, vocab, scale, padding_idx)
    return gradient


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    token_ids, weight, ctx.scale, ctx.padding_idx = inputs
    ctx.vocab = len(weight)
    ctx.save_for_backward(token_ids)


def _backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    (token_ids,) = ctx.saved_tensors
    dweight = _EMBEDDING_BACKWARD(dout, token_ids, ctx.vocab, ctx.scale, ctx.padding_idx)
    return None, dweight, None, None


def _second_backward(ctx: Any, dweight: Tensor) -> tuple[Any, ...]:
    """Look up the rows: the transpose of the sum over each id's rows."""
    (token_ids,) = ctx.saved_tensors
    ids = token_ids.long()
    is_used = (ids >= 0) & (ids < len(dweight)) & (ids != ctx.padding_idx)
    rows = torch.nn.functional.embedding(ids.masked_fill(~is_used, 0), dweight)
    return rows * (ctx.scale * is_used[..., None]), None, None, None, None


def _setup_gradient(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, token_ids, _, ctx.scale, ctx.padding_idx = inputs
    ctx.save_for_backward(token_ids)


_SUM = on_tensors(
    "embedding_sum_",
    lambda dout, ids, order, vocab, scale, padding_idx: kernels.embedding_backward(
        dout, ids, order, vocab, scale=scale, padding_id=padding_idx
    ),
)
_EMBEDDING_BACKWARD = define_composite(
    "embedding_backward(Tensor dout, Tensor token_ids, int vocab, float scale, int padding_idx)"
    " -> Tensor",
    _table_gradient,
    lambda dout, token_ids, vocab, *_: dout.new_empty(vocab, dout.shape[-1]),
    backward=_second_backward,
    setup_context=_setup_gradient,
)
_EMBEDDING = define(
    "embedding(Tensor token_ids, Tensor weight, float scale, int padding_idx) -> Tensor",
    lambda token_ids, weight, scale, padding_idx: kernels.embedding(token_ids, weight, scale=scale),
    lambda token_ids, weight, *_: weight.new_empty(token_ids.shape[0], weight.shape[1]),
    backward=_backward,
    setup_context=_setup,
)


def embedding(
    token_ids: Tensor, weight: Tensor, *, scale: float = 1.0, padding_idx: int | None = None
) -> Tensor:
    """Look up each token's row of the table. See `engine.kernels.embedding`.

    Parameters
    ----------
    token_ids : (...) tensor of int64 or int32
        An id outside [0, V) yields a row of NaN, and no gradient.
    weight : (V, N) tensor of float32, float16 or bfloat16
        On the CPU also float64.
    scale : float
        Factor of the rows (Gemma: sqrt(N), rounded to its dtype by the caller).
    padding_idx : int, optional
        Id whose row gets no gradient, as in `torch.nn.functional.embedding`; may be negative.

    Returns
    -------
    out : (..., N) tensor of weight's dtype

    Examples
    --------
    >>> embedding(torch.tensor([1, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[3., 4.],
            [1., 2.]])
    """
    check_integers("embedding", "token_ids", token_ids)
    vocab = weight.shape[0]
    if padding_idx is not None and not -vocab <= padding_idx < vocab:
        raise ContractError(
            f"embedding: padding_idx: must be from {-vocab} to {vocab - 1}; got {padding_idx}"
        )
    ids = as_int32(token_ids.reshape(-1))
    skipped = -1 if padding_idx is None else padding_idx % vocab
    return _EMBEDDING(ids, weight, scale, skipped).view(*token_ids.shape, weight.shape[1])
