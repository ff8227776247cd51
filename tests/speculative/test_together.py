"""Drafts beside everything else that a request or an engine may ask for: the same tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from engine import BeamSearchParams, SamplingParams
from engine.drafts import Drafts
from engine.model import Model
from engine.sampling_params import RequestOutputKind
from engine.structured import sources
from tests.e2e.test_structured_output import FIRST, LETTERS, Letters
from tests.e2e.test_structured_output import KINDS as GRAMMARS
from tests.e2e.tiny import (
    CONFIG,
    EOS,
    VOCAB,
    make_engine,
    make_llm,
    mixed_params,
    swap_gb,
    tiny_model,
)
from tests.speculative.proposers import KINDS, KnownProposer, outputs_of
from tests.speculative.test_lossless import (
    check_nothing_kept,
    check_same,
    serve,
    speculative_engine,
)

MODELS = {
    "plain": {},
    "deterministic": {"deterministic": True},
    "windows": {"config": dataclasses.replace(CONFIG, layer_windows=(20, 0))},
}
PLAIN = {"max_num_seqs": 12, "num_blocks": 200, "max_num_batched_tokens": 256}


@pytest.fixture(scope="module", autouse=True)
def _letters():
    """Text of one printable character per token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "has_tokenizer", True)
        patch.setattr(Model, "tokenizer", Letters())
        yield


@pytest.fixture(scope="module", params=MODELS)
def any_model(request):
    return tiny_model(**MODELS[request.param])


@pytest.fixture(scope="module", params=["plain", "deterministic"])
def model(request):
    return tiny_model(**MODELS[request.param])


@pytest.fixture(params=[False, True], ids=["sync", "late"])
def late(request):
    return request.param


def _requests(count, seed=0, *, common=0, **more):
    rng = np.random.default_rng(seed)
    stem = rng.integers(0, VOCAB, common).tolist()
    return {
        f"r{index}": (
            stem + rng.integers(0, VOCAB, rng.integers(1, 50)).tolist(),
            mixed_params(index, **({"max_tokens": 20 + index} | more)),
        )
        for index in range(count)
    }


ENGINES = {
    "few blocks": {"num_blocks": 9, "max_model_len": 144, "enable_prefix_caching": False},
    "swap": {
        "num_blocks": 9, "max_model_len": 144,
        "swap_space_gb": swap_gb(20), "preemption_mode": "swap", "watermark": 0.0,
    },
    "long blocks": {"block_size": 64, "num_blocks": 8, "max_model_len": 192},
    "few tokens a step": {"max_num_batched_tokens": 9, "max_prefill_chunk": 5},
    "one at a time": {"max_num_seqs": 1},
    "lpm": {"scheduling_policy": "lpm", "max_blocks_per_salt": 2},
}  # fmt: skip


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_every_kind_of_engine(any_model, options, late):
    """Preemption, swap, shared prefixes, chunks, and budgets that cut drafts off."""
    requests = _requests(8, seed=1, common=20, max_tokens=50)
    options = {"max_num_seqs": 6} | options
    made, *_ = check_same(any_model, requests, 6, plain=PLAIN, async_scheduling=late, **options)
    stats = made.scheduler.stats()
    assert options.get("num_blocks", 64) != 9 or stats.num_preemptions > 0
    assert "swap_space_gb" not in options or stats.num_swaps > 0
    shares = options.get("enable_prefix_caching", True) and "block_size" not in options
    assert not shares or stats.prefix_cache_hits > 0
    assert made.stats().speculation.num_accepted_tokens > 20


def test_preemption_and_swap_of_requests_with_drafts():
    """Requests with drafts in flight, or noted, are among those preempted."""
    model = tiny_model()
    options = ENGINES["swap"] | {"max_num_seqs": 6}
    want, _ = serve(make_engine(model, **PLAIN), _requests(8, seed=2, max_tokens=60))
    made = speculative_engine(model, KnownProposer(want, VOCAB), 8, **options)
    schedule, num_lost = made.scheduler.schedule, 0

    def counted(excluded=()):
        nonlocal num_lost
        noted = {r for r in made.scheduler.unfinished_requests() if r.drafts is not None}
        output = schedule(excluded)
        num_lost += len(noted & set(output.preempted))
        return output

    made.scheduler.schedule = counted
    got, _ = serve(made, _requests(8, seed=2, max_tokens=60))
    assert got == want and num_lost > 0
    check_nothing_kept(made)


