"""Values that transformers and vLLM load and that change no result: read, or ignored by warning."""

from __future__ import annotations

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import engine
from engine.checks import warn_once
from engine.errors import ConfigError, WeightsError
from engine.loading.generation_config import generation_config, sampling_defaults
from engine.loading.model_config import load_config
from engine.sampling_params import SamplingParams
from engine.tasks.embeddings import embed
from tests.loading.tiny import llama_gguf
from tests.server.test_serve import SMALL, _body, _post, _tokenizer, serving


@pytest.fixture(autouse=True)
def _warn_again():
    warn_once.cache_clear()


def edit(path: Path, **changes) -> None:
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values, **changes}))


def logits(path: Path) -> np.ndarray:
    model = engine.load(path, device="cpu")
    return model.step([[5, 9, 3, 17]], model.new_cache(1, 8), logits="all")


HARMLESS = [
    {"torch_dtype": "auto"},
    {"dtype": "auto", "torch_dtype": None},
    {"torch_dtype": "float"},
    {"eos_token_id": 400},
    {"eos_token_id": [2, 400, -1]},
    {"bos_token_id": 400},
    {"bos_token_id": -1},
    {"pad_token_id": 4_000_000_000},
    {"pad_token_id": -1},
    {"quantization_config": None},
    {"quantization_config": {}},
    {"compression_config": {}},
    {"rope_theta": 10000},
    {"rope_scaling": None, "rope_parameters": None},
    {"sliding_window": None, "layer_types": None},
    {"max_position_embeddings": 128.0},
    {"vocab_size": 40.0},
    {"architectures": None},
    {"num_key_value_heads": 2.0, "head_dim": None},
]


@pytest.mark.parametrize("changes", HARMLESS, ids=json.dumps)
def test_a_config_loads_as_the_plain_one(make_model, changes):
    path, _, _ = make_model("llama")
    wanted = logits(path)
    edit(path / "config.json", **changes)
    np.testing.assert_array_equal(logits(path), wanted)


@pytest.mark.parametrize(
    ("dtype", "name"), [(ml_dtypes.bfloat16, "bfloat16"), (np.float16, "float16")]
)
@pytest.mark.parametrize(
    "changes", [{"torch_dtype": "auto"}, {"torch_dtype": None}, {}], ids=json.dumps
)
def test_an_automatic_dtype_is_that_of_the_weights(make_model, dtype, name, changes):
    """So is an absent one, as in transformers and vLLM."""
    path, _, _ = make_model("llama", dtype, **changes)
    assert load_config(path).dtype == name
    assert load_config(path) == load_config(path)
    (path / "model.safetensors").unlink()
    assert load_config(path).dtype == "float32"  # random weights need no files


def test_ids_outside_the_vocabulary_are_named(make_model, caplog):
    path, _, _ = make_model("llama", eos_token_id=[2, 400], bos_token_id=41)
    config = load_config(path)
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), None)
    assert "eos_token_id has ids that are ignored, since the vocabulary has 40" in caplog.text
    assert "got [2, 400]" in caplog.text and "got 41" in caplog.text


