"""Models in .gguf files: their metadata becomes a configuration, their tensors fused arrays."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from engine.errors import ConfigError, WeightsError
from engine.loading.gguf import GgufFile
from engine.loading.model_config import load_config
from engine.loading.weights import load_weights
from engine.weights import unpack_weight

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text"]


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Order the rows of each head as llama.cpp's converter does: alternating between halves."""
    head = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.stack([head[:, 0], head[:, 1]], axis=2).reshape(rows.shape)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "model.layers.": "blk.", "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_up_proj": "ffn_up", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
NORMS = {
    "llama": {"post_attention_layernorm": "ffn_norm"},
    "gemma3_text": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}  # fmt: skip
ARCH = {"mistral": "llama", "gemma3_text": "gemma3"}


def write_gguf(
    path, config: dict, tensors: dict, quantize: Type | dict[str, Type] | None = None
) -> dict:
    """Convert a Hugging Face checkpoint as llama.cpp does; returns the values as stored.

    `quantize` is the type of all matrices, or the types by the tensors' kinds ("attn_q").
    """
    kind = config["model_type"]
    writer = gguf.GGUFWriter(path, ARCH.get(kind, kind))
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    if kind in ("mistral", "gemma3_text"):
        writer.add_sliding_window(16)
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    stored = {}
    for name, value in tensors.items():
        stored[name] = value
        new = name
        for old, short in {**GGUF_NAMES, **NORMS.get(kind, NORMS["llama"])}.items():
            new = new.replace(old, short)
        if kind == "gemma3_text" and "norm" in name:
            value = value + 1
        if kind in ("llama", "mistral") and ("q_proj" in name or "k_proj" in name):
            key = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            value = interleaved(value, config[key])
        kind_of = quantize
        if isinstance(quantize, dict):
            kind_of = quantize.get(new.removesuffix(".weight").split(".")[-1])
        if kind_of is None or value.ndim == 1:
            writer.add_tensor(new, value)
            continue
        writer.add_tensor(new, gguf.quantize(value, kind_of), raw_dtype=kind_of)
        stored[name] = gguf.dequantize(gguf.quantize(stored[name], kind_of), kind_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.mark.parametrize("quantize", [None, Type.Q8_0, Type.Q4_0, Type.Q4_1], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_of_every_family(tmp_path, tiny, family, quantize):
    values = tiny.config_of(family)
    tensors = tiny.random_tensors(tiny.tensor_shapes(values))
    stored = write_gguf(tmp_path / "m.gguf", values, tensors, quantize)
    config = load_config(tmp_path / "m.gguf")
    weights = load_weights(tmp_path / "m.gguf", config)
    wanted = tiny.fused(values, stored)
    assert weights.keys() == wanted.keys()
    assert any(config.layer_windows) == (family in ("mistral", "gemma3_text"))
    for name, value in wanted.items():
        atol = 3e-7 if family == "gemma3_text" and "norm" in name else 0  # (w + 1) - 1
        np.testing.assert_allclose(weights[name].data, value, rtol=0, atol=atol, err_msg=name)


# Types by tensor; v in another one than q and k, as llama.cpp's mixtures have it.
_MIXED = {
    "attn_q": Type.Q4_0, "attn_k": Type.Q4_0, "attn_v": Type.Q8_0, "attn_output": Type.Q5_0,
    "ffn_gate": Type.Q4_1, "ffn_up": Type.Q4_1, "ffn_down": Type.Q5_1, "token_embd": Type.Q8_0,
}  # fmt: skip


@pytest.mark.parametrize("kept", [False, True])
def test_blocks_of_a_gguf_are_kept(tmp_path, tiny, kept, monkeypatch):
    """Where they are computed with, as on CUDA; whatever the mixture, rows of q and k in order."""
    values = tiny.config_of("llama", tie_word_embeddings=True)
    tensors = tiny.random_tensors(tiny.tensor_shapes(values))
    stored = write_gguf(tmp_path / "m.gguf", values, tensors, _MIXED)
    monkeypatch.setattr(
        "engine.loading.weights._keeps", lambda device, dtype, **_: lambda name, form: kept
    )
    config = load_config(tmp_path / "m.gguf")
    made = load_weights(tmp_path / "m.gguf", config, keeps_formats=True)
    for name, value in tiny.fused(values, stored).items():
        np.testing.assert_array_equal(unpack_weight(made[name]), value, err_msg=name)
    names = {name: weight.format.name for name, weight in made.items()}
    if not kept:
        assert set(names.values()) == {"float32"}
        return
    assert names["layers.1.qkv"] == "stacked" and names["layers.1.gate_up"] == "q4_1"
    assert [part.format.name for part in made["layers.1.qkv"].parts] == ["q4_0", "q8_0"]
    assert names["lm_head"] == "q8_0" and names["embed"] == "float32"


def test_a_gguf_that_does_not_fit_its_metadata_is_refused(tmp_path, tiny):
    values = tiny.config_of("llama")
    tensors = tiny.random_tensors(tiny.tensor_shapes(values))
    write_gguf(tmp_path / "m.gguf", {**values, "intermediate_size": 96}, tensors)
    config = load_config(tmp_path / "m.gguf")
    with pytest.raises(
        WeightsError, match=r"'blk\.0\.ffn_down\.weight' must have shape \(32, 96\)"
    ):
        load_weights(tmp_path / "m.gguf", config)


def test_smollm2_is_read_as_the_package_reads_it(smollm2):
    config = load_config(smollm2)
    weights = load_weights(smollm2, config, dtype="float32")
    by_name = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2).tensors}

    def other(name):
        tensor = by_name[f"{name}.weight"]
        return gguf.dequantize(tensor.data, tensor.tensor_type)

    np.testing.assert_array_equal(weights["embed"].data, other("token_embd"))
    assert weights["lm_head"] is weights["embed"]
    np.testing.assert_array_equal(weights["layers.29.gate_up"].data[1536:], other("blk.29.ffn_up"))
    q = weights["layers.3.qkv"].data[:576]
    np.testing.assert_array_equal(interleaved(q, 9), other("blk.3.attn_q"))
    np.testing.assert_array_equal(weights["layers.3.qkv"].data[768:], other("blk.3.attn_v"))


