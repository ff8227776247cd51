"""Models divided among ranks: logits of every family for 1, 2 and 4 ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from safetensors.numpy import load_file

import engine
from engine.config import ModelConfig
from engine.errors import ConfigError
from tests.distributed.golden import CASES, GOLDEN, write_checkpoint
from tests.golden.quantized import CASES as QUANTIZED
from tests.golden.quantized import make_linear, write_safetensors
from tests.loading.test_experts import _gpt_oss_mxfp4
from tests.loading.test_experts import make as make_experts  # noqa: F401

# Sums in another order, as in tests/models/test_golden.py.
LIMIT = 1e-4
# Their 2 heads, or 90 features, cannot be divided by 4.
NOT_BY_4 = {"stablelm", "stablelm_parallel_new_keys", "starcoder2", "starcoder2_window_new_keys"}
NOT_BY_4 |= {"arcee", "apertus", "bitnet_new_keys_biases"}
# Their key heads, or groups of Mamba-2, cannot be divided by 4, or not at all.
HYBRIDS = ("qwen3_next", "qwen3_5", "granitemoehybrid", "nemotron_h", "olmo_hybrid", "falcon_h1")
HYBRIDS += ("kimi_linear", "bailing_moe", "bamba")
NOT_BY_4 |= {case for case in CASES if case.startswith(HYBRIDS)}
NOT_BY_2 = {"granitemoehybrid_dense_rope_biases", "bailing_moe_v2_5_new_keys"}
NOT_BY_2 |= {"olmoe_clipped_one_head"}
PROMPT = [[5, 17, 3, 99, 41, 8, 2, 60, 77, 12, 1], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a function that writes a golden model's checkpoint once."""
    made = {}

    def make(case):
        if case not in made:
            made[case] = write_checkpoint(case, tmp_path_factory.mktemp(case))
        return made[case]

    return make


@pytest.fixture(scope="module")
def alone(folder):
    """Return a function that returns the logits of one process, computed once."""
    return cache(lambda case, deterministic: _logits(folder(case), deterministic=deterministic))


def _logits(path, collectives=None, **options):
    """Return logits of a prompt, of three chunks, and of single tokens behind it."""
    with engine.load(
        path, device="cpu", progress=False, collectives=collectives, **options
    ) as model:
        cache = model.new_cache(2, 32)
        ids = np.array(PROMPT)
        parts = [model.step(ids[:, :4], cache, logits="all"), model.step(ids[:, 4:], cache)]
        for _ in range(3):
            parts.append(model.step(parts[-1].argmax(-1)[:, None], cache))
        return [part.copy() for part in parts]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_logits_of_every_family(on_ranks, folder, alone, case, size):
    path = folder(case)
    if (size == 4 and case in NOT_BY_4) or case in NOT_BY_2:
        with pytest.raises(ConfigError, match=f"must be a multiple of {size} shards"):
            on_ranks(size, lambda c: _logits(path, c))
        return
    for deterministic in (False, True):
        if is_refused(case, size, deterministic):
            with pytest.raises(ConfigError, match=f"parallelism of {size} ranks is not supported"):
                on_ranks(size, lambda c, how=deterministic: _logits(path, c, deterministic=how))
            continue
        found = on_ranks(size, lambda c, how=deterministic: _logits(path, c, deterministic=how))
        _check(found, alone(case, deterministic), deterministic)


def is_refused(case: str, size: int, deterministic: bool) -> bool:
    """Tell whether the layers differ in the heads that such ranks would hold (`local_config`)."""
    if case.startswith("mimo_v2_flash"):
        return deterministic and size == 4
    if case.startswith("nemotron_h_experts_latent"):
        return deterministic
    return case.startswith("gemma3n") or (case.startswith("gemma4") and deterministic)


def _check(found, want, deterministic):
    """Compare all ranks' logits with those of one process: bit for bit, if deterministic."""
    for logits in found:
        for got, wanted in zip(logits, want, strict=True):
            assert got.dtype == np.float32 and got.shape == wanted.shape
            if deterministic:
                np.testing.assert_array_equal(got, wanted)
            else:
                assert np.abs(got - wanted).max() / wanted.std() < LIMIT


# Odd numbers of experts, 5 to 9; shared ones, a gate, groups, a correction, biases, a branch scale.
@pytest.mark.parametrize(
    ("case", "size"),
    [(case, 2) for case in ("glm4_moe", "gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen2_moe")]
    + [("qwen3_moe", 2), ("qwen3_moe", 4), ("llama4", 2), ("qwen3_vl_moe", 2)]
    + [("longcat_flash", 2), ("longcat_flash_new_keys_yarn_biases", 4), ("nemotron_h_experts", 2)],
)
def test_logits_with_whole_experts(on_ranks, folder, alone, case, size):
    for deterministic in (False, True):
        options = {"deterministic": deterministic, "enable_expert_parallel": True}
        found = on_ranks(size, lambda c, how=options: _logits(folder(case), c, **how))
        _check(found, alone(case, deterministic), deterministic)


