"""Operators in training: data parallel, activation checkpoints, autocast, streams and devices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from engine.integrations import torch as ops  # noqa: E402
from tests.integrations import ddp_rank  # noqa: E402

F = torch.nn.functional
ROOT = Path(__file__).parents[2]


def test_gradients_of_two_processes_are_averaged(tmp_path):
    """Both ranks have the gradients of one process with both batches."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.integrations.ddp_rank", str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)], cwd=ROOT) for rank in range(2)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    torch.manual_seed(0)
    model = ddp_rank.Block()
    (first, second) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for step in range(2):
        wanted = ddp_rank.gradients(model, ddp_rank.batch(step))
        for mine, other, want in zip(first[step], second[step], wanted, strict=True):
            assert torch.equal(mine, other)
            torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_block_keeps_no_activation(where, use_reentrant):
    """Its gradients are those of the block without a checkpoint, bit for bit."""
    torch.manual_seed(0)
    block = ddp_rank.Block().to(where)
    x = torch.randn(5, 16, device=where, requires_grad=True)
    inputs = [x, *block.parameters()]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = checkpoint(block, x, use_reentrant=use_reentrant)
    # torch 2.11 keeps an empty tensor of its own on a GPU.
    activations = [t for t in kept if t.is_floating_point() and t.numel() and t is not x]
    assert not activations
    gradients = []
    for result in (out, block(x)):
        for t in inputs:
            t.grad = None
        result.sum().backward()
        gradients.append([t.grad for t in inputs])
    for got, want in zip(*gradients, strict=True):
        assert torch.equal(got, want)


def test_autocast_trains_in_bfloat16(where):
    """Parameters and their gradients stay float32; the values are those of torch's layers."""

    class Theirs(ddp_rank.Block):
        def forward(self, x):
            (gate, up) = self.up(F.rms_norm(x, (16,), self.norm, 1e-6)).chunk(2, -1)
            return x + self.down(F.silu(gate) * up)

    torch.manual_seed(0)
    ours = ddp_rank.Block().to(where)
    theirs = Theirs().to(where)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(64, 16, device=where)
    found = []
    for model in (ours, theirs):
        with torch.autocast(where, torch.bfloat16):
            out = model(x)
        out.float().square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    for got, want in zip(*found, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=0.03, atol=1e-3)


def _norm_and_gradients(x, weight, dy):
    y = ops.rmsnorm(x, weight)
    return y, *torch.autograd.grad(y, (x, weight), dy)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # leaves of two streams
def test_two_streams_share_nothing():
    """Scratch of one stream's calls is not that of the other's: neither waits for the other."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    cases = [
        [torch.randn(rows, 1024, device="cuda", requires_grad=True) for _ in range(20)]
        for rows in (3000, 2000)
    ]
    weights = [torch.randn(1024, device="cuda", requires_grad=True) for _ in streams]
    torch.cuda.synchronize()
    found = [[], []]
    for i in range(20):
        for case, weight, results, stream in zip(cases, weights, found, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(_norm_and_gradients(case[i], weight, torch.ones_like(case[i])))
    torch.cuda.synchronize()
    for case, weight, results in zip(cases, weights, found, strict=True):
        for x, got in zip(case, results, strict=True):
            alone = _norm_and_gradients(x, weight, torch.ones_like(x))
            assert all(torch.equal(a, b) for a, b in zip(got, alone, strict=True))


@pytest.mark.gpu
def test_tensors_of_another_device_run_there():
    """With the first device current, and without a word from the caller."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors = [torch.randn(33, 256), torch.randn(256), torch.randn(33, 256)]
    results = []
    for device in ("cuda:0", "cuda:1"):
        (x, weight, dy) = (t.to(device) for t in tensors)
        results.append(_norm_and_gradients(x.requires_grad_(), weight.requires_grad_(), dy))
        assert torch.cuda.current_device() == 0
        assert all(t.device == torch.device(device) for t in results[-1])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a.cpu(), b.cpu())
