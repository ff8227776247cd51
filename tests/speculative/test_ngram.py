"""Drafts from the request's own text, against a scan of all of it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import engine
from engine import SamplingParams
from engine.llm_engine import LLMEngine
from engine.models.mock_model import MockModel
from engine.request import Request
from engine.speculative import ngram, ngram_index
from engine.speculative.config import SpeculativeConfig
from engine.speculative.guarded import GuardedProposer
from engine.speculative.make import _make_proposer
from engine.speculative.ngram import NgramProposer, SuffixProposer
from engine.speculative.ngram_index import NgramIndex
from engine.speculative.proposer import CustomProposer
from tests.loading import tiny

RULES = SimpleNamespace(ignore_eos=True, stop_token_ids=None)


def make_request(prompt, output=()):
    request = Request("r0", list(prompt), RULES)
    request.output_token_ids.extend(output)
    return request


def scan(ids, shortest, longest):
    """Return the longest match's length, and where it ends, the latest first."""
    for length in range(min(longest, len(ids) - 1), shortest - 1, -1):
        last = ids[-length:]
        ends = [end for end in range(len(ids) - 2, length - 2, -1)
                if ids[end + 1 - length : end + 1] == last]  # fmt: skip
        if ends:
            return length, ends
    return 0, []


def built(ids, shortest, longest, parts, **options):
    """Return an index that has read `ids` in parts of these sizes, then the rest."""
    index = NgramIndex(shortest, longest, num_tokens=50, **options)
    start = 0
    for size in parts:
        index.extend(ids[start : start + size])
        start += size
    index.extend(ids[start:])
    return index


@pytest.mark.parametrize("bulk", [1, 5, 10**9])
@given(
    ids=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    shortest=st.integers(1, 4),
    more=st.integers(0, 9),
    parts=st.lists(st.integers(1, 12), max_size=6),
)
def test_matches_are_those_of_a_scan(bulk, ids, shortest, more, parts):
    """However the tokens arrive: one by one, or many at once with NumPy."""
    longest = shortest + more
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram_index, "_BULK", bulk)
        index = built(ids, shortest, longest, parts)
        assert index.token_ids == ids
        length, ends = index.matches()
        assert (length, ends) == scan(ids, shortest, longest)
        assert index.matches(all_of_them=False) == (length, ends[:1])


@given(st.lists(st.integers(0, 3), min_size=2, max_size=80), st.integers(1, 12))
def test_ngram_proposes_what_followed_the_latest_match(ids, count):
    proposer, request = NgramProposer(2, 5), make_request(ids[:1])
    for end in range(1, len(ids) + 1):
        request.output_token_ids[:] = ids[1:end]
        known, ends = ids[:end], scan(ids[:end], 2, 5)[1]
        (drafts,) = proposer.propose([(request, count)])
        if not ends:
            assert drafts is None
            continue
        right = list(known)  # a match that reaches the end goes round
        for step in range(count):
            right.append(right[ends[0] + 1 + step])
        assert list(drafts.token_ids) == right[end:]


def test_bulk_and_single_tokens_give_the_same_chains():
    rng = np.random.default_rng(0)
    ids = (rng.zipf(1.4, 3000) % 151_000).tolist()
    slow, fast = NgramIndex(3, 48, num_tokens=500), NgramIndex(3, 48, num_tokens=500)
    for token_id in ids:
        slow.extend([token_id])
    fast.extend(ids[:70])
    fast.extend(ids[70:2000])
    fast.extend(ids[2000:2003])
    fast.extend(ids[2003:])
    for one, other in zip(slow._chains, fast._chains, strict=True):
        assert one.link == other.link and one._head == other._head and one._hash == other._hash
    assert [chains.n for chains in slow._chains] == [3, 6, 12, 24, 48]


@pytest.mark.parametrize("num_tokens", [1_000, 30_000, 120_000])
def test_a_proposal_takes_a_bounded_number_of_steps(num_tokens):
    """Whatever the text is: no scan, and no more for a longer one."""
    random = np.random.default_rng(1).integers(0, 50_000, num_tokens).tolist()
    # The shortest n-grams are everywhere, and a longer match is nowhere.
    frequent = [i % 4 if i % 4 else 10 + i for i in range(num_tokens)]
    for ids in (random, [7] * num_tokens, frequent):
        index = NgramIndex(3, 48, num_tokens=num_tokens)
        index.extend(ids)
        for token_id in (1, 2, 3, 7, 7, 7):
            index.extend([token_id])
            before = index.num_steps
            index.matches()
            assert index.num_steps - before <= 64 * 5


