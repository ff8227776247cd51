"""Sort by expert for a router of the caller's own: `cuda_src/moe_sort.cu` and `moe_route.cu`.

The mirror is `reference/moe_sort.py`.
"""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.kernels._contract import FLOAT32, FLOAT64, INT32, INT64, Contract
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._workspace import workspace
from engine.kernels.moe_route import MAX_EXPERTS, WIDTHS, chunk_tokens, place_pairs
from engine.kernels.moe_route import specs as route_specs
from engine.reference import Routing

__all__ = ["moe_sort", "specs"]

_THREADS = 512  # kPlaceThreads in CUDA
_COUNT = {
    width: Kernel(
        f"moe_sort_count_{width}",
        "ids:ptr experts:ptr counts:ptr num_pairs:i32 num_experts:i32 chunk:i32 is_long:i32",
    )
    for width in WIDTHS
}


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules of the op: the same for all dtypes."""
    return (ModuleSpec("moe_sort.cu", "float32"), *route_specs(dtype))


def moe_sort(ids: Any, weights: Any, *, num_experts: int) -> Routing:
    """Return the `Routing` of tokens to experts that another router chose.

    Parameters
    ----------
    ids : (T, k) array of int32 or int64
        Experts of each token. An id outside [0, num_experts) selects the nearest expert.
    weights : (T, k) array of float32
        Factors on the experts' outputs; `weights` of the result is this array.
    num_experts : int
        From 1 to 512 (E).

    Returns
    -------
    Routing
        experts (T, k) int32, weights (T, k) float32, order (T·k,) int32, offsets (E + 1,) int32.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    A stable counting sort, so the result is deterministic. `moe_route` chooses and sorts.

    Examples
    --------
    >>> import numpy as np
    >>> routing = moe_sort(np.array([[2, 0], [0, 1]]), np.ones((2, 2), np.float32), num_experts=4)
    >>> routing.order.tolist(), routing.offsets.tolist()
    ([1, 2, 3, 0], [0, 2, 3, 4, 4])
    """
    call = Contract("moe_sort")
    ids = call.array("ids", ids, "T k", (INT32, INT64))
    weights = call.array("weights", weights, "T k", (FLOAT32, FLOAT64))
    num_experts = call.integer(
        "num_experts", num_experts, 1, MAX_EXPERTS, f"from 1 to {MAX_EXPERTS}"
    )
    if call.on_cpu:
        return reference.moe_sort(ids, weights, num_experts=num_experts)
    num_pairs = call["T"] * call["k"]
    routing = Routing(
        call.output("experts", None, ids.shape, INT32),
        weights,
        call.output("order", None, (num_pairs,), INT32),
        call.output("offsets", None, (num_experts + 1,), INT32),
    )
    _launch(ids, routing, num_pairs, num_experts)
    return routing


def _launch(ids: Any, routing: Routing, num_pairs: int, num_experts: int) -> None:
    width = next(n for n in WIDTHS if n >= num_experts)
    chunk = max(1, chunk_tokens(num_pairs) or num_pairs)
    num_chunks = max(1, ceil_div(num_pairs, chunk))
    counts = workspace(num_chunks * num_experts)
    spec = specs("float32")[0]
    _COUNT[width].launch(
        spec,
        (num_chunks,),
        (_THREADS,),
        pdl=True,
        ids=ids,
        experts=routing.experts,
        counts=counts,
        num_pairs=num_pairs,
        num_experts=num_experts,
        chunk=chunk,
        is_long=ids.dtype == INT64,
    )
    place_pairs(
        routing,
        counts,
        num_tokens=num_pairs,
        top_k=1,
        num_experts=num_experts,
        chunk_tokens=chunk,
    )
