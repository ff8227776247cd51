"""Kernel and tiling choice of the dense GEMM: a pure function, testable without a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from engine.dtypes import itemsize
from engine.kernels._chip import PORTABLE, Limits
from engine.kernels._launch import ceil_div
from engine.kernels.gemm.skinny import (
    SkinnyConfig,
    choose_skinny,
    choose_skinny_in_parts,
    ring_configs,
)
from engine.kernels.gemm.sm90 import HopperConfig, choose_hopper, part_length

__all__ = ["KERNELS", "Config", "all_configs", "choose_config"]


@dataclass(frozen=True)
class Config:
    """A portable kernel and its tiling of the problem.

    Attributes
    ----------
    kernel : str
        Entry point, without the op's prefix.
    tile_m, tile_n : int
        Rows and columns of out per block.
    threads, shared_bytes : int
        Threads per block, and its dynamic shared memory in bytes.
    num_splits, k_per_split : int
        Blocks that share the sum over k of a tile, and the extent of k per block.
    """

    kernel: str
    tile_m: int
    tile_n: int
    threads: int
    shared_bytes: int
    num_splits: int
    k_per_split: int

    @property
    def is_skinny(self) -> bool:
        """Tell whether this is a direct skinny kernel, which loads weights to registers."""
        return self.kernel.startswith("skinny")

    def grid(self, m: int, n: int) -> tuple[int, int]:
        """Return the grid for a result of `m` rows and `n` columns."""
        rows = ceil_div(m, self.tile_m)
        cols = ceil_div(n, self.tile_n)
        return (cols, rows) if self.is_skinny else (rows * cols, self.num_splits)


@dataclass(frozen=True)
class _Tile:
    """A tiled kernel; `rate` is the multiply-adds per cycle of a fully occupied SM."""

    kernel: str
    tile_m: int
    tile_n: int
    threads: int
    stages: int
    blocks_per_sm: int
    rate: int
    gates: bool = True  # whether it can combine gate and up

    def config(self, k: int, num_splits: int = 1, step: int = 1) -> Config:
        """Return the config with `k` cut into `num_splits` shares, each a multiple of `step`."""
        shared = self.stages * (self.tile_m + self.tile_n) * 64
        share = max(step, ceil_div(ceil_div(k, num_splits), step) * step)
        splits = max(1, ceil_div(k, share))
        return Config(self.kernel, self.tile_m, self.tile_n, self.threads, shared, splits, share)


# Rates are estimated for Hopper from instruction and L2 throughput; only their ratios matter.
# `ENGINE_KERNEL_TIER=portable python -m tests.bench gemm` measures the choices.
_HALF_TILES = (
    _Tile("tile_128x256", 128, 256, 256, 4, 1, 1250),
    _Tile("tile_128x128", 128, 128, 128, 4, 2, 1000),
    _Tile("tile_64x128", 64, 128, 128, 5, 3, 800, gates=False),
    _Tile("tile_64x64", 64, 64, 128, 6, 4, 550),
)
_FLOAT_TILES = (
    _Tile("tile_128x128", 128, 128, 256, 4, 2, 90, gates=False),
    _Tile("tile_64x64", 64, 64, 256, 4, 3, 70),
)
_HALF_UNALIGNED = _Tile("unaligned_64x64", 64, 64, 128, 3, 3, 0)
_FLOAT_UNALIGNED = _Tile("unaligned_64x64", 64, 64, 256, 3, 3, 0)

# Tokens, weight rows and warps per block of the direct skinny kernels.
_HALF_DIRECT = ((8, 16, 8), (16, 32, 8), (32, 32, 8), (8, 16, 16), (16, 16, 16), (32, 16, 16))
_FLOAT_DIRECT = ((1, 4, 8), (8, 2, 8))
_DIRECT_MAX_M = {2: 8, 4: 16}  # maximum rows of x, by itemsize
# On Hopper, ring kernels take up to _RING_MAX_M rows of x, or _RING_MAX_M_SMALL if the weight has
# at most _SMALL_WEIGHT elements; tiles take more rows. If the weight has at least _LARGE_SIDE rows
# and columns, tiles take five rows or more; if k is over _LONG_K too, three or more. This minimises
# the time of a model step (`python -m tests.bench decode_loop`); alone, tiles are faster
# (docs/benchmarks/gemm_sm90.md).
_RING_MAX_M = 8
_RING_MAX_M_SMALL = 16
_SMALL_WEIGHT = 1 << 23
_LARGE_SIDE = 4096
_LONG_K = 8192

# Constants of `_estimate`, estimated for Hopper like the rates.
_BYTES_PER_CYCLE = 2400  # memory bandwidth of the chip
_TILE_CYCLES = 1500  # cycles of a block's prologue and epilogue
_REDUCE_CYCLES = 3000  # cycles of the second launch, which adds the splits
_MIN_SHARE_BYTES = 512  # minimum extent of k per split, in bytes of a row


@cache
def choose_config(
    m: int,
    n: int,
    k: int,
    dtype: str,
    sm_count: int,
    *,
    is_aligned: bool = True,
    deterministic: bool = False,
    is_hopper: bool = False,
    is_gated: bool = False,
    has_norm: bool = False,
    limits: Limits = PORTABLE,
) -> Config | HopperConfig | SkinnyConfig:
    """Choose the kernel for x (m, k) and weight (n, k) of `dtype` on `sm_count` multiprocessors.

    Few rows use a skinny kernel: the GEMV or a ring kernel if `limits` allow it, else a direct
    one. More rows use the tile and number of splits with the least estimated time. The order of
    summation depends on n and k alone in the direct kernels, on `num_parts` in the other skinny
    ones and on `num_splits` in the tiled ones; the last two also depend on m.

    Parameters
    ----------
    is_aligned : bool
        Rows start and end at multiples of 16 bytes.
    deterministic : bool
        Choose a kernel among those that sum a row in the same order: tiled kernels without splits;
        on Hopper, if k is short, tiles and skinny kernels that sum parts of k.
    is_hopper : bool
        Use the tiles of gemm_sm90.cu from nine rows on, from 17 if the weight is small, and from
        five or three if it is large.
    is_gated : bool
        The kernel must combine gate and up; some kernels cannot.
    has_norm : bool
        A norm is fused; with `deterministic` it must be one that a skinny kernel fuses.

    Examples
    --------
    >>> choose_config(1, 4096, 4096, "bfloat16", 132).kernel
    'skinny_ring_8'
    >>> choose_config(4096, 4096, 4096, "bfloat16", 132).kernel
    'tile_128x256'
    """
    size = itemsize(dtype)
    if not is_aligned:
        return (_HALF_UNALIGNED if size == 2 else _FLOAT_UNALIGNED).config(k)
    most = _ring_rows(n, k)
    if deterministic and is_hopper and k > 0:
        part_k = part_length(k)
        if m <= most and part_k:
            skinny = choose_skinny_in_parts(m, n, k, part_k, sm_count, limits, has_norm=has_norm)
            if skinny is not None:
                return skinny
        return choose_hopper(m, n, k, sm_count, deterministic=True, is_gated=is_gated)
    if not deterministic:
        prefers_tiles = is_hopper and m > most
        if size == 2 and not prefers_tiles:
            skinny = choose_skinny(m, n, k, sm_count, limits, has_norm=has_norm)
            if skinny is not None:
                return skinny
        if m <= _DIRECT_MAX_M[size] and not prefers_tiles and not (is_gated and size == 4):
            return _direct(m, n, k, size, sm_count)
    if is_hopper and k > 0:
        return choose_hopper(m, n, k, sm_count, is_gated=is_gated)
    step = 64 // size
    choices = [
        tile.config(k, splits, step)
        for tile in (_HALF_TILES if size == 2 else _FLOAT_TILES)
        if tile.gates or not is_gated
        for splits in (
            [1]
            if deterministic
            else _splits(ceil_div(m, tile.tile_m) * ceil_div(n, tile.tile_n), k, size, sm_count)
        )
    ]
    return min(choices, key=lambda config: _estimate(config, m, n, k, size, sm_count))


def _ring_rows(n: int, k: int) -> int:
    """Return the most rows of x that ring kernels take on Hopper."""
    if n * k <= _SMALL_WEIGHT:
        return _RING_MAX_M_SMALL
    if n < _LARGE_SIDE or k < _LARGE_SIDE:
        return _RING_MAX_M
    return 2 if k > _LONG_K else 4


def all_configs(k: int, dtype: str, *, is_gated: bool = False) -> list[Config | SkinnyConfig]:
    """Return every portable kernel, with and without splits of `k`, for tests and tuning.

    All support any number of rows; all but "unaligned" need rows of a multiple of 16 bytes.
    """
    is_half = itemsize(dtype) == 2
    tiles = _HALF_TILES if is_half else _FLOAT_TILES
    step = 64 // itemsize(dtype)
    return [
        *(
            tile.config(k, splits, step)
            for tile in tiles
            for splits in (1, 2, 5)
            if tile.gates or not is_gated
        ),
        (_HALF_UNALIGNED if is_half else _FLOAT_UNALIGNED).config(k),
        *(
            _direct_config(*s, k)
            for s in (_HALF_DIRECT if is_half else () if is_gated else _FLOAT_DIRECT)
        ),
        *(ring_configs(k) if is_half else ()),
    ]


def _direct(m: int, n: int, k: int, size: int, sm_count: int) -> Config:
    """Choose a direct skinny kernel. The number of warps that share k depends on n, not on m."""
    if size == 4:
        return _direct_config(*_FLOAT_DIRECT[0 if m <= 1 else 1], k)
    # Many weight rows: blocks of eight warps, several per multiprocessor. Few weight rows: sixteen
    # warps per block, to keep enough loads in flight.
    warps = 8 if n >= 64 * sm_count else 16
    return _direct_config(*next(s for s in _HALF_DIRECT if s[0] >= m and s[2] == warps), k)


def _direct_config(tokens: int, rows: int, warps: int, k: int) -> Config:
    return Config(_direct_name(tokens, rows, warps), tokens, rows, warps * 32, 0, 1, k)


def _direct_name(tokens: int, rows: int, warps: int) -> str:
    return f"skinny_direct_{tokens}x{rows}_w{warps}"


KERNELS = tuple(
    dict.fromkeys(
        (
            *(tile.kernel for tile in (*_HALF_TILES, *_FLOAT_TILES, _HALF_UNALIGNED)),
            *(_direct_name(*sizes) for sizes in (*_HALF_DIRECT, *_FLOAT_DIRECT)),
        )
    )
)
"""The entry points of portable kernels, without the op's prefix."""


