"""The sampler layer: the arrays that a batch needs, and the tokens its rows sample."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest

from engine.device import resolve_device, to_numpy
from engine.layers.sampler import Sampler
from engine.request import Request
from engine.runner.sampling import SamplingSpec, SamplingTable
from engine.sampling_params import SamplingParams
from engine.testing import cases_sample

V = 100
ALWAYS = {"temperature", "top_k", "top_p", "min_p", "seeds", "positions"}


def _row(history=(3, 4, 5), prompt_len=2, seed=1, eos=(), bad_words=(), **params):
    params = SamplingParams(**params)
    request = Request("r", list(history[:prompt_len]), params)
    for token_id in history[prompt_len:]:
        request.append_tokens([token_id])
    request.max_num_tokens = len(history) + 1
    request.spec = SamplingSpec(params, seed, tuple(bad_words), params.logprobs)
    return SimpleNamespace(request=request, eos=eos)


def _batch(xp, rows):
    """Return the runner's batch for requests in rows 0, 1, ...; on the host except the history."""
    device, _ = resolve_device("cpu" if xp is np else "cuda")
    eos = {token_id for row in rows for token_id in row.eos}
    table = SamplingTable(len(rows), V, sorted(eos), device)
    for index, row in enumerate(rows):
        row.request.row = index
        table.assign(row.request)
    index = np.arange(len(rows))
    positions = np.array([row.request.num_known_tokens for row in rows], np.int32)
    batch = table.build(rows, index, positions)
    if batch.history_lens is None:
        return batch
    longest = int(batch.history_lens.max())
    return replace(batch, history=table.history.gather(xp.asarray(index), longest))


def _arrays(batch):
    names = [field.name for field in fields(batch)]
    return {name for name in names if isinstance(getattr(batch, name), np.ndarray)}


def _sample(xp, logits, *rows):
    batch = _batch(xp, rows)
    there = {n: xp.asarray(getattr(batch, n)) for n in _arrays(batch)}
    result = Sampler()(xp.asarray(logits), replace(batch, **there))
    return result._replace(**{k: to_numpy(v) for k, v in result._asdict().items() if v is not None})


def test_plain_requests_need_no_optional_array():
    batch = _batch(np, [_row(), _row(temperature=0.0, top_k=-1)])
    assert _arrays(batch) == ALWAYS
    assert batch.temperature.tolist() == [1.0, 0.0]
    assert batch.top_k.tolist() == [0, 0]
    assert (batch.num_logprobs, batch.allowed) == (None, None)


def test_dtypes_and_seeds_of_64_bits():
    batch = _batch(np, [_row(seed=2**64 - 1), _row(seed=5)])
    assert batch.seeds.tolist() == [2**64 - 1, 5]
    dtypes = [str(getattr(batch, n).dtype) for n in ("temperature", "top_k", "seeds", "positions")]
    assert dtypes == ["float32", "int32", "uint64", "int64"]


def test_temperatures_below_the_smallest_are_greedy():
    assert _batch(np, [_row(temperature=1e-7)]).temperature.tolist() == [0.0]


def test_a_positive_top_p_stays_positive_in_float32():
    assert _batch(np, [_row(top_p=1e-60)]).top_p[0] > 0


def test_only_penalised_rows_carry_their_history():
    rows = [_row(), _row(history=(7, 8, 9, 7), prompt_len=3, repetition_penalty=1.2)]
    batch = _batch(np, rows)
    assert batch.history_lens.tolist() == [0, 4]
    assert batch.prompt_lens.tolist() == [0, 3]
    assert batch.history[1].tolist() == [7, 8, 9, 7]
    np.testing.assert_array_equal(batch.repetition_penalty, np.array([1, 1.2], np.float32))
    assert _arrays(batch) - ALWAYS == {
        "history", "history_lens", "prompt_lens",
        "repetition_penalty", "presence_penalty", "frequency_penalty",
    }  # fmt: skip


def test_biases_follow_each_other():
    rows = [_row(logit_bias={5: 2.0, 1: -1.0}), _row(), _row(logit_bias={9: 3.0})]
    batch = _batch(np, rows)
    assert batch.cu_logit_bias.tolist() == [0, 2, 2, 3]
    assert batch.logit_bias_ids.tolist() == [5, 1, 9]
    assert batch.logit_bias_values.tolist() == [2.0, -1.0, 3.0]


