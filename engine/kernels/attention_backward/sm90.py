"""attention_backward on Hopper (`attention_backward_sm90.cu`): tile choice and launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.dtypes import dtype_name
from engine.kernels._attention import are_aligned, are_tensor_map_rows
from engine.kernels._chip import HOPPER_DTYPES, is_hopper, sm_count
from engine.kernels._elementwise import named_strides
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._tensor_map import tensor_map
from engine.kernels._workspace import counters, workspace
from engine.kernels.attention_backward.problem import BackwardProblem

__all__ = ["HopperTile", "choose_hopper_tile", "is_supported", "launch", "specs"]

_BEFORE = Kernel(
    "attention_backward_sm90_before",
    "dout:ptr out:ptr lse:ptr dlse:ptr cu_seqlens_q:ptr statistics:ptr dq_sum:ptr order:ptr "
    "delta:ptr dout_stride_t:i64 dout_stride_h:i64 out_stride_t:i64 out_stride_h:i64 total_q:i32 "
    "num_heads:i32 head_dim:i32 query_tiles:i32",
    struct="AttentionBackwardSm90BeforeParams",
)
_MAIN = Kernel(
    "attention_backward_sm90",
    "q_map:tmap k_map:tmap v_map:tmap dout_map:tmap cu_seqlens_q:ptr cu_seqlens_k:ptr "
    "statistics:ptr dq_sum:ptr order:ptr counter:ptr dk:ptr dv:ptr dk_stride_t:i64 "
    "dk_stride_h:i64 dv_stride_t:i64 dv_stride_h:i64 total_q:i32 total_k:i32 num_heads:i32 "
    "group:i32 head_dim:i32 causal:i32 window:i32 key_blocks:i32 descending:i32 score_factor:f32 "
    "scale:f32",
    struct="AttentionBackwardSm90Params",
)
_AFTER = Kernel(
    "attention_backward_sm90_after",
    "dq_sum:ptr cu_seqlens_q:ptr dq:ptr dq_stride_t:i64 dq_stride_h:i64 total_q:i32 num_heads:i32 "
    "head_dim:i32 query_tiles:i32 scale:f32",
)

_KEYS = 128  # keys per CTA
_STAGES = 2  # stages of the rings of Q and dO
_HALF_FLOATS = 64 * 64  # floats of dQ per consumer warpgroup: half a tile


@dataclass(frozen=True)
class HopperTile:
    """Tile shape: columns (D, padded), and queries per tile."""

    head_dim: int
    queries: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: K, V, stages of Q and dO, dS twice, dQ, statistics, mbarriers."""
        row = 2 * self.head_dim
        tiles = 2 * _KEYS * row + 2 * _STAGES * self.queries * row + 2 * _KEYS * self.queries * 2
        statistics = _STAGES * (2 * self.queries * 4 + 16)
        return 1024 + tiles + 2 * _HALF_FLOATS * 4 + statistics + 8 * (3 + 4 * _STAGES + 4)

    def spec(self, dtype: str, has_window: bool = False) -> ModuleSpec:
        """Return the module compiled for this tile; `has_window` is for problems with a window."""
        macros = {
            "HEAD_DIM": self.head_dim,
            "QUERIES": self.queries,
            "SHARED_BYTES": self.shared_bytes,
            "WINDOW": int(has_window),
        }
        return ModuleSpec(
            "attention_backward/attention_backward_sm90.cu", dtype, tuple(macros.items())
        )


_TILES = (HopperTile(64, 128), HopperTile(128, 64))


def choose_hopper_tile(dtype: str, head_dim: int) -> HopperTile | None:
    """Return the tile for heads of `head_dim`, or None if the Hopper kernel has none.

    Examples
    --------
    >>> choose_hopper_tile("bfloat16", 80).head_dim, choose_hopper_tile("float32", 64)
    (128, None)
    """
    if dtype not in HOPPER_DTYPES or head_dim % 8 or head_dim <= 32:
        return None
    return next((tile for tile in _TILES if head_dim <= tile.head_dim), None)


def specs(dtype: str, *, head_dim: int | None = None) -> tuple[ModuleSpec, ...]:
    """Return the modules for one head dim or all."""
    dims = [tile.head_dim for tile in _TILES] if head_dim is None else [head_dim]
    tiles = [choose_hopper_tile(dtype, dim) for dim in dims]
    found = [tile for tile in tiles if tile is not None]
    return tuple(tile.spec(dtype, kind) for kind in (False, True) for tile in found)


