"""Drafts in a pipeline: the outputs and counts of one process, while other steps are in flight."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine import SamplingParams
from engine.cache.kv_cache import KVCache
from engine.errors import StepTimeoutError
from tests.distributed.engines import CONFIG as TWO_LAYERS
from tests.distributed.engines import add_every_kind_of_request, make_engine, run
from tests.distributed.golden import write_checkpoint
from tests.speculative.proposers import KnownProposer

CONFIG = replace(TWO_LAYERS, num_layers=4)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False}


def _engine(stages, **options):
    return make_engine(pipeline_parallel_size=stages, **({"config": CONFIG} | options))


def _known(engine, outputs, kinds):
    """Let the engine's proposer know the outputs of requests, and deviate from them."""
    engine.speculation._proposer._proposer = KnownProposer(outputs, CONFIG.vocab_size, kinds)


def _of_known(num_tokens=5):
    return {"proposer": print, "num_speculative_tokens": num_tokens, "adaptive": False}


def _ids(found):
    """Return the output ids of each scheduler request, by its id, of what `run` returns."""
    return {
        f"{name}#{index}" if index else name: list(ids)
        for name, [*completions, _] in found.items()
        for index, ids, *_ in completions
    }


@pytest.fixture(scope="module")
def alone():
    """What one process answers to requests of every kind, without drafts."""
    with _engine(1) as engine:
        add_every_kind_of_request(engine)
        return run(engine)


@pytest.mark.parametrize("method", ["ngram", "suffix", "custom"])
@pytest.mark.parametrize(("stages", "is_async"), [(2, False), (3, True)])
def test_every_kind_of_request(in_threads, alone, method, stages, is_async):
    """Prompts in chunks; random and greedy requests; drafts that are right, wrong and invalid."""
    drafting = _of_known() if method == "custom" else NGRAM | {"method": method}
    options = {"async_scheduling": is_async, "max_num_batched_tokens": 40, "debug": True}
    with _engine(stages, speculative_config=drafting, **options) as engine:
        if method == "custom":
            _known(engine, _ids(alone), ("right", "half", "random", "hostile", "padded", "nothing"))
        add_every_kind_of_request(engine)
        found = run(engine)
        stats = engine.stats().speculation
    assert found == alone
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_a_draft_model(in_threads, tmp_path):
    """The target itself, beside the last stage; a bias does not apply to its drafts."""
    folder = str(write_checkpoint("llama", tmp_path))
    drafting = {"model": folder, "num_speculative_tokens": 3, "adaptive": False}
    found = {}
    for stages in (1, 2):
        options = {"speculative_config": drafting} if stages > 1 else {}
        with _engine(stages, model=folder, dtype="float32", **options) as engine:
            for index in range(5):
                params = SamplingParams(
                    max_tokens=20,
                    temperature=0.8 * (index % 2),
                    seed=index,
                    ignore_eos=True,
                    logit_bias={7: 4.0} if index == 4 else None,
                )
                engine.add_request(f"r{index}", [index, 3, 7] * (index + 1), params)
            found[stages] = run(engine)
            stats = engine.stats().speculation
    assert found[2] == found[1]
    assert 0.5 * stats.num_draft_tokens < stats.num_accepted_tokens < stats.num_draft_tokens


