"""Tokens with drafts are those of plain decoding, whatever is proposed."""

from __future__ import annotations

import itertools
import math
import zlib

import numpy as np
import pytest

import engine
from engine.cache.kv_cache import KVGeometry
from engine.drafts import Drafts
from tests.e2e.tiny import VOCAB, check_drained, make_engine, mixed_params, run, tiny_model
from tests.models.conftest import CASES
from tests.speculative.proposers import GARBAGE, KINDS, ODD, KnownProposer, Unprintable, outputs_of

NUM_PROMPTS = 18  # times 56 models: a thousand


def speculative_engine(model, proposer, num_tokens, **options):
    """Make an engine that always verifies what `proposer` proposes."""
    config = {"proposer": print, "num_speculative_tokens": num_tokens, "adaptive": False}
    made = make_engine(model, speculative_config=config, **options)
    made.speculation._proposer._proposer = proposer
    return made


def serve(made, requests):
    """Serve {name: (prompt, params)}; return the output ids of each continuation, and the rest."""
    for name, (prompt, params) in requests.items():
        made.add_request(name, prompt, params)
    last = run(made)
    return outputs_of(last), last


def check_same(model, requests, num_tokens, kinds=KINDS, *, plain=None, **options):
    """Serve requests plainly and with drafts; return the counters, and the proposer."""
    want, plain_last = serve(make_engine(model, **(plain or {})), requests)
    proposer = KnownProposer(want, model.config.vocab_size, kinds)
    made = speculative_engine(model, proposer, num_tokens, **options)
    got, last = serve(made, requests)
    assert got == want
    for name, output in last.items():
        for one, other in zip(output.outputs, plain_last[name].outputs, strict=True):
            assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
            assert one.logprobs == other.logprobs
    check_nothing_kept(made)
    return made, proposer, last, plain_last


def check_nothing_kept(made):
    """Check that nothing is kept for requests that have ended."""
    check_drained(made)
    speculation = made.speculation
    assert not speculation._num_real and not speculation._controller._of


