"""moe_gemm for few tokens: tiling choice and launch.

The kernels are in `moe_gemm_few_tokens.cu` and `moe_gemm_combine.cu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from engine.dtypes import dtype_name
from engine.kernels._chip import HOPPER, HOPPER_DTYPES, limits, sm_count
from engine.kernels._launch import Kernel, ceil_div, round_up
from engine.kernels._module import ModuleSpec
from engine.kernels._packed import stage_tiles, weight_stage_bytes
from engine.kernels.moe_gemm.formats import base_of, bases, kind, weight_arrays
from engine.kernels.moe_gemm.operands import MoeOperands, Summed
from engine.weights import FORMATS, Format
from engine.weights.formats import TILE_COLUMNS, TILE_ROWS

__all__ = [
    "MAX_PAIRS",
    "MAX_TOKENS",
    "MAX_WARPS",
    "FewTokensConfig",
    "all_configs",
    "choose",
    "choose_few_tokens",
    "few_tokens_config",
    "is_supported",
    "launch",
    "specs",
    "stage_bytes",
    "stage_columns",
    "sums_x",
    "whole_x_bytes",
]

_PARAMS = (
    "data:ptr high:ptr scales:ptr supers:ptr x:ptr order:ptr offsets:ptr pair_weights:ptr bias:ptr "
    "shared:ptr shared_gate:ptr residual:ptr out:ptr num_tokens:i32 num_pairs:i32 num_experts:i32 "
    "num_rows:i32 k:i32 top_k:i32 groups:i32 num_supers:i32 max_rows:i32 part_stages:i32 "
    "num_stages:i32 activation:i32 alpha:f32 limit:f32 is_early:i32"
)
_FILES = {
    "moe_gemm": "moe_gemm/moe_gemm_few_tokens.cu",
    "moe_gemm_combine": "moe_gemm/moe_gemm_combine.cu",
}
MAX_TOKENS = 8
_KERNELS = {
    (op, tokens): Kernel(f"{op}_few_{tokens}", _PARAMS, struct="MoeFewParams")
    for op in _FILES
    for tokens in (1, MAX_TOKENS)
}
MAX_PAIRS = 128  # kMaxPairs in CUDA
_ROW_BYTES = 128  # bytes per row of a stage, in unpacked formats

MAX_WARPS = 16  # maximum warps per block
_PARTS = (1, 2, 3, 4, 6, 8, 12, 16)
_STAGES = (3, 2)  # candidate stages per ring, best first
_STATIC_BYTES = 4096  # static shared memory and the driver's reserve, in bytes
# Cost model in ns, fitted on an H200 to fp8_block and mxfp4 in bfloat16: bandwidth, latency of a
# stage, extra time of a stage per further warp, time of a work tile without its stages, and loss if
# the registers cannot hold a block of the next kernel. Packed codes take longer to decode. One-byte
# codes take longer to read if one warp reads all of k, 128 bytes of a row at a time.
_BYTES_PER_NS = 33.0
_STAGE_NS = 490.0
_WARP_NS = 65.0
_UNIT_NS = 300.0
_ALONE_NS = 630.0
_PACKED_FACTOR = 1.5
_UNDIVIDED_FACTOR = 1.15


@dataclass(frozen=True)
class FewTokensConfig:
    """Tiling of the grouped GEMM for few tokens.

    Attributes
    ----------
    parts, row_tiles : int
        Warps of a block along k, and warps along rows of the weight.
    part_stages : int
        Stages of k per warp.
    num_stages : int
        Pipeline stages of each warp's ring.
    blocks : int
        Blocks in the grid.
    shared_bytes : int
        Dynamic shared memory per block, in bytes.
    """

    parts: int
    row_tiles: int
    part_stages: int
    num_stages: int
    blocks: int
    shared_bytes: int


def stage_columns(form: Format) -> int:
    """Return the columns of the weight per stage."""
    return stage_tiles(form) * TILE_COLUMNS if form.is_packed else _ROW_BYTES


def weight_bytes(form: Format) -> int:
    """Return the bytes per stage: codes and scales."""
    if form.is_packed:
        return weight_stage_bytes(form)
    return round_up(TILE_ROWS * (_ROW_BYTES + 4), 128)


def stage_bytes(tokens: int, form: Format) -> int:
    """Return the bytes per stage of a ring: weights and, for several tokens, their columns of x."""
    return weight_bytes(form) + (tokens * (stage_columns(form) * 2 + 16) if tokens > 1 else 0)


def whole_x_bytes(tokens: int, rows: int, k: int, form: Format) -> int:
    """Return the bytes of all of x, with a factor per stage, for one token; else 0."""
    if tokens > 1:
        return 0
    columns = stage_columns(form)
    return rows * ceil_div(k, columns) * (columns * 2 + 4)


@cache
def choose_few_tokens(
    tokens: int,
    top_k: int,
    shape: tuple[int, int, int],
    form: Format,
    sms: int,
    shared_limit: int,
    *,
    is_gated: bool,
    scatter: bool,
) -> FewTokensConfig | None:
    """Choose the tiling for a weight of `shape` (E, R, K); None if another kernel must compute it.

    There are too many tokens then, or no tiling fits shared memory.

    Examples
    --------
    >>> from engine.weights import FORMATS
    >>> shape = (128, 1536, 2048)
    >>> of = (1, 8, shape, FORMATS["fp8_block"], 132, 227 << 10)
    >>> config = choose_few_tokens(*of, is_gated=True, scatter=False)
    >>> config.parts * config.part_stages
    16
    """
    if not 0 < tokens <= MAX_TOKENS or tokens * top_k > MAX_PAIRS:
        return None
    best = None
    least = 0.0
    options = {"is_gated": is_gated, "scatter": scatter}
    for way in _ways(is_gated=is_gated):
        config = few_tokens_config(tokens, top_k, shape, form, sms, *way, **options)
        if config.shared_bytes + _STATIC_BYTES > shared_limit:
            continue
        cost = _estimate(config, tokens, top_k, shape, form, is_gated=is_gated)
        if best is None or cost < least:
            best = config
            least = cost
    return best


def _ways(*, is_gated: bool) -> Iterator[tuple[int, int, int]]:
    """Yield candidates: warps along k, warps along rows, and stages per ring."""
    for parts in _PARTS:
        for row_tiles in range(MAX_WARPS // parts, 0, -1):
            if not (is_gated and row_tiles % 2):
                for stages in _STAGES:
                    yield parts, row_tiles, stages


def _units(shape: tuple[int, int, int], row_tiles: int, *, is_gated: bool) -> int:
    """Return the number of work tiles, of `row_tiles` row tiles each, of an expert's matrix."""
    columns = shape[1] // 2 if is_gated else shape[1]
    return ceil_div(ceil_div(columns, TILE_ROWS), row_tiles // 2 if is_gated else row_tiles)


def few_tokens_config(
    tokens: int,
    top_k: int,
    shape: tuple[int, int, int],
    form: Format,
    sms: int,
    parts: int,
    row_tiles: int,
    stages: int,
    *,
    is_gated: bool,
    scatter: bool,
) -> FewTokensConfig:
    """Return the tiling with blocks of `parts` warps along k and `row_tiles` along rows.

    A warp's ring has `stages` stages. With `scatter` each pair has a row of x.
    """
    part_stages = ceil_div(ceil_div(shape[2], stage_columns(form)), parts)
    experts = min(shape[0], tokens * top_k)
    units = experts * _units(shape, row_tiles, is_gated=is_gated)
    warps = parts * row_tiles
    sums = 2 * warps * (1 if tokens == 1 and not sums_x(form) else MAX_TOKENS) * (TILE_ROWS + 4)
    shared = warps * stages * stage_bytes(tokens, form) + sums * 4
    shared += whole_x_bytes(tokens, top_k if scatter else 1, shape[2], form)
    return FewTokensConfig(parts, row_tiles, part_stages, stages, min(sms, units), shared)


def sums_x(form: Format) -> bool:
    """Tell whether the kernel sums x with tensor cores (kSumsX in CUDA)."""
    if not form.is_packed:
        return False
    return bool(form.offset) or (form.code == "int" and form.bits < 8 and form.group > TILE_ROWS)


def _estimate(
    config: FewTokensConfig,
    tokens: int,
    top_k: int,
    shape: tuple[int, int, int],
    form: Format,
    *,
    is_gated: bool,
) -> float:
    """Estimate the nanoseconds of the busiest block for randomly routed tokens."""
    num_experts = shape[0]
    experts = num_experts * (1 - (1 - min(top_k, num_experts) / num_experts) ** tokens)
    units = round(experts) * _units(shape, config.row_tiles, is_gated=is_gated)
    rounds = ceil_div(units, config.blocks)
    warps = config.parts * config.row_tiles
    factor = _PACKED_FACTOR if form.is_packed else 1.0
    if config.parts == 1 and not form.is_packed:
        factor = _UNDIVIDED_FACTOR
    schedulers_full = round_up(warps, 4)
    memory = warps * weight_bytes(form) / _BYTES_PER_NS
    work = max(memory, schedulers_full * _WARP_NS * factor)
    stage: float = (work**3 + (_STAGE_NS * factor) ** 3) ** (1 / 3)
    is_alone = 2 * warps > MAX_WARPS
    return rounds * (config.part_stages * stage + _UNIT_NS) + is_alone * _ALONE_NS


def all_configs(
    tokens: int,
    top_k: int,
    shape: tuple[int, int, int],
    form: Format,
    *,
    is_gated: bool,
    scatter: bool,
) -> list[FewTokensConfig]:
    """Return several tilings of a problem, for tests and tuning."""
    ways = ((1, 2, 3), (1, 12, 2), (2, 6, 3), (4, 2, 2), (4, 4, 2), (8, 2, 3), (3, 4, 2))
    options = {"is_gated": is_gated, "scatter": scatter}
    configs = [
        few_tokens_config(tokens, top_k, shape, form, sms, *way, **options)
        for way in ways
        for sms in (3, 1000)
    ]
    return [each for each in configs if each.shared_bytes + _STATIC_BYTES <= HOPPER.shared_bytes]


def specs(dtype: str, formats: tuple[str, ...], op: str = "moe_gemm") -> tuple[ModuleSpec, ...]:
    """Return the modules that `launch` may launch for `op` and weights of `formats`."""
    if dtype not in HOPPER_DTYPES:
        return ()
    forms = (FORMATS[name] for name in formats if not FORMATS[name].is_dense)
    return tuple(_spec(op, base, form) for form in forms for base in bases(dtype, form))


def _spec(op: str, base: ModuleSpec, form: Format) -> ModuleSpec:
    return ModuleSpec(_FILES[op], base.dtype, (*base.defines, ("WEIGHT_KIND", kind(form))))


def choose(operands: MoeOperands) -> FewTokensConfig | None:
    """Return the tiling for CuPy arrays, or None if another kernel must compute the GEMM."""
    if not is_supported(operands):
        return None
    tokens, top_k = operands.routing.experts.shape
    is_gated = operands.activation is not None
    weight = operands.weight
    return choose_few_tokens(
        *(tokens, top_k, weight.shape, weight.format, sm_count(), limits().shared_bytes),
        is_gated=is_gated,
        scatter=operands.scatter,
    )


def is_supported(operands: MoeOperands) -> bool:
    """Tell whether the kernels for few tokens support the arrays, for any token count."""
    x = operands.x
    weight = operands.weight
    if operands.deterministic or dtype_name(x.dtype) not in HOPPER_DTYPES or operands.out.size == 0:
        return False
    is_gated = operands.activation is not None
    form = weight.format
    k = x.shape[1]
    if k == 0 or (form.is_packed and is_gated and weight.shape[1] % (2 * TILE_ROWS)):
        return False  # a row tile would mix gate and up rows
    steps = [array.data.ptr for array in (x, *(array for _, array in weight.arrays()))]
    steps += [k * x.itemsize, 0 if form.is_packed else k]
    return not any(step % 16 for step in steps)


def launch(operands: MoeOperands, config: FewTokensConfig) -> None:
    """Launch on CuPy arrays."""
    x = operands.x
    weight = operands.weight
    dtype = dtype_name(x.dtype)
    tokens, top_k = operands.routing.experts.shape
    op = "moe_gemm" if operands.summed is None else "moe_gemm_combine"
    summed = operands.summed or Summed()
    _KERNELS[op, 1 if tokens == 1 else MAX_TOKENS].launch(
        _spec(op, base_of(weight, dtype), weight.format),
        (config.blocks,),
        (32, config.parts, config.row_tiles),
        config.shared_bytes,
        pdl=True,  # the kernel waits before it accesses memory that others write
        x=x,
        shared=summed.shared,
        shared_gate=summed.shared_gate,
        residual=summed.residual,
        num_tokens=tokens,
        num_pairs=tokens * top_k,
        max_rows=tokens,
        part_stages=config.part_stages,
        num_stages=config.num_stages,
        is_early=operands.pdl and operands.scatter,
        **weight_arrays(weight),
        **operands.arguments(),
    )
