"""config.json and generation_config.json: known models, old and new keys, invalid values."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checks import shown
from engine.config import ModelConfig, RopeConfig
from engine.errors import ConfigError
from engine.layers.rotary import attention_factor
from engine.loading.generation_config import generation_config
from engine.loading.hf_config import config_from_dict
from engine.loading.model_config import load_config
from tests.loading.tiny import SIZES

CONFIGS = json.loads((Path(__file__).parent / "configs.json").read_text())
NEW = [name for name in CONFIGS if "new" in CONFIGS[name]]


def known(name: str, **changes) -> ModelConfig:
    """A published config.json, or for a model_type a tiny one without anything optional."""
    values = CONFIGS[name]["old"] if name in CONFIGS else {"model_type": name, **SIZES}
    return config_from_dict({**values, **changes})


@pytest.mark.parametrize("name", NEW)
def test_old_and_new_keys_give_equal_configs(name):
    assert config_from_dict(CONFIGS[name]["new"]) == config_from_dict(CONFIGS[name]["old"])


def test_llama_3_2_1b():
    config = known("llama-3.2-1b-instruct")
    assert config == ModelConfig(
        model_type="llama",
        vocab_size=128256,
        hidden_size=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        intermediate_size=8192,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope=RopeConfig(
            theta=500000.0,
            rotary_dim=64,
            scaling="llama3",
            factor=32.0,
            original_max_position=8192,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
        layer_windows=(0,) * 16,
        tie_word_embeddings=True,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
        dtype="bfloat16",
    )


def test_qwen2_has_a_bias_and_yarn_extends_the_positions():
    config = known("qwen2.5-7b-instruct-yarn")
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (1, 0, 0, 0)
    assert config.rope.scaling == "yarn" and config.rope.original_max_position == 32768
    assert (config.rope.beta_fast, config.rope.beta_slow, config.rope.truncate) == (32, 1, True)
    assert config.max_position_embeddings == 131072
    assert config.layer_windows == (0,) * 28  # use_sliding_window is false


def test_qwen2_windows_begin_at_max_window_layers():
    assert known("qwen2-sliding").layer_windows == (0,) * 21 + (4096,) * 7


def test_layer_types_take_precedence_over_max_window_layers():
    types = ["sliding_attention", "full_attention"] * 14
    assert known("qwen2-sliding", layer_types=types).layer_windows == (4096, 0) * 14


def test_layer_types_of_mistral_and_ministral():
    """Hugging Face reads a mistral with this key as a ministral, which obeys it."""
    types = ["full_attention", "sliding_attention"] * 16
    config = {**CONFIGS["mistral-7b-v0.1"]["old"], "layer_types": types}
    assert config_from_dict(config).layer_windows == (0, 4096) * 16


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
def test_gemma_reads_another_key_of_the_activation(kind):
    assert known(kind, hidden_act="silu").activation == "gelu_tanh"
    assert known(kind, hidden_activation="gelu").activation == "gelu"


def test_gpt_oss_without_rope_keys_has_yarn():
    rope = known("gpt_oss").rope
    assert (rope.scaling, rope.factor, rope.original_max_position) == ("yarn", 32.0, 4096)
    for key in ("rope_parameters", "rope_scaling"):
        assert known("gpt_oss", **{key: None}).rope == rope
        assert known("gpt_oss", **{key: {"rope_type": "default"}}).rope.scaling == "default"


def test_qwen3_has_norms_of_q_and_k_and_an_explicit_head_dim():
    config = known("qwen3-0.6b")
    assert config.qk_norm and not config.qkv_bias and config.head_dim == 128
    assert config.qkv_dim == (16 + 2 * 8) * 128 and config.rope.rotary_dim == 128
    assert known("qwen3-0.6b", attention_bias=True).o_bias


def test_phi3_longrope():
    rope = known("phi-3.5-mini-instruct").rope
    assert (rope.scaling, rope.factor, rope.original_max_position) == ("longrope", 32.0, 4096)
    assert rope.attention_factor is None  # derived: sqrt(1 + ln 32 / ln 4096)
    assert len(rope.short_factor) == len(rope.long_factor) == 48 == rope.rotary_dim // 2


@pytest.mark.parametrize("alias", ["su", "yarn", "longrope"])
def test_phi3_old_names_of_longrope(alias):
    scaling = {**CONFIGS["phi-3.5-mini-instruct"]["old"]["rope_scaling"], "type": alias}
    assert known("phi-3.5-mini-instruct", rope_scaling=scaling) == known("phi-3.5-mini-instruct")


def test_phi4_has_partial_rope():
    config = known("phi-4-mini-instruct")
    assert (config.head_dim, config.rope.rotary_dim, len(config.rope.long_factor)) == (128, 96, 48)


def test_mistral_windows():
    assert known("mistral-7b-v0.1").layer_windows == (4096,) * 32
    assert known("mistral-nemo").layer_windows == (0,) * 40  # null is "none"
    absent = {k: v for k, v in CONFIGS["mistral-nemo"]["old"].items() if k != "sliding_window"}
    assert config_from_dict(absent).layer_windows == (4096,) * 40  # absent is the default


def test_gemma3():
    config = known("gemma-3-1b-it")
    assert config.layer_windows == ((512,) * 5 + (0,)) * 4 + (512,) * 2
    assert (config.rope.theta, config.rope_local.theta) == (1e6, 1e4)
    assert config.attn_scale == 256**-0.5 and config.embed_scale == np.float32(math.sqrt(1152))
    assert (config.norm_weight_offset, config.post_norms, config.qk_norm) == (1.0, True, True)
    assert config.activation == "gelu_tanh" and config.tie_word_embeddings
    assert config.eos_token_ids == (1, 106)


def test_gemma3_linear_scaling_applies_to_full_layers_and_max_position_includes_it():
    scaled = known("gemma-3-1b-it", rope_scaling={"factor": 8.0, "rope_type": "linear"})
    assert (scaled.rope.scaling, scaled.rope.factor) == ("linear", 8.0)
    assert scaled.rope_local.scaling == "default"
    assert scaled.max_position_embeddings == 32768
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    new = {**CONFIGS["gemma-3-1b-it"]["new"], "rope_parameters": nested}
    assert config_from_dict(new) == scaled


def test_granite_has_multipliers():
    plain = known("granite")
    assert (plain.attn_scale, plain.embed_scale, plain.branch_scale, plain.logits_scale) == (1,) * 4
    multipliers = {
        "embedding_multiplier": 12, "residual_multiplier": 0.22, "attention_multiplier": 0.015625,
        "logits_scaling": 8.0,
    }  # fmt: skip
    config = known("granite", **multipliers)
    assert (config.embed_scale, config.branch_scale) == (12.0, 0.22)
    assert (config.attn_scale, config.logits_scale) == (0.015625, 0.125)
    with pytest.raises(ConfigError, match=r"embedding_multiplier must be null or 1 .*got 12"):
        known("llama", **multipliers)
    assert known("llama", **dict.fromkeys(multipliers)) == known("llama")


def test_gemma2():
    config = known("gemma2", num_hidden_layers=5, max_position_embeddings=8192, hidden_act="silu")
    assert config.layer_windows == (4096, 0, 4096, 0, 4096)
    assert (config.attn_softcap, config.final_softcap, config.attn_scale) == (50.0, 30.0, 1 / 16)
    assert config.activation == "gelu_tanh"  # hidden_act is not read
    assert (config.norm_weight_offset, config.post_norms, config.qk_norm) == (1.0, True, False)
    assert config.embed_scale == np.float32(math.sqrt(32)) and config.rounds_embed_scale
    none = known("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (none.attn_softcap, none.final_softcap) == (0.0, 0.0)
    assert known("gemma2", query_pre_attn_scalar=144).attn_scale == 1 / 12


def test_smollm3_has_layers_without_rope():
    config = known("smollm3", num_hidden_layers=8)
    assert config.rope_layers == (True, True, True, False) * 2
    assert config.rope.theta == 2e6 and config.layer_windows == (0,) * 8
    assert [config.has_rope(layer) for layer in (2, 3)] == [True, False]
    listed = known("smollm3", no_rope_layers=[0, 1], use_sliding_window=True, sliding_window=16)
    assert (listed.rope_layers, listed.layer_windows) == ((False, True), (16, 0))
    off = known("smollm3", no_rope_layers=[0, 1], sliding_window=16)
    assert off.layer_windows == (0, 0)
    assert known("smollm3", no_rope_layers=[1, 1]).rope_layers == ()
    assert known("smollm3", num_hidden_layers=2).rope_layers == ()


def test_glm4():
    config = known("glm4")
    assert (config.qkv_bias, config.o_bias, config.post_norms) == (True, False, True)
    assert (config.head_dim, config.rope.rotary_dim, config.rms_norm_eps) == (128, 64, 1.5625e-7)
    assert known("glm4", attention_bias=False, partial_rotary_factor=0.25).rope.rotary_dim == 32


def test_starcoder2_and_stablelm_have_layer_norms():
    star = known("starcoder2", norm_epsilon=1e-4)
    assert (star.layer_norm, star.norm_bias, star.gated_mlp, star.rms_norm_eps) == (1, 1, 0, 1e-4)
    assert (star.qkv_bias, star.o_bias, star.mlp_bias, star.tie_word_embeddings) == (1, 1, 1, 1)
    assert (star.activation, star.layer_windows) == ("gelu_tanh", (0, 0))
    plain = known("starcoder2", use_bias=False, sliding_window=16)
    assert (plain.qkv_bias, plain.norm_bias, plain.layer_windows) == (False, True, (16, 16))
    stable = known("stablelm")
    assert (stable.layer_norm, stable.norm_bias, stable.parallel, stable.gated_mlp) == (1, 1, 0, 1)
    assert (stable.qkv_bias, stable.o_bias, stable.rope.rotary_dim) == (False, False, 2)
    assert known("stablelm", use_qkv_bias=True, use_parallel_residual=True).parallel


def test_gpt_neox_has_keys_of_its_own():
    config = known("gpt_neox", rotary_pct=0.5, rotary_emb_base=77, use_parallel_residual=False)
    assert (config.rope.theta, config.rope.rotary_dim) == (77.0, config.head_dim // 2)
    assert not config.parallel and not config.parallel_norms and config.qkv_bias
    assert known("gpt_neox").parallel and known("gpt_neox").parallel_norms
    with pytest.raises(ConfigError, match=r"rotary_pct must be a number from 0 to 1; got 2"):
        known("gpt_neox", rotary_pct=2)


def test_hunyuan_raises_the_base_of_rope_by_alpha():
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 2.0, "mscale": 1.0}
    config = known("hunyuan_v1_dense", head_dim=128, rope_scaling=scaling)
    assert config.rope.scaling == "default" and config.qk_norm_after_rope
    assert config.rope.theta == pytest.approx(1e4 * 1000 ** (128 / 126))
    assert config.max_position_embeddings == known("hunyuan_v1_dense").max_position_embeddings
    plain = known("hunyuan_v1_dense", rope_scaling={"type": "dynamic", "factor": 2.0})
    assert (plain.rope.scaling, plain.rope.factor) == ("dynamic", 2.0)
    yarn = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}
    config = known("hunyuan_v1_dense", rope_scaling=yarn, rms_norm_eps=1e-3)
    assert config.rope.attention_factor == 1.0
    assert config.qk_norm_eps == pytest.approx(1e-3 / (0.1 * math.log(2) + 1) ** 2)


def test_norms_of_llama_4_undo_the_factor_of_rope():
    """They are computed before the rotation; the model has them after it."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 2.0}
    sizes = {"num_hidden_layers": 4, "max_position_embeddings": 16384, "rms_norm_eps": 1e-3}
    config = known("llama4_text", **sizes, rope_scaling=yarn)
    assert (config.rope.attention_factor, config.qk_norm_eps) == (1.0, 2.5e-4)
    bare = known("llama4_text", **sizes, rope_scaling=yarn, use_qk_norm=False)
    assert (bare.rope.attention_factor, bare.qk_norm_eps) == (2.0, 0.0)


