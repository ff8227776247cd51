"""A draft model: its drafts are accepted as its logits deserve, and tokens stay the target's."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from engine import LLMEngine, SamplingParams, llm_engine
from engine.cache.kv_cache import KVGeometry
from engine.core.resolve import resolve
from engine.drafts import DraftIds
from engine.engine_config import EngineConfig
from engine.errors import ConfigError, EngineError, OutOfMemoryError
from engine.loading.download import resolve_model
from engine.loading.model_config import load_config
from engine.speculative import SpeculativeConfig, draft_loading, draft_model
from engine.speculative.costs import StepCosts
from engine.speculative.draft_loading import load_draft
from tests.e2e.test_many_tokens import EXTRAS
from tests.e2e.tiny import (
    BYTES_PER_BLOCK,
    CONFIG,
    VOCAB,
    make_engine,
    mixed_params,
    run,
    swap_gb,
    tiny_model,
)
from tests.models.conftest import CASES

NUM_DRAFTS = 4
OTHER = dataclasses.replace(CONFIG, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=1)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request):
    tiny_model(request.param)  # or skip
    return request.param


@pytest.fixture(scope="module")
def target(where):
    return tiny_model(where, deterministic=True)


@pytest.fixture(params=[False, True], ids=["launches", "graphs"])
def graphs(request):
    return request.param


@pytest.fixture
def make(target, graphs, monkeypatch):
    """Return a function that makes an engine with a draft model: the target itself, or another."""

    def make(draft=None, **options):
        model = draft or tiny_model(target.device, deterministic=True)
        monkeypatch.setattr(llm_engine, "load_draft", lambda config, target: config and model)
        config = {"model": "tiny", "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
        engine = make_engine(
            target,
            speculative_config=config | options.pop("config", {}),
            cuda_graphs=None if graphs else False,
            **({"num_blocks": 96, "max_num_seqs": 4} | options),
        )
        if graphs and engine.runner.graphs is None:
            engine.runner.capture_graphs(256, NUM_DRAFTS)
            proposer_of(engine).capture_graphs()
            engine.speculation._controller._lens = [1 + NUM_DRAFTS]
        return engine

    return make


@pytest.fixture(scope="module")
def other(where):
    return lambda: tiny_model(where, OTHER)


def proposer_of(engine):
    return engine.speculation._proposer._proposer


def prompts_of(count, seed=0, longest=40):
    rng = np.random.default_rng(seed)
    return [rng.integers(4, VOCAB, rng.integers(1, longest)).tolist() for _ in range(count)]


def serve(engine, prompts, params):
    """Return the token ids of each request's continuations, and the counts of drafts."""
    for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(f"r{index}", prompt, one)
    outputs = run(engine)
    stats = engine.stats().speculation
    assert stats.num_proposer_failures == 0
    if engine.config.speculative is not None:
        assert not proposer_of(engine)._drafted and not len(proposer_of(engine).runner._table)
    engine.close()
    ids = [[list(o.token_ids) for o in outputs[f"r{i}"].outputs] for i in range(len(prompts))]
    return ids, stats


def plain(target, prompts, params, **options):
    return serve(make_engine(target, num_blocks=96, **options), prompts, params)[0]


@pytest.mark.parametrize("index", range(4))
def test_the_model_itself_is_always_right(target, make, index):
    """Greedy, and each way of random sampling: both models take the same draws."""
    params = [mixed_params(index, max_tokens=60)] * 3
    prompts = prompts_of(3, index)
    got, stats = serve(make(), prompts, params)
    assert got == plain(target, prompts, params)
    assert stats.num_draft_tokens > 60 and stats.acceptance_rate == 1.0


