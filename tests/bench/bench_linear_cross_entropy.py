"""linear_cross_entropy in torch, bfloat16: time and memory of a step, error of its gradients.

Beside `torch.compile` of torch's own, whose logits exist, and Liger's function, if installed. The
error is that of the weight's gradient relative to float32 (norms). Models of 100M, 1B and 8B
parameters on 16,384 tokens; the first also with GPT-2's vocabulary, whose rows of logits are not
aligned.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable
from typing import Any

DEVICE = "GPU"
_TOKENS = 16384
_SHAPES = ((32768, 768), (50257, 768), (128256, 2048), (128256, 4096))  # vocabulary, hidden size
_REPEATS = 6

Loss = Callable[..., Any]


def _losses() -> dict[str, Loss]:
    import torch
    from torch.nn.functional import cross_entropy, linear

    from engine.integrations import torch as ops

    def own(x: Any, weight: Any, target: Any) -> Any:
        return cross_entropy(linear(x, weight), target)

    losses: dict[str, Loss] = {
        "ours": ops.linear_cross_entropy,
        "ours, float32 sum": lambda *args: ops.linear_cross_entropy(*args, sum_dtype=torch.float32),
        "compile": torch.compile(own, dynamic=False),
    }
    if importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.ops.fused_linear_cross_entropy import (
            LigerFusedLinearCrossEntropyFunction,
        )

        losses["liger"] = lambda *args: LigerFusedLinearCrossEntropyFunction.apply(*args)[0]
    return losses


def _inputs(vocab: int, hidden: int) -> tuple[Any, Any, Any]:
    import torch

    x = torch.randn(_TOKENS, hidden, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(vocab, hidden, device="cuda") * 2 * hidden**-0.5
    return x, weight.bfloat16().requires_grad_(), torch.randint(0, vocab, (_TOKENS,), device="cuda")


def _exact_gradient(x: Any, weight: Any, target: Any, rows: int = 2048) -> Any:
    """Return the weight's gradient in float32, summed over parts of the rows."""
    import torch
    from torch.nn.functional import cross_entropy, linear

    wide = weight.detach().float().requires_grad_()
    for first in range(0, len(x), rows):
        part = slice(first, first + rows)
        logits = linear(x.detach()[part].float(), wide)
        cross_entropy(logits, target[part], reduction="sum").div(len(x)).backward()
    assert wide.grad is not None
    torch.cuda.synchronize()
    return wide.grad


def _measure(loss: Loss, inputs: tuple[Any, Any, Any], exact: Any) -> dict[str, float]:
    import torch

    x, weight, _ = inputs

    def step() -> None:
        x.grad = weight.grad = None
        loss(*inputs).backward()

    step()
    step()
    error = float((weight.grad.float() - exact).norm() / exact.norm())
    x.grad = weight.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    times = []
    for _ in range(_REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    x.grad = weight.grad = None
    return {"ms": statistics.median(times), "peak MiB": peak / 2**20, "error": error}


def main(device: Any) -> list[dict[str, Any]]:
    """Measure, print, and return the rows."""
    if not device.is_cuda:
        raise SystemExit("linear_cross_entropy takes a GPU: on a CPU the mirrors compute")
    import torch

    rows = []
    for vocab, hidden in _SHAPES:
        torch.compiler.reset()
        inputs = _inputs(vocab, hidden)
        exact = _exact_gradient(*inputs)
        for name, loss in _losses().items():
            figures = _measure(loss, inputs, exact)
            case = f"({_TOKENS}, {vocab}, {hidden})"
            rows.append({"op": "linear_cross_entropy", "case": case, "by": name, **figures})
            print(f"{case} {name}", *(f"{k} {v:.4g}" for k, v in figures.items()), flush=True)
        del inputs, exact
        torch.cuda.empty_cache()
    return rows
