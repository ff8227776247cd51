"""Train a decoder of 107 million parameters in plain PyTorch, on the engine's kernels or torch's.

    pip install '.[cuda12]' torch
    python examples/train_small.py --kernels engine torch --steps 1000 --json result.json

Attention, norms, RoPE, MLP, experts and the loss come from `Engine` or from `Torch` below; the rest
is the same: weights, data, optimizer, `torch.compile`. The text is generated: each token has 32
possible successors with probabilities of Zipf's law, so the best possible loss is known. The
language, the first weights and the batches depend on the seed alone: both runs see the same. On a
GPU a step is one CUDA graph: neither side waits for its host.

Without a GPU the NumPy mirrors compute; pass `--tiny`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.integrations import torch as ops


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of a step; every third layer has experts in place of the MLP."""

    vocab_size: int = 16384
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int = 4
    head_dim: int = 64
    ffn_size: int = 2048
    num_experts: int = 8
    top_k: int = 2
    expert_size: int = 512
    batch_size: int = 16
    seq_len: int = 1024
    learning_rate: float = 1e-3


TINY = Config(256, 64, 3, 4, 2, 16, 128, 4, 2, 64, 2, 32)


class Language:
    """Endless generated text: a Markov chain over the vocabulary."""

    def __init__(self, config: Config, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (config.vocab_size, 32)
        self._config = config
        self._next = torch.randint(config.vocab_size, shape, generator=generator).to(device)
        self._chances = (1 / torch.arange(1.0, 33)).to(device)
        self._generator = torch.Generator(device).manual_seed(1)

    @property
    def entropy(self) -> float:
        """Nats per token, if no two successors of a token are the same."""
        chances = self._chances / self._chances.sum()
        return float(-(chances * chances.log()).sum())

    def batches(self, count: int) -> Iterator[torch.Tensor]:
        """Yield `count` batches of (B, S + 1) token ids, written 50 at a time."""
        length = self._config.seq_len + 1
        for first in range(0, count, 50):
            size = min(count - first, 50) * self._config.batch_size
            rows = self._chances.expand(size, -1)
            choices = torch.multinomial(rows, length, replacement=True, generator=self._generator)
            tokens = torch.empty_like(choices)
            token = choices[:, 0]
            for i in range(length):
                token = self._next[token, choices[:, i]]
                tokens[:, i] = token
            yield from tokens.split(self._config.batch_size)


class Engine:
    """The engine's kernels."""

    norm = staticmethod(ops.rmsnorm)
    rope = staticmethod(ops.rope)
    swiglu = staticmethod(ops.swiglu)
    loss = staticmethod(ops.linear_cross_entropy)

    @staticmethod
    def add_norm(x: Any, residual: Any, weight: Any) -> Any:
        return ops.rmsnorm(x, weight, residual=residual)

    @staticmethod
    def attention(q: Any, k: Any, v: Any) -> Any:
        return ops.attention(q, k, v, causal=True)

    @staticmethod
    def experts(x: Any, logits: Any, gate_up: Any, down: Any, top_k: int) -> Any:
        weights, ids = ops.moe_route(logits, top_k)
        return ops.moe_experts(x, gate_up, down, ids, weights)


class Torch:
    """PyTorch's own: what `torch.compile` makes of these formulas, and cuDNN's attention."""

    @staticmethod
    def norm(x: Any, weight: Any) -> Any:
        return functional.rms_norm(x, weight.shape, weight, 1e-6)

    @staticmethod
    def add_norm(x: Any, residual: Any, weight: Any) -> Any:
        h = x + residual
        return functional.rms_norm(h, weight.shape, weight, 1e-6), h

    @staticmethod
    def rope(q: Any, k: Any, table: Any, positions: Any) -> Any:
        cos, sin = table[positions].unsqueeze(-2).chunk(2, -1)

        def turn(x: Any) -> Any:
            a, b = x.float().chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

        return turn(q), turn(k)

    @staticmethod
    def attention(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH] if q.is_cuda else SDPBackend.MATH
        with sdpa_kernel(backends, set_priority=q.is_cuda):
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    @staticmethod
    def swiglu(x: Any) -> Any:
        gate, up = x.chunk(2, -1)
        return functional.silu(gate) * up

    @staticmethod
    def experts(x: Any, logits: Any, gate_up: Any, down: Any, top_k: int) -> Any:
        weights, ids = logits.float().softmax(-1).topk(top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        order = ids.flatten().argsort(stable=True)
        experts = torch.arange(len(gate_up), device=x.device)
        ends = (ids.flatten()[:, None] <= experts).sum(0).to(torch.int32)
        tokens = order // top_k
        hidden = torch._grouped_mm(x[tokens], gate_up.transpose(1, 2), offs=ends)
        out = torch._grouped_mm(Torch.swiglu(hidden), down.transpose(1, 2), offs=ends)
        out = out * weights.flatten()[order, None].to(out.dtype)
        return torch.zeros_like(x).index_add(0, tokens, out)

    @staticmethod
    def loss(x: Any, weight: Any, target: Any) -> Any:
        return functional.cross_entropy((x @ weight.T).float(), target)


KERNELS = {"engine": Engine, "torch": Torch}


class Layer(nn.Module):
    """Attention, then an MLP or experts; each adds to the residual stream before its norm."""

    def __init__(self, config: Config, kernels: Any, has_experts: bool) -> None:
        super().__init__()
        self.config = config
        self.kernels = kernels
        n, heads = config.hidden_size, config.num_heads + 2 * config.num_kv_heads
        self.attention_norm = nn.Parameter(torch.ones(n))
        self.mlp_norm = nn.Parameter(torch.ones(n))
        self.qkv = _matrix(heads * config.head_dim, n)
        self.out = _matrix(n, config.num_heads * config.head_dim)
        self.router = _matrix(config.num_experts, n) if has_experts else None
        size, count = config.ffn_size, ()
        if has_experts:
            size, count = config.expert_size, (config.num_experts,)
        self.gate_up = _matrix(*count, 2 * size, n)
        self.down = _matrix(*count, n, size)

    def forward(self, x: Any, residual: Any, table: Any, positions: Any) -> Any:
        y, residual = self.kernels.add_norm(x, residual, self.attention_norm)
        y, residual = self.kernels.add_norm(
            self._attend(y, table, positions), residual, self.mlp_norm
        )
        return self._mlp(y), residual

    def _attend(self, x: Any, table: Any, positions: Any) -> Any:
        config = self.config
        heads = functional.linear(x, self.qkv).unflatten(-1, (-1, config.head_dim))
        parts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        q, k, v = heads.split(parts, 2)
        q, k = self.kernels.rope(q, k, table, positions)
        return functional.linear(self.kernels.attention(q, k, v).flatten(2), self.out)

    def _mlp(self, x: Any) -> Any:
        if self.router is None:
            hidden = self.kernels.swiglu(functional.linear(x, self.gate_up))
            return functional.linear(hidden, self.down)
        tokens = x.flatten(0, 1)
        logits = functional.linear(tokens, self.router)
        top_k = self.config.top_k
        return self.kernels.experts(tokens, logits, self.gate_up, self.down, top_k).view_as(x)


class Head(nn.Module):
    """The last norm and the loss of the logits."""

    def __init__(self, config: Config, kernels: Any) -> None:
        super().__init__()
        self.kernels = kernels
        self.norm = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, x: Any, residual: Any, weight: Any, targets: Any) -> Any:
        x, _ = self.kernels.add_norm(x, residual, self.norm)
        return self.kernels.loss(x.flatten(0, 1), weight, targets.flatten())


class Decoder(nn.Module):
    """Token ids and targets in, loss out; the embedding is the last layer's weight too."""

    def __init__(self, config: Config, kernels: Any) -> None:
        super().__init__()
        self.embedding = _matrix(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config, kernels, has_experts=i % 3 == 2) for i in range(config.num_layers)
        )
        self.head = Head(config, kernels)
        angles = (
            torch.arange(config.seq_len)[:, None]
            * 10000 ** -torch.linspace(0, 1, config.head_dim // 2 + 1)[:-1]
        )
        self.table = nn.Buffer(torch.cat([angles.cos(), angles.sin()], -1))

    def forward(self, tokens: Any, targets: Any) -> Any:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        x = functional.embedding(tokens, self.embedding)
        residual = torch.zeros_like(x)
        for layer in self.layers:
            x, residual = layer(x, residual, self.table, positions)
        return self.head(x, residual, self.embedding, targets)

    def compile_parts(self) -> None:
        """Compile layer by layer: layers of one kind share their code."""
        for part in (*self.layers, self.head):
            part.compile(fullgraph=True)


def _matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.02)


