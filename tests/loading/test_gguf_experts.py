"""Models with experts in a .gguf: read as the same model in safetensors is."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.errors import ConfigError, WeightsError
from engine.loading.gguf_quants import FORMATS
from engine.loading.model_config import load_config
from engine.loading.weight_table import weight_shapes
from engine.loading.weights import load_weights
from engine.weights import Shard
from tests.loading.test_gguf_families import GRANITE, YARN, Converted, record_of, rounded, write
from tests.loading.tiny import random_tensors

NAMES = {
    "mlp.gate.": "ffn_gate_inp.",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
SHARED = {
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
KEYS = {"expert_used_count": "num_experts_per_tok", "expert_count": "num_local_experts"}
DEEPSEEK = {
    "expert_used_count": "num_experts_per_tok",
    "expert_count": "n_routed_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_gating_func": 2,
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
CASES = {
    "qwen3_moe_new_keys_window_biases": Converted(
        {
            **KEYS,
            "expert_feed_forward_length": "moe_intermediate_size",
            "attention.sliding_window": "sliding_window",
            "rope.freq_base": 500.0,
        },
        {**NAMES, **HEAD_NORMS},
        arch="qwen3moe",
    ),
    "mixtral": Converted(KEYS, NAMES, arch="llama", pairs=True),
    "olmoe": Converted({**KEYS, "expert_count": "num_experts"}, {**NAMES, **HEAD_NORMS}),
    "granitemoe": Converted({**KEYS, **GRANITE}, NAMES, pairs=True),
    "granitemoeshared": Converted(
        {**KEYS, **GRANITE, "expert_shared_feed_forward_length": "shared_intermediate_size"},
        {**SHARED, **NAMES},
        arch="granitemoe",
        pairs=True,
    ),
    "gpt_oss": Converted(
        {**KEYS, **YARN, "expert_feed_forward_length": "intermediate_size"},
        {
            **NAMES,
            "post_attention_layernorm": "post_attention_norm",
            "self_attn.sinks": "attn_sinks.weight",
        },
        arch="gpt-oss",
    ),
    "glm4_moe": Converted(
        {
            **DEEPSEEK,
            "expert_shared_count": "n_shared_experts",
            "expert_weights_norm": True,
            "leading_dense_block_count": 1,
            "rope.dimension_count": 12,
        },
        {**SHARED, **NAMES, **HEAD_NORMS, "post_attention_layernorm": "post_attention_norm"},
        arch="glm4moe",
    ),
    "exaone_moe": Converted(
        {
            **DEEPSEEK,
            "expert_count": "num_experts",
            "expert_shared_count": "num_shared_experts",
            "expert_weights_norm": True,
            "leading_dense_block_count": 1,
            "attention.sliding_window": "sliding_window",
            "rope.scaling.type": "none",
        },
        {**SHARED, **NAMES, **HEAD_NORMS},
        arch="exaone-moe",
        # A file without the pattern has a window in all but every fourth layer.
        lost={"layer_windows": (8, 8, 8), "rope_layers": ()},
    ),
    "dots1": Converted(
        {
            **DEEPSEEK,
            "expert_shared_count": "n_shared_experts",
            "expert_weights_norm": "norm_topk_prob",
            "leading_dense_block_count": "first_k_dense_replace",
        },
        {**SHARED, **NAMES, **HEAD_NORMS},
        lost={"layer_windows": (0,) * 4},
    ),
    "minimax_m2": Converted(
        {
            **KEYS,
            "expert_feed_forward_length": "intermediate_size",
            "expert_gating_func": 2,
            "rope.dimension_count": "rotary_dim",
        },
        {**SHARED, **NAMES, **HEAD_NORMS},
        arch="minimax-m2",
    ),
    "ernie4_5_moe": Converted(
        {
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "expert_shared_feed_forward_length": 40,
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        {**SHARED, **NAMES},
        arch="ernie4_5-moe",
    ),
}
# What a .gguf does not say, and llama.cpp has fixed.
FIXED = {
    "qwen3_moe_new_keys_window_biases": {"norm_topk_prob": True},
    "gpt_oss": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
}


def _stacked(tensors: dict) -> dict:
    """Return the tensors as the converter has them: three arrays with all experts' matrices."""
    out: dict = {}
    mixtral = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    for name, value in tensors.items():
        name = re.sub(r"block_sparse_moe\.(router\.layer|gate)", "mlp.gate", name)
        name = name.replace("mlp.router.", "mlp.gate.").replace("block_sparse_moe", "mlp")
        name = re.sub(r"(?<=\.)w[123](?=\.weight)", lambda found: mixtral[found[0]], name)
        experts = re.sub(r"experts\.\d+", "experts", name)
        prefix = name.partition("mlp.")[0] + "mlp.experts."
        if experts != name:
            before = [out[experts]] if experts in out else []
            out[experts] = np.concatenate([*before, value[None]])
        elif "shared_mlp.input_linear" in name:
            shared = name.replace("shared_mlp.input_linear", "mlp.shared_experts.{}_proj")
            for part, half in zip(("gate", "up"), np.split(value, 2), strict=True):
                out[shared.format(part)] = half
        elif "shared_mlp.output_linear" in name:
            out[name.replace("shared_mlp.output_linear", "mlp.shared_experts.down_proj")] = value
        elif "input_linear" in name:
            for part, half in zip(("gate", "up"), np.split(value, 2, axis=1), strict=True):
                out[f"{prefix}{part}_proj.weight"] = half
        elif "output_linear" in name:
            out[f"{prefix}down_proj.weight"] = value
        elif ".experts.gate_up_proj" in name:
            kind = "bias" if name.endswith("bias") else "weight"
            for first, part in enumerate(("gate", "up")):
                rows = value[..., first::2]
                out[f"{prefix}{part}_proj.{kind}"] = rows if kind == "bias" else rows.swapaxes(1, 2)
        elif ".experts.down_proj" in name:
            is_bias = name.endswith("bias")
            target = f"{prefix}down_proj.{'bias' if is_bias else 'weight'}"
            out[target] = value if is_bias else value.swapaxes(1, 2)
        else:
            out[name] = value.reshape(-1) if "moe_statics" in name else value
    return {
        name: values if "experts." not in name else np.ascontiguousarray(values)
        for name, values in out.items()
    }