@pytest.mark.parametrize("extra", [{}, {"presence_penalty": 1.5}, {"logit_bias": {7: 2.0}}])
def test_the_host_reads_drafts_after_their_verification_is_launched(
    target, make, graphs, extra, monkeypatch
):
    """If they are sampled in graphs, and if sampling what follows them does not need their ids."""
    if not graphs:
        pytest.skip("without graphs, they are read at once")
    prompts, params = prompts_of(3, 71), [mixed_params(i, max_tokens=40) for i in range(3)]
    params[1] = dataclasses.replace(params[1], **extra)
    want = plain(target, prompts, params)
    engine, is_launched, early = make(), [False], []
    propose, launch = proposer_of(engine).propose, engine.runner.launch
    rows = DraftIds.rows

    def launched(output):
        step = launch(output)
        is_launched[0] = True
        return step

    def proposed(wanted):
        is_launched[0] = False
        return propose(wanted)

    def read(self):
        if self._ids is None:
            early.append(not is_launched[0])
        return rows(self)

    monkeypatch.setattr(DraftIds, "rows", read)
    engine.runner.launch, proposer_of(engine).propose = launched, proposed
    got, stats = serve(engine, prompts, params)
    assert got == want
    # At the end, requests of different lengths are padded.
    assert sum(early) <= (len(early) // 2 if not extra else len(early))
    assert len(early) >= 8 and (not extra or all(early[:6]))  # at most 5 tokens a step
    assert extra or stats.acceptance_rate == 1.0


def test_drafts_that_wait_while_others_are_made(target, make, graphs):
    """Their ids stay what they were, though the device's array has others by then."""
    if not graphs:
        pytest.skip("without graphs, they are read at once")
    engine = make()
    proposer = proposer_of(engine)
    for i, prompt in enumerate(prompts_of(2, 73, longest=8)):
        engine.add_request(f"r{i}", prompt, mixed_params(i, max_tokens=40))
    while len(requests := engine.scheduler.decoding_requests()) < 2:
        engine.step()
    start = requests[0].num_output_tokens
    (first,) = proposer.propose([(requests[0], NUM_DRAFTS)])
    assert first.ids.on_device is not None
    (second,) = proposer.propose([(requests[1], NUM_DRAFTS)])
    assert first.ids.on_device is None and second.ids.on_device is not None
    assert first.token_ids != second.token_ids
    engine.scheduler.propose(requests[0], first)
    run(engine)
    assert engine.stats().speculation.acceptance_rate == 1.0
    assert list(first.token_ids) == requests[0].output_token_ids[start : start + NUM_DRAFTS]


def test_many_requests_at_once(target, make):
    params = [mixed_params(index, max_tokens=8 + 3 * index) for index in range(12)]
    prompts = prompts_of(12, 5)
    got, stats = serve(make(max_num_seqs=8, num_blocks=200), prompts, params)
    assert got == plain(target, prompts, params)
    assert stats.acceptance_rate == 1.0 and stats.num_drafts > 20


@pytest.mark.parametrize("late", [False, True])
def test_another_model_changes_no_token(target, make, other, late):
    params = [mixed_params(index, max_tokens=50) for index in range(8)]
    prompts = prompts_of(8, 7)
    engine = make(other(), max_num_seqs=8, async_scheduling=late)
    got, stats = serve(engine, prompts, params)
    assert got == plain(target, prompts, params)
    assert 0 < stats.acceptance_rate < 0.9


@pytest.mark.parametrize("late", [False, True])
def test_drafting_now_and_then(target, make, late):
    """Steps without drafts in between, and tokens in flight: the missing keys are computed."""
    engine = make(max_num_seqs=8, async_scheduling=late)
    proposer, propose, number = proposer_of(engine), engine.speculation.propose, [0]

    def now_and_then(excluded):
        number[0] += 1
        if number[0] // 5 % 2:
            engine.speculation.is_active = False
        else:
            propose(excluded)

    engine.speculation.propose = now_and_then
    params = [mixed_params(index, max_tokens=70) for index in range(6)]
    prompts = prompts_of(6, 83)
    got, stats = serve(engine, prompts, params)
    assert got == plain(target, prompts, params)
    assert stats.acceptance_rate == 1.0 and stats.num_drafts > 20
    assert proposer.kv_cache.is_closed


def test_the_number_of_drafts_follows_acceptance_and_cost(target, make, other):
    """A draft model that takes long, or guesses badly, is not asked any more."""
    for seconds, most in ((1e-9, 2000), (100.0, 0)):
        engine = make(other(), config={"adaptive": True})
        engine.speculation._controller._costs = StepCosts([1], [1, 2], [[1.0, 1.01]])
        proposer_of(engine).cost = lambda n, k, seconds=seconds: seconds * k
        prompts = prompts_of(3, 89)
        params = [mixed_params(index, max_tokens=60) for index in range(3)]
        got, stats = serve(engine, prompts, params)
        assert got == plain(target, prompts, params)
        assert stats.num_draft_tokens <= most and (most == 0 or stats.num_draft_tokens > 0)


@pytest.mark.parametrize("count", [1, 7, 20])
def test_any_number_of_drafts(target, make, count, graphs):
    if graphs and count != NUM_DRAFTS:
        pytest.skip("its graphs are for another number")
    prompts, params = prompts_of(3, 3), [mixed_params(i, max_tokens=70) for i in range(3)]
    options = {"config": {"num_speculative_tokens": count}, "max_num_batched_tokens": 64}
    got, stats = serve(make(**options), prompts, params)
    assert got == plain(target, prompts, params)
    assert stats.acceptance_rate == 1.0 and len(stats.num_draft_tokens_per_pos) == count


@pytest.mark.parametrize("swap", [False, True])
def test_preemption(target, make, swap):
    options = {"num_blocks": 9, "max_model_len": 120}
    if swap:
        options |= {"swap_space_gb": swap_gb(16), "preemption_mode": "swap"}
    prompts, params = prompts_of(4, 13), [mixed_params(i, max_tokens=60) for i in range(4)]
    engine = make(**options)
    got, stats = serve(engine, prompts, params)
    assert got == plain(target, prompts, params)
    assert engine.scheduler.stats().num_preemptions > 0
    assert stats.acceptance_rate == 1.0


@pytest.mark.parametrize("num_sharing", [3, 6])
def test_a_common_prefix_is_computed_once(target, make, num_sharing):
    common = prompts_of(1, 17, longest=3)[0] * 60
    common = common[:64]
    prompts = [common + prompt for prompt in prompts_of(num_sharing, 19, longest=6)]
    params = [mixed_params(i, max_tokens=20) for i in range(num_sharing)]
    engine = make(max_num_seqs=8)
    computed = []
    launch = engine.speculation._proposer._proposer.runner.launch

    def counted(output):
        computed.append(sum(s.num_scheduled_tokens for s in output.sequences if not s.is_sampled))
        return launch(output)

    proposer_of(engine).runner.launch = counted
    got, stats = serve(engine, prompts, params)
    assert got == plain(target, prompts, params)
    assert stats.acceptance_rate == 1.0
    assert 64 - 2 <= sum(computed) < 64 + 10 * num_sharing


def test_parallel_samples(target, make):
    """They share the prompt's blocks, and the last one until it is copied."""
    params = [mixed_params(1, n=3, max_tokens=40), mixed_params(2, n=2, max_tokens=40)]
    prompts = prompts_of(2, 23)
    got, stats = serve(make(max_num_seqs=8), prompts, params)
    assert got == plain(target, prompts, params, max_num_seqs=8)
    assert stats.acceptance_rate == 1.0


def test_a_fork_shares_blocks_until_one_is_copied(target, make):
    prompt, params = prompts_of(1, 29)[0], mixed_params(1, max_tokens=60)
    engine = make()
    engine.add_request("parent", prompt, params)
    ids = []
    while len(ids) < 21:
        ids = next((list(o.outputs[0].token_ids) for o in engine.step()), ids)
    child = mixed_params(2, max_tokens=30)
    engine.add_request("child", prompt + ids[:20], child, parent="parent")
    outputs = run(engine)
    assert engine.stats().speculation.acceptance_rate == 1.0
    for name, start, one in (("parent", prompt, params), ("child", prompt + ids[:20], child)):
        assert [list(outputs[name].outputs[0].token_ids)] == plain(target, [start], [one])[0]


@pytest.mark.parametrize("seed", range(4))
def test_random_requests_in_few_blocks(target, make, seed):
    """Common prefixes, parallel samples, preemptions, swaps and aborts, in any order."""
    rng = np.random.default_rng(seed)
    options = {"num_blocks": 10, "max_model_len": 120, "max_num_seqs": 6}
    if seed % 2:
        options |= {"swap_space_gb": swap_gb(20), "preemption_mode": "auto"}
        options |= {"recompute_us_per_token": 1.0, "swap_us_per_block": 1.0}
    engine = make(async_scheduling=seed > 1, **options)
    stems = [prompt * 3 for prompt in prompts_of(3, seed, longest=20)]
    requests, outputs, aborted = {}, {}, set()
    while len(requests) < 16 or engine.has_unfinished_requests():
        if len(requests) < 16 and rng.random() < 0.8:
            name = f"r{len(requests)}"
            stem = stems[rng.integers(3)][: rng.integers(0, 40)]
            prompt = stem + rng.integers(4, VOCAB, rng.integers(1, 5)).tolist()
            index = len(requests)
            count = 3 if index % 4 and rng.random() < 0.3 else 1
            more = {"max_tokens": int(rng.integers(10, 50)), "n": count}
            requests[name] = prompt, mixed_params(index, **more)
            engine.add_request(name, *requests[name])
        if rng.random() < 0.03 and len(aborted) < 4:
            aborted.add(name := f"r{rng.integers(len(requests) or 1)}")
            engine.abort_request(name)
        outputs.update((output.request_id, output) for output in engine.step())
        engine.check_integrity()
    assert engine.scheduler.stats().num_preemptions > 0
    stats = engine.stats().speculation
    assert stats.num_proposer_failures == 0 and stats.num_drafts > 40
    assert stats.acceptance_rate == 1.0
    assert not proposer_of(engine)._drafted
    names = [name for name in requests if name not in aborted]
    want = plain(target, *zip(*(requests[name] for name in names), strict=True))
    assert [[list(o.token_ids) for o in outputs[name].outputs] for name in names] == want


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: next(iter(extra)))
def test_every_way_of_sampling(target, make, extra):
    """The verification needs more than the drafts were sampled with."""
    prompts, params = prompts_of(3, 97), [mixed_params(i, max_tokens=30, **extra) for i in range(3)]
    got, stats = serve(make(), prompts, params)
    assert got == plain(target, prompts, params)
    assert stats.num_drafts > 10


