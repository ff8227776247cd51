"""Every key of .gguf metadata known to change the result is read, or refused by name and value."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

import engine
from engine.checks import warn_once
from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.loading.gguf_config import gguf_config
from engine.loading.gguf_keys import FILE_KEYS, INERT_KEYS, MODEL_KEYS
from engine.loading.model_config import load_config
from engine.loading.pooling import default_pooling
from engine.models.registry import FAMILIES
from engine.text.gguf_vocab import UNSUPPORTED_KEYS
from tests.loading.tiny import llama_gguf

ARCHS = sorted(family.gguf_arch for family in FAMILIES.values() if family.gguf_arch)
# Keys read by `engine.text.gguf_vocab`, and those that name tokens for uses the engine lacks.
TOKENIZER_KEYS = {
    *("model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_eos_token"),
    *("add_space_prefix", "bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id"),
    *("unknown_token_id", "seperator_token_id", "padding_token_id", "mask_token_id"),
    *("token_type_count", "fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id"),
    *("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id", "prefix_token_id"),
    *("suffix_token_id", "middle_token_id"),
}
OTHER_KEYS = {
    *("general.architecture", "general.alignment", "general.file_type"),
    *("split.no", "split.count", "split.tensors.count"),  # test_gguf_parts.py
    *("tokenizer.chat_template", "tokenizer.chat_templates", "tokenizer.chat_template.{name}"),
    *("tokenizer.huggingface.json", "tokenizer.rwkv.world"),  # beside the vocabulary, unread
}
# Descriptions of the file, and of how it was made.
NOTES = ("general.", "adapter.", "imatrix.", "clip.")

# A value that no model has by default, where 3 is none.
VALUES = {
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.causal": False,
    "attention.scale": 0.3,
    "attention.sliding_window": 7,
    "attention.sliding_window_pattern": [False, True, True, False],
    "attention.key_length": 18,
    "attention.layer_norm_epsilon": 0.5,
    "attention.layer_norm_rms_epsilon": 0.5,
    "expert_weights_norm": False,
    "expert_gating_func": 2,
    "rope.dimension_count": 10,
    "rope.dimension_sections": [4, 4, 0, 0],
    "rope.scaling.type": "yarn",
    "rope.scaling.yarn_ext_factor": 0.5,
    "tensor_data_layout": "another",
    "vocab_size": 33,
}
# Of those that are read, what else the file must hold for them to have a meaning.
BESIDE = {
    "attention.sliding_window_pattern": {"attention.sliding_window": 7},
    "rope.scaling.type": {"rope.scaling.factor": 4.0},
    "feed_forward_length": {"expert_feed_forward_length": 64},
    "expert_count": {"expert_used_count": 2},
}


def values_of(arch: str) -> dict:
    """Metadata of a tiny model; its counts of experts if the architecture has them."""
    family = next(one for one in FAMILIES.values() if one.gguf_arch == arch)
    keys = {
        "block_count": 4, "context_length": 128, "embedding_length": 32, "feed_forward_length": 64,
        "attention.head_count": 2, "attention.head_count_kv": 1, "rope.freq_base": 100.0,
        "attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5,
    }  # fmt: skip
    if family.windows == "pattern":
        keys["attention.sliding_window"] = 16
    if family.moe is not None:
        keys |= {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64}
    return keys


def config_of(arch: str, keys: dict, **whole) -> ModelConfig:
    metadata = {"general.architecture": arch, **whole}
    metadata |= {f"{arch}.{key}": value for key, value in keys.items()}
    embed = SimpleNamespace(format=SimpleNamespace(name="F32"), shape=(40, 32))
    tensors = {"token_embd.weight": embed, "blk.0.ffn_norm.weight": None}
    return gguf_config(SimpleNamespace(path=Path("m.gguf"), metadata=metadata, tensors=tensors))


def keys_of_the_package() -> set[str]:
    """Every key that the `gguf` package can write."""
    found: set[str] = set()
    pending = [gguf.constants.Keys]
    while pending:
        for name, value in vars(pending.pop()).items():
            if isinstance(value, type):
                pending.append(value)
            elif isinstance(value, str) and not name.startswith("_"):
                found.add(value)
    return found


def test_every_key_of_the_format_is_on_a_list():
    missing = set()
    for key in keys_of_the_package():
        own = key.removeprefix("{arch}.")
        below = key.removeprefix("tokenizer.ggml.")
        listed = own in MODEL_KEYS or own in INERT_KEYS or key in FILE_KEYS or key in OTHER_KEYS
        listed |= below in TOKENIZER_KEYS or below in UNSUPPORTED_KEYS or key.startswith(NOTES)
        if "{dense}" in key:
            listed |= own.replace("{dense}", "dense_2") in MODEL_KEYS
        if not listed:
            missing.add(key)
    assert not missing


def outcome(arch: str, keys: dict) -> ModelConfig | str:
    """The configuration, or the message that refuses it."""
    try:
        return config_of(arch, keys)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_key_changes_the_configuration_or_is_refused(arch):
    keys = values_of(arch)
    plain = config_of(arch, keys)
    of_images = ("rope.dimension_sections", "n_deepstack_layers")
    has_images = any(family.mrope for family in FAMILIES.values() if family.gguf_arch == arch)
    for key in MODEL_KEYS:
        if has_images and key in of_images:
            assert config_of(arch, {**keys, key: VALUES.get(key, 3)}) == plain
            continue
        beside = BESIDE.get(key, {})
        value = VALUES.get(key, 3)
        if key == "use_parallel_residual":
            value = not plain.parallel
        elif key == "expert_weights_norm" and plain.moe is not None:
            value = not plain.moe.renormalize
        elif key == "expert_gating_func" and plain.moe is not None:
            value = 1 if plain.moe.score == "sigmoid" else 2
        got = outcome(arch, {**keys, **beside, key: value})
        if isinstance(got, str):
            given = {**beside, key: value}
            assert any(f"{arch}.{one} must be" in got for one in given), (key, got)
            assert any(str(one) in got for one in given.values()), (key, got)
        else:
            assert got != (outcome(arch, {**keys, **beside}) if beside else plain), key


def test_keys_of_the_file_are_refused():
    keys = values_of("llama")
    for key in FILE_KEYS:
        with pytest.raises(ConfigError, match=rf"{key} must be .*got 3"):
            config_of("llama", keys, **{key: 3})
    neutral = {"general.type": "model", "general.quantization_version": 2}
    assert config_of("llama", keys, **neutral) == config_of("llama", keys)


def test_keys_that_change_nothing_are_allowed():
    keys = values_of("llama")
    for key in INERT_KEYS:
        if key != "attention.layer_norm_rms_epsilon":
            given = {**keys, key: VALUES.get(key, 3)}
            assert config_of("llama", given) == config_of("llama", keys), key
    neutral = {
        "rope.scaling.type": "none", "attention.value_length": 16, "attention.key_length_swa": 16,
        "attention.scale": float(np.float32(16**-0.5)), "expert_gating_func": 1, "logit_scale": 1.0,
        "use_parallel_residual": False, "tensor_data_layout": "Meta AI original pth",
        "rope.dimension_sections": [0, 0, 0, 0], "expert_used_count": 0, "rope.scale_linear": 1.0,
    }  # fmt: skip
    assert config_of("llama", {**keys, **neutral}) == config_of("llama", keys)


def test_an_unknown_key_is_a_warning(caplog):
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "engine"):
        config_of("llama", {**values_of("llama"), "rope.new_thing": 2})
    assert "llama.rope.new_thing is unknown and not read" in caplog.text


@pytest.mark.parametrize(
    ("kind", "pooling"), [(None, "last"), (0, "last"), (1, "mean"), (2, None), (3, "last")]
)
def test_the_pooling_of_a_file_is_the_default(caplog, tmp_path, kind, pooling):
    warn_once.cache_clear()
    values = values_of("llama") | ({} if kind is None else {"pooling_type": kind})
    assert config_of("llama", values) == config_of("llama", values_of("llama"))
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    if kind is not None:
        writer.add_uint32("llama.pooling_type", kind)
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert default_pooling(path) == (pooling or "last")
    assert ("is not supported; got 2" in caplog.text) == (pooling is None)


def test_a_missing_epsilon_is_not_guessed():
    keys = values_of("llama")
    del keys["attention.layer_norm_rms_epsilon"]
    with pytest.raises(ConfigError, match=r"layer_norm_rms_epsilon must be a number; got nothing"):
        config_of("llama", keys)


@pytest.mark.parametrize("arch", ["glm4", "stablelm"])
def test_without_a_count_whole_heads_are_rotated(arch):
    """As llama.cpp reads it; half or a quarter of them is config.json's default."""
    assert config_of(arch, values_of(arch)).rope.rotary_dim == 16
    assert config_of(arch, values_of(arch)).num_kv_heads == 1


