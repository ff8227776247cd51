"""Every key of config.json known to change the result is read, or refused by name and value."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from engine.checks import shown, warn_once
from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.loading.config_keys import CONFIG_KEYS, ROPE_KEYS
from engine.loading.hf_config import config_from_dict
from engine.models.registry import FAMILIES
from tests.loading.tiny import SIZES

PUBLISHED = json.loads((Path(__file__).parent / "configs.json").read_text())
SIX = {**SIZES, "num_hidden_layers": 6, "head_dim": 16, "eos_token_id": 2, "sliding_window": 16}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
WINDOWS = {"use_sliding_window": True, "max_window_layers": 2}
SPARSE = [name for name, family in FAMILIES.items() if family.moe is not None]
EXTRA = {name: EXPERTS for name in SPARSE} | {
    "qwen2": WINDOWS,
    "qwen3": WINDOWS,
    "smollm3": {"use_sliding_window": True},
    "ministral": {"layer_types": ["sliding_attention"] * 6},
}
# Values that no family has by default, where 3 is none, and where a file must hold more with them.
VALUES = {
    "layer_types": ["full_attention"] * 5 + ["sliding_attention"],
    "is_causal": False,
    "no_rope_layers": [1, 0, 1, 1, 1, 1],
    "position_embedding_type": "nope",
    "use_rope": False,
    "mlp_only_layers": [1],
    "scoring_func": "other",
    "topk_method": "other",
    "num_experts": 16,
    "num_local_experts": 16,
    "n_routed_experts": 16,
    "activation_sparsity_pattern": [0.0, 0.95],
    "per_layer_config": {"5": {"head_dim": 32}},
    "block_configs": [{"attention": {"no_op": True}}],
}
# What transformers' modeling code reads of a family's config.json, apart from dropout, training
# and the sizes of tensors; with another value than its default.
READ_BY_TRANSFORMERS = {
    "hidden_act": "gelu",
    "rms_norm_eps": 0.5,
    "layer_norm_eps": 0.5,
    "norm_epsilon": 0.5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 1 << 18,
    "rope_theta": 77.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0},
    "partial_rotary_factor": 0.75,
    "sliding_window": 7,
    "tie_word_embeddings": None,
    "attention_bias": None,
    "mlp_bias": None,
    "qkv_bias": None,
    "use_bias": None,
    "use_qkv_bias": None,
    "norm_topk_prob": None,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [1],
    "first_k_dense_replace": 2,
    "n_shared_experts": 3,
    "n_group": 2,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "swiglu_limit": 3.0,
    "swiglu_alpha": 3.0,
    "hidden_activation": "silu",
}
OF_FAMILY = {
    "layer_norm_eps": ("stablelm", "cohere2", "phi"),
    "norm_epsilon": ("starcoder2",),
    "partial_rotary_factor": ("phi3", "glm4", "glm4_moe", "stablelm", "phi"),
    "mlp_bias": ("llama", "granite", "smollm3"),
    "qkv_bias": ("qwen2_moe",),
    "use_bias": ("starcoder2",),
    "use_qkv_bias": ("stablelm",),
    "norm_topk_prob": ("qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe"),
    "shared_expert_intermediate_size": ("qwen2_moe",),
    "decoder_sparse_step": ("qwen2_moe", "qwen3_moe"),
    "mlp_only_layers": ("qwen2_moe", "qwen3_moe"),
    "moe_intermediate_size": ("qwen2_moe", "qwen3_moe", "glm4_moe"),
    "num_experts_per_tok": SPARSE,
    "hidden_act": [name for name in FAMILIES if not name.startswith("gemma")],
    **dict.fromkeys(
        (
            *("first_k_dense_replace", "n_shared_experts", "n_group", "topk_group"),
            "routed_scaling_factor",
        ),
        ("glm4_moe",),
    ),
    **dict.fromkeys(("swiglu_limit", "swiglu_alpha"), ("gpt_oss",)),
    "hidden_activation": ("gemma2", "gemma3_text"),
    "attention_bias": (
        *("llama", "qwen3", "gemma2", "gemma3_text", "granite", "olmo2", "olmo3", "smollm3"),
        *("glm4", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "glm4_moe", "cohere2"),
    ),
    "sliding_window": (
        *("mistral", "ministral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "olmo3"),
        *("smollm3", "mixtral", "gpt_oss", "starcoder2", "cohere2"),
    ),
}


def config_of(family: str, **changes) -> ModelConfig:
    return config_from_dict({"model_type": family, **SIX, **EXTRA.get(family, {}), **changes})


def outcome(family: str, changes: dict) -> ModelConfig | str:
    """The configuration, or the message that refuses it."""
    try:
        return config_of(family, **changes)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_listed_key_changes_the_configuration_or_is_refused(family):
    plain = config_of(family)
    for key in CONFIG_KEYS:
        value = VALUES.get(key, 3)
        if key in ("use_parallel_residual", "use_parallel_block", "parallel_attn"):
            value = not plain.parallel
        elif key == "use_gated_activation":
            value = not plain.gated_mlp
        elif key in ("rope_interleave", "rope_interleaved"):
            value = not FAMILIES[family].interleaved_rope
        elif key == "norm_topk_prob" and plain.moe:
            value = not plain.moe.renormalize
        elif key in ("use_sliding_window", "sliding_window_pattern", "no_rope_layer_interval"):
            continue  # below: only with some windows and ropes
        elif key in ("use_qk_norm", "qk_layernorm") and plain.qk_norm:
            continue  # the family has these norms whatever the key says
        elif key == "norm_topk_prob":
            continue  # without experts there is nothing to divide
        got = outcome(family, {key: value})
        if isinstance(got, str):
            assert key in got and shown(value) in got, (key, got)
        else:
            assert got != plain, key


def test_windows_that_contradict_are_refused():
    for family in ("mistral", "phi3", "mixtral", "starcoder2"):
        with pytest.raises(ConfigError, match=r"use_sliding_window must be null or True .*False"):
            config_of(family, sliding_window=16, use_sliding_window=False)
        with pytest.raises(ConfigError, match=r"sliding_window_pattern must be null or 0 .*got 2"):
            config_of(family, sliding_window=16, sliding_window_pattern=2)
    assert config_of("mistral", sliding_window=None, use_sliding_window=False)
    assert config_of("smollm3", no_rope_layer_interval=2) != config_of("smollm3")
    with pytest.raises(ConfigError, match=r"no_rope_layer_interval must be null or 0 .*got 2"):
        config_of("llama", no_rope_layer_interval=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_reads_is_read(family):
    for key, value in READ_BY_TRANSFORMERS.items():
        if family not in OF_FAMILY.get(key, (family,)):
            continue
        if key == "rms_norm_eps" and FAMILIES[family].eps_key != key:
            continue
        if value is None:  # a flag: whichever value is not the default
            assert outcome(family, {key: True}) != outcome(family, {key: False}), key
        else:
            beside = {"n_group": 2} if key == "topk_group" else {}
            assert outcome(family, {**beside, key: value}) != outcome(family, beside), key


@pytest.mark.parametrize("key", ROPE_KEYS)
def test_a_listed_rope_key_is_refused(key):
    for name in ("rope_scaling", "rope_parameters"):
        for family in ("llama", "gemma3_text"):
            given = {name: {"rope_type": "dynamic", "factor": 2.0, key: 3.0}}
            with pytest.raises(ConfigError, match=rf"{key} must be null or .*got 3\.0"):
                config_of(family, **given)


def test_a_factor_needs_a_type():
    """transformers would ignore the factor, vLLM refuses it, llama.cpp takes it for linear."""
    with pytest.raises(ConfigError, match=r"rope_type must be given beside a factor; got nothing"):
        config_of("llama", rope_scaling={"factor": 4.0})
    assert config_of("llama", rope_scaling={"factor": 1.0}) == config_of("llama")


def test_an_unknown_rope_key_is_a_warning(caplog):
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "engine"):
        config_of("llama", rope_scaling={"rope_type": "linear", "factor": 2.0, "new_rule": 3})
    assert "new_rule is unknown and not read; got 3" in caplog.text


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_have_nothing_to_refuse(name, caplog):
    warn_once.cache_clear()
    for values in PUBLISHED[name].values():
        assert config_from_dict(values)
    assert not caplog.text
