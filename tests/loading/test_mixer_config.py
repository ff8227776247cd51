"""Keys of config.json that declare layers without attention, in old files and new ones."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine.config import GatedDeltaConfig, LightningConfig, Mamba2Config, ShortConvConfig
from engine.errors import ConfigError
from engine.loading.hf_config import config_from_dict

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
A, D, C, M, L = "attention", "gated_delta", "short_conv", "mamba2", "mla"
R = "lightning"


def config_of(family, **keys):
    return config_from_dict({"model_type": family, **SIZES, **keys})


@pytest.mark.parametrize(
    ("family", "keys", "kinds"),
    [
        ("qwen3_next", {}, (D, D, D, A)),
        ("qwen3_5_text", {"full_attention_interval": 2}, (D, A, D, A)),
        ("qwen3_5_text", {"layer_types": ["full_attention", *["linear_attention"] * 3]},
         (A, D, D, D)),
        ("lfm2", {}, (A, A, A, A)),
        ("lfm2", {"full_attn_idxs": [1, 3]}, (C, A, C, A)),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv", "conv"]}, (C, A, C, C)),
        ("granitemoehybrid", {"mamba_n_heads": 4}, (M, M, M, M)),
        ("granitemoehybrid",
         {"mamba_n_heads": 4, "layers_block_type": ["mamba", "attention", "mamba", "mamba"]},
         (M, A, M, M)),
        ("nemotron_h", {"hybrid_override_pattern": "M-*-M"}, (M, "mlp", A, "mlp", M)),
        ("nemotron_h", {"layers_block_type": ["mlp", "linear_attention"]}, ("mlp", M)),
        ("kimi_linear", {}, (D, D, D, D)),
        ("kimi_linear", {"num_hidden_layers": 5}, (D, D, D, D, L)),
        ("kimi_linear", {"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3, 4]}},
         (D, L, D, D)),
        ("kimi_linear", {"layer_types": ["full_attention", *["linear_attention"] * 3]},
         (L, D, D, D)),
        ("bailing_hybrid", {"layer_group_size": 2}, (D, L, D, L)),
        ("bailing_hybrid", {"layer_group_size": 3}, (D, D, L, D)),
        ("bailing_hybrid", {"layer_group_size": 3, "group_norm_size": 2}, (R, R, L, L)),
        ("bailing_hybrid", {"layer_group_size": 2, "group_norm_size": 1, "kda_safe_gate": True},
         (D, L, D, L)),
        ("bailing_moe_linear", {"layer_group_size": 2}, (R, A, R, A)),
    ],
)  # fmt: skip
def test_kinds_of_layers(family, keys, kinds):
    config = config_of(family, **keys)
    assert config.layer_kinds == kinds and config.num_layers == len(kinds)


def test_sizes_of_kinds():
    linear = {f"linear_{key}": n for key, n in (("num_key_heads", 2), ("num_value_heads", 6))}
    linear |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 3}
    delta = config_of("qwen3_next", **linear).gated_delta
    assert delta == GatedDeltaConfig(2, 6, 8, 12, 3)
    assert (delta.conv_dim, delta.in_dim) == (2 * 16 + 72, 2 * 16 + 2 * 72 + 2 * 6)
    conv = config_of("lfm2", full_attn_idxs=[0], conv_L_cache=4, conv_bias=True).short_conv
    assert conv == ShortConvConfig(32, 4, True)
    keys = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 10, "mamba_d_conv": 3}
    keys |= {"mamba_conv_bias": False, "mamba_proj_bias": True}
    mamba = config_of("granitemoehybrid", **keys).mamba2
    assert mamba == Mamba2Config(8, 8, 2, 10, 3, conv_bias=False, proj_bias=True, out_bias=True)
    limited = config_of("granitemoehybrid", **keys, time_step_limit=[0.25, 3]).mamba2
    assert (limited.dt_min, limited.dt_max) == (0.25, 3.0)
    for limit in ([0.0, math.inf], [0.0, {"__float__": "Infinity"}]):  # as transformers 4 and 5 do
        assert config_of("granitemoehybrid", **keys, time_step_limit=limit).mamba2 == mamba
    own = {"mamba_num_heads": 6, "mamba_head_dim": 12, "n_groups": 3, "ssm_state_size": 10}
    keys = {"head_dim": 72, "linear_attn_config": {"head_dim": 8, "num_heads": 6}}
    kimi = config_of("kimi_linear", **keys).gated_delta
    assert kimi == GatedDeltaConfig(6, 6, 8, 8, 4, 1.0, 0.0, "sigmoid", True, 8)
    assert (kimi.decay_dim, kimi.in_dim) == (48, 3 * 48 + 2 * 8 + 6)
    ling = config_of("bailing_hybrid", head_dim=10, short_conv_kernel_size=3).gated_delta
    assert ling == GatedDeltaConfig(4, 4, 10, 10, 3, 1.0, 0.0, "sigmoid", True, 0, -5.0)
    assert ling.in_dim == 3 * 40 + 40 + 40 + 4
    saved = {"head_dim": 10, "linear_head_dim": 12, "kda_safe_gate": False}
    assert config_of("bailing_hybrid", **saved).gated_delta.key_head_dim == 12
    assert config_of("bailing_hybrid", **saved).gated_delta.gate_bound == 0.0
    keys = {"num_attention_heads": 6, "group_norm_size": 3, "layer_group_size": 2}
    ring = config_of("bailing_moe_linear", **keys).lightning
    assert ring == LightningConfig(6, 128, 3, True, ring.slopes, ring.layer_factors)
    alibi = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]  # slopes of 4 heads, then two between them
    np.testing.assert_allclose(ring.slopes, alibi)
    np.testing.assert_allclose(ring.layer_factors, [4 / 3, 1, 2 / 3, 1 / 3], atol=2e-5)
    nemotron = config_of("nemotron_h", hybrid_override_pattern="M", **own).mamba2
    assert nemotron == Mamba2Config(6, 12, 3, 10)


def test_other_spellings_of_keys():
    types = ["conv", "sliding_attention", "full_attention", "conv"]
    assert config_of("lfm3", layer_types=types, rms_norm_eps=1e-3).rms_norm_eps == 1e-3
    keys = {"hybrid_override_pattern": "M*", "mamba_num_heads": 4, "n_groups": 2}
    mamba = config_of("nemotron_h", **keys, mamba_dt_limit=[0.25, 3]).mamba2
    assert (mamba.dt_min, mamba.dt_max) == (0.25, 3.0)


@pytest.mark.parametrize(
    ("keys", "width"),
    [
        ({"intermediate_size": 100, "block_multiple_of": 16}, 80),  # 66, rounded up
        ({"block_ff_dim": 99, "block_multiple_of": 7}, 70),  # not 48; 66, rounded up
        ({"intermediate_size": 99, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 4}, 88),
        ({"intermediate_size": 99, "block_auto_adjust_ff_dim": False}, 99),
    ],
)
def test_the_width_of_lfm2_is_adjusted(keys, width):
    assert config_of("lfm2", **keys).intermediate_size == width


@pytest.mark.parametrize(
    ("family", "keys", "words"),
    [
        ("qwen3_next", {"layer_types": ["full_attention"] * 3}, "layer_types must be 4 of"),
        ("qwen3_next", {"layer_types": ["full_attention"] * 3 + [[]]}, "layer_types must be 4 of"),
        ("qwen3_next", {"layer_types": ["conv"] * 4}, "full_attention or linear_attention; got"),
        ("qwen3_next", {"full_attention_interval": 0}, "full_attention_interval must be a whole"),
        ("qwen3_next", {"linear_num_value_heads": 24},
         "linear_num_value_heads must be a multiple of the 16 key heads; got 24"),
        ("qwen3_next", {"linear_conv_kernel_dim": 5}, "from 2 to 4; got 5"),
        ("lfm2", {"full_attn_idxs": "0"}, "full_attn_idxs must be a list of layers"),
        ("lfm2", {"conv_L_cache": 8, "layer_types": ["conv"] * 4}, "from 2 to 7; got 8"),
        ("lfm3", {}, "layer_types must be given, 4 of full_attention or sliding_attention or conv"),
        ("lfm3", {"layer_types": ["conv"] * 3}, "layer_types must be 4 of full_attention or slid"),
        ("lfm3", {"layer_types": 5}, "layer_types must be 4 of"),
        ("lfm3", {"layer_types": ["conv"] * 4, "use_attention_gate": 1}, "must be true or false"),
        ("granitemoehybrid", {"mamba_n_heads": 3}, "mamba_n_heads must be a divisor of the 64"),
        ("granitemoehybrid", {"mamba_n_heads": 4, "mamba_n_groups": 3}, "a divisor of the 4 heads"),
        ("granitemoehybrid", {"mamba_n_heads": 4, "time_step_limit": [2, 1]}, "in order"),
        ("granitemoehybrid", {"mamba_n_heads": 4, "time_step_limit": [0]}, "must be two numbers"),
        ("granitemoehybrid", {"mamba_n_heads": 4, "hidden_act": "gelu", "num_local_experts": 0},
         "hidden_act must be silu in a model with Mamba-2; got 'gelu'"),
        ("falcon_h1", {"mamba_n_heads": 4, "mamba_d_ssm": 64, "hidden_act": "relu2"},
         "hidden_act must be silu in a model with Mamba-2; got 'relu2'"),
        ("nemotron_h", {"hybrid_override_pattern": "M-", "mamba_hidden_act": "gelu"},
         "mamba_hidden_act must be silu in a model with Mamba-2; got 'gelu'"),
        ("nemotron_h", {"hybrid_override_pattern": "MXM*E"},
         r"hybrid_override_pattern must be a string of 'M', '\*', '-', 'E'; got 'MXM\*E'"),
        ("nemotron_h", {}, "hybrid_override_pattern must be a string"),
        ("nemotron_h", {"layers_block_type": ["moe", "x"]}, "layers_block_type must be 2 of"),
        ("kimi_linear", {"linear_attn_config": 3}, "linear_attn_config must be an object; got 3"),
        ("kimi_linear", {"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3, 5]}},
         "linear_attn_config must name each of 4 layers once, from 1 on, in full_attn_layers or"),
        ("kimi_linear", {"linear_attn_config": {"full_attn_layers": 2, "kda_layers": []}},
         "must name each of 4 layers once"),
        ("kimi_linear", {"num_hidden_layers": 10**12}, "num_hidden_layers must be a whole number"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope must be null or True"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"},
         "moe_router_activation_func must be null or 'sigmoid'"),
        ("bailing_hybrid", {"no_kda_lora": False}, "no_kda_lora must be true; got False"),
        ("bailing_hybrid", {"gated_attention_proj_granularity_type": "element_wise"},
         "gated_attention_proj_granularity_type must be null or 'head_wise'"),
        ("bailing_hybrid", {"expert_swiglu_limit_list": [0, 7.0]},
         "expert_swiglu_limit_list must be null or 0"),
        ("bailing_hybrid", {"kda_lower_bound": 0.5}, "kda_lower_bound must be a number from -1000"),
        ("bailing_hybrid", {"head_dim": 512}, "head_dim must be a whole number from 1 to 256"),
        ("bailing_hybrid", {"group_norm_size": 3, "layer_group_size": 2},
         "group_norm_size must be a divisor of the 4 he"),
        ("bailing_hybrid",
         {"group_norm_size": 2, "layer_group_size": 2, "partial_rotary_factor": 0.25},
         "qk_rope_head_dim must be 32, as in lightning attention"),
        ("bailing_moe_linear", {"linear_silu": True}, "linear_silu must be null or 0"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(family, keys, words):
    with pytest.raises(ConfigError, match=words):
        config_of(family, **keys)


def test_an_activation_of_a_convolution_that_no_layer_has_does_not_matter():
    """Granite 4 without Mamba-2 is dense; Nemotron-H has another key for its MLPs."""
    dense = {"layer_types": ["attention"] * 4, "num_local_experts": 0, "hidden_act": "gelu"}
    assert config_of("granitemoehybrid", **dense).activation == "gelu"
    keys = {"mamba_hidden_act": "gelu", "mlp_hidden_act": "gelu"}
    assert config_of("nemotron_h", hybrid_override_pattern="*-", **keys).activation == "gelu"
    assert config_of("nemotron_h", hybrid_override_pattern="M-").activation == "relu2"
