"""mla_decode on Hopper (`mla_decode_sm90.cu`): tile choice and launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.dtypes import dtype_name
from engine.kernels._attention import BLOCK_SIZES, are_aligned, are_tensor_map_rows
from engine.kernels._chip import HOPPER_DTYPES, is_hopper, sm_count
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._tensor_map import tensor_map
from engine.kernels._workspace import workspace
from engine.kernels.mla_decode.combine import SPLIT_LIST_FLOATS, launch_combine
from engine.kernels.mla_decode.problem import SHARED_PARAMS, Problem

__all__ = ["HopperTile", "choose_hopper_tile", "is_supported", "launch", "specs"]

_KERNEL = Kernel(
    "mla_decode_sm90",
    "latent_map:tmap rope_map:tmap q_map:tmap q_rope_map:tmap "
    + SHARED_PARAMS.format(q_strides="", sizes="page_groups:i32 ", options="split_cost:i32 "),
    struct="MlaDecodeSm90Params",
)

_ROWS = 64  # query rows per CTA, kRows in CUDA
_KEYS = 64  # keys per tile, kKeys in CUDA
_ROPE = 64
_THREADS = 384
_MAX_GROUPS = 2**31 - 256  # groups of 8 tokens that a tensor map can count


@dataclass(frozen=True)
class HopperTile:
    """Macro values of mla_decode_config_sm90.cuh.

    Attributes
    ----------
    latent : int
        L: 256 or 512.
    stages : int
        Tiles of keys in flight.
    box_keys : int
        Tokens per TMA box: the page size, at most 64.
    """

    latent: int
    stages: int
    box_keys: int

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory, laid out in mla_decode_config_sm90.cuh."""
        tile = _KEYS * (self.latent + _ROPE) * 2
        exchange = 128 * (_KEYS + 16)
        sums = 2 * _ROWS * 4
        barriers = 2 * 3 * self.stages + 2 * 8 + 2
        return tile * (1 + self.stages) + exchange + sums + barriers * 8 + 2 * 40

    def spec(self, dtype: str) -> ModuleSpec:
        """Return the module compiled for this tile."""
        macros = {
            "LATENT": self.latent,
            "ROPE": _ROPE,
            "STAGES": self.stages,
            "BOX_KEYS": self.box_keys,
            "PREFETCHED": _PREFETCHED,
            "SHARED_BYTES": self.shared_bytes,
        }
        return ModuleSpec("mla_decode/mla_decode_sm90.cu", dtype, tuple(macros.items()))


_PREFETCHED = 0  # tiles that are fetched to L2 ahead of the stages
_SPLIT_COST = 4  # cost of splitting a sequence with 64 rows, in tiles of keys
_STAGES = {256: 4, 512: 2}  # by L; as many as shared memory holds


def choose_hopper_tile(dtype: str, latent: int, rope: int, block_size: int) -> HopperTile | None:
    """Return the tile for these sizes, or None if the Hopper kernel does not support them.

    Examples
    --------
    >>> choose_hopper_tile("bfloat16", 512, 64, block_size=128)
    HopperTile(latent=512, stages=2, box_keys=64)
    """
    if dtype not in HOPPER_DTYPES or latent not in _STAGES or rope != _ROPE:
        return None
    return HopperTile(latent, _STAGES[latent], min(block_size, _KEYS))


def specs(
    dtype: str, latent_dim: int | None = None, block_size: int | None = None
) -> tuple[ModuleSpec, ...]:
    """Return the modules for one latent width and block size; None means all."""
    latents = _STAGES if latent_dim is None else (latent_dim,)
    sizes = BLOCK_SIZES if block_size is None else (block_size,)
    tiles = (choose_hopper_tile(dtype, latent, _ROPE, n) for latent in latents for n in sizes)
    return tuple(tile.spec(dtype) for tile in dict.fromkeys(tiles) if tile is not None)


