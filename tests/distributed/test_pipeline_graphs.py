"""Decode graphs of pipeline stages. On the CPU their steps are launched without capture."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import numpy as np
import pytest

from engine import SamplingParams
from engine.runner.stage_graphs import StageGraphs
from tests.distributed.engines import CONFIG as TWO_LAYERS
from tests.distributed.engines import LONGROPE, add_every_kind_of_request, make_engine, run
from tests.distributed.golden import write_checkpoint
from tests.distributed.test_states import NGRAM, PROMPTS
from tests.e2e.test_layer_kinds import ROOM
from tests.speculative.proposers import KnownProposer

CONFIG = replace(TWO_LAYERS, num_layers=4)


@pytest.fixture
def counts(monkeypatch):
    """Count the steps that stages compute from static inputs: [whole, up to the logits, others]."""
    found = [0, 0, 0]
    lock = threading.Lock()
    launch, follow = StageGraphs.launch_staged, StageGraphs.follow

    def launched(self, staged, entering):
        result = launch(self, staged, entering)
        with lock:
            found[result is None] += 1
        return result

    def followed(self, *arguments):
        with lock:
            found[2] += 1
        return follow(self, *arguments)

    replayed = StageGraphs._replayed
    last = {}  # graphs -> the results of their last replay

    def overwriting(self, graphs, key):
        """As graphs of one pool of memory do: a replay destroys earlier results."""
        for array in last.pop(self, ()):
            array.fill(np.nan)
        result = replayed(self, graphs, key)
        arrays = result if isinstance(result, tuple) else (result,)
        static = [id(one) for one in self._entering]
        last[self] = [a for a in arrays if a is not None and id(a.base) not in static]
        return result

    monkeypatch.setattr(StageGraphs, "_replayed", overwriting)
    monkeypatch.setattr(StageGraphs, "launch_staged", launched)
    monkeypatch.setattr(StageGraphs, "follow", followed)
    return found


def _engine(stages, *, looks_ahead=False, num_drafts=0, **options):
    given = {"config": CONFIG, "debug": True} | options
    engine = make_engine(pipeline_parallel_size=stages, **given)
    if stages > 1:
        engine.runner.capture_graphs(engine.config.scheduler.max_model_len, num_drafts)
        engine.runner._looks_ahead = looks_ahead
    return engine


def _add(engine, count=6, length=40):
    for index in range(count):
        params = SamplingParams(
            max_tokens=length - 3 * index,
            temperature=0.8 * (index % 2),
            seed=index,
            ignore_eos=True,
        )
        engine.add_request(f"r{index}", [index, 3, 7] * (1 + 2 * index), params)


@pytest.fixture(scope="module")
def alone():
    with _engine(1) as engine:
        add_every_kind_of_request(engine)
        return run(engine)


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize(("stages", "is_async"), [(2, False), (3, True)])
def test_every_kind_of_request(in_threads, alone, counts, stages, is_async, looks_ahead):
    """Some steps need more sampling than the last stage's graphs have; prompts have no graphs."""
    options = {"async_scheduling": is_async, "max_num_batched_tokens": 40}
    with _engine(stages, looks_ahead=looks_ahead, **options) as engine:
        add_every_kind_of_request(engine)
        assert run(engine) == alone
    assert min(counts) > 0 and counts[0] + counts[1] > 20
    assert counts[2] == (stages - 1) * (counts[0] + counts[1])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("ranks", "stages"), [(2, 2), (2, 3)])
def test_ranks_of_stages(in_threads, alone, counts, ranks, stages, deterministic):
    """The ranks of each stage, which are processes, follow its graphs."""
    options = {"tensor_parallel_size": ranks, "deterministic": deterministic}
    with _engine(stages, async_scheduling=True, max_num_batched_tokens=40, **options) as engine:
        add_every_kind_of_request(engine)
        found = run(engine)
    if deterministic:
        assert found == alone
    assert found.keys() == alone.keys()
    assert counts[0] + counts[1] > 20 and counts[2] == (stages - 1) * (counts[0] + counts[1])


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_and_shared_prefixes(in_threads, counts, mode, is_async):
    """Tables in all stages are rewritten."""
    options = {"num_blocks": 12, "preemption_mode": mode, "async_scheduling": is_async}
    options |= {"swap_space_gb": 0.01} if mode == "swap" else {}
    found = {}
    for stages in (1, 2):
        with _engine(stages, **(options if stages > 1 else {})) as engine:
            for index in range(5):
                params = SamplingParams(
                    max_tokens=40, temperature=0.8, seed=index, ignore_eos=True, n=2
                )
                engine.add_request(f"r{index}", [1, 2, 3] * 7 + [index % 3] * 5, params)
            found[stages] = run(engine)
            stats = engine.stats().scheduler
    assert stats.num_preemptions > 0 and stats.prefix_cache_hits > 0 and counts[0] > 20
    assert found[2] == found[1]


