"""The recurrence, one token after the other: `cuda_src/gated_delta/gated_delta.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.dtypes import dtype_name
from engine.kernels._chip import sm_count
from engine.kernels._elementwise import is_aligned
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels.gated_delta.problem import PARAMS, STATE_BITS

__all__ = ["Config", "choose_config", "choose_lanes", "launch", "spec"]

_THREADS = 128  # kThreads in CUDA
_MAX_NORM_THREADS = 256  # kMaxNormThreads in CUDA
_COLUMNS = 8  # kColumns in CUDA
_FEW_ROWS = 4  # state rows per lane
_NORM_ROWS = 8
_MANY_ROWS = {"float32": 4, "bfloat16": 8}  # by the states' dtype; kManyRows in CUDA
_KERNELS = {
    name: Kernel(f"gated_delta_{name}", PARAMS, struct="GatedDeltaParams")
    for name in ("single_many", "single_few", "single_norm", "steps_4", "steps_scalar")
}


def spec(dtype: str, state_dtype: str, lanes: int, *, has_channel_gate: bool) -> ModuleSpec:
    """Return the module for one dtype of activations and of states, and lanes per state row."""
    macros = {
        "STATE_BITS": STATE_BITS[state_dtype],
        "LANES": lanes,
        "HAS_CHANNEL_GATE": int(has_channel_gate),
    }
    return ModuleSpec("gated_delta/gated_delta.cu", dtype, tuple(macros.items()))


def choose_lanes(key_dim: int) -> int:
    """Return the lanes that share a row of dk columns.

    Examples
    --------
    >>> choose_lanes(128), choose_lanes(40)
    (16, 8)
    """
    return next(lanes for lanes in (8, 16, 32) if lanes * _COLUMNS >= key_dim)


@dataclass(frozen=True)
class Config:
    """Kernel, threads per block, and blocks per head."""

    kernel: str
    threads: int
    blocks: int


def choose_config(
    num_heads: int,
    value_dim: int,
    lanes: int,
    *,
    many_rows: int,
    is_single: bool,
    has_norm: bool,
    fits: bool,
    num_sms: int,
) -> Config:
    """Choose the launch for one token per sequence (`is_single`) or a few.

    `num_heads` counts the heads of all sequences; `fits` tells whether all rows are aligned, and
    the value dimension divisible. A head's norm needs the whole head in one block; with many heads
    smaller blocks and a launch for the norm are faster. A single token of many heads takes
    `many_rows` state rows per lane, which keeps more loads in flight.

    Examples
    --------
    >>> shape = {"many_rows": 8, "is_single": True, "fits": True, "num_sms": 132}
    >>> choose_config(512, 128, 16, has_norm=False, **shape)
    Config(kernel='single_many', threads=128, blocks=2)
    >>> choose_config(512, 128, 16, has_norm=True, **shape)
    Config(kernel='single_norm', threads=256, blocks=1)
    """
    if fits and is_single and has_norm and num_heads <= many_rows // 2 * num_sms:
        threads = ceil_div(lanes * ceil_div(value_dim, _NORM_ROWS), 32) * 32
        if threads <= _MAX_NORM_THREADS:
            return Config("single_norm", threads, 1)
    groups = _THREADS // lanes
    rows = _FEW_ROWS
    if not fits:
        kernel = "steps_scalar"
    elif not is_single:
        kernel = "steps_4"
    elif num_heads * ceil_div(value_dim, many_rows * groups) < 2 * num_sms:
        kernel = "single_few"
    else:
        kernel = "single_many"
        rows = many_rows
    return Config(kernel, _THREADS, ceil_div(value_dim, rows * groups))


def _are_dims_whole(key_dim: int, value_dim: int) -> bool:
    return key_dim % _COLUMNS == 0 and value_dim % _NORM_ROWS == 0


def launch(
    args: dict[str, Any], *, max_seqlen_q: int, max_steps: int, has_norm: bool, pdl: bool
) -> bool:
    """Launch the kernel on sequences of at most `max_steps` tokens.

    Returns whether it has also applied the norm, which it does to single tokens if `has_norm`.
    """
    key_dim = args["key_dim"]
    lanes = choose_lanes(key_dim)
    has_channel_gate = args["a"].ndim == 3
    rows = [args[name] for name in ("q", "k", "states", *("a", "dt_bias") * has_channel_gate)]
    batch = args["num_sequences"]
    state_dtype = dtype_name(args["states"].dtype)
    config = choose_config(
        batch * args["num_heads"],
        args["value_dim"],
        lanes,
        many_rows=_MANY_ROWS[state_dtype],
        is_single=max_seqlen_q == 1,
        has_norm=has_norm,
        fits=_are_dims_whole(key_dim, args["value_dim"]) and is_aligned(*rows),
        num_sms=sm_count(),
    )
    _KERNELS[config.kernel].launch(
        spec(dtype_name(args["q"].dtype), state_dtype, lanes, has_channel_gate=has_channel_gate),
        (batch, args["num_heads"], config.blocks),
        (config.threads,),
        pdl=pdl,
        **args,
        max_steps=max_steps,
        **dict.fromkeys(("first_chunk", "num_chunks", "max_chunks", "launch"), 0),
        scratch=None,
    )
    return config.kernel == "single_norm"
