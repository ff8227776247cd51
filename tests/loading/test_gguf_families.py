"""Families whose .gguf files differ from Llama's: read as the same model in safetensors is."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.layers.rotary import inverse_frequencies, rope_table
from engine.loading.model_config import load_config
from engine.loading.text_model import text_values
from engine.loading.weights import load_weights
from engine.models.decoder import Decoder
from engine.models.registry import wrapper
from tests.loading.tiny import random_tensors, save_file

GOLDEN = Path(__file__).parents[1] / "golden" / "models"

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "model.layers.": "blk.", "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


@dataclass(frozen=True)
class Converted:
    """What llama.cpp's converter does with a family.

    `keys`: metadata name -> key of config.json, or a value; `pairs`: rows of q and k, which it
    reorders so that the two of a pair follow each other; `lost`: fields of the ModelConfig that it
    does not write, and what is read instead; `transposed`: it transposes the layers' matrices.
    """

    keys: dict = field(default_factory=dict)
    names: dict = field(default_factory=dict)
    arch: str = ""
    lost: dict = field(default_factory=dict)
    pairs: bool = False
    norm_offset: float = 0.0
    transposed: bool = False


SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
    "attention.sliding_window": "sliding_window",
}
POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps", "rope.freq_base": 500.0}
GPT2 = {
    "block_count": "n_layer",
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "feed_forward_length": 256,
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
GPT2_NAMES = {
    "transformer.h.": "blk.",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
}
CASES = {
    "gpt2": Converted(GPT2, GPT2_NAMES, lost={"pad_token_id": 0}, transposed=True),
    "gpt_bigcode": Converted(
        {**GPT2, "attention.head_count_kv": 1},
        GPT2_NAMES,
        arch="starcoder",
        lost={"pad_token_id": 0},
    ),
    "glm4": Converted(
        {"rope.dimension_count": 12},
        {
            "mlp.gate_up_proj": "ffn_up",
            "post_self_attn_layernorm": "post_attention_norm",
            "post_mlp_layernorm": "post_ffw_norm",
        },
    ),
    "cohere2": Converted(
        {**LAYER_NORM, "logit_scale": "logit_scale", "attention.sliding_window": "sliding_window"},
        # A file does not say which layers have no window: every fourth.
        lost={"layer_windows": (8, 8, 8), "rope_layers": ()},
    ),
    "olmo2": Converted(names=POST_NORMS),
    "stablelm": Converted({**LAYER_NORM, "rope.dimension_count": 8}),
    "stablelm_parallel_new_keys": Converted({**LAYER_NORM, "rope.dimension_count": 24}),
    "stablelm_qk_norm": Converted(
        {**LAYER_NORM, "rope.dimension_count": 4},
        {"self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm"},
    ),
    # A file does not say which layers have no rope: every fourth.
    "smollm3": Converted(pairs=True, lost={"rope_layers": ()}),
    "gemma2": Converted(
        {
            "attention.sliding_window": "sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        POST_NORMS | {"pre_feedforward_layernorm": "ffn_norm"},
        norm_offset=1.0,
        lost={"attn_scale": 24**-0.5},  # no file has it: D^-0.5, or for the largest (H/N)^0.5
    ),
    "olmo3": Converted(YARN, POST_NORMS, arch="olmo2"),
    "granite": Converted(GRANITE, pairs=True),
    "glm": Converted({"rope.dimension_count": 12}, {"mlp.gate_up_proj": "ffn_up"}, arch="chatglm"),
    "ministral3_window_new_keys": Converted(
        {
            "rope.freq_base": 500.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 11,
            "rope.scaling.yarn_log_multiplier": 0.5,
            "attention.temperature_scale": 0.7,
        },
        arch="mistral3",
        pairs=True,
        lost={"layer_windows": (0, 0)},  # no model that was converted has a window
    ),
    "qwen2_vl": Converted(
        {"rope.dimension_sections": [2, 3, 3, 0]},
        arch="qwen2vl",
        lost={"model_type": "qwen2_5_vl_text"},
    ),
    "qwen3_vl": Converted(
        {"rope.dimension_sections": [4, 4, 4, 0], "n_deepstack_layers": 1},
        {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"},
        arch="qwen3vl",
    ),
    "gemma": Converted(norm_offset=1.0),
    "seed_oss": Converted(names={"post_attention_layernorm": "post_attention_norm"}),
    "ernie4_5": Converted(),
    "exaone4": Converted(
        {"attention.sliding_window": "sliding_window"},
        POST_NORMS,
        # A file without the pattern has a window in all but every fourth layer.
        lost={"layer_windows": (8, 8, 8), "rope_layers": ()},
    ),
}


def record_of(case: str) -> dict:
    """Return a golden model's record; of a multimodal one that of its text model."""
    record = json.loads((GOLDEN / f"{case}.json").read_text())
    kind = wrapper(record["config"]["model_type"])
    if kind is not None:
        record["config"] = text_values(record["config"])
        tensors = {kind.text_name(name): shape for name, shape in record["tensors"].items()}
        record["tensors"] = {name: shape for name, shape in tensors.items() if name}
    return record


