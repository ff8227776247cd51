"""Kernel and tiling choice for few rows of x (skinny GEMM): a pure function.

`cuda_src/gemm/skinny_ring.cuh` streams the weight through rings in shared memory; `gemv.cuh`, for
one row of x, and `resident_rows.cuh`, for up to eight, keep it in registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from engine.kernels._chip import PORTABLE, Limits
from engine.kernels._launch import ceil_div

__all__ = [
    "KERNELS",
    "RESIDENT",
    "SkinnyConfig",
    "choose_skinny",
    "choose_skinny_in_parts",
    "gemv_configs",
    "resident_config",
    "ring_configs",
]


_ROWS = 16  # weight rows per warp
_STEP_K = 128  # extent of k per step of a warp
_STAGE_BYTES = _ROWS * _STEP_K * 2
_MAX_CLUSTER = 2  # blocks per cluster; larger ones leave multiprocessors idle
# Tuned on an H200, like _GEMV_* and `max_k` below (docs/benchmarks/gemm_skinny.md).
# `python -m tests.bench gemm decode_loop` measures the choices.
_MIN_PART_STEPS = 4  # minimum steps of k per part, if the rows alone fill the chip
_SMALL_BLOCKS_BELOW = 0.4  # with fewer 8-warp blocks per SM, use 4 warps per block
_PART_WARPS = 8  # warps per block for sums in parts, if the parts are fewer
_PIECES_K = 256  # values of k in a piece of 16 bytes per lane of a warp
_STATIC_BYTES = 3328  # static shared memory and the driver's reserve, in bytes


@dataclass(frozen=True)
class _Shape:
    """A ring kernel: maximum tokens, stages of a warp's ring, buffers of partial sums."""

    tokens: int
    stages: int
    buffers: int
    max_k: int  # maximum k for which it beats the tiles

    @property
    def kernel(self) -> str:
        return f"skinny_ring_{self.tokens}"

    def shared_bytes(self, m: int, warps: int, stages: int, buffers: int, slice_k: int) -> int:
        sums = buffers * self.tokens * (_ROWS + 4) * 4
        return warps * (stages * _STAGE_BYTES + sums) + min(m, self.tokens) * (slice_k * 2 + 64)


_SHAPES = (_Shape(8, 5, 2, 1 << 30), _Shape(16, 4, 2, 1 << 30), _Shape(32, 3, 1, 3072))
_PART_SHAPES = _SHAPES[:2]  # for sums in parts


@dataclass(frozen=True)
class Layout:
    """Tiling of a problem: parts of k, cluster size (blocks that share them), warps per block."""

    parts: int
    cluster: int
    warps: int


@dataclass(frozen=True)
class SkinnyConfig:
    """A kernel with weights in a ring or in registers, and its tiling of the problem.

    Attributes
    ----------
    kernel : str
        Entry point, without the op's prefix.
    tile_m, tile_n : int
        Tokens per cluster, and weight rows per step of a cluster.
    threads, shared_bytes : int
        Threads per block, and its dynamic shared memory in bytes.
    num_stages : int
        Pipeline stages of each warp's ring.
    k_per_split : int
        Extent of k per warp.
    k_warps : int
        Warps of a block along k; the other warps compute other rows.
    cluster : int
        Blocks that share k.
    max_clusters : int
        Maximum number of clusters launched; with more tiles, each computes several.
    warms_up : bool
        Whether blocks run a warm-up pass while the preceding kernel ends.
    sums_parts : bool
        Whether the sums have the order of Hopper's tiles with `deterministic`.
    """

    kernel: str
    tile_m: int
    tile_n: int
    threads: int
    shared_bytes: int
    num_stages: int
    k_per_split: int
    k_warps: int
    cluster: int
    max_clusters: int
    warms_up: bool = False
    num_splits: int = 1  # partial sums need no second launch
    is_skinny: bool = True
    sums_parts: bool = False

    @property
    def num_parts(self) -> int:
        """Return the number of partial sums over k, which are added in a fixed order."""
        return self.k_warps * self.cluster

    @property
    def block(self) -> tuple[int, int, int]:
        """Return the block's extents: lanes, warps along k, warps along rows."""
        return 32, self.k_warps, self.threads // 32 // self.k_warps

    def grid(self, m: int, n: int) -> tuple[int, int]:
        """Return the grid for a result of `m` rows and `n` columns."""
        clusters = min(self.num_tiles(n), self.max_clusters)
        return clusters * self.cluster, ceil_div(m, self.tile_m)

    def num_tiles(self, n: int) -> int:
        """Return the number of tiles along `n` columns."""
        return ceil_div(n, self.tile_n)


def choose_skinny(
    m: int, n: int, k: int, sm_count: int, limits: Limits, *, has_norm: bool = False
) -> SkinnyConfig | None:
    """Choose for x (m, k) and weight (n, k) in 16 bits; None if x exceeds shared memory."""
    shape = next((s for s in _SHAPES if m <= s.tokens), None)
    if shape is None or k == 0 or k > shape.max_k:
        return None
    if limits.has_clusters:
        resident = _choose_resident(m, n, k, sm_count, has_norm=has_norm)
        if resident is not None:
            return resident
    parts = _num_parts(n, k, sm_count)
    for layout in _layouts(parts, n, sm_count, limits.has_clusters):
        config = _config(shape, m, n, k, layout, sm_count, limits)
        if config.shared_bytes + _STATIC_BYTES <= limits.sm_shared_bytes:
            return config
    return None


