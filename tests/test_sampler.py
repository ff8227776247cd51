"""The sampler layer: which arrays a batch needs, and what its rows then sample."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from engine.device import to_numpy
from engine.errors import RequestError
from engine.layers.sampler import Sampler, SamplingRow, build_sampling_batch
from engine.sampling_params import SamplingParams
from engine.testing import cases_sample

V = 100
ALWAYS = {"temperature", "top_k", "top_p", "min_p", "seeds", "positions"}


def _row(history=(3, 4, 5), prompt_len=2, seed=1, eos=(), **params):
    params = SamplingParams(**params)
    return SamplingRow(params, list(history), prompt_len, seed, len(history), eos)


def _arrays(batch):
    names = batch.__dataclass_fields__
    return {name for name in names if isinstance(getattr(batch, name), np.ndarray)}


def _sample(xp, logits, *rows):
    result = Sampler()(xp.asarray(logits), build_sampling_batch(xp, rows))
    return result._replace(**{k: to_numpy(v) for k, v in result._asdict().items() if v is not None})


def test_plain_requests_need_no_optional_array():
    batch = build_sampling_batch(np, [_row(), _row(temperature=0.0, top_k=-1)])
    assert _arrays(batch) == ALWAYS
    assert batch.temperature.tolist() == [1.0, 0.0]
    assert batch.top_k.tolist() == [0, 0]
    assert (batch.num_logprobs, batch.allowed_ids) == (None, None)


def test_dtypes_and_seeds_modulo_2_64():
    batch = build_sampling_batch(np, [_row(seed=-1), _row(seed=2**64 + 5)])
    assert batch.seeds.tolist() == [2**64 - 1, 5]
    dtypes = [str(getattr(batch, n).dtype) for n in ("temperature", "top_k", "seeds", "positions")]
    assert dtypes == ["float32", "int32", "uint64", "int64"]


def test_temperatures_below_the_smallest_are_greedy():
    assert build_sampling_batch(np, [_row(temperature=1e-7)]).temperature.tolist() == [0.0]


def test_a_positive_parameter_stays_positive_in_float32():
    batch = build_sampling_batch(np, [_row(top_p=1e-60, repetition_penalty=1e-60)])
    assert batch.top_p[0] > 0 and batch.repetition_penalty[0] > 0


def test_only_penalised_rows_carry_their_history():
    rows = [_row(), _row(history=(7, 8, 9, 7), prompt_len=3, repetition_penalty=1.2)]
    batch = build_sampling_batch(np, rows)
    assert batch.history_lens.tolist() == [0, 4]
    assert batch.prompt_lens.tolist() == [0, 3]
    assert batch.history.tolist() == [[0, 0, 0, 0], [7, 8, 9, 7]]
    np.testing.assert_array_equal(batch.repetition_penalty, np.array([1, 1.2], np.float32))
    assert _arrays(batch) - ALWAYS == {
        "history", "history_lens", "prompt_lens",
        "repetition_penalty", "presence_penalty", "frequency_penalty",
    }  # fmt: skip


def test_biases_follow_each_other():
    rows = [_row(logit_bias={5: 2.0, 1: -1.0}), _row(), _row(logit_bias={9: 3.0})]
    batch = build_sampling_batch(np, rows)
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
def test_ends_are_forbidden_before_min_tokens(params, forbidden):
    row = _row(eos=(50, 51), logit_bias={50: 10.0, 3: 1.0}, **params)  # one token was made
    bias = row.bias
    assert {i for i, value in bias.items() if value == -math.inf} == forbidden
    assert bias[3] == 1.0
    assert bias[50] == (-math.inf if 50 in forbidden else 10.0)


def test_log_probabilities_serve_the_row_that_wants_most():
    def wanted(*counts):
        return build_sampling_batch(np, [_row(logprobs=n) for n in counts]).num_logprobs

    assert wanted(None, None) is None
    assert wanted(None, 0) == 0
    assert wanted(2, None, 5) == 5
    assert wanted(5, -1) == -1


def test_what_is_not_implemented_is_refused():
    with pytest.raises(RequestError, match="bad_words"):
        build_sampling_batch(np, [_row(bad_words=["x"])])


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


def test_only_the_allowed_are_allowed(xp):
    logits = cases_sample.logits("normal", 2, V)
    allowed = int(logits[0].argmin())
    result = _sample(xp, logits, _row(allowed_token_ids=[allowed]), _row(temperature=0.0))
    assert result.token_ids.tolist() == [allowed, logits[1].argmax()]


@pytest.mark.parametrize("count", [5, 20, 30, -1])
def test_top_log_probabilities_of_any_number(xp, count):
    logits = cases_sample.logits("rounded", 3, V)
    logits[1, 4] = np.nan
    batch = build_sampling_batch(xp, [_row()] * 3)  # 30 is more than a request may ask for
    result = Sampler()(xp.asarray(logits), replace(batch, num_logprobs=count))
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
