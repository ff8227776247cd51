"""Gradients of attention: `cuda_src/attention_backward/`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine import reference
from engine.dtypes import accumulation_dtype, dtype_name, itemsize
from engine.kernels import _attention_pattern
from engine.kernels._attention import (
    ScoreRule,
    are_aligned,
    check_heads,
    checked_longest,
    checked_sinks,
    checked_starts,
    grid_parts,
)
from engine.kernels._contract import MIRROR_FLOATS, Contract
from engine.kernels._elementwise import named_strides
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._workspace import workspace
from engine.kernels.attention_backward import sm90
from engine.kernels.attention_backward.problem import BackwardProblem

__all__ = ["BackwardTile", "attention_backward", "choose_tile", "specs"]

_DELTA = Kernel(
    "attention_backward_delta",
    "dout:ptr out:ptr dlse:ptr delta:ptr dout_stride_t:i64 dout_stride_h:i64 out_stride_t:i64 "
    "out_stride_h:i64 rows:i64 num_heads:i32 head_dim:i32",
)
_PARAMS = (
    "dout:ptr q:ptr k:ptr v:ptr lse:ptr delta:ptr cu_seqlens_q:ptr cu_seqlens_k:ptr dq:ptr dk:ptr "
    "dv:ptr dout_stride_t:i64 dout_stride_h:i64 q_stride_t:i64 q_stride_h:i64 k_stride_t:i64 "
    "k_stride_h:i64 v_stride_t:i64 v_stride_h:i64 dq_stride_t:i64 dq_stride_h:i64 dk_stride_t:i64 "
    "dk_stride_h:i64 dv_stride_t:i64 dv_stride_h:i64 total_q:i32 total_k:i32 num_heads:i32 "
    "group:i32 head_dim:i32 causal:i32 window:i32 is_vector:i32 score_inner:f32 score_factor:f32 "
    "scale:f32"
) + _attention_pattern.PARAMS
_STRUCT = "AttentionBackwardParams"
_KEYS = Kernel("attention_backward_keys", _PARAMS, struct=_STRUCT)
_QUERIES = Kernel("attention_backward_queries", _PARAMS, struct=_STRUCT)


@dataclass(frozen=True)
class BackwardTile:
    """Tile shape of a block: macro values of the CUDA file.

    Attributes
    ----------
    head_dim : int
        Columns in shared memory: D, padded.
    warps, warp_rows : int
        Warps per block, and rows per warp.
    stream, stages : int
        Rows per tile of the streamed operand, and pipeline stages (its tiles in shared memory).
    """

    head_dim: int
    warps: int
    warp_rows: int
    stream: int
    stages: int

    @property
    def rows(self) -> int:
        """Rows per block: keys for dK and dV, queries for dQ."""
        return self.warps * self.warp_rows

    @property
    def key_parts(self) -> int:
        """Blocks that share the columns of dK and dV; 1 if registers can hold all columns."""
        return 2 if self.warp_rows == 16 and self.head_dim > 128 else 1

    def shared_bytes(self, dtype: str) -> int:
        """Return the dynamic shared memory in bytes: 2 row tiles, 2 tiles per stage, statistics."""
        pitch = self.head_dim + (4 if dtype == "float32" else 0)
        rows = self.rows + self.stages * self.stream
        return 2 * rows * (pitch * itemsize(dtype) + 4)

    def spec(self, dtype: str, is_patterned: bool = False) -> ModuleSpec:
        """Return the module compiled for this tile, with patterns if `is_patterned`."""
        macros = {
            "HEAD_DIM": self.head_dim,
            "WARPS": self.warps,
            "WARP_ROWS": self.warp_rows,
            "STREAM": self.stream,
            "STAGES": self.stages,
            "SHARED_BYTES": self.shared_bytes(dtype),
            "PATTERN": int(is_patterned),
        }
        return ModuleSpec("attention_backward/attention_backward.cu", dtype, tuple(macros.items()))


_MAX_HEAD_DIM = 256
# Each tile has as many rows as fit, with two stages, in the smallest chips' 99 KiB.
_TILES_16 = (
    BackwardTile(64, 8, 16, 64, 2),
    BackwardTile(96, 8, 16, 32, 2),
    BackwardTile(128, 8, 16, 32, 2),
    BackwardTile(256, 4, 16, 32, 1),
)
_TILES_32 = (BackwardTile(128, 4, 4, 32, 1), BackwardTile(256, 4, 4, 32, 1))


def choose_tile(dtype: str, head_dim: int) -> BackwardTile:
    """Choose the tile with the least padding for heads of `head_dim`.

    Examples
    --------
    >>> choose_tile("bfloat16", 80).head_dim
    96
    """
    tiles = _TILES_32 if dtype == "float32" else _TILES_16
    return next(tile for tile in tiles if head_dim <= tile.head_dim)


def specs(
    dtype: str, *, head_dim: int | None = None, patterns: bool = False, **_: Any
) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch, for one head dim or all.

    `patterns` adds the modules for patterns.
    """
    dims = range(1, _MAX_HEAD_DIM + 1) if head_dim is None else (head_dim,)
    tiles = dict.fromkeys(choose_tile(dtype, dim) for dim in dims)
    kinds = (False, True) if patterns else (False,)
    portable = tuple(tile.spec(dtype, kind) for kind in kinds for tile in tiles)
    return portable + sm90.specs(dtype, head_dim=head_dim)


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    causal: bool = True,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    pattern: _attention_pattern.Pattern | None = None,
    sinks: Any = None,
    dlse: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = True,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dsinks: Any = None,
) -> Any:
    """Return the gradients of ``sum(dout * attention_prefill(q, k, v))`` with respect to q, k, v.

    Parameters
    ----------
    dout : (Tq, H, D) array of q's dtype
        Gradient with respect to the attention's result. `dout`, `q`, `k`, `v` and `out` may be
        views whose last axis is contiguous.
    q : (Tq, H, D) array of float32, float16 or bfloat16 (NumPy: or float64)
        Query tokens of all sequences, concatenated. D <= 256.
    k, v : (Tk, K, D) arrays of q's dtype
        H is a multiple of K: query head h reads head h // (H // K).
    out : (Tq, H, D) array of q's dtype
    lse : (Tq, H) array of float32 (float64 for float64)
        Results of `attention_prefill` with `return_lse` for the same arguments.
    cu_seqlens_q, cu_seqlens_k : (B+1,) arrays of int32
        First row of each sequence in q and in k, then the end: they rise from 0 to Tq and to Tk.
    causal : bool
        If True, query i of n sees keys 0 to len - n + i; otherwise every query sees all keys.
    scale : float, optional
        Factor on the scores, by default D**-0.5.
    window : int
        Each query sees only its last `window` keys, including its own; 0 means no limit. Requires
        `causal`.
    softcap : float
        Replace a scaled score s by softcap * tanh(s / softcap); 0 means no cap.
    pattern : BlockSparse or Periodic, optional
        Further restricts the keys that each query sees. See `attention_prefill`.
    sinks : (H,) array of lse's dtype, optional
        Attention sinks of the forward pass, whose log-sum-exp includes them.
    dlse : (Tq, H) array of lse's dtype, optional
        Gradient with respect to `lse`, for results that also depend on it (`merge_states`).
    max_seqlen_q, max_seqlen_k : int, optional
        Upper bounds of the sequence lengths. If omitted on CUDA, computing them synchronises.
    deterministic : bool
        Return the same bits every time. False lets kernels add to dQ in any order if that is
        faster.
    dq, dk, dv, dsinks : arrays, optional
        Arrays for the results: dq, dk and dv may be views whose last axis is contiguous. None may
        overlap an input or another result.

    Returns
    -------
    dq : (Tq, H, D) array of q's dtype
        0 for a query that sees no key.
    dk, dv : (Tk, K, D) arrays of q's dtype
        Summed over the query heads that share a key/value head; 0 for a key that no query sees.
    dsinks : (H,) array of lse's dtype
        Only if `sinks` is given.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract. Lengths are checked on the CPU only; on CUDA they are
        clamped to the arrays.

    Notes
    -----
    P is recomputed from the log-sum-exp [1]_; if that includes a sink, the formulas for dq, dk and
    dv stay the same. P and all sums are float32; P and dS are rounded to q's dtype as GEMM
    operands; each result is rounded once. On Hopper a pattern or a soft cap selects the portable
    kernel.

    References
    ----------
    .. [1] Dao: FlashAttention-2, arXiv:2307.08691.

    Examples
    --------
    >>> import numpy as np
    >>> q = k = np.ones((2, 1, 4), np.float32)
    >>> v = np.array([[[0, 0, 0, 0]], [[2, 4, 6, 8]]], np.float32)
    >>> where = {"cu_seqlens_q": np.array([0, 2], np.int32)}
    >>> where["cu_seqlens_k"] = where["cu_seqlens_q"]
    >>> out, lse = reference.attention_prefill(q, k, v, **where, return_lse=True)
    >>> dq, dk, dv = attention_backward(np.ones_like(q), q, k, v, out, lse, **where)
    >>> dv[:, 0, 0], dk[:, 0, 0]
    (array([1.5, 0.5], dtype=float32), array([-2.5,  2.5], dtype=float32))
    """
    call = Contract("attention_backward")
    q = call.array("q", q, "Tq H D", MIRROR_FLOATS, layout="rows")
    statistic = accumulation_dtype(q.dtype)
    inputs = {
        "dout": call.array("dout", dout, "Tq H D", q.dtype, layout="rows"),
        "q": q,
        "k": call.array("k", k, "Tk K D", q.dtype, layout="rows"),
        "v": call.array("v", v, "Tk K D", q.dtype, layout="rows"),
        "out": call.array("out", out, "Tq H D", q.dtype, layout="rows"),
        "lse": call.array("lse", lse, "Tq H", statistic),
    }
    starts = {
        "cu_seqlens_q": checked_starts(call, "cu_seqlens_q", cu_seqlens_q, call["Tq"]),
        "cu_seqlens_k": checked_starts(call, "cu_seqlens_k", cu_seqlens_k, call["Tk"]),
    }
    check_heads(call, _MAX_HEAD_DIM)
    rule = ScoreRule.checked(call, call["D"], scale, window, softcap)
    call.check("window", causal or not window, "0 unless causal", window)
    _attention_pattern.check(call, pattern)
    sinks = checked_sinks(call, sinks, statistic)
    dlse = None if dlse is None else call.array("dlse", dlse, "Tq H", statistic)
    max_q = checked_longest(call, "max_seqlen_q", max_seqlen_q, starts["cu_seqlens_q"])
    max_k = checked_longest(call, "max_seqlen_k", max_seqlen_k, starts["cu_seqlens_k"])
    given = {"dq": dq, "dk": dk, "dv": dv}
    call.check("dsinks", dsinks is None or sinks is not None, "None without sinks", dsinks)
    if call.on_cpu:
        results = reference.attention_backward(
            **inputs,
            **starts,
            causal=causal,
            scale=rule.scale,
            window=rule.window,
            softcap=rule.softcap,
            pattern=pattern,
            sinks=sinks,
            dlse=dlse,
        )
        return _finished(call, {**given, "dsinks": dsinks}, results)
    grads = {
        name: call.output(name, x, inputs[name[1:]].shape, q.dtype, layout="rows")
        for name, x in given.items()
    }
    if sinks is not None:
        dsinks = call.output("dsinks", dsinks, sinks.shape, statistic)
    problem = BackwardProblem(
        inputs=inputs,
        starts=starts,
        grads=grads,
        causal=bool(causal),
        rule=rule,
        pattern=pattern,
        sinks=sinks,
        dsinks=dsinks,
        dlse=dlse,
        max_q=min(max_q, call["Tq"]),
        max_k=min(max_k, call["Tk"]),
        deterministic=deterministic,
    )
    launch = sm90.launch if sm90.is_supported(problem) else _launch
    launch(problem)
    return tuple(grads.values()) if sinks is None else (*grads.values(), dsinks)


