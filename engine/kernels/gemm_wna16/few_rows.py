"""gemm_wna16 for few rows of x: tiling choice and launch.

`gemm_wna16.cu`, or `gemm_wna16_stream_sm90.cu` for `deterministic`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from engine.dtypes import dtype_name
from engine.kernels._chip import HOPPER, RESERVED_BYTES, limits, sm_count
from engine.kernels._contract import FLOAT32
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._packed import (
    format_spec,
    format_specs,
    planes,
    scale_dtype,
    stage_tiles,
    weight_stage_bytes,
)
from engine.kernels.gemm.operands import SWIGLU, Norm, Operands, activation_number, row_stride
from engine.kernels.gemm_wna16.sm90 import num_parts, part_bounds
from engine.weights import Format
from engine.weights.formats import TILE_COLUMNS, TILE_ROWS

__all__ = ["FewRowsConfig", "all_configs", "choose_few_rows", "few_rows_config", "launch", "specs"]

_TOKENS = (1, 2, 4, 8, 16)
_PARAMS = (
    "x:ptr x_stride:i64 data:ptr high:ptr scales:ptr supers:ptr norm_weight:ptr eps:f32 "
    "weight_offset:f32 bias:ptr residual:ptr residual_stride:i64 out:ptr out_stride:i64 m:i32 "
    "n:i32 k:i32 groups:i32 num_supers:i32 part_stages:i32 num_work_tiles:i32 num_stages:i32 "
    "early_stages:i32 activation:i32 is_float:i32 uses_pdl:i32"
)
_OPS = ("gemm_wna16", "rmsnorm_gemm_wna16")
_STREAM_FILE = "gemm_wna16_stream_sm90.cu"
_KERNELS = {
    (op, tokens): Kernel(f"{op}_few_{tokens}", _PARAMS, struct="FewRowsParams")
    for op in _OPS
    for tokens in _TOKENS
}

_STAGES = (3, 4, 2)  # candidate stages per ring, best first
_STATIC_BYTES = 7680  # static shared memory and the driver's reserve, in bytes
# Cost model for an H200: bandwidth of a multiprocessor, time of a warp per stage, time of a work
# tile without its stages, and loss if a block of the next kernel does not fit beside this one's.
_BYTES_PER_NS = 33.0
_STAGE_NS = 1000.0
_UNIT_NS = 500.0
_ALONE_NS = 300.0


@dataclass(frozen=True)
class FewRowsConfig:
    """Tiling of a skinny GEMM.

    Attributes
    ----------
    tokens : int
        Maximum rows of x for the kernel.
    parts, row_tiles : int
        Warps of a block along k, and warps along rows of the weight.
    clusters : int
        Clusters in the grid; each computes one or more work tiles of `row_tiles` row tiles.
    cluster : int
        Blocks that share k and x.
    part_stages : int
        Stages of k per warp.
    num_stages : int
        Pipeline stages of each warp's ring.
    early_stages : int
        Stages of the ring that are loaded before x: all if the ring holds the whole of a warp's
        work, else one, since x arrives after the weights requested before it.
    shared_bytes : int
        Dynamic shared memory per block, in bytes.
    rounds_weights : bool
        Scale and round the weights, and sum parts of k as the tiles for more rows do.
    """

    tokens: int
    parts: int
    row_tiles: int
    clusters: int
    cluster: int
    part_stages: int
    num_stages: int
    early_stages: int
    shared_bytes: int
    rounds_weights: bool = False


@cache
def choose_few_rows(
    m: int,
    n: int,
    k: int,
    form: Format,
    sms: int,
    shared_limit: int,
    *,
    max_cluster: int = 1,
    is_gated: bool = False,
    sum_parts: int = 0,
) -> FewRowsConfig | None:
    """Choose the tiling for x (m, k) and a weight (n, k); None if no kernel supports `m` rows.

    `sum_parts`: parts of k of a `deterministic` sum, or 0 for any number.

    Examples
    --------
    >>> from engine.weights import FORMATS
    >>> config = choose_few_rows(1, 4096, 4096, FORMATS["int4_g128"], 132, 227 << 10)
    >>> config.row_tiles, config.clusters
    (2, 128)
    """
    if not 0 < m <= _TOKENS[-1] or k == 0 or n == 0 or (is_gated and n % (2 * TILE_ROWS)):
        return None
    best = None
    least = 0.0
    for cluster in (1, 2, 4):
        if best is not None or cluster > (max_cluster if m > 1 else 1):
            break  # use clusters only if x exceeds a block's shared memory
        for parts, row_tiles, stages in _ways(_max_warps(m), is_gated=is_gated):
            if sum_parts not in (0, parts * cluster):
                continue
            config = few_rows_config(
                m, n, k, form, sms, parts, row_tiles, stages, cluster, rounds_weights=sum_parts > 0
            )
            if config.shared_bytes + _STATIC_BYTES > shared_limit:
                continue
            cost = _estimate(config, n, form, shared_limit)
            if best is None or cost < least:
                best = config
                least = cost
    return best


def _column_tokens(form: Format) -> int:
    """Return ENGINE_COLUMN_TOKENS: most rows with a product of their own; 0: none has."""
    if form.group > 32 or form.bits == 8 or form.code == "e2m1":
        return 0
    return 2 if form.group == 16 else 4


def _tokens(m: int, column_tokens: int) -> int:
    """Return the row capacity of the smallest kernel that holds `m` rows."""
    return next(n for n in _TOKENS if n >= m and (n <= column_tokens or n in (1, 8, 16)))


def _max_warps(m: int) -> int:
    """Return the most warps per block, as in ENGINE_FEW_ROWS_ENTRIES."""
    return 12 if m > 8 else 16


def _ways(max_warps: int, *, is_gated: bool) -> Iterator[tuple[int, int, int]]:
    """Yield candidates: warps along k, warps along rows, and stages per ring."""
    for parts in (1, 2, 4, 8, 16):
        for row_tiles in range(1, max_warps // parts + 1):
            if not (is_gated and row_tiles % 2):
                for stages in _STAGES:
                    yield parts, row_tiles, stages


def _estimate(config: FewRowsConfig, n: int, form: Format, shared_limit: int) -> float:
    """Estimate the nanoseconds of the busiest block."""
    units = ceil_div(ceil_div(n, TILE_ROWS), config.row_tiles)
    rounds = ceil_div(units, config.clusters)
    warps = config.parts * config.row_tiles
    own = rounds * config.part_stages
    memory = own * warps * weight_stage_bytes(form) / _BYTES_PER_NS
    is_alone = 2 * (config.shared_bytes + _STATIC_BYTES) > shared_limit + RESERVED_BYTES
    if config.num_stages == 2 and own > 2:  # too few bytes are in flight
        memory *= 1.1
    return max(memory, own * _STAGE_NS) + rounds * _UNIT_NS + warps + is_alone * _ALONE_NS


def few_rows_config(
    m: int,
    n: int,
    k: int,
    form: Format,
    sms: int,
    parts: int,
    row_tiles: int,
    stages: int = 3,
    cluster: int = 1,
    *,
    rounds_weights: bool = False,
) -> FewRowsConfig:
    """Return the tiling with blocks of `parts` warps along k and `row_tiles` along rows.

    A warp's ring has at most `stages` stages. `rounds_weights`: see `FewRowsConfig`.
    """
    column_tokens = 0 if rounds_weights else _column_tokens(form)
    tokens = _tokens(m, column_tokens)
    columns = stage_tiles(form) * TILE_COLUMNS
    if rounds_weights:
        bounds = part_bounds(ceil_div(k, TILE_COLUMNS), parts * cluster)
        part_stages = max(
            ceil_div(end, stage_tiles(form)) - begin // stage_tiles(form)
            for begin, end in pairwise(bounds)
        )
    else:
        part_stages = ceil_div(ceil_div(k, columns), parts * cluster)
    units = ceil_div(ceil_div(n, TILE_ROWS), row_tiles)
    rounds = ceil_div(units, max(1, sms // cluster))
    num_stages = min(stages, rounds * part_stages)
    early_stages = num_stages if num_stages == rounds * part_stages else 1
    warps = parts * row_tiles
    buffers = 1 if rounds == 1 else 2
    shared = warps * num_stages * weight_stage_bytes(form)
    shared += m * (parts * part_stages * columns * 2 + 16)
    sum_rows = tokens if tokens <= column_tokens else 1
    shared += parts * part_stages * columns // form.group * sum_rows * 4  # sums of x
    shared += buffers * warps * tokens * (TILE_ROWS + 4) * 4
    return FewRowsConfig(
        *(tokens, parts, row_tiles, ceil_div(units, rounds), cluster, part_stages),
        *(num_stages, early_stages, shared, rounds_weights),
    )


def all_configs(m: int, n: int, k: int, form: Format) -> list[FewRowsConfig]:
    """Return several tilings of a problem, for tests and tuning."""
    ways = ((1, 2, 3), (1, 16, 2), (2, 8, 3), (4, 2, 4), (4, 4, 2), (8, 2, 4), (2, 2, 3))
    shared = ((2, 2, 3, 2), (4, 2, 2, 2), (2, 4, 3, 4)) if m > 1 else ()
    most = _max_warps(m)
    fitting = [way for way in (*ways, *shared) if way[0] * way[1] <= most]
    configs = [few_rows_config(m, n, k, form, sms, *way) for way in fitting for sms in (4, 1000)]
    most_bytes = HOPPER.shared_bytes - _STATIC_BYTES
    return [config for config in configs if config.shared_bytes <= most_bytes]


def specs(
    op: str, dtype: str, formats: tuple[str, ...], *, deterministic: bool = False
) -> tuple[ModuleSpec, ...]:
    """Return the modules that `launch` may launch for `op` and weights of `formats`."""
    if dtype == "float32":
        return ()
    files = (f"{op}.cu", *([_STREAM_FILE] if deterministic else []))
    return tuple(spec for file in files for spec in format_specs(file, dtype, formats))


def choose(operands: Operands, norm: Norm | None = None) -> FewRowsConfig | None:
    """Return the tiling for CuPy arrays, or None if another kernel must compute the GEMM.

    `deterministic` sums have the order of `sm90`, so the caller checks that it supports them.
    """
    x = operands.x
    weight = operands.weight
    steps = [x.data.ptr, x.shape[1] * x.itemsize, x.strides[0] if x.shape[0] > 1 else 0]
    if norm is not None:
        steps.append(norm.weight.data.ptr)
    rounds = operands.deterministic
    if (rounds and norm is not None) or any(step % 16 for step in steps):
        return None
    chip = limits()
    return choose_few_rows(
        x.shape[0],
        weight.shape[0],
        weight.shape[1],
        weight.format,
        sm_count(),
        chip.shared_bytes,
        max_cluster=4 if chip.has_clusters and norm is None else 1,
        is_gated=operands.activation == SWIGLU,
        sum_parts=num_parts(weight.shape[1]) if rounds else 0,
    )


def _num_blocks(config: FewRowsConfig) -> int:
    """Return the number of blocks; with one row of x, at least one per multiprocessor.

    Blocks without work stay resident for a while, so that the next kernel's blocks are spread
    evenly over the multiprocessors.
    """
    blocks = config.clusters * config.cluster
    return max(blocks, sm_count()) if config.tokens == 1 else blocks


def launch(operands: Operands, config: FewRowsConfig, norm: Norm | None = None) -> None:
    """Launch on CuPy arrays, with `norm` fused in front of the GEMM if given."""
    op = _OPS[0 if norm is None else 1]
    x = operands.x
    weight = operands.weight
    out = operands.out
    residual = operands.residual
    n, k = weight.shape
    pdl = operands.pdl and limits().has_clusters
    file = _STREAM_FILE if config.rounds_weights else f"{op}.cu"
    _KERNELS[op, config.tokens].launch(
        format_spec(file, dtype_name(x.dtype), weight.format, scale_dtype(weight)),
        (_num_blocks(config),),
        (32, config.parts, config.row_tiles),
        config.shared_bytes,
        cluster=config.cluster,
        pdl=pdl,
        x=x,
        x_stride=row_stride(x),
        norm_weight=None if norm is None else norm.weight,
        eps=0.0 if norm is None else norm.eps,
        weight_offset=0.0 if norm is None else norm.weight_offset,
        bias=operands.bias,
        residual=residual,
        residual_stride=0 if residual is None else row_stride(residual),
        out=out,
        out_stride=row_stride(out),
        m=x.shape[0],
        n=n,
        k=k,
        part_stages=config.part_stages,
        num_work_tiles=ceil_div(ceil_div(n, TILE_ROWS), config.row_tiles),
        num_stages=config.num_stages,
        early_stages=config.early_stages,
        activation=activation_number(operands.activation),
        is_float=out.dtype == FLOAT32,
        uses_pdl=pdl,
        **planes(weight),
    )
