"""Random quantized weights, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from engine.dtypes import np_dtype
from engine.weights import FORMATS, Weight, pack_weight

__all__ = ["BYTE_FORMATS", "PACKED_FORMATS", "random_weight", "weight_to"]

PACKED_FORMATS = tuple(name for name, form in FORMATS.items() if form.is_packed)
BYTE_FORMATS = tuple(name for name, form in FORMATS.items() if form.activations)


def random_weight(
    name: str, n: int, k: int, seed: int = 0, *, scales: str = "float16", permuted: bool = False
) -> Weight:
    """Return a weight (n, k) in format `name`, scaled so that its products with normal x are O(1).

    Examples
    --------
    >>> random_weight("q4_0", 20, 70).data.shape
    (2, 2, 512)
    """
    form = FORMATS[name]
    rng = np.random.default_rng([seed, n, k])
    size = max(k, 1) ** -0.5 / (1 if form.code in ("e2m1", "e4m3") else 1 << (form.bits - 2))
    if form.activations:
        return _random_bytes(name, n, k, rng, size)
    codes = rng.integers(0, 1 << form.bits, (n, k)).astype(np.uint8)
    codes = codes.view(np.int8) if form.bits == 8 else codes
    groups = -(-k // form.group)
    order = rng.permutation(k).astype(np.int32) if permuted else None
    if form.code == "e2m1":
        exponents = rng.integers(-2, 2, (n, groups)) + int(np.log2(size)) + 127
        return pack_weight(form, codes, exponents.astype(np.uint8), permutation=order)
    if form.super_block:
        factors = rng.integers(1, 64, (n, groups)).astype(np.int8 if form.zero else np.uint8)
        mins = rng.integers(0, 64, (n, groups)).astype(np.uint8) if form.offset else None
        shape = (n, -(-k // form.super_block), *((2,) if form.offset else ()))
        supers = (rng.uniform(0.5, 1.5, shape) * size / 32).astype(np.float16)
        if form.offset:
            supers[..., 1] *= 1 << (form.bits - 1)
        return pack_weight(form, codes, factors, mins, supers, order)
    values = (rng.uniform(0.5, 1.5, (n, groups)) * size).astype(np_dtype(scales))
    offsets = None
    if form.offset == "zero":
        low = -20 if form.bits == 8 else 0
        offsets = rng.integers(low, low + (1 << min(form.bits, 5)), (n, groups))
    elif form.offset == "min":
        offsets = (-values.astype(np.float32) * (1 << (form.bits - 1))).astype(np_dtype(scales))
    return pack_weight(form, codes, values, offsets, permutation=order)


def _random_bytes(name: str, n: int, k: int, rng: Any, size: float) -> Weight:
    form = FORMATS[name]
    assert form.block is not None
    shape = (-(-n // form.block[0]), *((-(-k // form.block[1]),) if form.block[1] else ()))
    scales = (rng.uniform(0.5, 1.5, shape) * size).astype(np.float32)
    if form.code == "int":
        codes = rng.integers(-127, 128, (n, k)).astype(np.int8)
    else:
        codes = rng.standard_normal((n, k)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return Weight(form, codes, (n, k), scales=scales)


def weight_to(xp: Any, weight: Weight) -> Weight:
    """Return the weight with its arrays in module `xp`; e4m3 codes are uint8 on CUDA."""
    if xp is np:
        return weight
    arrays = dict(weight.arrays())
    if weight.format.code == "e4m3":
        arrays["data"] = arrays["data"].view(np.uint8)
    return replace(weight, **{name: xp.asarray(array) for name, array in arrays.items()})