def test_windows_by_number_and_by_layer():
    keys = {**values_of("llama"), "attention.sliding_window": 7}
    assert config_of("llama", keys).layer_windows == (7, 7, 7, 7)
    for pattern, windows in [
        (2, (7, 0, 7, 0)), (0, (7, 7, 7, 7)), (1, (0, 0, 0, 0)),
        ([True, False, False, True], (7, 0, 0, 7)), ([1, 0, 0, 1], (7, 0, 0, 7)),
    ]:  # fmt: skip
        given = {**keys, "attention.sliding_window_pattern": pattern}
        assert config_of("llama", given).layer_windows == windows
    with pytest.raises(ConfigError, match=r"sliding_window_pattern must be .*got \[True, False\]"):
        config_of("llama", {**keys, "attention.sliding_window_pattern": [True, False]})


def logits(path: Path, config: ModelConfig | None = None) -> np.ndarray:
    model = engine.load(path, device="cpu", config=config)
    return model.step([[5, 9, 3, 17, 30, 2, 11, 8]], model.new_cache(1, 8), logits="all")


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.rope.scale_linear": 4.0},
        {"llama.rope.scaling.factor": 4.0},
        {"llama.rope.scaling.type": "linear", "llama.rope.scale_linear": 4.0},
        {"llama.rope.scaling.factor": 4.0, "llama.rope.scale_linear": 0.0},
    ],
)
def test_a_factor_without_a_type_divides_the_positions(tmp_path, metadata):
    plain = llama_gguf(tmp_path / "plain.gguf")
    config = load_config(plain)
    scaled = replace(config, rope=replace(config.rope, scaling="linear", factor=4.0))
    got = logits(llama_gguf(tmp_path / "m.gguf", metadata))
    np.testing.assert_array_equal(got, logits(plain, scaled))
    assert np.abs(got - logits(plain)).max() > 0.1 * got.std()