def _splits(tiles: int, k: int, size: int, sm_count: int) -> list[int]:
    """Return the candidate split counts: more than one only if there are few tiles."""
    most = min(16, 4 * sm_count // max(1, tiles), k * size // _MIN_SHARE_BYTES)
    return [s for s in (1, 2, 3, 4, 6, 8, 12, 16) if s <= max(1, most)]


def _estimate(config: Config, m: int, n: int, k: int, size: int, sm_count: int) -> float:
    """Return the estimated cycles of a tiled configuration."""
    tile = next(
        t for t in (_HALF_TILES if size == 2 else _FLOAT_TILES) if t.kernel == config.kernel
    )
    blocks = math.prod(config.grid(m, n))
    per_sm = ceil_div(blocks, sm_count)
    resident = min(per_sm, tile.blocks_per_sm)
    rate = tile.rate * (1 + resident / tile.blocks_per_sm) / 2  # few blocks hide less latency
    compute = per_sm * tile.tile_m * tile.tile_n * config.k_per_split / rate
    memory = (m + n) * k * size / _BYTES_PER_CYCLE
    waves = ceil_div(per_sm, tile.blocks_per_sm)
    overlapped = max(compute, memory) + min(compute, memory) / 4  # imperfect overlap
    cycles = overlapped + waves * _TILE_CYCLES
    if config.num_splits > 1:
        cycles += _REDUCE_CYCLES + 2 * config.num_splits * m * n * 4 / _BYTES_PER_CYCLE
    return cycles
