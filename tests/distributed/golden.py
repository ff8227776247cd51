"""The golden models of tests/golden, as checkpoints in a folder."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from safetensors.numpy import save_file

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(path.stem for path in (GOLDEN / "models").glob("*.json"))


def write_checkpoint(case, folder):
    """Write a golden model's config.json and weights to `folder`, and return it."""
    spec = importlib.util.spec_from_file_location("tiny_weights", GOLDEN / "tiny_weights.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    record = json.loads((GOLDEN / "models" / f"{case}.json").read_text())
    (folder / "config.json").write_text(json.dumps(record["config"]))
    tensors = {
        name: module.tiny_weight(name, shape, record["norm_mean"])
        for name, shape in record["tensors"].items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder
