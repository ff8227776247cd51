"""`reset_prefix_cache` after the weights have changed: later requests see nothing of the old."""

from __future__ import annotations

import numpy as np
import pytest

from engine import SamplingParams, llm_engine
from tests.e2e.tiny import CONFIG, HYBRID, make_engine, make_llm, run, tiny_model

PROMPT = np.random.default_rng(7).integers(4, 97, 90).tolist()
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
CONFIGS = {"attention": CONFIG, "hybrid": HYBRID}


def change_weights(model):
    """Scale the embeddings' halves differently, in place: every key changes."""
    model.decoder.weights["embed"].data[:, ::2] *= -1.5


def served(engine, name, prompt=PROMPT):
    """Return the log-probabilities of one request's tokens, and the number found cached."""
    engine.add_request(name, prompt, GREEDY)
    output = run(engine)[name]
    return logprobs_of(output), output.num_cached_tokens


def logprobs_of(output):
    """Return {token id: log-probability} of each generated token."""
    entries = output.outputs[0].logprobs
    return [{i: entry[i].logprob for i in entry} for entry in entries]


def fresh(model):
    """Return the log-probabilities of a request in a new engine."""
    engine = make_engine(model, max_num_batched_tokens=48)
    found, num_cached = served(engine, "fresh")
    assert num_cached == 0
    engine.close()
    return found


@pytest.fixture(params=CONFIGS)
def model(request):
    return tiny_model(config=CONFIGS[request.param], deterministic=True)


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=str)
def test_later_requests_use_the_new_weights_only(model, options):
    engine = make_engine(model, max_num_batched_tokens=48, **options)
    before = fresh(model)
    assert served(engine, "a") == (before, 0)
    found, num_cached = served(engine, "b")
    assert found == before and num_cached >= 64
    change_weights(model)
    after = fresh(model)
    stale, num_cached = served(engine, "c")
    assert num_cached >= 64 and stale != after  # the test would notice a cache that stays
    num_cached_blocks = engine.stats().scheduler.num_cached_blocks
    assert engine.reset_prefix_cache() == num_cached_blocks > 0
    if engine.scheduler.blocks.states is not None:
        slots = engine.scheduler.blocks.states.allocator
        assert slots.num_free == slots.num_blocks  # no snapshot is left
    assert served(engine, "d") == (after, 0)
    found, num_cached = served(engine, "e")
    assert found == after and num_cached >= 64
    engine.close()


def test_a_request_in_progress_ends_with_its_old_keys(model):
    engine = make_engine(model, max_num_batched_tokens=48)
    engine.add_request("old", PROMPT, GREEDY)
    engine.step()  # half of the prompt
    change_weights(model)
    assert engine.reset_prefix_cache() == 0
    engine.add_request("new", PROMPT, GREEDY)
    outputs = run(engine)
    assert len(outputs["old"].outputs[0].token_ids) == 12
    assert logprobs_of(outputs["new"]) == fresh(model)
    assert outputs["new"].num_cached_tokens == 0
    assert served(engine, "later")[1] >= 64
    engine.close()


def test_pages_of_a_draft_model_go_with_the_blocks(monkeypatch):
    """A draft model equal to the target is always right, unless its keys are old."""
    target = tiny_model(deterministic=True)
    draft = tiny_model(deterministic=True)
    monkeypatch.setattr(llm_engine, "load_draft", lambda config, _: config and draft)
    config = {"model": "tiny", "num_speculative_tokens": 3, "adaptive": False}
    engine = make_engine(target, speculative_config=config, num_blocks=96)

    def num_wrong(name):
        before = engine.stats().speculation
        served(engine, name)
        stats = engine.stats().speculation
        num_drafts = stats.num_draft_tokens - before.num_draft_tokens
        assert num_drafts > 0
        return num_drafts - (stats.num_accepted_tokens - before.num_accepted_tokens)

    first = num_wrong("a")  # drafts beyond the last token
    assert num_wrong("b") == first
    change_weights(target)
    change_weights(draft)
    engine.reset_prefix_cache()
    assert num_wrong("c") == first
    engine.close()


def test_the_offline_engine_returns_the_number_of_blocks():
    llm = make_llm(tiny_model())
    llm.generate([PROMPT], GREEDY)
    assert llm.reset_prefix_cache() == (90 + 12 - 1) // 16
    assert llm.reset_prefix_cache() == 0
    llm.close()
