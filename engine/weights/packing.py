"""Memory layout of 4-bit to 8-bit codes, for GEMMs with 16-bit activations.

A weight (N, K) is cut into tiles of 16 rows x 64 columns. A warp reads a tile in one load, 16 bytes
per lane, and each lane then holds exactly its own tensor-core fragments (mma.m16n8k16 with the
weight as A, or wgmma with A in registers). Lane 4g + t holds rows g and g + 8 and, in each of the
tile's four 16-column steps, columns 2t, 2t + 1, 2t + 8 and 2t + 9. Let s be the step,
j = (row // 8) + 2 (column // 8) the fragment register, and e = column % 2 its half:

    data, 4 bits or the low 4    (N/16, K/64, 512) uint8: 32-bit word s of lane l, bits 4 (j + 4e)
    data, 8 bits                 (N/16, K/64, 1024): word 2 (s % 2) + j // 2 of lane l of half
                                 s // 2, byte j % 2 + 2e
    high, the fifth bit          (N/16, K/64, 128): word of lane l, bit j + 4s + 16e
    high, bits 5 and 6           (N/16, K/64, 256): word s // 2 of lane l,
                                 bits 2 (j + 4 (s % 2) + 8e)

One shift and one mask thus yield a register of two numbers. The scale of a row and group is stored
at [row // 16, group, row % 8, row // 8 % 2], the order in which lanes read scales. Rows and columns
are padded to whole tiles with codes 0 and scales 0.

All functions accept NumPy and CuPy arrays.
"""

from __future__ import annotations

from typing import Any

from engine.device import array_module
from engine.errors import WeightsError
from engine.weights.formats import TILE_COLUMNS, TILE_ROWS, padded_shape

__all__ = ["TILE_COLUMNS", "TILE_ROWS", "pack_codes", "tile_groups", "unpack_codes"]
__all__ += ["untile_groups"]

# Axes of a tile's codes: row // 8 % 2, row % 8, step, column // 8 % 2, t, column % 2.
_AXES = (2, 8, 4, 2, 4, 2)
_HI, _G, _S, _H8, _T, _E = range(6)
# Order of the codes in each plane, from the most to the least significant position.
_LOW = (_G, _T, _S, _E, _H8, _HI)
_BIT5 = (_G, _T, _E, _S, _H8, _HI)


def pack_codes(codes: Any, bits: int) -> tuple[Any, Any]:
    """Split codes into bit planes (data, high); high is None for 4 and 8 bits.

    Parameters
    ----------
    codes : (N, K) array of uint8, or int8 for 8 bits
        Below 2**bits.
    bits : int
        4, 5, 6 or 8.

    Examples
    --------
    >>> import numpy as np
    >>> data, high = pack_codes(np.ones((20, 64), np.uint8), 4)
    >>> data.shape, int(data[0, 0, 0]), int(data[1, 0, 0]), high
    ((2, 1, 512), 17, 1, None)
    """
    if bits not in (4, 5, 6, 8):
        raise WeightsError(f"bits must be 4, 5, 6 or 8; got {bits}")
    tiles = _tiles(codes.view("u1"))
    if bits == 8:
        return _pack_bytes(tiles), None
    data = _pack_bits(_ordered(tiles & 15, _LOW), 4)
    if bits == 4:
        return data, None
    if bits == 5:
        return data, _pack_bits(_ordered(tiles >> 4, _BIT5), 1)
    return data, _pack_bits(_split_steps(tiles >> 4), 2)


def unpack_codes(data: Any, high: Any, bits: int, shape: tuple[int, int]) -> Any:
    """Reassemble the codes (N, K) of `shape` from their planes: int8 for 8 bits, else uint8."""
    if bits == 8:
        return _untiled(_unpack_bytes(data), shape).view("i1")
    tiles = _restored(_unpack_bits(data, 4), _LOW)
    if bits == 5:
        tiles |= _restored(_unpack_bits(high, 1), _BIT5) << 4
    elif bits == 6:
        tiles |= _joined_steps(_unpack_bits(high, 2)) << 4
    return _untiled(tiles, shape)


