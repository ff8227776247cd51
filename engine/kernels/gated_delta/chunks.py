"""Chunks of 64 tokens on tensor cores: `cuda_src/gated_delta/gated_delta_chunks.cu`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine.dtypes import dtype_name
from engine.kernels._chip import limits
from engine.kernels._elementwise import is_aligned
from engine.kernels._launch import Kernel
from engine.kernels._module import ModuleSpec
from engine.kernels._workspace import workspace
from engine.kernels.gated_delta.problem import PARAMS, STATE_BITS

__all__ = ["CHUNK", "HEAD_DIMS", "is_supported", "launch", "launch_ranges", "specs"]

CHUNK = 64  # kChunkTokens in CUDA
HEAD_DIMS = ((128, 128), (64, 64), (96, 192))
"""(dk, dv) of published models; other multiples of 16 and 32 are compiled on demand."""

_MAX_KEY_DIM = 128
_SLICE = 32  # kSlice in CUDA
_PAD = 8  # kPad in CUDA
_PREPARE_THREADS = 128  # kPrepareThreads in CUDA
_SCAN_THREADS = 256  # kScanThreads in CUDA
# Scratch of one pair of launches: about what L2 holds, so that the scan reads it from there.
_SCRATCH_BYTES = 64 << 20
_PREPARE = Kernel("gated_delta_prepare", PARAMS, struct="GatedDeltaParams")
_SCANS = {
    stages: Kernel(f"gated_delta_scan_{stages}", PARAMS, struct="GatedDeltaParams")
    for stages in (1, 2)
}


def is_supported(args: dict[str, Any]) -> bool:
    """Tell whether the chunk kernels can run: 16-bit operands, a gate per head, aligned rows."""
    return bool(
        _are_dims_supported(dtype_name(args["q"].dtype), args["key_dim"], args["value_dim"])
        and args["a"].ndim == 2
        and is_aligned(args["q"], args["k"], args["v"], args["states"])
    )


def _are_dims_supported(dtype: str, key_dim: int, value_dim: int) -> bool:
    is_tiled = key_dim % 16 == 0 and value_dim % _SLICE == 0
    return dtype != "float32" and is_tiled and key_dim <= _MAX_KEY_DIM


def spec(dtype: str, state_dtype: str, key_dim: int, value_dim: int) -> ModuleSpec:
    """Return the module for one shape of heads."""
    macros = {
        "STATE_BITS": STATE_BITS[state_dtype],
        "HAS_CHANNEL_GATE": 0,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "PREPARE_BYTES": prepare_bytes(key_dim, value_dim),
        **{f"SCAN_BYTES_{stages}": scan_bytes(key_dim, stages) for stages in (1, 2)},
    }
    return ModuleSpec("gated_delta/gated_delta_chunks.cu", dtype, tuple(macros.items()))


def specs(
    dtype: str, state_dtypes: Iterable[str], head_dims: Iterable[tuple[int, int]]
) -> list[ModuleSpec]:
    """Return the modules for these states and (dk, dv)."""
    return [
        spec(dtype, state, key_dim, value_dim)
        for state in state_dtypes
        for key_dim, value_dim in head_dims
        if _are_dims_supported(dtype, key_dim, value_dim)
    ]


def prepare_bytes(key_dim: int, value_dim: int) -> int:
    """Return the shared memory of the prepare kernel: k, q or v, the system, rows' factors."""
    columns = key_dim + max(key_dim, value_dim) + 2 * _PAD
    return CHUNK * (2 * columns + 4 * (CHUNK + 4) + 4 * 4)


def scan_bytes(key_dim: int, stages: int) -> int:
    """Return the shared memory of the scan kernel: stages of w, q, k, reads, u; the state; X."""
    rows = 3 * (key_dim + _PAD) + (CHUNK + _PAD) + (_SLICE + _PAD)
    return 2 * (stages * CHUNK * rows + _SLICE * (key_dim + _PAD) + 2 * CHUNK * (_SLICE + _PAD))


def choose_stages(key_dim: int, shared_bytes: int) -> int:
    """Return the stages of the scan: two, if shared memory has room for them.

    Examples
    --------
    >>> choose_stages(128, 227 * 1024), choose_stages(128, 99 * 1024)
    (2, 1)
    """
    return 2 if scan_bytes(key_dim, 2) <= shared_bytes else 1


def scratch_floats(num_heads: int, key_dim: int, value_dim: int) -> int:
    """Return the floats of scratch per chunk: ChunkScratch in CUDA."""
    return num_heads * (CHUNK * (key_dim + value_dim + CHUNK) // 2 + 2 * CHUNK + 4)


def launch_ranges(num_tokens: int, batch: int, chunk_floats: int) -> list[tuple[int, int]]:
    """Return the ranges of chunk ids, (first, count), whose scratch is used at once.

    Examples
    --------
    >>> launch_ranges(8192, 1, 1 << 18)
    [(0, 64), (64, 64), (128, 2)]
    """
    total = num_tokens // CHUNK + 2 * batch
    step = max(1, _SCRATCH_BYTES // (4 * chunk_floats))
    return [(first, min(step, total - first)) for first in range(0, total, step)]


def launch(args: dict[str, Any], *, max_steps: int) -> None:
    """Launch the kernels on sequences of more than `max_steps` tokens."""
    key_dim = args["key_dim"]
    value_dim = args["value_dim"]
    num_heads = args["num_heads"]
    batch = args["num_sequences"]
    stages = choose_stages(key_dim, limits().shared_bytes)
    module = spec(dtype_name(args["q"].dtype), dtype_name(args["states"].dtype), key_dim, value_dim)
    chunk_floats = scratch_floats(num_heads, key_dim, value_dim)
    ranges = launch_ranges(args["num_tokens"], batch, chunk_floats)
    max_chunks = ranges[0][1]
    carried = 2 * num_heads * key_dim * value_dim
    scratch = workspace(max_chunks * chunk_floats + carried)
    for number, (first, count) in enumerate(ranges):
        given = args | {
            "scratch": scratch,
            "first_chunk": first,
            "num_chunks": count,
            "max_chunks": max_chunks,
            "launch": number,
            "max_steps": max_steps,
        }
        _PREPARE.launch(
            module,
            (count, num_heads),
            (_PREPARE_THREADS,),
            prepare_bytes(key_dim, value_dim),
            pdl=True,
            **given,
        )
        _SCANS[stages].launch(
            module,
            (batch, num_heads, value_dim // _SLICE),
            (_SCAN_THREADS,),
            scan_bytes(key_dim, stages),
            pdl=True,
            **given,
        )
