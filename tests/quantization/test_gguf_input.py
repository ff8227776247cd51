"""`engine quantize` of .gguf files: tensors, files of the folder, logits, memory, errors."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

import engine
from engine.checks import shown_size
from engine.cli import main
from engine.errors import ConfigError, WeightsError
from engine.loading.download import resolve_model
from engine.loading.gguf_checkpoint import GgufCheckpoint
from engine.loading.model_config import load_config
from engine.loading.weights import load_weights
from tests.loading import test_gguf_experts, test_gguf_families, tiny
from tests.loading.test_gguf_families import CASES, random_tensors, record_of
from tests.loading.test_gguf_model import FAMILIES, write_gguf

TEXT = "The capital of France is Paris. <|im_start|>user\nWhat is 2 + 2?<|im_end|>\n"


@pytest.fixture(scope="module")
def gguf():
    return resolve_model("smollm2").path


# ---- the checkpoint that a file stands for


@pytest.mark.parametrize("quantize", [None, Type.Q4_0, Type.Q8_0], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_are_those_that_the_file_was_made_from(tmp_path, family, quantize):
    """Names, shapes, rows in the order of the checkpoint, and norms without the added 1."""
    values = tiny.config_of(family)
    tensors = tiny.random_tensors(tiny.tensor_shapes(values))
    stored = write_gguf(tmp_path / "m.gguf", values, tensors, quantize)
    _check(tmp_path / "m.gguf", stored, rounding=None if quantize is None else 2**-8)


def _check(path, tensors, *, rounding=None):
    """Compare with `tensors`; `rounding` is the relative error of the file's dtype."""
    checkpoint = GgufCheckpoint(path)
    assert set(checkpoint.names()) == set(tensors)
    for name, wanted in tensors.items():
        found = checkpoint.view(name).astype(np.float32)
        assert checkpoint.shape(name) == found.shape == wanted.shape
        rtol = rounding or 0
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=3e-7, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_every_family_of_the_gguf_tests_becomes_a_folder_or_says_why_not(tmp_path, case):
    """The folder's configuration and weights are those of the file."""
    record, rule = record_of(case), CASES[case]
    tensors = random_tensors(record["tensors"])
    file = test_gguf_families.write(tmp_path, record["config"], tensors, rule)
    if not rule.transposed:
        _check_folder(tmp_path / "folder", file)
        return
    with pytest.raises(ConfigError, match=r"c_attn.weight' is stored transposed in one. Quantize"):
        GgufCheckpoint(file)


def _check_folder(folder, file):
    """Write what a copy without quantization would have, and load it."""
    from safetensors.numpy import save_file

    checkpoint = GgufCheckpoint(file)
    folder.mkdir()
    for name, content in checkpoint.files().items():
        (folder / name).write_text(json.dumps(content))
    arrays = {name: checkpoint.view(name) for name in checkpoint.names()}
    save_file(arrays, folder / "model.safetensors")
    config = load_config(file)
    assert load_config(folder) == config
    weights, wanted = load_weights(folder, config), load_weights(file, config)
    assert weights.keys() == wanted.keys()
    for name, weight in wanted.items():
        np.testing.assert_allclose(weights[name].data, weight.data, atol=3e-7, err_msg=name)


@pytest.mark.parametrize("case", test_gguf_experts.CASES)
def test_a_file_with_experts_becomes_a_folder_or_says_why_not(tmp_path, case):
    file, *_ = test_gguf_experts._write(tmp_path, case)
    reasons = {"gpt_oss": "cannot be written as a config", "ernie4_5_moe": "is stored transposed"}
    if case not in reasons:
        _check_folder(tmp_path / "folder", file)
        return
    with pytest.raises(ConfigError, match=reasons[case]):
        GgufCheckpoint(file)


# ---- a real model


@pytest.fixture(scope="module")
def copied(gguf, tmp_path_factory):
    """The folder of a copy in 8 bits, and the most memory that writing it took, in bytes."""
    out = tmp_path_factory.mktemp("q") / "copy"
    tracemalloc.start()
    try:
        engine.quantize(gguf, out, format="int8_g32")
        return out, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def models(gguf, copied):
    """The file and its copy, loaded."""
    loaded = [engine.load(str(p), device="cpu", dtype="float32") for p in (gguf, copied[0])]
    yield loaded
    for one in loaded:
        one.close()


def test_logits_are_those_of_the_file(models):
    direct, copy = models
    ids = direct.tokenizer.encode(TEXT)
    wanted, found = (
        one.step([ids], one.new_cache(batch_size=1, max_tokens=64), logits="all")[0].astype(float)
        for one in models
    )
    logs = [x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (wanted, found)]
    divergence = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)
    assert np.corrcoef(found.ravel(), wanted.ravel())[0, 1] > 0.999
    assert 0 < divergence.mean() < 0.01 and (found.argmax(-1) == wanted.argmax(-1)).mean() > 0.9
    assert direct.config.num_layers == copy.config.num_layers == 30