def _write(path, case, **changes):
    """Write the golden model `case` as a .gguf; return its path, config.json and tensors."""
    record = record_of(case)
    tensors = random_tensors(record["tensors"])
    values = {**record["config"], **FIXED.get(case, {})}
    rule = CASES[case]
    return write(path, values, _stacked(tensors), rule, **changes), values, tensors


@pytest.mark.parametrize("case", CASES)
def test_a_gguf_is_read_as_the_checkpoint_it_was_made_from(tmp_path, case):
    file, values, tensors = _write(tmp_path, case)
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file(tensors, tmp_path / "model.safetensors")
    wanted, config = load_config(tmp_path), load_config(file)
    assert rounded(config) == rounded(replace(wanted, **CASES[case].lost))
    weights, checkpoint = load_weights(file, config), load_weights(tmp_path, wanted)
    assert weights.keys() == checkpoint.keys()
    for name, weight in checkpoint.items():
        np.testing.assert_array_equal(weights[name].data, weight.data, err_msg=name)


def test_qwen3_vl_with_experts(tmp_path):
    """The golden model has a layer without experts, which no .gguf can say."""
    record = record_of("qwen3_vl_moe_new_keys")
    values = {**record["config"], "mlp_only_layers": []}
    shapes = {}
    for name, shape in record["tensors"].items():
        if ".0.mlp." in name:  # the layer without
            continue
        names = [name] if ".1.mlp." not in name else [name, name.replace(".1.mlp.", ".0.mlp.")]
        for one in names:
            block, _, kind = one.rpartition(".")
            if not block.endswith("experts"):
                shapes[one] = shape
                continue
            count, rows, columns = shape
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for expert, part in itertools.product(range(count), parts):
                shapes[f"{block}.{expert}.{part}.weight"] = (rows // len(parts), columns)
    tensors = random_tensors(shapes)
    keys = {**KEYS, "expert_feed_forward_length": "moe_intermediate_size"}
    keys |= {"rope.freq_base": 500.0, "rope.dimension_sections": [4, 4, 4, 0]}
    rule = Converted(keys, {**NAMES, **HEAD_NORMS}, arch="qwen3vlmoe")
    file = write(tmp_path, values, _stacked(tensors), rule)
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file(tensors, tmp_path / "model.safetensors")
    wanted, config = load_config(tmp_path), load_config(file)
    assert rounded(config) == rounded(wanted) and config.moe.num_experts == 6
    weights, checkpoint = load_weights(file, config), load_weights(tmp_path, wanted)
    assert weights.keys() == checkpoint.keys()
    for name, weight in checkpoint.items():
        np.testing.assert_array_equal(weights[name].data, weight.data, err_msg=name)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    file, values, _ = _write(tmp_path, "glm4_moe")
    plain = load_config(file)
    record = record_of("glm4_moe")
    tensors = random_tensors(record["tensors"])
    last = values["num_hidden_layers"]
    extra = {f"model.layers.{last}.nextn.eh_proj.weight": tensors["lm_head.weight"]}
    extra[f"model.layers.{last}.input_layernorm.weight"] = tensors["model.norm.weight"]
    rule = CASES["glm4_moe"]
    changes = {"block_count": last + 1, "nextn_predict_layers": 1}
    file = write(tmp_path, values, _stacked(tensors) | extra, rule, **changes)
    config = load_config(file)
    assert config == replace(plain, num_extra_layers=1)
    assert load_weights(file, config).keys() == weight_shapes(plain).keys()


@pytest.mark.parametrize("case", ["mixtral", "gpt_oss"])
def test_shards_add_up_to_the_whole(tmp_path, case):
    file, _, _ = _write(tmp_path, case)
    config = load_config(file)
    whole = load_weights(file, config)
    runs = [load_weights(file, config, shard=Shard(i, 2, expert_parallel=True)) for i in range(2)]
    for name in (name for name in whole if ".experts_" in name):
        joined = np.concatenate([run[name].data for run in runs])
        np.testing.assert_array_equal(joined, whole[name].data)
    shards = [load_weights(file, config, shard=Shard(i, 2)) for i in range(2)]
    assert {n: w.shape for n, w in shards[1].items()} == weight_shapes(config, Shard(1, 2))
    for layer in range(config.num_layers):
        down = [shard[f"layers.{layer}.experts_down"].data for shard in shards]
        np.testing.assert_array_equal(
            np.concatenate(down, axis=2), whole[f"layers.{layer}.experts_down"].data
        )
        for name in ("experts_gate_up", "experts_gate_up_bias"):
            if f"layers.{layer}.{name}" not in whole:
                continue
            halves = [np.split(s[f"layers.{layer}.{name}"].data, 2, axis=1) for s in shards]
            joined = [np.concatenate([half[part] for half in halves], axis=1) for part in (0, 1)]
            got = np.concatenate(joined, axis=1)
            np.testing.assert_array_equal(got, whole[f"layers.{layer}.{name}"].data)


def test_mxfp4_is_that_of_the_gguf_package():
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (50, 17), np.uint8)
    raw[:, 0] = rng.integers(0, 253, 50)
    raw[:3, 0] = 0, 1, 2
    wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(FORMATS[39].decode(raw.reshape(-1)), wanted.reshape(-1))


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("olmoe", {"expert_count": None}, r"olmoe\.expert_count must be .*got nothing"),
        ("olmoe", {"expert_used_count": None}, r"olmoe\.expert_used_count must be .*got nothing"),
        ("olmoe", {"expert_used_count": 8}, r"olmoe\.expert_used_count .* from 1 to 7; got 8"),
        ("mixtral", {"expert_count": 1000}, r"llama\.expert_count must be .*1 to 512; got 1000"),
        (
            "olmoe",
            {"expert_shared_feed_forward_length": 8},
            r"expert_shared_feed_forward_length must be 0 .*got 8",
        ),
        ("olmoe", {"attention.clamp_kqv": 8.0}, r"olmoe\.attention\.clamp_kqv must be 0 .*8\.0"),
        ("olmoe", {"expert_weights_norm": 1}, r"olmoe\.expert_weights_norm must be true or false"),
        (
            "gpt_oss",
            {"expert_weights_norm": False},
            r"weights_norm must be True .*got False",
        ),
        ("mixtral", {"expert_weights_scale": 2.5}, r"llama\.expert_weights_scale must be 1"),
        ("mixtral", {"expert_gating_func": 2}, r"llama\.expert_gating_func must be 1 .*got 2"),
        ("mixtral", {"expert_group_count": 4}, r"llama\.expert_group_count must be 1 .*got 4"),
    ],
)
def test_wrong_metadata_is_refused(tmp_path, case, changes, message):
    file, _, _ = _write(tmp_path, case, **changes)
    with pytest.raises(ConfigError, match=message):
        load_config(file)


@pytest.mark.parametrize("is_normed", [False, True])
def test_a_file_may_say_whether_weights_are_divided_by_their_sum(tmp_path, is_normed):
    file, _, _ = _write(tmp_path, "olmoe", expert_weights_norm=is_normed)
    assert load_config(file).moe.renormalize is is_normed


def test_rope_is_scaled_only_if_the_file_says_so(tmp_path):
    """A config.json of gpt-oss without a scaling means YaRN."""
    file, _, _ = _write(tmp_path, "gpt_oss", **{"rope.scaling.type": "none"})
    assert load_config(file).rope.scaling == "default"


def test_damaged_experts_are_refused(tmp_path):
    file, _, _ = _write(tmp_path, "olmoe")
    config = load_config(file)
    fewer = replace(config, moe=replace(config.moe, num_experts=6))
    with pytest.raises(WeightsError, match=r"must have shape \(6, .* got \(7, "):
        load_weights(file, fewer)
