"""The table of token vectors."""

from __future__ import annotations

from typing import Any

from engine import kernels
from engine.errors import WeightsError
from engine.quantization import Weight

__all__ = ["Embedding"]


class Embedding:
    """Rows of a table, times a factor.

    Parameters
    ----------
    weight : Weight
        (V, N), dense.
    scale : float
        Rounded to the table's dtype, as training did (Gemma: sqrt(N)).

    Raises
    ------
    WeightsError
        If the table is not dense.
    """

    __slots__ = ("scale", "weight")

    def __init__(self, weight: Weight, scale: float = 1.0) -> None:
        if not weight.format.is_dense:
            raise WeightsError(f"embed: format must be dense; got {weight.format.name!r}")
        self.weight = weight
        self.scale = float(weight.data.dtype.type(scale))

    def __call__(self, token_ids: Any) -> Any:
        """Return the rows (T, N) of `token_ids` (T,) int32."""
        return kernels.embedding(token_ids, self.weight.data, scale=self.scale)
