"""top-n-sigma, typical sampling, XTC and DRY: against loops by definition, and in an engine."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import LLM, SamplingParams
from engine.errors import RequestError
from engine.layers.candidate_filters import kept_tokens, pack_rows
from engine.layers.sampler import Sampler, SamplingBatch
from engine.runner.dry import DryRule
from tests.e2e.tiny import VOCAB, make_llm, tiny_model

OFF = {"top_n_sigma": 0.0, "typical_p": 1.0, "xtc_threshold": 1.0}


def _kept(row, **filters):
    columns = {name: np.array([value], np.float32) for name, value in (OFF | filters).items()}
    logits = np.array([row], np.float32)
    before = logits.copy()
    keep = kept_tokens(logits, **columns)
    assert np.array_equal(logits, before, equal_nan=True)
    return np.flatnonzero(keep[0]).tolist()


def _softmax(row):
    row = np.array(row, np.float64)
    powers = np.exp(row - row.max())
    return powers / powers.sum()


rows = st.lists(st.integers(-400, 400), min_size=1, max_size=40).map(
    lambda values: [value / 40 for value in values]
)


@settings(deadline=None)
@given(rows, st.sampled_from([0.1, 0.5, 1.0, 2.5]))
def test_top_n_sigma(row, limit):
    border = max(row) - limit * float(np.std(np.array(row, np.float64)))
    near = [i for i, value in enumerate(row) if abs(value - border) < 1e-4]
    want = [i for i, value in enumerate(row) if value >= border]
    got = _kept(row, top_n_sigma=limit)
    assert set(got) ^ set(want) <= set(near) and got


@settings(deadline=None)
@given(rows, st.sampled_from([0.05, 0.3, 0.7, 0.95]))
def test_typical(row, mass):
    p = _softmax(row)
    information = -np.log(p)
    entropy = float((p * information).sum())
    got = _kept(row, typical_p=mass)
    distance = np.abs(information - entropy)
    dropped = [i for i in range(len(row)) if i not in got]
    # The kept ones are closest, reach the mass, and would not without the farthest of them.
    assert max(distance[got]) <= min(distance[dropped], default=math.inf) + 1e-4
    assert p[got].sum() >= mass - 1e-4 or not dropped
    assert p[got].sum() - p[got[int(np.argmax(distance[got]))]] < mass + 1e-4


@settings(deadline=None)
@given(rows, st.sampled_from([0.02, 0.1, 0.3, 0.5]))
def test_xtc(row, threshold):
    p = _softmax(row)
    if np.abs(p - threshold).min() < 1e-5:
        return
    above = [i for i in range(len(row)) if p[i] >= threshold]
    got = _kept(row, xtc_threshold=threshold)
    dropped = set(range(len(row))) - set(got)
    assert len(dropped) == max(0, len(above) - 1) and dropped <= set(above)
    if above:
        [stays] = set(above) - dropped
        assert p[stays] <= min(p[above]) + 1e-7


def test_filters_follow_each_other_and_leave_masked_tokens_out():
    row = [5.0, 4.9, 4.8, -9.0, -math.inf, 4.7]
    assert _kept(row) == [0, 1, 2, 3, 5]
    assert _kept(row, top_n_sigma=1.0) == [0, 1, 2, 5]
    # Of the four left each has about a quarter.
    assert _kept(row, top_n_sigma=1.0, xtc_threshold=0.2) == [5]
    assert _kept([-math.inf] * 3, xtc_threshold=0.1, top_n_sigma=1.0, typical_p=0.5) == []
    assert _kept([math.nan, 1.0], typical_p=0.5) == [1]


@pytest.mark.parametrize("size", [1, 31, 32, 33, 97])
def test_packed_masks(size):
    keep = np.random.default_rng(size).random((3, size)) < 0.5
    packed = pack_rows(keep)
    assert packed.shape == (3, -(-size // 32)) and packed.dtype == np.int32
    for row in range(3):
        for token in range(size):
            assert bool(packed[row, token // 32] >> (token % 32) & 1) == keep[row, token]


def _longest(ids, token, breakers):
    """Return the longest suffix of `ids` that `token` has followed before, without a breaker."""
    best = 0
    for end in range(len(ids) - 1):
        length = 0
        while length <= end and ids[end - length] == ids[-1 - length]:
            if ids[end - length] in breakers:
                break
            length += 1
        if ids[end + 1] == token:
            best = max(best, length)
    return best


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.integers(0, 4), max_size=40),
    st.integers(1, 4),
    st.sampled_from([(), (0,), (0, 3)]),
    st.sampled_from([-1, 0, 7, 100]),
)
def test_dry(ids, allowed, breakers, last_n):
    rule = DryRule(1.5, 2.0, allowed, last_n, lambda token: token in breakers)
    seen = ids if last_n < 0 else ids[len(ids) - min(last_n, len(ids)) :]
    want = {}
    for token in range(5):
        length = _longest(seen, token, breakers)
        if length >= allowed and token not in breakers:
            want[token] = 1.5 * 2.0 ** (length - allowed)
    assert rule.penalties(ids) == pytest.approx(want)


def test_dry_of_a_long_repetition_takes_no_time_and_no_infinity():
    rule = DryRule(100.0, 100.0, 1, -1, lambda token: False)
    [penalty] = rule.penalties([7] * 100_000).values()
    assert penalty == 1e4


NAMES = ("typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "dry_base")


@pytest.mark.parametrize("name", [*NAMES, "dry_multiplier", "dry_allowed_length"])
@pytest.mark.parametrize("value", [-2, math.nan, "x", 1e9])
def test_values_out_of_range(name, value):
    with pytest.raises(RequestError, match=f"{name} must be"):
        SamplingParams(**{name: value})


FILTERS = [
    {"typical_p": 0.3},
    {"top_n_sigma": 1.0},
    {"xtc_probability": 0.9, "xtc_threshold": 0.012},
    {"dry_multiplier": 5.0, "dry_allowed_length": 1},
    {"typical_p": 0.9, "top_n_sigma": 2.0, "xtc_probability": 0.5, "top_k": 30, "min_p": 0.01},
]


def _run(prompts, params, **options) -> list[list[int]]:
    with make_llm(tiny_model(), **options) as llm:
        assert isinstance(llm, LLM)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_answers_do_not_depend_on_the_batch():
    prompts = [[5 + i, 9, 11, 5 + i, 9] for i in range(len(FILTERS) + 1)]
    params = [
        SamplingParams(seed=i, max_tokens=16, ignore_eos=True, **filters)
        for i, filters in enumerate([*FILTERS, {}])
    ]
    together = _run(prompts, params, max_num_seqs=8)
    for index in range(len(params)):
        assert _run(prompts[index : index + 1], params[index]) == together[index : index + 1]
    plain = [SamplingParams(seed=i, max_tokens=16, ignore_eos=True) for i in range(len(params))]
    without = _run(prompts, plain, max_num_seqs=8)
    assert together[-1] == without[-1]
    changed = [a != b for a, b in zip(together[:-1], without[:-1], strict=True)]
    assert changed[:3] == [True] * 3 and changed[4]  # DRY finds nothing to break here


@pytest.mark.parametrize("name", ["typical_p", "top_n_sigma", "xtc_threshold"])
def test_filters_choose_among_penalised_logits(xp, name):
    """Filters with penalties keep what they keep of logits that the penalties have changed."""
    rng = np.random.default_rng(4)
    num_rows, vocab, width = 6, 33, 12
    logits = rng.normal(scale=2.0, size=(num_rows, vocab)).astype(np.float32)
    prompt_lens = rng.integers(0, 5, num_rows).astype(np.int32)
    lens = (prompt_lens + rng.integers(0, 8, num_rows)).astype(np.int32)
    history = rng.integers(0, 9, (num_rows, width)).astype(np.int32)
    repetition = rng.uniform(0.5, 2.0, num_rows).astype(np.float32)
    presence = rng.uniform(-2.0, 2.0, num_rows).astype(np.float32)
    frequency = rng.uniform(-2.0, 2.0, num_rows).astype(np.float32)
    penalised = logits.copy()
    for row, out in enumerate(penalised):
        for token in set(history[row, : lens[row]].tolist()):
            out[token] *= 1 / repetition[row] if out[token] > 0 else repetition[row]
        output = history[row, prompt_lens[row] : lens[row]].tolist()
        for token in set(output):
            out[token] -= frequency[row] * output.count(token) + presence[row]
    chosen = xp.asarray(np.array([0, 2, 3, 4, 5]))
    value = {"typical_p": 0.5, "top_n_sigma": 1.0, "xtc_threshold": 0.1}[name]
    batch = dataclasses.replace(
        SamplingBatch.greedy(xp, num_rows),
        temperature=xp.ones(num_rows, np.float32),
        seeds=xp.arange(num_rows, dtype=np.uint64),
        filter_rows=chosen,
        **{name: xp.full(len(chosen), value, np.float32)},
    )
    with_history = dataclasses.replace(
        batch,
        history=xp.asarray(history),
        history_lens=xp.asarray(lens),
        prompt_lens=xp.asarray(prompt_lens),
        repetition_penalty=xp.asarray(repetition),
        presence_penalty=xp.asarray(presence),
        frequency_penalty=xp.asarray(frequency),
    )
    got = Sampler()(xp.asarray(logits), with_history)
    want = Sampler()(xp.asarray(penalised), batch)
    assert got.num_kept.tolist() == want.num_kept.tolist()
    assert got.token_ids.tolist() == want.token_ids.tolist()


def test_greedy_answers_are_not_filtered():
    prompt = [[5, 9, 11]]
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    xtc = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, xtc_probability=1, typical_p=0.1
    )
    assert _run(prompt, greedy) == _run(prompt, xtc)


@pytest.mark.parametrize("filters", FILTERS)
def test_masks_and_biases_leave_a_token(filters):
    """Only few tokens are allowed, and the end is forbidden: some token is always left."""
    allowed = [3, 17, 40, VOCAB - 1]
    params = SamplingParams(
        seed=2, max_tokens=20, min_tokens=20, allowed_token_ids=allowed, logprobs=2, **filters
    )
    [tokens] = _run([[5, 9, 11]], params)
    assert set(tokens) <= {17, 40, VOCAB - 1} and len(tokens) == 20


def test_dry_breaks_a_loop():
    """A bias makes one token win always; DRY lets others in."""
    loop = {"logit_bias": {17: 30.0}, "max_tokens": 24, "ignore_eos": True, "temperature": 0}
    assert _run([[5, 9]], SamplingParams(**loop)) == [[17] * 24]
    [tokens] = _run([[5, 9]], SamplingParams(**loop, dry_multiplier=40.0))
    assert 2 <= tokens.count(17) < 24
