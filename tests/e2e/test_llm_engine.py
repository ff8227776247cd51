"""The engine loop on a tiny random model: every request gets the tokens it gets alone."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from engine import LLMEngine, SamplingParams, load
from engine.config import ModelConfig, RopeConfig
from engine.errors import (
    ConfigError,
    DeviceError,
    OutOfMemoryError,
    RequestError,
    UnknownOptionError,
)
from engine.sampling_params import RequestOutputKind

CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=97,
    hidden_size=48,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    max_position_embeddings=256,
    rope=RopeConfig(rotary_dim=8),
    eos_token_ids=(3,),
)


@pytest.fixture(scope="module")
def model():
    return load(config=CONFIG, load_format="dummy", device="cpu")


def _engine(model, **options):
    return LLMEngine(model, **({"max_num_seqs": 4, "max_num_batched_tokens": 24} | options))


def _run(engine):
    """Step until nothing is left; return the last output of each request."""
    last = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            last[output.request_id] = output
        engine.scheduler.check_integrity()
    return last


def _greedy_alone(model, prompt, count, eos=True):
    """Decode with `Model.step`: independent of scheduler, block tables and chunks."""
    cache = model.new_cache(1, len(prompt) + count)
    logits = model.step(np.array([prompt]), cache)
    ids = []
    while len(ids) < count:
        ids.append(int(logits[0].argmax()))
        if eos and ids[-1] in CONFIG.eos_token_ids:
            break
        if len(ids) < count:
            logits = model.step(np.array([ids[-1:]]), cache)
    return ids


def _prompts(seed, count):
    rng = random.Random(seed)
    return [[rng.randrange(4, 97) for _ in range(rng.randint(1, 60))] for _ in range(count)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 7},
        {"block_size": 32},
        {"num_blocks": 7, "max_model_len": 96, "watermark": 0.0},  # far too few blocks: preemption
    ],
    ids=lambda options: " ".join(f"{k}={v}" for k, v in options.items()) or "plain",
)
def test_tokens_do_not_depend_on_other_requests(model, options):
    engine = _engine(model, **options)
    prompts = _prompts(1, 9)
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=8 + 3 * i, ignore_eos=True)
        engine.add_request(str(i), prompt, params)
    outputs = _run(engine)
    for i, prompt in enumerate(prompts):
        want = _greedy_alone(model, prompt, 8 + 3 * i, eos=False)
        assert list(outputs[str(i)].outputs[0].token_ids) == want, i
    if "num_blocks" in options:
        assert engine.scheduler.stats().num_preemptions > 0


def test_requests_may_be_added_between_steps(model):
    engine = _engine(model)
    prompts = _prompts(2, 6)
    outputs = {}
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=8))
        outputs.update((o.request_id, o) for o in engine.step())
    outputs |= _run(engine)
    for i, prompt in enumerate(prompts):
        assert list(outputs[str(i)].outputs[0].token_ids) == _greedy_alone(model, prompt, 8)


def test_a_seed_makes_sampling_repeatable_in_any_batch(model):
    def sample(company):
        engine = _engine(model)
        for i in range(company):
            engine.add_request(f"c{i}", [9 + i] * (3 + i), SamplingParams(max_tokens=6, seed=i))
        params = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=11, max_tokens=12)
        engine.add_request("x", [5, 6, 7], params)
        return list(_run(engine)["x"].outputs[0].token_ids)

    assert sample(0) == sample(3) == sample(7)


def test_finish_reasons(model):
    alone = _greedy_alone(model, [5, 6, 7], 12, eos=False)
    engine = _engine(model)
    engine.add_request("length", [5, 6, 7], SamplingParams(temperature=0, max_tokens=4))
    stop = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[alone[2]])
    engine.add_request("stop", [5, 6, 7], stop)
    outputs = _run(engine)
    assert outputs["length"].outputs[0].finish_reason == "length"
    completion = outputs["stop"].outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", alone[2])
    assert list(completion.token_ids) == alone[: alone.index(alone[2]) + 1]


def test_min_tokens_delays_the_end(model):
    alone = _greedy_alone(model, [5, 6, 7], 1, eos=False)
    params = SamplingParams(
        temperature=0, max_tokens=9, min_tokens=6, stop_token_ids=alone, ignore_eos=True
    )
    engine = _engine(model)
    engine.add_request("r", [5, 6, 7], params)
    ids = list(_run(engine)["r"].outputs[0].token_ids)
    assert len(ids) >= 6 and alone[0] not in ids[:5]


def test_delta_outputs_add_up(model):
    engine = _engine(model)
    params = SamplingParams(temperature=0, max_tokens=9, output_kind=RequestOutputKind.DELTA)
    engine.add_request("r", [5, 6, 7], params)
    pieces = []
    while engine.has_unfinished_requests():
        pieces += [o.outputs[0].token_ids for o in engine.step()]
    assert len(pieces) > 1
    assert list(itertools.chain(*pieces)) == _greedy_alone(model, [5, 6, 7], 9)


def test_final_only_gives_no_output_before_the_end(model):
    engine = _engine(model)
    params = SamplingParams(temperature=0, max_tokens=5, output_kind=RequestOutputKind.FINAL_ONLY)
    engine.add_request("r", [5, 6, 7], params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert len(outputs) == 1 and outputs[0].finished


def test_logprobs(model):
    engine = _engine(model)
    engine.add_request("r", [5, 6, 7], SamplingParams(temperature=0, max_tokens=3, logprobs=4))
    completion = _run(engine)["r"].outputs[0]
    logits = model.step(np.array([[5, 6, 7]]), model.new_cache(1, 16))[0].astype(np.float64)
    want = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    first = completion.logprobs[0]
    assert set(first) == set(np.argsort(-want)[:4].tolist())
    for token, entry in first.items():
        assert entry.logprob == pytest.approx(want[token], abs=1e-4)
        assert entry.rank == 1 + int((want > want[token]).sum())
    total = sum(
        step[token].logprob
        for step, token in zip(completion.logprobs, completion.token_ids, strict=True)
    )
    assert completion.cumulative_logprob == pytest.approx(total)


def test_abort_in_every_state(model):
    engine = _engine(model, max_num_seqs=1, max_num_batched_tokens=4)
    for name in ("running", "waiting"):
        engine.add_request(name, list(range(4, 24)), SamplingParams(temperature=0, max_tokens=30))
    engine.step()  # request "running" is in the middle of its prefill
    engine.abort_request(["running", "waiting", "unknown"])
    outputs = {o.request_id: o for o in engine.step()}
    assert {o.outputs[0].finish_reason for o in outputs.values()} == {"abort"}
    assert set(outputs) == {"running", "waiting"}
    assert not engine.has_unfinished_requests()
    engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.num_available == engine.config.scheduler.num_blocks


def test_a_row_of_nan_fails_its_request_only(model, monkeypatch):
    engine = _engine(model)
    engine.add_request("bad", [5, 6, 7], SamplingParams(temperature=0, max_tokens=6))
    engine.add_request("good", [8, 9], SamplingParams(temperature=0, max_tokens=6))
    forward = type(model).forward

    def broken(self, batch, pages):
        logits = forward(self, batch, pages)
        if batch.num_sequences == 2:
            logits[0] = np.nan
        return logits

    monkeypatch.setattr(type(model), "forward", broken)
    outputs = _run(engine)
    assert outputs["bad"].outputs[0].finish_reason == "error"
    assert list(outputs["good"].outputs[0].token_ids) == _greedy_alone(model, [8, 9], 6)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], r"must have 1 to 255 tokens .*; got 0"),
        ([5, 97], r"prompt\[1\] must be a token id, a whole number in \[0, 97\); got 97"),
        ([-1], r"prompt\[0\] must be a token id, .*; got -1"),
        ([True], r"prompt\[0\] must be a token id, .*; got True"),
        ([1.5], r"prompt\[0\] must be a token id, .*; got 1.5"),
        (list(range(4, 90)) * 3, r"258 tokens. Please reduce .* at most 255 tokens"),
        ({"text": "x"}, r"prompt, as a mapping, must have"),
        (b"bytes", r"must be text or token ids; got bytes"),
        ({5, 6}, r"must be text or token ids; got set"),
        (np.array(5), r"must be text or token ids; got ndarray"),
        (np.array([[5]]), r"must be text or token ids; got ndarray"),
    ],
)
def test_bad_prompts_are_refused_and_others_continue(model, prompt, message):
    engine = _engine(model)
    engine.add_request("good", [8, 9], SamplingParams(temperature=0, max_tokens=4))
    with pytest.raises(RequestError, match=message):
        engine.add_request("bad", prompt)
    outputs = _run(engine)
    assert list(outputs) == ["good"]
    assert list(outputs["good"].outputs[0].token_ids) == _greedy_alone(model, [8, 9], 4)


def test_bad_parameters_are_refused(model):
    engine = _engine(model)
    with pytest.raises(RequestError, match=r"logit_bias .* got 97"):
        engine.add_request("r", [5], SamplingParams(logit_bias={97: 1.0}))
    engine.add_request("twice", [5], SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match="'twice' is in use"):
        engine.add_request("twice", [5], SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match="request_id must be a str; got 5"):
        engine.add_request(5, [5])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": {"temperature": 0}}, "params must be a SamplingParams; got dict"),
        ({"priority": 1.5}, "priority must be a whole number .*; got 1.5"),
        ({"priority": "high"}, "priority must be a whole number .*; got 'high'"),
        ({"priority": 2**31}, "priority must be a whole number .*; got 2147483648"),
        ({"timeout": "1"}, "timeout must be a number in .*; got '1'"),
        ({"timeout": float("nan")}, "timeout must be a number in .*; got nan"),
        ({"cache_salt": 5}, "cache_salt must be a non-empty str, or None; got 5"),
        ({"cache_salt": ""}, "cache_salt must be a non-empty str, or None; got ''"),
    ],
)
def test_arguments_of_add_request_are_checked(model, options, message):
    engine = _engine(model)
    with pytest.raises(RequestError, match=message):
        engine.add_request("r", [5], **options)
    assert not engine.has_unfinished_requests()
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    engine.add_request(
        "r", [5], params, priority=np.int64(1), timeout=np.float32(60), cache_salt="a"
    )
    assert _run(engine)["r"].outputs[0].finish_reason == "length"


def test_bad_options_are_refused(model):
    with pytest.raises(UnknownOptionError, match="did you mean 'max_num_seqs'"):
        LLMEngine(model, max_num_seq=3)
    with pytest.raises(ConfigError, match="max_model_len must be at most 256"):
        LLMEngine(model, max_model_len=512)
    with pytest.raises(OutOfMemoryError, match=r"num_blocks=1000000000 needs .* What would fit"):
        LLMEngine(model, num_blocks=10**9)
    with pytest.raises(UnknownOptionError, match="did you mean 'device'"):
        load(config=CONFIG, load_format="dummy", devise="cpu")
    with pytest.raises(DeviceError, match="device must be 'cpu', 'cuda'"):
        load(config=CONFIG, load_format="dummy", device="gpu")


def test_two_models_in_one_process(model):
    other = load(
        config=CONFIG, load_format="dummy", device="cpu", dtype="bfloat16", max_model_len=64
    )
    a, b = _engine(model), _engine(other)
    a.add_request("r", [5, 6, 7], SamplingParams(temperature=0, max_tokens=4))
    b.add_request("r", [5, 6, 7], SamplingParams(temperature=0, max_tokens=4))
    while a.has_unfinished_requests() or b.has_unfinished_requests():
        a.step()
        b.step()
    assert _greedy_alone(model, [5, 6, 7], 4)  # the first model is unaffected


def test_defaults_have_reasons(model):
    reasons = LLMEngine(model).config.reasons
    assert reasons["max_num_seqs"] == "16: the default on cpu"
    assert "blocks" in reasons["num_blocks"] and "the model's own" in reasons["max_model_len"]
