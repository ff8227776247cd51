"""Longrope: tokens are those of the factors that each sequence's length calls for.

The reference computes every sequence from scratch as one prompt, which `tests/models` compares with
transformers.
"""

from __future__ import annotations

import dataclasses
import json
import random

import numpy as np
import pytest

from engine import BeamSearchParams, SamplingParams, load
from engine.tasks.embeddings import embed
from tests.distributed.golden import GOLDEN, write_checkpoint
from tests.e2e.test_oracle import _random_options, _random_requests, _serve
from tests.e2e.tiny import (
    alone,
    generate,
    make_engine,
    make_llm,
    mixed_params,
    run,
    swap_gb,
    tiny_model,
)
from tests.speculative.test_draft_model import serve
from tests.speculative.test_lossless import check_same
from tests.tasks.test_beam_search import _log_softmax, _plain_beam_search

CASE = "phi3_longrope_border"
BORDER = 32
LENGTHS = (10, 17, 30, 31, 32, 33, 47)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The checkpoint of a golden model, for sequences of up to 256 tokens."""
    path = write_checkpoint(CASE, tmp_path_factory.mktemp(CASE))
    config = json.loads((path / "config.json").read_text())
    config["max_position_embeddings"] = 256
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request):
    tiny_model(request.param)  # or skip
    return request.param


@pytest.fixture(scope="module")
def model(folder, where):
    """The model; on a GPU, only this mode gives the same tokens in any batch."""
    return load(folder, device=where, dtype="float32", deterministic=where == "cuda")


@pytest.fixture(scope="module")
def exact(folder):
    return load(folder, device="cpu", deterministic=True)


def with_rope(model, **change):
    """The same weights with another rope."""
    rope = dataclasses.replace(model.config.rope, **change)
    config = dataclasses.replace(model.config, rope=rope)
    return load(
        model.source.path, device=model.device, dtype="float32", config=config, deterministic=True
    )


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(4, 97, length).tolist() for length in LENGTHS]


def from_scratch(model, prompt, count):
    """Return greedy tokens, each from a cache that gets the whole sequence at once."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model.step([ids], model.new_cache(1, 200))[0].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def wanted(model, prompts):
    """24 greedy tokens after each prompt: they cross the border, or begin beyond it."""
    return [from_scratch(model, prompt, 24) for prompt in prompts]


def test_a_generation_across_the_border_equals_transformers(where, tmp_path):
    record = json.loads((GOLDEN / "models" / f"{CASE}.json").read_text())
    prompt, tokens = record["prompt"], record["greedy"]
    assert len(prompt) < BORDER < len(prompt) + len(tokens)
    model = load(write_checkpoint(CASE, tmp_path), device=where, dtype="float32")
    for count in (len(tokens), 90):
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        output = generate(model, prompt, params)
        assert list(output.outputs[0].token_ids[: len(tokens)]) == tokens


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 9},
        {"async_scheduling": False, "enable_prefix_caching": False},
        {"max_prefill_chunk": 5},
        {"num_blocks": 13, "max_model_len": 200, "preemption_mode": "recompute"},
        {"num_blocks": 13, "max_model_len": 200, "swap_space_gb": swap_gb(40)},
        {"graphs": True, "max_num_seqs": 9},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=str,
)
def test_greedy_tokens_follow_the_length_not_the_limit(model, prompts, wanted, options):
    """Requests that may become short or long, in one batch."""
    options = dict(options)
    has_graphs = options.pop("graphs", False)
    engine = make_engine(model, **options)
    if has_graphs and engine.runner.graphs is None:
        engine.runner.capture_graphs(engine.config.scheduler.max_model_len)
    for index, prompt in enumerate(prompts):
        count = 24 if index % 2 else 100
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        engine.add_request(f"r{index}", prompt, params)
    last = run(engine)
    got = [list(last[f"r{index}"].outputs[0].token_ids[:24]) for index in range(len(prompts))]
    assert got == wanted
    assert all(output.num_cached_tokens == 0 for output in last.values())


def test_the_factors_matter(model, prompts, wanted):
    """With the short factors alone all of them differ, from some token after the border on."""
    other = with_rope(model, long_factor=model.config.rope.short_factor)
    for prompt, tokens in zip(prompts, wanted, strict=True):
        found = from_scratch(other, prompt, 24)
        num_short = max(0, BORDER - len(prompt) + 1)
        assert found[:num_short] == tokens[:num_short] and found != tokens


