"""`ForwardBatch.features`: the residual stream between layers, in every kind of layer."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from engine.layers.batch import ForwardBatch
from engine.models.decoder import Decoder
from tests.e2e.tiny import CONFIG, tiny_model

KINDS = {
    "plain": {},
    "granite": {"branch_scale": 0.3},
    "gemma": {"post_norms": True, "norm_weight_offset": 1.0},
    "olmo2": {"post_norms": True, "pre_norms": False},
    "parallel": {"parallel": True, "layer_norm": True},
    "two norms": {"parallel": True, "parallel_norms": True, "layer_norm": True},
    "tied": {"tie_word_embeddings": True},
}
NUM_LAYERS = 3


def forward(decoder, ids, layers, logits):
    """The hidden states of a prompt, and the features of these layers."""
    cfg = decoder.config
    pages = np.zeros((cfg.num_layers, 2, 2, cfg.num_kv_heads, 16, cfg.head_dim), np.float32)
    batch = ForwardBatch.build([ids], [0], [[1, 0]], 16, logits=logits)
    features = {layer: np.empty((len(ids), cfg.hidden_size), np.float32) for layer in layers}
    hidden = decoder.hidden_states(dataclasses.replace(batch, features=features), pages)
    return hidden, features


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 21])
def test_features_are_what_a_model_of_fewer_layers_ends_with(kind, count, deterministic):
    config = dataclasses.replace(CONFIG, num_layers=NUM_LAYERS, **KINDS[kind])
    model = tiny_model(config=config, deterministic=deterministic)
    ids = np.random.default_rng(1).integers(0, 97, count).tolist()
    layers = range(NUM_LAYERS + 1)
    plain, _ = forward(model.decoder, ids, (), "all")
    hidden, features = forward(model.decoder, ids, layers, "all")
    np.testing.assert_array_equal(hidden, plain)
    last, same = forward(model.decoder, ids, layers, "last")
    np.testing.assert_allclose(last[0], plain[-1], rtol=1e-5, atol=1e-5)
    for layer in layers:
        np.testing.assert_array_equal(same[layer], features[layer])
    embedded = model.decoder.embed(np.array(ids, np.int32))
    np.testing.assert_array_equal(features[0], embedded)
    for layer in range(1, NUM_LAYERS + 1):
        fewer = dataclasses.replace(config, num_layers=layer)
        decoder = Decoder(fewer, model.decoder.weights, 64, deterministic=deterministic)
        wanted, _ = forward(decoder, ids, (), "all")
        got = decoder.final_norm(features[layer].copy())
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_only_the_wanted_layers_are_kept():
    """Also where the last layer drops tokens without logits."""
    model = tiny_model(config=dataclasses.replace(CONFIG, num_layers=NUM_LAYERS))
    ids = list(range(20))
    _, every = forward(model.decoder, ids, range(NUM_LAYERS), "last")
    for layers in ((2,), (0, 2)):
        _, some = forward(model.decoder, ids, layers, "last")
        assert set(some) == set(layers)
        for layer in layers:
            np.testing.assert_array_equal(some[layer], every[layer])
