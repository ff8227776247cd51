"""Beam search against a few lines of NumPy without any cache."""

from __future__ import annotations

import numpy as np
import pytest

from engine import BeamSearchParams, SamplingParams
from engine.errors import RequestError, UnknownOptionError
from tests.e2e.tiny import (
    CONFIG,
    EOS,
    HYBRID,
    Words,
    check_drained,
    make_llm,
    swap_gb,
    tiny_model,
)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def _log_softmax(x):
    x = x.astype(np.float64) - x.max()
    return x - np.log(np.exp(x).sum())


def _plain_beam_search(model, prompt, width, max_tokens, penalty, ignore_eos):
    beams, done = [((), 0.0)], []
    for step in range(max_tokens):
        candidates = []
        for ids, total in beams:
            cache = model.new_cache(1, len(prompt) + len(ids) + 1)
            logprobs = _log_softmax(model.step(np.array([[*prompt, *ids]]), cache)[0])
            best = np.argsort(-logprobs)[: 2 * width]
            candidates += [((*ids, int(i)), total + logprobs[i]) for i in best]
        candidates.sort(key=lambda c: -c[1])
        beams = []
        for ids, total in candidates[: 2 * width]:
            if ids[-1] == EOS and not ignore_eos:
                done.append((total / max(1, len(ids) - 1) ** penalty, ids))
            elif len(beams) < width:
                beams.append((ids, total))
        if step == max_tokens - 1:
            done += [(total / len(ids) ** penalty, ids) for ids, total in beams]
    return sorted(done, key=lambda d: -d[0])[:width]


PROMPTS = [[5, 6, 7], list(range(10, 45)), [50] * 16]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("width", "max_tokens", "penalty", "ignore_eos", "options"),
    [
        (1, 6, 1.0, True, {}),
        (3, 8, 1.0, False, {}),
        (4, 20, 0.0, False, {"max_num_seqs": 9}),
        (4, 6, -2.0, False, {"max_num_seqs": 16, "enable_prefix_caching": False}),
        (5, 7, 2.0, True, {"max_num_seqs": 2}),  # not even all beams run at once
        (4, 18, 1.0, False, {"num_blocks": 8, "max_model_len": 96, "max_num_seqs": 6}),
        (4, 18, 1.0, False, {"num_blocks": 8, "max_model_len": 96, "swap_space_gb": swap_gb(40)}),
    ],
)
def test_equals_a_plain_search(model, width, max_tokens, penalty, ignore_eos, options, late):
    params = BeamSearchParams(
        beam_width=width, max_tokens=max_tokens, length_penalty=penalty, ignore_eos=ignore_eos
    )
    _check(make_llm(model, async_scheduling=late, **options), model, PROMPTS, params)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 9},
        {"num_blocks": 9, "max_model_len": 112, "max_num_seqs": 6, "swap_space_gb": swap_gb(99)},
    ],
)
def test_beams_of_a_hybrid_copy_their_states(options, late):
    """A beam continues from a copy of its parent's state, or computes it anew."""
    model = tiny_model(config=HYBRID)
    llm = make_llm(model, async_scheduling=late, **options)
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    _check(llm, model, [[5, 6, 7], list(range(10, 75))], params)


