"""Shards: together they are the whole model, and each reads only its part of the file."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from engine.config import ModelConfig, MoeConfig
from engine.errors import ConfigError
from engine.loading.dummy import dummy_weights, take_shard
from engine.loading.gguf import GgufFile
from engine.loading.model_config import load_config
from engine.loading.safetensors import SafetensorsFile
from engine.loading.weight_memory import weight_bytes
from engine.loading.weight_table import shard_axis, weight_shapes
from engine.loading.weights import load_weights
from engine.weights import FORMATS, Shard, Weight, unpack_weight
from tests.loading.tiny import random_tensors, save_file

GOLDEN = Path(__file__).parents[1] / "golden" / "models"
FAMILIES = ("llama", "qwen2", "qwen3", "phi3", "gemma3_text")
SIZES = {
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "hidden_size": 96,
    "intermediate_size": 48,
    "vocab_size": 50,  # no multiple of 3 or 4
}


def test_norms_of_all_heads_are_whole():
    config = ModelConfig("olmo2", 64, 32, 1, 4, 4, 8, 48, 128, qk_norm=True, whole_qk_norm=True)
    shapes = weight_shapes(config, Shard(0, 2))
    assert shapes["layers.0.qkv"] == (48, 32)
    assert shapes["layers.0.q_norm"] == shapes["layers.0.k_norm"] == (32,)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    "case",
    [
        *("llama", "gpt_oss", "glm4_moe", "phi", "olmo2", "qwen3_next", "qwen3_5_text"),
        *("kimi_linear", "bailing_hybrid", "bailing_moe_v2_5", "bailing_moe_linear"),
        *("gpt2", "gpt_bigcode", "opt"),
    ],
)
def test_shards_by_output_add_up_to_the_whole(tmp_path, case, count):
    """No matrix is divided by its input features; what is read is what `take_shard` takes."""
    record = json.loads((GOLDEN / f"{case}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(record["config"]))
    save_file(random_tensors(record["tensors"]), tmp_path / "model.safetensors")
    config = load_config(tmp_path)
    whole = load_weights(tmp_path, config)
    for by_output, experts in product((True, False), (False, True)):
        shards = [Shard(index, count, by_output, experts) for index in range(count)]
        try:
            parts = [load_weights(tmp_path, config, shard=shard) for shard in shards]
        except ConfigError as error:
            assert count == 4 and "must be a multiple of 4 shards" in str(error)
            continue
        for name, weight in whole.items():
            kind = name.rpartition(".")[2]
            for shard, part in zip(shards, parts, strict=True):
                taken = take_shard(weight, name, config, shard)
                assert taken.shape == part[name].shape == weight_shapes(config, shard)[name]
                np.testing.assert_array_equal(taken.data, part[name].data, err_msg=name)
            if by_output and kind in ("o", "down", "o_bias", "down_bias", "shared_down"):
                joined = np.concatenate([part[name].data for part in parts])
                np.testing.assert_array_equal(joined, weight.data, err_msg=name)
            if experts and kind.startswith("experts_"):
                joined = np.concatenate([part[name].data for part in parts])
                np.testing.assert_array_equal(joined, weight.data, err_msg=name)
            elif by_output and kind in ("experts_down", "experts_down_bias"):
                joined = np.concatenate([part[name].data for part in parts], axis=1)
                np.testing.assert_array_equal(joined, weight.data, err_msg=name)


@pytest.mark.parametrize(
    "name", ["fp8", "fp8_block", "int8", "mxfp4", "int4_g32_zp", "int8_g64", "q5_1", "q6_k"]
)
def test_shards_of_random_quantized_weights(name):
    """They have the numbers of the whole: codes are cut anywhere, as all scales are equal."""
    # A rank's columns end within groups, its rows within tiles; experts of 24 rows have no tiles.
    experts = MoeConfig(num_experts=3, top_k=2, intermediate_size=48, sparse_layers=(True, False))
    config = ModelConfig("mixtral", 50, 96, 2, 4, 2, 24, 80, 128, moe=experts)
    form = FORMATS[name]
    whole = dummy_weights(config, quantization=form)
    numbers = {name: Weight.dense(unpack_weight(weight)) for name, weight in whole.items()}
    shards = (
        Shard(1, 2),
        Shard(3, 4),
        Shard(1, 4, by_output=True),
        Shard(1, 2, expert_parallel=True),
    )
    for shard in shards:
        for name, part in dummy_weights(config, quantization=form, shard=shard).items():
            assert part.shape == weight_shapes(config, shard)[name]
            want, got = take_shard(numbers[name], name, config, shard).data, unpack_weight(part)
            if name == "lm_head":  # whose padding has no meaning
                first, last, _ = shard.cut_padded(50)
                got, want = got[: last - first], want[: last - first]
            np.testing.assert_array_equal(got, want, err_msg=name)


def test_an_mlp_without_gate_and_a_bias_of_the_logits_are_divided(tmp_path):
    record = json.loads((GOLDEN / "phi.json").read_text())
    tensors = random_tensors(record["tensors"])
    (tmp_path / "config.json").write_text(json.dumps(record["config"]))
    save_file(tensors, tmp_path / "model.safetensors")
    config = load_config(tmp_path)
    whole = load_weights(tmp_path, config)
    parts = [load_weights(tmp_path, config, shard=Shard(index, 2)) for index in range(2)]
    for name, axis in (("layers.1.up", 0), ("layers.1.up_bias", 0), ("layers.1.down", 1)):
        joined = np.concatenate([part[name].data for part in parts], axis)
        np.testing.assert_array_equal(joined, whole[name].data)
    bias = np.concatenate([part["lm_head_bias"].data for part in parts])
    np.testing.assert_array_equal(bias, [*whole["lm_head_bias"].data, 0])  # 127 rows, padded


def _rows_of(config: ModelConfig, kind: str) -> list[int]:
    """Return the number of rows of each part of a fused weight, in order."""
    q, k = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return [q, k, k] if kind.startswith("qkv") else [config.intermediate_size] * 2


def _joined(config, name, weights):
    """Return the whole weight, assembled by hand from those of all shards."""
    kind, count = name.rpartition(".")[2], len(weights)
    arrays = [weight.data for weight in weights]
    if kind in ("embed", "lm_head"):
        whole = np.concatenate(arrays)
        assert not whole[config.vocab_size :].any(), "padding is zeros"
        return whole[: config.vocab_size]
    if kind.removesuffix("_bias") in ("qkv", "gate_up"):
        parts = []
        for index, rows in enumerate(_rows_of(config, kind)):
            copies = max(1, count // config.num_kv_heads) if kind.startswith("qkv") and index else 1
            sizes = [size * copies // count for size in _rows_of(config, kind)]
            if kind.startswith("qkv"):
                sizes[0] = _rows_of(config, kind)[0] // count
                kv = _rows_of(config, kind)[1]
                sizes[1] = sizes[2] = max(kv // count, config.head_dim)
            start = sum(sizes[:index])
            pieces = [array[start : start + sizes[index]] for array in arrays]
            for first in range(0, count, copies):
                for other in pieces[first : first + copies]:
                    np.testing.assert_array_equal(other, pieces[first])
            parts.append(np.concatenate(pieces[::copies]))
            assert len(parts[-1]) == rows
        return np.concatenate(parts)
    if kind in ("o", "down"):
        return np.concatenate(arrays, axis=1)
    for array in arrays:
        np.testing.assert_array_equal(array, arrays[0])
    return arrays[0]


@pytest.mark.parametrize("count", [2, 3, 4, 12])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_shards_add_up_to_the_whole(make_model, family, count):
    sizes = SIZES | ({"num_key_value_heads": 3} if count == 3 else {})
    path, _, _ = make_model(family, **sizes)
    config = load_config(path)
    whole = load_weights(path, config)
    shards = [load_weights(path, config, shard=Shard(index, count)) for index in range(count)]
    for index, shard in enumerate(shards):
        assert {n: w.shape for n, w in shard.items()} == weight_shapes(config, Shard(index, count))
        distinct = {id(weight): weight.num_bytes for weight in shard.values()}
        assert sum(distinct.values()) == weight_bytes(config, "float32", Shard(index, count))
        for name, weight in shard.items():
            assert weight.shard == Shard(index, count)
            assert (
                weight.axis == shard_axis(name.rpartition(".")[2])
                and weight.data.flags.c_contiguous
            )
    for name, weight in whole.items():
        got = _joined(config, name, [shard[name] for shard in shards])
        np.testing.assert_array_equal(got, weight.data, err_msg=name)


def test_a_shard_reads_only_its_part_of_the_file(make_model, monkeypatch):
    path, _, _ = make_model("qwen2", **SIZES)
    config = load_config(path)
    read, seen = SafetensorsFile.read, []

    def counted(self, *arguments):
        rows = read(self, *arguments)
        seen.append(rows.nbytes)
        return rows

    monkeypatch.setattr(SafetensorsFile, "read", counted)
    for count in (1, 2, 4):
        for index in range(count):
            seen.clear()
            shard = Shard(index, count)
            weights = load_weights(path, config, shard=shard)
            first, last, rows = shard.cut_padded(config.vocab_size)
            padding = (rows - (last - first)) * config.hidden_size * 4
            distinct = {id(weight): weight.num_bytes for weight in weights.values()}
            num_tables = 1 if config.tie_word_embeddings else 2
            assert sum(seen) == sum(distinct.values()) - num_tables * padding


def test_only_the_blocks_of_a_ggufs_columns_are_decoded(smollm2):
    """SmolLM2's Q4_1 has blocks of 32: for columns 40 to 100, three blocks per row are decoded."""
    file = GgufFile(smollm2)
    whole = file.read("blk.0.ffn_up.weight", 5, 9)
    for columns in ((40, 100), (0, 32), (0, 576), (575, 576)):
        part = file.read("blk.0.ffn_up.weight", 5, 9, columns)
        np.testing.assert_array_equal(part, whole[:, slice(*columns)])


def test_shards_of_a_gguf_add_up_to_the_whole(smollm2):
    config = load_config(smollm2)
    whole = load_weights(smollm2, config)
    shards = [load_weights(smollm2, config, shard=Shard(index, 3)) for index in range(3)]
    for name in ("layers.7.qkv", "layers.7.o", "layers.7.down", "layers.7.gate_up", "embed"):
        got = _joined(config, name, [shard[name] for shard in shards])
        np.testing.assert_array_equal(got, whole[name].data, err_msg=name)


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (5, "num_attention_heads must be a multiple of 5 shards; got 12"),
        (8, "num_attention_heads must be a multiple of 8 shards; got 12"),
        (6, "num_key_value_heads must be a multiple of 6 shards; got 4"),
    ],
)
def test_a_model_that_cannot_be_divided(make_model, count, message):
    path, _, _ = make_model("llama", **SIZES)
    with pytest.raises(ConfigError, match=message):
        load_weights(path, load_config(path), shard=Shard(0, count))


@pytest.mark.parametrize(("index", "count"), [(2, 2), (-1, 2), (0, 0), (0.0, 1), (True, 2)])
def test_invalid_shards_are_refused(index, count):
    with pytest.raises(ConfigError, match="shard"):
        Shard(index, count)