def write(path: Path, values: dict, tensors: dict, rule: Converted, **changes) -> Path:
    """Write the model as a .gguf; `changes` are metadata (None: left out)."""
    arch = rule.arch or values["model_type"]
    writer = gguf.GGUFWriter(path / "m.gguf", arch)
    keys = {name: values.get(key) for name, key in SIZES.items()}
    given = {name: key for name, key in rule.keys.items() if not isinstance(key, str)}
    given |= {name: values.get(key, key) for name, key in rule.keys.items() if name not in given}
    keys |= given | changes
    tokens = {f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(("padding", "bos"))}
    adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adders |= {bool: writer.add_bool, list: writer.add_array}
    for name, value in keys.items():
        if value is not None:
            adders[type(value)](f"{arch}.{name}", value)
    for name, value in {**tokens, "tokenizer.ggml.eos_token_id": 2}.items():
        writer.add_uint32(name, value)
    for name, value in _with_norms_of_all_heads(tensors).items():
        for old, new in {**NAMES, **rule.names}.items():
            name = name.replace(old, new)
        if rule.pairs and ("attn_q." in name or "attn_k." in name):
            key = "num_attention_heads" if "attn_q." in name else "num_key_value_heads"
            heads = value.reshape(values[key], 2, -1, *value.shape[1:])
            value = np.swapaxes(heads, 1, 2).reshape(value.shape)
        if rule.transposed and value.ndim > 1 and name.startswith("blk."):
            value = value.T
        value = value + rule.norm_offset if "norm" in name else value
        writer.add_tensor(name, np.ascontiguousarray(value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path / "m.gguf"


def _with_norms_of_all_heads(tensors: dict) -> dict:
    """Return the tensors with the norms of a layer's heads as the rows of one."""
    stacked = dict(tensors)
    for name in [name for name in tensors if ".norms.0." in name]:
        names = (name.replace(".norms.0.", f".norms.{head}.") for head in itertools.count())
        rows = [stacked.pop(one) for one in itertools.takewhile(tensors.__contains__, names)]
        stacked[name.replace(".norms.0", "")] = np.stack(rows)
    return stacked


def rounded(config: ModelConfig) -> ModelConfig:
    """Return the config with its numbers in float32, as a .gguf stores them."""

    def numbers(one: object) -> dict[str, float]:
        found = {name: value for name, value in vars(one).items() if type(value) is float}
        return {name: float(f"{value:.6g}") for name, value in found.items()}

    moe = config.moe and replace(config.moe, **numbers(config.moe))
    rope = replace(config.rope, **numbers(config.rope))
    return replace(config, moe=moe, rope=rope, **numbers(config))


@pytest.mark.parametrize("case", CASES)
def test_a_gguf_is_read_as_the_checkpoint_it_was_made_from(tmp_path, case):
    record, rule = record_of(case), CASES[case]
    tensors = random_tensors(record["tensors"])
    (tmp_path / "config.json").write_text(json.dumps(record["config"]))
    save_file(tensors, tmp_path / "model.safetensors")
    file = write(tmp_path, record["config"], tensors, rule)
    wanted, config = load_config(tmp_path), load_config(file)
    assert rounded(config) == rounded(replace(wanted, **rule.lost))
    weights, checkpoint = load_weights(file, config), load_weights(tmp_path, wanted)
    assert weights.keys() == checkpoint.keys()
    for name, weight in checkpoint.items():
        atol = 3e-7 if rule.norm_offset and "norm" in name else 0  # (w + 1) - 1
        np.testing.assert_allclose(weights[name].data, weight.data, rtol=0, atol=atol, err_msg=name)


def test_a_granite_without_multipliers_is_a_llama(tmp_path):
    values = record_of("granite")["config"]
    tensors = random_tensors(record_of("granite")["tensors"])
    none = dict.fromkeys(GRANITE)
    config = load_config(write(tmp_path, values, tensors, CASES["granite"], **none))
    assert (config.attn_scale, config.embed_scale) == (0.0, 1.0)  # 0: 1/sqrt(D)
    assert (config.branch_scale, config.logits_scale) == (1.0, 1.0)
    with pytest.raises(ConfigError, match=r"granite\.residual_scale must be a number .*got -1"):
        load_config(write(tmp_path, values, tensors, CASES["granite"], residual_scale=-1.0))


def test_exaone4_with_tensors_of_frequency_factors(tmp_path):
    """Llama 3's scaling, in a model in which only some layers have rope."""
    record = record_of("exaone4_layer_types_new_keys")
    tensors = random_tensors(record["tensors"])
    (tmp_path / "config.json").write_text(json.dumps(record["config"]))
    save_file(tensors, tmp_path / "model.safetensors")
    wanted = load_config(tmp_path)
    plain = replace(wanted.rope, scaling="default")
    factors = inverse_frequencies(plain) / inverse_frequencies(wanted.rope)
    pattern = [one == "sliding_attention" for one in record["config"]["layer_types"]]
    keys = {"rope.freq_base": 500.0, "attention.sliding_window": 8}
    rule = replace(CASES["exaone4"], keys=keys)
    more = {"attention.sliding_window_pattern": pattern}
    file = write(tmp_path, record["config"], tensors | {"rope_freqs.weight": factors}, rule, **more)
    config = load_config(file)
    assert config.rope_layers == wanted.rope_layers == (False, True, True)
    assert config.layer_windows == wanted.layer_windows
    rows, wanted_rows = (rope_table(one.rope, 128) for one in (config, wanted))
    np.testing.assert_allclose(rows, wanted_rows, atol=1e-5)  # factors are stored in float32
    assert Decoder(config, load_weights(file, config), 128).long_rope_offset == 0


def test_glm_with_packed_rows_of_q_k_and_v(tmp_path):
    record, rule = record_of("glm"), CASES["glm"]
    tensors = random_tensors(record["tensors"])
    split = write(tmp_path, record["config"], tensors, rule)
    config = load_config(split)
    wanted = load_weights(split, config)
    for layer in range(record["config"]["num_hidden_layers"]):
        for kind in ("weight", "bias"):
            names = [f"model.layers.{layer}.self_attn.{one}_proj.{kind}" for one in "qkv"]
            rows = np.concatenate([tensors.pop(name) for name in names])
            tensors[f"model.layers.{layer}.attn_qkv.{kind}"] = rows
    packed = write(tmp_path, record["config"], tensors, rule)
    assert load_config(packed) == config
    for name, weight in load_weights(packed, config).items():
        np.testing.assert_array_equal(weight.data, wanted[name].data, err_msg=name)


def test_the_scale_of_the_largest_gemma2(tmp_path):
    values = record_of("gemma2")["config"]
    tensors = random_tensors(record_of("gemma2")["tensors"])
    file = write(tmp_path, values, tensors, CASES["gemma2"], block_count=46)
    assert load_config(file).attn_scale == (64 / 4) ** -0.5
