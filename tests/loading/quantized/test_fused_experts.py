"""Experts of a layer in one fp8 tensor, as transformers 5 writes them."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import engine
from engine.device import CPU
from engine.errors import WeightsError
from engine.loading.hf_config import load_hf_config
from engine.loading.quantized.fused_experts import name_fused_experts
from engine.loading.quantized.reader import QuantizedCheckpoint, read_rows
from engine.loading.quantized.scheme import load_scheme
from engine.loading.safetensors import SafetensorsFile
from engine.loading.stored_weights import StoredWeights
from engine.loading.tensor_reader import TensorReader
from engine.loading.text_model import open_model
from engine.loading.weights import weight_shapes
from engine.weights import WHOLE, unpack_weight

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BLOCK = [128, 128]
KINDS = ("block", "expert", "row")
CONFIG = {
    "model_type": "qwen3_vl_moe_text", "vocab_size": 32, "hidden_size": 160, "num_experts": 3,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "intermediate_size": 64, "moe_intermediate_size": 128, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
PREFIX = "model.language_model.layers.0."


def _codes(kind: str, rng) -> np.ndarray:
    shape = (3, 256, 160) if kind == "gate_up" else (3, 160, 128)
    return rng.uniform(-100, 100, shape).astype(np.float32).astype(E4M3)


def _scales(shape: tuple[int, int, int], kind: str, rng) -> tuple[np.ndarray, np.ndarray]:
    """Return scales as stored, and one per number."""
    e, n, k = shape
    stored = {"block": (e, -(-n // 128), -(-k // 128)), "expert": (e, 1, 1), "row": (e, n, 1)}[kind]
    scales = rng.uniform(0.5, 2, stored).astype(np.float32) / 1000
    if kind != "block":
        return scales, np.broadcast_to(scales, shape)
    return scales, scales.repeat(128, 1)[:, :n].repeat(128, 2)[:, :, :k]


@pytest.fixture(params=KINDS)
def folders(request, tmp_path):
    """A checkpoint with fp8 experts, and the same in float32."""
    rng = np.random.default_rng(0)
    shapes = {"self_attn.q_proj": (64, 160), "self_attn.k_proj": (32, 160)}
    shapes |= {"self_attn.v_proj": (32, 160), "self_attn.o_proj": (160, 64)}
    shapes |= {"mlp.gate": (3, 160), "input_layernorm": (160,)}
    shapes |= {"post_attention_layernorm": (160,), "self_attn.q_norm": (32,)}
    shapes |= {"self_attn.k_norm": (32,)}
    plain = {
        f"{PREFIX}{name}.weight": (rng.standard_normal(shape) / 8).astype(np.float32)
        for name, shape in shapes.items()
    }
    plain["model.language_model.embed_tokens.weight"] = rng.standard_normal((32, 160), np.float32)
    plain["model.language_model.norm.weight"] = np.ones(160, np.float32)
    coded = dict(plain)
    for name in ("gate_up", "down"):
        module = f"{PREFIX}mlp.experts.{name}_proj"
        codes = _codes(name, rng)
        stored, scales = _scales(codes.shape, request.param, rng)
        plain[module] = codes.astype(np.float32) * scales
        coded |= {module: codes, f"{module}_scale_inv": stored}
        coded[f"{module}_activation_scale"] = np.ones(1, np.float32)
    scheme = {"quant_method": "fp8", "modules_to_not_convert": ["model.language_model.norm"]}
    scheme |= {"weight_block_size": BLOCK} if request.param == "block" else {}
    whole = {"model_type": "qwen3_vl_moe", "text_config": CONFIG}
    for name, tensors in (("plain", plain), ("coded", coded)):
        (tmp_path / name).mkdir()
        more = {"quantization_config": scheme} if name == "coded" else {}
        (tmp_path / name / "config.json").write_text(json.dumps({**whole, **more}))
        save_file(tensors, tmp_path / name / "model.safetensors")
    return tmp_path / "plain", tmp_path / "coded"


def test_logits_are_those_of_the_dequantized_model(folders):
    models = [engine.load(one, device="cpu", dtype="float32", progress=False) for one in folders]
    got = [model.step([[3, 9, 27, 14]], model.new_cache(1, 8), logits="all") for model in models]
    assert got[0].std() > 0.1
    np.testing.assert_allclose(got[1], got[0], rtol=0, atol=1e-5 * got[0].std())


def test_experts_apart_beside_the_scales_of_all(folders):
    """As transformers 5.24.0 writes qwen3_moe."""
    path = folders[1] / "model.safetensors"
    file = SafetensorsFile(path)
    stored = {name: file.view(name) for name in file.names()}
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        block, _, kind = name.rpartition(".")
        kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for index, matrix in enumerate(stored.pop(name)):
            for part, rows in zip(kinds, np.split(matrix, len(kinds)), strict=True):
                stored[f"{block}.{index}.{part}.weight"] = np.ascontiguousarray(rows)
        stored.pop(f"{name}_activation_scale")
    save_file(stored, path)
    models = [engine.load(one, device="cpu", dtype="float32", progress=False) for one in folders]
    got = [model.step([[3, 9, 27, 14]], model.new_cache(1, 8), logits="all") for model in models]
    np.testing.assert_allclose(got[1], got[0], rtol=0, atol=1e-5 * got[0].std())


def test_rows_across_experts_keep_their_codes(folders):
    checkpoint, plain = open_model(folders[1]), open_model(folders[0])
    name_fused_experts(checkpoint)
    scheme = load_scheme(folders[1])
    name = "model.layers.0.mlp.experts.gate_up_proj"
    known = QuantizedCheckpoint(checkpoint, scheme)
    assert name in set(known.names()) and known.shape(name) == (3, 256, 160)
    assert not any("scale" in one for one in known.names())
    rows = read_rows(checkpoint, scheme, name, 200, 600, (128, 160))
    want = plain.view(name).reshape(-1, 160)[200:600, 128:]
    np.testing.assert_array_equal(rows.numbers(), want)
    assert rows.codes.dtype == np.uint8 and known.format_of(name).code == "e4m3"


def test_the_weight_keeps_its_format(folders):
    config = load_hf_config(folders[1])
    reader = TensorReader(folders[1], config)
    for kind in ("gate_up", "down"):
        name = f"layers.0.experts_{kind}"
        parts = [place for place in reader.placements(WHOLE) if str(place.target) == name]
        shape = weight_shapes(config)[name]
        weight = StoredWeights(reader, CPU, "float32").build(parts, shape)
        # An expert's 160 rows of down are no whole blocks.
        is_kept = kind == "gate_up" or load_scheme(folders[1]).formats != ("fp8_block",)
        assert (weight.format.code == "e4m3") == is_kept and weight.shape == shape
        want = open_model(folders[0]).view(f"model.layers.0.mlp.experts.{kind}_proj")
        np.testing.assert_array_equal(unpack_weight(weight), want)


def test_scales_of_another_shape_are_refused(folders):
    path = folders[1] / "model.safetensors"
    tensors = {name: open_model(folders[1]).view(name) for name in open_model(folders[1]).names()}
    name = next(name for name in tensors if name.endswith("gate_up_proj_scale_inv"))
    tensors[name] = np.ones((2, 1, 1), np.float32)
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path)
    with pytest.raises(WeightsError, match=r"weight_scale_inv' must have shape \(3, .*got \(2, 1"):
        engine.load(folders[1], device="cpu", dtype="float32")
