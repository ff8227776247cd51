"""Chunked attention: each chunk of a sequence by itself, in prompts, decodes and verifications."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import engine
from engine import kernels
from engine.config import ModelConfig, MoeConfig, RopeConfig
from engine.device import to_numpy
from engine.errors import ConfigError, ContractError
from engine.layers.batch import ForwardBatch
from engine.layers.moe import RoutingParams
from engine.loading.hf_config import config_from_dict
from engine.models.chunks import chunk_patterns
from engine.weights import ALL_LAYERS

CHUNK = 12
CONFIG = ModelConfig(
    *("llama", 61, 64, 1, 4, 2, 16, 96),
    max_position_embeddings=256,
    rope=RopeConfig(rotary_dim=16),
    layer_chunks=(CHUNK,),
)
IDS = np.random.default_rng(0).integers(0, 61, 50).tolist()


def load(where: str = "cpu", config: ModelConfig = CONFIG, **options) -> engine.Model:
    return engine.load(config=config, load_format="dummy", device=where, dtype="float32", **options)


def alone(model, ids) -> np.ndarray:
    return to_numpy(model.step([ids], model.new_cache(1, len(ids)), logits="all"))[0]


def chunk_by_chunk(model) -> np.ndarray:
    """With one layer and relative positions, a chunk does not notice those before it."""
    return np.concatenate([alone(model, IDS[i : i + CHUNK]) for i in range(0, 50, CHUNK)])


@pytest.mark.parametrize("pieces", [[50], [1] * 50, [11, 2, 1, 1, 20, 15], [24, 13, 13]])
def test_a_sequence_is_its_chunks(where, pieces):
    model = load(where)
    cache, got, start = model.new_cache(1, 50), [], 0
    for count in pieces:
        got.append(to_numpy(model.step([IDS[start : start + count]], cache, logits="all"))[0])
        start += count
    np.testing.assert_allclose(np.concatenate(got), chunk_by_chunk(model), rtol=0, atol=1e-4)
    plain = load(where, replace(CONFIG, layer_chunks=()))
    assert np.abs(alone(plain, IDS) - chunk_by_chunk(model))[CHUNK:].max() > 0.01


def test_several_tokens_are_verified_across_a_border(where):
    """Drafts at 22 to 25, of which the last two are in the next chunk."""
    model = load(where)
    cache = model.new_cache(1, 50)
    model.step([IDS[:22]], cache)
    batch = ForwardBatch.build([IDS[22:26]], [22], cache.block_tables, 16, logits="all")
    batch = replace(batch, num_decodes=1, query_len=4, prefill_cu_seqlens_q=None)
    got = to_numpy(model.forward(batch.to(model.device), cache.pages))
    np.testing.assert_allclose(got, chunk_by_chunk(model)[22:26], rtol=0, atol=1e-4)
    tree = replace(batch, tree_mask=np.full((1, 4), 15, np.uint64))
    with pytest.raises(ContractError, match="a batch with a tree_mask"):
        model.forward(tree.to(model.device), cache.pages)


def test_chunks_longer_than_every_sequence_cost_nothing():
    short = load(max_model_len=CHUNK)
    assert not short.has_patterns and short.decoder.layers[0].attn.params.chunk == 0
    patterns = load(max_model_len=60).decoder.patterns
    assert patterns[0].mask.shape == (5, 5) and patterns[0].block_q == CHUNK
    two = replace(CONFIG, num_layers=3, layer_chunks=(8, 0, 8))
    found = chunk_patterns(two, ALL_LAYERS, 256)
    assert list(found) == [0, 2] and found[0] is found[2]


def test_the_number_of_chunks_is_limited():
    config = {"model_type": "llama4_text", "max_position_embeddings": 1 << 24}
    with pytest.raises(ConfigError, match="attention_chunk_size must be a whole number from 4096"):
        config_from_dict({**config, "attention_chunk_size": 1000})
    found = config_from_dict({**config, "no_rope_layers": [1, 0, 1, 1] * 12})
    assert found.layer_chunks == (8192, 0, 8192, 8192) * 12
    types = ["full_attention"] * 47 + ["chunked_attention"]
    assert config_from_dict({**config, "layer_types": types}).layer_chunks == (*[0] * 47, 8192)
    with pytest.raises(ConfigError, match="attention_chunk_size must be given, since"):
        config_from_dict({**config, "layer_types": types, "attention_chunk_size": None})
    assert config_from_dict({**config, "max_position_embeddings": 8192}).layer_chunks == ()


def test_options_that_chunks_exclude():
    model = load()
    assert model.has_patterns  # so drafts form no trees
    with pytest.raises(ConfigError, match=r"kv_cache_dtype must be 'auto' with .*chunks shorter"):
        model.new_cache(1, 50, kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match="attention_pattern must not be of layer 0: it has chunk"):
        load(attention_pattern={0: kernels.Periodic(4, 2)})
    load(attention_pattern=kernels.Periodic(4, 2))  # for full attention only


def test_a_trace_has_no_weights_across_chunks():
    model = load()
    weights = model.trace(np.array(IDS)).attention[0]
    chunk = np.arange(50) // CHUNK
    hidden = (chunk[:, None] != chunk) | (np.arange(50)[:, None] < np.arange(50))
    assert (weights[:, hidden] == 0).all() and (weights[:, ~hidden] > 0).all()


def test_the_input_of_the_only_expert_is_scaled(where):
    """MoE by its formula: sigmoid of the largest logit times x, through that expert."""
    moe = MoeConfig(5, 1, 32, (True,), scales_input=True, shared_size=24)
    layer = load(where, replace(CONFIG, moe=moe)).decoder.layers[0].mlp
    x = np.random.default_rng(1).standard_normal((7, 64)).astype(np.float32)
    x[0] *= 300  # sigmoids of all positive logits round to 1
    logits = x @ to_numpy(layer.router.weight.data).T
    assert (logits[0] > 18).sum() > 1
    chosen = logits.argmax(1)
    rows = x / (1 + np.exp(-logits.max(1, keepdims=True).astype(np.float64)))

    def mlp(rows, gate_up, down):
        gate, up = np.split(rows @ gate_up.T, 2, axis=-1)
        return (gate / (1 + np.exp(-gate)) * up) @ down.T

    gate_up, down = (to_numpy(w.data) for w in (layer.experts.gate_up, layer.experts.down))
    shared = [to_numpy(one.weight.data) for one in (layer.shared.gate_up, layer.shared.down)]
    want = np.stack([mlp(r, gate_up[e], down[e]) for r, e in zip(rows, chosen, strict=True)])
    got = to_numpy(layer(_on(where, x)))
    np.testing.assert_allclose(got, want + mlp(x, *shared), rtol=2e-4, atol=2e-4 * want.std())
    assert to_numpy(layer.load).tolist() == np.bincount(chosen, minlength=5).tolist()
    with pytest.raises(ConfigError, match="scales_input must be False unless only top_k=1 is set"):
        RoutingParams(2, scales_input=True)


def _on(where: str, x: np.ndarray):
    if where == "cpu":
        return x
    import cupy

    return cupy.asarray(x)
