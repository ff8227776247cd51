"""Latent attention: checkpoints in fp8 blocks, absorbed and expanded prefills, what is refused."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import engine
from engine.config import MlaConfig, RopeConfig
from engine.device import to_numpy
from engine.errors import ConfigError
from engine.layers import mla
from engine.loading.hf_config import config_from_dict
from engine.loading.mla_config import mla_scale
from tests.distributed.golden import GOLDEN
from tests.golden.quantized import fp8, seed_of, write_safetensors
from tests.golden.tiny_weights import tiny_weight

BLOCKS = fp8(block=True)
# Matrices that published checkpoints keep in 16 bits.
KEPT = re.compile(r"embed|lm_head|norm|\.gate\.|mlp\.router\.")
TOKENS = np.random.default_rng(0).integers(4, 128, (2, 24))


def _write(folder, case, tensors, **keys):
    values = json.loads((GOLDEN / "models" / f"{case}.json").read_text())["config"] | keys
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


@pytest.fixture(params=["deepseek_v3", "deepseek_v2", "glm4_moe_lite", "longcat_flash"])
def checkpoints(request, tmp_path):
    """A checkpoint in fp8 blocks, and its dequantized twin."""
    return _write_pair(request.param, tmp_path)


def _write_pair(case, tmp_path):
    record = json.loads((GOLDEN / "models" / f"{case}.json").read_text())
    stored, plain = {}, {}
    for name, shape in record["tensors"].items():
        plain[name] = stored[name] = ("F32", tiny_weight(name, shape, record["norm_mean"]))
        if len(shape) == 2 and not KEPT.search(name):
            kinds, numbers = BLOCKS.linear(np.random.default_rng(seed_of(name)), shape, 0)
            plain[name] = ("F32", numbers)
            del stored[name]
            prefix = name.removesuffix("weight")
            stored |= {prefix + kind: tensor for kind, tensor in kinds.items()}
    quantized = {"quantization_config": BLOCKS.config}
    return (
        _write(tmp_path / "stored", case, stored, **quantized),
        _write(tmp_path / "plain", case, plain),
    )


def _logits(folder, **options):
    model = engine.load(folder, device="cpu", progress=False, **options)
    return to_numpy(model.step(TOKENS, model.new_cache(2, 32), logits="all")), model


def test_fp8_blocks_give_the_logits_of_the_twin(checkpoints):
    """Rows of latents and keys are read in their blocks, and rotated rows reordered within them."""
    stored, plain = checkpoints
    want, _ = _logits(plain)
    got, _ = _logits(stored, quantization="none")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * want.std())
    got, model = _logits(stored)
    weights = model.decoder.weights
    formats = {form.name for form in weights["layers.1.mla_in"].formats()}
    assert formats == {"fp8_block"}
    assert weights["layers.1.mla_kv_up"].format.is_dense  # multiplied head by head
    norms = np.linalg.norm(got, axis=-1) * np.linalg.norm(want, axis=-1)
    cosines = (got * want).sum(-1) / norms
    # Activations in 8 bits, which change a few choices of experts.
    assert 1e-7 < 1 - np.median(cosines) < 0.02


@pytest.mark.parametrize("case", ["kimi_linear_new_keys", "bailing_hybrid"])
def test_fp8_blocks_beside_kimi_delta_attention(tmp_path, case):
    """Parts of fused rows have blocks of their own; projections from latents are dequantized."""
    stored, plain = _write_pair(case, tmp_path)
    want, _ = _logits(plain)
    got, _ = _logits(stored, quantization="none")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * want.std())
    got, model = _logits(stored)
    weights = model.decoder.weights
    kinds = ("delta_in", "delta_out", "mla_in", "mla_out")
    quantized = [weight.formats() for name, weight in weights.items() if name.endswith(kinds)]
    assert len(quantized) == 8
    assert {form.name for formats in quantized for form in formats} == {"fp8_block"}
    norms = np.linalg.norm(got, axis=-1) * np.linalg.norm(want, axis=-1)
    # Activations in 8 bits: recurrences keep what each token rounds.
    assert 1e-7 < 1 - np.median((got * want).sum(-1) / norms) < 0.06


def test_short_prompts_are_absorbed_and_long_ones_expanded(golden, monkeypatch):
    want = golden("deepseek_v3")
    model = want.load()
    for limit, heads in ((0, 1), (0, 3), (64, 1)):
        monkeypatch.setattr(mla, "_MAX_ABSORBED", limit)
        monkeypatch.setattr(mla, "MAX_EXPANDED", heads * 28 * 20)
        cache = model.new_cache(1, 64)
        pieces = want.prompt[:9], want.prompt[9:]
        parts = [model.step([piece], cache, logits="all")[0] for piece in pieces]
        assert np.abs(np.concatenate(parts) - want.logits).max() < 1e-4 * want.logits.std()


def test_the_scale_has_yarns_temperature():
    """192^-0.5 * 1.874 for DeepSeek-V3; without scaling, or with a factor of 1, only the width."""
    sizes = MlaConfig(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
    yarn = RopeConfig(scaling="yarn", factor=40.0, mscale=1.0, mscale_all_dim=1.0)
    assert mla_scale(sizes, yarn) == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2)
    for plain in (RopeConfig(), RopeConfig(scaling="yarn", mscale_all_dim=1.0)):
        assert mla_scale(sizes, plain) == 192**-0.5


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn"},
        {"rope_type": "linear"},
        {"rope_type": "dynamic"},
        {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
)
def test_every_scaling_of_rope_scales_the_scores(scaling):
    case = json.loads((GOLDEN / "models" / "deepseek_v3.json").read_text())["config"]
    parameters = {**scaling, "factor": 40.0, "mscale_all_dim": 0.5, "rope_theta": 500.0}
    case |= {"rope_scaling": None, "rope_parameters": parameters}
    config = config_from_dict(case)
    width = config.mla.nope_dim + config.mla.rope_dim
    assert config.attn_scale == pytest.approx(width**-0.5 * (0.05 * np.log(40) + 1) ** 2)


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa", "glm5_next"])
def test_sparse_attention_is_refused_in_one_line(model_type):
    with pytest.raises(ConfigError, match=r"its sparse attention .* is not supported") as caught:
        config_from_dict({"model_type": model_type})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kv_lora_rank": 513}, "kv_lora_rank must be a whole number from 1 to 512; got 513"),
        ({"qk_rope_head_dim": 66}, "qk_rope_head_dim must be a whole number from 2 to 64; got 66"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even; got 7"),
        ({"v_head_dim": 300}, "v_head_dim must be a whole number from 1 to 192; got 300"),
        ({"q_lora_rank": None, "attention_bias": True}, "attention_bias must be false without"),
        ({"model_type": "deepseek_v2", "rope_interleave": False}, "rope_interleave must be"),
    ],
)
def test_sizes_are_checked(keys, message):
    values = {"model_type": "youtu", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
    with pytest.raises(ConfigError, match=message):
        config_from_dict(values | {"num_attention_heads": 4} | keys)
