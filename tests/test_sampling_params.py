"""Every field of the sampling parameters has a range, which error messages state."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import pickle
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RequestError, UnknownOptionError
from engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from engine.sampling_params import RANGES, RequestOutputKind, SamplingDefaults, SamplingParams

FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]
INTEGERS = [name for name, allowed in RANGES.items() if allowed.integer]
EXTREMES = [2**31, -(2**31), 2**63, -(2**63), 2**64, 10**400, -(10**5000), 1e308, -1e308]


def test_defaults_are_vllms():
    params = SamplingParams()
    assert dataclasses.asdict(params) == {
        "n": 1,
        "best_of": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        # Not vLLM's
        "typical_p": 1.0,
        "top_n_sigma": 0.0,
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
        "dry_multiplier": 0.0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": -1,
        "dry_sequence_breakers": ("\n", ":", '"', "*"),
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "include_stop_str_in_output": False,
        "use_speculation": True,
        "output_kind": RequestOutputKind.CUMULATIVE,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": (),
        "logits_processors": (),
        "structured": None,
    }


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize(
    "value",
    [True, False, "1", "1e309", b"1", [1], {}, object(), math.nan, math.inf, -math.inf, 1j],
)
def test_values_that_are_not_numbers_are_refused(name, value):
    with pytest.raises(RequestError, match=f"^{name} must be a") as error:
        SamplingParams(**{name: value})
    assert str(value)[:20] in str(error.value)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [1.0, 0.5, np.float32(1)])
def test_whole_numbers_are_integers(name, value):
    with pytest.raises(RequestError, match=f"^{name} must be a whole number"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", [name for name in RANGES if not RANGES[name].optional])
def test_none_is_refused_for_required_fields(name):
    with pytest.raises(RequestError, match=f"^{name} must be .*got None"):
        SamplingParams(**{name: None})


@pytest.mark.parametrize("name", RANGES)
def test_the_ends_of_each_range(name):
    allowed = RANGES[name]
    kind = int if allowed.integer else float
    others = {"max_tokens": None, "temperature": 1.0}
    for end, step, is_in in [
        (allowed.low, 0, not allowed.low_open),
        (allowed.low, -1, False),
        (allowed.high, 0, True),
        (allowed.high, 1, False),
    ]:
        value = kind(end) + step if kind is int else math.nextafter(end, end + step)
        if step == 0:
            value = kind(end)
        if is_in:
            found = getattr(SamplingParams(**(others | {name: value})), name)
            assert found in (value, None) or (name == "seed" and found == value + 2**63)
        else:
            with pytest.raises(RequestError, match=f"^{name} must be"):
                SamplingParams(**(others | {name: value}))


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("value", EXTREMES, ids=range(len(EXTREMES)))
def test_huge_numbers_are_refused_or_in_range(name, value):
    # No field takes any of these, except a seed in [0, 2**63) and the like.
    allowed = RANGES[name]
    if isinstance(value, int) == allowed.integer and allowed.low <= value <= allowed.high:
        SamplingParams(**{"max_tokens": None, name: value})
    else:
        with pytest.raises(RequestError, match=f"^{name} must be"):
            SamplingParams(**{name: value})


@given(
    name=st.sampled_from(FIELDS),
    value=st.one_of(
        st.integers(-(2**65), 2**65),
        st.floats(allow_nan=True),
        st.text(max_size=5),
        st.booleans(),
        st.none(),
        st.binary(max_size=3),
        st.lists(st.one_of(st.integers(-5, 5), st.text(max_size=3), st.none()), max_size=4),
        st.dictionaries(st.integers(-5, 5), st.floats(), max_size=3),
    ),
)
@settings(max_examples=500, deadline=None)
def test_any_value_is_accepted_or_refused_by_name(name, value):
    try:
        params = SamplingParams(**{name: value})
    except RequestError as error:
        assert name in str(error) or name in ("min_tokens", "max_tokens", "detokenize")
    else:
        assert copy.deepcopy(params) == params


def test_numpy_numbers_are_accepted():
    params = SamplingParams(top_k=np.int64(5), temperature=np.float32(0.5), seed=np.uint8(3))
    assert (params.top_k, params.temperature, params.seed) == (5, 0.5, 3)
    assert type(params.top_k) is int and type(params.temperature) is float
    ids = SamplingParams(allowed_token_ids=np.arange(3), stop_token_ids=range(2))
    assert ids.allowed_token_ids == (0, 1, 2) and ids.stop_token_ids == (0, 1)


@pytest.mark.parametrize(
    ("given_name", "nearest"),
    [
        *(("temprature", "temperature"), ("max_new_tokens", "max_tokens")),
        *(("stop_strings", "stop"), ("stop_sequences", "stop"), ("max_length", "max_tokens")),
        *((name, "structured") for name in ("guided_json", "response_format", "regex")),
    ],
)
def test_unknown_keywords_name_the_nearest(given_name, nearest):
    with pytest.raises(UnknownOptionError, match=f"{given_name}.*did you mean '{nearest}"):
        SamplingParams(**{given_name: 1})
    with pytest.raises(TypeError):
        SamplingParams(0.5)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"stop": 3}, "stop must be a sequence of str; got 3"),
        ({"stop": b"x"}, "stop must be a sequence"),
        ({"stop": [""]}, r"stop\[0\] must be a str of 1 to 256 characters; got 0"),
        ({"stop": ""}, r"stop\[0\] must be"),
        ({"stop": ["a", 3]}, r"stop\[1\] must be a str"),
        ({"stop": ["x" * 257]}, "got 257 characters"),
        ({"stop": ["x"] * 17}, "stop must have at most 16 entries; got 17"),
        ({"stop_token_ids": [1, -1]}, r"stop_token_ids\[1\] must be .*got -1"),
        ({"stop_token_ids": [True]}, r"stop_token_ids\[0\] must be"),
        ({"stop_token_ids": 5}, "sequence of token ids"),
        ({"stop_token_ids": 0}, "sequence of token ids; got 0"),
        ({"stop_token_ids": [0] * 1025}, "at most 1024"),
        ({"allowed_token_ids": []}, "must not be empty"),
        ({"allowed_token_ids": ["a"]}, r"allowed_token_ids\[0\]"),
        ({"allowed_token_ids": {1: 2}}, "sequence of token ids"),
        ({"bad_words": [""]}, r"bad_words\[0\]"),
        ({"bad_words": ["x"] * 129}, "at most 128"),
        ({"logit_bias": [1]}, "logit_bias must map"),
        ({"logit_bias": {"1": 2}}, r"logit_bias\['1'\]: the key must be a whole number.*got '1'"),
        ({"logit_bias": {-1: 2}}, r"logit_bias\[-1\]: the key"),
        ({"logit_bias": {1: math.nan}}, r"logit_bias\[1\] must be a number .*got nan"),
        ({"logit_bias": {1: 101}}, r"logit_bias\[1\] must be a number in \[-100"),
        ({"logit_bias": dict.fromkeys(range(1025), 0)}, "at most 1024"),
        ({"logits_processors": [3]}, r"logits_processors\[0\] must be callable"),
        ({"logits_processors": print}, "logits_processors must be a sequence"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False; got 1"),
        ({"detokenize": None}, "detokenize must be True or False"),
        ({"output_kind": "DELTA"}, "RequestOutputKind.DELTA.*got 'DELTA'"),
        ({"min_tokens": 17}, r"min_tokens must be at most max_tokens \(16\); got 17"),
        ({"stop": "x", "detokenize": False}, "stop is matched against text"),
        ({"n": 2, "temperature": 0}, "n must be 1 when temperature is 0"),
    ],
)
def test_inconsistent_values_are_refused(kwargs, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**kwargs)


def test_values_are_normalised():
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(logit_bias={np.int32(3): 1}).logit_bias == {3: 1.0}
    assert SamplingParams(max_tokens=None, min_tokens=10**6).min_tokens == 10**6
    assert SamplingParams(stop=None, stop_token_ids=None).stop_token_ids == ()
    assert SamplingParams(stop_token_ids=np.array([5, 6])).stop_token_ids == (5, 6)


def test_callers_cannot_change_them_later():
    bias, stop = {1: 1.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[2] = 5.0
    stop.append("b")
    assert params.logit_bias == {1: 1.0} and params.stop == ("a",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.5  # type: ignore[misc]


def test_they_can_be_copied_compared_and_hashed():
    params = SamplingParams(temperature=0.5, stop=["a"], logit_bias={1: 1.0})
    assert pickle.loads(pickle.dumps(params)) == params
    assert copy.deepcopy(params) == params and hash(params) == hash(copy.copy(params))
    changed = dataclasses.replace(params, temperature=0.0)
    assert changed.greedy and changed != params
    with pytest.raises(RequestError, match="top_p"):
        dataclasses.replace(params, top_p=0)


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0, True), (-0.0, True), (1e-6, True), (1e-5, False), (1, False)]
)
def test_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


@pytest.mark.parametrize(
    "kwargs",
    [
        {"stop_token_ids": [9, 10]},
        {"allowed_token_ids": [10]},
        {"logit_bias": {0: 1.0, 2**31 - 1: 1.0}},
        {"logprobs": 11},
        {"prompt_logprobs": 20},
    ],
)
def test_ids_are_checked_against_the_vocabulary(kwargs):
    params = SamplingParams(**kwargs)
    with pytest.raises(RequestError, match=f"^{next(iter(kwargs))} must .*10"):
        params.validate_for(10)
    params.validate_for(2**31)


def test_ids_within_the_vocabulary_are_accepted():
    SamplingParams(
        stop_token_ids=[9], allowed_token_ids=[0, 9], logit_bias={9: 1}, logprobs=10, top_k=50
    ).validate_for(10)


def test_defaults_are_overridden():
    defaults = SamplingDefaults({"temperature": 0.6, "max_tokens": 50})
    changed = defaults.params(temperature=0, stop="x")
    assert changed == SamplingParams(temperature=0, max_tokens=50, stop="x")
    assert SamplingDefaults().params() == SamplingParams()
    with pytest.raises(RequestError, match="top_p must be"):
        defaults.params(top_p=0)
    with pytest.raises(UnknownOptionError):
        defaults.params(topp=1)


def test_metrics_are_spans_of_time():
    metrics = RequestMetrics(arrival_time=1.0)
    assert [metrics.queue_time, metrics.prefill_time, metrics.decode_time, metrics.ttft] == [
        None
    ] * 4
    metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time = 1.5, 2.5, 5.0
    assert metrics.queue_time == 0.5
    assert metrics.prefill_time == 1.0
    assert metrics.decode_time == 2.5
    assert metrics.ttft == 1.5


def test_outputs_say_whether_they_are_finished():
    going = CompletionOutput(index=0, text="a", token_ids=[1], logprobs=[{1: Logprob(-0.5, 1)}])
    assert not going.finished and going.stop_reason is None
    done = dataclasses.replace(going, finish_reason="stop", stop_reason="END")
    assert done.finished
    output = RequestOutput("r", "p", [1, 2], [done], finished=True)
    assert output.num_cached_tokens == 0 and output.metrics is None


# ---- whatever a caller passes


HUGE = 10**5000  # str() of it raises


class _Lies:
    """Has a length of 3 and no end."""

    def __len__(self):
        return 3

    def __iter__(self):
        return itertools.repeat(7)


class _Raises:
    def __repr__(self):
        raise KeyError("repr")

    def __len__(self):
        raise KeyError("len")

    def __iter__(self):
        raise KeyError("iter")


WRONG = {
    "0-d array": lambda: np.array(1),
    "2-d array": lambda: np.zeros((2, 2), int),
    "array of bool": lambda: np.array([True]),
    "bytes": lambda: b"x",
    "bytearray": lambda: bytearray(b"x"),
    "memoryview": lambda: memoryview(b"x"),
    "generator": lambda: (x for x in "ab"),
    "count": itertools.count,
    "repeat": lambda: itertools.repeat("x"),
    "huge": lambda: HUGE,
    "negative": lambda: -HUGE,
    "fraction": lambda: Fraction(HUGE),
    "list of huge": lambda: [HUGE],
    "nested": lambda: [[HUGE]],
    "dict": lambda: {HUGE: HUGE},
    "many": lambda: range(10**7),
    "uncountable": lambda: range(10**30),
    "lies": _Lies,
    "raises": _Raises,
    "list of raises": lambda: [_Raises()],
    "timedelta": lambda: np.timedelta64(3),
    "timedeltas": lambda: [np.timedelta64(3)],
    "surrogate": lambda: ["\ud800"],
    "long": lambda: ["x" * 10**6],
    "complex": lambda: 1j,
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_values_are_refused_soon_with_a_short_text(kind):
    for name in (f.name for f in dataclasses.fields(SamplingParams)):
        if (name, kind) == ("stop_token_ids", "lies"):
            continue
        start = time.process_time()
        with pytest.raises(RequestError, match=f"^(a key of )?{name}.* must .*; got ") as error:
            SamplingParams(**{name: WRONG[kind]()})
        assert len(str(error.value)) < 300
        assert time.process_time() - start < 2


def test_a_length_that_lies_is_not_believed():
    with pytest.raises(RequestError, match="stop_token_ids must have at most 1024 entries"):
        SamplingParams(stop_token_ids=_Lies())


@pytest.mark.parametrize(
    "make",
    [tuple, np.array, lambda ids: list(np.array(ids)), set, lambda ids: dict.fromkeys(ids).keys()],
)
def test_sequences_of_ids_become_python_ints(make):
    for name in ("stop_token_ids", "allowed_token_ids"):
        ids = getattr(SamplingParams(**{name: make(range(5))}), name)
        assert ids == (0, 1, 2, 3, 4) and {type(i) for i in ids} == {int}


def test_many_allowed_ids_are_checked_fast():
    start = time.process_time()
    params = SamplingParams(allowed_token_ids=range(2**20))
    params.validate_for(2**20)
    with pytest.raises(RequestError, match=r"allowed_token_ids .*\[0, 1000\).*got 1000$"):
        params.validate_for(1000)
    with pytest.raises(RequestError, match="allowed_token_ids must have at most 1048576 entries"):
        SamplingParams(allowed_token_ids=range(2**20 + 1))
    assert time.process_time() - start < 2  # 0.15 s; one check for each id takes 1.5 s
