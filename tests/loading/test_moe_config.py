"""Keys of a config.json that describe experts."""

from __future__ import annotations

import pytest

from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.loading.hf_config import config_from_dict

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


GLM = {"num_hidden_layers": 2}


def known(kind: str, **changes) -> ModelConfig:
    """A tiny config of a family, without anything optional."""
    return config_from_dict({"model_type": kind, **SIZES, **changes})


def test_the_number_of_experts_has_two_keys():
    for kind in ("mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "granitemoe", "gpt_oss"):
        by_one, by_other = (
            known(kind, num_experts_per_tok=2, **{key: 12}).moe
            for key in ("num_experts", "num_local_experts")
        )
        assert by_one == by_other == known(kind, num_experts_per_tok=2, num_experts=12).moe
        assert by_one.num_experts == 12
    both = {"num_experts": 6, "num_local_experts": 6}
    assert known("mixtral", **both).moe.num_experts == 6
    defaults = {"mixtral": (8, 2), "qwen3_moe": (128, 8), "qwen2_moe": (60, 4), "olmoe": (64, 8)}
    for kind, (count, top_k) in {**defaults, "gpt_oss": (128, 4), "granitemoe": (8, 2)}.items():
        assert (known(kind).moe.num_experts, known(kind).moe.top_k) == (count, top_k)


def test_layers_without_experts():
    moe = known("qwen3_moe", num_hidden_layers=6).moe
    assert moe.sparse_layers == (True,) * 6 and moe.intermediate_size == 768
    moe = known("qwen2_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3, 9]).moe
    assert moe.sparse_layers == (False, True, False, False, False, True)
    assert (moe.shared_size, moe.shared_gate) == (5632, True)
    config = known("qwen3_moe", num_hidden_layers=2, mlp_only_layers=[0, 1])
    assert config.moe is None and config.has_mlp
    with pytest.raises(ConfigError, match=r"decoder_sparse_step must be null or 1 .*got 5"):
        known("mixtral", decoder_sparse_step=5)
    assert not known("mixtral").has_mlp and known("mixtral").moe_of(0) == known("mixtral").moe


def test_glm4_moe():
    config = known("glm4_moe", num_hidden_layers=3, n_shared_experts=2, routed_scaling_factor=2.5)
    moe = config.moe
    assert moe.sparse_layers == (False, True, True) and (moe.num_experts, moe.top_k) == (128, 8)
    assert (moe.score, moe.correction, moe.scale, moe.renormalize) == ("sigmoid", True, 2.5, True)
    assert (moe.shared_size, moe.shared_gate) == (2 * 1408, False)
    assert (moe.num_groups, moe.top_groups) == (1, 1)
    groups = known("glm4_moe", num_hidden_layers=2, n_routed_experts=16, n_group=4, topk_group=2)
    assert (groups.moe.num_groups, groups.moe.top_groups) == (4, 2)
    assert not config.qk_norm and known("glm4_moe", use_qk_norm=True).qk_norm
    biased = known("glm4_moe", attention_bias=True)
    assert biased.qkv_bias and not biased.o_bias and config.rope.rotary_dim == 4
    assert known("glm4_moe", num_nextn_predict_layers=1).num_extra_layers == 1
    idle = {"routed_scaling_factor": 2.5, "n_group": 4, "scoring_func": "sigmoid"}
    assert known("glm4_moe", first_k_dense_replace=1, **idle).moe is None


def test_a_list_of_layers_with_experts_takes_precedence():
    layers = {"num_hidden_layers": 4, "mlp_layer_types": ["sparse", "dense", "sparse", "dense"]}
    layers["num_key_value_heads"] = 2
    for kind in ("hy_v3", "exaone_moe", "mellum"):
        moe = known(kind, **layers, first_k_dense_replace=3).moe
        assert moe.sparse_layers == (True, False, True, False)
        with pytest.raises(ConfigError, match="mlp_layer_types must be 4 of dense or sparse"):
            known(kind, **{**layers, "mlp_layer_types": ["sparse", "dense"]})
        assert known(kind, **{**layers, "mlp_layer_types": ["dense"] * 4}).moe is None
    assert known("hy_v3", num_hidden_layers=3, num_key_value_heads=2).moe.sparse_layers == (
        False,
        True,
        True,
    )
    with pytest.raises(ConfigError, match="mlp_layer_types must be null"):
        known("qwen3_moe", **layers)


def test_ernie4_5_moe():
    sizes = {"num_hidden_layers": 6, "moe_num_experts": 12, "moe_k": 3}
    moe = known("ernie4_5_moe", **sizes).moe
    assert (moe.num_experts, moe.top_k, moe.shared_size) == (12, 3, 2 * 1536)
    assert moe.sparse_layers == (False, True, True, True, True, True)
    assert (moe.score, moe.correction, moe.renormalize) == ("softmax", True, True)
    some = {"moe_layer_interval": 2, "moe_layer_start_index": 2, "moe_layer_end_index": 3}
    moe = known("ernie4_5_moe", **sizes, **some).moe
    assert moe.sparse_layers == (False, False, False, True, False, False)
    assert known("ernie4_5_moe", **sizes, use_bias=True).moe.shared_bias
    with pytest.raises(ConfigError, match="moe_k must be a whole number from 1 to 12; got 13"):
        known("ernie4_5_moe", **{**sizes, "moe_k": 13})


def test_weights_of_experts():
    for kind in ("qwen2_moe", "qwen3_moe", "olmoe"):
        assert not known(kind).moe.renormalize and known(kind, norm_topk_prob=True).moe.renormalize
    for kind in ("mixtral", "granitemoe", "gpt_oss"):
        assert known(kind, norm_topk_prob=True).moe.renormalize
        with pytest.raises(ConfigError, match="norm_topk_prob must be null or True"):
            known(kind, norm_topk_prob=False)
    moe = known("gpt_oss", swiglu_alpha=1.5, swiglu_limit=6.0).moe
    assert (moe.activation, moe.alpha, moe.limit) == ("swiglu_clamped", 1.5, 6.0)
    assert moe.router_bias and moe.expert_bias and known("gpt_oss").moe.alpha == 1.702


def test_windows_of_models_with_experts():
    sizes = {"num_hidden_layers": 5, "sliding_window": 16, "max_position_embeddings": 64}
    assert known("mixtral", **sizes).layer_windows == (16,) * 5
    assert known("gpt_oss", **sizes).layer_windows == (16, 0, 16, 0, 16)
    for kind in ("qwen2_moe", "qwen3_moe"):
        assert known(kind, **sizes).layer_windows == (0,) * 5
    on = {**sizes, "use_sliding_window": True}
    assert known("qwen3_moe", **on).layer_windows == (16,) * 5
    assert known("qwen2_moe", **on, max_window_layers=4).layer_windows == (16, 0, 16, 0, 0)


def test_gpt_oss_has_yarn_by_default():
    rope = known("gpt_oss").rope
    assert (rope.scaling, rope.factor, rope.theta, rope.truncate) == ("yarn", 32.0, 150000.0, False)
    plain = known("gpt_oss", rope_parameters={"rope_type": "default", "rope_theta": 5e4}).rope
    assert (plain.scaling, plain.theta) == ("default", 5e4)
    old = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert known("gpt_oss", rope_scaling=old).rope.factor == 4.0
    assert known("gpt_oss", quantization_config={"quant_method": "mxfp4"}) == known("gpt_oss")
    with pytest.raises(ConfigError, match=r"quant_method must be one of .*mxfp4, .*; got 'int2'"):
        known("gpt_oss", quantization_config={"quant_method": "int2"})


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("mixtral", {"num_local_experts": 0}, "num_local_experts must be .* from 1 to 512; got 0"),
        ("mixtral", {"num_local_experts": 513}, "num_local_experts .* from 1 to 512"),
        ("qwen3_moe", {"num_experts": 2.5}, "num_experts must be a whole number"),
        (
            "qwen3_moe",
            {"num_experts": 8, "num_local_experts": 9},
            "num_experts must be 9, as num_local_experts says; got 8",
        ),
        ("qwen3_moe", {"num_experts": 512, "num_hidden_layers": 1000}, "num_experts .* at most 65"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok .* from 1 to 8; got 9"),
        ("olmoe", {"num_experts_per_tok": 17}, "num_experts_per_tok .* from 1 to 16; got 17"),
        ("olmoe", {"num_experts_per_tok": True}, "num_experts_per_tok must be a whole number"),
        ("qwen2_moe", {"moe_intermediate_size": -1}, "moe_intermediate_size must be"),
        ("qwen2_moe", {"moe_intermediate_size": 10**400}, "moe_intermediate_size must be"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        ("qwen2_moe", {"mlp_only_layers": 3}, "mlp_only_layers must be a list of layers; got 3"),
        ("qwen2_moe", {"mlp_only_layers": [1.0]}, "mlp_only_layers must be a list of layers"),
        ("qwen2_moe", {"mlp_only_layers": [-1]}, "mlp_only_layers must be a list of layers"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be"),
        ("qwen2_moe", {"norm_topk_prob": 1}, "norm_topk_prob must be true or false; got 1"),
        ("glm4_moe", {**GLM, "first_k_dense_replace": -1}, "first_k_dense_replace must be"),
        ("glm4_moe", {**GLM, "n_group": 3}, "n_group must be such that 128 experts .*; got 3"),
        ("glm4_moe", {**GLM, "n_group": 128}, "n_group must be such that .*; got 128"),
        ("glm4_moe", {**GLM, "n_group": 4, "topk_group": 5}, "topk_group must be .* 1 to 4; got 5"),
        (
            "glm4_moe",
            {**GLM, "n_group": 32, "topk_group": 1},
            "topk_group must be groups of 4 with 8 experts; got 1",
        ),
        ("glm4_moe", {**GLM, "routed_scaling_factor": 0}, "routed_scaling_factor must be"),
        ("glm4_moe", {**GLM, "n_shared_experts": 65}, "n_shared_experts must be"),
        ("glm4_moe", {**GLM, "n_routed_experts": 4, "num_experts": 5}, "num_experts must be 4"),
        ("mixtral", {"clip_qkv": 8.0}, "clip_qkv must be null or 0 .*; got 8"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act must be one of silu, swish.*; got 'gelu'"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit must be a number from"),
        ("gpt_oss", {"swiglu_alpha": "1"}, "swiglu_alpha must be a number from"),
        ("mixtral", {"quantization_config": {"quant_method": "quip"}}, "quantization_config"),
        ("gpt_oss", {"quantization_config": []}, "quantization_config must be an object"),
    ],
)
def test_wrong_numbers_of_experts_are_refused(kind, changes, message):
    with pytest.raises(ConfigError, match=message):
        known(kind, **changes)


def test_sizes_of_experts_do_not_matter_without_them():
    """transformers writes all keys of the family."""
    keys = {"moe_shared_expert_intermediate_size": 7688, "n_routed_experts": 8, "n_group": 1}
    keys |= {"num_key_value_heads": 2}
    dense = known("nemotron_h", hybrid_override_pattern="*-", **keys)
    assert dense.moe is None and dense.layer_kinds == ("attention", "mlp")


def test_groups_that_the_choice_does_not_use():
    groups = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2}
    for method in ({}, {"topk_method": None}, {"topk_method": "greedy"}):
        moe = known("deepseek_v2", **groups, **method).moe
        assert (moe.num_groups, moe.top_groups) == (1, 1)
    moe = known("deepseek_v2", **groups, topk_method="group_limited_greedy").moe
    assert (moe.num_groups, moe.top_groups) == (4, 2)
    with pytest.raises(ConfigError, match="topk_method must be greedy or group_limited_greedy"):
        known("deepseek_v2", **groups, topk_method="noaux_tc")
    with pytest.raises(ConfigError, match=r"topk_method must be null or 'noaux_tc'.*got 'greedy'"):
        known("deepseek_v3", **groups, first_k_dense_replace=0, topk_method="greedy")
