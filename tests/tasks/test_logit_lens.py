"""Logit lens: against the model's trace, in passes of any size, and beside running requests."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from engine.async_engine import AsyncEngine
from engine.errors import RequestError
from engine.sampling_params import SamplingParams
from engine.tasks import embeddings
from engine.tasks.logit_lens import (
    MAX_TOKENS,
    logit_lens,
    logit_lens_in_parts,
    num_lens_layers,
)
from tests.e2e.tiny import HYBRID, VOCAB, make_engine, tiny_model

IDS = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()


def _expected(model, ids):
    """Return the probabilities (L, T, V) by the trace, which has no pages and no batches."""
    logits = np.stack([model.read_residual(one) for one in model.trace(ids).hidden])
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


@pytest.mark.parametrize("limit", [512, 16])
@pytest.mark.parametrize("num_tokens", [1, 5, 16])
def test_as_the_trace(limit, num_tokens, monkeypatch):
    monkeypatch.setitem(embeddings._MAX_TOKENS, "cpu", limit)
    model = tiny_model()
    found = logit_lens(model, IDS, num_tokens, top=4)
    want = _expected(model, IDS[:-1])[:, -num_tokens:]  # the position before each token
    own = IDS[-num_tokens:]
    assert found.token_ids.tolist() == own
    p = np.take_along_axis(want, np.array(own)[None, :, None], axis=-1)
    np.testing.assert_allclose(found.probabilities, p[..., 0], rtol=1e-3)
    np.testing.assert_array_equal(found.ranks, 1 + (want > p).sum(-1))
    best = np.argsort(-want, axis=-1, kind="stable")[..., :4]
    np.testing.assert_array_equal(found.top_ids, best)
    np.testing.assert_allclose(
        found.top_probabilities, np.take_along_axis(want, best, -1), rtol=1e-3
    )
    assert found.ranks.dtype == found.top_ids.dtype == np.int32
    assert found.probabilities.dtype == found.top_probabilities.dtype == np.float32


@pytest.mark.parametrize("config", [None, HYBRID], ids=["attention", "hybrid"])
def test_the_last_layer_is_the_models_own_answer(config):
    model = tiny_model() if config is None else tiny_model(config=config)
    found = logit_lens(model, IDS, 3)
    logits = model.step([IDS[:-1]], model.new_cache(1, len(IDS)), logits="all")[0, -3:]
    np.testing.assert_array_equal(found.top_ids[-1, :, 0], logits.argmax(-1))
    assert len(found.ranks) == num_lens_layers(model) == model.config.num_layers


@pytest.mark.gpu
def test_on_the_gpu_as_on_the_cpu():
    found, want = (logit_lens(tiny_model(device), IDS, 4) for device in ("cuda", "cpu"))
    np.testing.assert_array_equal(found.token_ids, want.token_ids)
    np.testing.assert_allclose(found.probabilities, want.probabilities, rtol=1e-2, atol=1e-6)
    np.testing.assert_allclose(found.top_probabilities, want.top_probabilities, rtol=1e-2)


@pytest.mark.parametrize(
    ("ids", "options", "words"),
    [
        ([1], {}, "token_ids must have 2 to 256 tokens for the logit lens; got 1 tokens"),
        ([1] * 257, {}, "got 257 tokens"),
        (5, {}, "token_ids must have 2 to 256 tokens for the logit lens; got 5"),
        ([1, VOCAB], {}, "vocabulary"),
        ([1, 2, 3], {"num_tokens": 3}, r"num_tokens must be an integer in \[1, 2\]; got 3"),
        ([1] * 40, {"num_tokens": 17}, r"num_tokens must be an integer in \[1, 16\]; got 17"),
        ([1, 2], {"num_tokens": True}, "num_tokens must be an integer"),
        ([1, 2], {"top": 0}, r"top must be an integer in \[1, 20\]; got 0"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_computed(ids, options, words):
    with pytest.raises(RequestError, match=words):
        logit_lens_in_parts(tiny_model(), ids, **options)
    assert MAX_TOKENS > 256  # here the model's own limit applies


def test_models_without_a_lens():
    plain = SimpleNamespace(altup=None, num_layers=4, model_type="llama")
    streams = SimpleNamespace(altup=object(), num_layers=4, model_type="gemma3n")
    assert num_lens_layers(SimpleNamespace(num_stages=1, config=plain)) == 4
    assert num_lens_layers(SimpleNamespace(num_stages=2, config=plain)) == 0
    model = SimpleNamespace(num_stages=1, config=streams)
    assert num_lens_layers(model) == 0
    with pytest.raises(RequestError, match="the logit lens does not support gemma3n"):
        logit_lens_in_parts(model, [1, 2])


def test_requests_are_served_between_the_parts_and_stay_the_same(monkeypatch):
    monkeypatch.setitem(embeddings._FIRST_TOKENS, "cpu", 4)
    monkeypatch.setattr(embeddings, "_PASS_SECONDS", 0.0)
    want = logit_lens(tiny_model(), IDS, 2)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    engine = make_engine(tiny_model())
    engine.add_request("alone", IDS[:9], params)
    alone = []
    while engine.has_unfinished_requests():
        alone += engine.step()

    async def main():
        engine = AsyncEngine(make_engine(tiny_model()))
        stream = engine.generate(IDS[:9], params)
        outputs = [await anext(stream)]
        task = asyncio.create_task(engine.logit_lens(IDS, 2))
        num_during = 0
        async for output in stream:
            outputs.append(output)
            num_during += not task.done()
        found = await task
        with pytest.raises(RequestError, match="vocabulary"):
            await engine.logit_lens([1, VOCAB])
        await engine.close()
        return outputs[-1], num_during, found

    last, num_during, found = asyncio.run(asyncio.wait_for(main(), 60))
    assert last.outputs[0].token_ids == alone[-1].outputs[0].token_ids and num_during > 1
    np.testing.assert_array_equal(found.top_ids, want.top_ids)
    np.testing.assert_allclose(found.probabilities, want.probabilities, rtol=1e-4)