def test_trees(in_threads, monkeypatch):
    """Keys of accepted branches move in all stages."""
    found = {}
    moves = {6: set(), 4: set()}  # number of arrays of a stage (three layers, two) -> its moves
    inner = KVCache.move_slots

    def counted(cache, sources, targets):
        moves[len(cache.page_slabs[0])] |= set(zip(sources, targets, strict=True))
        inner(cache, sources, targets)

    monkeypatch.setattr(KVCache, "move_slots", counted)
    options = {"config": replace(CONFIG, num_layers=5), "deterministic": False, "debug": True}
    for stages in (1, 2):
        drafting = {"speculative_config": _of_known(7)} if stages > 1 else {}
        with _engine(stages, **options, **drafting) as engine:
            if stages > 1:
                _known(engine, _ids(found[1]), ("tree",))
            for index in range(5):
                params = SamplingParams(
                    max_tokens=30, temperature=0.7 * (index % 2), seed=index, ignore_eos=True
                )
                engine.add_request(f"r{index}", [index, 3, 7] * (index + 1), params)
            found[stages] = run(engine)
            stats = engine.stats().speculation
    assert found[2] == found[1]
    assert stats.num_accepted_tokens > 10
    assert moves[6] <= moves[4]  # those of the last step reach nobody
    assert len(moves[6]) > 5


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_and_shared_prefixes(in_threads, mode):
    """Few blocks: requests with drafts in flight lose theirs."""
    options = {"num_blocks": 12, "preemption_mode": mode, "debug": True}
    options |= {"swap_space_gb": 0.01} if mode == "swap" else {}
    options |= {"speculative_config": _of_known(), "max_num_batched_tokens": 16}
    found = {}
    for stages in (1, 2):
        with _engine(stages, **(options if stages > 1 else {})) as engine:
            if stages > 1:
                _known(engine, _ids(found[1]), ("right", "half", "random"))
            for index in range(5):
                params = SamplingParams(
                    max_tokens=40, temperature=0.8 * (index % 2), seed=index, ignore_eos=True
                )
                engine.add_request(f"r{index}", [1, 2, 3] * 7 + [index % 3] * 5, params)
            found[stages] = run(engine)
            scheduled = engine.stats().scheduler
            drafted = engine.stats().speculation
    assert scheduled.num_preemptions > 0 and scheduled.prefix_cache_hits > 0
    assert (scheduled.num_swaps > 0) == (mode == "swap")
    assert 0 < drafted.num_accepted_tokens < drafted.num_draft_tokens
    assert found[2] == found[1]


def test_counts_are_those_of_one_process(in_threads):
    """Drafts follow from a request's tokens, so the same are verified, in steps of their own."""
    found = {}
    for stages in (1, 3):
        with _engine(stages, speculative_config=NGRAM) as engine:
            for index in range(4):
                params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
                engine.add_request(f"r{index}", [index, 3, 7, 3, 7, 3], params)
            sizes = set()
            while engine.has_unfinished_requests():
                engine.step()
                sizes.add(len(engine._in_flight))
            found[stages] = engine.stats().speculation
            assert not engine.speculation._num_real
    assert max(sizes) == 2  # steps stay in flight while drafts are proposed
    assert found[3] == found[1] and found[3].num_accepted_tokens > 10


def test_aborted_and_failed_steps_in_flight(in_threads, monkeypatch):
    """Requests leave, and a step times out, while drafts of them are in flight."""
    found = {}
    for stages in (1, 3):
        options = {"speculative_config": _of_known(), "debug": True} if stages > 1 else {}
        with _engine(stages, **options) as engine:
            if stages > 1:
                _known(engine, _ids(found[1]), ("right", "half", "random"))
            for index in range(6):
                params = SamplingParams(
                    max_tokens=40, temperature=0.8 * (index % 2), seed=index, ignore_eos=True
                )
                engine.add_request(f"r{index}", [index + 1] * 9, params)
            if stages > 1:
                while not any(s.output.num_draft_tokens for s in engine._in_flight):
                    engine.step()
                engine.abort_request(["r0", "r1"])
                while not any(s.output.num_draft_tokens for s in engine._in_flight):
                    engine.step()
                monkeypatch.setattr(engine.watchdog, "check", _raise_timeout)
                with pytest.raises(StepTimeoutError):
                    while engine.has_unfinished_requests():
                        engine.step()
                monkeypatch.undo()
            found[stages] = run(engine)
            stats = engine.stats()
    assert stats.scheduler.num_retries > 0 and stats.speculation.num_accepted_tokens > 10
    for name in ("r2", "r3", "r4", "r5"):
        assert found[3][name] == found[1][name]


def _raise_timeout():
    raise StepTimeoutError("not this time")
