"""Arrays in, arrays out, with a model that two processes share: as with one."""

from __future__ import annotations

import numpy as np
import pytest

from engine import SamplingParams
from engine.errors import ConfigError, RequestError
from engine.layers.batch import ForwardBatch
from engine.tasks.embeddings import embed_in_parts
from engine.tasks.logit_lens import logit_lens_in_parts
from tests.distributed.engines import CONFIG, make_engine, run

# Lengths around a page, single tokens, and one that takes two forward passes.
SEQUENCES = [[(7 * i + n) % 50 for i in range(n)] for n in (5, 1, 16, 17, 200)]
IDS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]


@pytest.fixture(scope="module", params=[True, False], ids=["same bits", "sums"])
def engines(request):
    """An engine of one process, and one of two."""
    with (
        make_engine(deterministic=request.param) as one,
        make_engine(tensor_parallel_size=2, deterministic=request.param) as two,
    ):
        yield one, two


def _assert_same(engines, of_model):
    """Compare what a function returns for both models, as a list of arrays."""
    want, found = (of_model(engine.model) for engine in engines)
    assert len(found) == len(want)
    for got, wanted in zip(found, want, strict=True):
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        if engines[0].model.deterministic:
            np.testing.assert_array_equal(got, wanted)
        else:
            np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_between_steps_of_requests(engines, pooling, monkeypatch):
    monkeypatch.setattr("engine.tasks.embeddings._MAX_TOKENS", {"cpu": 128})
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    tokens = {}

    def vectors(model):
        engine = engines[model.num_ranks - 1]
        engine.add_request("a", IDS[0], params)
        found = {}
        for part in embed_in_parts(model, SEQUENCES, pooling):
            found.update(part)
            engine.step()
        tokens[model.num_ranks] = run(engine)
        return [found[index] for index in range(len(SEQUENCES))]

    _assert_same(engines, vectors)
    assert tokens[1] == tokens[2]


def test_a_lens_between_steps_of_requests(engines):
    def lens(model):
        engine = engines[model.num_ranks - 1]
        engine.add_request("a", IDS[0], SamplingParams(max_tokens=9, ignore_eos=True))
        for part in logit_lens_in_parts(model, SEQUENCES[4], 3):
            engine.step()
            found = part
        run(engine)
        return [found.probabilities, found.top_probabilities]

    _assert_same(engines, lens)


def test_steps_on_caches_of_their_own(engines):
    def logits(model):
        one, two = (model.new_cache(2, 64, block_size=size) for size in (16, 32))
        found = [model.step(IDS, one, logits="all"), model.step(IDS[::-1], two)]
        one.close()
        found += [model.step([[7], [8]], two)]
        with pytest.raises(RequestError, match="it was closed"):
            model.step([[1], [2]], one)
        return found

    _assert_same(engines, logits)


def test_caches_that_were_closed_or_forgotten_are_freed_everywhere(engines):
    model = engines[1].model
    kept = model.new_cache(1, 32)
    model.new_cache(1, 32).close()
    model.new_cache(1, 32)
    model.step([[1]], kept)
    numbers = list(model._shared._by_number)
    assert len(numbers) == 2 and numbers[0] == 0
    with pytest.raises(RequestError, match="kv_pages must be the engine's, or of a cache"):
        model.step([[1]], _foreign(model))
    assert model.step([[1]], kept).shape == (1, 50)


def _foreign(model):
    """Return a cache that only this process has."""
    return model.local_model.new_cache(1, 32)


def test_traces_and_what_is_read_from_their_residuals(engines):
    def trace(model):
        found = model.trace(IDS[0])
        return [*found.attention, *found.hidden, model.read_residual(found.hidden[0])]

    _assert_same(engines, trace)
    for wrong in ([[1, 50]], [1, 50], []):
        with pytest.raises(RequestError, match="token_ids"):
            engines[1].model.trace(wrong)
    with pytest.raises(RequestError, match=r"hidden must be float32 \(R, 64\)"):
        engines[1].model.logits(np.zeros((1, 32), np.float32))


def test_logits_of_views_of_hidden_states(engines):
    def logits(model):
        cache = model.new_cache(1, 64)
        batch = ForwardBatch.build([IDS[0]], [0], [[0]], 16, logits="all")
        hidden = model.hidden_states(batch, cache.kv.layers)
        rows = slice(1, 3), slice(None, None, 2), slice(None, None, -1)
        return [model.logits(hidden[each]) for each in rows]

    _assert_same(engines, logits)


def test_scales_of_pages(engines):
    model = engines[1].model
    shape = model.kv_scales.shape
    assert shape == (2, 2, CONFIG.num_kv_heads)
    given = np.random.default_rng(0).uniform(0.5, 2, shape).astype(np.float32)
    for wrong, message in ((given[..., :1], r"of shape \(2, 2, 2\)"), (-given, "positive")):
        with pytest.raises(ConfigError, match=message):
            model.set_kv_scales(wrong)

    def logits(model):
        model.set_kv_scales(given)
        found = [model.kv_scales, model.kv_scales_of("int8")]
        found.append(model.step(IDS, model.new_cache(2, 16, kv_cache_dtype="fp8")))
        model.calibrate_kv_scales(SEQUENCES[:3])
        found += [model.kv_scales, model.kv_scales_of("int8")]
        found.append(model.step(IDS, model.new_cache(2, 16, kv_cache_dtype="int8")))
        return found

    _assert_same(engines, logits)
    np.testing.assert_array_equal(engines[1].model.kv_scales.shape, shape)
    with pytest.raises(RequestError, match=r"token_ids\[1\] must have 1 to"):
        model.calibrate_kv_scales([[1], []])