@pytest.mark.parametrize(
    ("params", "forbidden"),
    [
        ({"min_tokens": 2}, {50, 51}),
        ({"min_tokens": 2, "stop_token_ids": [7]}, {7, 50, 51}),
        ({"min_tokens": 2, "stop_token_ids": [7], "ignore_eos": True}, {7}),
        ({"min_tokens": 1}, set()),
        ({"stop_token_ids": [7]}, set()),
    ],
)
def test_end_tokens_are_forbidden_before_min_tokens(params, forbidden):
    row = _row(eos=(50, 51), logit_bias={50: 10.0, 3: 1.0}, **params)  # one token was generated
    batch = _batch(np, [row])
    pairs = zip(batch.logit_bias_ids.tolist(), batch.logit_bias_values.tolist(), strict=True)
    bias = dict(pairs)
    assert {i for i, value in bias.items() if value == -math.inf} == forbidden
    assert bias[3] == 1.0
    assert bias[50] == (-math.inf if 50 in forbidden else 10.0)


def test_num_logprobs_is_the_maximum_over_rows():
    def wanted(*counts):
        return _batch(np, [_row(logprobs=n) for n in counts]).num_logprobs

    assert wanted(None, None) is None
    assert wanted(None, 0) == 0
    assert wanted(2, None, 5) == 5
    assert wanted(5, -1) == -1


@pytest.mark.parametrize(
    ("words", "forbidden"),
    [
        ([(9,)], {9}),
        ([(5, 9)], {9}),  # the output so far is 4, 5
        ([(4, 5, 9), (4, 8)], {9}),
        ([(3, 4, 5, 9)], set()),  # 3 is the prompt's
        ([(6, 9)], set()),
    ],
)
def test_a_bad_word_is_never_completed(words, forbidden):
    batch = _batch(np, [_row(history=(2, 3, 4, 5), prompt_len=2, bad_words=words), _row()])
    if not forbidden:
        assert batch.logit_bias_ids is None
        return
    assert set(batch.logit_bias_ids.tolist()) == forbidden
    assert batch.cu_logit_bias.tolist() == [0, len(forbidden), len(forbidden)]
    assert (batch.logit_bias_values == -np.inf).all()


def test_a_mixed_batch_samples_each_row_as_if_it_were_alone(xp):
    logits = cases_sample.logits("normal", 7, V)
    rows = [
        _row(temperature=0.0),
        _row(seed=5, top_k=4, top_p=0.9),
        _row(seed=6, min_tokens=9, eos=(int(logits[2].argmax()),)),
        _row(seed=7, allowed_token_ids=[11, 97]),
        _row(seed=8, logit_bias={42: 100.0}),
        _row(seed=9, repetition_penalty=1.5, frequency_penalty=0.5, min_p=0.1),
        _row(seed=10, logprobs=3),
    ]
    together = _sample(xp, logits, *rows)
    assert together.status.tolist() == [0] * 7
    assert together.token_ids[0] == logits[0].argmax()
    assert together.token_ids[2] != logits[2].argmax()
    assert together.token_ids[3] in (11, 97)
    assert together.token_ids[4] == 42
    for b, row in enumerate(rows):
        assert _sample(xp, logits[b : b + 1], row).token_ids[0] == together.token_ids[b]


def test_only_allowed_ids_are_sampled(xp):
    logits = cases_sample.logits("normal", 2, V)
    allowed = int(logits[0].argmin())
    result = _sample(xp, logits, _row(allowed_token_ids=[allowed]), _row(temperature=0.0))
    assert result.token_ids.tolist() == [allowed, logits[1].argmax()]


@pytest.mark.parametrize("count", [5, 20, 30, -1])
def test_top_log_probabilities_of_any_number(xp, count):
    logits = cases_sample.logits("rounded", 3, V)
    logits[1, 4] = np.nan
    batch = _batch(xp, [_row()] * 3)  # 30 is more than a request may ask for
    there = {n: xp.asarray(getattr(batch, n)) for n in _arrays(batch)}
    result = Sampler()(xp.asarray(logits), replace(batch, num_logprobs=count, **there))
    n = V if count < 0 else count
    x = logits.astype(np.float64)
    want = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    top_ids, top = to_numpy(result.top_ids), to_numpy(result.top_logprobs)
    assert top_ids.shape == (3, n) and top_ids.dtype == np.int32 and top.dtype == np.float32
    for b in (0, 2):
        order = np.argsort(-x[b], kind="stable")[:n]
        np.testing.assert_array_equal(top_ids[b], order)
        np.testing.assert_allclose(top[b], want[b, order], rtol=1e-5)
    assert to_numpy(result.status).tolist() == [0, 1, 0]
    assert (top_ids[1] == -1).all() and np.isnan(top[1]).all()
