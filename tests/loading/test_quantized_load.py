"""Weights in fewer bits: rounded while they are read, or kept as the file stores them."""

from __future__ import annotations

import numpy as np
import pytest

import engine
from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.loading.model_config import load_config
from engine.loading.weight_memory import quantized_formats, weight_bytes
from engine.loading.weights import load_weights
from engine.quantization import FORMATS, Shard, unpack_weight
from engine.quantization.quantize import QUANTIZABLE, quantize


@pytest.fixture
def folder(make_model):
    return make_model()[0]


@pytest.mark.parametrize("name", ["fp8", "fp8_block", "int8", "int4_g32", "int8_g64_zp", "mxfp4"])
def test_matrices_of_layers_are_rounded(folder, name):
    form, config = FORMATS[name], load_config(folder)
    exact = load_weights(folder, config)
    made = load_weights(folder, config, quantization=form)
    assert made.keys() == exact.keys()
    for key, weight in made.items():
        wanted = exact[key].data
        if key in quantized_formats(config, form):
            wanted = unpack_weight(quantize(wanted, form))
            assert weight.format is (form if form.activations else FORMATS["float32"])
        else:
            assert weight.format.is_dense
        np.testing.assert_array_equal(unpack_weight(weight), wanted)


def test_a_shard_is_rounded_by_itself(folder):
    config, form = load_config(folder), FORMATS["int8"]
    shard = Shard(1, 2)
    exact = load_weights(folder, config, shard=shard)
    made = load_weights(folder, config, quantization=form, shard=shard)
    down = made["layers.0.down"]
    assert down.shard == shard and down.axis == 1
    wanted = unpack_weight(quantize(exact["layers.0.down"].data, form))
    np.testing.assert_array_equal(unpack_weight(down), wanted)


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