@pytest.mark.parametrize("kind", ["right", "tree"])
def test_drafts(in_threads, counts, kind):
    """Chains and trees of the captured length."""
    drafting = {"proposer": print, "num_speculative_tokens": 3, "adaptive": False}
    found = {}
    for stages in (1, 3):
        options = {"speculative_config": drafting} if stages > 1 else {}
        with _engine(stages, num_drafts=3, deterministic=False, **options) as engine:
            if stages > 1:
                outputs = {name: list(ids) for name, [(_, ids, *_), _] in found[1].items()}
                proposer = KnownProposer(outputs, CONFIG.vocab_size, (kind,))
                engine.speculation._proposer._proposer = proposer
                engine.speculation._controller._lens = [4]
            _add(engine)
            found[stages] = run(engine)
            stats = engine.stats().speculation
    assert found[3] == found[1]
    assert stats.num_accepted_tokens > 20 and counts[0] > 10


def test_drafts_of_a_model_with_graphs(in_threads, counts, tmp_path):
    """Its drafts are on the last stage's device only; the host reads them for the other stages."""
    folder = str(write_checkpoint("llama", tmp_path))
    drafting = {"model": folder, "num_speculative_tokens": 3, "adaptive": False}
    found = {}
    for stages in (1, 2):
        options = {"speculative_config": drafting} if stages > 1 else {}
        options |= {"model": folder, "dtype": "float32"}
        with _engine(stages, num_drafts=3, **options) as engine:
            if stages > 1:
                engine.speculation._proposer._proposer.capture_graphs()
                engine.speculation._controller._lens = [1, 4]
            _add(engine)
            found[stages] = run(engine)
            stats = engine.stats().speculation
    assert found[2] == found[1]
    assert stats.num_accepted_tokens > 20 and counts[0] > 10


def test_fused_layers_send_no_delta(in_threads, counts, monkeypatch):
    """One request: its layers add their output to the residual stream."""
    found = {}
    keys = set()
    replay = StageGraphs.replay

    def watched(self, key):
        keys.add(key)
        replay(self, key)

    monkeypatch.setattr(StageGraphs, "replay", watched)
    for stages in (1, 2):
        with _engine(stages, deterministic=False) as engine:
            for index in range(3):
                params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
                engine.add_request(f"r{index}", [5 + index] * 9, params)
            found[stages] = run(engine)
    assert found[2] == found[1]
    assert {(key.size, key.has_delta) for key in keys} == {(1, False), (2, True)}


def test_padding_does_not_grow(in_threads, counts):
    """Layers write to the static activations, the padding included; each step begins with 0."""
    with _engine(2, max_num_seqs=8) as engine:
        graphs = engine.runner.graphs
        run_model = graphs._run
        pads = []

        def watched(batch):
            used = np.count_nonzero(batch.context_lens)
            pads.extend(
                float(abs(one[used:]).max(initial=0)) for one in batch.entering if one is not None
            )
            return run_model(batch)

        graphs._run = watched
        _add(engine, count=5, length=30)
        run(engine)
    assert len(pads) > 20 and max(pads) == 0.0


def test_longrope(in_threads, counts):
    config = replace(LONGROPE, num_layers=4)
    found = {}
    for stages in (1, 2):
        with _engine(stages, config=config) as engine:
            add_every_kind_of_request(engine)
            found[stages] = run(engine)
    assert found[2] == found[1] and counts[0] > 5


@pytest.mark.parametrize("case", ["qwen3_next", "nemotron_h"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_recurrent_states(in_threads, counts, tmp_path, case, drafts):
    """Two requests, each in steps of its own: on the CPU the ops refuse padding."""
    folder = write_checkpoint(case, tmp_path)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | ROOM))
    options = {"model": str(folder), "num_blocks": 14, "swap_space_gb": 1e-3}
    found = {}
    for stages in (1, 2):
        drafting = {"speculative_config": NGRAM} if drafts and stages > 1 else {}
        with _engine(stages, num_drafts=drafts, **options, **drafting) as engine:
            if drafting:
                engine.speculation._controller._lens = [1 + drafts]
            for index, ids in enumerate(PROMPTS[:2]):
                params = SamplingParams(max_tokens=40 + index, temperature=0.0, ignore_eos=True)
                engine.add_request(f"{index}", ids, params)
            found[stages] = run(engine)
    assert found[2] == found[1] and counts[0] > 5
