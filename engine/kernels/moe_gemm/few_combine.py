"""moe_gemm_combine for few tokens: choice of the tiling."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from engine.kernels._chip import limits, sm_count
from engine.kernels._launch import ceil_div
from engine.kernels.moe_gemm.few_tokens import (
    MAX_PAIRS,
    MAX_TOKENS,
    MAX_WARPS,
    FewTokensConfig,
    is_supported,
    stage_bytes,
    stage_columns,
    sums_x,
    whole_x_bytes,
)
from engine.kernels.moe_gemm.operands import MoeOperands
from engine.weights import Format
from engine.weights.formats import TILE_ROWS

__all__ = ["all_configs", "choose", "choose_few_combine", "few_combine_config"]

_STAGES = 2  # stages per ring; more would delay x, which arrives after weights requested earlier
_STATIC_BYTES = 4096  # static shared memory and the driver's reserve, in bytes
_ONE_PARTS = 12  # maximum warps along k for one token
_EVEN = 0.85  # minimum share of the multiprocessors in use


@cache
def choose_few_combine(
    tokens: int,
    top_k: int,
    shape: tuple[int, int, int],
    form: Format,
    sms: int,
    limit: int,
) -> FewTokensConfig | None:
    """Choose for `tokens` tokens and a weight of `shape` (E, R, K); None if two kernels are faster.

    Blocks have the fewest row tiles for which no multiprocessor has more than one block.

    Examples
    --------
    >>> from engine.weights import FORMATS
    >>> shape = (128, 2048, 768)
    >>> config = choose_few_combine(1, 8, shape, FORMATS["fp8_block"], 132, 227 << 10)
    >>> config.blocks, config.parts, config.row_tiles, config.num_stages
    (128, 12, 1, 2)
    """
    if not 0 < tokens <= MAX_TOKENS or tokens * top_k > MAX_PAIRS:
        return None
    row_tiles = ceil_div(_blocks(shape, 1), sms)
    # Multiprocessors without a block idle. With more than one token, that costs more than a second
    # launch.
    if tokens > 1 and _blocks(shape, row_tiles) < _EVEN * sms:
        return None
    parts = min(MAX_WARPS // row_tiles, _ONE_PARTS if tokens == 1 else MAX_WARPS)
    for fewer in range(parts, 0, -1):
        config = few_combine_config(tokens, top_k, shape, form, fewer, row_tiles, _STAGES)
        if config.shared_bytes + _STATIC_BYTES <= limit:
            return config
    return None


def _blocks(shape: tuple[int, int, int], row_tiles: int) -> int:
    return ceil_div(ceil_div(shape[1], TILE_ROWS), row_tiles)


def few_combine_config(
    tokens: int,
    top_k: int,
    shape: tuple[int, int, int],
    form: Format,
    parts: int,
    row_tiles: int,
    stages: int,
) -> FewTokensConfig:
    """Return the tiling with blocks of `parts` warps along k and `row_tiles` along rows.

    A warp's ring has at most `stages` stages.
    """
    experts = min(shape[0], tokens * top_k)
    part_stages = ceil_div(experts * ceil_div(shape[2], stage_columns(form)), parts)
    stages = min(stages, part_stages)
    warps = parts * row_tiles
    room = 1 if tokens == 1 else MAX_TOKENS
    of_tile = MAX_TOKENS if sums_x(form) else room
    sums = warps * (room + of_tile) * (TILE_ROWS + 4)
    return FewTokensConfig(
        *(parts, row_tiles, part_stages, stages, _blocks(shape, row_tiles)),
        shared_bytes=warps * stages * stage_bytes(tokens, form)
        + sums * 4
        + whole_x_bytes(tokens, top_k, shape[2], form),
    )


def all_configs(
    tokens: int, top_k: int, shape: tuple[int, int, int], form: Format
) -> Iterator[FewTokensConfig]:
    """Yield several tilings of a problem, for tests and tuning."""
    for parts, row_tiles, stages in ((1, 2, 3), (16, 1, 2), (3, 4, 2), (8, 1, 4), (5, 1, 3)):
        yield few_combine_config(tokens, top_k, shape, form, parts, row_tiles, stages)


def choose(operands: MoeOperands) -> FewTokensConfig | None:
    """Return the tiling for CuPy arrays, or None if other kernels must compute the GEMM."""
    if not is_supported(operands):
        return None
    tokens, top_k = operands.routing.experts.shape
    weight = operands.weight
    of = (tokens, top_k, weight.shape, weight.format)
    return choose_few_combine(*of, sm_count(), limits().shared_bytes)