def tile_groups(values: Any) -> Any:
    """Return values (N, G, ...) as (N/16, G, 8, 2, ...); rows are padded with zeros.

    Examples
    --------
    >>> import numpy as np
    >>> tile_groups(np.arange(16)[:, None])[0, 0, 3]
    array([ 3, 11])
    """
    xp = array_module(values)
    rows, groups, *rest = values.shape
    padded = xp.zeros((-(-rows // TILE_ROWS) * TILE_ROWS, groups, *rest), values.dtype)
    padded[:rows] = values
    tiled = padded.reshape(len(padded) // TILE_ROWS, 2, 8, groups, *rest)
    return xp.ascontiguousarray(xp.moveaxis(tiled, (3, 1), (1, 3)))


def untile_groups(tiled: Any, num_rows: int) -> Any:
    """Undo `tile_groups`: return the values (N, G, ...) of `num_rows` rows."""
    xp = array_module(tiled)
    tiles, groups, _, _, *rest = tiled.shape
    rows = xp.moveaxis(tiled, (1, 3), (3, 1)).reshape(tiles * TILE_ROWS, groups, *rest)
    return rows[:num_rows]


def _tiles(codes: Any) -> Any:
    """Return codes (N, K), padded with zeros, as (N/16, K/64, *_AXES)."""
    xp = array_module(codes)
    rows, columns = codes.shape
    padded = xp.zeros(padded_shape(codes.shape), codes.dtype)
    padded[:rows, :columns] = codes
    high = padded.shape[0] // TILE_ROWS
    wide = padded.shape[1] // TILE_COLUMNS
    return xp.moveaxis(padded.reshape(high, *_AXES[:2], wide, *_AXES[2:]), 3, 1)


def _untiled(tiles: Any, shape: tuple[int, int]) -> Any:
    xp = array_module(tiles)
    high, wide = tiles.shape[:2]
    rows = xp.moveaxis(tiles, 1, 3).reshape(high * TILE_ROWS, wide * TILE_COLUMNS)
    return xp.ascontiguousarray(rows[: shape[0], : shape[1]])


def _ordered(tiles: Any, axes: tuple[int, ...]) -> Any:
    return tiles.transpose(0, 1, *(2 + axis for axis in axes)).reshape(*tiles.shape[:2], 1024)


def _restored(codes: Any, axes: tuple[int, ...]) -> Any:
    """Undo `_ordered`."""
    ordered = codes.reshape(*codes.shape[:2], *(_AXES[axis] for axis in axes))
    return ordered.transpose(0, 1, *(2 + axes.index(axis) for axis in range(len(_AXES))))


def _split_steps(tiles: Any) -> Any:
    """Return every code's two high bits in memory order: like _BIT5, but one word per two steps."""
    # hi, g, s // 2, s % 2, h8, t, e -> g, t, s // 2, e, s % 2, h8, hi
    pairs = tiles.reshape(*tiles.shape[:2], 2, 8, 2, 2, 2, 4, 2)
    return pairs.transpose(0, 1, 3, 7, 4, 8, 5, 6, 2).reshape(*tiles.shape[:2], 1024)


def _joined_steps(codes: Any) -> Any:
    """Undo `_split_steps`."""
    pairs = codes.reshape(*codes.shape[:2], 8, 4, 2, 2, 2, 2, 2)
    return pairs.transpose(0, 1, 8, 2, 4, 6, 7, 3, 5).reshape(*codes.shape[:2], *_AXES)


def _pack_bits(codes: Any, bits: int) -> Any:
    """Pack 8 / bits codes into each uint8, lowest bits first."""
    xp = array_module(codes)
    per_byte = 8 // bits
    parts = codes.reshape(*codes.shape[:-1], codes.shape[-1] // per_byte, per_byte)
    packed = xp.zeros(parts.shape[:-1], "u1")
    for place in range(per_byte):
        packed |= parts[..., place] << (bits * place)
    return packed


def _unpack_bits(packed: Any, bits: int) -> Any:
    """Undo `_pack_bits`."""
    xp = array_module(packed)
    per_byte = 8 // bits
    mask = (1 << bits) - 1
    codes = xp.empty((*packed.shape, per_byte), "u1")
    for place in range(per_byte):
        codes[..., place] = (packed >> (bits * place)) & mask
    return codes.reshape(*packed.shape[:-1], packed.shape[-1] * per_byte)


def _pack_bytes(tiles: Any) -> Any:
    """Return 8-bit codes in memory order: s // 2, g, t, s % 2, h8, e, hi."""
    xp = array_module(tiles)
    halves = tiles.reshape(*tiles.shape[:2], 2, 8, 2, 2, 2, 4, 2)
    ordered = halves.transpose(0, 1, 4, 3, 7, 5, 6, 8, 2)
    return xp.ascontiguousarray(ordered).reshape(*tiles.shape[:2], 1024)


def _unpack_bytes(data: Any) -> Any:
    """Undo `_pack_bytes`."""
    halves = data.reshape(*data.shape[:2], 2, 8, 4, 2, 2, 2, 2)
    return halves.transpose(0, 1, 8, 3, 2, 5, 6, 4, 7).reshape(*data.shape[:2], *_AXES)
