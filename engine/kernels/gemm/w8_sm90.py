"""gemm_fp8 and gemm_int8 on Hopper (`gemm_fp8_sm90.cu`): tile choice and launch.

It uses the tiles of gemm_sm90.cu (`sm90.py`), with two codes in place of each 16-bit value.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from engine.kernels._chip import HOPPER_DTYPES
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels.gemm.sm90 import (
    MAX_FEW_ROWS,
    FewRowsCost,
    HopperConfig,
    OutVector,
    Sending,
    TileCost,
    choose_swapped,
    fastest_sender,
    launch_tiles,
    swapped_configs,
)

__all__ = ["choose_w8_hopper", "choose_w8_sender", "launch_w8_hopper", "w8_configs"]
__all__ += ["w8_hopper_specs"]

_PARAMS = (
    "map_x:tmap map_tail:tmap map_w:tmap map_out:tmap x_scales:ptr weight_scales:ptr bias:ptr "
    "residual:ptr residual_stride:i64 out:ptr out_stride:i64 m:i32 n:i32 k:i32 band:i32 x_part:i32 "
    "tail_part:i32 stages:i32 early:i32 uses_pdl:i32 num_gates:i32 activation:i32 is_float:i32 "
    "out_vector:i32 peers:ptr sent_rows:i32 segment:i32"
)
_KERNELS = {
    codes: Kernel(f"gemm_{codes}_sm90", _PARAMS, struct="GemmW8Sm90Params")
    for codes in ("fp8", "int8")
}
_CODES = {"fp8": 1, "int8": 2}  # values of the macro CODES
_BLOCK = 128  # rows and columns of a scale block: only swapped tiles may straddle two

# Costs for over MAX_FEW_ROWS rows of x, in microseconds on an H200: per launch, per tile without
# its stages, per stage of a tile. Fitted to six layers of e4m3 at 16 to 4096 rows, launched with
# pdl. `python -m tests.bench gemm_fp8` times the choices.
_TILES: dict[HopperConfig, TileCost] = {
    HopperConfig(256, 128, cluster_n=2): TileCost(0.1, 4.12, 0.64),
    HopperConfig(128, 128): TileCost(0.56, 3.01, 0.346),
    HopperConfig(128, 96, cluster_m=2): TileCost(1.23, 2.13, 0.29),
    HopperConfig(128, 64): TileCost(1.23, 1.62, 0.242),
    HopperConfig(128, 128, cluster_k=2): TileCost(1.73, 1.73, 0.369),
    HopperConfig(128, 64, cluster_k=2): TileCost(1.53, 1.53, 0.264),
    HopperConfig(64, 64): TileCost(1.58, 1.2, 0.192),
    HopperConfig(64, 64, cluster_k=2): TileCost(1.6, 1.3, 0.25),
    HopperConfig(64, 64, cluster_k=4): TileCost(1.7, 1.4, 0.4),
}

# Tiles that may send rows to other ranks while the next tiles are multiplied.
_SENDERS = (HopperConfig(256, 128, cluster_n=2), HopperConfig(128, 128))
# As for 16 bits, with `all_reduce` after the product: a norm that quantizes sums apart.
_BYTES_PER_US_SAVED = 5e5

# Cost model for up to MAX_FEW_ROWS rows of x. Fitted to ten layers of e4m3 at 8 to 64 rows, with
# scales by row and by block, launched with pdl (docs/benchmarks/gemm_sm90.json).
_FEW_ROWS_COST = FewRowsCost(
    bytes_per_us=3.93e6,
    launch_us=1.85,
    row_us=0.00737,
    slab_us=0.0426,
    column_us=0.0013,
    row_columns=0.032,
    cluster_us={1: 0.0, 2: 0.195, 4: 0.322},
)
# Configurations for few rows, and the microseconds to add to that cost.
_FEW_ROWS: dict[HopperConfig, float] = {
    HopperConfig(64, 48, depth=2): -0.04,
    HopperConfig(64, 64): -0.16,
    HopperConfig(64, 64, depth=2): 0.06,
    HopperConfig(64, 128): -0.27,
    HopperConfig(64, 48, cluster_k=2, depth=2): -0.34,
    HopperConfig(64, 64, cluster_k=2, depth=2): 0.3,
    HopperConfig(64, 64, cluster_k=4): -0.01,
}

# Further tiles for `deterministic`, which rules out split-k: narrow ones keep more multiprocessors
# busy. Those for over MAX_FEW_ROWS rows are extrapolated from the constants above, not fitted.
_NARROW_TILES: dict[HopperConfig, TileCost] = {
    HopperConfig(64, 32): TileCost(1.58, 1.2, 0.13),
    HopperConfig(64, 16): TileCost(1.58, 1.2, 0.1),
}
_NARROW_FEW_ROWS: dict[HopperConfig, float] = {HopperConfig(64, 32, depth=2): 0.4}


# Swapped tiles: minimum k for which they are faster, and maximum rows of x, without and with scales
# by group.
_SWAPPED_MIN_K = 2048
_SWAPPED_MAX_ROWS = {False: 32, True: 16}


def w8_configs(
    codes: str, *, has_blocks: bool = False, deterministic: bool = False
) -> tuple[HopperConfig, ...]:
    """Return the candidate tiles; with block scales, swapped ones or within a block's columns.

    With `deterministic`, all sum a row in the same order: the products of a slab (128 codes) on
    tensor cores, then the slabs in ascending order in float32.
    """
    configs = [*_TILES, *_FEW_ROWS]
    if deterministic:
        configs += [*_NARROW_TILES, *_NARROW_FEW_ROWS]
    tiles = (
        c
        for c in dict.fromkeys(configs)
        if (not has_blocks or _BLOCK % c.tile_n == 0) and (c.sums_in_order or not deterministic)
    )
    rows = _SWAPPED_MAX_ROWS[_has_groups(codes, has_blocks=has_blocks)]
    swapped = swapped_configs(deterministic=deterministic)
    return (*tiles, *(c for c in swapped if c.tile_m <= rows))


def _has_groups(codes: str, *, has_blocks: bool) -> bool:
    """Tell whether x has a scale per group of k."""
    return has_blocks or codes == "int8"


def w8_hopper_specs(
    codes: str, dtype: str, *, deterministic: bool = False, sends: bool = False
) -> tuple[ModuleSpec, ...]:
    """Return the modules that `launch_w8_hopper` may launch; `sends`: also with peers."""
    if dtype not in HOPPER_DTYPES:
        return ()
    blocks = (False, True) if codes == "fp8" else (False,)
    modes = (False, True) if deterministic else (False,)
    found = [
        _spec(config, codes, dtype, has_blocks=has_blocks)
        for has_blocks in blocks
        for mode in modes
        for config in w8_configs(codes, has_blocks=has_blocks, deterministic=mode)
    ]
    found += [
        _spec(config, codes, dtype, has_blocks=has_blocks, sends=True)
        for has_blocks in blocks
        for config in (_SENDERS if sends else ())
    ]
    return tuple(dict.fromkeys(found))


def _spec(
    config: HopperConfig, codes: str, dtype: str, *, has_blocks: bool, sends: bool = False
) -> ModuleSpec:
    tile = config.spec(dtype, sends=sends).defines
    own = (("CODES", _CODES[codes]), ("BLOCKS", int(has_blocks)))
    return ModuleSpec(f"gemm/gemm_{codes}_sm90.cu", dtype, (*tile, *own))


@cache
def choose_w8_hopper(
    codes: str,
    m: int,
    n: int,
    k: int,
    sm_count: int,
    *,
    has_blocks: bool = False,
    deterministic: bool = False,
    is_gated: bool = False,
) -> HopperConfig:
    """Choose the tile with the least estimated time for x (m, k) and weight (n, k), both aligned.

    Examples
    --------
    >>> chosen = choose_w8_hopper("fp8", 4096, 24576, 4096, 132)
    >>> chosen == HopperConfig(256, 128, cluster_n=2)
    True
    """
    swapped_rows = _SWAPPED_MAX_ROWS[_has_groups(codes, has_blocks=has_blocks)]
    if m <= swapped_rows and (k >= _SWAPPED_MIN_K or deterministic):
        swapped = choose_swapped(m, n, sm_count, deterministic=deterministic)
        if swapped is not None:
            return swapped
    pairs = ceil_div(k, 2)
    few_rows = _FEW_ROWS | _NARROW_FEW_ROWS if deterministic else _FEW_ROWS
    tiles = _TILES | _NARROW_TILES if deterministic else _TILES
    candidates = few_rows if m <= MAX_FEW_ROWS else tiles

    def is_possible(config: HopperConfig) -> bool:
        return config in candidates and config.is_supported(
            m, n, pairs, sm_count, is_gated=is_gated
        )

    def estimate(config: HopperConfig) -> float:
        if m <= MAX_FEW_ROWS:
            return _FEW_ROWS_COST.us(config, m, n, pairs, sm_count) + few_rows[config]
        return tiles[config].us(config, m, n, pairs, sm_count)

    configs = w8_configs(codes, has_blocks=has_blocks, deterministic=deterministic)
    return min(filter(is_possible, configs), key=estimate)


@cache
def choose_w8_sender(
    plain: HopperConfig, m: int, n: int, k: int, sm_count: int
) -> tuple[HopperConfig, int]:
    """Choose the tile and the rows to send; see `choose_sender`."""
    pairs = ceil_div(k, 2)
    us = {c: _TILES[c].us(c, m, n, pairs, sm_count) for c in (plain, *_SENDERS)}
    return fastest_sender(us, _SENDERS, m, n, pairs, sm_count, _BYTES_PER_US_SAVED)


def launch_w8_hopper(
    config: HopperConfig,
    codes: str,
    dtype: str,
    x: Any,
    weight: Any,
    out: Any,
    arguments: dict[str, Any],
    out_vector: OutVector,
    *,
    has_blocks: bool,
    pdl: bool = False,
    is_split: bool = False,
    sending: Sending | None = None,
) -> None:
    """Launch on CuPy arrays of codes, x (M, K) and weight (N, K). See `launch_tiles`."""
    spec = _spec(config, codes, dtype, has_blocks=has_blocks, sends=sending is not None)
    launch_tiles(
        _KERNELS[codes],
        spec,
        config,
        x,
        weight,
        out,
        arguments,
        out_vector,
        pdl=pdl,
        is_split=is_split,
        sending=sending,
    )