def _requests(case, max_model_len, vocab_size):
    """Return random prompts, greedy and sampled with a seed."""
    rng = np.random.default_rng(zlib.crc32(case.encode()))
    longest = min(64, max_model_len)
    requests = {}
    for index in range(NUM_PROMPTS):
        prompt = rng.integers(0, vocab_size, rng.integers(1, longest // 2)).tolist()
        more = {"max_tokens": int(rng.integers(1, min(24, longest - len(prompt))))}
        requests[f"r{index}"] = prompt, mixed_params(index, **more, logprobs=[None, 2][index % 2])
    return requests


@pytest.mark.parametrize("case", CASES)
def test_a_thousand_prompts_over_all_families(golden, case):
    """Any number of drafts, right, wrong and invalid ones; bit for bit, with log-probabilities."""
    model = engine.load(
        golden(case).directory, device="cpu", dtype="float32", deterministic=True, progress=False
    )
    requests = _requests(case, model.max_model_len, model.config.vocab_size)
    num_tokens = 1 + CASES.index(case) % 16
    if KVGeometry.of_model(model.config, "float32").has_states:
        num_tokens = min(num_tokens, 7)  # the most tokens that recurrent layers verify
    options = {"max_num_seqs": NUM_PROMPTS, "num_blocks": 160, "max_num_batched_tokens": 200}
    made, *_ = check_same(model, requests, num_tokens, plain=options, **options)
    stats = made.stats().speculation
    assert stats.num_accepted_tokens > 20 and stats.acceptance_rate < 0.95
    assert stats.num_proposer_failures > 0


def test_there_are_a_thousand_prompts():
    assert len(CASES) * NUM_PROMPTS >= 1000


@pytest.fixture(scope="module")
def model():
    return tiny_model(deterministic=True)


@pytest.fixture(scope="module")
def plain(model):
    """Requests, and their tokens without drafts."""
    requests = {f"r{index}": ([9, index], mixed_params(index, max_tokens=20)) for index in range(4)}
    return requests, serve(make_engine(model), requests)[0]


class Hostile(KnownProposer):
    """Its proposals are right, but for those of one request; may change its arguments."""

    def __init__(self, outputs, *, drafts=None, tamper=lambda wanted, given: given):
        super().__init__(outputs, VOCAB, ["right"])
        self.bad = drafts
        self.tamper = tamper

    def drafts(self, request, count):
        """Return what is wrong for r1, and what is right for the others."""
        if self.bad is not None and request.request_id == "r1":
            return self.bad(VOCAB, count)
        return super().drafts(request, count)

    def propose(self, wanted):
        """Change what is asked or answered."""
        return self.tamper(wanted, super().propose(wanted))


@pytest.mark.parametrize("index", range(len(GARBAGE) + len(ODD)))
def test_each_kind_of_garbage(model, plain, index):
    """It is dropped and counted; the other requests of the step keep their drafts."""
    requests, want = plain
    made = speculative_engine(model, Hostile(want, drafts=(GARBAGE + ODD)[index]), 4)
    got, _ = serve(made, requests)
    stats = made.stats().speculation
    assert got == want
    assert stats.num_accepted_tokens > 30
    assert stats.num_proposer_failures < 30
    assert bool(stats.num_proposer_failures) == (index < len(GARBAGE))
    check_nothing_kept(made)


def _raise(wanted, given):
    raise KeyError(wanted)


def _clear(wanted, given):
    wanted.clear()
    return given


def _ask_for_more(wanted, given):
    wanted[0] = wanted[0][0], 10**6
    return [Drafts((1,) * 1000), *given[1:]]


TAMPERING = {
    "raises": _raise,
    "raises without text": lambda wanted, given: (_ for _ in ()).throw(Unprintable),
    "none": lambda wanted, given: None,
    "too few": lambda wanted, given: given[1:],
    "too many": lambda wanted, given: [*given, None],
    "endless": lambda wanted, given: itertools.repeat(None),
    "number": lambda wanted, given: 3,
    "nan": lambda wanted, given: [math.nan] * len(given),
    "clears its argument": _clear,
    "changes its argument": _ask_for_more,
}


@pytest.mark.parametrize("how", TAMPERING)
def test_wrong_answers_to_the_whole_call(model, plain, how):
    requests, want = plain
    made = speculative_engine(model, Hostile(want, tamper=TAMPERING[how]), 4)
    got, _ = serve(made, requests)
    assert got == want
    assert made.stats().speculation.num_proposer_failures > 0
    check_nothing_kept(made)


def _endless(ids, count):
    yield from itertools.repeat(1)


def _changes_its_argument(ids, count):
    ids[:] = [VOCAB + 1] * 50
    return [1]


CALLABLES = {
    "raises": (lambda ids, count: 1 / 0, True),
    "exits with an exception of its own": (lambda ids, count: _raise(ids, count), True),
    "endless": (_endless, True),
    "wrong arguments": (lambda: [1], True),
    "text": (lambda ids, count: "12", True),
    "fractions": (lambda ids, count: [1.5], True),
    "nan": (lambda ids, count: [math.nan], True),
    "array of nan": (lambda ids, count: np.full(count, np.nan), True),
    "negative": (lambda ids, count: [-1], True),
    "out of range": (lambda ids, count: [VOCAB], True),
    "huge": (lambda ids, count: [10**5000], True),
    "too many": (lambda ids, count: range(10**12), True),
    "a wrong tree": (lambda ids, count: Drafts((1, 2), (1, -1)), True),
    "a dict of texts": (lambda ids, count: {"a": 1}, True),
    "an array": (lambda ids, count: np.arange(count), False),
    "array elements": (lambda ids, count: list(np.arange(count)), False),
    "a set": (lambda ids, count: {1}, False),
    "a generator": (lambda ids, count: (i for i in range(count)), False),
    "nothing": (lambda ids, count: None, False),
    "empty": (lambda ids, count: (), False),
    "changes its argument": (_changes_its_argument, False),
    "a tree": (lambda ids, count: Drafts((1, 2), (-1, -1)) if count > 1 else None, False),
}


@pytest.mark.parametrize("how", CALLABLES)
def test_callables(model, plain, how):
    requests, want = plain
    call, fails = CALLABLES[how]
    config = {"proposer": call, "num_speculative_tokens": 4, "adaptive": False}
    made = make_engine(model, speculative_config=config)
    got, _ = serve(made, requests)
    assert got == want
    assert bool(made.stats().speculation.num_proposer_failures) == fails
    check_nothing_kept(made)
