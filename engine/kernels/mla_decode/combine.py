"""Second kernel of mla_decode, which sums the partials of split sequences."""

from __future__ import annotations

from typing import Any

from engine.kernels._attention import are_aligned
from engine.kernels._elementwise import named_strides
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels.mla_decode.problem import Problem

__all__ = ["SPLIT_LIST_FLOATS", "launch_combine"]

SPLIT_LIST_FLOATS = 4
"""Size of a SplitList in CUDA, in units of four bytes."""

_KERNEL = Kernel(
    "mla_decode_combine",
    "splits:ptr partial_o:ptr partial_stats:ptr out:ptr lse:ptr out_stride_b:i64 "
    "out_stride_t:i64 out_stride_h:i64 num_rows:i32 num_heads:i32 latent:i32 is_vector:i32 "
    "rows_per_cta:i32",
    struct="MlaCombineParams",
)
_THREADS = 256  # kCombineThreads in CUDA
_MANY_ROWS = 1024  # rows of the batch from which on each warp combines one


def launch_combine(
    spec: ModuleSpec,
    problem: Problem,
    splits: Any,
    partial_o: Any,
    partial_stats: Any,
    *,
    pdl: bool,
) -> None:
    """Launch on the current stream, after the kernel that writes the partials.

    Many rows of few partials are combined by a warp each, few rows of many partials by a block.
    """
    batch, _, num_heads, latent = problem.q.shape
    rows = problem.num_rows
    rows_per_cta = 1 if batch * rows < _MANY_ROWS else _THREADS // 32
    _KERNEL.launch(
        spec,
        (batch, ceil_div(rows, rows_per_cta)),
        (_THREADS,),
        pdl=pdl,
        **named_strides("bth", out=problem.out),
        splits=splits,
        partial_o=partial_o,
        partial_stats=partial_stats,
        out=problem.out,
        lse=problem.lse,
        num_rows=rows,
        num_heads=num_heads,
        latent=latent,
        is_vector=int(are_aligned(problem.out)),
        rows_per_cta=rows_per_cta,
    )