def test_smollm2_opens_quickly_and_has_its_tokenizer(smollm2):
    metadata = GgufFile(smollm2).metadata
    assert len(metadata["tokenizer.ggml.tokens"]) == 49152
    assert metadata["tokenizer.ggml.pre"] == "smollm"
    assert metadata["tokenizer.chat_template"].startswith("{% for message in messages %}")


# Metadata to configuration.


@pytest.fixture
def write_metadata(tmp_path):
    """Write a .gguf with the keys of a tiny model, changed, and (nearly) no tensors."""

    def make(arch="llama", tensors=None, embed=True, **changes):
        keys = {
            "block_count": 2, "context_length": 128, "embedding_length": 32,
            "feed_forward_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2,
            "attention.layer_norm_rms_epsilon": 1e-6,
        }  # fmt: skip
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", arch)
        for key, value in {**keys, **changes}.items():
            key = key if key.startswith("tokenizer.") else f"{arch}.{key}"
            adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            if isinstance(value, list):
                writer.add_array(key, value)
            elif value is not None:
                adders[type(value)](key, value)
        if embed:
            writer.add_tensor("token_embd.weight", np.ones((40, 32), np.float16))
        for name, value in (tensors or {}).items():
            writer.add_tensor(name, np.asarray(value, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / "m.gguf"

    return make


def test_the_configuration_of_a_llama(write_metadata):
    config = load_config(
        write_metadata(**{
            "rope.freq_base": 5e5,
            "rope.dimension_count": 8,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.eot_token_id": 7,
            "tokenizer.ggml.padding_token_id": 0,
        })
    )  # fmt: skip
    assert (config.model_type, config.vocab_size, config.head_dim) == ("llama", 40, 8)
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (2, 7), 0)
    assert (config.rope.theta, config.rope.scaling, config.rope.rotary_dim) == (5e5, "default", 8)
    assert config.tie_word_embeddings and config.dtype == "float16"
    assert config.layer_windows == (0, 0)


def test_missing_token_ids_are_none(write_metadata):
    config = load_config(write_metadata())
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (None, (), None)


def llama3_factors(theta, dim, factor, low, high, original) -> np.ndarray:
    """Return the divisor of every frequency: 1 for high, `factor` for low ones, else a ramp."""
    factors = []
    for i in range(0, dim, 2):
        wave = 2 * math.pi * theta ** (i / dim)
        smooth = (original / wave - low) / (high - low)
        smooth = min(1.0, max(0.0, smooth))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_the_factors_of_llama3_are_read(write_metadata):
    factors = llama3_factors(5e5, 8, 8.0, 1.0, 4.0, 64)
    rope = load_config(
        write_metadata(tensors={"rope_freqs.weight": factors}, **{"rope.freq_base": 5e5})
    ).rope
    assert rope.scaling == "longrope" and rope.attention_factor == 1.0
    assert rope.short_factor == rope.long_factor == tuple(map(float, factors))
    assert rope.original_max_position == 128  # the whole length: there is one set of factors


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_linear_and_yarn_scaling(write_metadata, kind):
    keys = {
        "rope.scaling.type": kind,
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
    }
    config = load_config(write_metadata("qwen2", **keys))
    assert (config.rope.scaling, config.rope.factor) == (kind, 4.0)
    assert config.max_position_embeddings == 512
    assert config.qkv_bias


def test_phi3_longrope_partial_rotation_and_window(write_metadata):
    keys = {
        "rope.dimension_count": 4,
        "rope.scaling.original_context_length": 64,
        "rope.scaling.attn_factor": 1.19,
        "attention.sliding_window": 32,
    }
    factors = {"rope_factors_short.weight": [1.0, 2.0], "rope_factors_long.weight": [1.5, 3.0]}
    config = load_config(write_metadata("phi3", factors, **keys))
    assert (config.rope.scaling, config.rope.rotary_dim) == ("longrope", 4)
    assert (config.rope.short_factor, config.rope.long_factor) == ((1.0, 2.0), (1.5, 3.0))
    assert config.rope.attention_factor == np.float32(1.19)
    assert (config.rope.original_max_position, config.layer_windows) == (64, (32, 32))
    del factors["rope_factors_short.weight"]
    with pytest.raises(WeightsError, match=r"'rope_factors_short\.weight' is missing"):
        load_config(write_metadata("phi3", factors, **keys))


def test_gemma3_ropes_windows_and_scale(write_metadata):
    keys = {
        "attention.sliding_window": 16,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "rope.freq_base": 1e6,
        "block_count": 7,
    }
    config = load_config(write_metadata("gemma3", **keys))
    assert config.layer_windows == (16,) * 5 + (0, 16)
    assert (config.rope.theta, config.rope_local.theta) == (1e6, 1e4)
    assert config.attn_scale == 16**-0.5 and config.norm_weight_offset == 1.0
    largest = load_config(write_metadata("gemma3", **{**keys, "block_count": 62}))
    assert largest.attn_scale == 8**-0.5  # N / H
    local = load_config(write_metadata("gemma3", **keys, **{"rope.freq_base_swa": 5e4}))
    assert local.rope_local.theta == 5e4


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"arch": "mamba"}, ConfigError, "architecture must be one of .*, llama.*got 'mamba'"),
        ({"embed": False}, WeightsError, r"'token_embd\.weight' is missing"),
        ({"block_count": None}, ConfigError, r"llama\.block_count must be .*; got nothing"),
        ({"block_count": 10**9}, ConfigError, r"block_count must be .* 1024; got 1000000000"),
        ({"attention.head_count": 0}, ConfigError, r"llama\.attention\.head_count must be"),
        ({"attention.head_count": "4"}, ConfigError, r"llama\.attention\.head_count must be"),
        ({"attention.head_count": [4, 8]}, ConfigError, r"head_count must be .*got \[4, 8\]"),
        ({"attention.head_count_kv": 3}, ConfigError, r"head_count_kv must be a divisor of the 4"),
        ({"attention.key_length": 8, "attention.value_length": 4}, ConfigError, "value_length"),
        ({"embedding_length": 2.5}, ConfigError, r"llama\.embedding_length must be"),
        ({"context_length": 2**31}, ConfigError, r"llama\.context_length must be"),
        ({"rope.freq_base": float("nan")}, ConfigError, "freq_base must be .*got nan"),
        ({"rope.dimension_count": 4}, ConfigError, "dimension_count must be the head's 8 features"),
        ({"arch": "phi3", "rope.dimension_count": "4"}, ConfigError, "dimension_count must be"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.5}, ConfigError, "factor must"),
        ({"rope.scaling.type": "odd"}, ConfigError, r"rope\.scaling\.type must be one of"),
        ({"expert_count": 8}, ConfigError, r"llama\.expert_used_count must be"),
        ({"leading_dense_block_count": 1}, ConfigError, r"leading_dense_block_count must be 0"),
        ({"attention.scale": 0.5}, ConfigError, r"llama\.attention\.scale must be 0 .*got 0.5"),
        ({"tokenizer.ggml.eos_token_id": "2"}, ConfigError, "eos_token_id.* must be token ids"),
        ({"tensors": {"rope_freqs.weight": [0.0] * 4}}, ConfigError, "short_factor must be 4"),
        ({"tensors": {"rope_freqs.weight": [1.0] * 3}}, ConfigError, "short_factor must be 4"),
        ({"tensors": {"rope_freqs.weight": [[1.0] * 4]}}, WeightsError, "must be a vector"),
    ],
)  # fmt: skip
def test_invalid_metadata_is_refused(write_metadata, changes, error, message):
    with pytest.raises(error, match=message):
        load_config(write_metadata(**changes))