def choose_skinny_in_parts(
    m: int, n: int, k: int, part_k: int, sm_count: int, limits: Limits, *, has_norm: bool = False
) -> SkinnyConfig | None:
    """Choose as `choose_skinny`, for sums over parts of `part_k` values of k, on Hopper.

    None also if the norm of several rows, or of long ones, would have other bits than `rmsnorm`.
    """
    shape = next((s for s in _PART_SHAPES if m <= s.tokens), None)
    if shape is None or k == 0 or (has_norm and (m > 1 or k > _GEMV_NORM_MAX_K)):
        return None
    if part_k == _GEMV_STEPS * _STEP_K:
        resident = _choose_resident(m, n, k, sm_count, has_norm=has_norm)
        if resident is not None:
            return replace(resident, sums_parts=True)
    if m > 1 and ceil_div(n, _ROWS) > sm_count:  # tiles are faster than several rounds
        return None
    parts = ceil_div(k, part_k)
    # With a norm, as many warps as in `rmsnorm`: one for two pieces of each lane, rounded up.
    least = 1 << (ceil_div(k, 2 * _PIECES_K) - 1).bit_length() if has_norm else 1
    for cluster in (1,) if has_norm or m > 1 else (1, 2):
        k_warps = ceil_div(parts, cluster)
        row_warps = max(1, _PART_WARPS // k_warps) if m == 1 else 1
        layout = Layout(k_warps * cluster, cluster, k_warps * row_warps)
        config = _config(shape, m, n, k, layout, sm_count, limits, part_k)
        has_warps = least <= k_warps * row_warps <= _LAUNCH_WARPS
        if has_warps and config.shared_bytes + _STATIC_BYTES <= limits.sm_shared_bytes:
            return replace(config, sums_parts=True)
    return None


def _num_parts(n: int, k: int, sm_count: int) -> int:
    """Return the number of parts of k: the fewest that spread the rows evenly over the chip.

    A part spans several steps, since prologue and reduction cost a warp as much as one or two.
    """
    groups = ceil_div(n, _ROWS)
    steps = ceil_div(k, _STEP_K)
    least = _MIN_PART_STEPS if groups >= sm_count else 1
    parts = [p for p in (1, 2, 4, 8) if p == 1 or steps // p >= least]
    return min(parts, key=lambda p: ceil_div(ceil_div(groups, 8 // p), sm_count) * (8 // p))


def _layouts(parts: int, n: int, sm_count: int, has_clusters: bool) -> Iterator[Layout]:
    """Yield layouts in order of preference; later ones need less shared memory."""
    blocks = ceil_div(n, _ROWS * 8 // parts)
    if parts <= 4 and blocks < _SMALL_BLOCKS_BELOW * sm_count:  # use more multiprocessors
        yield Layout(parts, 1, 4)
    yield Layout(parts, 1, 8)
    yield Layout(min(parts, 4), 1, 4)
    if has_clusters and parts >= _MAX_CLUSTER:
        yield Layout(parts, _MAX_CLUSTER, 4)


def _config(
    shape: _Shape,
    m: int,
    n: int,
    k: int,
    layout: Layout,
    sm_count: int,
    limits: Limits,
    part_k: int = 0,
) -> SkinnyConfig:
    """Return a ring kernel; `part_k` 0: parts of equal length."""
    warps = layout.warps
    cluster = layout.cluster
    part_k = part_k or max(1, ceil_div(ceil_div(k, _STEP_K), layout.parts)) * _STEP_K
    k_warps = layout.parts // cluster
    tile_n = warps // k_warps * _ROWS
    stages = shape.stages
    buffers = shape.buffers
    if ceil_div(n, tile_n) * cluster <= sm_count:  # one tile per cluster
        stages = min(stages, part_k // _STEP_K)
        buffers = 1
    shared = shape.shared_bytes(m, warps, stages, buffers, k_warps * part_k)
    per_sm = max(1, min(2, (limits.sm_shared_bytes) // (shared + _STATIC_BYTES)))
    return SkinnyConfig(
        kernel=shape.kernel,
        tile_m=shape.tokens,
        tile_n=tile_n,
        threads=warps * 32,
        shared_bytes=shared,
        num_stages=stages,
        k_per_split=part_k,
        k_warps=k_warps,
        cluster=cluster,
        max_clusters=max(1, sm_count * per_sm // cluster),
    )


_GEMV = "gemv"
_GEMV_NORM_MAX_K = 4096  # maximum k with a fused norm
_GEMV_STEPS = 2  # steps of k (by 16 rows) in a warp's registers
# Maximum warps per block of several groups of 16 rows: of the GEMV, and of the kernel for several
# rows of x. At 128 registers per thread a multiprocessor has room for two blocks of 8 warps, so the
# next kernel's block fits beside this one's.
_GEMV_WARPS = 8
_RESIDENT_WARPS = 12
_SHORT_K = 1024
_MIN_FILL = 0.5  # minimum blocks per multiprocessor, if blocks have several groups of rows
_MIN_NORM_FILL = 0.9  # the same with a norm, for more than _TINY_K values of k
_TINY_K = 768
_MAX_FILL = 1.5  # maximum blocks per multiprocessor of 8 warps, with several rows
_MAX_ROWS_K = 3 << 13  # maximum elements of x, with several rows of more than _SHORT_K values
_LAUNCH_WARPS = 16  # maximum warps per block, except rings of the default mode

KERNELS = (*(shape.kernel for shape in _SHAPES), _GEMV)
"""The entry points, without the op's prefix."""

RESIDENT = "resident_8"
"""The entry point for several rows of x with register-resident weights, of `gemm` alone."""


def _choose_resident(
    m: int, n: int, k: int, sm_count: int, *, has_norm: bool
) -> SkinnyConfig | None:
    """Choose the kernel with register-resident weights; None if another one is faster.

    It is fastest if the blocks that are resident at once hold the whole weight, and even more so if
    the kernels before and after it are such kernels: each loads its weight beside the other.
    """
    if has_norm and (m > 1 or k > _GEMV_NORM_MAX_K):
        return None
    k_warps = ceil_div(k, _GEMV_STEPS * _STEP_K)
    rows = ceil_div(n, _ROWS)  # groups of 16 weight rows
    if k_warps > (_LAUNCH_WARPS if m == 1 else _RESIDENT_WARPS) or m > _SHAPES[0].tokens:
        return None
    groups = 1
    most_fill = 1.0  # blocks per multiprocessor
    if k <= _SHORT_K:
        groups = (_GEMV_WARPS if m == 1 else _RESIDENT_WARPS) // k_warps
        groups = max(1, min(groups, int(rows / (_MIN_FILL * sm_count))))
        most_fill = 2.0 if m == 1 else 1.0
    elif m * k > _MAX_ROWS_K or (has_norm and k_warps > _GEMV_WARPS):
        return None
    elif m > 1 and k_warps <= _GEMV_WARPS:
        most_fill = _MAX_FILL
    fill = ceil_div(rows, groups) / sm_count
    if fill > most_fill or (has_norm and fill < _MIN_NORM_FILL and k > _TINY_K):
        return None
    return _gemv_config(k, n, groups, 1) if m == 1 else resident_config(m, n, k, groups)


def gemv_configs(n: int, k: int, clusters: tuple[int, ...] = (1, 2)) -> list[SkinnyConfig]:
    """Return the GEMV with several tilings, for tests."""
    configs = [_gemv_config(k, n, groups, c) for groups in (1, 2, 3) for c in clusters]
    return [c for c in configs if c.threads <= _LAUNCH_WARPS * 32]


def _gemv_config(k: int, n: int, groups: int, cluster: int) -> SkinnyConfig:
    """Return the GEMV with `groups` groups of 16 rows per block."""
    k_warps = ceil_div(ceil_div(ceil_div(k, _STEP_K), _GEMV_STEPS), cluster)
    warps = k_warps * groups
    part_k = _GEMV_STEPS * _STEP_K
    tile_n = groups * _ROWS
    return SkinnyConfig(
        kernel=_GEMV,
        tile_m=1,
        tile_n=tile_n,
        threads=warps * 32,
        shared_bytes=k_warps * part_k * 4 + 64 + warps * _ROWS * 4,  # x, the norm's weight, sums
        num_stages=0,
        k_per_split=part_k,
        k_warps=k_warps,
        cluster=cluster,
        max_clusters=ceil_div(n, tile_n),
        warms_up=True,
    )


def resident_config(m: int, n: int, k: int, groups: int) -> SkinnyConfig:
    """Return the kernel for up to 8 rows with `groups` groups of 16 weight rows per block."""
    gemv = _gemv_config(k, n, groups, 1)
    shape = _SHAPES[0]
    slice_k = gemv.k_warps * gemv.k_per_split
    shared = shape.shared_bytes(m, gemv.threads // 32, 0, 1, slice_k)
    tile: dict[str, Any] = {"kernel": RESIDENT, "tile_m": shape.tokens}
    return replace(gemv, **tile, shared_bytes=shared, warms_up=False)


def ring_configs(k: int) -> list[SkinnyConfig]:
    """Return every ring kernel with several splits of `k`, for tests with up to 2048 columns."""
    layouts = ((1, 1, 8), (1, 1, 4), (2, 1, 8), (4, 1, 4), (8, 1, 8), (4, 2, 8), (2, 2, 4))
    wide = ((4, 1, 12), (8, 1, 16))
    return [
        _config(shape, shape.tokens, 1 << 20, k, Layout(*layout), 3, PORTABLE)
        for shape in _SHAPES
        for layout in layouts
    ] + [_config(_SHAPES[0], 8, 1 << 11, k, Layout(*w), 132, PORTABLE) for w in wide]