WAYS = {
    "n": {"n": 3, "temperature": 0.9},
    "best_of": {"n": 2, "best_of": 4, "temperature": 0.5},
    "logprobs": {"logprobs": 3},
    "all logprobs": {"logprobs": -1, "prompt_logprobs": 2},
    "repetition": {"repetition_penalty": 1.4},
    "presence and frequency": {"presence_penalty": 0.8, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {5: 4.0, 9: -100.0, 40: 2.5}},
    "allowed": {"allowed_token_ids": list(range(10, 40))},
    "bad words": {"bad_words": ["ab", "c", "xyz"], "allowed_token_ids": None},
    "min_tokens": {"min_tokens": 12, "ignore_eos": False, "logit_bias": {EOS: 8.0}},
    "end of sequence": {"ignore_eos": False, "logit_bias": {EOS: 2.0}},
    "stop ids": {"stop_token_ids": list(range(40, 48))},
    "stop strings": {"stop": ["a", "bc", "?"], "include_stop_str_in_output": True},
    "processor": {"logits_processors": [lambda ids, logits: _add(ids, logits)]},
    "deltas": {"output_kind": RequestOutputKind.FINAL_ONLY},
}


def _add(ids, logits):
    """A processor that depends on all ids so far."""
    logits[sum(ids) % VOCAB] += 5.0


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_sampling(model, way, late):
    more = {name: value for name, value in WAYS[way].items() if value is not None}
    requests = _requests(6, seed=3, **more)
    options = {"max_num_seqs": 12, "num_blocks": 200, "async_scheduling": late}
    kinds = KINDS if model.deterministic else (*KINDS, "tree", "tree")
    made, _, last, plain = _same(model, requests, 7, kinds, way, options)
    assert made.stats().speculation.num_accepted_tokens > 15
    for name, output in last.items():
        for one, other in zip(output.outputs, plain[name].outputs, strict=True):
            assert one.text == other.text


def _same(model, requests, num_tokens, kinds, way, options):
    """Compare; log-probabilities bit for bit only if the model is deterministic."""
    if model.deterministic or not (has_logprobs := "logprobs" in way or way == "best_of"):
        return check_same(model, requests, num_tokens, kinds, plain=PLAIN, **options)
    assert has_logprobs
    want, plain = serve(make_engine(model, **PLAIN), requests)
    made = speculative_engine(model, KnownProposer(want, VOCAB, kinds), num_tokens, **options)
    got, last = serve(made, requests)
    assert got == want
    for name, output in last.items():
        for one, other in zip(output.outputs, plain[name].outputs, strict=True):
            assert abs((one.cumulative_logprob or 0) - (other.cumulative_logprob or 0)) < 1e-3
            for entry, expected in zip(one.logprobs or (), other.logprobs or (), strict=True):
                assert entry.keys() == expected.keys()
                for token, logprob in entry.items():
                    assert abs(logprob.logprob - expected[token].logprob) < 1e-4
    check_nothing_kept(made)
    return made, None, last, plain


@pytest.mark.parametrize("kind", GRAMMARS)
def test_grammars(model, kind, late):
    """Drafts that the grammar allows, others, and ones after its end."""
    structured, matches = GRAMMARS[kind]
    more = {"structured": structured, "temperature": 2.0, "max_tokens": 120, "ignore_eos": False}
    requests = {
        name: (prompt, dataclasses.replace(params, **more, seed=index))
        for index, (name, (prompt, params)) in enumerate(_requests(6, seed=4).items())
    }
    options = {"max_num_seqs": 6, "num_blocks": 200, "async_scheduling": late}
    made, _, last, _ = check_same(model, requests, 5, plain=PLAIN, **options)
    assert all(matches(output.outputs[0].text) for output in last.values())
    # Where steps overlap, a proposer that had nothing a few times is asked less often.
    assert late or made.stats().speculation.num_drafts > 0


