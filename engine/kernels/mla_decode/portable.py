"""mla_decode on any chip (`mla_decode.cu`): choice of splits; launch."""

from __future__ import annotations

from engine.dtypes import dtype_name, itemsize
from engine.kernels._attention import are_aligned
from engine.kernels._chip import sm_count
from engine.kernels._elementwise import named_strides
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._workspace import workspace
from engine.kernels.attention_decode.portable import choose_num_splits
from engine.kernels.mla_decode.combine import SPLIT_LIST_FLOATS, launch_combine
from engine.kernels.mla_decode.problem import SHARED_PARAMS, Problem

__all__ = ["launch", "specs"]

_KERNEL = Kernel(
    "mla_decode",
    "q:ptr q_rope:ptr "
    + SHARED_PARAMS.format(
        q_strides="q_stride_b:i64 q_stride_t:i64 q_stride_h:i64 q_rope_stride_b:i64 "
        "q_rope_stride_t:i64 q_rope_stride_h:i64 ",
        sizes="page_stride:i64 latent:i32 rope:i32 is_vector:i32 ",
        options="",
    ),
    struct="MlaDecodeParams",
)
_THREADS = 256
_KEYS = 32  # keys per tile, kKeys in CUDA
_ROPE = 64  # columns of rotated values, padded
_LATENTS = (256, 512)  # columns of latents, padded


def rows_of(dtype: str) -> int:
    """Return the query rows per block, kRows in CUDA."""
    return 8 if dtype == "float32" else 16


def shared_bytes(dtype: str, latent: int) -> int:
    """Return the size of Shared in CUDA."""
    is_float = dtype == "float32"
    rows = rows_of(dtype)
    stages = parts = 1 if is_float else 2
    pitch = latent + _ROPE + (4 if is_float else 0)
    tiles = (rows + stages * _KEYS) * pitch * itemsize(dtype)
    scores = parts * rows * _KEYS * 4
    probs = rows * (_KEYS + (0 if is_float else 8)) * itemsize(dtype)
    return tiles + scores + probs + 3 * rows * 4


def spec(dtype: str, latent: int) -> ModuleSpec:
    """Return the module for up to `latent` latents."""
    macros = {"LATENT": latent, "ROPE": _ROPE, "SHARED_BYTES": shared_bytes(dtype, latent)}
    return ModuleSpec("mla_decode/mla_decode.cu", dtype, tuple(macros.items()))


def specs(dtype: str, latent_dim: int | None = None) -> tuple[ModuleSpec, ...]:
    """Return the modules for one latent width; None means all."""
    if latent_dim is not None:
        return (spec(dtype, _padded(latent_dim)),)
    return tuple(spec(dtype, latent) for latent in _LATENTS)


def _padded(latent: int) -> int:
    return next(n for n in _LATENTS if latent <= n)


def launch(problem: Problem) -> None:
    """Launch on CuPy arrays; a `num_splits` of None is chosen for `max_context_len` keys."""
    batch, _, _, latent = problem.q.shape
    width = problem.pages.shape[2]
    dtype = dtype_name(problem.q.dtype)
    padded = _padded(latent)
    module = spec(dtype, padded)
    row_tiles = ceil_div(problem.num_rows, rows_of(dtype))
    num_splits = problem.num_splits
    if num_splits is None:
        keys = ceil_div(problem.max_context_len, 64) * 64  # for lru_cache hits
        num_splits = choose_num_splits(batch * row_tiles, keys, sm_count())
    num_floats = batch * num_splits * problem.num_rows
    scratch = workspace(num_floats * (padded + 2) + batch * SPLIT_LIST_FLOATS)
    splits = scratch[: batch * SPLIT_LIST_FLOATS]
    partial_o = scratch[splits.size :]
    partial_stats = partial_o[num_floats * padded :]
    arrays = (problem.q, problem.q_rope, problem.pages, problem.pages[..., latent:], problem.out)
    _KERNEL.launch(
        module,
        (batch, row_tiles, num_splits),
        (_THREADS,),
        shared_bytes(dtype, padded),
        **problem.arguments(),
        **named_strides("bth", q=problem.q, q_rope=problem.q_rope),
        q=problem.q,
        q_rope=problem.q_rope,
        page_stride=problem.pages.strides[0] // problem.pages.itemsize,
        latent=latent,
        rope=width - latent,
        is_vector=int(are_aligned(*arrays)),
        partial_o=partial_o,
        partial_stats=partial_stats,
        splits=splits if num_splits > 1 else None,
        num_splits=num_splits,
    )
    if num_splits > 1:
        launch_combine(module, problem, splits, partial_o, partial_stats, pdl=False)