def _check(llm, model, prompts, params):
    """Compare the beams, their scores, and what is held at the end."""
    width, max_tokens = params.beam_width, params.max_tokens
    penalty, ignore_eos = params.length_penalty, params.ignore_eos
    outputs = llm.beam_search(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        want = _plain_beam_search(model, prompt, width, max_tokens, penalty, ignore_eos)
        assert [s.token_ids for s in output.sequences] == [ids for _, ids in want]
        np.testing.assert_allclose([s.score for s in output.sequences], [s for s, _ in want], 1e-4)
        assert list(output.prompt_token_ids) == prompt
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    check_drained(llm.llm_engine)
    assert not llm._shared.inbox


@pytest.mark.parametrize("width", [4, 10])
def test_the_limit_of_the_queue_ends_no_search(model, width):
    """Parents that have ended are followed by requests that wait, more than others may."""
    llm = make_llm(model, max_num_seqs=2, max_num_queued_requests=1)
    params = BeamSearchParams(beam_width=width, max_tokens=6)
    _check(llm, model, [list(range(5, 45))], params)


def test_an_error_leaves_no_request_behind(model, monkeypatch):
    """Also none of the beams that were started before the one that failed."""
    llm = make_llm(model, max_num_seqs=9)
    add = llm.llm_engine.add_request
    names = []

    def fail_at_the_sixth(request_id, *args, **options):
        names.append(request_id)
        if len(names) == 6:
            raise MemoryError("injected")
        add(request_id, *args, **options)

    monkeypatch.setattr(llm.llm_engine, "add_request", fail_at_the_sixth)
    with pytest.raises(MemoryError, match="injected"):
        llm.beam_search([5, 6, 7], BeamSearchParams(beam_width=10, max_tokens=6))
    assert not llm._shared.inbox and not llm.llm_engine.num_unfinished_requests
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    check_drained(llm.llm_engine)


def test_some_beams_end_early(model):
    """Some of the cases above reach an end of sequence, and others do not."""
    params = BeamSearchParams(beam_width=4, max_tokens=20, length_penalty=0.0)
    outputs = make_llm(model, max_num_seqs=9).beam_search(PROMPTS, params)
    reasons = {s.finish_reason for output in outputs for s in output.sequences}
    assert reasons == {"stop", "length"}


def test_beams_share_their_blocks(model):
    llm = make_llm(model, max_num_seqs=9, num_blocks=64)
    engine, most = llm.llm_engine, 0
    step = llm._shared.step

    def watched():
        nonlocal most
        step()
        engine.check_integrity()
        stats = engine.scheduler.stats()
        most = max(most, stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks)

    llm._shared.step = watched
    prompt = [int(i) for i in np.random.default_rng(0).integers(4, 97, 160)]
    llm.beam_search(prompt, BeamSearchParams(beam_width=4, max_tokens=10))
    # 10 shared blocks of the prompt, and one or two more for each beam and its parent.
    assert most <= 10 + 2 * 8


def test_other_requests_run_beside_it(model):
    llm = make_llm(model, max_num_seqs=9)
    [alone] = make_llm(model).generate([[9, 8, 7]], _greedy())
    stream = llm.stream([9, 8, 7], _greedy())
    first = next(stream)
    llm.beam_search([5, 6, 7], BeamSearchParams(beam_width=3, max_tokens=6))
    ids = [i for o in (first, *stream) for i in o.outputs[0].token_ids]
    assert ids == list(alone.outputs[0].token_ids)


def _greedy():
    return SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class _Sentencepiece(Words):
    """Decoding strips the space that the first token of a text begins with; no id is special."""

    special_ids = frozenset()
    strip_left = 1

    def token_bytes(self, token_id):
        return b" w%d" % token_id

    def decode(self, ids, skip_special_tokens=True):
        return b"".join(map(self.token_bytes, ids)).decode()[self.strip_left :]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_texts_are_those_of_generate(monkeypatch, prompt):
    """They follow the prompt's: the first word keeps its space, the end of sequence is left out."""
    model = tiny_model()
    monkeypatch.setattr(type(model), "has_tokenizer", True)
    monkeypatch.setitem(model.__dict__, "tokenizer", _Sentencepiece())
    llm = make_llm(model, max_num_seqs=9)
    [found] = llm.beam_search([prompt], BeamSearchParams(beam_width=4, max_tokens=20))
    for sequence in found.sequences:
        follow = _following(sequence.token_ids)
        params = SamplingParams(temperature=0.0, max_tokens=20, logits_processors=[follow])
        [output] = llm.generate([prompt], params)
        [same] = output.outputs
        assert (same.token_ids, same.text) == (list(sequence.token_ids), sequence.text)
        assert same.finish_reason == sequence.finish_reason


def _following(wanted):
    """Return a logits processor that makes the engine sample these tokens."""

    def follow(ids, logits):
        logits[wanted[len(ids)]] = 1e4

    return follow


def test_bad_params_are_refused(model):
    with pytest.raises(RequestError, match=r"beam_width must be a whole number in \[1, 10\]"):
        BeamSearchParams(beam_width=0)
    with pytest.raises(UnknownOptionError, match="did you mean 'length_penalty'"):
        BeamSearchParams(beam_width=2, lenght_penalty=1.0)
    with pytest.raises(RequestError, match="ignore_eos must be True or False"):
        BeamSearchParams(beam_width=2, ignore_eos=1)
    llm = make_llm(model)
    with pytest.raises(RequestError, match=r"prompt\[0\] must be a token id, .*; got 97"):
        llm.beam_search([[5], [97]], BeamSearchParams(beam_width=2))
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    check_drained(llm.llm_engine)
    assert CONFIG.vocab_size == 97