class MasterWeights:
    """AdamW on float32 copies of the model's bfloat16 parameters."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        self._parameters = list(model.parameters())
        self._masters = [p.detach().float().requires_grad_() for p in self._parameters]
        device = self._parameters[0].device
        on_gpu = device.type == "cuda"
        self._rates = (learning_rate * torch.arange(1, 101) / 100).to(device)  # of the first steps
        self._num_steps = torch.zeros(1, dtype=torch.int64, device=device)
        self._rate = torch.zeros((), device=device)
        self._adam = torch.optim.AdamW(
            self._masters,
            lr=self._rate,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=on_gpu,
            capturable=on_gpu,
        )

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        self._rate.copy_(self._rates[self._num_steps.clamp(max=99)][0])
        self._num_steps += 1
        nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._adam.step()
        torch._foreach_copy_(self._parameters, self._masters)


class Step:
    """A training step. On a GPU all but the first ones replay a CUDA graph of it."""

    _NUM_EAGER = 3  # compile and allocate before the capture

    def __init__(self, model: Decoder, optimizer: MasterWeights) -> None:
        self._model = model
        self._optimizer = optimizer
        self._num_steps = 0
        self._graph: Any = None
        self._stream: Any = None  # of the first steps and of the capture
        self._batch: Any = None
        self._loss: Any = None

    def __call__(self, batch: Any) -> float:
        if not batch.is_cuda:
            return self._run(batch).item()
        if self._num_steps < self._NUM_EAGER:
            self._num_steps += 1
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                loss = self._run(batch)
            torch.cuda.current_stream().wait_stream(self._stream)
            return loss.item()
        if self._graph is None:
            self._batch = batch.clone()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._loss = self._run(self._batch)
        self._batch.copy_(batch)
        self._graph.replay()
        return self._loss.item()

    def _run(self, batch: Any) -> Any:
        loss = self._model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        self._optimizer.step()
        return loss.detach()


def train(name: str, config: Config, steps: int, device: str, is_compiled: bool) -> dict[str, Any]:
    """Train for `steps` steps; return losses, tokens a second, and peak memory in bytes."""
    torch.manual_seed(0)
    model = Decoder(config, KERNELS[name]).to(device)
    if device != "cpu":
        model.to(torch.bfloat16)
        model.table.data = model.table.float()
    run = Step(model, MasterWeights(model, config.learning_rate))
    language = Language(config, device)
    if is_compiled:
        model.compile_parts()
    losses, seconds = [], []
    for step, batch in enumerate(language.batches(steps)):
        _synchronize(device)
        start = time.perf_counter()
        losses.append(run(batch))
        seconds.append(time.perf_counter() - start)
        if step == 0 and device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        if step % 100 == 0 or step == steps - 1:
            print(f"{name}: step {step}, loss {losses[-1]:.4f}", flush=True)
    median = sorted(seconds[len(seconds) // 2 :])[len(seconds) // 4]
    return {
        "kernels": name,
        "compiled": is_compiled,
        "parameters": sum(p.numel() for p in model.parameters()),
        "losses": losses,
        "best_possible_loss": language.entropy,
        "tokens_per_second": config.batch_size * config.seq_len / median,
        "peak_bytes": torch.cuda.max_memory_allocated() if device != "cpu" else 0,
    }


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=["engine"])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU can train")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = TINY if arguments.tiny else Config()
    is_compiled = device != "cpu" and not arguments.eager
    results = []
    for name in arguments.kernels:
        result = train(name, config, arguments.steps, device, is_compiled)
        results.append(result)
        print(
            f"{name}: {result['parameters'] / 1e6:.0f}M parameters, "
            f"{result['tokens_per_second']:,.0f} tokens/s, "
            f"{result['peak_bytes'] / 2**30:.2f} GiB; mean loss of the last steps "
            f"{sum(result['losses'][-50:]) / len(result['losses'][-50:]):.4f}, best possible "
            f"{result['best_possible_loss']:.4f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
