"""PyTorch's scaled_dot_product_attention as a peer: one backend at a time, checked, timed from HBM.

torch is imported lazily: nothing else in the suite needs it.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from engine.testing.timing import num_copies

__all__ = [
    "BACKENDS",
    "RefusedError",
    "attend",
    "decode_seconds",
    "exact",
    "graph_seconds",
    "newest_mask",
    "prefill_seconds",
]

BACKENDS = {"cudnn": "CUDNN_ATTENTION", "flash2": "FLASH_ATTENTION"}

_REFUSALS = ("No available kernel", "No viable backend", "cuDNN Frontend error")
_HIDDEN = -1e4  # score bias of hidden keys (exp is 0); some cuDNN versions fail on -inf
_ERROR = 0.005  # relative (norm): twice bfloat16 rounding, half the error of a missing mask
_ONE_COPY_BYTES = 4 << 30  # beyond this size, L2 hits are negligible with one copy


class RefusedError(RuntimeError):
    """The backend rejects the problem; the message is its reason."""


def attend(backend: str, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    """Compute attention of q (B, H, Q, D) over k and v (B, K, S, D) with exactly this backend.

    Heads are grouped by `enable_gqa`: K and V have K heads, not H.

    Raises
    ------
    RefusedError
        If the backend rejects the inputs. torch reports the reasons only as warnings.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        except RuntimeError as error:
            if not any(text in str(error) for text in _REFUSALS):
                raise
            raise RefusedError(_reason(str(error), [str(w.message) for w in said])) from error


def _reason(error: str, said: Sequence[str]) -> str:
    """Return torch's warnings about the requested backend; it calls all others disabled."""
    said = [text.partition(" (Triggered internally")[0] for text in said]
    reasons = [t for t in said if "not used because" not in t and "runtime disabled" not in t]
    return " ".join(reasons) or error


def newest_mask(backend: str, num_queries: int, num_keys: int, like: Any) -> Any:
    """Return the mask that lets query i of Q see keys 0 to S - Q + i; None for one query.

    `is_causal` would let it see keys 0 to i only. FlashAttention supports no mask array, but has
    this rule by name. cuDNN adds an array of q's dtype; it misreads any other dtype as q's.
    """
    import torch

    if num_queries == 1:
        return None
    if backend == "FLASH_ATTENTION":
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(num_queries, num_keys)
    zeros = torch.zeros(num_queries, num_keys, dtype=like.dtype, device=like.device)
    later = torch.ones_like(zeros, dtype=torch.bool).triu(num_keys - num_queries + 1)
    return zeros.masked_fill(later, _HIDDEN)


def exact(q: Any, k: Any, v: Any) -> Any:
    """Return attention of the newest Q tokens in float64, the reference for all others."""
    q, k, v = (x.double() for x in (q, k, v))
    return attend("MATH", q, k, v, newest_mask("MATH", q.shape[2], k.shape[2], q))


def decode_seconds(
    backend: str, q_shape: Sequence[int], kv_shape: Sequence[int], nbytes: int
) -> float:
    """Return the median seconds of attention for the newest tokens, bfloat16, random values.

    Parameters
    ----------
    backend : str
        A value of BACKENDS.
    q_shape : (B, H, Q, D)
    kv_shape : (B, K, S, D)
    nbytes : int
        Size of K and V; it determines how many copies the calls rotate through.
    """
    import torch

    try:
        return _seconds(torch, backend, q_shape, kv_shape, nbytes)
    finally:
        torch.cuda.empty_cache()


def prefill_seconds(
    backend: str, batch: int, heads: int, head_dim: int, n: int, causal: bool
) -> float:
    """Return the median seconds of attention over whole sequences, bfloat16, random values.

    Timed for as long as our kernels (`engine.testing.timing.time_gpu`): the GPU clock drops under
    sustained load.

    Parameters
    ----------
    backend : str
        A value of BACKENDS.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    shape = (batch, heads, n, head_dim)
    inputs = [
        [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        for _ in range(num_copies(2 * 4 * batch * heads * n * head_dim))
    ]
    calls = [lambda qkv=qkv: scaled_dot_product_attention(*qkv, is_causal=causal) for qkv in inputs]
    try:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return graph_seconds(torch.cuda, calls, replays=20, min_launches=20)
    finally:
        inputs.clear()
        torch.cuda.empty_cache()


def _copies(nbytes: int) -> int:
    return min(num_copies(nbytes), max(1, _ONE_COPY_BYTES // nbytes))


def _seconds(torch, backend, q_shape, kv_shape, nbytes):
    inputs = [
        [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in (q_shape, kv_shape, kv_shape)]
        for _ in range(_copies(nbytes))
    ]
    mask = newest_mask(backend, q_shape[2], kv_shape[2], inputs[0][0])
    calls = [lambda qkv=qkv: attend(backend, *qkv, mask) for qkv in inputs]
    want = exact(*(x[-1:] for x in inputs[0]))
    error = float((calls[0]()[-1:].double() - want).norm() / want.norm())
    assert error < _ERROR, f"{backend} is wrong here: relative error {error:.3g}"
    return graph_seconds(torch.cuda, calls)


def graph_seconds(
    cuda: Any,
    calls: Sequence[Callable[[], Any]],
    *,
    replays: int = 5,
    min_launches: int = 10,
    stream: Any = None,
) -> float:
    """Return the median seconds per call, measured like `engine.testing.timing.time_gpu`.

    `stream` captures the calls, by default a stream of torch's own.
    """
    rounds = -(-min_launches // len(calls))
    for call in calls:
        call()
    graph = cuda.CUDAGraph()
    with cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, stop = (cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3)
    return statistics.median(times) / (rounds * len(calls))
