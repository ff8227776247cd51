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
GROUPED = {"num_experts": 32, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
WINDOWS = {"use_sliding_window": True, "max_window_layers": 2}
SPARSE = [name for name, family in FAMILIES.items() if family.moe is not None]
EXTRA = {name: EXPERTS for name in SPARSE} | {
    "qwen2": WINDOWS,
    "qwen3": WINDOWS,
    "smollm3": {"use_sliding_window": True},
    "llama4_text": {"num_experts": 8, "max_position_embeddings": 16384},
    "mimo_v2_flash": {**EXPERTS, "v_head_dim": 8, "partial_rotary_factor": 0.5},
    "cohere2_moe": {**EXPERTS, "expert_selection_fn": "sigmoid"},
    "ministral": {"layer_types": ["sliding_attention"] * 6},
    "deepseek_v3": GROUPED,
    "kimi_k2": GROUPED,
    "bailing_hybrid": GROUPED,
    "bailing_moe_v2_5": GROUPED | {"qk_rope_head_dim": 8},
    "bailing_moe_linear": GROUPED,
}
EXTRA |= {
    "granitemoehybrid": {"mamba_n_heads": 4, "num_local_experts": 8},
    "bamba": {"mamba_n_heads": 4},
    "lfm3": {"layer_types": ["conv", "sliding_attention", "full_attention"] * 2},
    "nemotron_h": {"num_experts": 32, "hybrid_override_pattern": "ME*M-E"},
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
    "activation_sparsity_pattern": [0.0, 0.95],
    "per_layer_config": {"5": {"head_dim": 32}},
    "block_configs": [{"attention": {"no_op": True}}],
}
# Keys that change the logits of a tiny model in transformers, measured by make_config_keys.py.
MEASURED = json.loads((Path(__file__).parents[1] / "golden/config_keys.json").read_text())


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
        if key in FAMILIES[family].idle_keys:
            continue
        value = VALUES.get(key, 3)
        if key in ("use_parallel_residual", "use_parallel_block", "parallel_attn"):
            value = not plain.parallel
        elif key == "attn_temperature_tuning":
            value = not plain.no_rope.q_scale_beta
        elif key == "use_gated_activation":
            value = not plain.gated_mlp
        elif key in ("rope_interleave", "rope_interleaved"):
            value = not FAMILIES[family].interleaved_rope
        elif key == "position_embedding_type" and family == "granitemoehybrid":
            value = "rope"  # by default, no layer has rope
        elif key == "norm_topk_prob" and plain.moe:
            value = not plain.moe.renormalize
        elif key in ("use_sliding_window", "sliding_window_pattern", "no_rope_layer_interval"):
            continue  # below: only with some windows and ropes
        elif key in ("use_qk_norm", "qk_layernorm") and plain.qk_norm:
            continue  # the family has these norms whatever the key says
        elif key == "num_global_key_value_heads" and "gemma4" in family:
            continue  # read with attention_k_eq_v only
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


@pytest.mark.parametrize("family", MEASURED)
def test_what_changes_the_logits_in_transformers_is_read_or_refused(family):
    values = {"model_type": family, **MEASURED[family]["config"]}
    plain = config_from_dict(values)
    assert len(MEASURED[family]["changed"]) >= 3
    for key, value in MEASURED[family]["changed"].items():
        try:
            assert config_from_dict({**values, key: value}) != plain, key
        except ConfigError as error:
            assert f"{key} must be" in str(error) and shown(value) in str(error)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("gemma3n_text", "query_pre_attn_scalar", 256),
        ("dots1", "scoring_func", "noaux_tc"),
        ("ernie4_5_moe", "moe_norm_min", 1e-12),
    ],
)
def test_values_in_published_files_that_say_nothing(family, key, value):
    assert config_of(family, **{key: value}) == config_of(family)


def test_a_smallest_sum_of_weights_is_refused():
    """ERNIE divides the weights of a token's experts by at least this number."""
    with pytest.raises(ConfigError, match=r"moe_norm_min must be null or 1e-12 .*; got 0\.5"):
        config_of("ernie4_5_moe", moe_norm_min=0.5)


def test_two_names_of_a_key_that_contradict_are_a_warning(caplog):
    """The family's own name is read; a file edited under the shared one would change nothing."""
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "engine"):
        same = config_of("ernie4_5_moe", moe_k=3, num_experts_per_tok=3)
        assert not caplog.text
        assert config_of("ernie4_5_moe", moe_k=3, num_experts_per_tok=2) == same
    wanted = "moe_k is read, not num_experts_per_tok, which differs; got 3 and 2"
    assert wanted in caplog.text


def test_every_family_was_measured():
    """MiMo's layers are Qwen2's, Kimi K2's are DeepSeek-V3's; transformers has neither type.

    Nor has it models with lightning attention of this kind.
    """
    unknown = {"mimo", "kimi_k2", "bailing_moe_v2_5", "bailing_moe_linear"}
    assert MEASURED.keys() == FAMILIES.keys() - unknown


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
