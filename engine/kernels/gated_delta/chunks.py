"""Chunks of 64 tokens on tensor cores: `cuda_src/gated_delta/gated_delta_chunks.cu`, and for Hopper
`gated_delta_chunks_sm90.cu`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from engine.dtypes import dtype_name
from engine.kernels._chip import is_hopper, limits, sm_count
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
_PAD = 8  # of rows of the prepare kernel, in values
_PREPARE_THREADS = 128  # kPrepareThreads in CUDA
_PANEL = 64  # kPanelColumns in CUDA
# Scratch of one pair of launches; it stays allocated. 16 K tokens of 32 heads take 140 MB.
_SCRATCH_BYTES = 256 << 20
_PREPARE = Kernel("gated_delta_prepare", PARAMS, struct="GatedDeltaParams")


@dataclass(frozen=True)
class Tier:
    """The scan's kernels with mma.sync, or with wgmma and a warpgroup that copies.

    Attributes
    ----------
    file : str
        Their file.
    kernels : dict
        By features of v per block and stages.
    times : dict
        Features of v per block -> its time per chunk, relative to the narrowest.
    has_producer : bool
        Whether a warpgroup of its own copies, and mbarriers pass the stages to the others.
    """

    file: str
    kernels: dict[tuple[int, int], Kernel]
    times: dict[int, float]
    has_producer: bool

    @classmethod
    def of(
        cls, suffix: str, stages: Iterable[int], times: dict[int, float], *, has_producer: bool
    ) -> Tier:
        """Return the tier with a kernel for every width and number of stages."""
        kinds = list(itertools.product(times, stages))
        names = {kind: "gated_delta_scan{}_{}_{}".format(suffix, *kind) for kind in kinds}
        kernels = {k: Kernel(name, PARAMS, struct="GatedDeltaParams") for k, name in names.items()}
        return cls(f"gated_delta/gated_delta_chunks{suffix}.cu", kernels, times, has_producer)

    def threads(self, width: int) -> int:
        """Return the threads of a block: a warp per 16 features, and the producer."""
        return 2 * width + 128 * self.has_producer

    def shared_bytes(self, key_dim: int, width: int, stages: int, *, has_channel_gate: bool) -> int:
        """Return the shared memory of a block: ScanStage in CUDA, times the stages; mbarriers."""
        panels = 2 + (2 + has_channel_gate) * ceil_div(key_dim, _PANEL) + ceil_div(width, _PANEL)
        factors = 4 * num_factors(key_dim, has_channel_gate=has_channel_gate)
        stage = 1024 * ceil_div(panels * 2 * _PANEL * CHUNK + factors, 1024)
        return stages * stage + 1024 * self.has_producer


PORTABLE = Tier.of("", (1, 2), {32: 1.0, 64: 1.2, 128: 2.0}, has_producer=False)
HOPPER = Tier.of("_sm90", (2, 3), {64: 1.0, 128: 1.8}, has_producer=True)
_HOPPER_KEY_DIMS = (64, 96, 128)  # widths of wgmma_transposed


def is_supported(args: dict[str, Any]) -> bool:
    """Tell whether the chunk kernels can run: 16-bit operands of aligned rows, whole tiles."""
    return bool(
        _are_dims_supported(dtype_name(args["q"].dtype), args["key_dim"], args["value_dim"])
        and is_aligned(*(args[name] for name in ("q", "k", "v", "out", "states")))
        and (args["a"].ndim == 2 or is_aligned(args["a"]))
    )


def _are_dims_supported(dtype: str, key_dim: int, value_dim: int) -> bool:
    is_tiled = key_dim % 16 == 0 and value_dim % _VALUE_GRAIN == 0
    return dtype != "float32" and is_tiled and key_dim <= _MAX_KEY_DIM


def _fits_hopper(key_dim: int, value_dim: int) -> bool:
    return key_dim in _HOPPER_KEY_DIMS and value_dim % min(HOPPER.times) == 0


def spec(
    tier: Tier,
    dtype: str,
    state_dtype: str,
    key_dim: int,
    value_dim: int,
    *,
    has_channel_gate: bool,
) -> ModuleSpec:
    """Return a tier's module for one shape of heads; PORTABLE's holds the prepare kernel, too."""
    gate = {"has_channel_gate": has_channel_gate}
    macros = {
        "STATE_BITS": STATE_BITS[state_dtype],
        "HAS_CHANNEL_GATE": int(has_channel_gate),
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "PREPARE_BYTES": prepare_bytes(key_dim, **gate),
    }
    for width, stages in tier.kernels:
        macros[f"SCAN_BYTES_{width}_{stages}"] = tier.shared_bytes(key_dim, width, stages, **gate)
    return ModuleSpec(tier.file, dtype, tuple(macros.items()))


def specs(
    dtype: str,
    state_dtypes: Iterable[str],
    head_dims: tuple[int, int] | None,
    channel_gates: Iterable[bool],
) -> list[ModuleSpec]:
    """Return the modules for these states, (dk, dv) or those of HEAD_DIMS, and kinds of gates."""
    return [
        spec(tier, dtype, state, *dims, has_channel_gate=gate)
        for state, gate in itertools.product(state_dtypes, channel_gates)
        for dims in (HEAD_DIMS[gate] if head_dims is None else (head_dims,))
        if _are_dims_supported(dtype, *dims)
        for tier in (PORTABLE, HOPPER)
        if tier is PORTABLE or _fits_hopper(*dims)
    ]


def prepare_bytes(key_dim: int, *, has_channel_gate: bool) -> int:
    """Return the shared memory of the prepare kernel: PrepareShared in CUDA."""
    operands = 2 * 2 * CHUNK * (key_dim + _PAD)
    triangles = 4 * 2 * CHUNK * (CHUNK + _PAD)
    matrices = operands + triangles if has_channel_gate else max(operands, triangles)
    decays = CHUNK * (key_dim + _PAD) if has_channel_gate else 4
    return matrices + 4 * (4 * 16 * (16 + 4) + 4 * CHUNK + decays)


def num_factors(key_dim: int, *, has_channel_gate: bool) -> int:
    """Return the factors per chunk and head: ChunkScratch::kFactors in CUDA."""
    return key_dim if has_channel_gate else 3 * CHUNK + 4


def choose_scan(
    tier: Tier,
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
    narrow slices to fill all of them, with many, wide slices load a head's chunks less often. As
    many stages are used as shared memory has room for. The choice does not change a result's bits.

    Examples
    --------
    >>> h100 = {"num_sms": 132, "shared_bytes": 227 * 1024}
    >>> [choose_scan(HOPPER, num_heads, 128, 128, **h100) for num_heads in (32, 512)]
    [(64, 3), (128, 3)]
    >>> choose_scan(PORTABLE, 32, 128, 128, num_sms=108, shared_bytes=99 * 1024)
    (64, 1)
    """

    def time(width: int) -> float:
        return ceil_div(num_heads * value_dim // width, num_sms) * tier.times[width]

    def fits(kind: tuple[int, int]) -> bool:
        size = tier.shared_bytes(key_dim, *kind, has_channel_gate=has_channel_gate)
        return value_dim % kind[0] == 0 and size <= shared_bytes

    return min(filter(fits, tier.kernels), key=lambda kind: (time(kind[0]), -kind[1]))


def scratch_floats(num_heads: int, key_dim: int, *, has_channel_gate: bool) -> int:
    """Return the floats of scratch per chunk: ChunkScratch in CUDA."""
    halves = 2 * CHUNK * CHUNK
    if has_channel_gate:
        halves += 3 * CHUNK * key_dim
    return num_heads * (halves // 2 + num_factors(key_dim, has_channel_gate=has_channel_gate))


def launch_ranges(num_tokens: int, batch: int, chunk_floats: int) -> list[tuple[int, int]]:
    """Return the ranges of chunk ids, (first, count), whose scratch is used at once.

    Examples
    --------
    >>> launch_ranges(8192, 1, 1 << 20)
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
    dtypes = dtype_name(args["q"].dtype), dtype_name(args["states"].dtype)
    gate = {"has_channel_gate": args["a"].ndim == 3}
    tier = PORTABLE
    if is_hopper(dtypes[0]) and _fits_hopper(key_dim, value_dim):
        tier = HOPPER
    width, stages = choose_scan(
        tier,
        batch * num_heads,
        key_dim,
        value_dim,
        **gate,
        num_sms=sm_count(),
        shared_bytes=limits().shared_bytes,
    )
    prepare, scan = (spec(t, *dtypes, key_dim, value_dim, **gate) for t in (PORTABLE, tier))
    chunk_floats = scratch_floats(num_heads, key_dim, **gate)
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
            prepare,
            (count, num_heads),
            (_PREPARE_THREADS,),
            prepare_bytes(key_dim, **gate),
            pdl=True,
            **given,
        )
        tier.kernels[width, stages].launch(
            scan,
            (batch, num_heads, value_dim // width),
            (tier.threads(width),),
            tier.shared_bytes(key_dim, width, stages, **gate),
            pdl=True,
            **given,
        )
