"""Chunks of 64 tokens on tensor cores: `cuda_src/mamba2/mamba2_chunks.cu`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from engine.dtypes import dtype_name
from engine.kernels._chip import limits, sm_count
from engine.kernels._elementwise import is_aligned
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels.mamba2.problem import PARAMS, STATE_BITS

__all__ = ["CHUNK", "Config", "choose_config", "configs", "is_supported", "launch", "specs"]

CHUNK = 64  # kChunkTokens in CUDA
STATE_SHAPES = ((64, 128), (128, 128), (64, 256))
"""(P, N) of common models; other multiples of 16 are compiled on demand."""

_ROWS = (32, 64, 128)  # of a state, per block
_MAX_ROWS = 128
_WIDE_STATE = 128  # columns beyond which a warp's registers hold 16 rows only,
_MAX_WIDE_ROWS = 64  # and those of a block this many
_PRODUCERS = 128  # kProducerThreads in CUDA
_PAD = 8  # kPad in CUDA
_KERNELS = {
    stages: Kernel(f"mamba2_chunks_{stages}", PARAMS, struct="Mamba2Params") for stages in (2, 3)
}


@dataclass(frozen=True)
class Config:
    """Heads of a block, and rows of their states.

    Attributes
    ----------
    heads, rows : int
        Heads of one group, and rows (features of x) of each.
    tiles : int
        Blocks of 16 rows per warp.
    """

    heads: int
    rows: int
    tiles: int

    @property
    def time(self) -> float:
        """Time per chunk, relative to 32 rows of one head; measured on an H200."""
        more_rows = (self.heads * self.rows - 32) / 270
        return 1.0 + more_rows + 0.35 * (self.tiles - 1) + 0.2 * (self.heads - 1)

    @property
    def threads(self) -> int:
        """Threads per block."""
        return _PRODUCERS + self.heads * self.rows // (16 * self.tiles) * 32

    def shared_bytes(self, state_size: int, stages: int) -> int:
        """Return the shared memory of a block: ChunkShared in CUDA."""
        stage = 2 * CHUNK * (2 * (state_size + _PAD) + self.heads * (self.rows + _PAD))
        return stages * stage + self.heads * CHUNK * (2 * 2 * (CHUNK + _PAD) + 3 * 4 * 4)

    def stages(self, state_size: int, shared_bytes: int) -> int:
        """Return the most stages that fit `shared_bytes` of shared memory; 0 if none do."""
        kinds = (3, 2) if self.tiles == 1 else (3,)  # two tiles spill registers with 2 stages
        return next((n for n in kinds if self.shared_bytes(state_size, n) <= shared_bytes), 0)


def configs(head_dim: int, state_size: int, heads_per_group: int | None = None) -> Iterator[Config]:
    """Yield the configurations for one shape of heads; None: for groups of any size."""
    is_wide = state_size > _WIDE_STATE
    widths = [rows for rows in _ROWS if head_dim % rows == 0]
    if not widths and head_dim <= _MAX_ROWS:
        widths = [head_dim]
    for rows in widths:
        if not is_wide or rows <= _MAX_WIDE_ROWS:
            yield Config(1, rows, 2 if rows == 128 else 1)
    is_paired = heads_per_group is None or heads_per_group % 2 == 0
    if not is_wide and widths[-1:] == [64] and is_paired:
        yield Config(2, 64, 2)


def choose_config(
    num_heads: int,
    heads_per_group: int,
    head_dim: int,
    state_size: int,
    *,
    num_sms: int,
    shared_bytes: int,
) -> Config | None:
    """Return the configuration for `num_heads` heads of all sequences, or None if none fits.

    A multiprocessor holds one block. Few heads need few rows per block to fill all of them; with
    many, blocks of two heads load B and C half as often. The choice does not change a result's
    bits.

    Examples
    --------
    >>> hopper = {"num_sms": 132, "shared_bytes": 227 * 1024}
    >>> [choose_config(heads, 16, 64, 128, **hopper) for heads in (64, 128, 512)]
    ... # doctest: +NORMALIZE_WHITESPACE
    [Config(heads=1, rows=32, tiles=1), Config(heads=1, rows=64, tiles=1),
     Config(heads=2, rows=64, tiles=2)]
    """

    def time(config: Config) -> float:
        blocks = num_heads // config.heads * (head_dim // config.rows)
        return ceil_div(blocks, num_sms) * config.time

    fits = (c for c in configs(head_dim, state_size, heads_per_group))
    return min((c for c in fits if c.stages(state_size, shared_bytes)), key=time, default=None)


def is_supported(args: dict[str, Any]) -> bool:
    """Tell whether the kernel can run: 16-bit operands, sizes of whole tiles, aligned rows."""
    return (
        _is_shape_supported(dtype_name(args["x"].dtype), args["head_dim"], args["state_size"])
        and is_aligned(*(args[name] for name in ("x", "b", "c", "out", "states")))
        and _choose(args) is not None
    )


def _is_shape_supported(dtype: str, head_dim: int, state_size: int) -> bool:
    return dtype != "float32" and head_dim % 16 == 0 and state_size % 16 == 0


def _choose(args: dict[str, Any]) -> Config | None:
    num_heads = args["num_heads"]
    return choose_config(
        args["num_sequences"] * num_heads,
        num_heads // args["num_groups"],
        args["head_dim"],
        args["state_size"],
        num_sms=sm_count(),
        shared_bytes=limits().shared_bytes,
    )


def spec(dtype: str, state_dtype: str, state_size: int, config: Config) -> ModuleSpec:
    """Return the module for one configuration."""
    macros = {
        "STATE_BITS": STATE_BITS[state_dtype],
        "STATE_SIZE": state_size,
        "HEADS": config.heads,
        "ROWS": config.rows,
        "TILES": config.tiles,
        **{f"SHARED_BYTES_{n}": config.shared_bytes(state_size, n) for n in _KERNELS},
    }
    return ModuleSpec("mamba2/mamba2_chunks.cu", dtype, tuple(macros.items()))


def specs(
    dtype: str, state_dtypes: Iterable[str], state_shape: tuple[int, int] | None
) -> list[ModuleSpec]:
    """Return the modules for these states and (P, N), or those of STATE_SHAPES."""
    shapes = STATE_SHAPES if state_shape is None else (state_shape,)
    found = [
        spec(dtype, state_dtype, state_size, config)
        for head_dim, state_size in shapes
        if _is_shape_supported(dtype, head_dim, state_size)
        for state_dtype in state_dtypes
        for config in configs(head_dim, state_size)
    ]
    return list(dict.fromkeys(found))


def launch(args: dict[str, Any], *, max_steps: int) -> None:
    """Launch the kernel on sequences of more than `max_steps` tokens; see `is_supported`."""
    config = _choose(args)
    assert config is not None
    size = args["state_size"]
    stages = config.stages(size, limits().shared_bytes)
    blocks = args["num_heads"] // config.heads, args["head_dim"] // config.rows
    _KERNELS[stages].launch(
        spec(dtype_name(args["x"].dtype), dtype_name(args["states"].dtype), size, config),
        (args["num_sequences"], *blocks),
        (config.threads,),
        config.shared_bytes(size, stages),
        pdl=True,
        **args,
        max_steps=max_steps,
    )