def test_hunyuan_lists_what_is_the_same_in_all_layers():
    lists = {"num_experts": [8, 8], "moe_topk": [2, 2], "num_shared_expert": [1, 1]}
    idle = {"n_group": False, "topk_group": False, "routed_scaling_factor": False}
    moe = known("hunyuan_v1_moe", **lists, **idle, use_qk_norm=True, norm_topk_prob=True).moe
    assert (moe.num_experts, moe.top_k, moe.layer_top_k) == (8, 2, ())
    assert moe == known("hunyuan_v1_moe", num_experts=8, moe_topk=2).moe
    moe = known("hunyuan_v1_moe", num_experts=8, moe_topk=[2, 4]).moe
    assert (moe.top_k, moe.layer_top_k) == (4, (2, 4))
    with pytest.raises(
        ConfigError, match=r"num_experts must be the same in all layers; got \[8, 4"
    ):
        known("hunyuan_v1_moe", num_experts=[8, 4])
    with pytest.raises(ConfigError, match=r"moe_topk must be 2 whole numbers from 1 to 8, or one"):
        known("hunyuan_v1_moe", num_experts=8, moe_topk=[2])


def test_afmoe_has_keys_of_its_own():
    keys = {"num_dense_layers": 1, "num_shared_experts": 3, "route_scale": 2.8, "n_group": 1}
    config = known("afmoe", **keys, global_attn_every_n_layers=2, mup_enabled=True)
    assert config.moe.sparse_layers == (False, True) and config.moe.shared_size == 3 * 1408
    assert config.moe.scale == 2.8 and config.layer_windows[1] == 0 < config.layer_windows[0]
    assert config.embed_scale == np.float32(math.sqrt(32)) and not config.rounds_embed_scale
    assert config.attn_gate == "sigmoid" and known("afmoe").embed_scale == 1.0
    with pytest.raises(ConfigError, match=r"route_scale must be a number from .*; got '2'"):
        known("afmoe", route_scale="2")


