"""Rotary position embedding on tensors."""

from __future__ import annotations

from typing import Any

import torch

from engine import kernels
from engine.errors import ShapeError
from engine.integrations.torch._core import define
from engine.integrations.torch._tensors import as_int32, check_integers
from engine.integrations.torch._transforms import fold_rows

__all__ = ["rope"]


def _rope(
    q: Any, k: Any, positions: Any, cos_sin: Any, interleaved: bool, inverse: bool
) -> tuple[Any, Any]:
    count = positions.size
    rotated = kernels.rope(
        q.reshape(count, *q.shape[-2:]),
        k.reshape(count, *k.shape[-2:]),
        positions.reshape(count),
        cos_sin,
        interleaved=interleaved,
        inverse=inverse,
    )
    return rotated[0].reshape(q.shape), rotated[1].reshape(k.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, positions, cos_sin, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(positions, cos_sin)


def _backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[Any, ...]:
    """Turn the gradients back: a rotation's transpose is its inverse."""
    positions, cos_sin = ctx.saved_tensors
    dq, dk = _ROPE(dq, dk, positions, cos_sin, ctx.interleaved, not ctx.inverse)
    return dq, dk, None, None, None, None


_ROPE = define(
    "rope(Tensor q, Tensor k, Tensor positions, Tensor cos_sin, bool interleaved, bool inverse) "
    "-> (Tensor, Tensor)",
    _rope,
    lambda q, k, *_: (q.new_empty(q.shape), k.new_empty(k.shape)),
    backward=_backward,
    setup_context=_setup,
    vmap=fold_rows("rope", 0, 1, 2),
)


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the feature pairs of each head by the angles of its token's position.

    Parameters
    ----------
    q : (..., H, D) tensor of float32, float16 or bfloat16
        One token for each element of the leading axes; heads and tokens may be strided.
    k : (..., K, D) tensor of q's dtype
        Leading axes as for `q`.
    cos_sin : (P, R) tensor of float32
        R/2 cosines, then R/2 sines; features from R on are not rotated. No gradient.
    positions : (...) tensor of int64 or int32
        Each token's row of `cos_sin`; broadcast to the leading axes of `q`. On a GPU, a position
        outside the table makes the rotated features NaN.
    interleaved : bool
        Rotate pairs (2i, 2i+1) instead of (i, i + R/2).

    Returns
    -------
    q', k' : tensors of the shapes and dtype of `q` and `k`

    Examples
    --------
    >>> q = torch.tensor([[[1.0, 0.0]]])
    >>> quarter_turn = torch.tensor([[0.0, 1.0]])
    >>> rope(q, q, quarter_turn, torch.tensor([0]))[0]
    tensor([[[0., 1.]]])
    """
    check_integers("rope", "positions", positions)
    lead = q.shape[:-2]
    if k.shape[:-2] != lead:
        wanted = ", ".join((*map(str, lead), "K", "D"))
        raise ShapeError(f"rope: k: must have shape ({wanted}); got {tuple(k.shape)}")
    if positions.shape != lead:
        sizes = zip(reversed(positions.shape), reversed(lead), strict=False)
        if positions.dim() > len(lead) or any(size not in (1, of_q) for size, of_q in sizes):
            wanted = f"rope: positions: must have shape {tuple(lead)}, the leading axes of q"
            raise ShapeError(
                f"{wanted}, or one that broadcasts to it; got {tuple(positions.shape)}"
            )
        positions = positions.expand(lead)
    rotated: tuple[torch.Tensor, torch.Tensor] = _ROPE(
        q, k, as_int32(positions), cos_sin, interleaved, False
    )
    return rotated