def _finished(call: Contract, given: dict[str, Any], results: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the mirror's results, copied into the given arrays, all of which are checked first."""
    names = list(given)[: len(results)]
    targets = [
        call.target(given[name], result, name, layout="C" if name == "dsinks" else "rows")
        for name, result in zip(names, results, strict=True)
    ]
    return tuple(call.fill(*pair) for pair in zip(targets, results, strict=True))


def _launch(problem: BackwardProblem) -> None:
    inputs = problem.inputs
    q = inputs["q"]
    k = inputs["k"]
    (total_q, num_heads, head_dim) = q.shape
    dtype = dtype_name(q.dtype)
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    tile = choose_tile(dtype, head_dim)
    spec = tile.spec(dtype, problem.pattern is not None)
    rule = problem.rule
    count = problem.num_statistics
    scratch = workspace(count + problem.sink_floats)
    delta = scratch[:count].reshape(total_q, num_heads)
    _launch_delta(problem, spec, delta)
    streamed = {name: inputs[name] for name in ("dout", "q", "k", "v")}
    numbers = {
        **named_strides("th", **streamed, **problem.grads),
        "num_heads": num_heads,
        "head_dim": head_dim,
        "total_q": total_q,
        "total_k": k.shape[0],
        "group": group,
        "causal": int(problem.causal),
        "window": rule.window,
        "is_vector": int(are_aligned(*streamed.values())),
        "score_inner": rule.inner,
        "score_factor": rule.factor,
        "scale": rule.scale,
        **_attention_pattern.arguments(problem.pattern),
    }
    key_tiles, query_tiles = (ceil_div(n, tile.rows) for n in (problem.max_k, problem.max_q))
    batch = problem.starts["cu_seqlens_q"].size - 1
    block = (32 * tile.warps,)
    shared = tile.shared_bytes(dtype)
    arrays = {**streamed, **problem.starts, **problem.grads, "lse": inputs["lse"], "delta": delta}
    for heads, sequences, views in grid_parts(arrays, num_kv_heads, group, batch):
        grids = {
            _KEYS: (key_tiles * tile.key_parts, heads, sequences),
            _QUERIES: (query_tiles, heads * group, sequences),
        }
        for kernel, grid in grids.items():
            kernel.launch(spec, grid, block, shared, **views, **numbers)
    problem.launch_sinks(spec, delta, scratch[count:])


def _launch_delta(problem: BackwardProblem, spec: ModuleSpec, delta: Any) -> None:
    """Compute delta (Tq, H), the row sums of dout * out less dlse."""
    summed = {name: problem.inputs[name] for name in ("dout", "out")}
    (_, num_heads, head_dim) = problem.inputs["out"].shape
    _DELTA.launch(
        spec,
        (ceil_div(problem.num_statistics, 8),),
        (256,),
        **summed,
        **named_strides("th", **summed),
        dlse=problem.dlse,
        delta=delta,
        rows=problem.num_statistics,
        num_heads=num_heads,
        head_dim=head_dim,
    )