def test_cohere2_moe():
    dense = {"num_hidden_layers": 6, "first_k_dense_replace": 2, "sliding_window_pattern": 2}
    config = known("cohere2_moe", **dense, sliding_window=16, prefix_dense_intermediate_size=40)
    assert [window > 0 for window in config.layer_windows] == [0, 0, 1, 0, 1, 0]
    assert config.rope_layers == (True, True, True, False, True, False)
    assert config.layer_norm and config.intermediate_size == 40 != config.moe.intermediate_size
    other = known("cohere2_moe", **dense, prefix_dense_sliding_window_pattern=2, rms_norm_eps=1e-4)
    assert [window > 0 for window in other.layer_windows] == [1, 0, 1, 0, 1, 0]
    assert other.rope_layers == (True, False) * 3 and not other.layer_norm
    assert other.rms_norm_eps == 1e-4
    shared = known("cohere2_moe", num_shared_experts=2)
    assert (shared.moe.scale, shared.moe.shared_scale) == (0.5, 0.5)
    for key in ("shared_expert_combination_strategy", "expert_selection_fn"):
        with pytest.raises(ConfigError, match=f"{key} must be .*; got 'max'"):
            known("cohere2_moe", num_shared_experts=2, **{key: "max"})


def test_apertus_without_a_scaling_has_its_own():
    for keys in ({}, {"rope_theta": 500.0}, {"rope_theta": 500.0, "rope_scaling": None}):
        rope = known("apertus", **keys).rope
        assert (rope.theta, rope.scaling, rope.factor) == (12e6, "llama3", 8.0)
    old = {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    rope = known("apertus", **old).rope
    assert (rope.theta, rope.scaling, rope.factor) == (500.0, "linear", 2.0)
    assert known("apertus", rope_parameters={"rope_type": "default"}).rope.theta == 12e6


def test_xielu_needs_an_mlp_without_a_gate():
    assert known("arcee").activation == known("bitnet").activation == "relu2"
    with pytest.raises(ConfigError, match=r"hidden_act must be one of silu, .*; got 'xielu'"):
        known("granite", hidden_act="xielu")


def test_cohere2_has_rope_only_with_a_window():
    config = known("cohere2", num_hidden_layers=5, sliding_window=16)
    assert config.layer_windows == (16, 16, 16, 0, 16)
    assert config.rope_layers == (True, True, True, False, True)
    assert (config.parallel, config.layer_norm, config.norm_bias) == (True, True, False)
    assert (config.logits_scale, config.tie_word_embeddings) == (0.0625, True)
    # A window longer than the model still says which layers have rope.
    assert known("cohere2", num_hidden_layers=4).rope_layers == (True, True, True, False)


@pytest.mark.parametrize("kind", ["exaone4", "exaone_moe"])
def test_exaone_has_rope_only_with_a_window_if_any_layer_may_have_one(kind):
    sizes = {"num_hidden_layers": 4, "sliding_window": 16}
    for pattern in (4, "LLLG"):
        config = known(kind, **sizes, sliding_window_pattern=pattern)
        assert config.layer_windows == (16, 16, 16, 0)
        assert config.rope_layers == (True, True, True, False)
    assert known(kind, **sizes, sliding_window_pattern="GL").layer_windows == (0, 16, 0, 16)
    full = ["full_attention"] * 4
    assert known(kind, **sizes, layer_types=full).rope_layers == (False,) * 4
    for changes in ({}, {"layer_types": full}, {"sliding_window_pattern": "LLLG"}):
        config = known(kind, num_hidden_layers=4, sliding_window=None, **changes)
        assert (config.layer_windows, config.rope_layers) == ((0,) * 4, ())
    for pattern in ("LXG", "llg", "LL ", "X"):
        wrong = rf"sliding_window_pattern must be .* of L .*got '{pattern}'"
        with pytest.raises(ConfigError, match=wrong):
            known(kind, **sizes, sliding_window_pattern=pattern)


@pytest.mark.parametrize("place", ["full_attention", "sliding_attention"])
def test_longrope_where_layers_differ_in_their_rope_is_refused(place):
    """A batch has one length for all its layers' tables: no layer may keep the short factors."""
    ropes = {one: {"rope_theta": 500.0} for one in ("full_attention", "sliding_attention")}
    ropes[place] |= {**LONGROPE, "original_max_position_embeddings": 16}
    for kind in ("gemma3_text", "olmo3", "mellum"):
        with pytest.raises(ConfigError, match=r"rope_parameters must be not longrope.*got \{"):
            known(kind, head_dim=8, num_experts=4, num_experts_per_tok=2, rope_parameters=ropes)


def test_gemma_4_lists_layers_by_numbers_that_may_be_padded():
    """transformers writes all with as many digits as the largest."""
    sizes = {"num_hidden_layers": 12, "head_dim": 8, "num_key_value_heads": 2}
    sizes |= {"hidden_size_per_layer_input": 0}
    wide = {"head_dim": 16, "num_key_value_heads": 1}
    config = known("gemma4_text", **sizes, per_layer_config={"05": wide, "11": wide})
    assert [(one.head_dim, one.num_kv_heads) for one in config.layer_sizes] == [
        (16, 1) if layer in (5, 11) else (8, 2) for layer in range(12)
    ]
    for numbers in (("5", "11"), (5, 11)):
        assert config == known(
            "gemma4_text", **sizes, per_layer_config=dict.fromkeys(numbers, wide)
        )
    for numbers in (("12",), ("-1",), ("x",), ("",), ("5", "05")):
        with pytest.raises(ConfigError, match=r"per_layer_config must be an object per layer.*got"):
            known("gemma4_text", **sizes, per_layer_config=dict.fromkeys(numbers, wide))


@pytest.mark.parametrize("kind", ["gemma3n_text", "gemma4_text"])
def test_per_layer_inputs_have_no_relu(kind):
    """It was an error of the first step."""
    keys = {"head_dim": 8, "num_key_value_heads": 2, "num_kv_shared_layers": 0}
    keys |= {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 64}
    for name in ("silu", "gelu"):
        assert known(kind, **keys, hidden_activation=name).activation == name
    with pytest.raises(ConfigError, match=r"hidden_activation must be silu or .*got 'relu2'"):
        known(kind, **keys, hidden_activation="relu2")


@pytest.mark.parametrize(
    ("kind", "theta"), [("cohere", 5e5), ("exaone", 5e5), ("sarvam_moe", 8e6), ("internlm3", 1e4)]
)
def test_bases_of_rope_that_files_may_leave_out(kind, theta):
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 8}
    assert known(kind, **sizes).rope.theta == theta