def test_blocks_that_another_request_had(target, make):
    """One request after another in the same blocks, with and without cached prefixes."""
    for caching in (True, False):
        engine = make(num_blocks=10, enable_prefix_caching=caching)
        for round_, prompts in enumerate([prompts_of(2, s) for s in (31, 37, 31)]):
            params = [mixed_params(i, max_tokens=30) for i in range(2)]
            for i, prompt in enumerate(prompts):
                engine.add_request(f"{round_}-{i}", prompt, params[i])
            outputs = run(engine)
            got = [[list(outputs[f"{round_}-{i}"].outputs[0].token_ids)] for i in range(2)]
            assert got == plain(target, prompts, params)
        assert engine.stats().speculation.acceptance_rate == 1.0
        engine.close()


def test_a_long_prompt_waits_for_its_keys_without_stopping_others(target, make):
    engine = make(max_num_batched_tokens=24)
    engine.add_request("short", [5, 6], mixed_params(0, max_tokens=100))
    for _ in range(3):
        engine.step()
    engine.add_request("long", list(range(4, 90)) * 2, mixed_params(1, max_tokens=30))
    launch, largest = proposer_of(engine).runner.launch, []

    def measured(output):
        largest.append(output.num_scheduled_tokens)
        return launch(output)

    proposer_of(engine).runner.launch = measured
    run(engine)
    assert max(largest) == 24  # a chunk
    assert sum(n == 24 for n in largest) >= 172 // 24
    assert engine.stats().speculation.acceptance_rate == 1.0


