"""Mixture-of-experts peers: PyTorch's grouped GEMM, and one in Triton, timed from HBM.

torch and Triton are imported lazily.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.reference import Routing
from engine.testing.timing import num_copies
from tests.bench.sdpa import graph_seconds

__all__ = ["PRODUCTS", "layer_seconds", "product_seconds", "route_seconds", "sort_seconds"]
__all__ += ["wgrad_seconds"]

PRODUCTS = ("torch", "triton")

_ERROR = 0.01  # relative error (norm) vs torch's dense GEMM of a few experts

# product(rows sorted by expert, weight (E, R, K), offsets (E + 1,)) -> (P, R)
Product = Callable[[Any, Any, Any], Any]


def _torch_product(torch: Any) -> Product:
    grouped = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    return lambda x, weight, offsets: grouped(x, weight.transpose(1, 2), offs=offsets[1:])


def _product(torch: Any, way: str) -> Product:
    if way == "torch":
        return _torch_product(torch)
    from tests.bench.moe_triton import grouped_product

    return grouped_product


def _check(torch: Any, product: Product, x: Any, weight: Any, offsets: Any) -> None:
    """Compare the rows of the first and the last expert that have any."""
    got = product(x, weight, offsets)
    ends = offsets.tolist()
    present = [e for e in range(len(weight)) if ends[e] < ends[e + 1]]
    for e in {present[0], present[-1]}:
        rows = slice(ends[e], ends[e + 1])
        want = x[rows].float() @ weight[e].float().T
        error = float((got[rows].float() - want).norm() / want.norm())
        assert error < _ERROR, f"wrong here: relative error {error:.3g}"


def _random(torch: Any, *shape: int) -> Any:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def product_seconds(
    routing: Routing, num_experts: int, rows: int, k: int, nbytes: int, way: str
) -> float:
    """Return the median seconds of one grouped GEMM on rows sorted by expert.

    Parameters
    ----------
    routing : Routing
        Routing of the tokens, on the host.
    num_experts, rows, k : int
        Shape of the weight.
    nbytes : int
        Traffic per call; it determines how many weight copies the calls rotate through.
    way : str
        One of PRODUCTS.
    """
    import torch

    product = _product(torch, way)
    offsets = torch.from_numpy(routing.offsets).cuda()
    inputs = [
        (_random(torch, len(routing.order), k), _random(torch, num_experts, rows, k), offsets)
        for _ in range(num_copies(nbytes))
    ]
    try:
        _check(torch, product, *inputs[0])
        calls = [lambda i=i: product(*i) for i in inputs]
        return graph_seconds(torch.cuda, calls, replays=20, min_launches=20)
    finally:
        inputs.clear()
        torch.cuda.empty_cache()


def _route(torch: Any, logits: Any, top_k: int) -> tuple[Any, Any, Any]:
    """Return weights (T, k), the pairs' order (P,) and offsets (E + 1,)."""
    chosen, experts = torch.topk(torch.softmax(logits, dim=-1), top_k, dim=-1)
    weights = chosen / chosen.sum(dim=-1, keepdim=True)
    flat, order = torch.sort(experts.reshape(-1), stable=True)
    names = torch.arange(logits.shape[1] + 1, device=logits.device)
    return weights, order, torch.searchsorted(flat, names).int()


def route_seconds(num_tokens: int, num_experts: int, top_k: int) -> float:
    """Return the median seconds of expert selection and pair sorting."""
    import torch

    inputs = [torch.randn(num_tokens, num_experts, device="cuda") for _ in range(2)]
    calls = [lambda x=x: _route(torch, x, top_k) for x in inputs]
    return graph_seconds(torch.cuda, calls, replays=20, min_launches=20)


def sort_seconds(num_tokens: int, num_experts: int, top_k: int) -> float:
    """Return the median seconds of sorting the pairs of chosen experts."""
    import torch

    names = torch.arange(num_experts + 1, device="cuda")
    shape = (num_tokens, top_k)
    inputs = [torch.randint(num_experts, shape, device="cuda", dtype=torch.int32) for _ in "ab"]

    def sort(ids: Any) -> Any:
        flat, order = torch.sort(ids.reshape(-1), stable=True)
        return order, torch.searchsorted(flat, names).int()

    calls = [lambda ids=ids: sort(ids) for ids in inputs]
    return graph_seconds(torch.cuda, calls, replays=20, min_launches=20)


def wgrad_seconds(routing: Routing, rows: int, k: int, nbytes: int) -> float:
    """Return the median seconds of the gradient of the experts' matrices (E, R, K).

    Both operands are sorted by expert: the gathering is not timed.
    """
    import torch

    grouped = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    offsets = torch.from_numpy(routing.offsets).cuda()[1:]
    pairs = len(routing.order)
    inputs = [
        (_random(torch, pairs, rows).T, _random(torch, pairs, k)) for _ in range(num_copies(nbytes))
    ]
    try:
        calls = [lambda i=i: grouped(*i, offs=offsets) for i in inputs]
        return graph_seconds(torch.cuda, calls, replays=20, min_launches=20)
    finally:
        inputs.clear()
        torch.cuda.empty_cache()


def layer_seconds(logits: Any, top_k: int, hidden: int, width: int, nbytes: int, way: str) -> float:
    """Return the median seconds of a layer: route, gather, two GEMMs, weighted sum, residual.

    Parameters
    ----------
    logits : (T, E) array
        Router logits, on the host.
    way : str
        One of PRODUCTS.
    """
    import torch

    product = _product(torch, way)
    router = torch.from_numpy(logits).cuda()
    num_tokens, num_experts = logits.shape

    def layer(x: Any, gate_up: Any, down: Any) -> Any:
        weights, order, offsets = _route(torch, router, top_k)
        y = product(x[order // top_k], gate_up, offsets)
        y = torch.nn.functional.silu(y[:, :width]) * y[:, width:]
        y = product(y, down, offsets)
        y = y * weights.reshape(-1)[order].to(y.dtype)[:, None]
        return torch.index_add(x, 0, order // top_k, y)

    inputs = [
        (
            _random(torch, num_tokens, hidden),
            _random(torch, num_experts, 2 * width, hidden),
            _random(torch, num_experts, hidden, width),
        )
        for _ in range(num_copies(nbytes))
    ]
    try:
        calls = [lambda i=i: layer(*i) for i in inputs]
        return graph_seconds(torch.cuda, calls, replays=20, min_launches=20)
    finally:
        inputs.clear()
        torch.cuda.empty_cache()
