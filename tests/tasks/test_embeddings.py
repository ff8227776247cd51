"""Embeddings: against the residual stream of each sequence alone, and beside running requests."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from engine.async_engine import AsyncEngine
from engine.errors import RequestError
from engine.sampling_params import RequestOutputKind, SamplingParams
from engine.tasks import embeddings
from engine.tasks.embeddings import embed, embed_in_parts
from tests.e2e.tiny import VOCAB, make_engine, tiny_model

# Lengths around a page, single tokens between longer ones, and one that must be chunked.
LENGTHS = (5, 1, 16, 17, 1, 70, 33)


@pytest.fixture
def sequences():
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, length).tolist() for length in LENGTHS]


def _expected(model, ids, pooling):
    """Pool what the model's trace, which has no pages and no batches, gives."""
    decoder = model.decoder
    normed = np.asarray(decoder.final_norm(model.trace(ids).hidden[-1]))
    vector = normed[-1] if pooling == "last" else normed.mean(axis=0)
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("limit", [512, 32])
def test_a_batch_gives_what_each_sequence_gives_alone(sequences, pooling, limit, monkeypatch):
    monkeypatch.setitem(embeddings._MAX_TOKENS, "cpu", limit)
    model = tiny_model()
    found = embed(model, sequences, pooling)
    for ids, vector in zip(sequences, found, strict=True):
        assert vector.dtype == np.float32
        np.testing.assert_allclose(vector, _expected(model, ids, pooling), atol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_on_the_gpu_as_on_the_cpu(sequences, pooling):
    found = embed(tiny_model("cuda"), sequences, pooling)
    np.testing.assert_allclose(found, embed(tiny_model(), sequences, pooling), atol=1e-4)


def test_normalize():
    model = tiny_model()
    plain = embed(model, [[5, 6, 7]], normalize=False)[0]
    unit = embed(model, [[5, 6, 7]])[0]
    assert not np.isclose(np.linalg.norm(plain), 1)
    np.testing.assert_allclose(plain / np.linalg.norm(plain), unit, rtol=1e-6)
    assert embed(model, []) == []


@pytest.mark.parametrize(
    ("ids", "options", "word"),
    [
        (5, {}, "token_ids must be a sequence of sequences"),
        (iter([[1]]), {}, "token_ids must be a sequence of sequences"),
        ([[1], []], {}, r"token_ids\[1\] must have 1 to 256"),
        ([[1] * 257], {}, "257 tokens"),
        ([[VOCAB]], {}, "vocabulary"),
        ([7], {}, "token_ids"),
        ([[1]], {"pooling": "max"}, "pooling must be 'last' or 'mean'"),
        ([[1]], {"normalize": 1}, "normalize"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_computed(ids, options, word):
    with pytest.raises(RequestError, match=word):
        embed_in_parts(tiny_model(), ids, **options)


def test_requests_are_served_between_the_parts(sequences, monkeypatch):
    monkeypatch.setitem(embeddings._MAX_TOKENS, "cpu", 16)
    model = tiny_model()
    want = embed(tiny_model(), sequences)

    async def main():
        engine = AsyncEngine(make_engine(model))
        params = SamplingParams(
            temperature=0, max_tokens=60, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        stream = engine.generate([1, 2, 3], params)
        await anext(stream)
        task = asyncio.create_task(engine.embed(sequences))
        num_outputs = 0
        outputs = []
        async for output in stream:
            outputs.append(output)
            num_outputs += not task.done()
        with pytest.raises(RequestError, match="prompt"):
            await engine.embed([[VOCAB]])
        found = await task
        await engine.close()
        return outputs[-1], num_outputs, found

    output, num_outputs, found = asyncio.run(asyncio.wait_for(main(), 60))
    assert output.finished and num_outputs > 1
    np.testing.assert_allclose(found, want, atol=1e-5)
