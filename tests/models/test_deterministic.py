"""deterministic=True: a token's logits have the same bits whatever else is in the batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import engine
from engine.config import (
    GatedDeltaConfig,
    Mamba2Config,
    ModelConfig,
    MoeConfig,
    RopeConfig,
    ShortConvConfig,
)
from engine.device import to_numpy
from engine.layers.batch import ForwardBatch

CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=199,
    hidden_size=128,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=256,
    max_position_embeddings=512,
    rope=RopeConfig(rotary_dim=32),
    layer_windows=(0, 40),
)


CONFIGS = {
    "plain": CONFIG,
    "experts": replace(
        CONFIG,
        sinks=True,
        moe=MoeConfig(9, 4, 96, (False, True), shared_size=64, shared_gate=True, expert_bias=True),
    ),
    "norms of outputs": replace(
        CONFIG, pre_norms=False, post_norms=True, qk_norm=True, whole_qk_norm=True
    ),
    "chunks": replace(
        CONFIG,
        layer_windows=(),
        layer_chunks=(40, 0),
        rope_layers=(True, False),
        qk_norm=True,
        bare_qk_norm=True,
        moe=MoeConfig(9, 1, 96, (False, True), scales_input=True, shared_size=64),
    ),
    "gated delta": replace(
        CONFIG,
        layer_windows=(),
        layer_kinds=("gated_delta", "attention"),
        gated_delta=GatedDeltaConfig(2, 4, 32, 32),
    ),
    "state space": replace(
        CONFIG,
        layer_windows=(),
        layer_kinds=("mamba2", "short_conv"),
        mamba2=Mamba2Config(4, 32, 2, 16),
        short_conv=ShortConvConfig(CONFIG.hidden_size),
    ),
    "parallel": replace(
        CONFIG,
        branch_scale=0.5,
        layer_norm=True,
        norm_bias=True,
        parallel=True,
        gated_mlp=False,
        activation="gelu_tanh",
        rope_layers=(True, False),
    ),
}


@pytest.fixture(scope="module", params=CONFIGS.values(), ids=CONFIGS)
def model(request, place):
    return engine.load(config=request.param, load_format="dummy", deterministic=True, **place)


def _ids(seed, count):
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, count).tolist()


def _alone(model, ids):
    """Return the logits of every token, with the prompt in one chunk."""
    return to_numpy(model.step([ids], model.new_cache(1, len(ids)), logits="all"))[0]


@pytest.mark.parametrize("chunks", [[1] * 70, [69, 1], [5, 30, 35], [33, 37], [64, 6]])
def test_chunks_change_no_bit(model, chunks):
    ids = _ids(1, sum(chunks))
    cache, parts, start = model.new_cache(1, len(ids)), [], 0
    for count in chunks:
        part = model.step([ids[start : start + count]], cache, logits="all")
        parts.append(to_numpy(part)[0])
        start += count
    np.testing.assert_array_equal(np.concatenate(parts), _alone(model, ids))


@pytest.mark.parametrize("company", [[1], [3, 50], [1] * 20, [17, 1, 130, 64, 2]])
def test_other_sequences_change_no_bit(model, company):
    """The sequence is computed among others, at an arbitrary position in the batch."""
    mine = _ids(2, 45)
    others = [_ids(10 + i, count) for i, count in enumerate(company)]
    sequences = [*others[: len(others) // 2], mine, *others[len(others) // 2 :]]
    cache = model.new_cache(len(sequences), max(map(len, sequences)))
    batch = ForwardBatch.build(
        sequences,
        [0] * len(sequences),
        cache.block_tables,
        16,
        logits="all",
        state_slots=cache.state_slots,
    )
    logits = to_numpy(model.forward(batch.to(model.device), cache.pages))
    start = sum(map(len, others[: len(others) // 2]))
    np.testing.assert_array_equal(logits[start : start + 45], _alone(model, mine))


def test_the_default_mode_is_close(model):
    plain = engine.load(
        config=model.config, load_format="dummy", device=str(model.device), dtype=model.dtype
    )
    want, got = _alone(plain, _ids(3, 60)), _alone(model, _ids(3, 60))
    limit = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 2e-1}[model.dtype]
    assert np.abs(got - want).max() < limit * want.std()


FUSED = {
    "plain": CONFIG,
    "biases": replace(CONFIG, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True),
    "offset": replace(CONFIG, norm_weight_offset=1.0, activation="gelu_tanh", embed_scale=3.0),
    "no gate": replace(CONFIG, gated_mlp=False, activation="relu2", attn_gate="heads"),
}


@pytest.mark.parametrize("config", FUSED.values(), ids=FUSED)
def test_fused_layers_of_one_token_change_no_bit(monkeypatch, config):
    """On a GPU products that sum in parts are fused; here as if, in float32, which rounds alike."""
    monkeypatch.setattr("engine.layers.linear.sums_in_parts", lambda weight: True)
    place = {"device": "cpu", "dtype": "float32"}
    model = engine.load(config=config, load_format="dummy", deterministic=True, **place)
    ids = _ids(4, 20)
    want = _alone(model, ids)
    runs = model.decoder.kernels.runs
    assert all(layer.can_fuse for layer in model.decoder.layers) and "rmsnorm_gemm" not in runs
    cache = model.new_cache(1, len(ids))
    parts = [to_numpy(model.step([[one]], cache))[0] for one in ids]
    np.testing.assert_array_equal(np.stack(parts), want)
    assert runs["rmsnorm_gemm"] == 2 * config.num_layers * len(ids)


@pytest.mark.parametrize(
    ("changes", "fused"),
    [
        ({"moe": MoeConfig(9, 4, 96, (False, True))}, [True, False]),
        ({"inner_norms": True}, [False, False]),
        ({"post_norms": True}, [False, False]),
        ({"layer_norm": True}, [False, False]),
        ({"branch_scale": 0.5}, [False, False]),
        ({"parallel": True}, [False, False]),
    ],
)
def test_other_layers_are_not_fused(monkeypatch, changes, fused):
    monkeypatch.setattr("engine.layers.linear.sums_in_parts", lambda weight: True)
    config = replace(CONFIG, **changes)
    model = engine.load(config=config, load_format="dummy", deterministic=True, device="cpu")
    assert [layer.can_fuse for layer in model.decoder.layers] == fused
