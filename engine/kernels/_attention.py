"""Shared code of the attention ops: checks of scores, pages and cu_seqlens; portable tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from engine.dtypes import itemsize
from engine.kernels._contract import FLOAT32, INT32, Contract
from engine.kernels._elementwise import MAX_GRID_Y
from engine.kernels._module import ModuleSpec
from engine.kernels._pages import PageRows, checked_pages
from engine.kernels._prepared_call import constant
from engine.kernels._quantized_kv import checked_scales, kv_dtype_of

__all__ = [
    "BLOCK_SIZES",
    "MAX_HEAD_DIM",
    "Pages",
    "ScoreRule",
    "Tile",
    "are_aligned",
    "are_tensor_map_rows",
    "check_count",
    "check_heads",
    "checked_longest",
    "checked_scale",
    "checked_sinks",
    "checked_starts",
    "even_starts",
    "grid_parts",
]

MAX_HEAD_DIM = 512
BLOCK_SIZES = (16, 32, 64, 128)  # allowed numbers of tokens per block
_USUAL = "from 1e-18 to 1e18"  # allowed range of a scale or soft cap, in error messages


@dataclass(frozen=True)
class ScoreRule:
    """Scaling and masking of scores: `scale` > 0; `window`, `softcap` or `chunk` 0 means none."""

    scale: float
    window: int
    softcap: float
    chunk: int = 0

    @classmethod
    def checked(
        cls, call: Contract, head_dim: int, scale: float | None, window: int, softcap: float
    ) -> ScoreRule:
        """Check `scale`, `window` and `softcap`; `scale` defaults to head_dim**-0.5."""
        scale = checked_scale(call, head_dim, scale)
        window = check_count(call, "window", window)
        softcap = call.number("softcap", softcap, low=0.0)
        call.check("softcap", softcap < math.inf, "finite", softcap)
        call.check("softcap", not softcap or _is_usual(softcap), f"0 or {_USUAL}", softcap)
        return cls(scale, window, softcap)

    @property
    def longest_reach(self) -> int:
        """Maximum number of keys that one query sees; 0 means no limit."""
        return self.chunk or self.window

    @property
    def window_argument(self) -> int:
        """Argument `window` of RowRule in common/attention.cuh."""
        return -self.chunk if self.chunk else self.window

    @property
    def inner(self) -> float:
        """Factor on q.k inside the soft cap's tanh; 0 without a soft cap."""
        return self.scale / self.softcap if self.softcap else 0.0

    @property
    def factor(self) -> float:
        """Factor on q.k, or on the soft cap's tanh; includes log2(e) because kernels use exp2."""
        return (self.softcap or self.scale) * math.log2(math.e)


