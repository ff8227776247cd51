"""Whole models with quantized weights: on the CPU, on a GPU, and in any company."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import engine
from engine.commands._bench_models import built_in_config
from engine.config import ModelConfig
from engine.device import to_numpy
from engine.errors import ConfigError
from engine.kernels import _module
from engine.loading.dummy import dummy_weights
from engine.models.decoder import Decoder
from engine.weights import FORMATS, Weight, unpack_weight

NAMES = [name for name, form in FORMATS.items() if not form.is_dense]
CONFIG = ModelConfig("llama", 320, 256, 2, 4, 2, 64, 512, 512)
_QWEN = built_in_config("qwen3-30b-a3b")
MOE = dataclasses.replace(
    _QWEN,
    vocab_size=320,
    hidden_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=512,
    rope=dataclasses.replace(_QWEN.rope, rotary_dim=64),
    moe=dataclasses.replace(_QWEN.moe, num_experts=8, top_k=2, intermediate_size=128),
)
TOKENS = np.random.default_rng(0).integers(0, 320, (3, 40))


def _load(name, device, dtype, config=CONFIG, **options):
    return engine.load(
        config=config, load_format="dummy", device=device, dtype=dtype, quantization=name, **options
    )


def _logits(model, tokens=TOKENS):
    return to_numpy(model.step(tokens, model.new_cache(len(tokens), 64), logits="all"))


def _cosines(got, wanted):
    norms = np.linalg.norm(got, axis=-1) * np.linalg.norm(wanted, axis=-1)
    return (got * wanted).sum(-1) / norms


@pytest.mark.parametrize("name", NAMES)
def test_a_model_on_the_cpu_computes_with_the_rounded_numbers(name):
    """Weight-only formats give the logits of the numbers; others differ by rounded activations."""
    got = _logits(_load(name, "cpu", "float32"))
    weights = dummy_weights(CONFIG, quantization=FORMATS[name])
    dense = {key: Weight.dense(unpack_weight(weight)) for key, weight in weights.items()}
    model = _load(None, "cpu", "float32")
    model._decoder = Decoder(CONFIG, dense, CONFIG.max_position_embeddings)
    wanted = _logits(model)
    if FORMATS[name].activations:
        assert 0 < 1 - _cosines(got, wanted).min() < 0.01
    else:
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_random_weights_without_kernels_are_refused(cp):
    with pytest.raises(ConfigError, match=r"dtype must be float16 or bfloat16 .* in int4_g128"):
        _load("int4_g128", "cuda", "float32")
    assert np.isfinite(_logits(_load("fp8", "cuda", "float32"))).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_gives_the_logits_of_the_cpu(cp, name, dtype):
    """Many rows, then single tokens of every sequence, which take other kernels."""
    on_cpu, on_gpu = _load(name, "cpu", "float32"), _load(name, "cuda", dtype)
    compiled = _module.stats().compiles_after_ready
    least = 0.98 if FORMATS[name].activations else {"float16": 0.9995, "bfloat16": 0.99}[dtype]
    caches = on_cpu.new_cache(3, 64), on_gpu.new_cache(3, 64)
    for first, last in ((0, 38), (38, 39), (39, 40)):
        part = TOKENS[:, first:last]
        wanted = on_cpu.step(part, caches[0], logits="all")
        got = to_numpy(on_gpu.step(part, caches[1], logits="all"))
        assert _cosines(got, wanted).min() > least
    assert _module.stats().compiles_after_ready == compiled


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8", "fp8_block", "int8", "int4_g128", "q4_k", "mxfp4"])
def test_experts_on_a_gpu_give_the_logits_of_the_cpu(cp, name):
    on_cpu, on_gpu = (
        _load(name, *where, config=MOE) for where in (("cpu", "float32"), ("cuda", "bfloat16"))
    )
    got, wanted = _logits(on_gpu), _logits(on_cpu)
    # A token whose router is nearly tied may take another expert: most may not.
    assert np.quantile(_cosines(got, wanted), 0.1) > 0.97


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8", "fp8_block", "int8", "int4_g128", "q4_k", "mxfp4"])
def test_a_token_has_the_same_bits_in_any_company(cp, name):
    model = _load(name, "cuda", "bfloat16", deterministic=True)
    alone = _logits(model, TOKENS[:1])
    together = _logits(model, np.concatenate([TOKENS] * 8))
    np.testing.assert_array_equal(together[0], alone[0])
    cache = model.new_cache(1, 64)
    single = [to_numpy(model.step(TOKENS[:1, i : i + 1], cache)) for i in range(40)]
    np.testing.assert_array_equal(np.concatenate(single), alone[0])
