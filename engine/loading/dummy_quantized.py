"""Random weights generated directly in a quantized format: random codes, equal scales."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from engine.device import Device
from engine.weights import Format, Weight
from engine.weights.formats import TILE_COLUMNS, TILE_ROWS, padded_shape
from engine.weights.packing import pack_codes, unpack_codes

__all__ = ["RandomCodes"]

Array = np.ndarray[Any, Any]

_PLANES = {4: (512, 0), 5: (512, 128), 6: (512, 256), 8: (1024, 0)}  # plane bytes per tile


class RandomCodes:
    """Generator of weights with about the same standard deviation as a pool of normal numbers.

    Parameters
    ----------
    form : Format
        A quantized format.
    pool : (P,) array of float32
        Normally distributed numbers.
    device : Device
    tiled : callable
        ``tiled(array, shape, start)`` repeats an array, starting at its element `start`.
    """

    def __init__(
        self, form: Format, pool: Array, device: Device, tiled: Callable[..., Any]
    ) -> None:
        self.form = form
        self.xp = device.xp
        self._tiled = tiled
        self._std = np.float32(pool.std())
        codes, self._scale = self._codes(pool)
        self._pool = self.xp.asarray(codes)

    def weight(
        self, shape: tuple[int, ...], start: int, take: Callable[[Any], Any] | None = None
    ) -> Weight:
        """Return a weight of `shape`, (N, K) or (E, N, K), starting at element `start` of the pool.

        `take`, if given, cuts a shard out of the codes. The scales need no cutting: all are equal.
        """
        form = self.form
        if not form.is_packed:
            data = self._tiled(self._pool, shape, start)
            data = data if take is None else take(data)
            if form.code == "int":
                data = data.view("i1")
            *experts, rows, columns = data.shape
            high, wide = form.block or (1, 0)
            blocks = [rows] if wide == 0 else [-(-rows // high), -(-columns // wide)]
            scales = self._filled((*experts, *blocks), self._scale, np.float32)
            return Weight(form, data, data.shape, scales=scales)
        tiles = _tiles(shape)
        low, high_bits = (
            self._tiled(self._pool, (*tiles, size), start) if size else None
            for size in _PLANES[form.bits]
        )
        if take is not None:
            matrix = math.prod(shape[:-1]), shape[-1]
            codes = take(unpack_codes(low, high_bits, form.bits, matrix).reshape(shape))
            shape = codes.shape
            low, high_bits = pack_codes(codes.reshape(-1, shape[-1]), form.bits)
        scales, supers = self._scales(_tiles(shape))
        return Weight(form, low, shape, scales=scales, high=high_bits, super_scales=supers)

    def _codes(self, pool: Array) -> tuple[Array, float]:
        """Return a pool of bytes, and the scale that yields the target standard deviation."""
        if self.form.is_packed:  # uniform, because a plane's byte holds bits of several codes
            random = np.random.default_rng(len(pool)).integers(0, 256, len(pool))
            spread = np.sqrt((4.0**self.form.bits - 1) / 12)
            return random.astype(np.uint8), float(self._std / spread)
        most = 448 if self.form.code == "e4m3" else 127
        scale = np.abs(pool).max() / np.float32(most)
        if self.form.code == "e4m3":
            return (pool / scale).astype(ml_dtypes.float8_e4m3fn).view(np.uint8), float(scale)
        return np.rint(pool / scale).astype(np.int8).view(np.uint8), float(scale)

    def _scales(self, tiles: tuple[int, int]) -> tuple[Any, Any]:
        """Return the scales and super-scales of a packed weight; all groups have equal ones.

        Offsets centre the numbers on 0.
        """
        form = self.form
        scale = self._scale
        columns = tiles[1] * TILE_COLUMNS
        groups = (tiles[0], -(-columns // form.group), 8, 2)
        middle = (2.0**form.bits - 1) / 2 if form.bits < 8 else -0.5
        if form.code == "e2m1":  # standard deviation of uniform e2m1 codes: 3
            exponent = round(float(np.log2(self._std / 3))) + 127
            return self._filled(groups, exponent, np.uint8), None
        if not form.super_block:
            if not form.offset:
                return self._filled(groups, scale, np.float16), None
            offset = np.rint(middle) if form.offset == "zero" else -scale * middle
            return self._pairs(groups, scale, offset, np.float16), None
        supers = (tiles[0], -(-columns // form.super_block), 8, 2)
        if not form.offset:
            return self._filled(groups, 32, np.int8), self._filled(supers, scale / 32, np.float16)
        d = scale / 32
        dmin = scale * middle / 32
        return self._pairs(groups, 32, 32, np.uint8), self._pairs(supers, d, dmin, np.float16)

    def _filled(self, shape: tuple[int, ...], value: Any, dtype: Any) -> Any:
        return self.xp.asarray(np.full(shape, value, dtype))

    def _pairs(self, shape: tuple[int, ...], first: Any, second: Any, dtype: Any) -> Any:
        pairs = np.empty((*shape, 2), dtype)
        pairs[..., 0] = first
        pairs[..., 1] = second
        return self.xp.asarray(pairs)


def _tiles(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of row tiles and column tiles of a packed weight."""
    rows, columns = padded_shape((math.prod(shape[:-1]), shape[-1]))
    return rows // TILE_ROWS, columns // TILE_COLUMNS
