"""Weights in fewer bits: rounded while they are read, or kept as the file stores them."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

import engine
from engine.config import ModelConfig
from engine.device import to_numpy
from engine.errors import ConfigError, WeightsError
from engine.loading.model_config import load_config
from engine.loading.weight_memory import quantized_formats, weight_bytes
from engine.loading.weights import dummy_weights, load_weights
from engine.weights import FORMATS, Shard, unpack_weight
from engine.weights.quantize import QUANTIZABLE, quantize
from tests.loading import tiny


@pytest.fixture
def folder(make_model):
    return make_model()[0]


@pytest.mark.parametrize(
    "name", ["fp8", "fp8_block", "int8", "int4_g32", "int8_g64_zp", "mxfp4", "q4_0"]
)
@pytest.mark.parametrize("tied", [False, True])
def test_matrices_of_layers_are_rounded(make_model, name, tied):
    folder = make_model(tie_word_embeddings=tied)[0]
    form, config = FORMATS[name], load_config(folder)
    formats = quantized_formats(config, form)
    exact = load_weights(folder, config)
    made = load_weights(folder, config, quantization=form)
    assert made.keys() == exact.keys()
    for key, weight in made.items():
        wanted = exact[key].data
        if key in formats:
            wanted = unpack_weight(quantize(wanted, formats[key]))
            assert weight.format is (form if form.activations else FORMATS["float32"])
        else:
            assert weight.format.is_dense
        np.testing.assert_array_equal(unpack_weight(weight), wanted)


@pytest.mark.parametrize("tied", [False, True])
def test_the_output_layer_is_as_in_gguf_files(tied):
    """llama.cpp's files have it in Q6_K, or in Q8_0; other formats leave it as it is."""
    for hidden, name, wanted in (
        (256, "q4_0", "q6_k"),
        (256, "q4_k", "q6_k"),
        (256, "q8_0", "q8_0"),
        (288, "q5_1", "q8_0"),  # rows have no whole super-blocks
        *((256, name, "float16") for name in ("fp8", "fp8_block", "int8", "int4_g128", "mxfp4")),
    ):
        config = ModelConfig("llama", 80, hidden, 1, 4, 2, 64, 96, 128, tie_word_embeddings=tied)
        formats = quantized_formats(config, FORMATS[name])
        assert formats.get("lm_head", FORMATS["float16"]).name == wanted
        weights = dummy_weights(config, dtype="float16", quantization=FORMATS[name])
        assert weights["lm_head"].format.name == wanted
        assert weights["embed"].format.name == "float16"
        held = {id(weight): weight.num_bytes for weight in weights.values()}
        assert sum(held.values()) == weight_bytes(config, "float16", formats=formats)


def test_the_padding_of_a_quantized_output_layer_is_zeros(make_model):
    """A vocabulary that shards do not divide: rows of padding are rounded too."""
    folder = make_model(vocab_size=301)[0]
    config, shard = load_config(folder), Shard(3, 4)
    made = load_weights(folder, config, quantization=FORMATS["q8_0"], shard=shard)["lm_head"]
    assert made.shape[0] == 76 and not unpack_weight(made)[73:].any()
    assert unpack_weight(made)[:73].any(axis=1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("name", "output"), [("q4_0", "q6_k"), ("q8_0", "q8_0")])
def test_the_output_layer_on_a_gpu(cp, make_model, name, output, tied):
    """It stays packed; the logits are float32, and those of the same codes on the CPU."""
    folder = make_model(hidden_size=256, tie_word_embeddings=tied)[0]
    tokens = np.arange(1, 13).reshape(2, 6)
    logits = []
    for device in ("cpu", "cuda"):
        model = engine.load(folder, device=device, dtype="float16", quantization=name)
        logits.append(to_numpy(model.step(tokens, model.new_cache(2, 8))))
        assert logits[-1].dtype == np.float32
    assert model.decoder.weights["lm_head"].format.name == output
    assert model.decoder.weights["embed"].format.is_dense
    assert np.abs(logits[0] - logits[1]).max() < 0.02 * np.abs(logits[0]).max()


def test_a_shard_is_rounded_by_itself(folder):
    config, form = load_config(folder), FORMATS["int8"]
    shard = Shard(1, 2)
    exact = load_weights(folder, config, shard=shard)
    made = load_weights(folder, config, quantization=form, shard=shard)
    down = made["layers.0.down"]
    assert down.shard == shard and down.axis == 1
    wanted = unpack_weight(quantize(exact["layers.0.down"].data, form))
    np.testing.assert_array_equal(unpack_weight(down), wanted)


@pytest.mark.parametrize("value", [np.nan, 1e30])
def test_a_matrix_that_cannot_be_rounded_is_named(tmp_path, value):
    _, tensors = tiny.write_model(tmp_path / "m")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    save_file(tensors, tmp_path / "m/model.safetensors")
    with pytest.raises(WeightsError, match=r"layers.1.down cannot be rounded to int4_g32: array"):
        engine.load(tmp_path / "m", device="cpu", quantization="int4_g32")


def test_the_option(folder):
    model = engine.load(folder, device="cpu", quantization="int4_g32")
    assert model.load_config.quantization == "int4_g32"
    plain = engine.load(folder, device="cpu")
    tokens = [[1, 2, 3, 4]]
    logits = model.step(tokens, model.new_cache(1, 8))
    exact = plain.step(tokens, plain.new_cache(1, 8))
    assert 0 < np.abs(logits - exact).max() < 0.5 * np.abs(exact).max()
    with pytest.raises(ConfigError, match=r"quantization must be one of int4, .*; got 'int3'"):
        engine.load(folder, device="cpu", quantization="int3")
    with pytest.raises(ConfigError, match="quantization must be a name or None; got 4"):
        engine.load(folder, device="cpu", quantization=4)


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_bytes_of_a_format(name):
    """What the memory plan counts is what the arrays take."""
    config = ModelConfig("llama", 64, 96, 2, 4, 2, 24, 160, 128)
    formats = quantized_formats(config, FORMATS[name])
    model = engine.load(
        config=config, load_format="dummy", device="cpu", dtype="bfloat16", quantization=name
    )
    tables = model.decoder.table_bytes
    assert model.weight_bytes - tables == weight_bytes(config, "bfloat16", formats=formats)
