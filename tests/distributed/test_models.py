"""Models divided among ranks: logits of every family for 1, 2 and 4 ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import engine
from engine.config import ModelConfig
from engine.errors import ConfigError
from tests.distributed.golden import CASES, write_checkpoint

# Sums in another order, as in tests/models/test_golden.py.
LIMIT = 1e-4
# Their 2 heads, or 90 features, cannot be divided by 4.
NOT_BY_4 = {"stablelm", "stablelm_parallel_new_keys", "starcoder2", "starcoder2_window_new_keys"}
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
def test_logits_of_every_family(on_ranks, folder, case, size):
    path = folder(case)
    if size == 4 and case in NOT_BY_4:
        with pytest.raises(ConfigError, match="must be a multiple of 4 shards"):
            on_ranks(size, lambda c: _logits(path, c))
        return
    for deterministic in (False, True):
        want = _logits(path, deterministic=deterministic)
        found = on_ranks(size, lambda c, how=deterministic: _logits(path, c, deterministic=how))
        for logits in found:
            for got, wanted in zip(logits, want, strict=True):
                assert got.dtype == np.float32 and got.shape == wanted.shape
                if deterministic:
                    np.testing.assert_array_equal(got, wanted)
                else:
                    assert np.abs(got - wanted).max() / wanted.std() < LIMIT


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