@dataclass(frozen=True)
class Pages:
    """Paged K and V (P, K, block_size, D), with equal strides, and each sequence's block table.

    `k_scale` and `v_scale` (K,) are set for quantized pages, one scale per key/value head.
    """

    k: Any
    v: Any
    block_tables: Any
    context_lens: Any
    k_scale: Any = None
    v_scale: Any = None

    @classmethod
    def checked(
        cls,
        call: Contract,
        pages: dict[str, Any],
        dtype: Any,
        tables: Any,
        lens: Any,
        k_scale: Any = None,
        v_scale: Any = None,
    ) -> Pages:
        """Check the arrays and, on the CPU, their values; `pages` holds K and V by name."""
        k, v = checked_pages(call, pages, "P K block_size D", dtype)
        size = call["block_size"]
        call.check("block_size", size in BLOCK_SIZES, f"one of {BLOCK_SIZES}", size)
        tables = call.array("block_tables", tables, "B NB", INT32, layout="rows")
        lens = call.array("context_lens", lens, "B", INT32)
        scales = checked_scales(call, k, k_scale, v_scale)
        found = cls(k, v, tables, lens, **scales)
        if call.on_cpu:
            found._check_values(call)
        return found

    @property
    def kv_dtype(self) -> str:
        """Name of the quantized pages' dtype in KV_CODE_DTYPES; "" if they are not quantized."""
        return kv_dtype_of(self.k.dtype)

    @property
    def scales(self) -> dict[str, Any]:
        """Scales of K and V by parameter name, as the ops and kernels expect them."""
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}

    @property
    def rows(self) -> PageRows:
        """Layout of the pages in memory."""
        return PageRows.of(self.k)

    def _check_values(self, call: Contract) -> None:
        """Check the lengths and the block ids they cover (on a GPU this would synchronise)."""
        num_blocks, _, block_size, _ = self.k.shape
        limit = self.block_tables.shape[1] * block_size
        lens = self.context_lens.tolist()
        if not lens:
            return
        if min(lens) < 0 or max(lens) > limit:
            call.check("context_lens", False, f"from 0 to NB * block_size = {limit}", lens)
        counts = {-(-length // block_size) for length in lens}
        ids = self.block_tables[:, : max(counts)]
        if len(counts) > 1:  # entries beyond a sequence's length may be anything
            ids = ids[np.arange(max(counts)) * block_size < self.context_lens[:, None]]
        if ids.size and not (ids.min() >= 0 and ids.max() < num_blocks):
            bad = ids[(ids < 0) | (ids >= num_blocks)]
            call.check("block_tables", False, f"ids from 0 to {num_blocks - 1}", int(bad[0]))


def checked_scale(call: Contract, head_dim: int, scale: float | None) -> float:
    """Check and return the factor on the scores; None means head_dim**-0.5."""
    if scale is None:
        return float(head_dim**-0.5)
    scale = call.number("scale", scale)
    call.check("scale", 0 < scale < math.inf, "positive and finite", scale)
    call.check("scale", _is_usual(scale), _USUAL, scale)
    return scale


def _is_usual(number: float) -> bool:
    """Tell whether `number` lies in the range whose values and ratios are normal float32 values."""
    return 1e-18 <= number <= 1e18


def check_heads(call: Contract, max_head_dim: int = MAX_HEAD_DIM) -> None:
    """Check the sizes bound to H, K and D."""
    h = call["H"]
    k = call["K"]
    d = call["D"]
    call.check("H", h > 0, "1 or more", h)
    if k <= 0 or h % k:
        call.check("K", False, f"a divisor of the number of query heads, {h}", k)
    call.check("D", 0 < d <= max_head_dim, f"from 1 to {max_head_dim}", d)


def checked_sinks(call: Contract, sinks: Any, dtype: np.dtype[Any] = FLOAT32) -> Any:
    """Return the checked sink logits (H,), or None."""
    return None if sinks is None else call.array("sinks", sinks, "H", dtype)


def checked_starts(call: Contract, name: str, starts: Any, total: int) -> Any:
    """Check and return the first row of each sequence, followed by the end (B+1,).

    On the CPU, also check that they rise from 0 to `total`; on a GPU that would synchronise.
    """
    starts = call.array(name, starts, "B+1", INT32)
    call.check(name, starts.size > 0, "of length B+1, 1 or more", starts)
    if call.on_cpu:
        is_whole = bool(starts[0] == 0 and starts[-1] == total)
        is_rising = bool(np.all(starts[1:] >= starts[:-1]))
        call.check(name, is_whole and is_rising, f"rising from 0 to {total}", starts.tolist())
    num_sequences = starts.size - 1
    has_owner = num_sequences > 0 or total == 0  # a kernel looks for the sequence of each row
    call.check(name, has_owner, f"of at least one sequence for {total} rows", num_sequences)
    return starts


@cache
def even_starts(device_id: int, batch: int, num_tokens: int) -> Any:
    """Return cu_seqlens of `batch` sequences of `num_tokens`, on the current device `device_id`.

    It is kept, so launch plans and graphs may read it.
    """
    return constant(np.arange(batch + 1, dtype=np.int32) * np.int32(num_tokens))


def checked_longest(call: Contract, name: str, longest: Any, starts: Any) -> int:
    """Return an upper bound of the lengths: `longest`, or their maximum, which needs a sync.

    On the CPU a `longest` that is too small is an error: a kernel would leave out its tokens.
    """
    bound = None if longest is None else check_count(call, name, longest)
    if bound is not None and not call.on_cpu:
        return bound
    lengths = call.xp.diff(starts)
    needed = int(lengths.max()) if lengths.size else 0
    if bound is None:
        return needed
    call.check(name, bound >= needed, f"at least {needed}, the longest sequence", bound)
    return bound


def check_count(call: Contract, name: str, value: Any) -> int:
    """Check that `value` is a count that fits 32 bits; return it as a Python int."""
    return call.integer(name, value, 0, 2**31 - 1, "an int of 0 or more")


def are_aligned(*arrays: Any) -> bool:
    """Tell whether all rows (last axis) start at, and span, a multiple of 16 bytes."""
    steps = []
    for x in arrays:
        steps += [x.data.ptr, x.shape[-1] * x.itemsize]
        steps += [s for s, n in zip(x.strides[:-1], x.shape[:-1], strict=True) if n > 1]
    return all(step % 16 == 0 for step in steps)


def are_tensor_map_rows(*arrays: Any) -> bool:
    """Tell whether tensor maps can describe the arrays: `are_aligned`, none reversed or repeated.

    A repeated axis has stride 0, as in an array broadcast over it.
    """
    steps = (s for x in arrays for s, n in zip(x.strides, x.shape, strict=True) if n > 1)
    return are_aligned(*arrays) and all(step > 0 for step in steps)


def grid_parts(
    arrays: dict[str, Any], num_kv_heads: int, group: int, batch: int
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield the parts of a problem whose heads and sequences one grid can count.

    They are a grid's second and third axis, which end at 65,535.

    Parameters
    ----------
    arrays : dict
        Arrays of attention_prefill or attention_backward by name, or None.
    num_kv_heads, group, batch : int
        K, H / K and B.

    Yields
    ------
    (int, int, dict)
        Key/value heads and sequences of a part, and its views of the arrays.
    """
    step = max(1, MAX_GRID_Y // group)
    if num_kv_heads <= step and batch <= MAX_GRID_Y:
        yield num_kv_heads, batch, arrays
        return
    for head in range(0, num_kv_heads, step):
        for b in range(0, batch, MAX_GRID_Y):
            heads = min(step, num_kv_heads - head)
            sequences = min(MAX_GRID_Y, batch - b)
            at = _indices(slice(head, head + heads), slice(b, b + sequences), group)
            views = {name: None if x is None else x[at[name]] for name, x in arrays.items()}
            yield heads, sequences, views


def _indices(kv_heads: slice, sequences: slice, group: int) -> dict[str, Any]:
    """Return the index of some heads and sequences in each array, by name."""
    heads = slice(kv_heads.start * group, kv_heads.stop * group)
    starts = slice(sequences.start, sequences.stop + 1)
    return {
        **dict.fromkeys(("q", "out", "dout", "dq", "lse", "delta"), (slice(None), heads)),
        **dict.fromkeys(("k", "v", "dk", "dv"), (slice(None), kv_heads)),
        **dict.fromkeys(("k_scale", "v_scale"), kv_heads),
        "sinks": heads,
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), starts),
        **dict.fromkeys(("block_tables", "context_lens"), sequences),
    }


@dataclass(frozen=True)
class Tile:
    """Tile shape of a thread block: macro values of the portable CUDA files.

    Attributes
    ----------
    head_dim : int
        Columns in shared memory: D, padded.
    warps_m, warps_n : int
        Warps along the query rows, and warps along the keys of a tile.
    row_tiles : int
        Rows per warp: in units of 16 on tensor cores, of 1 in float32.
    keys, stages : int
        Keys per tile, and pipeline stages (tiles of K, and of V, in shared memory).
    column_warps : int
        Warps along the columns of V and O, which each multiply all of Q Kᵀ (`warps_n` is then 1).
    """

    head_dim: int
    warps_m: int
    warps_n: int
    row_tiles: int
    keys: int
    stages: int
    column_warps: int = 1

    def rows(self, dtype: str) -> int:
        """Return the query rows per block."""
        return self.warps_m * self.row_tiles * (1 if dtype == "float32" else 16)

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 32 * self.warps_m * self.warps_n * self.column_warps

    def shared_bytes(self, dtype: str) -> int:
        """Return the dynamic shared memory in bytes: Q, and `stages` tiles of K and of V.

        In float32, K and V of wide heads share one tile.
        """
        pitch = self.head_dim + (4 if dtype == "float32" else 0)
        tiles = 1 if dtype == "float32" and self.head_dim > 256 else 2 * self.stages
        return (self.rows(dtype) + tiles * self.keys) * pitch * itemsize(dtype)

    def spec(self, file: str, dtype: str, **more: int) -> ModuleSpec:
        """Return the module compiled for this tile; `more` adds macros."""
        macros = {
            "HEAD_DIM": self.head_dim,
            "WARPS_M": self.warps_m,
            "WARPS_N": self.warps_n,
            "ROW_TILES": self.row_tiles,
            "TILE_KEYS": self.keys,
            "STAGES": self.stages,
            "COLUMN_WARPS": self.column_warps,
            "SHARED_BYTES": self.shared_bytes(dtype),
        }
        return ModuleSpec(file, dtype, tuple((macros | more).items()))
