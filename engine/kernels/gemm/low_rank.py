"""LoRA adapters of a GEMM's rows: their contract, and the kernel arguments of a fused epilogue."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.kernels._contract import INT32, Contract
from engine.kernels.lora_expand import MAX_PARTS, lora_expand

__all__ = ["LOW_RANK_PARAMS", "MIN_ROWS", "LowRank", "check_low_rank"]

LOW_RANK_PARAMS = (
    "h:ptr b:ptr adapter_bias:ptr has_bias:ptr slots:ptr num_splits:i32 num_adapters:i32 rank:i32 "
    "h_columns:i32 " + " ".join(f"bound{part}:i32" for part in range(MAX_PARTS))
)
MIN_ROWS = 512  # minimum rows of x for which the epilogue beats `lora_expand`
_STEP = 16  # values of rank per step of the tensor cores
_GROUP = 8  # columns of an accumulator, which must belong to one part


@dataclass(frozen=True)
class LowRank:
    """What LoRA adapters add to the rows of a product: b[s] h[t] + bias[s], s the row's adapter.

    Attributes
    ----------
    h : (P, M, R) array of float32
        Partial sums, as `lora_shrink` returns them.
    b : (S, N, r) array
        See `lora_expand`.
    order, offsets : (M,) and (S + 1,) arrays of int32
        Rows sorted by adapter. See `lora_shrink`.
    slots : (M,) array of int32
        Adapter of each row; a row without one has a number outside [0, S).
    bounds : tuple of int
        Ends of the fused products in the columns. See `lora_expand`.
    bias : (S, N) array of b's dtype, optional
    has_bias : (S,) array of int32, optional
        0 for an adapter whose bias is zeros, which is then not read.
    """

    h: Any
    b: Any
    order: Any
    offsets: Any
    slots: Any
    bounds: tuple[int, ...]
    bias: Any = None
    has_bias: Any = None

    def fits_epilogue(self, *, deterministic: bool) -> bool:
        """Tell whether Hopper's 16-bit and 8-bit GEMMs add the product to sums in registers.

        Rows of few adapters must be many: a warp reads the matrices of its rows' adapters one after
        the other. With `deterministic`, the number of rows may not decide.
        """
        if deterministic or self.h.shape[1] < MIN_ROWS:
            return False
        if self.b.dtype.itemsize != 2 or self.b.shape[2] % _STEP:
            return False
        if any(end % _GROUP for end in self.bounds[:-1]):
            return False
        return not any(array.data.ptr % 16 for array in (self.h, self.b))

    def arguments(self) -> dict[str, Any]:
        """Return the kernel arguments, in the names of `LOW_RANK_PARAMS`."""
        ends = dict.fromkeys((f"bound{part}" for part in range(MAX_PARTS)), self.bounds[-1])
        ends |= {f"bound{part}": end for part, end in enumerate(self.bounds)}
        return {
            "h": self.h,
            "b": self.b,
            "adapter_bias": self.bias,
            "has_bias": self.has_bias,
            "slots": self.slots,
            "num_splits": self.h.shape[0],
            "num_adapters": self.b.shape[0],
            "rank": self.b.shape[2],
            "h_columns": self.h.shape[2],
            **ends,
        }

    def add_to(self, out: Any, expand: Callable[..., Any] = lora_expand) -> Any:
        """Add to the rows of a finished product (M, N), in place, by `expand`; return it."""
        options = {"bounds": self.bounds, "bias": self.bias, "accumulate": True, "pdl": True}
        return expand(self.h, self.b, self.order, self.offsets, **options, out=out)


def check_low_rank(
    call: Contract, low_rank: LowRank | None, activation: str | None, dtype: np.dtype[Any]
) -> LowRank | None:
    """Check `low_rank` against the sizes M and N and the result's dtype; return it.

    Where the kernel does not add it, the product is finished before it is added: an activation
    other than "swiglu", which is an op of its own, would come too early.
    """
    if low_rank is None:
        return None
    allowed = (None, "swiglu")
    call.check("activation", activation in allowed, f"one of {allowed} with low_rank", activation)
    b = call.array("low_rank.b", low_rank.b, "S N r", dtype)
    h = call.array("low_rank.h", low_rank.h, "P M R", np.dtype(np.float32))
    parts = len(low_rank.bounds)
    call.check("low_rank.h", h.shape[2] == parts * b.shape[2], "of bounds x r columns", h.shape)
    ends = (0, *low_rank.bounds)
    is_ascending = all(a < b for a, b in itertools.pairwise(ends)) and ends[-1] == b.shape[1]
    call.check("low_rank.bounds", is_ascending, f"ascending up to {b.shape[1]}", low_rank.bounds)
    call.check("low_rank.bounds", parts <= MAX_PARTS, f"at most {MAX_PARTS}", parts)
    bias = low_rank.bias
    has_bias = low_rank.has_bias
    return LowRank(
        h,
        b,
        call.array("low_rank.order", low_rank.order, "M", INT32),
        call.array("low_rank.offsets", low_rank.offsets, str(b.shape[0] + 1), INT32),
        call.array("low_rank.slots", low_rank.slots, "M", INT32),
        tuple(low_rank.bounds),
        None if bias is None else call.array("low_rank.bias", bias, "S N", dtype),
        None if has_bias is None else call.array("low_rank.has_bias", has_bias, "S", INT32),
    )