# Of transformers 5.24, where it differs from the number of query heads.
KV_HEADS = {
    **dict.fromkeys(("dots1", "exaone4", "exaone_moe", "mimo", "qwen2", "qwen3", "stablelm"), 32),
    **dict.fromkeys(("gemma", "qwen2_moe"), 16),
    **dict.fromkeys(("glm4_moe", "gpt_oss", "ministral", "mistral", "mixtral"), 8),
    **dict.fromkeys(("qwen3_5_text", "qwen3_moe"), 4),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), 2),
}


@pytest.mark.parametrize("kind", ["qwen3", "internlm3", "iquestcoder"])
def test_head_dims_that_files_may_leave_out(kind):
    config = {"model_type": kind, **SIZES}
    assert config_from_dict(config).head_dim == 128
    assert config_from_dict({**config, "head_dim": None}).head_dim == 8


@pytest.mark.parametrize("kind", KV_HEADS)
def test_numbers_of_key_value_heads_that_files_may_leave_out(kind):
    values = {"model_type": kind, **SIZES, "num_attention_heads": 64, "hidden_size": 512}
    del values["num_key_value_heads"]
    assert config_from_dict(values).num_kv_heads == KV_HEADS[kind]
    assert config_from_dict({**values, "num_key_value_heads": None}).num_kv_heads == 64