@pytest.mark.parametrize("seed", range(2))
def test_random_load(model, seed):
    """Sampling of all kinds, n > 1, shared prefixes, preemption, swapping and aborts."""
    rng = random.Random(seed)
    requests = list(_random_requests(rng, 8))
    outputs = _serve(make_engine(model, **_random_options(rng)), requests)
    for r in requests:
        want = alone(model, r.prompt, r.params)
        for tokens, completion in zip(want, outputs[r.name].outputs, strict=True):
            got = list(completion.token_ids)
            assert completion.finish_reason == "abort" or got == tokens
            assert got == tokens[: len(got)]


@pytest.mark.parametrize("num_drafts", [1, 4, 11])
def test_drafts_across_the_border(exact, prompts, num_drafts):
    """Right and wrong chains and trees; logits of accepted drafts are those of plain decoding."""
    requests = {
        f"r{i}": (prompt, mixed_params(i, max_tokens=30, logprobs=2))
        for i, prompt in enumerate(prompts)
    }
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 160}
    made, *_ = check_same(exact, requests, num_drafts, plain=options, **options)
    assert made.stats().speculation.num_accepted_tokens > 20


def test_a_draft_model_changes_its_factors_too(folder, exact, prompts, monkeypatch):
    """Its drafts are those of the target, which is the same model, on both sides of the border."""
    draft = load(folder, device="cpu", deterministic=True)
    monkeypatch.setattr("engine.llm_engine.load_draft", lambda config, target: config and draft)
    prompts = prompts[:4]
    params = [mixed_params(i, max_tokens=40) for i in range(4)]
    options = {"max_num_seqs": 4, "num_blocks": 96}
    want, _ = serve(make_engine(exact, **options), prompts, params)
    config = {"model": "tiny", "num_speculative_tokens": 4, "adaptive": False}
    got, stats = serve(make_engine(exact, speculative_config=config, **options), prompts, params)
    assert got == want
    assert stats.num_draft_tokens > 80 and stats.acceptance_rate == 1.0


def test_requests_of_other_limits_share_a_prefix(model, prompts):
    engine = make_engine(model)
    for name, max_tokens in [("a", 1), ("b", 150)]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        engine.add_request(name, prompts[2], params)
        cached = run(engine)[name].num_cached_tokens
        assert cached == (0 if name == "a" else 16)


@pytest.mark.parametrize("length", [20, 28, 40])
def test_prompt_logprobs(model, prompts, length):
    """Those of the prompt's own factors; a recomputation behind it does not report them again."""
    prompt = [token for ids in prompts for token in ids][:length]
    params = SamplingParams(temperature=0.0, max_tokens=20, prompt_logprobs=0, ignore_eos=True)
    output = generate(model, prompt, params)
    logits = np.asarray(model.step([prompt], model.new_cache(1, 40), logits="all")[0].tolist())
    want = [_log_softmax(row)[token] for row, token in zip(logits, prompt[1:], strict=False)]
    pairs = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    got = [entry[token].logprob for entry, token in pairs]
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert list(output.outputs[0].token_ids) == from_scratch(model, prompt, 20)


def test_beams_across_the_border(exact):
    llm = make_llm(exact, max_num_seqs=9)
    prompt = [int(i) for i in np.random.default_rng(1).integers(4, 97, 25)]
    params = BeamSearchParams(beam_width=4, max_tokens=12, ignore_eos=True)
    [output] = llm.beam_search([prompt], params)
    want = _plain_beam_search(exact, prompt, 4, 12, 1.0, True)
    assert [s.token_ids for s in output.sequences] == [ids for _, ids in want]
    np.testing.assert_allclose([s.score for s in output.sequences], [s for s, _ in want], 1e-4)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_of_short_and_long_texts_in_one_batch(model, prompts, pooling):
    found = embed(model, prompts, pooling)
    for prompt, vector in zip(prompts, found, strict=True):
        np.testing.assert_allclose(vector, embed(model, [prompt], pooling)[0], atol=1e-4)
    other = with_rope(model, short_factor=model.config.rope.long_factor)
    for prompt, vector, with_long in zip(
        prompts, found, embed(other, prompts, pooling), strict=True
    ):
        assert np.allclose(vector, with_long, atol=1e-4) == (len(prompt) > BORDER)
