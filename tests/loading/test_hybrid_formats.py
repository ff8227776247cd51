"""Gated delta nets from quantized checkpoints: parts in several formats make one product."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import engine
from engine.device import to_numpy
from tests.distributed.golden import write_checkpoint
from tests.golden.quantized import CASES, make_linear, write_safetensors

N, HEADS, KEY_HEADS, DIM = 128, 4, 2, 128
SIZES = {
    "vocab_size": 60,
    "hidden_size": N,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "full_attention_interval": 2,
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": HEADS,
    "linear_key_head_dim": DIM,
    "linear_value_head_dim": DIM,
    "tie_word_embeddings": False,
}
KEYS, VALUES = KEY_HEADS * DIM, HEADS * DIM
IN_PROJ = {
    "qwen3_next": {
        "in_proj_qkvz": (2 * KEYS + 2 * VALUES, "quantized"),
        "in_proj_ba": (2 * HEADS, "dense"),
    },
    "qwen3_5_text": {
        "in_proj_qkv": (2 * KEYS + VALUES, "quantized"),
        "in_proj_z": (VALUES, "quantized"),
        "in_proj_b": (HEADS, "dense"),
        "in_proj_a": (HEADS, "dense"),
    },
}
LINEARS = {
    "linear_attn.out_proj": (N, VALUES),
    "self_attn.q_proj": (512, N),
    "self_attn.k_proj": (128, N),
    "self_attn.v_proj": (128, N),
    "self_attn.o_proj": (N, 256),
    "mlp.gate_proj": (256, N),
    "mlp.up_proj": (256, N),
    "mlp.down_proj": (N, 256),
}
TOKENS = np.random.default_rng(0).integers(0, 60, (2, 24))


def make(folder, case, family):
    """Write a model in the format, and its dequantized twin in float32; return both folders."""
    rng, stored, plain = np.random.default_rng(1), {}, {}

    def add(name, shape, mean=0.0, size=0.1):
        values = (mean + size * rng.standard_normal(shape)).astype(np.float32)
        stored[name] = plain[name] = ("F32", values)

    def linear(name, shape):
        tensors, numbers = make_linear(case, shape, name)
        stored.update({f"{name}.{kind}": tensor for kind, tensor in tensors.items()})
        plain[f"{name}.weight"] = ("F32", numbers)

    add("model.embed_tokens.weight", (60, N), size=0.5)
    add("lm_head.weight", (60, N))
    for name in ("norm", *(f"layers.{i}.{one}" for i in (0, 1) for one in NORMS)):
        add(f"model.{name}.weight", (N,))
    for name in ("q_norm", "k_norm"):
        add(f"model.layers.1.self_attn.{name}.weight", (128,))
    delta = "model.layers.0.linear_attn"
    add(f"{delta}.conv1d.weight", (2 * KEYS + VALUES, 1, 4), size=0.5)
    add(f"{delta}.A_log", (HEADS,), size=0.5)
    add(f"{delta}.dt_bias", (HEADS,), size=0.5)
    add(f"{delta}.norm.weight", (DIM,), mean=1.0)
    for name, (rows, kind) in IN_PROJ[family].items():
        if kind == "dense":
            add(f"{delta}.{name}.weight", (rows, N))
        else:
            linear(f"{delta}.{name}", (rows, N))
    for name, shape in LINEARS.items():
        layers = {"linear_attn": (0,), "self_attn": (1,)}.get(name.split(".")[0], (0, 1))
        for layer in layers:
            linear(f"model.layers.{layer}.{name}", shape)
    values = {**SIZES, "model_type": family}
    if family == "qwen3_next":
        values["decoder_sparse_step"] = 9  # no layer has experts
    quantized, twin = folder / "quantized", folder / "twin"
    for path, tensors in ((quantized, stored), (twin, plain)):
        path.mkdir()
        write_safetensors(path / "model.safetensors", tensors)
        (path / "config.json").write_text(json.dumps(values))
    config = values | {"quantization_config": CASES[case].config}
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized, twin


NORMS = ("input_layernorm", "post_attention_layernorm")


def logits(folder, **options):
    model = engine.load(folder, device="cpu", progress=False, **options)
    return to_numpy(model.step(TOKENS, model.new_cache(2, 32), logits="all")), model


@pytest.mark.parametrize("family", IN_PROJ)
@pytest.mark.parametrize("case", ["fp8_block", "ct_int8", "gptq"])
def test_logits_are_those_of_the_twin(tmp_path, case, family):
    """In float32's precision; with activations in 8 bits as close as these are."""
    quantized, twin = make(tmp_path, case, family)
    wanted, _ = logits(twin)
    dequantized, _ = logits(quantized, quantization="none")
    np.testing.assert_allclose(dequantized, wanted, rtol=1e-5, atol=1e-5)
    got, model = logits(quantized)
    parts = model.decoder.weights["layers.0.delta_in"].formats()
    names = [form.name for form in parts]
    if case == "gptq":  # The CPU dequantizes it, or on one thread widens it in every product.
        assert set(names) <= {"float32", "int4_g128"}
        np.testing.assert_allclose(got, dequantized, rtol=1e-5, atol=1e-5)
        return
    assert names == [{"fp8_block": "fp8_block", "ct_int8": "int8"}[case], "float32"]
    norms = np.linalg.norm(got, axis=-1) * np.linalg.norm(wanted, axis=-1)
    assert 1e-7 < 1 - ((got * wanted).sum(-1) / norms).mean() < 0.02


def test_experts_in_one_tensor(tmp_path):
    """Published Qwen3.5 models have them so, below the prefix of a multimodal model."""
    folder = write_checkpoint("qwen3_5_moe", tmp_path)
    separate, _ = logits(folder)
    tensors = load_file(folder / "model.safetensors")
    experts = {name: tensors.pop(name) for name in list(tensors) if ".mlp.experts." in name}
    for layer in range(4):
        prefix = f"model.language_model.layers.{layer}.mlp.experts"
        parts = {
            kind: [experts[f"{prefix}.{e}.{kind}_proj.weight"] for e in range(7)]
            for kind in ("gate", "up", "down")
        }
        gate_up = np.concatenate([np.stack(parts["gate"]), np.stack(parts["up"])], axis=1)
        tensors |= {
            f"{prefix}.gate_up_proj": gate_up,
            f"{prefix}.down_proj": np.stack(parts["down"]),
        }
    save_file(tensors, folder / "model.safetensors")
    fused, _ = logits(folder)
    np.testing.assert_array_equal(fused, separate)