def test_requests_that_end_early(target, make):
    """By abort, by a stop id among the drafts, and by max_tokens."""
    prompts = prompts_of(3, 41)
    params = [mixed_params(i, max_tokens=40) for i in range(3)]
    free = plain(target, prompts, params)
    params[0] = dataclasses.replace(params[0], stop_token_ids=[free[0][0][17]])
    params[1] = dataclasses.replace(params[1], max_tokens=11)
    engine = make()
    for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(f"r{i}", prompt, one)
    for _ in range(4):
        engine.step()
    engine.abort_request("r2")
    outputs = run(engine)
    stop = free[0][0].index(free[0][0][17])
    assert list(outputs["r0"].outputs[0].token_ids) == free[0][0][: stop + 1]
    assert list(outputs["r1"].outputs[0].token_ids) == free[1][0][:11]
    assert outputs["r2"].outputs[0].finish_reason == "abort"


def test_more_requests_in_turn_than_it_keeps(target, make):
    """Requests that are not asked for drafts lose their entry to others, and get it back."""
    engine = make(max_num_seqs=4)
    proposer = proposer_of(engine)
    proposer._free = proposer._free[:2]
    wanted = []
    for i in range(3):
        engine.add_request(f"r{i}", prompts_of(3, 43)[i], mixed_params(i, max_tokens=60))
    for step in range(200):
        ask = proposer._propose
        proposer._propose = lambda w, ask=ask, step=step: [
            (ask([each])[0] if i == step % len(w) else None) for i, each in enumerate(w)
        ]
        engine.step()
        proposer._propose = ask
        wanted.append(len(proposer._drafted))
        if not engine.has_unfinished_requests():
            break
    assert max(wanted) == 2
    stats = engine.stats().speculation
    assert stats.num_proposer_failures == 0 and stats.acceptance_rate == 1.0