def is_supported(problem: Problem) -> bool:
    """Tell whether the Hopper kernel supports the problem on the current device."""
    q = problem.q
    pages = problem.pages
    dtype = dtype_name(q.dtype)
    num_blocks, block_size, width = pages.shape
    tile = choose_hopper_tile(dtype, q.shape[3], width - q.shape[3], block_size)
    step = pages.strides[0] if num_blocks > 1 else 0
    return (
        tile is not None
        and is_hopper(dtype)
        and are_tensor_map_rows(q, problem.q_rope)
        and are_aligned(problem.out, pages)
        and _has_even_rows(q)
        and _has_even_rows(problem.q_rope)
        and pages.size > 0
        and step >= 0
        and step % (8 * width * pages.itemsize) == 0
        and num_blocks * max(step, 1) // (8 * width * pages.itemsize) < _MAX_GROUPS
    )


def _has_even_rows(x: Any) -> bool:
    """Tell whether the heads of all tokens of a sequence are equally far apart."""
    return 1 in x.shape[1:3] or x.strides[1] == x.shape[2] * x.strides[2]


def launch(problem: Problem, *, pdl: bool) -> None:
    """Launch on arrays that `is_supported` accepts."""
    batch = problem.q.shape[0]
    latent = problem.q.shape[3]
    dtype = dtype_name(problem.q.dtype)
    tile = choose_hopper_tile(dtype, latent, _ROPE, problem.pages.shape[1])
    assert tile is not None
    row_tiles = ceil_div(problem.num_rows, _ROWS)
    num_cta_groups = max(1, sm_count() // row_tiles)
    num_splits = problem.num_splits
    # SplitOf.partial in decode_scheduler.cuh: one per split, or two per CTA group.
    partials = batch * num_splits if num_splits else 2 * num_cta_groups
    num_floats = partials * problem.num_rows
    scratch = workspace(num_floats * (latent + 2) + batch * SPLIT_LIST_FLOATS)
    splits = scratch[: batch * SPLIT_LIST_FLOATS]
    partial_o = scratch[splits.size :]
    partial_stats = partial_o[num_floats * latent :]
    _KERNEL.launch(
        tile.spec(dtype),
        (row_tiles, num_cta_groups if batch else 0),
        (_THREADS,),
        tile.shared_bytes,
        pdl=pdl,
        **problem.arguments(),
        **_page_maps(problem.pages, dtype, tile),
        q_map=_row_map(problem.q, dtype),
        q_rope_map=_row_map(problem.q_rope, dtype),
        partial_o=partial_o,
        partial_stats=partial_stats,
        splits=splits,
        num_splits=num_splits or 0,
        split_cost=_SPLIT_COST * min(problem.num_rows, _ROWS) // _ROWS,
    )
    launch_combine(tile.spec(dtype), problem, splits, partial_o, partial_stats, pdl=True)


def _page_maps(pages: Any, dtype: str, tile: HopperTile) -> dict[str, Any]:
    """Return the tensor maps of the pages, and the groups of 8 tokens between two pages.

    Their axes are the 64 values of a chunk, 8 tokens, chunks, and groups of 8 tokens. A box thus
    arrives as groups of 8 tokens with all its chunks: rows of 128 bytes that wgmma reads both as
    keys and, transposed, as values. A box holds half of the latents, or the rotated keys.
    """
    num_blocks, block_size, width = pages.shape
    row = width * pages.itemsize
    step = pages.strides[0] if num_blocks > 1 else block_size * row
    page_groups = step // (8 * row)
    groups = (num_blocks - 1) * page_groups + block_size // 8

    def map_of(chunks: int) -> Any:
        return tensor_map(
            pages.data.ptr,
            dtype,
            (64, 8, width // 64, groups),
            (row, 128, 8 * row),
            (64, 8, chunks, tile.box_keys // 8),
            promote=0,
        )

    maps = {"latent_map": map_of(tile.latent // 128), "rope_map": map_of(1)}
    return {**maps, "page_groups": page_groups}


def _row_map(x: Any, dtype: str) -> Any:
    """Return the tensor map of queries as (B, Q H, columns), with boxes of 64 columns."""
    batch, num_queries, num_heads, columns = x.shape
    sizes = (columns, num_queries * num_heads, batch)
    step = x.strides[2] if num_heads > 1 else x.strides[1]
    return tensor_map(x.data.ptr, dtype, sizes, (step, x.strides[0]), (64, _ROWS, 1))