# Of transformers 5.24: (BOS, EOS, padding) of types whose files may have none.
TOKEN_IDS = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), (0, 1, None)),
    **dict.fromkeys(("deepseek_v2", "longcat_flash", "minicpm3", "phimoe"), (1, 2, None)),
    **dict.fromkeys(("olmo2", "olmo3", "olmoe"), (None, 50279, 1)),
    "mistral4": (1, 2, 11),
    "nemotron_h": (1, 2, 0),
    "phi3": (1, 32000, 32000),
    "smollm3": (128000, 128001, 128004),
    "stablelm": (0, 0, None),
    "starcoder2": (50256, 50256, None),
    "youtu": (128000, 128001, None),
}


@pytest.mark.parametrize("kind", TOKEN_IDS)
def test_token_ids_that_files_may_leave_out(kind):
    sizes = {**SIZES, "vocab_size": 1 << 18, "num_key_value_heads": 4, "n_routed_experts": 8}
    sizes |= {"num_experts": 8, "n_group": 1, "topk_group": 1, "hybrid_override_pattern": "M*"}
    config = config_from_dict({"model_type": kind, **sizes})
    bos, eos, pad = TOKEN_IDS[kind]
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (bos, (eos,), pad)


def test_minimax_m2_counts_the_rotated_features():
    sizes = {"num_key_value_heads": 2, "head_dim": 16}
    assert known("minimax_m2", **sizes, rotary_dim=8).rope.rotary_dim == 8
    assert known("minimax_m2", **sizes).rope.rotary_dim == 16
    assert known("minimax_m2", **sizes, partial_rotary_factor=0.25).rope.rotary_dim == 4
    with pytest.raises(ConfigError, match=r"rotary_dim must be null or 4 .*got 8"):
        known("minimax_m2", **sizes, rotary_dim=8, partial_rotary_factor=0.25)
    for wrong in (7, 18, 0, "8"):
        with pytest.raises(ConfigError, match=rf"rotary_dim must be .*got {shown(wrong)}"):
            known("minimax_m2", **sizes, rotary_dim=wrong)


def test_ministral3_scales_queries_by_their_position():
    sizes = {"num_key_value_heads": 2, "max_position_embeddings": 262144}
    rope = known("ministral3", **sizes).rope
    assert (rope.scaling, rope.factor, rope.theta) == ("yarn", 16.0, 1e6)
    assert (rope.q_scale_beta, rope.q_scale_length) == (0.1, 16384)
    assert attention_factor(rope) == 1.0
    given = {"rope_type": "default", "rope_theta": 5e4, "llama_4_scaling_beta": 0.3}
    rope = known("ministral3", **sizes, rope_parameters=given).rope
    assert (rope.q_scale_beta, rope.q_scale_length) == (0.3, 262144)
    with pytest.raises(ConfigError, match=r"llama_4_scaling_beta must be null or 0 .*got 0\.3"):
        known("mistral", rope_parameters=given)


def test_gemma_means_the_tanh_form_by_gelu():
    sizes = {"head_dim": 8}
    for changes in ({"hidden_act": "gelu"}, {"hidden_act": "gelu_pytorch_tanh"}, {}):
        assert known("gemma", **sizes, **changes).activation == "gelu_tanh"
    assert known("gemma2", **sizes, hidden_activation="gelu").activation == "gelu"


def test_hyperclovax_multiplies_the_logits_and_may_norm_the_outputs():
    config = known("hyperclovax", logits_scaling=0.125, residual_multiplier=0.5)
    assert (config.logits_scale, config.branch_scale, config.post_norms) == (0.125, 0.5, True)
    assert not known("hyperclovax", use_post_norm=False).post_norms


def test_dots1_has_windows_from_a_layer_on():
    sizes = {"num_hidden_layers": 4, "sliding_window": 16, "max_window_layers": 3}
    assert known("dots1", **sizes).layer_windows == (0, 0, 0, 16)
    assert known("dots1", **sizes | {"sliding_window": None}).layer_windows == (0,) * 4


def test_phi_has_every_bias():
    config = known("phi", vocab_size=51200, partial_rotary_factor=0.5)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.lm_head_bias) == (1, 1, 1, 1)
    assert (config.parallel, config.gated_mlp, config.activation) == (True, False, "gelu_tanh")
    assert config.rope.rotary_dim == 4


def test_olmo2_norms_outputs_and_whole_rows():
    config = known("olmo2")
    assert (config.pre_norms, config.post_norms, config.whole_qk_norm) == (False, True, True)
    assert config.rms_norm_eps == 1e-5 and config.rope.theta == 1e4


