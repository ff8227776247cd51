"""Models with corrupted bytes: a clear error, or weights of the shapes given by the config."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from engine.errors import ConfigError, WeightsError
from engine.loading.gguf import GgufFile
from engine.loading.model_config import load_config
from engine.loading.weights import load_weights, weight_shapes
from tests.fuzz.values import change_bytes
from tests.loading.tiny import random_tensors, write_gguf

GOLDEN = Path(__file__).parents[1] / "golden" / "models"


def mutants(whole: bytes, end: int, count: int, seed: int):
    """Yield copies of `whole` with a few bytes changed before `end`."""
    rng = random.Random(seed)
    for _ in range(count):
        yield change_bytes(rng, whole, end)


def load_or_refuse(path, source) -> bool:
    """Tell whether the model is accepted; only the two documented errors may refuse it."""
    try:
        config = load_config(source)
        weights = load_weights(path, config)
    except (ConfigError, WeightsError):
        return False
    assert {name: value.shape for name, value in weights.items()} == weight_shapes(config)
    return True


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_mutated_gguf_models(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path)
    assert load_or_refuse(path, path)
    whole = path.read_bytes()
    end = min(tensor.start for tensor in GgufFile(path).tensors.values())
    accepted = 0
    for mutant in mutants(whole, end, 1500, seed=1):
        path.unlink(missing_ok=True)  # overwriting a file would wait for the disk
        path.write_bytes(mutant)
        accepted += load_or_refuse(path, path)
    assert accepted > 10


@pytest.mark.parametrize("family", ["qwen3", "phi3"])
def test_mutated_safetensors_models(make_model, family):
    path, _, _ = make_model(family)
    file = path / "model.safetensors"
    whole = file.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    for mutant in mutants(whole, end, 400, seed=2):
        file.unlink(missing_ok=True)  # overwriting a file would wait for the disk
        file.write_bytes(mutant)
        load_or_refuse(path, path)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_mutated_config_files(make_model, family):
    path, _, _ = make_model(family)
    file = path / "config.json"
    whole = file.read_bytes()
    accepted = 0
    for mutant in mutants(whole, len(whole), 600, seed=3):
        file.unlink(missing_ok=True)  # overwriting a file would wait for the disk
        file.write_bytes(mutant)
        accepted += load_or_refuse(path, path)
    assert accepted > 10  # harmless changes, such as to an unused key


@pytest.mark.parametrize("case", ["qwen2_moe", "gpt_oss", "glm4_moe", "llama4", "qwen3_vl_moe"])
def test_mutated_models_with_experts(tmp_path, case):
    """Their config.json and the header of their tensors, in turn."""
    record = json.loads((GOLDEN / f"{case}.json").read_text())
    save_file(random_tensors(record["tensors"]), tmp_path / "model.safetensors")
    files = {
        "config.json": json.dumps(record["config"]).encode(),
        "model.safetensors": (tmp_path / "model.safetensors").read_bytes(),
    }
    (tmp_path / "config.json").write_bytes(files["config.json"])
    assert load_or_refuse(tmp_path, tmp_path)
    for name, whole in files.items():
        end = len(whole) if name == "config.json" else 8 + int.from_bytes(whole[:8], "little")
        for mutant in mutants(whole, end, 150, seed=4):
            (tmp_path / name).unlink()  # overwriting a file would wait for the disk
            (tmp_path / name).write_bytes(mutant)
            load_or_refuse(tmp_path, tmp_path)
        (tmp_path / name).write_bytes(whole)
