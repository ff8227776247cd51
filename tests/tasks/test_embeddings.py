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
from tests.e2e.tiny import HYBRID, VOCAB, make_engine, tiny_model

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


@pytest.mark.parametrize("limit", [512, 32])
def test_states_of_a_batch_are_apart(sequences, limit, monkeypatch):
    """A hybrid gives each sequence what `Model.step` leaves of it, in chunks or not."""
    monkeypatch.setitem(embeddings._MAX_TOKENS, "cpu", limit)
    model = tiny_model(config=HYBRID)
    found = embed(model, sequences, "last", normalize=False)
    for ids, vector in zip(sequences, found, strict=True):
        want = model.step([ids], model.new_cache(1, len(ids)))[0]
        np.testing.assert_allclose(model.logits(vector[None])[0], want, atol=2e-5)


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
        ([[1], [2, VOCAB]], {}, rf"token_ids\[1\]\[1\] must be .* the vocabulary; got {VOCAB}"),
        ([[1], [[2]]], {}, r"token_ids\[1\] must have shape \(T,\) .*; got \(1, 1\)"),
        ([[1], [2.5]], {}, r"token_ids\[1\] must be integers; got float64"),
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


def test_passes_beside_others_are_as_long_as_their_time_allows(monkeypatch):
    """A clock by which a token takes 10 ms: 25 tokens a pass, from the second on."""
    model = tiny_model()
    sizes, now = [], [0.0]
    hidden = embeddings._hidden

    def slow(model, cache, rows, batch, pooling):
        sizes.append(sum(stop - start for _, start, stop in batch))
        now[0] += 0.01 * sizes[-1]
        return hidden(model, cache, rows, batch, pooling)

    monkeypatch.setattr(embeddings, "_hidden", slow)
    monkeypatch.setattr(embeddings.time, "monotonic", lambda: now[0])
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, VOCAB, length).tolist() for length in (150, 7, 9, 8, 60)]
    for pooling in ("last", "mean"):
        want = embed(model, sequences, pooling)
        sizes.clear()
        found = {}
        for part in embed_in_parts(model, sequences, pooling, has_others=True):
            found.update(part)
        assert sizes[0] == 24 and sizes[1:4] in ([25, 25, 10], [24, 24, 12])  # 60 in parts
        assert max(sizes) <= 25 and sum(sizes) == 234
        np.testing.assert_allclose([found[i] for i in range(5)], want, atol=2e-5)
    sizes.clear()
    embed(model, sequences)
    assert sizes == [234]


def test_deterministic_passes_do_not_depend_on_time(monkeypatch):
    model = tiny_model(deterministic=True)
    sequences = [[5, 6, 7] * 30, [8, 9]]
    found = [list(embed_in_parts(model, sequences, has_others=True)) for _ in range(2)]
    monkeypatch.setattr(embeddings, "_PASS_SECONDS", 1e-9)
    found.append(list(embed_in_parts(model, sequences, has_others=True)))
    for parts in found[1:]:
        for one, other in zip(found[0], parts, strict=True):
            assert one.keys() == other.keys()
            for index in one:
                np.testing.assert_array_equal(one[index], other[index])


@pytest.mark.parametrize("seed", range(5))
def test_the_cache_has_room_for_every_pass(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 200, 30).tolist()
    room = embeddings._most_blocks(lengths, 128)
    size = embeddings.PassSize(128)
    done = dict.fromkeys(range(30), 0)
    for batch in embeddings._batches(lengths, size):
        assert sum(-(-stop // 16) for _, _, stop in batch) <= room
        for index, start, stop in batch:
            assert done[index] == start and stop - start <= 128
            done[index] = stop
        size.num_tokens = int(rng.integers(16, 129))
    assert [done[i] for i in range(30)] == lengths
