"""Operators of torch beside `torch.compile`, bfloat16: time of the forward and backward passes.

Shapes of a model of 100M, 1B and 8B parameters on 16,384 tokens in bfloat16. Both sides are called
from Python in a loop and timed by events; torch's side is compiled, and its attention is the faster
of cuDNN and FlashAttention-2. Each row compares the gradients first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.integrations import torch as ops

DEVICE = "GPU"
TOKENS = 16384


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder."""

    name: str
    n: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: tuple[int, int, int]  # number, experts per token, ffn size


MODELS = (
    Model("100M", 768, 2048, 12, 4, 64, 32768, (8, 2, 512)),
    Model("1B", 2048, 8192, 32, 8, 64, 128256, (32, 4, 1024)),
    Model("8B", 4096, 14336, 32, 8, 128, 128256, (64, 8, 1024)),
)


@dataclass(frozen=True)
class Case:
    """An operator and torch's formula of it, on the same inputs."""

    inputs: Callable[[Model], tuple[Any, ...]]
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    tolerance: float = 2e-2
    passes: tuple[str, ...] = ("forward", "backward")


def _randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    values = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale
    return values.requires_grad_()


def _attention_inputs(m: Model) -> tuple[Any, ...]:
    return tuple(_randn(4, TOKENS // 4, h, m.head_dim) for h in (m.heads, m.kv_heads, m.kv_heads))


def _sdpa(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def _rope_inputs(m: Model) -> tuple[Any, ...]:
    q, k = (_randn(4, TOKENS // 4, h, m.head_dim) for h in (m.heads, m.kv_heads))
    half = torch.arange(m.head_dim // 2, device="cuda")
    angles = torch.arange(TOKENS // 4, device="cuda")[:, None] * 1e4 ** (-2 * half / m.head_dim)
    positions = torch.arange(TOKENS // 4, device="cuda", dtype=torch.int32).expand(4, -1)
    return q, k, torch.cat([angles.cos(), angles.sin()], -1), positions.contiguous()


def _rope(q: Any, k: Any, table: Any, positions: Any) -> Any:
    cos, sin = table[positions].unsqueeze(-2).chunk(2, -1)

    def turn(x: Any) -> Any:
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    return turn(q), turn(k)


def _gated(activation: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        gate, up = x.chunk(2, -1)
        return activation(gate) * up

    return run


def _add_norm(x: Any, residual: Any, weight: Any) -> Any:
    h = x + residual
    return functional.rms_norm(h, weight.shape, weight, 1e-6), h


def _experts_inputs(m: Model) -> tuple[Any, ...]:
    count, top_k, ffn = m.experts
    logits = torch.randn(TOKENS, count, device="cuda")
    weights, ids = logits.softmax(-1).topk(top_k)
    return (
        _randn(TOKENS, m.n),
        _randn(count, 2 * ffn, m.n, scale=m.n**-0.5),
        _randn(count, m.n, ffn, scale=ffn**-0.5),
        ids.to(torch.int32),
        (weights / weights.sum(-1, keepdim=True)).requires_grad_(),
    )


def _grouped(x: Any, gate_up: Any, down: Any, ids: Any, weights: Any) -> Any:
    order = ids.flatten().argsort(stable=True)
    ends = torch.bincount(ids.flatten(), minlength=len(gate_up)).cumsum(0).to(torch.int32)
    tokens = order // ids.shape[1]
    hidden = torch._grouped_mm(x[tokens], gate_up.transpose(1, 2), offs=ends)
    hidden = _gated(functional.silu)(hidden)
    out = torch._grouped_mm(hidden, down.transpose(1, 2), offs=ends)
    out = out * weights.flatten()[order, None].to(out.dtype)
    return torch.zeros_like(x).index_add(0, tokens, out)


CASES = {
    "rmsnorm": Case(
        lambda m: (_randn(TOKENS, m.n), _randn(m.n)),
        ops.rmsnorm,
        lambda x, w: functional.rms_norm(x, w.shape, w, 1e-6),
    ),
    "add_rmsnorm": Case(
        lambda m: (_randn(TOKENS, m.n), _randn(TOKENS, m.n), _randn(m.n)),
        lambda x, residual, w: ops.rmsnorm(x, w, residual=residual),
        _add_norm,
    ),
    "layernorm": Case(
        lambda m: (_randn(TOKENS, m.n), _randn(m.n), _randn(m.n)),
        ops.layernorm,
        lambda x, w, b: functional.layer_norm(x, w.shape, w, b, 1e-5),
    ),
    "rope": Case(_rope_inputs, ops.rope, _rope),
    "swiglu": Case(lambda m: (_randn(TOKENS, 2 * m.ffn),), ops.swiglu, _gated(functional.silu)),
    "geglu": Case(
        lambda m: (_randn(TOKENS, 2 * m.ffn),),
        ops.geglu,
        _gated(lambda x: functional.gelu(x, approximate="tanh")),
    ),
    "embedding": Case(
        lambda m: (torch.randint(m.vocab, (TOKENS,), device="cuda"), _randn(m.vocab, m.n)),
        lambda ids, w: ops.embedding(ids, w),
        functional.embedding,
    ),
    "attention": Case(
        _attention_inputs, lambda q, k, v: ops.attention(q, k, v, causal=True), _sdpa
    ),
    "attention, any order": Case(  # as torch's: dq is summed in any order
        _attention_inputs,
        lambda q, k, v: ops.attention(q, k, v, causal=True, deterministic=False),
        _sdpa,
    ),
    "moe_experts": Case(
        _experts_inputs,
        lambda x, gate_up, down, ids, weights: ops.moe_experts(x, gate_up, down, ids, weights),
        _grouped,
        tolerance=4e-2,
    ),
    "linear_cross_entropy": Case(
        lambda m: (
            _randn(TOKENS // 2, m.n),
            _randn(m.vocab, m.n, scale=m.n**-0.5),
            torch.randint(m.vocab, (TOKENS // 2,), device="cuda"),
        ),
        lambda x, w, target: ops.linear_cross_entropy(x, w, target),
        lambda x, w, target: functional.cross_entropy((x @ w.T).float(), target),
        passes=("both",),  # the gradients are computed in the forward pass
    ),
}


def _seconds(run: Callable[[], Any]) -> float:
    """Return the median seconds of a call, made in a loop."""
    for _ in range(3):
        run()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    count = max(3, min(50, int(20 / max(start.elapsed_time(stop), 1e-3))))
    times = []
    for _ in range(5):
        start.record()
        for _ in range(count):
            run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3 / count)
    return sorted(times)[2]


def _loss_and_gradients(function: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    """Return the results, the inputs that need a gradient, and a gradient of the results."""
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    needed = [x for x in inputs if x.requires_grad]
    torch.manual_seed(1)
    douts = [torch.randn_like(out) if out.dim() else torch.ones_like(out) for out in outputs]
    return outputs, needed, douts


def _check(name: str, case: Case, inputs: tuple[Any, ...]) -> None:
    """Compare results and gradients of both sides, by their relative norms."""
    grads = []
    for function in (case.ours, case.theirs):
        outputs, needed, douts = _loss_and_gradients(function, inputs)
        grads.append([*outputs, *torch.autograd.grad(outputs, needed, douts)])
    for i, (mine, torchs) in enumerate(zip(*grads, strict=True)):
        error = ((mine.float() - torchs.float()).norm() / torchs.float().norm()).item()
        assert error < case.tolerance, f"{name}: result or gradient {i} differs by {error}"


def _times(case: Case, function: Callable[..., Any], inputs: tuple[Any, ...]) -> dict[str, float]:
    """Return the seconds of each pass. "both" includes the host's time, where that is longer."""
    outputs, needed, douts = _loss_and_gradients(function, inputs)
    times = {"both": _both(function, inputs, douts)}
    if "forward" in case.passes:
        with torch.no_grad():
            times["forward"] = _seconds(lambda: function(*inputs))
    if "backward" in case.passes:
        times["backward"] = _seconds(
            lambda: torch.autograd.grad(outputs, needed, douts, retain_graph=True)
        )
    return times


def _both(function: Callable[..., Any], inputs: tuple[Any, ...], douts: list[Any]) -> float:
    needed = [x for x in inputs if x.requires_grad]

    def step() -> None:
        outputs = function(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.grad(outputs, needed, douts)

    return _seconds(step)


def _peer_times(name: str, case: Case, inputs: tuple[Any, ...]) -> dict[str, float]:
    torch._dynamo.reset()
    if not name.startswith("attention"):
        return _times(case, torch.compile(case.theirs), inputs)
    found = []
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            found.append(_times(case, case.theirs, inputs))
    return {key: min(times[key] for times in found) for key in found[0]}


def measure(name: str, model: Model) -> list[dict[str, Any]]:
    """Return a row for each pass."""
    torch.manual_seed(0)
    case = CASES[name]
    inputs = case.inputs(model)
    _check(f"{name} {model.name}", case, inputs)
    ours = _times(case, case.ours, inputs)
    theirs = _peer_times(name, case, inputs)
    return [
        {
            "op": name,
            "model": model.name,
            "pass": key,
            "ours_us": ours[key] * 1e6,
            "torch_us": theirs[key] * 1e6,
            "ratio": theirs[key] / ours[key],
        }
        for key in ours
    ]


def main(device: Any) -> list[dict[str, Any]]:
    """Measure, print, and return the rows."""
    if not device.is_cuda:
        raise SystemExit("torch_ops takes a GPU: on a CPU the mirrors compute")
    functorch_config.donated_buffer = False  # the backward pass is timed repeatedly
    rows = []
    for name, model in itertools.product(CASES, MODELS):
        try:
            measured = measure(name, model)
        except (RuntimeError, AssertionError) as error:
            print(f"{name} {model.name}: {type(error).__name__}: {error}"[:400], flush=True)
            continue
        finally:
            torch.cuda.empty_cache()
        rows += measured
        for row in measured:
            print(
                f"{row['op']:22}{row['model']:>6} {row['pass']:9}"
                f"{row['ours_us']:10.1f} us {row['torch_us']:10.1f} us {row['ratio']:6.2f} x",
                flush=True,
            )
    ratios = [row["ratio"] for row in rows if row["pass"] in CASES[row["op"]].passes]
    mean = math.exp(sum(map(math.log, ratios)) / max(len(ratios), 1))
    print(f"geometric mean of {len(ratios)} rows: {mean:.3f} x")
    return rows
