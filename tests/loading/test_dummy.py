"""Random weights: the right shapes, the right distribution, the same on every device."""

from __future__ import annotations

import numpy as np
import pytest

import engine
from engine.config import ModelConfig
from engine.device import Device
from engine.dtypes import FLOAT_NAMES, np_dtype
from engine.errors import OutOfMemoryError
from engine.loading import dummy, weight_memory
from engine.loading.hf_config import config_from_dict
from engine.loading.weights import dummy_weights, weight_bytes, weight_shapes
from engine.models.registry import FAMILIES


@pytest.mark.parametrize("dtype", FLOAT_NAMES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "gemma3_text"])
def test_shapes_dtypes_and_ties(tiny, family, dtype):
    config = config_from_dict(tiny.config_of(family))
    weights = dummy_weights(config, dtype=dtype)
    assert {name: value.shape for name, value in weights.items()} == weight_shapes(config)
    assert {value.data.dtype for value in weights.values()} == {np_dtype(dtype)}
    assert (weights["lm_head"] is weights["embed"]) == config.tie_word_embeddings


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs(tiny, family):
    values = {**tiny.config_of("llama"), "model_type": family, "num_hidden_layers": 4}
    if family in ("granitemoehybrid", "nemotron_h", "falcon_h1", "bamba"):
        values |= {"mamba_n_heads": 4, "mamba_n_groups": 1, "hybrid_override_pattern": "M-*M"}
        values |= {"mamba_d_ssm": None}
    if family == "lfm3":
        values["layer_types"] = ["conv", "sliding_attention", "full_attention", "conv"]
    model = engine.load(config=config_from_dict(values), load_format="dummy", device="cpu")
    logits = model.step([[1, 2, 3]], model.new_cache(1, 16))
    assert logits.shape == (1, model.config.vocab_size) and np.isfinite(logits).all()


def test_distribution(tiny):
    config = config_from_dict(tiny.config_of("gemma3_text", vocab_size=4000, hidden_size=256))
    weights = dummy_weights(config)
    for name, weight in weights.items():
        value = weight.data
        assert abs(value.mean()) < 0.02, name  # norms too: Gemma's layers add the 1
        assert 0.01 < value.std() < 0.03, name
    plain = dummy_weights(config_from_dict(tiny.config_of("llama")))
    assert all(abs(plain[name].data.mean() - 1) < 0.02 for name in plain if name.endswith("norm"))


def test_a_weight_depends_on_its_name_and_the_seed_only(tiny):
    small = dummy_weights(config_from_dict(tiny.config_of("llama")))
    large = dummy_weights(config_from_dict(tiny.config_of("llama", num_hidden_layers=5)))
    for name, value in small.items():
        np.testing.assert_array_equal(large[name].data, value.data)
    other = dummy_weights(config_from_dict(tiny.config_of("llama")), seed=1)
    assert not np.array_equal(other["embed"].data, small["embed"].data)
    assert not np.array_equal(small["layers.0.qkv"].data, small["layers.1.qkv"].data)


def test_no_two_rows_of_a_large_matrix_are_equal():
    """The pool is tiled, but its prime length is coprime to a width that is a power of two."""
    config = ModelConfig("llama", 4096, 1024, 1, 8, 8, 128, 64, 64)
    embed = dummy_weights(config)["embed"].data
    assert embed.size > 3 * dummy._POOL
    assert len(np.unique(embed[:, :4], axis=0)) == len(embed)


def test_out_of_memory_says_how_much_was_needed(tiny, monkeypatch):
    def tiled(*args):
        raise MemoryError("no")

    monkeypatch.setattr("engine.loading.dummy._tiled", tiled)
    with pytest.raises(OutOfMemoryError, match=r"cpu has no room for \d.* of weights"):
        dummy_weights(config_from_dict(tiny.config_of("llama")))


def test_weights_that_cannot_fit_are_refused_before_allocation(tiny, monkeypatch):
    config = config_from_dict(tiny.config_of("llama"))
    needed = weight_bytes(config, "float32")
    monkeypatch.setattr(weight_memory, "device_memory", lambda device: (4 * needed, needed // 2))
    monkeypatch.setattr(dummy, "_tiled", None)  # must not be called
    with pytest.raises(OutOfMemoryError, match=r'others use .* are free. .* dtype="bfloat16"'):
        dummy_weights(config)
    monkeypatch.setattr(weight_memory, "device_memory", lambda device: (4 * needed, needed // 4))
    with pytest.raises(OutOfMemoryError, match=r"are free$"):
        dummy_weights(config, dtype="bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOAT_NAMES)
def test_cuda_weights_equal_those_of_the_cpu(cp, tiny, dtype):
    config = config_from_dict(tiny.config_of("gemma3_text", vocab_size=50_000))
    on_gpu = dummy_weights(config, device=Device("cuda"), dtype=dtype)
    for name, value in dummy_weights(config, dtype=dtype).items():
        assert isinstance(on_gpu[name].data, cp.ndarray)
        np.testing.assert_array_equal(on_gpu[name].data.get(), value.data)
