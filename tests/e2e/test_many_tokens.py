"""Steps of many tokens per sequence: drafts of known tokens give the same results as one by one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from engine import load
from engine.config import MlaConfig, RopeConfig
from engine.sampling_params import RequestOutputKind
from tests.e2e.tiny import CONFIG, VOCAB, Words, make_engine, mixed_params, run, tiny_model

MAX_DRAFTS = 5
LATENT = dataclasses.replace(
    CONFIG,
    layer_kinds=("mla", "mla"),
    mla=MlaConfig(12, 16, 4, 4, 6),
    rope=RopeConfig(rotary_dim=4),
    attn_scale=8**-0.5,
)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request):
    tiny_model(request.param)  # or skip
    return request.param


@pytest.fixture(scope="module")
def deterministic_model(where):
    return tiny_model(where, deterministic=True)


@pytest.fixture(scope="module")
def model(where):
    return tiny_model(where)


def _engine(model, *, graphs=True, **options):
    """Make an engine with graphs; on the CPU, with the steps that they would capture."""
    cuda_graphs = None if graphs else False
    engine = make_engine(
        model, max_draft_tokens=MAX_DRAFTS, cuda_graphs=cuda_graphs, **{"num_blocks": 96} | options
    )
    if graphs and engine.runner.graphs is None:
        length = engine.config.scheduler.max_model_len
        engine.runner.capture_graphs(length, max_draft_tokens=MAX_DRAFTS)
    return engine


def _params(index, **more):
    return mixed_params(index, **({"max_tokens": 40} | more))


def _prompts(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(1, 40)).tolist() for _ in range(count)]


def _generate(engine, prompts, params, propose=None):
    """Run all requests; before each step, `propose` may propose drafts for each of them."""
    for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(f"r{index}", prompt, one)
    last, num_steps = {}, 0
    while engine.has_unfinished_requests():
        if propose is not None:
            for request in list(engine.scheduler.unfinished_requests()):
                propose(engine.scheduler, request)
        last.update((output.request_id, output) for output in engine.step())
        num_steps += 1
    run(engine)  # nothing is left
    return [last[f"r{index}"].outputs[0] for index in range(len(prompts))], num_steps


def _known(outputs, count):
    """Propose the tokens that the request is known to generate."""

    def propose(scheduler, request):
        known = outputs[int(request.request_id[1:])].token_ids
        start = request.num_tokens - request.num_prompt_tokens
        scheduler.propose(request, known[start : start + count])

    return propose


def _mostly_known(outputs):
    """Propose the known tokens, often with a wrong last one."""
    rng = np.random.default_rng(3)

    def propose(scheduler, request):
        known = outputs[int(request.request_id[1:])].token_ids
        start = request.num_tokens - request.num_prompt_tokens
        ids = list(known[start : start + MAX_DRAFTS])
        if ids and rng.random() < 0.4:
            ids[-1] = (ids[-1] + 1) % VOCAB
        scheduler.propose(request, ids)

    return propose


def _logprobs(output):
    """Return every log-probability of every step, (steps, V), to compare bits."""
    return np.array([[entry[i].logprob for i in range(VOCAB)] for entry in output.logprobs])


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("count", [1, 3, MAX_DRAFTS])
def test_logits_have_the_bits_of_decoding_one_by_one(deterministic_model, count, graphs):
    prompts = _prompts(4, count)
    params = [_params(i, logprobs=-1, max_tokens=32) for i in range(4)]
    options = {"graphs": graphs, "async_scheduling": False}
    want, num_plain = _generate(_engine(deterministic_model, **options), prompts, params)
    engine = _engine(deterministic_model, **options)
    got, num_steps = _generate(engine, prompts, params, _known(want, count))
    assert num_steps < num_plain - 31 + 32 / (count + 1) + 4
    for one, other in zip(got, want, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_array_equal(_logprobs(one), _logprobs(other))


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_logits_of_sixteen_bit_models_have_the_same_bits(graphs):
    tiny_model("cuda")  # or skip
    config = dataclasses.replace(
        CONFIG, hidden_size=128, head_dim=64, num_heads=4, rope=RopeConfig(rotary_dim=64)
    )
    model = load(
        config=config, load_format="dummy", device="cuda", dtype="bfloat16", deterministic=True
    )
    prompts, params = _prompts(4), [_params(i, logprobs=-1) for i in range(4)]
    want, _ = _generate(_engine(model, graphs=graphs), prompts, params)
    got, _ = _generate(_engine(model, graphs=graphs), prompts, params, _known(want, MAX_DRAFTS))
    for one, other in zip(got, want, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_array_equal(_logprobs(one), _logprobs(other))


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_tokens_are_those_without_drafts_whatever_is_proposed(model, graphs, is_late, monkeypatch):
    """Drafts are right, wrong, and of different lengths: some steps have no graph."""
    prompts, params = _prompts(4, 7), [_params(i, max_tokens=30 + 9 * i) for i in range(4)]
    want, _ = _generate(_engine(model), prompts, params)
    engine = _engine(model, graphs=graphs, async_scheduling=is_late)
    num_graphs = 0
    if graphs:
        launch = engine.runner.graphs.launch

        def counted(output, rows, starts):
            nonlocal num_graphs
            result = launch(output, rows, starts)
            num_graphs += result is not None and output.query_len > 1
            return result

        monkeypatch.setattr(engine.runner.graphs, "launch", counted)
    rng, num_same = np.random.default_rng(5), 0

    def propose(scheduler, request):
        nonlocal num_same
        known = want[int(request.request_id[1:])].token_ids
        start = request.num_tokens - request.num_prompt_tokens
        count = MAX_DRAFTS if num_same % 40 < 30 else int(rng.integers(0, MAX_DRAFTS + 1))
        ids = list(known[start : start + count])
        if ids and rng.random() < 0.5:
            at = rng.integers(len(ids))
            ids[at] = (ids[at] + 1) % VOCAB
        num_same += 1
        scheduler.propose(request, ids)

    got, _ = _generate(engine, prompts, params, propose)
    assert [o.token_ids for o in got] == [o.token_ids for o in want]
    assert not graphs or num_graphs > 3


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_trees(model, graphs):
    """Every token has an alternative before or after it; keys of accepted branches are moved."""
    prompts, params = _prompts(3, 9), [_params(i, logprobs=3) for i in range(3)]
    plain = [_params(i) for i in range(3)]
    for wanted in (plain, params):
        options = {"graphs": graphs, "async_scheduling": False}
        want, num_plain = _generate(_engine(model, **options), prompts, wanted)

        def propose(scheduler, request, want=want):
            known = want[int(request.request_id[1:])].token_ids
            start = request.num_tokens - request.num_prompt_tokens
            right = known[start : start + 2]
            if len(right) < 2:
                return
            ids = [(right[0] + 1) % VOCAB, right[0], right[1], (right[1] + 1) % VOCAB]
            assert scheduler.propose(request, ids, [-1, -1, 1, 1]) or not request.block_table

        got, num_steps = _generate(_engine(model, **options), prompts, wanted, propose)
        assert num_steps < num_plain
        _assert_close(got, want)


def _assert_close(got, want):
    """Check for the same tokens, with log-probabilities that differ by rounding only."""
    for one, other in zip(got, want, strict=True):
        assert one.token_ids == other.token_ids
        for entry, expected in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert entry.keys() == expected.keys()
            for token, logprob in entry.items():
                assert abs(logprob.logprob - expected[token].logprob) < 1e-4


@pytest.mark.parametrize("kind", ["deterministic", "latent attention"])
def test_a_model_without_trees_cuts_them_to_chains(where, kind):
    """Its kernels know no tree: a draft would attend to the alternative before it."""
    is_deterministic = kind == "deterministic" or where == "cuda"
    config = CONFIG if kind == "deterministic" else LATENT
    model = tiny_model(where, config, deterministic=is_deterministic)
    prompts, params = _prompts(2), [_params(i, logprobs=3) for i in range(2)]
    want, _ = _generate(_engine(model), prompts, params)

    def propose(scheduler, request):
        known = want[int(request.request_id[1:])].token_ids
        start = request.num_tokens - request.num_prompt_tokens
        right = known[start : start + 2]
        if len(right) == 2:
            scheduler.propose(request, [(right[0] + 1) % VOCAB, *right], [-1, -1, 1])

    got, _ = _generate(_engine(model), prompts, params, propose)
    _assert_close(got, want)


def _second_best(ids, logits):
    """A logits processor that depends on all ids so far."""
    logits[sum(ids) % VOCAB] += 5.0


EXTRAS = [
    {"repetition_penalty": 1.4, "temperature": 0.0},
    {"presence_penalty": 0.8, "frequency_penalty": 0.5},
    {"logprobs": 2, "min_tokens": 20, "ignore_eos": False},
    {"logits_processors": [_second_best]},
    {"allowed_token_ids": list(range(10, 40))},
]


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: next(iter(extra)))
def test_every_way_of_sampling(model, extra, is_late):
    """Penalties, processors and biases of a draft take the drafts before it into account."""
    prompts, params = _prompts(3, 11), [_params(i, **extra) for i in range(3)]
    want, _ = _generate(_engine(model), prompts, params)
    engine = _engine(model, async_scheduling=is_late)
    got, _ = _generate(engine, prompts, params, _mostly_known(want))
    for one, other in zip(got, want, strict=True):
        assert one.token_ids == other.token_ids
        for entry, expected in zip(one.logprobs or (), other.logprobs or (), strict=True):
            for token, logprob in entry.items():
                assert abs(logprob.logprob - expected[token].logprob) < 1e-4


@pytest.mark.parametrize("is_late", [False, True])
def test_bad_words_across_drafts(model, is_late):
    """Bad words of two tokens that the outputs would otherwise contain."""
    prompts, params = _prompts(3, 11), [_params(i) for i in range(3)]
    plain, _ = _generate(_engine(model), prompts, params)
    words = tuple(tuple(o.token_ids[i : i + 2]) for o in plain for i in range(3, 30, 4))

    def engine(**options):
        engine = _engine(model, **options)
        specs = engine._inputs.sampling_specs
        engine._inputs.sampling_specs = lambda p: [
            dataclasses.replace(spec, bad_words=words) for spec in specs(p)
        ]
        return engine

    want, _ = _generate(engine(), prompts, params)
    assert all(a.token_ids != b.token_ids for a, b in zip(want, plain, strict=True))
    got, _ = _generate(engine(async_scheduling=is_late), prompts, params, _mostly_known(want))
    assert [o.token_ids for o in got] == [o.token_ids for o in want]


@pytest.mark.parametrize("swap", [False, True])
def test_preemption_with_drafts_in_flight(model, swap):
    options = {"num_blocks": 9, "max_model_len": 120, "async_scheduling": True}
    if swap:
        options |= {"swap_space_gb": 0.01, "preemption_mode": "swap"}
    prompts, params = _prompts(4, 13), [_params(i, max_tokens=60) for i in range(4)]
    want, _ = _generate(_engine(model), prompts, params)
    engine = _engine(model, **options)
    got, _ = _generate(engine, prompts, params, _known(want, MAX_DRAFTS))
    assert [o.token_ids for o in got] == [o.token_ids for o in want]
    assert engine.scheduler.stats().num_preemptions > 0


def test_a_window_allows_chains_only(where):
    config = dataclasses.replace(CONFIG, layer_windows=(20, 0))
    model = tiny_model(where, config)
    engine = _engine(model)
    assert not engine.config.scheduler.draft_trees
    prompts, params = _prompts(2, 3), [_params(i) for i in range(2)]
    want, _ = _generate(_engine(model), prompts, params)
    got, _ = _generate(engine, prompts, params, _known(want, 4))
    assert [o.token_ids for o in got] == [o.token_ids for o in want]


def test_text_that_ends_inside_accepted_drafts(model):
    """Stop ids and max_tokens in the middle of a run."""
    prompts, params = _prompts(3, 17), [_params(i, max_tokens=33) for i in range(3)]
    want, _ = _generate(_engine(model), prompts, params)
    stops = [
        dataclasses.replace(p, stop_token_ids=[int(o.token_ids[18])])
        for p, o in zip(params, want, strict=True)
    ]
    cut, _ = _generate(_engine(model), prompts, stops)
    got, _ = _generate(_engine(model), prompts, stops, _known(want, MAX_DRAFTS))
    assert [o.token_ids for o in got] == [o.token_ids for o in cut]
    assert [o.finish_reason for o in got] == ["stop"] * 3


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_stop_strings_inside_accepted_drafts(model, kind, monkeypatch):
    """The tokens after the stop string are dropped, and so are their log-probabilities."""
    monkeypatch.setattr(type(model), "has_tokenizer", True)
    monkeypatch.setitem(model.__dict__, "tokenizer", Words())
    prompts, params = _prompts(2, 19), [_params(i, logprobs=1) for i in range(2)]
    free, _ = _generate(_engine(model), prompts, params)
    stops = [
        dataclasses.replace(p, stop=f"w{o.token_ids[20]} w{o.token_ids[21]}", output_kind=kind)
        for p, o in zip(params, free, strict=True)
    ]
    plain, engine = _engine(model), _engine(model)
    want, _ = _generate(plain, prompts, stops)
    got, _ = _generate(engine, prompts, stops, _known(free, MAX_DRAFTS))
    assert engine.stats().generation_tokens == plain.stats().generation_tokens
    for one, other in zip(got, want, strict=True):
        assert one.stop_reason == other.stop_reason is not None
        if kind is not RequestOutputKind.DELTA:
            assert (one.text, one.token_ids) == (other.text, other.token_ids)
            assert abs(one.cumulative_logprob - other.cumulative_logprob) < 1e-3
            assert len(one.logprobs) == len(other.logprobs)
