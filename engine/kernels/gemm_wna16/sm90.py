"""gemm_wna16 on Hopper (`gemm_wna16_sm90.cu`): tile choice and launch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from engine.dtypes import dtype_name
from engine.kernels._chip import HOPPER, HOPPER_DTYPES, is_hopper, sm_count
from engine.kernels._contract import FLOAT32
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._packed import format_spec, format_specs, scale_dtype
from engine.kernels._tensor_map import tensor_map, tensor_map_2d
from engine.kernels.gemm.operands import SWIGLU, Operands, activation_number, row_stride
from engine.weights import FORMATS, Format, Weight
from engine.weights.formats import TILE_ROWS

__all__ = [
    "HOPPER_CONFIGS",
    "INVARIANT_CONFIGS",
    "HopperConfig",
    "choose",
    "choose_hopper",
    "launch",
    "max_few_rows",
    "num_parts",
    "part_bounds",
    "specs",
]

_KERNEL = Kernel(
    "gemm_wna16_sm90",
    "map_x:tmap map_tail:tmap map_data:tmap map_high:tmap map_scales:tmap map_supers:tmap bias:ptr "
    "residual:ptr residual_stride:i64 out:ptr out_stride:i64 m:i32 n:i32 slabs:i32 x_part:i32 "
    "tail_part:i32 num_gates:i32 activation:i32 is_float:i32 is_vector:i32 is_early:i32",
    struct="GemmWna16Sm90Params",
)

_FILE = "gemm_wna16_sm90.cu"
_SLAB_K = 64  # values of k per 128 bytes, the widest swizzle
_MAX_STAGES = 16
_PART_SLABS = 2  # kPartSlabs in CUDA
_PLANES = ("data", "high", "scales", "supers")
_DATA_BOX = 256  # bytes per row of map_data: the maximum extent of a TMA box


@dataclass(frozen=True)
class HopperConfig:
    """Tile of one module of gemm_wna16_sm90.cu; CUDA checks the sizes derived from it.

    Attributes
    ----------
    tokens : int
        Rows of x per tile.
    warpgroups, mma_tiles : int
        Consumer warpgroups, and m-tiles (64 weight rows each) per warpgroup.
    splits : int
        CTAs (a cluster) that share the sum over k of a tile.
    depth : int
        Slabs per stage; a slab is 64 values of k.
    blocks : int
        CTAs per multiprocessor.
    rounds_weights : bool
        Scale and round the weights, also where `scales_sums` would be possible.
    parts : int
        Parts of k that a CTA sums from zero and then adds, without `splits`.
    """

    tokens: int
    warpgroups: int = 2
    mma_tiles: int = 1
    splits: int = 1
    depth: int = 1
    blocks: int = 1
    rounds_weights: bool = False
    parts: int = 1

    @property
    def rows(self) -> int:
        """Return the weight rows per tile."""
        return 64 * self.warpgroups * self.mma_tiles

    @property
    def threads(self) -> int:
        """Return the threads per CTA."""
        moves_registers = self.warpgroups == 2 and self.mma_tiles * self.tokens >= 128
        return self.warpgroups * 128 + (128 if moves_registers else 32)

    @property
    def _slice(self) -> tuple[int, int]:
        """Return the weight rows and tokens of the slice that one CTA of a cluster finishes."""
        vecs = self.mma_tiles * self.tokens // 8
        finishers = 1 << min(self.splits, vecs).bit_length() - 1
        size = vecs // finishers
        mma_tiles = min(size, self.mma_tiles)
        return self.warpgroups * mma_tiles * 64, size // mma_tiles * 8

    @property
    def chunk(self) -> int:
        """Return the tokens per staged chunk of results, which divide those of a slice."""
        rows, tokens = self._slice
        return max(c for c in range(8, tokens + 1, 8) if tokens % c == 0 and c * rows <= 4096)

    def stages(self, form: Format) -> int:
        """Return the number of stages that fit in shared memory."""
        free = HOPPER.shared_per_block(self.blocks) - self._beside_stages
        return min(_MAX_STAGES, free // (self._stage_bytes(form) + 16))

    def shared_bytes(self, form: Format) -> int:
        """Return the bytes of dynamic shared memory: stages, staging, mbarriers, alignment."""
        return self.stages(form) * (self._stage_bytes(form) + 16) + self._beside_stages

    def _stage_bytes(self, form: Format) -> int:
        planes = (self._box(form, name) for name in _PLANES)
        weight = sum(ceil_div(math.prod(box), 128) * 128 for box in planes)
        return self.tokens * self.depth * _SLAB_K * 2 + weight

    def _box(self, form: Format, plane: str, rows: int = 0) -> tuple[int, int, int]:
        """Return the TMA box of a plane: bytes per row, rows, row tiles."""
        tiles = (rows or self.rows) // TILE_ROWS
        values = 2 if form.offset else 1
        if plane == "data":
            return _DATA_BOX, self.depth * (1024 if form.bits == 8 else 512) // _DATA_BOX, tiles
        if plane == "high":
            return {5: 128, 6: 256}.get(form.bits, 0), self.depth, tiles
        if plane == "scales":
            size = 1 if form.super_block or form.code == "e2m1" else 2
            groups = max(1, self.depth * _SLAB_K // form.group)
            return TILE_ROWS * values * size, groups, tiles
        return (2 * TILE_ROWS * values if form.super_block else 0), 1, tiles

    def plane_maps(self, weight: Weight, *, is_gated: bool) -> dict[str, Any]:
        """Return the tensor maps of the weight's planes, by kernel parameter name."""
        maps: dict[str, Any] = {}
        for name in _PLANES:
            array = getattr(weight, "super_scales" if name == "supers" else name)
            if array is None:
                maps[f"map_{name}"] = maps["map_data"]
                continue
            box = self._box(weight.format, name, self.rows // 2 if is_gated else self.rows)
            tile_bytes = int(array.nbytes) // array.shape[0]
            sizes = (box[0], tile_bytes // box[0], array.shape[0])
            strides = (box[0], tile_bytes)
            maps[f"map_{name}"] = tensor_map(
                array.data.ptr, "uint8", sizes, strides, box, promote=128, swizzle=0
            )
        return maps

    @property
    def _beside_stages(self) -> int:
        rows, tokens = self._slice
        staging = self.chunk * (rows + 4) * 4
        sums = rows * tokens * 4 * (self.splits - 1)
        return staging + max(sums, 16) + 128 + 1024

    def bounds(self, slabs: int) -> tuple[int, ...]:
        """Return the slabs at which the sums of k's parts begin; they define the bits of a sum."""
        units, size = (self.parts, _PART_SLABS) if self.splits == 1 else (self.splits, self.depth)
        return part_bounds(slabs, units, size)[:-1]

    def supports(self, form: Format) -> bool:
        """Tell whether there is a module of this tile for weights of a format."""
        return self.stages(form) >= 2  # a consumer holds one stage while it waits for the next

    def scales_sums(self, form: Format) -> bool:
        """Tell whether codes are multiplied, and the sum of each group scaled.

        Otherwise weights are scaled and rounded first, which takes more instructions, but no second
        set of sums in registers.
        """
        if self.rounds_weights or form.group < _SLAB_K or form.offset == "min":
            return False
        has_groups = self.depth % 2 == 0  # the largest group is two slabs
        return has_groups and self.tokens * self.mma_tiles <= 128

    def combines(self) -> bool:
        """Tell whether the CTA that finishes a gate row has its up row, too."""
        return self._slice[0] == self.rows

    def spec(self, base: ModuleSpec, form: Format) -> ModuleSpec:
        """Return the module for weights of a format; `base` holds the macros of the decoder."""
        macros = {
            "TOKENS": self.tokens,
            "WARPGROUPS": self.warpgroups,
            "MMA_TILES": self.mma_tiles,
            "SPLITS": self.splits,
            "DEPTH": self.depth,
            "BLOCKS": self.blocks,
            "STAGES": self.stages(form),
            "CHUNK": self.chunk,
            "SCALES_SUMS": int(self.scales_sums(form)),
            "THREADS": self.threads,
            "SHARED_BYTES": self.shared_bytes(form),
        }
        if self.parts > 1:
            macros["PARTS"] = self.parts
        return ModuleSpec(base.file, base.dtype, (*base.defines, *macros.items()))

    def clusters(self, m: int, columns: int, *, is_gated: bool) -> int:
        """Return the tiles of a result with `columns` columns; a cluster computes one at a time."""
        width = self.rows // 2 if is_gated else self.rows
        return ceil_div(m, self.tokens) * ceil_div(columns, width)

    def max_clusters(self, sm_count: int) -> int:
        """Return the number of resident clusters; from four CTAs on they do not fill every GPC."""
        size = self.splits
        count = sm_count * self.blocks
        return max(1, count // size if size <= 2 else count * 10 // (11 * size))


@dataclass(frozen=True)
class _Cost:
    """Microseconds per launch, per tile (without its slabs), and per slab of a tile."""

    launch_us: float
    tile_us: float
    slab_us: float


# Fitted on an H200 to int4_g128 in bfloat16 on 14 layers of 9 to 512 rows. Random changes were kept
# if choices for int4_g128 and q4_k came closer to the best tile: in the mean, 1.0 % above it.
_TILES: dict[HopperConfig, _Cost] = {
    HopperConfig(16, 1, 2, splits=8, depth=2, blocks=3): _Cost(1.07, 1.64, 0.404),
    HopperConfig(16, splits=6, depth=4, blocks=2): _Cost(1.65, 1.96, 0.267),
    HopperConfig(16, splits=4, depth=4, blocks=2): _Cost(0.91, 2.51, 0.246),
    HopperConfig(16, depth=4, blocks=2): _Cost(2.04, 0.91, 0.259),
    HopperConfig(32, splits=6, depth=2, blocks=2): _Cost(0.37, 2.64, 0.389),
    HopperConfig(32, splits=4, depth=2, blocks=2): _Cost(0.62, 2.65, 0.286),
    HopperConfig(32, 1, 2, depth=2, blocks=2): _Cost(0.90, 0.84, 0.299),
    HopperConfig(48, splits=3, depth=4): _Cost(0.37, 3.06, 0.192),
    HopperConfig(48, splits=2, depth=4): _Cost(0.60, 2.07, 0.219),
    HopperConfig(48, depth=2, blocks=2): _Cost(0.94, 2.36, 0.352),
    HopperConfig(64, splits=3, depth=4): _Cost(0.70, 2.34, 0.255),
    HopperConfig(64, splits=2, depth=4): _Cost(1.34, 2.66, 0.218),
    HopperConfig(64, mma_tiles=2, depth=2): _Cost(0.74, 2.88, 0.376),
    HopperConfig(96, splits=3, depth=2): _Cost(0.52, 2.80, 0.263),
    HopperConfig(96, splits=2, depth=2): _Cost(0.74, 3.70, 0.227),
    HopperConfig(96, mma_tiles=2, depth=2): _Cost(3.70, 1.65, 0.442),
    HopperConfig(128, splits=3, depth=2): _Cost(2.01, 2.67, 0.554),
    HopperConfig(128, splits=2, depth=2): _Cost(0.99, 2.79, 0.320),
    HopperConfig(128, mma_tiles=2, depth=2): _Cost(2.05, 2.61, 0.748),
    HopperConfig(128): _Cost(0.90, 2.14, 0.373),
    HopperConfig(256): _Cost(0.84, 3.31, 0.549),
}
_BYTES_PER_US = 4.2e6

# Tiles for `deterministic`, by the number of parts of k: a sum's order is one of a weight's row
# length (`num_parts`), whatever the rows of x. Few rows split the parts over CTAs (up to eight rows
# `few_rows` computes most products, with the same parts); more rows add them in one CTA, which
# holds two sets of sums and therefore at most 128 tokens. Constants were fitted to the kernels
# before 2eb52161, or are those of the most similar tile.
_invariant = partial(HopperConfig, rounds_weights=True)
_INVARIANT: dict[int, dict[HopperConfig, _Cost]] = {
    1: {
        _invariant(32, 1, 2, depth=2, blocks=2): _Cost(2.75, 1.97, 0.41),
        _invariant(64, mma_tiles=2, depth=2): _Cost(1.2, 3.55, 0.518),
        _invariant(96, mma_tiles=2): _Cost(1.2, 3.55, 0.6),
        _invariant(128, mma_tiles=2): _Cost(1.2, 3.55, 0.69),
        _invariant(128): _Cost(1.2, 3.0, 0.386),
        _invariant(256): _Cost(1.2, 6.03, 0.556),
    }
} | {
    parts: {
        # Two parts and two CTAs per multiprocessor would spill registers with q6_k.
        _invariant(32, splits=parts, depth=2, blocks=parts // 2): _Cost(1.51, 2.5, 0.46),
        _invariant(32, depth=2, blocks=2, parts=parts): _Cost(2.75, 1.97, 0.46),
        _invariant(64, splits=parts, depth=2): _Cost(1.2, 3.41, 0.3),
        _invariant(64, depth=2, parts=parts): _Cost(1.2, 3.41, 0.31),
        _invariant(128, parts=parts): _Cost(1.2, 3.0, 0.4),
    }
    for parts in (2, 4)
}
_MIN_PART_K = 1024  # minimum values of k per part
_MAX_INVARIANT_FEW_ROWS = 8  # maximum rows that `few_rows` computes with `deterministic`

HOPPER_CONFIGS: tuple[HopperConfig, ...] = tuple(_TILES)
INVARIANT_CONFIGS: tuple[HopperConfig, ...] = tuple(c for t in _INVARIANT.values() for c in t)


def max_few_rows(form: Format, *, deterministic: bool = False) -> int:
    """Return the rows up to which `few_rows` beats these tiles in a model's decode step.

    Examples
    --------
    >>> max_few_rows(FORMATS["int4_g128"]), max_few_rows(FORMATS["q4_k"])
    (1, 8)
    """
    if deterministic:
        return _MAX_INVARIANT_FEW_ROWS
    if not HopperConfig(16, depth=2).scales_sums(form):
        return 8
    return 1 if form.bits == 4 else 2


def num_parts(k: int) -> int:
    """Return the parts of a sum over `k` values with `deterministic`.

    It depends on nothing else: shards of a weight have fewer rows, and must produce the same bits.

    Examples
    --------
    >>> num_parts(1024), num_parts(3072), num_parts(14336)
    (1, 2, 4)
    """
    return max(parts for parts in _INVARIANT if parts == 1 or k >= parts * _MIN_PART_K)


def part_bounds(slabs: int, parts: int, size: int = _PART_SLABS) -> tuple[int, ...]:
    """Return the slabs at which parts of k begin, and where the last one ends.

    All are multiples of `size`.

    Examples
    --------
    >>> part_bounds(67, 4)
    (0, 16, 34, 50, 68)
    """
    return tuple(ceil_div(slabs, size) * i // parts * size for i in range(parts + 1))


def specs(
    dtype: str, formats: tuple[str, ...] = (), *, deterministic: bool = False
) -> tuple[ModuleSpec, ...]:
    """Return the modules that `launch` may launch for weights of `formats`."""
    if dtype not in HOPPER_DTYPES:
        return ()
    found = []
    for form in (FORMATS[name] for name in formats if FORMATS[name].is_packed):
        every = (*HOPPER_CONFIGS, *(INVARIANT_CONFIGS if deterministic else ()))
        configs = [config for config in every if config.supports(form)]
        for base in format_specs(_FILE, dtype, (form.name,)):
            found += [config.spec(base, form) for config in configs]
    return tuple(dict.fromkeys(found))


@cache
def choose_hopper(
    m: int,
    n: int,
    k: int,
    form: Format,
    sm_count: int,
    *,
    deterministic: bool = False,
    is_gated: bool = False,
) -> HopperConfig:
    """Choose the tile with the least estimated time for x (m, k) and weight (n, k).

    With `deterministic`, only tiles that sum a row in the same order are considered, which depends
    on `k` alone.

    Examples
    --------
    >>> choose_hopper(4096, 6144, 4096, FORMATS["int4_g128"], 132).tokens
    256
    """
    slabs = ceil_div(k, _SLAB_K)
    columns = n // 2 if is_gated else n
    tiles = _INVARIANT[num_parts(k)] if deterministic else _TILES

    def is_possible(config: HopperConfig) -> bool:
        is_small = config.splits <= min(sm_count, ceil_div(slabs, config.depth))
        return is_small and config.supports(form) and (config.combines() or not is_gated)

    def estimate(config: HopperConfig) -> float:
        cost = tiles[config]
        clusters = config.clusters(m, columns, is_gated=is_gated)
        waves = ceil_div(clusters, config.max_clusters(sm_count))
        work = waves * (cost.tile_us + ceil_div(slabs, config.splits) * cost.slab_us)
        memory = form.num_bytes((n, k)) / _BYTES_PER_US
        both: float = (memory**4 + work**4) ** 0.25  # slightly more than the larger one
        return cost.launch_us + both

    return min(filter(is_possible, tiles), key=estimate)


def choose(operands: Operands) -> HopperConfig | None:
    """Return the tile for CuPy arrays, or None if another kernel must compute the GEMM."""
    x = operands.x
    weight = operands.weight
    if not is_hopper(dtype_name(x.dtype)) or x.shape[1] == 0:
        return None
    rows = x.strides[0] if x.shape[0] > 1 or operands.deterministic else 0
    steps = [x.data.ptr, x.shape[1] * x.itemsize, rows]
    steps += [array.data.ptr for name, array in weight.arrays() if name != "permutation"]
    if any(step % 16 for step in steps):
        return None
    n, k = weight.shape
    return choose_hopper(
        x.shape[0],
        n,
        k,
        weight.format,
        sm_count(),
        deterministic=operands.deterministic,
        is_gated=operands.activation == SWIGLU,
    )


def launch(operands: Operands, config: HopperConfig) -> None:
    """Launch on CuPy arrays."""
    x = operands.x
    weight = operands.weight
    out = operands.out
    residual = operands.residual
    (m, k) = x.shape
    n = weight.shape[0]
    dtype = dtype_name(x.dtype)
    is_gated = operands.activation == SWIGLU
    clusters = config.clusters(m, out.shape[1], is_gated=is_gated)
    if config.splits == 1:  # persistent grid: every cluster is resident
        clusters = min(clusters, config.max_clusters(sm_count()))
    x_part = min(m, config.tokens)
    tail_part = m % config.tokens or config.tokens
    base = format_spec(_FILE, dtype, weight.format, scale_dtype(weight))
    _KERNEL.launch(
        config.spec(base, weight.format),
        (clusters * config.splits,),
        (config.threads,),
        config.shared_bytes(weight.format),
        cluster=1,  # the kernel's own attribute sets the cluster size
        pdl=True,  # the kernel waits before it accesses memory that others write
        map_x=tensor_map_2d(x, dtype, (x_part, _SLAB_K)),
        map_tail=tensor_map_2d(x, dtype, (tail_part, _SLAB_K)),
        bias=operands.bias,
        residual=residual,
        residual_stride=0 if residual is None else row_stride(residual),
        out=out,
        out_stride=row_stride(out),
        m=m,
        n=n,
        slabs=ceil_div(k, _SLAB_K),
        x_part=x_part,
        tail_part=tail_part,
        num_gates=out.shape[1] if is_gated else 0,
        activation=activation_number(operands.activation),
        is_float=out.dtype == FLOAT32,
        is_vector=_is_vector(out, residual),
        is_early=operands.pdl,
        **config.plane_maps(weight, is_gated=is_gated),
    )


def _is_vector(out: Any, residual: Any) -> bool:
    """Tell whether out and residual can be accessed in vectors of eight elements."""
    arrays = (out,) if residual is None else (out, residual)
    return all(
        array.data.ptr % 16 == 0 and (array.shape[0] == 1 or array.strides[0] % 16 == 0)
        for array in arrays
    )