def is_supported(problem: BackwardProblem) -> bool:
    """Tell whether the Hopper kernel supports the problem on the current device."""
    q = problem.inputs["q"]
    k = problem.inputs["k"]
    loaded = (problem.inputs[name] for name in ("dout", "q", "k", "v"))
    return (
        choose_hopper_tile(dtype_name(q.dtype), q.shape[2]) is not None
        and not problem.rule.softcap
        and problem.pattern is None
        and is_hopper(dtype_name(q.dtype))
        and q.size > 0
        and k.size > 0
        and are_tensor_map_rows(*loaded)
        and are_aligned(problem.inputs["out"], *problem.grads.values())
    )


def launch(problem: BackwardProblem) -> None:
    """Launch a problem that `is_supported` accepts."""
    inputs = problem.inputs
    (total_q, num_heads, head_dim) = inputs["q"].shape
    dtype = dtype_name(inputs["q"].dtype)
    total_k, num_kv_heads, _ = inputs["k"].shape
    tile = choose_hopper_tile(dtype, head_dim)
    assert tile is not None
    batch = problem.starts["cu_seqlens_q"].size - 1
    spec = tile.spec(dtype, problem.rule.window > 0)
    scratch = _scratch(problem, (total_q // tile.queries + batch) * num_heads, tile)
    common: dict[str, Any] = {
        "cu_seqlens_q": problem.starts["cu_seqlens_q"],
        "dq_sum": scratch["dq_sum"],
        "total_q": total_q,
        "num_heads": num_heads,
        "head_dim": head_dim,
    }
    query_tiles = ceil_div(problem.max_q, tile.queries)
    by_query = {**common, "query_tiles": query_tiles}
    query_grid = (query_tiles * num_heads * batch,)
    between = {"statistics": scratch["statistics"], "order": scratch["order"]}
    _BEFORE.launch(
        spec,
        query_grid,
        (256,),
        **_summed(inputs),
        **between,
        **by_query,
        dlse=problem.dlse,
        delta=scratch["delta"],
    )
    key_blocks = ceil_div(problem.max_k, _KEYS)
    keys = {name: problem.grads[name] for name in ("dk", "dv")}
    _MAIN.launch(
        spec,
        (key_blocks * num_kv_heads * batch,),
        (384,),
        tile.shared_bytes,
        **_maps(inputs, dtype, tile),
        **between,
        **common,
        cu_seqlens_k=problem.starts["cu_seqlens_k"],
        counter=counters(),
        **keys,
        **named_strides("th", **keys),
        total_k=total_k,
        group=num_heads // num_kv_heads,
        causal=int(problem.causal),
        window=problem.rule.window,
        key_blocks=key_blocks,
        descending=int(key_blocks > sm_count()),
        score_factor=problem.rule.factor,
        scale=problem.rule.scale,
    )
    dq = {"dq": problem.grads["dq"]}
    strides = named_strides("th", **dq)
    _AFTER.launch(spec, query_grid, (256,), **dq, **strides, scale=problem.rule.scale, **by_query)
    problem.launch_sinks(spec, scratch["delta"], scratch["partial"])


def _summed(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for delta, the row sums of dout * out, and the log-sum-exp."""
    summed = {name: inputs[name] for name in ("dout", "out")}
    return {**summed, **named_strides("th", **summed), "lse": inputs["lse"]}


def _scratch(problem: BackwardProblem, tiles: int, tile: HopperTile) -> dict[str, Any]:
    """Return the scratch arrays of the launches; `tiles` counts (query tile, head) pairs."""
    has_sinks = problem.sinks is not None
    sizes = {
        "dq_sum": tiles * 2 * _HALF_FLOATS,
        "statistics": tiles * 2 * tile.queries,
        "order": tiles * 2,
        "delta": problem.num_statistics * has_sinks,
        "partial": problem.sink_floats,
    }
    floats = workspace(sum(sizes.values()))
    found: dict[str, Any] = {}
    at = 0
    for name, size in sizes.items():
        found[name] = floats[at : at + size] if size else None
        at += size
    found["order"] = found["order"].view(np.int32) if problem.deterministic else None
    return found


def _maps(inputs: dict[str, Any], dtype: str, tile: HopperTile) -> dict[str, Any]:
    """Return the tensor maps of q and dout as (Tq, H, D), and of k and v as (Tk, K, D)."""
    maps = {}
    for name in ("q", "k", "v", "dout"):
        x = inputs[name]
        rows = _KEYS if name in "kv" else tile.queries
        sizes = (x.shape[2], x.shape[1], x.shape[0])
        strides = (x.strides[1], x.strides[0])
        maps[f"{name}_map"] = tensor_map(x.data.ptr, dtype, sizes, strides, (64, 1, rows))
    return maps