def test_what_the_draft_does_not_know(target, make):
    """Ids beyond its vocabulary, and drafts beyond the target's."""
    small = tiny_model(target.device, dataclasses.replace(CONFIG, vocab_size=VOCAB - 40))
    prompts, params = prompts_of(3, 47), [mixed_params(i, max_tokens=30) for i in range(3)]
    got, stats = serve(make(small), prompts, params)
    assert got == plain(target, prompts, params)
    assert stats.num_drafts < 30
    large = tiny_model(target.device, dataclasses.replace(CONFIG, vocab_size=2 * VOCAB))
    got, stats = serve(make(large), prompts, params)
    assert got == plain(target, prompts, params)
    assert stats.num_drafts > 0


def test_a_shorter_draft_model(target, make):
    short = tiny_model(
        target.device, dataclasses.replace(CONFIG, max_position_embeddings=50), deterministic=True
    )
    prompts, params = [[5, 6, 7]], [mixed_params(1, max_tokens=120)]
    got, stats = serve(make(short), prompts, params)
    assert got == plain(target, prompts, params)
    assert 30 < stats.num_draft_tokens < 50


def test_a_draft_without_a_token_to_choose(target, make, graphs, monkeypatch):
    """NaN in the draft's logits ends the proposal, or spoils the rest of it, and nothing else."""
    draft = tiny_model(target.device, deterministic=True)
    forward, calls = type(draft).forward, []

    def faulty(self, batch, pages):
        logits = forward(self, batch, pages)
        if self is draft:
            calls.append(logits)
            if len(calls) % 3 == 0:
                logits[:] = np.nan
        return logits

    monkeypatch.setattr(type(draft), "forward", faulty)
    prompts, params = prompts_of(2, 53), [mixed_params(i, max_tokens=40) for i in range(2)]
    got, stats = serve(make(draft), prompts, params)
    monkeypatch.undo()
    assert got == plain(target, prompts, params)
    assert 0 < stats.acceptance_rate <= 1.0
    assert (stats.acceptance_rate == 1.0) is not graphs


def test_a_failure_drops_everything_and_it_starts_again(target, make):
    engine = make()
    proposer = proposer_of(engine)
    launch, calls = proposer.runner.launch, []

    def faulty(output):
        calls.append(output)
        if len(calls) in (3, 10, 11):
            raise RuntimeError("no memory")
        return launch(output)

    proposer.runner.launch = faulty
    prompts, params = prompts_of(2, 59), [mixed_params(i, max_tokens=40) for i in range(2)]
    for i in range(2):
        engine.add_request(f"r{i}", prompts[i], params[i])
    outputs = run(engine)
    stats = engine.stats().speculation
    assert stats.num_proposer_failures == 3
    assert stats.acceptance_rate == 1.0
    got = [[list(outputs[f"r{i}"].outputs[0].token_ids)] for i in range(2)]
    assert got == plain(target, prompts, params)


def test_closing_the_engine_frees_the_pages_and_the_model(make):
    engine = make()
    proposer = proposer_of(engine)
    engine.add_request("r", [5, 6, 7], SamplingParams(max_tokens=4))
    engine.step()
    runner, slab = weakref.ref(proposer.runner), weakref.ref(proposer.kv_cache.page_slabs[0])
    model = proposer._model
    engine.close()
    proposer.close()  # does nothing
    gc.collect()
    assert runner() is None and slab() is None and model._decoder is None


def test_the_cost_is_measured(make):
    engine = make()
    proposer = proposer_of(engine)
    costs = [proposer.cost(n, k) for n in (1, 4) for k in (1, 4)]
    assert all(0 < cost < 10 for cost in costs)
    assert proposer.cost(1, 4) > proposer.cost(1, 1)


def test_memory_of_the_draft_model_is_planned(target, make, monkeypatch):
    engine = make(num_blocks=64)
    reasons = engine.config.reasons
    assert "beyond their requests' blocks" in reasons["draft_model"]
    slabs = engine._pool.stats().slabs
    assert slabs["draft kv"] == slabs["kv"] // 64 * (64 + 4)
    engine.close()
    assert not engine._pool.stats().slabs
    # A device that is full with fewer than all blocks.
    monkeypatch.setattr("engine.core.resolve.device_memory", lambda device: (1 << 23, 1 << 23))
    options = {"max_num_seqs": 64, "max_draft_tokens": NUM_DRAFTS, "cuda_graphs": False}
    options |= {"max_num_batched_tokens": 512, "memory_utilization": 0.5}
    without, beside = (resolve(EngineConfig(**options), target, draft) for draft in (None, target))
    counts = [config.scheduler.num_blocks for config in (without, beside)]
    lost = target.weight_bytes + 64 * BYTES_PER_BLOCK
    assert (counts[0] * BYTES_PER_BLOCK - lost) // (2 * BYTES_PER_BLOCK) == counts[1] > 16
    with pytest.raises(OutOfMemoryError, match="what proposes drafts"):
        resolve(EngineConfig(num_blocks=counts[0], **options), target, target)