def test_ranks_have_some_experts_whole_and_count_the_tokens_of_all(on_ranks, folder):
    ids = np.array(PROMPT)

    def run(collectives=None):
        options = {"collectives": collectives, "enable_expert_parallel": True}
        model = engine.load(folder("qwen3_moe"), device="cpu", progress=False, **options)
        model.step(ids, model.new_cache(2, 16), logits="all")
        shapes = {name: weight.shape for name, weight in model.decoder.weights.items()}
        return shapes["layers.1.experts_down"], model.expert_load(), model.expert_runs

    shape, load, runs = run()
    assert shape == (7, 64, 20) and runs == () and load[1].sum() == 3 * ids.size
    found = on_ranks(4, run)
    assert [shape for shape, _, _ in found] == [(e, 64, 20) for e in (1, 2, 2, 2)]
    for _, counted, runs in found:
        assert runs == ((0, 1), (1, 3), (3, 5), (5, 7))
        np.testing.assert_array_equal(counted[1], load[1])


def _quantized_experts(case, folder):
    """Write the model "qwen3_moe" with 5 wider experts, whose matrices are quantized as `case`."""
    record = json.loads((GOLDEN / "models" / "qwen3_moe.json").read_text())
    plain = load_file(write_checkpoint("qwen3_moe", folder) / "model.safetensors")
    rng, sizes, tensors = np.random.default_rng(0), {64: 128, 20: 128}, {}
    for name, values in plain.items():
        shape = tuple(sizes.get(n, n) for n in values.shape)
        module, expert = name.removesuffix(".weight"), name.partition(".experts.")[2]
        if not expert:
            shape = (5, 128) if name.endswith("mlp.gate.weight") else shape
            numbers = rng.standard_normal(shape) * 0.1 + (len(shape) == 1)
            tensors[name] = "F32", numbers.astype(np.float32)
        elif int(expert[0]) < 5:
            made = make_linear(case, shape, name)[0]
            tensors |= {f"{module}.{kind}": tensor for kind, tensor in made.items()}
    write_safetensors(folder / "model.safetensors", tensors)
    others = ["lm_head", *(name.removesuffix(".weight") for name in plain if "experts" not in name)]
    key = "modules_to_not_convert" if case.startswith("fp8") else "ignore"
    config = {**record["config"], "hidden_size": 128, "moe_intermediate_size": 128}
    scheme = {**QUANTIZED[case].config, key: others}
    config |= {"num_experts": 5, "quantization_config": scheme}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _vary_tokens(tensors):
    """Give each token an embedding of its own, and experts inputs of a size they are made for."""
    name = "model.embed_tokens.weight"
    tensors[name] = np.random.default_rng(0).standard_normal(tensors[name].shape, np.float32)
    for layer in (0, 1):
        norm = f"model.layers.{layer}.post_attention_layernorm.weight"
        tensors[norm] = tensors[norm] * np.float32(0.05)


@pytest.mark.parametrize("case", ["fp8_block", "ct_mxfp4", "mxfp4"])
def test_quantized_experts_stay_whole(on_ranks, tmp_path, monkeypatch, make_experts, case):  # noqa: F811
    """Their codes are those of the file: nothing inside an expert is cut, whatever its width."""
    monkeypatch.setattr(
        "engine.loading.weights._keeps", lambda device, dtype, **_: lambda name, form: True
    )
    if case == "mxfp4":  # gpt-oss: biases, and three blocks of 32 in 96 features
        path = make_experts("gpt_oss", _gpt_oss_mxfp4, _vary_tokens)[0]
    else:
        path = _quantized_experts(case, tmp_path)
    ids = np.array(PROMPT) % 40

    def logits(collectives=None):
        options = {"deterministic": True, "enable_expert_parallel": True, "progress": False}
        model = engine.load(path, device="cpu", collectives=collectives, **options)
        form = model.decoder.weights["layers.1.experts_down"].format
        return form.name, model.step(ids, model.new_cache(2, 16), logits="all")

    form, want = logits()
    assert form == case.removeprefix("ct_") and want.std() > 0
    for size in (2, 4):
        for found, got in on_ranks(size, logits):
            assert found == form
            np.testing.assert_array_equal(got, want)


