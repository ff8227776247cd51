"""Problem sizes and weights for the tests and benchmarks of 8-bit GEMM."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from engine import reference
from engine.testing import cases

__all__ = ["FORMATS", "PRODUCTS_8BIT", "dequantized", "quantized_weight"]

Array = np.ndarray[Any, Any]

FORMATS: tuple[tuple[str, bool], ...] = (("fp8", False), ("fp8", True), ("int8", False))
"""(codes, whether each scale is that of a block)."""

_BLOCK = 128

# (m, n, k): one row, few rows, more than a tile; sizes not divisible by a tile, a block of scales,
# a vector or an instruction; m, n or k of 0; layers of real models.
PRODUCTS_8BIT: tuple[tuple[int, int, int], ...] = (
    (1, 1, 1),
    (1, 16, 16),
    (1, 960, 576),
    (1, 300, 4096),
    (1, 48, 16640),
    (3, 5, 7),
    (2, 576, 1536),
    (5, 130, 1008),
    (8, 33, 80),
    (8, 256, 4096),
    (9, 1024, 2048),
    (17, 130, 1000),
    (33, 65, 257),
    (65, 129, 272),
    (129, 257, 144),
    (300, 70, 16),
    (0, 16, 16),
    (4, 0, 16),
    (5, 24, 0),
)


def quantized_weight(
    n: int, k: int, codes: str, has_blocks: bool, seed: int
) -> tuple[Array, Array]:
    """Return codes (n, k) and their scales; block scales differ between blocks."""
    weight = cases.normal((n, k), "float32", seed, scale=max(k, 1) ** -0.5)
    if not has_blocks:
        rows, scales = reference.quantize_rows(weight, dtype=codes)
        return rows, scales[:, 0].copy()
    shape = -(-n // _BLOCK), -(-k // _BLOCK)
    scales = np.random.default_rng(seed).uniform(1e-3, 4e-3, shape).astype(np.float32)
    values = np.clip(weight / _spread(scales, n, k), -448, 448)
    return values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scales


def dequantized(codes: Array, scales: Array) -> Array:
    """Dequantize rows to float64, with scales per row, group or block."""
    values = codes if codes.dtype == np.int8 else codes.view(ml_dtypes.float8_e4m3fn)
    n, k = codes.shape
    if scales.ndim == 1:
        scales = scales[:, None]
    if scales.shape[0] != n:
        scales = np.repeat(scales, _BLOCK, axis=0)[:n]
    if scales.shape[1] != 1:
        scales = np.repeat(scales, _BLOCK, axis=1)[:, :k]
    product: Array = values.astype(np.float64) * scales
    return product


def _spread(scales: Array, n: int, k: int) -> Array:
    rows: Array = np.repeat(scales, _BLOCK, axis=0)[:n]
    return np.repeat(rows, _BLOCK, axis=1)[:, :k]