# Each "a" makes the row of the parser longer, until it meets its limit; "b" does not.
LIMITED = {"grammar": 'start: "c" (e | b)\ne: e e | e e e | "a" | "a" e\nb: /b{30}/'}


@pytest.mark.parametrize("favoured", ["a", "b"])
def test_a_limit_of_a_grammar_counts_where_drafts_are_accepted(model, late, favoured, monkeypatch):
    """Behind a rejected draft it ends nothing; behind accepted ones their tokens come first."""
    monkeypatch.setitem(sources._LIMITS, "max_items_in_row", 100)
    prompt = list(range(FIRST, FIRST + 20))
    token = FIRST + LETTERS.index(favoured)
    more = {"structured": LIMITED, "logit_bias": {token: 50.0}, "max_tokens": 40, "min_tokens": 40}
    requests = {
        f"r{index}": (prompt[index:], mixed_params(index, **more, ignore_eos=False, logprobs=0))
        for index in range(4)
    }
    want, plain = serve(make_engine(model, **PLAIN), requests)
    if favoured == "b":
        assert {o.outputs[0].finish_reason for o in plain.values()} == {"stop"}
    else:
        assert all("max is 100" in output.outputs[0].stop_reason for output in plain.values())
        assert min(map(len, want.values())) > 5
    a, b = (FIRST + LETTERS.index(c) for c in "ab")
    for drafts in (Drafts((a,) * 20), Drafts((b, *[a] * 15), (-1, -1, *range(1, 15)))):

        def propose(request, count, drafts=drafts):
            return drafts.prefix(count)

        proposer = KnownProposer({}, VOCAB)
        proposer.drafts = propose
        options = {"max_num_seqs": 12, "num_blocks": 200, "async_scheduling": late}
        made = speculative_engine(model, proposer, 20, **options)
        got, last = serve(made, requests)
        assert got == want and made.stats().speculation.num_draft_tokens > 20
        for name, output in last.items():
            [one], [other] = output.outputs, plain[name].outputs
            assert (one.text, one.finish_reason, one.stop_reason) == (
                (other.text, other.finish_reason, other.stop_reason)
            )
            assert len(one.logprobs) == len(other.logprobs)
        check_nothing_kept(made)


@pytest.mark.parametrize("num_tokens", [1, 5, 16])
def test_texts_that_end_inside_accepted_drafts(model, late, num_tokens):
    """By max_tokens, by a stop id and by a stop string, at each distance from the last step."""
    prompt = list(range(FIRST, FIRST + 20))
    free = {"r": (prompt, mixed_params(1, max_tokens=60))}
    [ids] = serve(make_engine(model, **PLAIN), free)[0].values()
    requests = {}
    for at in range(20, 33):
        text = LETTERS[ids[at] - FIRST] if ids[at] >= FIRST else "a"
        requests |= {
            f"length{at}": (prompt, mixed_params(1, max_tokens=at)),
            f"id{at}": (prompt, mixed_params(1, max_tokens=60, stop_token_ids=[ids[at]])),
            f"text{at}": (prompt, mixed_params(1, max_tokens=60, stop=text)),
            f"least{at}": (
                prompt,
                mixed_params(1, max_tokens=60, min_tokens=at, stop_token_ids=[ids[at - 3]]),
            ),
        }
    want, plain = serve(make_engine(model, **PLAIN), requests)
    options = {"max_num_seqs": 12, "num_blocks": 200, "async_scheduling": late}
    proposer = KnownProposer(dict.fromkeys(requests, ids), VOCAB, ["right"])  # beyond the end too
    made = speculative_engine(model, proposer, num_tokens, **options)
    got, last = serve(made, requests)
    assert got == want
    reasons = {o.outputs[0].finish_reason for o in last.values()}
    assert reasons == {"length", "stop"}
    for name, output in last.items():
        [one], [other] = output.outputs, plain[name].outputs
        assert (one.text, one.finish_reason, one.stop_reason) == (
            (other.text, other.finish_reason, other.stop_reason)
        )
    assert made.stats().generation_tokens == sum(map(len, want.values()))
    check_nothing_kept(made)