def test_olmo3_scales_the_rope_of_layers_with_full_attention_only():
    assert known("olmo3", num_hidden_layers=6).layer_windows == (4096,) * 3 + (0,) + (4096,) * 2
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    nested = {
        "full_attention": {**scaling, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    }
    config = known("olmo3", rope_theta=5e5, rope_scaling=scaling)
    assert (config.rope.scaling, config.rope.factor, config.rope.theta) == ("yarn", 8.0, 5e5)
    assert config.rope_local == RopeConfig(theta=5e5, rotary_dim=8)
    assert known("olmo3", rope_parameters=nested) == config
    # As in transformers, a training length beside ropes of kinds of layers is not theirs.
    outside = {"original_max_position_embeddings": 32}
    assert known("olmo3", rope_parameters=nested, **outside) == config
    assert known("olmo3", rope_theta=5e5, rope_scaling=scaling, **outside) == config
    assert known("qwen3-0.6b", rope_scaling=scaling, **outside).rope.original_max_position == 32
    flat = {**scaling, "rope_theta": 1e6}
    assert known("olmo3", rope_parameters=flat).rope_local.theta == 1e6
    assert known("olmo3", rope_parameters=flat).rope.scaling == "yarn"


def test_linear_and_dynamic_scaling_extend_the_positions():
    assert known("vicuna-7b-16k").max_position_embeddings == 16384
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    dynamic = known("vicuna-7b-16k", rope_scaling=scaling)
    assert dynamic.max_position_embeddings == 8192
    assert dynamic.rope.original_max_position == 4096


def test_yarn_options_are_read():
    scaling = {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
        "attention_factor": 0.9,
        "mscale": 0.7,
        "mscale_all_dim": 0.8,
    }
    rope = known("qwen3-0.6b", rope_scaling=scaling).rope
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (16, 2, False)
    assert (rope.attention_factor, rope.mscale, rope.mscale_all_dim) == (0.9, 0.7, 0.8)


def test_a_window_as_long_as_the_model_is_ignored():
    assert known("mistral-7b-v0.1", sliding_window=32768).layer_windows == (0,) * 32
    # ... unless it also determines which layers have a local rope.
    assert known("gemma-3-1b-it", sliding_window=10**6).layer_windows[:6] == (10**6,) * 5 + (0,)


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": None, "dtype": "float32"}, "float32"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"torch_dtype": None}, "float32"),
    ],
)
def test_dtype(keys, name):
    assert known("smollm2-135m-instruct", **keys).dtype == name


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"])
def test_activations(act):
    wanted = {"silu": "silu", "gelu": "gelu"}.get(act, "gelu_tanh")
    assert known("smollm2-135m-instruct", hidden_act=act).activation == wanted