def test_generation_config_may_name_ids_outside_the_vocabulary(make_model):
    path, _, _ = make_model("llama")
    edit(path / "generation_config.json", eos_token_id=[3, 400])
    assert load_config(path).eos_token_ids == (3,)
    (path / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    edit(path / "config.json", eos_token_id=-1)
    edit(path / "generation_config.json", eos_token_id=1 << 40)
    model = engine.load(path, device="cpu")
    assert model.tokenizer.encode("ab") and model.eos_token_ids == ()


MILD = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
SAMPLING = [
    ({"top_k": -1}, {"top_k": -1}),
    ({"top_k": 0}, {"top_k": 0}),
    ({"top_k": 50.0}, {"top_k": 50}),
    ({"top_k": None, "temperature": None, "do_sample": None, "eos_token_id": None}, {}),
    ({"temperature": 0, "do_sample": False}, {"temperature": 0.0}),
    ({"temperature": 0.0, "do_sample": True}, {"temperature": 0.0}),
    ({"temperature": 0.7, "do_sample": False}, {"temperature": 0.0}),
    ({"max_length": 4096, "transformers_version": "4.40.0", "_from_model_config": True}, {}),
    ({"max_new_tokens": 10**9}, {"max_tokens": 1 << 24}),
    ({"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None}, {}),
]


@pytest.mark.parametrize(("values", "wanted"), SAMPLING, ids=str)
def test_sampling_defaults(tmp_path, caplog, values, wanted):
    edit(tmp_path / "generation_config.json", **values)
    found = sampling_defaults(tmp_path)
    assert found.is_own == bool(wanted.keys() - {"max_tokens"})
    assert found.values == (wanted if found.is_own else wanted | MILD)
    assert found.params(seed=5) == SamplingParams(**found.values, seed=5)
    assert not caplog.text


def test_a_top_p_of_0_keeps_the_best_token(tmp_path):
    edit(tmp_path / "generation_config.json", top_p=0.0)
    assert 0 < sampling_defaults(tmp_path).values["top_p"] < 1e-6


@pytest.mark.parametrize(
    "values",
    [{"num_beams": 4}, {"suppress_tokens": [7]}, {"typical_p": 0.5}, {"min_new_tokens": 3}],
)
def test_unsupported_sampling_defaults_are_named(tmp_path, caplog, values):
    edit(tmp_path / "generation_config.json", temperature=0.5, **values)
    assert generation_config(tmp_path) == {"temperature": 0.5}
    (key,) = values
    assert f"{key} is not applied" in caplog.text and f"got {values[key]}" in caplog.text


def test_sampling_defaults_of_a_gguf(tmp_path, caplog):
    names = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.1}
    metadata = {f"general.sampling.{key}": value for key, value in names.items()}
    found = generation_config(llama_gguf(tmp_path / "m.gguf", metadata))
    assert found.pop("repetition_penalty") == names.pop("penalty_repeat")
    assert found.pop("temperature") == names.pop("temp")
    assert found == names and not caplog.text
    generation_config(llama_gguf(tmp_path / "n.gguf", {"general.sampling.mirostat": 2}))
    assert "general.sampling.mirostat is not applied" in caplog.text and "got 2" in caplog.text


@pytest.mark.parametrize(
    ("folder", "wanted"),
    [
        ("SmolLM2-1.7B-Instruct", {"temperature": 0.2, "top_p": 0.9}),
        ("Meta-Llama-3-8B", {"temperature": 0.6, "top_p": 0.9}),
        ("models--deepseek-ai--DeepSeek-R1-Distill-Llama-8B/snapshots/1f", {"temperature": 0.6}),
        ("Qwen2.5 7B_Instruct", {"repetition_penalty": 1.05}),
        ("Qwen2x5", {"min_p": 0.05}),
        ("TinyLlama-3t", {"min_p": 0.05}),
        ("smollm2/other", {"min_p": 0.05}),
    ],
)
def test_a_model_whose_files_name_no_sampling_gets_what_its_name_recommends(
    tmp_path, folder, wanted
):
    path = tmp_path / folder
    path.mkdir(parents=True)
    edit(path / "generation_config.json", do_sample=True, eos_token_id=2)
    found = sampling_defaults(path)
    assert wanted.items() <= found.values.items()
    assert found.is_own == ("min_p" not in wanted)
    edit(path / "generation_config.json", top_k=7)
    assert sampling_defaults(path).values == {"top_k": 7}


def test_a_gguf_is_known_by_its_metadata(tmp_path):
    path = llama_gguf(tmp_path / "m.gguf", {"general.basename": "Qwen3", "general.name": 5})
    assert sampling_defaults(path).values == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    path = llama_gguf(tmp_path / "gemma-3-1b.gguf", {})
    assert sampling_defaults(path).values["top_k"] == 64


def test_an_index_may_name_a_tensor_that_the_model_does_not_need(make_model, caplog):
    path, _, _ = make_model("llama")
    wanted = logits(path)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    save_file(tensors, path / "model-00001-of-00001.safetensors")
    names = dict.fromkeys([*tensors, "model.rotary.absent"], "model-00001-of-00001.safetensors")
    edit(path / "model.safetensors.index.json", weight_map=names)
    np.testing.assert_array_equal(logits(path), wanted)
    assert "model.rotary.absent" in caplog.text
    tensors.pop("model.norm.weight")
    save_file(tensors, path / "model-00001-of-00001.safetensors")
    with pytest.raises(WeightsError, match=r"a tensor is missing: model\.norm\.weight"):
        logits(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch_dtype": "float64"}, "torch_dtype must be one of .*auto; got 'float64'"),
        ({"eos_token_id": "2"}, "eos_token_id must be token ids"),
        ({"vocab_size": 40.5}, "vocab_size must be a whole number .*got 40.5"),
        ({"quantization_config": {"bits": 4}}, "quant_method must be"),
    ],
)
def test_what_changes_the_result_is_still_refused(make_model, changes, message):
    path, _, _ = make_model("llama")
    edit(path / "config.json", **changes)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_a_server_of_such_files(make_model):
    path, _, _ = make_model("llama", torch_dtype="auto", eos_token_id=[2, 400], vocab_size=128)
    edit(path / "generation_config.json", top_k=-1, top_p=None, temperature=0.25)
    (path / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    drafts = json.dumps({"method": "ngram", "prompt_lookup_max": 2})
    options = (*SMALL, "--served-model-name", "tiny", "--speculative-config", drafts)
    with serving(str(path), *options) as server:
        answer = json.loads(_post(server, _body(4, temperature=None)).read())
    assert answer["usage"]["completion_tokens"] == 4, answer


def test_requests_to_a_model_whose_files_name_ids_outside_the_vocabulary(make_model):
    """Where ids are indices: the ids that may not come yet, and those that end a structure."""
    path, _, _ = make_model("llama", eos_token_id=[2, 400], bos_token_id=400, vocab_size=128)
    edit(path / "generation_config.json", eos_token_id=[2, 400])
    (path / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    llm = engine.LLM(path, device="cpu", num_blocks=32)
    assert llm.llm_engine.model.eos_token_ids == (2,)
    plain = SamplingParams(temperature=0.0, max_tokens=6, min_tokens=4)
    choice = SamplingParams(temperature=0.0, max_tokens=6, structured={"choice": ["ab", "cd"]})
    first, second = llm.generate(["ab", "xyz"], [plain, choice])
    assert 4 <= len(first.outputs[0].token_ids) <= 6
    assert second.outputs[0].text in ("ab", "cd")


def test_an_adapter_beside_the_model_is_named(make_model, caplog):
    """transformers would apply it."""
    path, _, _ = make_model("llama")
    load_config(path)
    assert not caplog.text
    edit(path / "adapter_config.json", peft_type="LORA")
    load_config(path)
    assert "adapter_config.json is not read" in caplog.text


@pytest.mark.parametrize("form", ["flags", "name"])
@pytest.mark.parametrize(
    ("name", "flag", "pooling"),
    [
        ("lasttoken", "lasttoken", "last"),
        ("mean", "mean_tokens", "mean"),
        ("cls", "cls_token", None),  # not supported
    ],
)
def test_the_pooling_of_a_folder_is_the_default(make_model, caplog, form, name, flag, pooling):
    path, _, _ = make_model("llama")
    (path / "1_Pooling").mkdir()
    flags = {f"pooling_mode_{one}": one == flag for one in ("mean_tokens", "lasttoken", flag)}
    values = flags if form == "flags" else {"pooling_mode": name}
    values |= {"word_embedding_dimension": 32, "include_prompt": True}
    (path / "1_Pooling/config.json").write_text(json.dumps(values))
    model = engine.load(path, device="cpu", dtype="float32", progress=False)
    [found] = embed(model, [[5, 6, 7]])
    means, lasts = (embed(model, [[5, 6, 7]], kind)[0] for kind in ("mean", "last"))
    assert np.array_equal(found, means if pooling == "mean" else lasts)
    assert not np.array_equal(means, lasts)
    message = f"1_Pooling/config.json: embeddings pool the last token unless .*; got \\['{name}"
    assert bool(re.search(message, caplog.text)) == (pooling is None)


def test_a_layer_on_the_embeddings_is_named(make_model, caplog):
    path, _, _ = make_model("llama")
    (path / "2_Dense").mkdir()
    (path / "2_Dense/config.json").write_text("{}")
    load_config(path)
    assert "2_Dense/config.json: is not read: embeddings are used without" in caplog.text


@pytest.mark.parametrize("is_sharded", [False, True])
def test_names_without_the_model_in_front(make_model, is_sharded):
    """As models for embeddings are saved, which have no output layer of their own."""
    path, _, _ = make_model("llama")
    wanted = logits(path)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    name = "model-00001-of-00001.safetensors" if is_sharded else "model.safetensors"
    save_file(bare, path / name)
    if is_sharded:
        edit(path / "model.safetensors.index.json", weight_map=dict.fromkeys(bare, name))
    np.testing.assert_array_equal(logits(path), wanted)


def test_another_output_layer_is_not_tied(make_model, caplog):
    """transformers compares the stored matrices, whatever tie_word_embeddings says."""
    path, _, tensors = make_model("llama")
    tied = logits(path)
    embed = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embed.copy()}, path / "model.safetensors")
    assert load_config(path).tie_word_embeddings and not caplog.text
    np.testing.assert_array_equal(logits(path), tied)
    output = embed.copy()
    output[-1] *= 2
    save_file({**tensors, "lm_head.weight": output}, path / "model.safetensors")
    wanted = tied.copy()
    wanted[..., -1] *= 2
    np.testing.assert_allclose(logits(path), wanted, rtol=1e-6)
    assert "the output layer is not tied to the embedding" in caplog.text


@pytest.mark.parametrize("name", ["lm_head.qweight", "lm_head.weight_packed"])
def test_a_quantized_output_layer_beside_a_tied_config_is_named(make_model, caplog, name):
    path, _, tensors = make_model("llama")
    codes = {name: np.zeros((4, 4), np.int32)}
    save_file({**tensors, **codes}, path / "model.safetensors")
    assert load_config(path).tie_word_embeddings
    assert f"the quantized output layer ({name}) is not read" in caplog.text
