"""NumPy dequantization of the supported .gguf tensor formats.

A quantized tensor is a sequence of blocks of float16 scales and packed small integers. Decoders
convert whole blocks to float32 with the same order of operations as the `gguf` package, the tests'
reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.dtypes import BFLOAT16
from engine.weights.values import E2M1, E8M0

__all__ = ["FORMATS", "QuantFormat"]

Array = np.ndarray[Any, Any]

_GROUP_WEIGHTS = 1 << 16
"""Weights decoded at a time; all intermediates stay in the L2 cache."""


@dataclass(frozen=True)
class QuantFormat:
    """A ggml tensor type.

    Attributes
    ----------
    name : str
        ggml's name.
    block : int
        Weights per block.
    itemsize : int
        Bytes per block.
    dtype : numpy dtype or None
        Dtype of an unquantized format; such data is viewed, not decoded.
    unpack : callable or None
        Decoder of a quantized format: (blocks (n, itemsize) uint8, out (n, block) float32) -> None.
    """

    name: str
    block: int
    itemsize: int
    dtype: np.dtype[Any] | None = None
    unpack: Callable[[Array, Array], None] | None = None

    def nbytes(self, count: int) -> int:
        """Return the size in bytes of `count` weights, a multiple of the block."""
        return count // self.block * self.itemsize

    def decode(self, raw: Array) -> Array:
        """Return the 1-D weights stored in bytes `raw`: a view, or float32 if quantized."""
        if self.dtype is not None:
            return raw.view(self.dtype)
        assert self.unpack is not None
        blocks = raw.reshape(-1, self.itemsize)
        out = np.empty((len(blocks), self.block), np.float32)
        step = max(1, _GROUP_WEIGHTS // self.block)
        for first in range(0, len(blocks), step):
            self.unpack(blocks[first : first + step], out[first : first + step])
        return out.reshape(-1)


def _float16(blocks: Array, start: int, stop: int) -> Array:
    """Return the float16 values in bytes [start, stop) of every block, as float32."""
    return np.ascontiguousarray(blocks[:, start:stop]).view("<f2").astype(np.float32)


def _nibbles(packed: Array, out: Array) -> None:
    """Write the low nibbles of `packed` (n, b) to out[:, 0], the high ones to out[:, 1]."""
    np.bitwise_and(packed, 15, out=out[:, 0])
    np.right_shift(packed, 4, out=out[:, 1])


def _unpack_q8_0(blocks: Array, out: Array) -> None:
    """w = d·q; block: d float16, q 32 int8."""
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _float16(blocks, 0, 2)


def _unpack_q4_0(blocks: Array, out: Array) -> None:
    """w = d·(q - 8); block: d float16, q 32 nibbles (low ones first)."""
    q = np.empty((len(blocks), 2, 16), np.uint8)
    _nibbles(blocks[:, 2:], q)
    out[:] = q.reshape(-1, 32)
    out -= 8
    out *= _float16(blocks, 0, 2)


def _unpack_q4_1(blocks: Array, out: Array) -> None:
    """w = d·q + m; block: d, m float16, q 32 nibbles (low ones first)."""
    q = np.empty((len(blocks), 2, 16), np.uint8)
    _nibbles(blocks[:, 4:], q)
    out[:] = q.reshape(-1, 32)
    scales = _float16(blocks, 0, 4)
    out *= scales[:, :1]
    out += scales[:, 1:]


def _five_bits(blocks: Array, start: int) -> Array:
    """Return 32 5-bit codes, stored as a word of high bits at byte `start`, then 32 nibbles."""
    q = np.empty((len(blocks), 2, 16), np.uint8)
    _nibbles(blocks[:, start + 4 :], q)
    high = np.ascontiguousarray(blocks[:, start : start + 4])
    return q.reshape(-1, 32) | (np.unpackbits(high, axis=1, bitorder="little") << 4)


def _unpack_q5_0(blocks: Array, out: Array) -> None:
    """w = d·(q - 16); block: d float16, 32 high bits of q, 32 low nibbles (low half first)."""
    out[:] = _five_bits(blocks, 2)
    out -= 16
    out *= _float16(blocks, 0, 2)


def _unpack_q5_1(blocks: Array, out: Array) -> None:
    """w = d·q + m; block: d, m float16, 32 high bits of q, 32 low nibbles (low half first)."""
    out[:] = _five_bits(blocks, 4)
    scales = _float16(blocks, 0, 4)
    out *= scales[:, :1]
    out += scales[:, 1:]


def _unpack_mxfp4(blocks: Array, out: Array) -> None:
    """w = 2^(e - 127)·fp4(q); block: e uint8, q 32 nibbles (low ones first)."""
    q = np.empty((len(blocks), 2, 16), np.uint8)
    _nibbles(blocks[:, 1:], q)
    out[:] = E2M1[q.reshape(-1, 32)]
    with np.errstate(over="ignore"):
        out *= E8M0[blocks[:, :1]]


def _unpack_q4_k(blocks: Array, out: Array) -> None:
    """w = (d·s)·q - (e·t); block of 8 groups of 32: d, e float16, s, t 6 bits per group, q."""
    _scale_k(blocks, _k_nibbles(blocks, 16), out)


def _unpack_q5_k(blocks: Array, out: Array) -> None:
    """Q4_K plus a plane of fifth bits before the nibbles; bit g of a byte belongs to group g."""
    q = _k_nibbles(blocks, 48)
    for group in range(8):
        q[:, group] |= ((blocks[:, 16:48] >> group) & 1) << 4
    _scale_k(blocks, q, out)


def _k_nibbles(blocks: Array, start: int) -> Array:
    """Return nibbles (n, 8, 32) from byte `start`: of each 32 bytes the low ones, then the high."""
    q = np.empty((len(blocks) * 4, 2, 32), np.uint8)
    _nibbles(np.ascontiguousarray(blocks[:, start:]).reshape(-1, 32), q)
    return q.reshape(-1, 8, 32)


def _scale_k(blocks: Array, q: Array, out: Array) -> None:
    """Dequantize codes q (n, 8, 32) into `out`."""
    low, mid, high = (blocks[:, 4 + 4 * i : 8 + 4 * i] for i in range(3))
    s = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=1)
    t = np.concatenate([mid & 63, (high >> 4) | ((mid >> 2) & 48)], axis=1)
    scales = _float16(blocks, 0, 4)
    groups = out.reshape(-1, 8, 32)
    groups[:] = q
    groups *= (scales[:, :1] * s)[:, :, None]
    groups -= (scales[:, 1:] * t)[:, :, None]


def _unpack_q6_k(blocks: Array, out: Array) -> None:
    """w = (d·s)·(q - 32); block of 16 groups of 16: q low 4 bits, q high 2 bits, s int8, d."""
    n = len(blocks)
    q = np.empty((n * 2, 4, 32), np.uint8)
    low = np.ascontiguousarray(blocks[:, :128]).reshape(n * 2, 64)
    high = np.ascontiguousarray(blocks[:, 128:192]).reshape(n * 2, 32)
    _nibbles(low, q.reshape(n * 2, 2, 64))
    for quarter in range(4):
        q[:, quarter] |= ((high >> (2 * quarter)) & 3) << 4
    scales = _float16(blocks, 208, 210) * blocks[:, 192:208].view(np.int8)
    groups = out.reshape(n, 16, 16)
    groups[:] = q.reshape(n, 16, 16)
    groups -= 32
    groups *= scales[:, :, None]


FORMATS: dict[int, QuantFormat] = {
    0: QuantFormat("F32", 1, 4, dtype=np.dtype("<f4")),
    1: QuantFormat("F16", 1, 2, dtype=np.dtype("<f2")),
    30: QuantFormat("BF16", 1, 2, dtype=BFLOAT16),
    2: QuantFormat("Q4_0", 32, 18, unpack=_unpack_q4_0),
    3: QuantFormat("Q4_1", 32, 20, unpack=_unpack_q4_1),
    6: QuantFormat("Q5_0", 32, 22, unpack=_unpack_q5_0),
    7: QuantFormat("Q5_1", 32, 24, unpack=_unpack_q5_1),
    8: QuantFormat("Q8_0", 32, 34, unpack=_unpack_q8_0),
    12: QuantFormat("Q4_K", 256, 144, unpack=_unpack_q4_k),
    13: QuantFormat("Q5_K", 256, 176, unpack=_unpack_q5_k),
    14: QuantFormat("Q6_K", 256, 210, unpack=_unpack_q6_k),
    39: QuantFormat("MXFP4", 32, 17, unpack=_unpack_mxfp4),
}
"""Supported formats by ggml type number."""