def test_two_factors_that_disagree_are_refused(tmp_path):
    metadata = {"llama.rope.scaling.factor": 4.0, "llama.rope.scale_linear": 2.0}
    with pytest.raises(ConfigError, match=r"rope\.scale_linear must be 4\.0, as .*; got 2\.0"):
        load_config(llama_gguf(tmp_path / "m.gguf", metadata))


def test_the_factor_on_cos_and_sin(tmp_path):
    """Alone, and beyond YaRN's own; OLMo 3's converter writes YaRN's own under the same key."""
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    key = "llama.rope.scaling.attn_factor"
    own = 1 + 0.1 * np.log(4)
    cases = [({key: 1.5}, 1.5), ({**yarn, key: 1.5}, 1.5 * own), ({**yarn, key: float(own)}, None)]
    for i, (metadata, wanted) in enumerate(cases):
        factor = load_config(llama_gguf(tmp_path / f"{i}.gguf", metadata)).rope.attention_factor
        assert factor == (wanted if wanted is None else pytest.approx(wanted, rel=1e-6))
    plain = llama_gguf(tmp_path / "plain.gguf")
    config = load_config(plain)
    wanted = logits(plain, replace(config, rope=replace(config.rope, attention_factor=1.5)))
    np.testing.assert_array_equal(logits(tmp_path / "0.gguf"), wanted)
    assert np.abs(wanted - logits(plain)).max() > 0.1 * wanted.std()


def test_yarn_without_a_factor_scales_nothing(tmp_path):
    """As llama.cpp reads it; config.json's default is the quotient of both lengths."""
    metadata = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.original_context_length": 32,
    }
    got = logits(llama_gguf(tmp_path / "m.gguf", metadata))
    np.testing.assert_allclose(got, logits(llama_gguf(tmp_path / "plain.gguf")), rtol=1e-5)


def test_sizes_may_be_given_for_each_layer():
    keys = values_of("llama")
    names = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")
    assert config_of("llama", {**keys, **{key: [keys[key]] * 4 for key in names}}) == config_of(
        "llama", keys
    )
    with pytest.raises(ConfigError, match=r"head_count_kv must be .*got \[1, 1, 2, 1\]"):
        config_of("llama", {**keys, "attention.head_count_kv": [1, 1, 2, 1]})


def test_ollama_names_the_bases_of_gemma_3_otherwise():
    keys = values_of("gemma3")
    del keys["rope.freq_base"]
    named = {"rope.global.freq_base": 500.0, "rope.local.freq_base": 70.0}
    config = config_of("gemma3", {**keys, **named})
    assert config.rope_local is not None
    assert (config.rope.theta, config.rope_local.theta) == (500.0, 70.0)