@pytest.mark.parametrize("case", CASES)
def test_every_family_drafts_for_itself(golden, case):
    """From files, with windows, experts, and other ropes; the loaded draft is closed with it."""
    made = golden(case)
    config = {"model": str(made.directory), "num_speculative_tokens": 3, "adaptive": False}
    options = {"device": "cpu", "dtype": "float32", "deterministic": True, "num_blocks": 32}
    if KVGeometry.of_model(load_config(resolve_model(made.directory)), "float32").has_states:
        with pytest.raises(ConfigError, match="model must have no recurrent layers; got"):
            LLMEngine.from_name(str(made.directory), speculative_config=config, **options)
        return
    ids = []
    for speculative in (None, config):
        with LLMEngine.from_name(
            str(made.directory), speculative_config=speculative, max_num_seqs=2, **options
        ) as engine:
            for index in range(2):
                params = mixed_params(index, max_tokens=made.max_tokens - len(made.prompt))
                engine.add_request(f"r{index}", made.prompt, params)
            outputs = run(engine)
            ids.append([list(outputs[f"r{i}"].outputs[0].token_ids) for i in range(2)])
            stats = engine.stats().speculation
            if speculative is not None:
                draft = proposer_of(engine)._model
    assert ids[0] == ids[1]
    assert stats.num_draft_tokens > 4 and stats.acceptance_rate == 1.0
    assert draft._decoder is None


def test_wrong_draft_models(golden, target):
    one, two = (golden(case) for case in CASES[:2])
    model = one.load()
    with pytest.raises(ConfigError, match=r"speculative_config.revision must be left out"):
        load_draft(SpeculativeConfig(model=str(one.directory), revision="main"), model)
    assert load_draft(None, model) is None
    assert load_draft(SpeculativeConfig(method="ngram"), model) is None
    with pytest.raises(EngineError, match="no-such-model"):
        load_draft(SpeculativeConfig(model="no-such-model"), model)
    with pytest.raises(ConfigError, match="vocabulary of the model, 'dummy'"):
        load_draft(SpeculativeConfig(model=str(two.directory)), target)


class _Vocabulary:
    """A model as far as its vocabulary is compared."""

    has_tokenizer = True

    def __init__(self, name, tokens, rows):
        self.name, self.config = name, SimpleNamespace(vocab_size=rows)
        self.tokenizer = SimpleNamespace(vocab_size=len(tokens), id_to_token=tokens.__getitem__)


def test_vocabularies_are_compared():
    tokens = [f"t{i}" for i in range(2000)]
    model = _Vocabulary("large", tokens, 2048)
    draft_loading.check_vocabulary(_Vocabulary("small", tokens, 2016), model)  # padded
    with pytest.raises(ConfigError, match=r"got .small.: .* 1999 and 2000 ids"):
        draft_loading.check_vocabulary(_Vocabulary("small", tokens[:-1], 2048), model)
    others = [*tokens[:-1], "other"]
    with pytest.raises(ConfigError, match="id 1999 is 'other' and 't1999'"):
        draft_loading.check_vocabulary(_Vocabulary("small", others, 2048), model)
    one, two = tiny_model(), tiny_model(config=dataclasses.replace(CONFIG, vocab_size=98))
    with pytest.raises(ConfigError, match="they have 98 and 97 ids"):
        draft_loading.check_vocabulary(two, one)
    draft_loading.check_vocabulary(tiny_model(config=OTHER), one)


def test_num_equal():
    assert draft_model._num_equal([1, 2, 3], [1, 2, 4]) == 2
    assert draft_model._num_equal([1, 2, 3], [1, 2]) == 2
    assert draft_model._num_equal([], [1]) == 0


def test_penalties_of_the_target_lower_acceptance_only(target, make):
    params = [SamplingParams(temperature=0, presence_penalty=1.5, max_tokens=30, ignore_eos=True)]
    prompts = prompts_of(1, 61)
    got, stats = serve(make(), prompts, params)
    assert got == plain(target, prompts, params)
    assert stats.acceptance_rate < 1.0