def test_experts_that_cannot_be_divided(on_ranks, folder):
    def load(case):
        options = {"device": "cpu", "progress": False, "enable_expert_parallel": True}
        return lambda c: engine.load(folder(case), collectives=c, **options)

    with pytest.raises(ConfigError, match=r"experts must be at least 4, one for each .*; got 3"):
        on_ranks(4, load("granitemoe_tied_biases"))
    with pytest.raises(ConfigError, match="a model without experts: llama is dense"):
        load("llama")(None)


CONFIG = ModelConfig(
    "llama", 50, 64, 2, 8, 2, 16, 96, 128, tie_word_embeddings=True, dtype="bfloat16"
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_random_weights_are_parts_of_the_same_model(on_ranks, dtype, size):
    """With 8 ranks, 4 share a key/value head; and the vocabulary of 50 is padded."""
    ids = np.array(PROMPT) % 50

    def logits(collectives=None, deterministic=True):
        model = engine.load(
            config=CONFIG,
            load_format="dummy",
            device="cpu",
            dtype=dtype,
            collectives=collectives,
            deterministic=deterministic,
        )
        return model.step(ids, model.new_cache(2, 16), logits="all")

    want = logits()
    for got in on_ranks(size, logits):
        np.testing.assert_array_equal(got, want)
    limit = LIMIT if dtype == "float32" else 0.1
    for got in on_ranks(size, lambda c: logits(c, deterministic=False)):
        assert np.abs(got - want).max() / want.std() < limit


@pytest.mark.parametrize("codes", ["fp8", "int8"])
def test_pages_of_codes(on_ranks, folder, codes):
    """int8's scales are measured by all ranks together."""
    path, ids = folder("qwen3"), np.array(PROMPT)

    def logits(collectives=None):
        model = engine.load(
            path, device="cpu", deterministic=True, progress=False, collectives=collectives
        )
        return model.step(ids, model.new_cache(2, 16, kv_cache_dtype=codes), logits="all")

    want = logits()
    for got in on_ranks(2, logits):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_weights_quantized_while_they_are_read(on_ranks, folder, quantization):
    """Rows are rounded on their own, and are whole if no matrix is divided by input features."""
    path, ids = folder("llama"), np.array(PROMPT)

    def logits(collectives=None):
        options = {"deterministic": True, "progress": False, "quantization": quantization}
        model = engine.load(path, device="cpu", collectives=collectives, **options)
        return model.step(ids, model.new_cache(2, 16), logits="all")

    want = logits()
    for got in on_ranks(2, logits):
        np.testing.assert_array_equal(got, want)


def test_the_config_of_a_rank_has_its_heads(on_ranks):
    def sizes(collectives):
        odd = replace(CONFIG, vocab_size=51)
        model = engine.load(config=odd, load_format="dummy", device="cpu", collectives=collectives)
        c = model.config
        assert c.vocab_size == 51
        return c.num_heads, c.num_kv_heads, c.intermediate_size, model.weight_bytes

    assert len({size[:3] for size in on_ranks(4, sizes)}) == 1
    assert on_ranks(4, sizes)[0][:3] == (2, 1, 24)


@pytest.mark.parametrize("quantization", ["fp8", "fp8_block", "int4_g32_zp", "mxfp4", "q4_k"])
def test_random_quantized_weights(on_ranks, quantization):
    ids = np.array(PROMPT) % 50

    def logits(collectives=None, deterministic=True):
        options = {"load_format": "dummy", "device": "cpu", "quantization": quantization}
        options |= {"deterministic": deterministic, "collectives": collectives}
        model = engine.load(config=CONFIG, **options)
        return model.step(ids, model.new_cache(2, 16), logits="all")

    want = logits()
    for got in on_ranks(2, logits):
        np.testing.assert_array_equal(got, want)
    # A rank scales its part of a row of activations, which fp8 rounds to 4 bits.
    limit = 0.3 if quantization.startswith("fp8") else LIMIT
    for got in on_ranks(2, lambda c: logits(c, deterministic=False)):
        assert np.abs(got - want).max() / want.std() < limit


@pytest.mark.parametrize("quantization", ["int8", "q8_0"])
def test_experts_whose_parts_have_no_whole_tiles_stay_as_they_are(on_ranks, folder, quantization):
    """48 rows are whole tiles of 16; 24, the part of a rank, are not."""
    path, ids = folder("mixtral"), np.array(PROMPT)

    def logits(collectives=None, quantization=quantization):
        options = {"device": "cpu", "progress": False, "quantization": quantization}
        model = engine.load(path, collectives=collectives, **options)
        return model.step(ids, model.new_cache(2, 16), logits="all")

    want = logits(quantization=None)
    for got in on_ranks(2, logits):
        assert np.abs(got - want).max() / want.std() < 0.3
