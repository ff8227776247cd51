"""gemm on Hopper (`gemm_sm90.cu`): tile choice and launch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache, partial
from typing import Any, NamedTuple

from engine.dtypes import dtype_name
from engine.kernels._chip import HOPPER, HOPPER_DTYPES, sm_count
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._peer_memory import PeerMemory
from engine.kernels._tensor_map import tensor_map, tensor_map_2d

__all__ = [
    "HOPPER_CONFIGS",
    "MAX_FEW_ROWS",
    "NARROW_CONFIGS",
    "PART_CONFIGS",
    "FewRowsCost",
    "HopperConfig",
    "OutVector",
    "Sending",
    "TileCost",
    "choose_hopper",
    "choose_sender",
    "choose_swapped",
    "fastest_sender",
    "hopper_specs",
    "launch_hopper",
    "launch_tiles",
    "part_length",
    "stream_specs",
    "swapped_configs",
]

_KERNEL = Kernel(
    "gemm_sm90",
    "map_x:tmap map_tail:tmap map_w:tmap map_out:tmap bias:ptr residual:ptr residual_stride:i64 "
    "out:ptr out_stride:i64 m:i32 n:i32 k:i32 band:i32 x_part:i32 tail_part:i32 stages:i32 "
    "early:i32 uses_pdl:i32 num_gates:i32 activation:i32 is_float:i32 out_vector:i32 peers:ptr "
    "sent_rows:i32 segment:i32 part:i32",
    struct="GemmSm90Params",
)

_SLAB_BYTES = 128  # bytes per operand row of a slab: the widest swizzle
_SLAB_K = 64  # 16-bit values of k per slab
_WARP_STAGING = 2048  # bytes of staging per warp
_SWAPPED_PITCH = 68  # floats of staging per row of x in swapped tiles
_BOX_ROWS = 16  # rows of out per TMA store of a warp
_MAX_STAGES = 16
# Bytes of a CTA's first stages in swapped tiles, of which it loads the weight while the preceding
# kernel still runs; more would delay that kernel's loads.
_EARLY_BYTES = 128 << 10
_BAND = 8  # rows of super-tiles per band; CTAs compute a band column by column
_PAIR = 8  # gate and up rows alternate in groups of this many


class OutVector(IntEnum):
    """Widest vector, in elements, for accesses to out and residual."""

    ONE = 0
    FOUR = 1
    EIGHT = 2


@dataclass(frozen=True)
class HopperConfig:
    """Tile of one module of gemm_sm90.cu; CUDA checks the sizes derived from it.

    Attributes
    ----------
    tile_m, tile_n : int
        Rows and columns of out per CTA tile.
    cluster_m, cluster_n : int
        Extent of a cluster in tiles; its CTAs multicast the operands they share.
    cluster_k : int
        CTAs that share the sum over k of a tile.
    depth : int
        Slabs per stage; a slab is 64 values of k.
    swapped : int
        Consumer warpgroups of a swapped tile, which multiplies w xᵀ: the weight's rows are those of
        the tensor cores, 64 a warpgroup, so that x may have fewer. In a tile of up to 64 columns
        two warpgroups divide the slabs. 0: the tile multiplies x wᵀ.
    sums_parts : bool
        Parts of k are summed one after another, for `deterministic`: see `part_length`.
    """

    tile_m: int
    tile_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    cluster_k: int = 1
    depth: int = 1
    swapped: int = 0
    sums_parts: bool = False

    @property
    def cluster_size(self) -> int:
        """Return the CTAs per cluster."""
        return self.cluster_m * self.cluster_n * self.cluster_k

    @property
    def warpgroups(self) -> int:
        """Return the number of consumer warpgroups."""
        if self.swapped:
            return self.swapped
        if self.tile_m == 192:
            return 3 if self.tile_n <= 192 else 2
        return 1 if self.tile_m <= 64 else 2

    @property
    def sums_in_order(self) -> bool:
        """Tell whether one warpgroup sums all of k, in ascending order."""
        return self.cluster_k == 1 and not (self.swapped > 1 and self.tile_n <= 64)

    @property
    def threads(self) -> int:
        """Return the threads per CTA."""
        if self.swapped:
            return self.swapped * 128 + 32
        return 160 if self.warpgroups == 1 else (self.warpgroups + 1) * 128

    @property
    def stores(self) -> bool:
        """Tell whether TMA stores 16-bit results while the next tile is multiplied.

        This pays if a CTA computes many tiles; it doubles the staging memory.
        """
        return self.tile_m * self.tile_n == 128 * 256

    @property
    def gates(self) -> bool:
        """Tell whether the kernel can combine gate and up.

        The weight rows that a CTA loads and the columns that it finishes must form whole pairs, and
        three consumer warpgroups have too few registers.
        """
        is_paired = all(self.tile_n // size % 16 == 0 for size in (self.cluster_m, self.cluster_k))
        return is_paired and self.warpgroups != 3

    @property
    def holds_parts(self) -> bool:
        """Tell whether a thread has registers for a part's sums beside the total."""
        most = 48 if self.warpgroups == 3 else 64
        return self.sums_in_order and self.tile_m * self.tile_n <= most * self.warpgroups * 128

    def stages(self, m: int, limit: int = HOPPER.shared_bytes) -> int:
        """Return the number of stages (`m` rows of x, and the weight) that fit in shared memory."""
        free = limit - 1024 - 512 - self._beside_stages
        return min(_MAX_STAGES, free // self._stage_bytes(m))

    def early_stages(self, m: int, stages: int) -> int:
        """Return the number of stages to load before the preceding kernel has ended."""
        if not self.swapped:
            return stages
        return min(stages, max(1, _EARLY_BYTES // self._stage_bytes(m)))

    def shared_bytes(self, m: int, stages: int) -> int:
        """Return the bytes of dynamic shared memory: stages, staging, mbarriers, alignment."""
        return stages * (self._stage_bytes(m) + 16) + self._beside_stages + 24 + 1024

    def _stage_bytes(self, m: int) -> int:
        rows = self.tile_m
        if rows <= 64:
            rows = ceil_div(self.x_part(m) * self.cluster_n, 8) * 8
        return (rows + self.tile_n) * self.depth * _SLAB_K * 2

    @property
    def _beside_stages(self) -> int:
        """Return the bytes of staging and of partial sums received from other CTAs."""
        if self.swapped:
            stagings = self.swapped if self.tile_n > 64 else 1
            past = -self.tile_n % 64 * _SLAB_BYTES
            return max(stagings * self.tile_m * _SWAPPED_PITCH * 4, past)
        sums = self.tile_m * self.tile_n * 4 * (self.cluster_k - 1) // self.cluster_k
        return self.warpgroups * 4 * (2 if self.stores else 1) * _WARP_STAGING + sums

    def sent_rows(self, m: int, n: int, sm_count: int) -> int:
        """Return how many first rows all CTAs finish before their last tiles.

        For launches in bands of one row of super-tiles.
        """
        clusters = self.clusters(m, n)
        not_last = clusters - min(clusters, self.max_clusters(sm_count))
        rows = not_last // ceil_div(n, self.tile_n * self.cluster_n)
        return rows * self.tile_m * self.cluster_m

    def spec(self, dtype: str, *, sends: bool = False) -> ModuleSpec:
        """Return the module for `dtype`; one that `sends` can send rows to other ranks."""
        macros = {
            "TILE_M": self.tile_m,
            "TILE_N": self.tile_n,
            "CLUSTER_M": self.cluster_m,
            "CLUSTER_N": self.cluster_n,
            "CLUSTER_K": self.cluster_k,
            "DEPTH": self.depth,
            "STAGES": self.stages(self.tile_m),
            "STORES": int(self.stores),
            "THREADS": self.threads,
            "BYTES_BESIDE_STAGES": self._beside_stages,
            "SWAPPED": self.swapped,
            **({"SENDS": 1} if sends else {}),
            **({"SUMS_IN_PARTS": 1} if self.sums_parts else {}),
        }
        return ModuleSpec("gemm/gemm_sm90.cu", dtype, tuple(macros.items()))

    def x_part(self, m: int) -> int:
        """Return the rows of x that each of the CTAs sharing a tile loads."""
        rows = min(m, self.tile_m)
        return rows if self.cluster_n == 1 else ceil_div(rows, 8 * self.cluster_n) * 8

    def clusters(self, m: int, n: int) -> int:
        """Return the number of cluster tiles of a result of `m` rows and `n` columns."""
        rows = ceil_div(m, self.tile_m * self.cluster_m)
        return rows * ceil_div(n, self.tile_n * self.cluster_n)

    def max_clusters(self, sm_count: int) -> int:
        """Return the number of resident clusters; from four CTAs on they do not fill every GPC."""
        size = self.cluster_size
        return max(1, sm_count // size if size <= 2 else sm_count * 10 // (11 * size))

    def waves(self, m: int, n: int, sm_count: int) -> int:
        """Return the number of tiles of the busiest CTA."""
        return ceil_div(self.clusters(m, n), self.max_clusters(sm_count))

    def tile_steps(self, k: int) -> int:
        """Return the stages per tile."""
        return ceil_div(k, self.depth * _SLAB_K * self.cluster_k)

    def steps(self, m: int, n: int, k: int, sm_count: int) -> int:
        """Return the number of stages of the busiest CTA."""
        return max(1, self.waves(m, n, sm_count) * self.tile_steps(k))

    def is_supported(self, m: int, n: int, k: int, sm_count: int, *, is_gated: bool) -> bool:
        """Tell whether a launch may use this tile; `k` counts 16-bit values.

        CTAs share a sum over k only if all tiles are resident at once.
        """
        if self.cluster_size > sm_count or (is_gated and not self.gates):
            return False
        return self.cluster_k == 1 or (
            k >= 2 * self.cluster_k * self.depth * _SLAB_K and self.waves(m, n, sm_count) == 1
        )

    def band(self, m: int, n: int, sm_count: int) -> int:
        """Return the rows of super-tiles per band; CTAs compute a band column by column.

        With few waves of small tiles, concurrent CTAs should share through L2 the operand that
        their clusters do not multicast (docs/benchmarks/gemm_sm90.md).
        """
        area = self.tile_m * self.tile_n
        few_waves = 2 if area < 128 * 128 else 1 if area <= 128 * 192 and self.cluster_m > 1 else 0
        if self.waves(m, n, sm_count) > few_waves:
            return _BAND
        if self.cluster_n > 1:
            return 2 * _BAND
        return 1 if self.cluster_m > 1 or self.tile_m > 64 else _BAND


class TileCost(NamedTuple):
    """Microseconds on an H200: per launch, per tile (without its stages), per stage of a tile."""

    launch_us: float
    tile_us: float
    stage_us: float

    def us(self, config: HopperConfig, m: int, n: int, k: int, sm_count: int) -> float:
        """Return the estimated time of a GEMM of many rows; `k` counts 16-bit values."""
        waves = config.waves(m, n, sm_count)
        return self.launch_us + waves * (self.tile_us + self.stage_us * config.tile_steps(k))


# Costs for over MAX_FEW_ROWS rows of x. Fitted to sweeps of the configurations over 22 layers at
# 96 to 8192 rows and 47 further problems, in bfloat16; clusters of four were fitted in two further
# runs (docs/benchmarks/gemm_sm90.md). `python -m tests.bench gemm` measures the choices.
_TILES: dict[HopperConfig, TileCost] = {
    HopperConfig(192, 224): TileCost(2.98, 2.06, 0.837),
    HopperConfig(192, 192): TileCost(2.62, 1.34, 0.729),
    HopperConfig(256, 128, cluster_n=2): TileCost(2.86, 1.18, 0.645),
    HopperConfig(128, 256, cluster_m=2): TileCost(2.56, 1.18, 0.6455),
    HopperConfig(128, 224): TileCost(2.6, 1.21, 0.598),
    HopperConfig(128, 224, cluster_m=2): TileCost(2.15, 1.91, 0.561),
    HopperConfig(192, 128): TileCost(1.88, 1.14, 0.527),
    HopperConfig(128, 192, cluster_m=2): TileCost(2.43, 1.3, 0.486),
    HopperConfig(128, 160, cluster_m=2): TileCost(2.2, 1.37, 0.422),
    HopperConfig(192, 96): TileCost(1.84, 1.09, 0.39),
    HopperConfig(128, 128, cluster_n=2): TileCost(2.29, 0.87, 0.342),
    HopperConfig(128, 128, cluster_m=2): TileCost(1.86, 1.02, 0.333),
    HopperConfig(128, 112, cluster_n=2): TileCost(2.08, 0.86, 0.314),
    HopperConfig(128, 96): TileCost(1.63, 0.93, 0.278),
    HopperConfig(128, 96, cluster_m=2): TileCost(1.65, 1.1, 0.265),
    HopperConfig(128, 64, cluster_m=2): TileCost(1.43, 0.68, 0.201),
    HopperConfig(64, 128, cluster_m=4): TileCost(1.0, 1.5, 0.166),
    HopperConfig(64, 96, cluster_m=4): TileCost(1.7, 1.15, 0.139),
    HopperConfig(64, 96, cluster_m=2, depth=2): TileCost(1.48, 0.92, 0.342),
    HopperConfig(64, 64, cluster_m=2, depth=2): TileCost(1.54, 0.51, 0.264),
    HopperConfig(64, 48, cluster_m=2, depth=2): TileCost(1.63, 0.54, 0.191),
    HopperConfig(128, 128, cluster_k=2): TileCost(0.0, 4.0, 0.343),
    HopperConfig(192, 64, cluster_k=2): TileCost(0.0, 2.84, 0.323),
    HopperConfig(128, 64, cluster_k=2): TileCost(0.0, 3.14, 0.219),
    HopperConfig(128, 64, cluster_k=4): TileCost(0.0, 3.09, 0.23),
}

MAX_FEW_ROWS = 64

# Tiles that may send rows to other ranks while the next tiles are multiplied.
_SENDERS = (HopperConfig(256, 128, cluster_n=2), HopperConfig(128, 128, cluster_m=2))
_LINK_BYTES_PER_US = 3e5  # rate at which a link carries the rows
# Bytes of rows to send for each microsecond that product and sum save together, on two H200s, with
# `all_reduce_rmsnorm` after the product (docs/benchmarks/all_reduce.md).
_BYTES_PER_US_SAVED = 1.0e6


@dataclass(frozen=True)
class FewRowsCost:
    """Cost model, in microseconds on an H200, of a GEMM that is limited by reading the weight.

    Attributes
    ----------
    bytes_per_us : float
        Bandwidth at which the weight is read.
    launch_us, row_us : float
        Cost per launch, and per row of x.
    slab_us, column_us : float
        Cost per slab of a tile, and per column of the tile in it.
    row_columns : float
        Cost per row of x in a slab, relative to a column.
    cluster_us : dict
        Cost per cluster, keyed by the number of CTAs that share a sum over k.
    """

    bytes_per_us: float
    launch_us: float
    row_us: float
    slab_us: float
    column_us: float
    row_columns: float
    cluster_us: dict[int, float]

    def us(
        self,
        config: HopperConfig,
        m: int,
        n: int,
        k: int,
        sm_count: int,
        sm_rate: float = math.inf,
    ) -> float:
        """Return the estimated time of a skinny GEMM launched with pdl; `k` counts 16-bit values.

        Reading the weight overlaps with the slabs of the busiest multiprocessor, which reads at
        most `sm_rate` bytes/us.
        """
        waves = config.waves(m, n, sm_count)
        slabs = waves * ceil_div(k, _SLAB_K * config.cluster_k)
        memory = max(2 * n * k / self.bytes_per_us, 2 * waves * config.tile_n * k / sm_rate)
        columns = config.tile_n + self.row_columns * m
        work = slabs * (self.slab_us + self.column_us * columns)
        both: float = (memory**4 + work**4) ** 0.25  # slightly more than the larger one
        return self.launch_us + self.row_us * m + self.cluster_us[config.cluster_k] + both


# Cost model for up to MAX_FEW_ROWS rows of x. Fitted to 19 layers at 1 to 64 rows, in bfloat16,
# launched with pdl (docs/benchmarks/gemm_skinny.md). `python -m tests.bench gemm` measures the
# choices.
_FEW_ROWS_COST = FewRowsCost(
    bytes_per_us=4.49e6,
    launch_us=1.52,
    row_us=0.011,
    slab_us=0.021,
    column_us=0.00104,
    row_columns=0.21,
    cluster_us={1: 0.0, 2: 0.21, 4: 0.56},
)
# Configurations for few rows, and the microseconds to add to that cost.
_FEW_ROWS: dict[HopperConfig, float] = {
    HopperConfig(64, 48, depth=2): -0.03,
    HopperConfig(64, 64, depth=2): -0.11,
    HopperConfig(64, 128): 0.3,
    HopperConfig(64, 32, cluster_k=2, depth=2): 0.09,
    HopperConfig(64, 48, cluster_k=2, depth=2): 0.02,
    HopperConfig(64, 64, cluster_k=2, depth=2): -0.06,
    HopperConfig(64, 64, cluster_k=4, depth=2): -0.15,
}

# Further tiles for `deterministic`, which rules out split-k: narrow ones keep more multiprocessors
# busy. Extrapolated from the constants above, not fitted.
_NARROW_TILES: dict[HopperConfig, TileCost] = {
    HopperConfig(64, 32, cluster_m=2, depth=2): TileCost(1.63, 0.54, 0.13),
    HopperConfig(64, 32, cluster_m=4, depth=2): TileCost(1.7, 0.6, 0.13),
}
_NARROW_FEW_ROWS: dict[HopperConfig, float] = {
    HopperConfig(64, 16, depth=2): 0.0,
    HopperConfig(64, 32, depth=2): 0.0,
}
# The same for k in parts: those that have registers for two sets of sums, with the same constants.
_in_parts = partial(replace, sums_parts=True)
_PART_TILES: dict[HopperConfig, TileCost] = {
    _in_parts(config): cost
    for config, cost in (_TILES | _NARROW_TILES).items()
    if config.holds_parts
}
_PART_FEW_ROWS: dict[HopperConfig, float] = {
    _in_parts(config): us
    for config, us in (_FEW_ROWS | _NARROW_FEW_ROWS).items()
    if config.holds_parts
}
_PART_K = 256  # values of k per part: whole stages of every tile
_MAX_PARTS = 12  # a longer k has no parts
_SM_BYTES_PER_US = 3.3e4  # rate at which one multiprocessor reads the weight

# Swapped tiles: columns, and maximum rows of x. A wave costs as much as _WAVE_COLUMNS more columns.
_SWAPPED_COLUMNS = (16, 32, 48, 64, 96, 112, 128)
_SWAPPED_ROWS = (16, 32)
_WAVE_COLUMNS = 8
_SWAPPED_MIN_USE = 0.6  # minimum share of the multiprocessors that have a tile
# Over 16 rows of 16-bit values, minimum k for which swapped tiles are faster.
_SWAPPED_LONG_K = 4096


def swapped_configs(*, deterministic: bool = False) -> tuple[HopperConfig, ...]:
    """Return the swapped tiles, which have at least as many columns as rows.

    With `deterministic`, one warpgroup sums all slabs of a row of the weight.
    """
    return tuple(
        HopperConfig(rows, columns, depth=2, swapped=2)
        if columns > 64
        else HopperConfig(rows, columns, depth=4, swapped=1 if deterministic else 2)
        for rows in _SWAPPED_ROWS
        for columns in _SWAPPED_COLUMNS
        if columns >= rows
    )


def part_length(k: int) -> int:
    """Return the values of k in a part of a `deterministic` sum over `k` values in 16 bits.

    0 means that k has no parts: longer sums keep a tile busy, which would have to hold two sets of
    sums. The length depends on nothing else: shards of a weight have fewer rows, and must produce
    the same bits.

    Examples
    --------
    >>> part_length(1024), part_length(3072), part_length(4096)
    (256, 256, 0)
    """
    return _PART_K if k <= _PART_K * _MAX_PARTS else 0


@cache
def choose_swapped(
    m: int, n: int, sm_count: int, *, deterministic: bool = False
) -> HopperConfig | None:
    """Choose the swapped tile whose busiest CTA reads the fewest rows of the weight.

    None if `m` rows are too many, or if too few multiprocessors would have a tile.

    Examples
    --------
    >>> choose_swapped(16, 6144, 132) == HopperConfig(16, 48, depth=4, swapped=2)
    True
    """
    rows = next((rows for rows in _SWAPPED_ROWS if m <= rows), None)
    configs = [
        config
        for config in swapped_configs(deterministic=deterministic)
        if config.tile_m == rows and config.clusters(m, n) >= _SWAPPED_MIN_USE * sm_count
    ]

    def columns(config: HopperConfig) -> tuple[int, int]:
        waves = config.waves(m, n, sm_count)
        return waves * (config.tile_n + _WAVE_COLUMNS), -config.tile_n

    return min(configs, key=columns, default=None)


HOPPER_CONFIGS: tuple[HopperConfig, ...] = (*_TILES, *_FEW_ROWS, *swapped_configs())
NARROW_CONFIGS: tuple[HopperConfig, ...] = (
    *_NARROW_TILES,
    *_NARROW_FEW_ROWS,
    *(c for c in swapped_configs(deterministic=True) if c not in HOPPER_CONFIGS),
)
PART_CONFIGS: tuple[HopperConfig, ...] = (
    *_PART_TILES,
    *(config for config in _PART_FEW_ROWS if config not in _PART_TILES),
    *map(_in_parts, swapped_configs(deterministic=True)),
)


@dataclass(frozen=True)
class Sending:
    """Rows of a product to send while it runs; the struct of gemm_sender_sm90.cuh.

    Attributes
    ----------
    peers : PeerMemory
    rows : int
        Number of first rows.
    segment : int
        See `sent_segment` of `all_reduce`.
    """

    peers: PeerMemory
    rows: int
    segment: int


def hopper_specs(
    dtype: str, *, deterministic: bool = False, sends: bool = False
) -> tuple[ModuleSpec, ...]:
    """Return the modules that `launch_hopper` may launch for `dtype`; `sends`: also with peers."""
    if dtype not in HOPPER_DTYPES:
        return ()
    configs = (*HOPPER_CONFIGS, *NARROW_CONFIGS, *PART_CONFIGS) if deterministic else HOPPER_CONFIGS
    senders = _SENDERS if sends else ()
    return (
        *(config.spec(dtype) for config in configs),
        *(config.spec(dtype, sends=True) for config in senders),
    )


def stream_specs(op: str, dtype: str) -> tuple[ModuleSpec, ...]:
    """Return the modules of `op` ("gemm", "rmsnorm_gemm") for few rows with `deterministic`."""
    if dtype not in HOPPER_DTYPES:
        return ()
    return (ModuleSpec(f"gemm/{op}_stream_sm90.cu", dtype),)


@cache
def choose_hopper(
    m: int,
    n: int,
    k: int,
    sm_count: int,
    *,
    deterministic: bool = False,
    is_gated: bool = False,
) -> HopperConfig:
    """Choose the tile with the least estimated time for x (m, k) and weight (n, k), both aligned.

    CTAs share a sum over k only if all tiles are resident at once. With `deterministic` neither
    they nor warpgroups do: all tiles sum a row in the same order, k or a part of `part_length(k)`
    in ascending steps of 16, then the parts. In return it may choose `NARROW_CONFIGS`, or chooses
    among `PART_CONFIGS`. `is_gated` restricts the choice to tiles with `gates`.

    Examples
    --------
    >>> choose_hopper(1024, 6144, 4096, 132) == HopperConfig(128, 192, cluster_m=2)
    True
    """

    has_parts = deterministic and part_length(k) > 0
    if m <= _SWAPPED_ROWS[0] or k >= _SWAPPED_LONG_K:
        swapped = choose_swapped(m, n, sm_count, deterministic=deterministic)
        if swapped is not None:
            return _in_parts(swapped) if has_parts else swapped

    def is_possible(config: HopperConfig) -> bool:
        may_choose = config.sums_in_order or not deterministic
        return may_choose and config.is_supported(m, n, k, sm_count, is_gated=is_gated)

    few_rows = _FEW_ROWS | _NARROW_FEW_ROWS if deterministic else _FEW_ROWS
    tiles = _TILES | _NARROW_TILES if deterministic else _TILES
    if has_parts:
        few_rows = _PART_FEW_ROWS
        tiles = _PART_TILES

    def estimate(config: HopperConfig) -> float:
        if m <= MAX_FEW_ROWS:
            sm_rate = _SM_BYTES_PER_US if deterministic else math.inf
            return _FEW_ROWS_COST.us(config, m, n, k, sm_count, sm_rate) + few_rows[config]
        return tiles[config].us(config, m, n, k, sm_count)

    configs: Iterable[HopperConfig] = few_rows if m <= MAX_FEW_ROWS else tiles
    return min(filter(is_possible, configs), key=estimate)


@cache
def choose_sender(
    plain: HopperConfig, m: int, n: int, k: int, sm_count: int
) -> tuple[HopperConfig, int]:
    """Choose the tile and the rows to send of a product whose result is summed over ranks.

    `plain`: the choice for a product that sends nothing; it is kept, with 0 rows, if sending does
    not pay.

    Examples
    --------
    >>> config, rows = choose_sender(choose_hopper(8192, 4096, 7168, 132), 8192, 4096, 7168, 132)
    >>> config.tile_m, config.tile_n, rows
    (256, 128, 6912)
    """
    us = {c: _TILES[c].us(c, m, n, k, sm_count) for c in (plain, *_SENDERS)}
    return fastest_sender(us, _SENDERS, m, n, k, sm_count, _BYTES_PER_US_SAVED)


def fastest_sender(
    us: dict[HopperConfig, float],
    senders: Collection[HopperConfig],
    m: int,
    n: int,
    k: int,
    sm_count: int,
    bytes_per_us_saved: float,
) -> tuple[HopperConfig, int]:
    """Return the tile with the least time of product and all_reduce, and the rows that it sends.

    `us` holds each tile's time for the product; `k` counts 16-bit values. Only `senders` send, and
    only if a tile has more stages than the ring (gemm_sender_sm90.cuh). The all_reduce takes a
    microsecond less for every `bytes_per_us_saved` bytes sent before it.
    """
    rows = {
        config: config.sent_rows(m, n, sm_count)
        if config in senders and config.tile_steps(k) > config.stages(m)
        else 0
        for config in us
    }

    def cost(config: HopperConfig) -> float:
        sent = 2 * n * rows[config]
        return max(us[config], sent / _LINK_BYTES_PER_US) - sent / bytes_per_us_saved

    best = min(rows, key=cost)
    return best, rows[best]


def launch_hopper(
    config: HopperConfig,
    x: Any,
    weight: Any,
    out: Any,
    epilogue: dict[str, Any],
    out_vector: OutVector,
    *,
    pdl: bool = False,
    is_split: bool = False,
    sending: Sending | None = None,
) -> None:
    """Launch gemm_sm90.cu on CuPy arrays. See `launch_tiles`."""
    spec = config.spec(dtype_name(x.dtype), sends=sending is not None)
    part = part_length(x.shape[1]) // (config.depth * _SLAB_K) if config.sums_parts else 0
    launch_tiles(
        _KERNEL,
        spec,
        config,
        x,
        weight,
        out,
        epilogue | {"part": part},
        out_vector,
        pdl=pdl,
        is_split=is_split,
        sending=sending,
    )


def launch_tiles(
    kernel: Kernel,
    spec: ModuleSpec,
    config: HopperConfig,
    x: Any,
    weight: Any,
    out: Any,
    arguments: dict[str, Any],
    out_vector: OutVector,
    *,
    pdl: bool,
    is_split: bool,
    sending: Sending | None,
) -> None:
    """Launch a module of `config` on x (M, K) and weight (N, K), both 16-bit or both 8-bit.

    Parameters
    ----------
    arguments : dict
        Further kernel arguments: the epilogue's, and scales.
    pdl : bool
        Read weight and bias before the preceding kernel has ended.
    is_split : bool
        A gated weight has all gate rows before the up rows; otherwise they alternate by eights.
    sending : Sending or None
        Needs a module that sends, `out` contiguous and 16-bit, and neither activation nor residual.
    """
    (m, k) = x.shape
    n = weight.shape[0]
    halves = ceil_div(k * x.itemsize, 2)  # row length in units of 16 bits
    num_sms = sm_count()
    clusters = config.clusters(m, n)
    if config.cluster_k == 1:  # persistent grid: every cluster is resident
        clusters = min(clusters, config.max_clusters(num_sms))
    x_part = config.x_part(m)
    tail_part = config.x_part(m % config.tile_m or config.tile_m)
    stages = config.stages(m)
    if config.tile_m <= 64:  # leave shared memory for the neighbouring kernels
        stages = min(stages, config.steps(m, n, halves, num_sms))
    num_gates = n // 2 if is_split else 0
    element = "uint8" if x.itemsize == 1 else spec.dtype
    columns = _SLAB_BYTES // x.itemsize
    map_x = tensor_map_2d(x, element, (x_part, columns))
    map_out = map_x  # placeholder: unused if results are stored without TMA
    if config.stores and arguments["residual"] is None and dtype_name(out.dtype) == spec.dtype:
        if out.shape[0] > 1 and out.strides[0] < out.shape[1] * out.itemsize:
            out_vector = min(out_vector, OutVector.FOUR)
        if out_vector == OutVector.EIGHT:
            map_out = tensor_map_2d(out, spec.dtype, (_BOX_ROWS, _SLAB_K))
    if sending:
        sending.peers.begin_sending(out, sending.rows)
    kernel.launch(
        spec,
        (clusters * config.cluster_size,),
        (config.threads,),
        config.shared_bytes(m, stages),
        cluster=1,  # the kernel's own attribute sets the cluster size
        pdl=True,  # the kernel waits before it accesses memory that others write
        map_x=map_x,
        map_tail=tensor_map_2d(x, element, (tail_part, columns)),
        map_w=_weight_map(weight, element, config.tile_n // config.cluster_m, num_gates),
        map_out=map_out,
        m=m,
        n=n,
        k=k,
        band=1 if sending else config.band(m, n, num_sms),
        x_part=x_part,
        tail_part=tail_part,
        stages=stages,
        early=config.early_stages(m, stages),
        uses_pdl=pdl,
        num_gates=num_gates,
        out_vector=out_vector,
        peers=sending.peers.group if sending else None,
        sent_rows=sending.rows if sending else 0,
        segment=sending.segment if sending else 0,
        **arguments,
    )


def _weight_map(weight: Any, element: str, box: int, num_gates: int) -> Any:
    """Return the map for loads of `box` rows; with gates, alternately 8 of gate and 8 of up."""
    columns = _SLAB_BYTES // weight.itemsize
    if num_gates == 0:
        return tensor_map_2d(weight, element, (box, columns))
    row = weight.shape[1] * weight.itemsize
    sizes = (weight.shape[1], _PAIR, 2, num_gates // _PAIR)
    strides = (row, num_gates * row, _PAIR * row)
    boxes = (columns, _PAIR, 2, box // (2 * _PAIR))
    return tensor_map(weight.data.ptr, element, sizes, strides, boxes, promote=128)
