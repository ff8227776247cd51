"""Make `classifiers.json`, with transformers on a CPU: scores of tiny models with heads. Not in CI.

    pip install torch transformers
    python tests/golden/make_classifiers.py

For each case: config.json, the shapes of the tensors (their values are `tiny_weight`'s), logits of
`PROMPTS`, and the scores of their labels. The prompts have no padding.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from tiny_weights import tiny_weight
from transformers import AutoConfig, AutoModelForSequenceClassification

PROMPTS = ([5, 6, 7], [8], [9, 3, 11, 2, 60, 41, 7, 7, 12] * 4)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CASES: dict[str, dict[str, Any]] = {
    "qwen2_one_label": {"model_type": "qwen2", "num_labels": 1},
    "qwen3_named_labels": {
        "model_type": "qwen3",
        "head_dim": 16,
        "id2label": {0: "négatif", 1: "neutral", 2: "positive"},
        "label2id": {"négatif": 0, "neutral": 1, "positive": 2},
    },
    "llama_two_labels": {"model_type": "llama", "num_labels": 2},
    "mistral_several_at_once": {
        "model_type": "mistral",
        "num_labels": 4,
        "problem_type": "multi_label_classification",
    },
    "gemma2_regression": {
        "model_type": "gemma2",
        "head_dim": 16,
        "num_labels": 1,
        "problem_type": "regression",
        "final_logit_softcapping": 2.0,
    },
    "phi_biased_output": {"model_type": "phi", "num_labels": 2},
    "mixtral_experts": {"model_type": "mixtral", "num_labels": 2, "num_local_experts": 4},
}


def scores(logits: torch.Tensor, problem: str | None) -> torch.Tensor:
    """The activations that transformers' losses stand for."""
    if problem == "regression":
        return logits
    if problem == "multi_label_classification" or logits.shape[-1] == 1:
        return logits.sigmoid()
    return logits.softmax(-1)


def case(values: dict[str, Any]) -> dict[str, Any]:
    """Return what the tests need of one model."""
    values = dict(values)
    config = AutoConfig.for_model(values.pop("model_type"), **(SIZES | values))
    model = AutoModelForSequenceClassification.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        written = json.loads((Path(folder) / "config.json").read_text())
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    weights = {name: torch.from_numpy(tiny_weight(name, s, 1.0)) for name, s in shapes.items()}
    model.load_state_dict(weights)
    with torch.no_grad():
        logits = [model(torch.tensor([ids])).logits[0] for ids in PROMPTS]
    problem = values.get("problem_type")
    return {
        "config": written,
        "shapes": shapes,
        "logits": [row.tolist() for row in logits],
        "scores": [scores(row, problem).tolist() for row in logits],
    }


if __name__ == "__main__":
    found = {"prompts": PROMPTS, "cases": {name: case(values) for name, values in CASES.items()}}
    text = json.dumps(found, ensure_ascii=False, indent=1)
    (Path(__file__).parent / "classifiers.json").write_text(text + "\n")
