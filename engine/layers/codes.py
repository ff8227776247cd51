"""Activations in 8 bits: what a norm passes to a product whose weight wants them so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Codes"]


@dataclass(frozen=True)
class Codes:
    """Rows of activations as codes and scales; stands for the array that was quantized.

    Attributes
    ----------
    codes : (T, N) array of uint8 (bits of e4m3) or int8
    scales : (T, 1) or (T, ceil(N / 128)) array of float32
    dtype : dtype
        Of the array.
    """

    codes: Any
    scales: Any
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        shape: tuple[int, ...] = self.codes.shape
        return shape
