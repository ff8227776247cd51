"""Models from quantized checkpoints give the logits of their dequantized twins.

The checkpoints are made by `tests/golden/quantized.py`, a packer that shares no code with the
readers.
"""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import engine
from engine.device import to_numpy
from engine.errors import WeightsError
from tests.golden.quantized import CASES, CONFIG, make

TOKENS = np.random.default_rng(0).integers(0, CONFIG["vocab_size"], (2, 24))
# In most cases, so that a GPU test takes seconds.
ON_GPU = ("ct_int4", "ct_int4_asymmetric", "ct_mixed", "ct_fp8_block", "ct_int8", "gptq_act_order")
ON_GPU += ("awq", "fp8", "ct_mxfp4", "ct_int8_packed_asymmetric")


def _logits(folder, **options):
    model = engine.load(folder, **options)
    return to_numpy(model.step(TOKENS, model.new_cache(2, 32), logits="all")), model


def _cosines(got, wanted):
    norms = np.linalg.norm(got, axis=-1) * np.linalg.norm(wanted, axis=-1)
    return (got * wanted).sum(-1) / norms


def _computes_with_codes(model):
    weights = model.decoder.weights.values()
    return any(form.activations for weight in weights for form in weight.formats())


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_twin(tmp_path, case):
    """Exactly, if dequantized; with activations in 8 bits as close as these are."""
    quantized, twin = make(tmp_path, case)
    wanted, _ = _logits(twin, device="cpu")
    dequantized, model = _logits(quantized, device="cpu", quantization="none")
    assert not _computes_with_codes(model)
    np.testing.assert_allclose(dequantized, wanted, rtol=1e-5, atol=1e-5)
    got, model = _logits(quantized, device="cpu")
    if _computes_with_codes(model):
        assert 1e-7 < 1 - _cosines(got, wanted).mean() < 0.02
    else:
        # Products with codes on the CPU sum in another order.
        np.testing.assert_allclose(got, dequantized, rtol=1e-5, atol=2e-5)
        same = {"device": "cpu", "deterministic": True}
        expected, _ = _logits(quantized, quantization="none", **same)
        np.testing.assert_array_equal(_logits(quantized, **same)[0], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU)
def test_a_gpu_gives_the_logits_of_the_cpu(cp, tmp_path, case):
    quantized, _ = make(tmp_path, case)
    wanted, _ = _logits(quantized, device="cpu")
    got, model = _logits(quantized, device="cuda", dtype="bfloat16")
    formats = {form.name for weight in model.decoder.weights.values() for form in weight.formats()}
    assert formats > {"bfloat16"}, "the matrices must stay in the checkpoint's format"
    assert _cosines(got, wanted).min() > (0.98 if _computes_with_codes(model) else 0.99)


def test_a_quantized_checkpoint_is_rounded_again(tmp_path):
    """An option of its own applies to the numbers, whatever the file has."""
    quantized, _ = make(tmp_path, "gptq")
    _, model = _logits(quantized, device="cpu", quantization="int8")
    assert model.decoder.weights["layers.0.o"].format.name == "int8"


def test_a_bias_of_zeros_beside_a_quantized_matrix_is_left_out(tmp_path):
    """Old GPTQ writers add one to every module; any other bias does not belong to the model."""
    quantized, _ = make(tmp_path, "gptq")
    wanted, _ = _logits(quantized, device="cpu")
    file = quantized / "model.safetensors"
    tensors = dict(load_file(file))
    bias = np.zeros(len(tensors["model.layers.0.self_attn.o_proj.qweight"][0]), np.float16)
    name = "model.layers.0.self_attn.o_proj.bias"
    save_file({**tensors, name: bias}, file)
    got, _ = _logits(quantized, device="cpu")
    np.testing.assert_array_equal(got, wanted)
    save_file({**tensors, name: bias + np.float16(1)}, file)
    with pytest.raises(WeightsError, match=r"not part of a llama model.*o_proj\.bias"):
        engine.load(quantized, device="cpu")


def test_a_part_that_cuts_a_block_is_refused_by_name(tmp_path):
    """Phi-3's gate and up are one tensor; here the block in its middle has rows of both."""
    config = {"model_type": "phi3", "vocab_size": 40, "hidden_size": 128, "num_hidden_layers": 1}
    config |= {"intermediate_size": 96, "num_attention_heads": 2, "max_position_embeddings": 64}
    shapes = {"self_attn.qkv_proj": (384, 128), "self_attn.o_proj": (128, 128)}
    shapes |= {"mlp.down_proj": (128, 96), "input_layernorm": (128,)}
    shapes |= {"post_attention_layernorm": (128,)}
    layer = "model.layers.0."
    tensors = {
        f"{layer}{name}.weight": np.ones(shape, np.float32) for name, shape in shapes.items()
    }
    for end in ("model.embed_tokens", "lm_head"):
        tensors[f"{end}.weight"] = np.ones((40, 128), np.float32)
    tensors["model.norm.weight"] = np.ones(128, np.float32)
    name = f"{layer}mlp.gate_up_proj.weight"
    tensors[name] = np.ones((192, 128), ml_dtypes.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = np.array([[1.0], [2.0]], np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    scheme = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))
    wanted = rf"tensor '{name}' must have a multiple of 128 rows in each part .*; got 96 rows"
    with pytest.raises(WeightsError, match=wanted):
        engine.load(tmp_path, device="cpu", dtype="float32")
    assert engine.load(tmp_path, device="cpu", dtype="float32", quantization="none")


def test_matrices_that_the_config_multiplies_are_not_quantized_in_a_folder(golden, tmp_path):
    """Falcon-H1's multipliers: the reader refuses such folders."""
    folder = golden("falcon_h1").directory
    with pytest.raises(WeightsError, match=r"down_proj\.weight' must not be quantized in a folder"):
        engine.quantize(folder, tmp_path / "out", format="int8")
