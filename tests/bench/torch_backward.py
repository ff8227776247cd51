"""torch.compile's backward passes as peers, timed from HBM in a CUDA graph.

torch is imported lazily: nothing else in the suite needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on
from engine.testing.timing import num_copies
from engine.testing.tolerances import assert_close
from tests.bench.sdpa import graph_seconds

__all__ = ["activation_seconds", "backward_seconds", "gated_case", "gated_seconds"]
__all__ += ["norm_seconds", "route_seconds", "weighted_swiglu_seconds"]


def backward_seconds(
    forward: Callable[..., Any], shapes: Sequence[Sequence[int]], nbytes: int
) -> float:
    """Return the median seconds of the compiled backward pass of `forward`, bfloat16.

    Parameters
    ----------
    forward : callable
        Called with one random tensor per shape; returns a tensor, or several.
    shapes : sequence of tuples
        All tensors require a gradient.
    nbytes : int
        Traffic of one pass; it determines how many copies the calls rotate through.
    """
    import torch
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # the graph is kept for the next pass
    torch.compiler.reset()
    compiled = torch.compile(forward, dynamic=False)

    def random(shape: Sequence[int]) -> Any:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def call() -> Callable[[], Any]:
        inputs = [random(shape).requires_grad_() for shape in shapes]
        results = compiled(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        upstream = [random(result.shape) for result in results]
        return partial(torch.autograd.grad, results, inputs, upstream, retain_graph=True)

    stream = torch.cuda.Stream()  # autograd runs the backward pass on the forward pass's stream
    try:
        with torch.cuda.stream(stream):
            calls = [call() for _ in range(num_copies(nbytes))]
            return graph_seconds(torch.cuda, calls, replays=20, min_launches=20, stream=stream)
    finally:
        torch.cuda.empty_cache()


def norm_seconds(rows: int, n: int, has_residual: bool, is_layernorm: bool) -> float:
    """Return the seconds of the backward pass of RMSNorm or LayerNorm, with a residual add."""
    from torch.nn import functional

    def norm(h: Any, weight: Any, *bias: Any) -> Any:
        if is_layernorm:
            return functional.layer_norm(h, (n,), weight, *bias, eps=1e-6)
        return functional.rms_norm(h, (n,), weight, eps=1e-6)

    def add_and_norm(x: Any, residual: Any, *parameters: Any) -> Any:
        h = x + residual
        return norm(h, *parameters), h

    matrix = (rows, n)
    parameters = [(n,)] * (1 + is_layernorm)
    nbytes = (3 + has_residual) * rows * n * 2
    if has_residual:
        return backward_seconds(add_and_norm, [matrix, matrix, *parameters], nbytes)
    return backward_seconds(norm, [matrix, *parameters], nbytes)


def gated_seconds(op: str, rows: int, f: int) -> float:
    """Return the seconds of the backward pass of "swiglu" or "geglu" (tanh) on packed rows."""

    def forward(x: Any) -> Any:
        gate, up = x.chunk(2, dim=-1)
        return _apply("silu" if op == "swiglu" else "gelu_tanh", gate) * up

    return backward_seconds(forward, [(rows, 2 * f)], 5 * rows * f * 2)


def activation_seconds(activation: str, rows: int, f: int) -> float:
    """Return the seconds of the backward pass of "silu", "gelu", "gelu_tanh" or "relu"."""
    return backward_seconds(partial(_apply, activation), [(rows, f)], 3 * rows * f * 2)


def route_seconds(num_tokens: int, num_experts: int, top_k: int, nbytes: int) -> float:
    """Return the seconds of the backward pass of renormalized softmax weights of fixed experts."""
    import torch

    ids = torch.rand(num_tokens, num_experts, device="cuda").topk(top_k, dim=1).indices

    def weights(logits: Any) -> Any:
        chosen = logits.float().softmax(1).gather(1, ids)
        return chosen / chosen.sum(1, keepdim=True)

    return backward_seconds(weights, [(num_tokens, num_experts)], nbytes)


def weighted_swiglu_seconds(rows: int, f: int) -> float:
    """Return the seconds of the backward pass of SwiGLU on packed rows, times a weight a row."""

    def forward(x: Any, weight: Any) -> Any:
        gate, up = x.chunk(2, dim=-1)
        return _apply("silu", gate) * up * weight

    return backward_seconds(forward, [(rows, 2 * f), (rows, 1)], 6 * rows * f * 2)


def _apply(activation: str, x: Any) -> Any:
    from torch.nn import functional

    if activation == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    return getattr(functional, activation)(x)


def gated_case(activation: str, rows: int, f: int) -> BenchCase:
    """Return the case of `swiglu_backward` or `geglu_backward` on (rows, 2 f)."""
    op = f"{activation}_backward"

    def make(xp: Any, seed: int) -> tuple[Any, ...]:
        dout = normal_on(xp, (rows, f), "bfloat16", seed)
        return dout, normal_on(xp, (rows, 2 * f), "bfloat16", seed + 1)

    def check(args: tuple[Any, ...], result: Any) -> None:
        dout, x = (to_numpy(a[:256]) for a in args)
        assert_close(result[:256], getattr(reference, op)(dout, x), reduction=2)

    return BenchCase(
        f"({rows}, {f})",
        make,
        getattr(kernels, op),
        nbytes=5 * rows * f * 2,
        peers={"torch.compile": partial(gated_seconds, activation, rows, f)},
        check=check,
    )
