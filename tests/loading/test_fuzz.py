"""Models with corrupted bytes: a clear error, or weights of the shapes given by the config."""

from __future__ import annotations

import random

import gguf
import numpy as np
import pytest

from engine.errors import ConfigError, WeightsError
from engine.loading.gguf import GgufFile
from engine.loading.model_config import load_config
from engine.loading.weights import load_weights, weight_shapes

NUMBERS = [0, 1, 2, 3, 4, 8, 9, 16, 31, 32, 33, 64, 127, 128, 255]


def mutants(whole: bytes, end: int, count: int, seed: int):
    """Yield copies of `whole` with a few bytes changed before `end`, sometimes truncated."""
    rng = random.Random(seed)
    for _ in range(count):
        mutant = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            mutant[rng.randrange(end)] = rng.choice([*NUMBERS, rng.randrange(256)])
        if rng.random() < 0.05:
            del mutant[rng.randrange(len(mutant)) :]
        yield bytes(mutant)


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
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(16)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(2.0)
    shapes = {
        "token_embd": (16, 32), "output_norm": (32,), "blk.0.attn_norm": (32,),
        "blk.0.ffn_norm": (32,), "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32),
        "blk.0.attn_v": (16, 32), "blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (32, 32),
        "blk.0.ffn_up": (32, 32), "blk.0.ffn_down": (32, 32),
    }  # fmt: skip
    q8 = gguf.GGMLQuantizationType.Q8_0
    for name, shape in shapes.items():
        value = np.ones(shape, np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", value)
        else:
            writer.add_tensor(f"{name}.weight", gguf.quantize(value, q8), raw_dtype=q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
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