HUGE = 10**400
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
BAD = {
    "num_attention_heads": [0, -1, 9.5, "9", True, HUGE, None, 7, float("nan")],
    "num_key_value_heads": [0, 2, 18, 10**9, -3, 3.5, [3]],
    "num_hidden_layers": [0, 10**9, 30.5, None, "30", float("inf")],
    "hidden_size": [0, 577, -576, 576.5, HUGE, None],
    "head_dim": [0, 1, 63, 10**6, 64.5, -64],
    "vocab_size": [0, -1, 2**31, 49152.5, None],
    "intermediate_size": [0, 2**40, None, {}],
    "max_position_embeddings": [0, 10**9, 8192.5, -1, None],
    "rms_norm_eps": [0, -1e-5, float("nan"), float("inf"), "1e-5", True, HUGE],
    "rope_theta": [0, -1, 1, float("nan"), float("inf"), "x", HUGE],
    "rope_scaling": [
        3, "linear", [1],
        {"type": "linear"}, {"type": "linear", "factor": 0}, {"type": "linear", "factor": -2.0},
        {"type": "linear", "factor": float("nan")}, {"type": "dynamic", "factor": float("inf")},
        {"type": "dynamic", "factor": "2"}, {"type": "linear", "factor": 10**30},
        {"type": "mrope", "factor": 2}, {"type": 5}, {"rope_type": "proportional"},
        {"type": "llama3", "factor": 8.0},
        {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 3.0},
        {"type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 2},
        {"type": "yarn", "factor": 4, "truncate": 1},
        {"type": "yarn", "factor": 4, "original_max_position_embeddings": 0},
        {"type": "longrope"}, {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
        {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [0.0] * 32},
        {"type": "longrope", "short_factor": ["a"] * 32, "long_factor": [1.0] * 32},
    ],
    "rope_parameters": [3, {"full_attention": 3}, {"rope_type": "linear", "factor": float("nan")}],
    "partial_rotary_factor": [0, -1, 2, 0.01, 0.05, float("nan"), "half"],
    "tie_word_embeddings": [1, "true", []],
    "attention_bias": [0, "no"],
    "mlp_bias": [1.0],
    "hidden_act": ["relu", "quick_gelu", 3, ["silu"]],
    "eos_token_id": [2.5, ["2"], [None], True, {}],
    "bos_token_id": ["1", [1.5]],
    "torch_dtype": ["float64", "float8_e4m3fn", 32],
    "quantization_config": [{"quant_method": "gptq"}, {"quant_method": "bitsandbytes"}, []],
    "model_type": [None, "gpt3", 3, ["llama"], "LLAMA", "gemma9"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in BAD.items() for value in values]
)
def test_an_invalid_value_is_refused_by_name(key, value):
    values = {**CONFIGS["smollm2-135m-instruct"]["old"], key: value}
    with pytest.raises(ConfigError) as error:
        config_from_dict(values, "dir/config.json")
    message = str(error.value)
    assert message.startswith("dir/config.json: ") and len(message) < 1500
    named = {
        "rope_scaling": "rope|factor|beta|truncate|type|original",
        "rope_parameters": "rope|factor",
    }.get(key, key if key != "num_attention_heads" else "num_attention_heads|hidden_size|kv|value")
    assert any(word in message for word in named.split("|")), message


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma-3-1b-it", {"sliding_window": None}),
        ("gemma-3-1b-it", {"sliding_window_pattern": 0}),
        ("gemma-3-1b-it", {"query_pre_attn_scalar": 0}),
        ("gemma-3-1b-it", {"query_pre_attn_scalar": float("nan")}),
        ("gemma-3-1b-it", {"use_bidirectional_attention": True}),
        ("gemma-3-1b-it", {"layer_types": ["full_attention"]}),
        ("gemma-3-1b-it", {"layer_types": ["chunked_attention"] * 26}),
        ("gemma-3-1b-it", {"rope_local_base_freq": -1}),
        ("mistral-7b-v0.1", {"sliding_window": 0}),
        ("mistral-7b-v0.1", {"sliding_window": -4096}),
        ("qwen2-sliding", {"max_window_layers": -1}),
        ("qwen2-sliding", {"use_sliding_window": "true"}),
        ("qwen2-sliding", {"sliding_window": None, "layer_types": ["sliding_attention"] * 28}),
        ("phi-3.5-mini-instruct", {"original_max_position_embeddings": 0}),
        *(
            ("granite", {key: value})
            for key in ("embedding_multiplier", "residual_multiplier", "logits_scaling")
            for value in (0, -1.0, "1", True, float("nan"), float("inf"), HUGE)
        ),
        ("granite", {"attention_multiplier": -0.5}),
        ("gemma2", {"attn_logit_softcapping": -1.0}),
        ("gemma2", {"final_logit_softcapping": "30"}),
        ("gemma2", {"query_pre_attn_scalar": 0}),
        ("gemma2", {"hidden_activation": "relu"}),
        ("gemma2", {"sliding_window": None}),
        *(
            ("smollm3", {"no_rope_layers": value})
            for value in ([1], [1, 2], [True, False], [1.0, 0.0], "10", {"0": 1}, 1, [[], []])
        ),
        ("smollm3", {"no_rope_layer_interval": 0}),
        ("smollm3", {"no_rope_layer_interval": 2.5}),
        ("gemma-3-1b-it", {"head_dim": 514}),
        ("glm4", {"partial_rotary_factor": 0}),
        ("glm4", {"partial_rotary_factor": 1.5}),
        ("glm4", {"attention_bias": 1}),
        ("starcoder2", {"use_bias": "yes"}),
        ("starcoder2", {"norm_epsilon": 0}),
        ("starcoder2", {"hidden_act": "relu6"}),
        ("stablelm", {"layer_norm_eps": -1e-5}),
        ("stablelm", {"use_parallel_residual": 1}),
        ("stablelm", {"use_qkv_bias": 0}),
        ("falcon", {"alibi": True}),
        ("falcon", {"new_decoder_architecture": "yes"}),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}),
        ("falcon", {"num_ln_in_parallel_attn": 2}),
        ("falcon", {"num_ln_in_parallel_attn": 3}),
        ("gpt2", {"scale_attn_weights": 1}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": "yes"}),
        ("gpt2", {"add_cross_attention": True}),
        ("gpt_bigcode", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt_bigcode", {"multi_query": 1}),
        ("opt", {"do_layer_norm_before": False}),
        ("opt", {"word_embed_proj_dim": 16}),
        ("opt", {"layer_norm_elementwise_affine": False}),
        ("opt", {"_remove_final_layer_norm": True}),
        ("gpt_neo", {"attention_types": [[["global", "local"], 3]]}),
        ("gpt_neo", {"attention_types": [[["global", "other"], 1]]}),
        ("gpt_neo", {"attention_types": [["global", 2]]}),
        ("gpt_neo", {"attention_layers": ["global"] * 3}),
        ("stablelm", {"qk_layernorm": 1}),
        ("cohere", {"use_qk_norm": "yes"}),
        ("cohere2", {"logit_scale": 0}),
        ("cohere2", {"logit_scale": "1"}),
        ("cohere2", {"sliding_window": None}),
        ("cohere2", {"layer_types": ["full_attention"]}),
        ("phi", {"qk_layernorm": 1}),
        ("phi", {"layer_norm_eps": None}),
        ("phi", {"partial_rotary_factor": 0.1}),
        *(
            (kind, {"num_hidden_layers": 4, "rope_scaling": LONGROPE})
            for kind in ("smollm3", "olmo3", "cohere2")
        ),
        ("olmo3", {"sliding_window": None}),
        ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": -1.0}}),
        ("mellum", {"num_hidden_layers": 2, "layer_types": ["sliding_attention"]}),
        ("solar_open", {"partial_rotary_factor": 0.5}),
        ("olmo3", {"sliding_window_pattern": 0}),
        ("olmo3", {"rope_parameters": {"sliding_attention": {"rope_type": "odd"}}}),
        ("granite", {"attention_multiplier": [1.0]}),
        ("llama", {"final_logit_softcapping": 30.0}),
        ("mistral", {"query_pre_attn_scalar": 64}),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}),
        *(
            (
                kind,
                {"sliding_window": 4, "num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
            )
            for kind in ("qwen2", "qwen2_moe", "smollm3")
        ),
        *((kind, {"partial_rotary_factor": 0.5}) for kind in ("llama", "smollm3", "qwen3_moe")),
        ("mixtral", {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    ],
)
def test_invalid_values_of_families_are_refused(name, changes):
    with pytest.raises(ConfigError, match=list(changes)[-1].strip("_").split("_")[0]):
        known(name, **changes)


def test_heads_wider_than_the_kernels_are_refused():
    """Those of a width that the file implies, too."""
    sizes = {"hidden_size": 2056, "num_attention_heads": 4, "num_key_value_heads": 4}
    with pytest.raises(ConfigError, match=r"head_dim must be even and from 2 to 512 \(it is 514\)"):
        known("llama", **sizes)


def test_an_unknown_model_type_is_answered_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"docs/models\.md; got 'gpt3'; did you mean 'gpt2'\?$"):
        config_from_dict({"model_type": "gpt3"})


