"""examples/train_small.py: the engine's kernels and torch's train the same decoder alike."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("train_small")


def test_losses_are_torchs_in_float32(example):
    ours, theirs = (
        example.train(name, example.TINY, 4, "cpu", False) for name in ("engine", "torch")
    )
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=5e-6)
    assert ours["losses"][0] != ours["losses"][-1]


@pytest.mark.gpu
def test_losses_are_torchs_in_bfloat16(example):
    config = replace(example.TINY, hidden_size=256, head_dim=64, ffn_size=512, expert_size=256)
    config = replace(config, batch_size=8, seq_len=256)
    runs = [example.train(name, config, 150, "cuda", False) for name in ("engine", "torch")]
    ours, theirs = (torch.tensor(run["losses"]) for run in runs)
    assert theirs[-10:].mean() < theirs[:10].mean() - 0.5  # the model learns
    assert (ours - theirs).abs().max() < 0.05
    assert (ours - theirs)[-50:].mean().abs() < 0.01


def test_the_language_has_the_stated_entropy(example):
    language = example.Language(example.TINY, "cpu")
    tokens = torch.cat(list(language.batches(60)))
    chances = 1 / torch.arange(1.0, 33)
    chances /= chances.sum()
    first = language._next[tokens[:, :-1].flatten(), 0] == tokens[:, 1:].flatten()
    assert first.float().mean().item() == pytest.approx(chances[0].item(), abs=0.03)
    assert language.entropy == pytest.approx(2.876, abs=1e-3)