def test_memory_is_bounded_by_the_largest_tensor(copied):
    """The embedding has 57 MB in 16 bits, the whole model 269 MB."""
    assert 57e6 < copied[1] < 140e6


def test_the_tokenizer_and_the_ends_come_along(models):
    direct, copy = models
    for text in (TEXT, "  two  spaces\n\ttab", "Grüße 你好 🙂", "<|im_start|><|endoftext|>"):
        assert copy.tokenizer.encode(text) == direct.tokenizer.encode(text)
    assert copy.tokenizer.chat_template == direct.tokenizer.chat_template
    assert copy.tokenizer.special_tokens == direct.tokenizer.special_tokens
    assert copy.tokenizer.eos_token_ids == direct.tokenizer.eos_token_ids
    assert copy.eos_token_ids == direct.eos_token_ids
    assert copy.sampling_defaults == direct.sampling_defaults  # though "copy" names no model


def test_the_folder_is_one_of_compressed_tensors(copied):
    out, _ = copied
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "llama" and config["architectures"] == ["LlamaForCausalLM"]
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    names = {path.name for path in out.iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors",
                     "tokenizer.json", "tokenizer_config.json"}  # fmt: skip


def test_the_command_takes_a_file(tmp_path, capsys):
    values = tiny.config_of("llama", hidden_size=128, intermediate_size=128)
    tensors = tiny.random_tensors(tiny.tensor_shapes(values))
    write_gguf(tmp_path / "m.gguf", values, tensors)
    with pytest.raises(SystemExit) as done:
        main(["quantize", str(tmp_path / "m.gguf"), str(tmp_path / "q"), "--format", "fp8"])
    printed = capsys.readouterr()
    assert not done.value.code, printed.err
    assert printed.out == f"{tmp_path / 'q'}\n"
    size = shown_size(sum(file.stat().st_size for file in (tmp_path / "q").iterdir()))
    assert printed.err == f"{size} in fp8\n" and size.endswith(" kB")  # not 0.00 GB
    assert load_config(tmp_path / "q").hidden_size == 128


def test_gptq_is_calibrated_on_the_model_of_a_file(tmp_path):
    """Its error on the layers' outputs is smaller than that of rounding to nearest."""
    values = tiny.config_of("llama", hidden_size=128, intermediate_size=128)
    tensors = tiny.random_tensors(tiny.tensor_shapes(values))
    tensors = {name: a * 0.1 if a.ndim > 1 else a for name, a in tensors.items()}
    write_gguf(tmp_path / "m.gguf", values, tensors)
    ids = np.random.default_rng(0).integers(3, values["vocab_size"], 1024).tolist()
    errors = []
    direct = engine.load(str(tmp_path / "m.gguf"), device="cpu", dtype="float32")
    wanted = direct.step([ids[:32]], direct.new_cache(batch_size=1, max_tokens=32), logits="all")
    for name, options in (("nearest", {}), ("gptq", {"calibrate": ids, "device": "cpu"})):
        out = engine.quantize(tmp_path / "m.gguf", tmp_path / name, format="int4_g32", **options)
        model = engine.load(str(out), device="cpu", dtype="float32")
        cache = model.new_cache(batch_size=1, max_tokens=32)
        errors.append(np.square(model.step([ids[:32]], cache, logits="all") - wanted).mean())
    assert errors[1] < errors[0]


def test_a_byte_order_mark_is_no_part_of_the_calibration_text(tmp_path):
    from safetensors.numpy import load_file, save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    values = tiny.config_of("llama")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tiny.random_tensors(tiny.tensor_shapes(values)), folder / "model.safetensors")
    words = [f"w{i}" for i in range(40)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(folder / "tokenizer.json"))
    made = []
    for encoding in ("utf-8", "utf-8-sig"):
        text = tmp_path / encoding
        text.write_text(" ".join(words[1:9]), encoding=encoding)
        options = {"calibrate": text, "calibration_tokens": 8, "device": "cpu"}
        out = engine.quantize(folder, tmp_path / f"q-{encoding}", format="int4_g32", **options)
        made.append(load_file(out / "model.safetensors"))
    assert all(np.array_equal(made[0][name], made[1][name]) for name in made[0])


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(WeightsError, match="at least 8 bytes"):
        engine.quantize(tmp_path / "m.gguf", tmp_path / "q")
    assert not (tmp_path / "q").exists()