def _refusing(count, way):
    """A processor that leaves no token, or raises, once there are `count` output ids."""

    def processor(ids, logits):
        if len(ids) == count and way == "raises":
            raise KeyError("no")
        if len(ids) == count:
            logits[:] = -np.inf

    return processor


@pytest.mark.parametrize("way", ["raises", "leaves none"])
def test_tokens_before_a_failure_are_delivered(model, late, way):
    """A failure behind accepted drafts ends the request with these, unless they end it first."""
    prompt = list(range(FIRST, FIRST + 20))
    free = {"r": (prompt, mixed_params(1, max_tokens=30))}
    [ids] = serve(make_engine(model, **PLAIN), free)[0].values()
    kinds = [
        {"logprobs": 0},
        {"output_kind": RequestOutputKind.FINAL_ONLY},
        {"repetition_penalty": 1.0001},
        {"stop_token_ids": [ids[8]]},
        {"stop": LETTERS[ids[7] - FIRST] if ids[7] >= FIRST else "a"},
    ]
    requests = {
        f"{index} {at}": (
            prompt,
            mixed_params(1, max_tokens=30, logits_processors=[_refusing(at, way)], **more),
        )
        for index, more in enumerate(kinds)
        for at in (0, 1, 5, 9, 12)
    }
    want, plain = serve(make_engine(model, **PLAIN), requests)
    assert {o.outputs[0].finish_reason for o in plain.values()} == {"error", "stop"}
    for proposed in (["right"], ["right", "half", "tree"]):
        proposer = KnownProposer(dict.fromkeys(requests, ids), VOCAB, proposed)
        options = {"max_num_seqs": 12, "num_blocks": 200, "async_scheduling": late}
        made = speculative_engine(model, proposer, 6, **options)
        got, last = serve(made, requests)
        assert got == want
        for name, output in last.items():
            [one], [other] = output.outputs, plain[name].outputs
            assert (one.text, one.finish_reason, one.stop_reason) == (
                (other.text, other.finish_reason, other.stop_reason)
            )
            assert len(one.logprobs or ()) == len(other.logprobs or ())
        assert made.stats().generation_tokens == sum(map(len, want.values()))
        check_nothing_kept(made)


def test_aborts_while_drafts_are_verified(model, late):
    """A request ended between two steps, or by another part while its step is in flight."""
    requests = _requests(9, seed=5, max_tokens=60)
    want, _ = serve(make_engine(model, **PLAIN), requests)
    options = {"max_num_seqs": 9, "num_blocks": 200, "async_scheduling": late}
    made = speculative_engine(model, KnownProposer(want, VOCAB), 6, **options)
    launch, doomed = made.runner.launch, {"r1": 3, "r4": 9, "r7": 12}

    def aborting(output):
        step = launch(output)
        for name in [n for n, at in doomed.items() if output.step_id >= at]:
            del doomed[name]
            made._streams.abort(made._streams.groups[name])  # within `step`
        return step

    made.runner.launch = aborting
    for name, (prompt, params) in requests.items():
        made.add_request(name, prompt, params)
    last = {}
    for count in range(1000):
        if not made.has_unfinished_requests():
            break
        if count in (5, 9):
            made.abort_request([f"r{count}", f"r{count - 3}"])
        last.update((o.request_id, o) for o in made.step())
        made.check_integrity()
    check_nothing_kept(made)
    aborted = {name for name, o in last.items() if o.outputs[0].finish_reason == "abort"}
    assert aborted >= {"r1", "r2", "r5", "r6"} and not doomed
    got = outputs_of(last)
    for name in requests:
        assert got[name] == (want[name][: len(got[name])] if name in aborted else want[name])


