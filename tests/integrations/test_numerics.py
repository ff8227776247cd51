"""The float64 reference of `tests.quality.numerics` beside transformers in float64."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from engine.device import CPU
from tests.quality import float64, numerics
from tests.quality.made_models import make
from tests.quality.numerics_peers import Transformers

pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to fix


def _as_llama(folder):
    """Turn a Qwen3 checkpoint into a Llama: without QK-norms, and with a tied embedding."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    file.write_text(json.dumps(config | llama | {"tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    dropped = ("lm_head.", "q_norm.", "k_norm.")
    kept = {n: t for n, t in tensors.items() if not any(part in n for part in dropped)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("model", ["llama", "dense", "experts"])
def test_the_reference(model, tmp_path):
    made = make("dense" if model == "llama" else model, "tiny", tmp_path, 3, 40)
    if model == "llama":
        _as_llama(tmp_path)
    # transformers normalises, rotates and takes the softmax in float32, also of a float64 model.
    expected = float64.logits(tmp_path, made.token_ids)
    with Transformers(tmp_path, "float64", CPU) as peer:
        found = peer.prompts(made.token_ids)
        steps = peer.decoded(made.token_ids, 16)
    assert found.dtype == np.float64
    assert np.abs(found - expected).max() < 2e-5 * expected.std()
    assert np.abs(steps - expected[:, 16:]).max() < 2e-5 * expected.std()


def test_a_measurement():
    plan = numerics.Plan(("dense",), "tiny", num_sequences=4, length=24, first=8)
    rows = list(numerics.measure(plan, CPU))
    peers = [row for row in rows if row["implementation"] == "transformers"]
    assert [(row["mode"], row["dtype"], row["path"]) for row in peers] == [
        ("prompts", "bfloat16", "default"),
        ("1 request", "bfloat16", "default"),
        ("4 requests", "bfloat16", "default"),
        ("prompts", "bfloat16", "float32 logits"),
        ("prompts", "float32", "default"),
    ]
    assert peers[-1]["rms"] < 1e-5 < 1e-3 < peers[3]["rms"] < peers[0]["rms"] < 5e-2
    assert numerics.farther(rows) == []
    assert "no fused path is farther" in numerics.conclusion(rows)
