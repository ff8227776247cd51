"""The table of token vectors."""

from __future__ import annotations

from typing import Any

from engine import kernels

__all__ = ["Embedding"]


class Embedding:
    """Rows of a table, times a factor.

    Parameters
    ----------
    weight : (V, N) array
    scale : float
        Rounded to the table's dtype, as training did (Gemma: sqrt(N)).
    """

    __slots__ = ("scale", "weight")

    def __init__(self, weight: Any, scale: float = 1.0) -> None:
        self.weight = weight
        self.scale = float(weight.dtype.type(scale))

    def __call__(self, token_ids: Any) -> Any:
        """Return the rows (T, N) of `token_ids` (T,) int32."""
        return kernels.embedding(token_ids, self.weight, scale=self.scale)