@pytest.mark.parametrize("where", ["launch", "read", "sampler"])
def test_failed_steps(model, late, where):
    requests = _requests(6, seed=6, max_tokens=40)
    want, _ = serve(make_engine(model, **PLAIN), requests)
    options = {"max_num_seqs": 6, "num_blocks": 200, "async_scheduling": late}
    made = speculative_engine(model, KnownProposer(want, VOCAB), 6, **options)
    original, calls = getattr(made.runner, where), iter(range(10**9))

    def broken(*args, **kwargs):
        if next(calls) % 7 == 5:
            raise MemoryError("injected")
        return original(*args, **kwargs)

    setattr(made.runner, where, broken)
    for name, (prompt, params) in requests.items():
        made.add_request(name, prompt, params)
    last = {}
    while made.has_unfinished_requests():
        last.update((o.request_id, o) for o in made.step())
        made.check_integrity()
    assert outputs_of(last) == want
    assert made.stats().num_step_failures > 1
    check_nothing_kept_but_failures(made)


def check_nothing_kept_but_failures(made):
    """As `check_nothing_kept`, of an engine some of whose steps have failed."""
    assert not made.speculation._num_real and not made.speculation._controller._of
    assert made.scheduler.blocks.num_available == made.config.scheduler.num_blocks
    assert not made._streams.groups and not len(made.runner._table)


@pytest.mark.parametrize("num_tokens", [3, 7])
def test_steps_of_equal_lengths(model, late, num_tokens, monkeypatch):
    """With graphs, requests without drafts are padded: the CPU computes what they would."""
    requests = _requests(9, seed=7)
    want, _ = serve(make_engine(model, **PLAIN), requests)
    kinds = ["right", "half", "random", "hostile", "nothing", "tree"]
    options = {"max_num_seqs": 6, "num_blocks": 200, "async_scheduling": late}
    made = speculative_engine(model, KnownProposer(want, VOCAB, kinds), num_tokens, **options)
    made.runner.capture_graphs(256, num_tokens)
    made.speculation._controller._lens = [1 + num_tokens]
    launch, num_graphs = made.runner.graphs.launch, 0

    def counted(output, rows, starts):
        nonlocal num_graphs
        result = launch(output, rows, starts)
        num_graphs += result is not None and output.query_len > 1
        return result

    monkeypatch.setattr(made.runner.graphs, "launch", counted)
    got, _ = serve(made, requests)
    assert got == want and (late or num_graphs > 1)  # none where a request is near its end
    check_nothing_kept(made)


def test_beam_search_uses_no_drafts(late):
    """Its requests are not asked for, and others beside it are."""
    model = tiny_model(deterministic=True)
    params = BeamSearchParams(beam_width=3, max_tokens=12)
    prompts = [[5, 6, 7], list(range(10, 45))]
    want = make_llm(model, max_num_seqs=9).beam_search(prompts, params)

    asked = []

    def propose(ids, count):
        asked.append(ids)
        return [1] * count

    config = {"proposer": propose, "num_speculative_tokens": 4, "adaptive": False}
    llm = make_llm(model, max_num_seqs=9, async_scheduling=late, speculative_config=config)
    assert llm.beam_search(prompts, params) == want
    assert not asked
    [plain] = make_llm(model).generate([[9, 8, 7]], mixed_params(0, max_tokens=20))
    stream = llm.stream([9, 8, 7], mixed_params(0, max_tokens=20))
    first = next(stream)
    assert llm.beam_search(prompts, params) == want
    ids = [i for output in (first, *stream) for i in output.outputs[0].token_ids]
    assert ids == list(plain.outputs[0].token_ids)
    assert asked and all(ids[:3] == [9, 8, 7] for ids in asked)


def test_seeded_tokens_do_not_depend_on_the_number_of_drafts(model):
    """The adaptive controller may choose any number at any time."""
    requests = {
        f"r{index}": ([7, index], SamplingParams(seed=index, max_tokens=40)) for index in range(6)
    }
    want, _ = serve(make_engine(model, **PLAIN), requests)
    for num_tokens in (1, 2, 4, 8, 16, 63):
        proposer = KnownProposer(want, VOCAB, ["right", "half", "tree"])
        made = speculative_engine(model, proposer, num_tokens, **PLAIN)
        made.speculation._controller._is_adaptive = True
        got, _ = serve(made, requests)
        assert got == want