def test_memory_is_linear_and_small():
    for num_tokens in (10_000, 80_000):
        index = NgramIndex(3, 8, num_tokens=num_tokens)
        index.extend(list(range(num_tokens)))
        arrays = [array for chains in index._chains for array in (chains.link, chains._head)]
        size = sum(map(sys.getsizeof, arrays)) + sys.getsizeof(index.token_ids)
        assert size < 64 * num_tokens


def test_long_prompts_are_read_in_several_calls(monkeypatch):
    monkeypatch.setattr(ngram, "_READ_PER_CALL", 100)
    proposer = NgramProposer(2, 4)
    text = list(range(125)) * 2
    requests = [make_request(text) for _ in range(2)]
    shown = []
    for _ in range(6):
        shown.append(
            [drafts is not None for drafts in proposer.propose([(r, 3) for r in requests])]
        )
        read = [len(index.token_ids) for index in proposer._indices.values()]
        assert sum(read) <= 100 * len(shown)
    # 500 tokens in calls of 100: the first request has its 250 after three of them.
    assert shown == [[False, False]] * 2 + [[True, False]] * 2 + [[True, True]] * 2
    assert proposer.propose([(requests[0], 3)])[0].token_ids == (0, 1, 2)


def test_prompts_are_read_while_the_device_computes_them(monkeypatch):
    read, extend = [], NgramIndex.extend
    monkeypatch.setattr(
        NgramIndex, "extend", lambda self, ids: read.append(len(ids)) or extend(self, ids)
    )
    config = {"method": "ngram", "num_speculative_tokens": 4}
    with LLMEngine(MockModel(64), num_blocks=64, speculative_config=config) as engine:
        engine.runner.read = lambda step, timeout, read_step=engine.runner.read: (
            read.append("result") or read_step(step, timeout)
        )
        for name, use in (("on", True), ("off", False)):
            params = SamplingParams(temperature=0, max_tokens=4, use_speculation=use)
            engine.add_request(name, [1, 2, 3, 4, 5], params)
        engine.step()
        assert read == [5, "result"]


def test_a_proposer_that_cannot_read_ahead_is_noted():
    class Failing(NgramProposer):
        def read_ahead(self, requests):
            raise MemoryError

    guarded = GuardedProposer(Failing(), vocab_size=64)
    guarded.read_ahead([make_request([1, 2, 3])])
    assert guarded.num_failures == 1
    GuardedProposer(CustomProposer(print), vocab_size=64).read_ahead([make_request([1])])


def test_an_index_grows_with_its_request():
    proposer, request = NgramProposer(2, 4), make_request([1, 2, 3])
    proposer.propose([(request, 1)])
    first = proposer._indices[request]
    request.output_token_ids.extend(range(first._capacity))
    proposer.propose([(request, 1)])
    assert first.is_full
    request.output_token_ids.extend([1, 2])
    assert proposer.propose([(request, 1)])[0].token_ids == (3,)
    second = proposer._indices[request]
    assert second is not first and second._capacity > first._capacity and not second.is_full


def test_tokens_that_were_cut_or_changed_are_read_again():
    proposer, request = NgramProposer(2, 4), make_request([1, 2, 3, 9], [1, 2, 3, 8])
    assert proposer.propose([(request, 1)]) == [None]
    request.output_token_ids[:] = [1, 2]
    assert proposer.propose([(request, 1)])[0].token_ids == (3,)
    request.output_token_ids[:] = [2, 3, 5]
    assert proposer.propose([(request, 1)]) == [None]
    request.output_token_ids[:] = [2, 3]
    assert proposer.propose([(request, 1)])[0].token_ids == (9,)


def test_what_a_request_had_is_dropped():
    proposer = NgramProposer()
    requests = [make_request([1, 2, 3]) for _ in range(3)]
    proposer.propose([(request, 1) for request in requests])
    proposer.forget(requests[0])
    proposer.forget(requests[0])
    assert len(proposer._indices) == 2 and proposer.cost(4, 4) == 0.0
    proposer.close()
    assert not proposer._indices


def suffix_drafts(ids, count, **options):
    return SuffixProposer(2, **options).propose([(make_request(ids), count)])[0]


def test_suffix_takes_the_longest_match_and_its_most_frequent_continuation():
    # 1 2 is followed by 5 twice and by 6 once, lately.
    assert suffix_drafts([1, 2, 5, 0, 1, 2, 5, 7, 1, 2, 6, 8, 1, 2], 1).token_ids == (5,)
    # 4 1 2 was seen once only, but is longer.
    assert suffix_drafts([4, 1, 2, 9, 0, 1, 2, 5, 0, 1, 2, 5, 4, 1, 2], 1).token_ids == (9,)
    # 5 is followed by 0 and 7: the latest of what is equally frequent.
    assert suffix_drafts([1, 2, 5, 0, 1, 2, 5, 7, 1, 2], 2).token_ids == (5, 7)
    assert suffix_drafts([1, 2, 3], 4) is None


