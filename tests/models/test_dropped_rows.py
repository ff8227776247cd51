"""Dropping tokens without logits in the last layer does not change the results."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import engine
from engine.device import to_numpy
from engine.layers.batch import ForwardBatch
from engine.layers.mlp import MLP
from engine.layers.moe import MoE
from engine.models import decoder
from tests.models.test_layer_plans import CONFIG, FAMILIES

COUNTS, STARTS = [1, 1, 300, 40, 2], [20, 64, 0, 7, 100]
NUM_BLOCKS = 20
# The last token of each sequence; some, unordered and with a duplicate; one; none.
WANTED = {
    "last": [0, 1, 301, 341, 343],
    "any": [200, 3, 3, 341, 0],
    "one": [1],
    "none": [],
}


def _run(model, wanted):
    """Return the logits of the tokens `wanted` (None: of all), and all pages."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, CONFIG.vocab_size, count).tolist() for count in COUNTS]
    blocks = rng.permutation(len(COUNTS) * NUM_BLOCKS).reshape(len(COUNTS), NUM_BLOCKS)
    batch = ForwardBatch.build(ids, STARTS, blocks.astype(np.int32), 16, logits="all")
    if wanted is not None:
        batch = dataclasses.replace(batch, logits_indices=np.array(wanted, np.int32))
    config = model.config
    shape = (config.num_layers, 2, blocks.size, config.num_kv_heads, 16, config.head_dim)
    noise = rng.standard_normal(shape, np.float32).astype(model.decoder.dtype)
    pages = model.device.xp.asarray(noise)
    logits = model.forward(batch.to(model.device), [tuple(layer) for layer in pages])
    return to_numpy(logits), to_numpy(pages).view(np.uint8)


@pytest.fixture
def always(monkeypatch):
    """Make dropping worthwhile even for the small model."""
    monkeypatch.setattr(decoder, "_MIN_SAVED", 1)


@pytest.fixture
def rows_of_mlps(monkeypatch):
    """Record the number of tokens of each call of an MLP or of experts."""
    seen = []

    def spy_on(kind, name):
        call = getattr(kind, name)

        def spy(self, x, *args, **rest):
            seen.append(len(x))
            return call(self, x, *args, **rest)

        monkeypatch.setattr(kind, name, spy)

    spy_on(MLP, "__call__")
    spy_on(MoE, "combined")
    return seen


@pytest.mark.parametrize("wanted", WANTED.values(), ids=WANTED)
def test_dropping_rows_changes_no_bit(place, wanted, always, rows_of_mlps):
    model = engine.load(config=CONFIG, load_format="dummy", deterministic=True, **place)
    want, want_pages = _run(model, None)
    assert rows_of_mlps[-1] == sum(COUNTS)
    got, got_pages = _run(model, wanted)
    assert rows_of_mlps[-1] == len(wanted)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want[wanted])
    np.testing.assert_array_equal(got_pages, want_pages)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wanted", WANTED.values(), ids=WANTED)
def test_logits_are_close_in_the_default_mode(place, family, wanted, always, rows_of_mlps):
    model = engine.load(config=FAMILIES[family], load_format="dummy", **place)
    want, want_pages = _run(model, None)
    got, got_pages = _run(model, wanted)
    assert rows_of_mlps[-1] == len(wanted)
    limit = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 2e-1}[place["dtype"]]
    assert got.shape == (len(wanted), CONFIG.vocab_size)
    assert np.abs(got - want[wanted]).max(initial=0) < limit * want.std()
    np.testing.assert_array_equal(got_pages, want_pages)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_single_token_may_be_dropped_too(place, always, num_layers):
    """The residual addition is not fused then, as it is without dropping."""
    config = dataclasses.replace(CONFIG, num_layers=num_layers)
    model = engine.load(config=config, load_format="dummy", **place)
    cache = model.new_cache(1, 16)
    batch = ForwardBatch.build([[5]], [0], cache.block_tables, 16, logits="none")
    logits = to_numpy(model.forward(batch.to(model.device), cache.pages))
    assert logits.shape == (0, CONFIG.vocab_size)


def test_a_gpu_drops_only_what_pays(place, rows_of_mlps, monkeypatch):
    """Dropping means that the host calls the last layer, which would delay a short prompt."""
    model = engine.load(config=CONFIG, load_format="dummy", **place)
    ids = np.arange(40).tolist()
    n, f = CONFIG.hidden_size, CONFIG.intermediate_size
    saved = 39 * (n * CONFIG.num_heads * CONFIG.head_dim + 3 * n * f)
    rows = []
    for least in (saved, saved + 1):
        monkeypatch.setattr(decoder, "_MIN_SAVED", least)
        logits = to_numpy(model.step([ids], model.new_cache(1, 48)))
        assert logits.shape == (1, CONFIG.vocab_size)
        rows.append(rows_of_mlps[-1])
    assert rows == ([1, 1] if place["device"] == "cpu" else [1, 40])
