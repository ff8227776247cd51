"""Losses of other libraries as peers: torch.compile, and Liger's Triton kernel if it is installed.

torch is imported lazily: nothing else in the suite needs it.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ["cross_entropy_peers"]

_REPEATS = 12


def cross_entropy_peers(rows: int, vocab: int, *, has_gradient: bool) -> dict[str, Any] | None:
    """Return the peers of a case, or None if torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        return None
    peers = {"compile": partial(_compiled_seconds, rows, vocab, has_gradient)}
    if importlib.util.find_spec("liger_kernel") is not None:
        peers["liger"] = partial(_liger_seconds, rows, vocab, has_gradient)
    return peers


def _seconds(call: Callable[[], Any]) -> float:
    import torch

    times = []
    for repeat in range(_REPEATS + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(stop) * 1e-3)
    return statistics.median(times)


def _inputs(rows: int, vocab: int) -> tuple[Any, Any]:
    import torch

    logits = torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16)
    return logits, torch.randint(0, vocab, (rows,), device="cuda")


def _compiled_seconds(rows: int, vocab: int, has_gradient: bool) -> float:
    import torch

    logits, target = _inputs(rows, vocab)
    logits.requires_grad_(has_gradient)
    torch._dynamo.reset()
    loss = torch.compile(torch.nn.functional.cross_entropy, dynamic=False)

    def step() -> None:
        logits.grad = None
        result = loss(logits, target, reduction="sum")
        if has_gradient:
            result.backward()

    return _seconds(step)


def _liger_seconds(rows: int, vocab: int, has_gradient: bool) -> float:
    """Time Liger's kernel, which computes loss and gradient in place, without its host code."""
    import torch
    from liger_kernel.ops.cross_entropy import liger_cross_entropy_kernel

    logits, target = _inputs(rows, vocab)
    loss = torch.empty(rows, device="cuda")
    absent = ("weight", "z_loss", "token_accuracy", "predicted_tokens")
    options = {f"{name}_ptr": None for name in absent}
    options |= {"token_accuracy_stride": 0, "predicted_tokens_stride": 0, "softcap": None}
    options |= {"lse_square_scale": 0.0, "label_smoothing": 0.0, "reduction": "sum"}
    flags = ("RETURN_Z_LOSS", "RETURN_TOKEN_ACCURACY", "RETURN_PREDICTED_TOKENS")
    options |= dict.fromkeys((*flags, "HAS_WEIGHT", "HAS_SOFTCAPPING"), False)
    return _seconds(
        lambda: liger_cross_entropy_kernel[(rows,)](
            X_ptr=logits,
            X_stride=vocab,
            Y_ptr=target,
            Y_stride=1,
            loss_ptr=loss,
            loss_stride=1,
            n_cols=vocab,
            n_non_ignore=rows,
            sum_non_ignore_weight=rows,
            weight_sum=0.0,
            ignore_index=-100,
            HAS_GRADIENTS=has_gradient,
            BLOCK_SIZE=min(32768, 1 << (vocab - 1).bit_length()),
            num_warps=32,
            **options,
        )
    )
