"""Chunks of 64 tokens on tensor cores: `cuda_src/gated_delta/gated_delta_chunks.cu`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from engine.dtypes import dtype_name
from engine.kernels._chip import limits, sm_count
from engine.kernels._elementwise import is_aligned
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._workspace import workspace
from engine.kernels.gated_delta.problem import PARAMS, STATE_BITS

__all__ = ["CHUNK", "HEAD_DIMS", "is_supported", "launch", "launch_ranges", "specs"]

CHUNK = 64  # kChunkTokens in CUDA
HEAD_DIMS = {False: ((128, 128), (96, 192)), True: ((128, 128),)}
"""(dk, dv) of published models, by whether they have a gate per channel; other multiples of 16 and
32 are compiled on demand."""

_MAX_KEY_DIM = 128
_VALUE_GRAIN = 32
# Features of v per block of the scan -> its time per chunk, relative to 32 features: an estimate
# from a chunk's products, and from its copies, of which only u is narrower.
_WIDTHS = {16: 0.7, 32: 1.0, 64: 1.6}
_PAD = 8  # kPad in CUDA
_PREPARE_THREADS = 128  # kPrepareThreads in CUDA
_SCAN_THREADS = 256  # kScanThreads in CUDA
# Scratch of one pair of launches: about what L2 holds, so that the scan reads it from there.
_SCRATCH_BYTES = 64 << 20
_PREPARE = Kernel("gated_delta_prepare", PARAMS, struct="GatedDeltaParams")
_SCANS = {
    kind: Kernel("gated_delta_scan_{}_{}".format(*kind), PARAMS, struct="GatedDeltaParams")
    for kind in ((16, 1), (16, 2), (32, 1), (32, 2), (64, 1))
}


def is_supported(args: dict[str, Any]) -> bool:
    """Tell whether the chunk kernels can run: 16-bit operands, a gate per head, aligned rows."""
    return bool(
        _are_dims_supported(dtype_name(args["q"].dtype), args["key_dim"], args["value_dim"])
        and is_aligned(args["q"], args["k"], args["v"], args["states"])
    )


def _are_dims_supported(dtype: str, key_dim: int, value_dim: int) -> bool:
    is_tiled = key_dim % 16 == 0 and value_dim % _VALUE_GRAIN == 0
    return dtype != "float32" and is_tiled and key_dim <= _MAX_KEY_DIM


def spec(
    dtype: str, state_dtype: str, key_dim: int, value_dim: int, *, has_channel_gate: bool
) -> ModuleSpec:
    """Return the module for one shape of heads."""
    macros = {
        "STATE_BITS": STATE_BITS[state_dtype],
        "HAS_CHANNEL_GATE": int(has_channel_gate),
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "PREPARE_BYTES": prepare_bytes(key_dim, value_dim, has_channel_gate=has_channel_gate),
        **{
            f"SCAN_BYTES_{width}_{stages}": scan_bytes(
                key_dim, width, stages, has_channel_gate=has_channel_gate
            )
            for width, stages in _SCANS
        },
    }
    return ModuleSpec("gated_delta/gated_delta_chunks.cu", dtype, tuple(macros.items()))


def specs(
    dtype: str,
    state_dtypes: Iterable[str],
    head_dims: tuple[int, int] | None,
    channel_gates: Iterable[bool],
) -> list[ModuleSpec]:
    """Return the modules for these states, (dk, dv) or those of HEAD_DIMS, and kinds of gates."""
    return [
        spec(dtype, state, key_dim, value_dim, has_channel_gate=gate)
        for state, gate in itertools.product(state_dtypes, channel_gates)
        for key_dim, value_dim in (HEAD_DIMS[gate] if head_dims is None else (head_dims,))
        if _are_dims_supported(dtype, key_dim, value_dim)
    ]


def prepare_bytes(key_dim: int, value_dim: int, *, has_channel_gate: bool) -> int:
    """Return the shared memory of the prepare kernel: PrepareShared in CUDA."""
    columns = key_dim + max(key_dim, value_dim) + 2 * _PAD
    decays = CHUNK * (key_dim + 2) if has_channel_gate else 1
    size = CHUNK * (2 * columns + 4 * (CHUNK + 4) + 4 * 4) + 4 * decays
    return ceil_div(size, 4) * 4


def scan_bytes(key_dim: int, width: int, stages: int, *, has_channel_gate: bool) -> int:
    """Return the shared memory of the scan kernel: stages of w, q, k, reads, u and factors; the
    state; X."""
    rows = 3 * (key_dim + _PAD) + (CHUNK + _PAD) + (width + _PAD)
    stage = 2 * CHUNK * rows + 4 * num_factors(key_dim, has_channel_gate=has_channel_gate)
    return stages * stage + 2 * (width * (key_dim + _PAD) + 2 * CHUNK * (width + _PAD))


def num_factors(key_dim: int, *, has_channel_gate: bool) -> int:
    """Return the factors per chunk and head: ChunkScratch::kFactors in CUDA."""
    return key_dim if has_channel_gate else 2 * CHUNK + 4


def choose_scan(
    num_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    has_channel_gate: bool = False,
    num_sms: int,
    shared_bytes: int,
) -> tuple[int, int]:
    """Return the features of v per block of the scan, and its stages.

    `num_heads` counts the heads of all sequences. A multiprocessor holds one block: few heads need
    narrow slices to fill all of them, with many, wide slices load a head's chunks less often. Two
    stages are used if shared memory has room for them. The choice does not change a result's bits.

    Examples
    --------
    >>> hopper = {"num_sms": 132, "shared_bytes": 227 * 1024}
    >>> [choose_scan(num_heads, 128, 128, **hopper) for num_heads in (16, 32, 256)]
    [(16, 2), (32, 2), (64, 1)]
    >>> choose_scan(32, 128, 128, num_sms=108, shared_bytes=99 * 1024)
    (32, 1)
    """

    def time(width: int) -> float:
        return ceil_div(num_heads * value_dim // width, num_sms) * _WIDTHS[width]

    def fits(width: int, stages: int) -> bool:
        size = scan_bytes(key_dim, width, stages, has_channel_gate=has_channel_gate)
        return value_dim % width == 0 and size <= shared_bytes

    width = min((width for width in _WIDTHS if fits(width, 1)), key=time)
    return width, 2 if (width, 2) in _SCANS and fits(width, 2) else 1


def scratch_floats(num_heads: int, key_dim: int, value_dim: int, *, has_channel_gate: bool) -> int:
    """Return the floats of scratch per chunk: ChunkScratch in CUDA."""
    halves = CHUNK * (key_dim + value_dim + CHUNK)
    if has_channel_gate:
        halves += 2 * CHUNK * key_dim
    return num_heads * (halves // 2 + num_factors(key_dim, has_channel_gate=has_channel_gate))


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
    gate = {"has_channel_gate": args["a"].ndim == 3}
    width, stages = choose_scan(
        batch * num_heads,
        key_dim,
        value_dim,
        **gate,
        num_sms=sm_count(),
        shared_bytes=limits().shared_bytes,
    )
    dtypes = dtype_name(args["q"].dtype), dtype_name(args["states"].dtype)
    module = spec(*dtypes, key_dim, value_dim, **gate)
    chunk_floats = scratch_floats(num_heads, key_dim, value_dim, **gate)
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
            prepare_bytes(key_dim, value_dim, **gate),
            pdl=True,
            **given,
        )
        _SCANS[width, stages].launch(
            module,
            (batch, num_heads, value_dim // width),
            (_SCAN_THREADS,),
            scan_bytes(key_dim, width, stages, **gate),
            pdl=True,
            **given,
        )