@pytest.mark.parametrize(
    "key", ["hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "model_type"]
)
def test_a_missing_key_is_named(key):
    values = {k: v for k, v in CONFIGS["smollm2-135m-instruct"]["old"].items() if k != key}
    with pytest.raises(ConfigError, match=f"{key} must be .*; got (nothing|None)"):
        config_from_dict(values)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-4, 300),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["linear", "dynamic", "yarn", "llama3", "longrope", "default", HUGE, 10**9]),
    st.lists(st.integers(0, 5), max_size=4),
    st.dictionaries(
        st.sampled_from(["type", "rope_type", "factor", "rope_theta", "full_attention"]),
        st.one_of(st.floats(), st.sampled_from(["yarn", "linear", {}, {"type": "dynamic"}])),
        max_size=3,
    ),
)


@st.composite
def mutated_configs(draw):
    """A real config.json with one to three values replaced, removed or added, at any depth."""
    values = copy.deepcopy(draw(st.sampled_from([c for e in CONFIGS.values() for c in e.values()])))
    for _ in range(draw(st.integers(1, 3))):
        target = values
        inner = [v for v in values.values() if isinstance(v, dict) and v]
        if inner and draw(st.booleans()):
            target = draw(st.sampled_from(inner))
        extra = ["rope_scaling", "rope_parameters", "layer_types", "head_dim", "sliding_window"]
        key = draw(st.sampled_from([*target, *extra]))
        if draw(st.integers(0, 5)):
            target[key] = draw(ODD)
        else:
            target.pop(key, None)
    return values


@settings(max_examples=1500, deadline=5000)
@given(mutated_configs())
def test_a_mutated_config_is_an_error_or_a_valid_config(values):
    try:
        config = config_from_dict(values)
    except ConfigError:
        return
    assert config.num_heads % config.num_kv_heads == 0 and config.head_dim % 2 == 0
    assert 1 <= config.num_layers == len(config.layer_windows) <= 1024
    assert 1 <= config.max_position_embeddings <= 1 << 24
    for rope in filter(None, (config.rope, config.rope_local)):
        assert 2 <= rope.rotary_dim <= config.head_dim and rope.rotary_dim % 2 == 0
        assert rope.factor >= 1 and rope.theta > 1
        if rope.scaling == "longrope":
            assert len(rope.short_factor) == len(rope.long_factor) == rope.rotary_dim // 2
    assert all(math.isfinite(v) for v in asdict(config).values() if isinstance(v, float))


def write(path: Path, name: str, content) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (path / name).write_text(text)
    return path


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_a_damaged_file_is_refused(tmp_path, text):
    write(tmp_path, "config.json", text)
    with pytest.raises(ConfigError, match=r"config\.json: "):
        load_config(tmp_path)


def test_a_missing_or_binary_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_config(tmp_path)


def test_nan_in_the_file_is_refused(tmp_path):
    text = json.dumps(CONFIGS["vicuna-7b-16k"]["old"]).replace("4.0", "NaN")
    with pytest.raises(ConfigError, match="factor must be a number from 1 to 10000; got nan"):
        load_config(write(tmp_path, "config.json", text))


def test_eos_ids_of_generation_config_take_precedence(make_model):
    path, _, _ = make_model("llama")
    assert load_config(path).eos_token_ids == (2,)
    write(path, "generation_config.json", {"eos_token_id": [3, 2, 3], "temperature": 0.6})
    assert load_config(path).eos_token_ids == (3, 2)
    assert generation_config(path) == {"eos_token_id": [3, 2], "temperature": 0.6}


def test_generation_config_has_only_what_the_file_has(tmp_path):
    assert generation_config(tmp_path) == {}
    stated = {
        "do_sample": False, "temperature": 0, "top_k": 20, "top_p": 0.95, "min_p": 0.05,
        "repetition_penalty": 1.1, "max_new_tokens": 7, "eos_token_id": 5,
    }  # fmt: skip
    more = {"transformers_version": "5", "top_h": 3, "bos_token_id": None}
    write(tmp_path, "generation_config.json", {**stated, **more})
    assert generation_config(tmp_path) == {**stated, "eos_token_id": [5]}


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", -1), ("temperature", "hot"), ("top_p", 1.5), ("top_k", 2.5), ("min_p", -0.1),
     ("repetition_penalty", 0), ("max_new_tokens", 0), ("do_sample", 1), ("eos_token_id", "2"),
     ("temperature", float("nan"))],
)  # fmt: skip
def test_invalid_values_in_generation_config_are_refused(tmp_path, key, value):
    write(tmp_path, "generation_config.json", {key: value})
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {key} must be"):
        generation_config(tmp_path)