def test_suffix_proposes_more_for_a_longer_match():
    text = list(range(100, 140))
    lengths = [len(suffix_drafts([*text, *text[:n]], 30)) for n in (2, 3, 6, 20)]
    assert lengths == [4, 6, 12, 30]
    assert suffix_drafts([*text, *text[:20]], 8).token_ids == tuple(range(120, 128))


def test_suffix_may_propose_a_tree():
    ids = [1, 2, 5, 0, 1, 2, 5, 0, 1, 2, 6, 8, 1, 2]
    tree = suffix_drafts(ids, 4, allow_trees=True)
    assert (tree.token_ids, tree.parents) == ((5, 0, 1, 6), (-1, 0, 1, -1))
    assert suffix_drafts(ids, 4).parents is None
    # There is room for one draft only.
    assert not suffix_drafts(ids, 1, allow_trees=True).is_tree


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=80), st.integers(1, 20), st.booleans()
)  # fmt: skip
def test_suffix_drafts_are_valid(ids, count, allow_trees):
    length, ends = scan(ids, 2, 48)
    drafts = suffix_drafts(ids, count, allow_trees=allow_trees)
    assert (drafts is None) == (not ends)
    if drafts is not None:
        assert 1 <= len(drafts) <= min(count, 2 * length)
        following = [ids[end + 1] for end in ends]
        assert following.count(drafts.token_ids[0]) == max(map(following.count, following))


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_the_engine_proposes_and_the_tokens_stay_the_same(method, monkeypatch):
    forgotten = []
    forget = NgramProposer.forget

    def recorded(proposer, request):
        forget(proposer, request)
        forgotten.append((request.request_id, len(proposer._indices)))

    monkeypatch.setattr(NgramProposer, "forget", recorded)
    model = MockModel(16, 512)
    options = {"num_blocks": 64, "debug": True}
    config = {"method": method, "prompt_lookup_min": 2, "adaptive": False}
    params = SamplingParams(temperature=0, max_tokens=200)
    prompts = [[1, 2, 3], [5] * 9, list(range(16)) * 5]
    with LLMEngine(model, speculative_config=config, **options) as engine:
        for name, prompt in enumerate(prompts):
            engine.add_request(str(name), prompt, params)
        outputs = {}
        while engine.has_unfinished_requests():
            outputs.update((output.request_id, output) for output in engine.step())
            engine.check_integrity()
        stats = engine.stats().speculation
        assert stats.num_drafts > 0 and stats.num_proposer_failures == 0
    assert sorted(name for name, _ in forgotten) == ["0", "1", "2"]
    assert forgotten[-1][1] == 0  # nothing is kept of what has ended
    for name, prompt in enumerate(prompts):
        right = MockModel(16, 512).continuation(prompt, 200)
        assert list(outputs[str(name)].outputs[0].token_ids) == right


@pytest.mark.parametrize("allow_trees", [False, True])
def test_the_config_says_which_and_how_long(allow_trees):
    scheduler: Any = SimpleNamespace(config=SimpleNamespace(draft_trees=allow_trees))
    config = SpeculativeConfig(method="ngram", prompt_lookup_min=2, prompt_lookup_max=5)
    proposer = _make_proposer(config, scheduler, None, None)
    assert type(proposer) is NgramProposer and proposer._lengths == (2, 5)
    config = SpeculativeConfig(method="suffix", prompt_lookup_min=2)
    proposer = _make_proposer(config, scheduler, None, None)
    assert type(proposer) is SuffixProposer and proposer._lengths == (2, 48)
    assert proposer._allow_trees is allow_trees


def test_a_model_of_few_positions_drafts(tmp_path):
    """The costs of drafts are measured on tokens that it has positions for."""
    tiny.write_model(tmp_path / "m", "llama")
    model = engine.load(tmp_path / "m", device="cpu", max_model_len=8)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    outputs = []
    for drafts in (None, {"method": "ngram"}):
        llm = LLMEngine(model, speculative_config=drafts)
        llm.add_request("0", {"prompt_token_ids": [3, 4, 3, 4]}, params)
        while llm.has_unfinished_requests():
            outputs += [out.outputs[0].token_ids for out in llm.step() if out.finished]
    assert len(outputs) == 2 and outputs[0] == outputs[1]
