"""The token embedding."""

from __future__ import annotations

from typing import Any

from engine import kernels
from engine.errors import WeightsError
from engine.weights import Weight

__all__ = ["Embedding"]


class Embedding:
    """Looks up rows of a table and scales them.

    Parameters
    ----------
    weight : Weight
        (V, N), dense.
    scale : float
        Factor on the embeddings.
    rounds_scale : bool
        Round `scale` to the table's dtype, as in training (Gemma: sqrt(N)).

    Raises
    ------
    WeightsError
        If the table is not dense.
    """

    __slots__ = ("scale", "weight")

    def __init__(self, weight: Weight, scale: float = 1.0, *, rounds_scale: bool = False) -> None:
        if not weight.format.is_dense:
            raise WeightsError(f"embed must be a dense weight; got {weight.format.name!r}")
        self.weight = weight
        self.scale = float(weight.data.dtype.type(scale)) if rounds_scale else scale

    def __call__(self, token_ids: Any) -> Any:
        """Return the rows (T, N) of `token_ids` (T,) int32."""
        return kernels.embedding(token_ids, self.weight.data, scale=self.scale)
