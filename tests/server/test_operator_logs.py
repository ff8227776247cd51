"""What an operator reads in the log: the load of a busy engine, and each request's tokens."""

from __future__ import annotations

import asyncio
import logging
import time
from types import SimpleNamespace

import httpx
import pytest

from engine.core.token_meter import METER, TokenMeter
from engine.sampling_params import RequestOutputKind, SamplingParams
from engine.server import load_log
from engine.server.load_log import LoadLog, totals_of
from tests.e2e.tiny import make_engine, tiny_model
from tests.server.loops import collected, connected, run, served

PROMPT = list(range(3, 37))  # 34 tokens: two full blocks of 16
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture
def clock(monkeypatch):
    """The time that `LoadLog` reads."""
    found = SimpleNamespace(now=100.0)
    monkeypatch.setattr(load_log, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


@pytest.fixture
def lines(caplog):
    """Texts and fields of the lines so far."""
    caplog.set_level(logging.INFO, "engine.server")
    return lambda: [(record.getMessage(), record.fields) for record in caplog.records]


def _finish(engine):
    while engine.has_unfinished_requests():
        engine.step()


def test_a_busy_engine_tells_its_load_until_it_is_idle(clock, lines):
    engine = make_engine(tiny_model(), num_blocks=40, max_num_seqs=1)
    log = LoadLog(engine, 10)
    clock.now += 50
    log.tick()
    assert lines() == []
    for name in "ab":
        engine.add_request(name, PROMPT, SamplingParams(max_tokens=20, **GREEDY))
    for _ in range(5):
        engine.step()
    num_output = engine.collector.generation_tokens
    assert num_output > 0
    clock.now += 9.5
    log.tick()
    assert lines() == []
    clock.now += 0.5
    log.tick()
    [(text, fields)] = lines()
    assert fields == {
        "prompt_tokens_per_s": 3.4,
        "output_tokens_per_s": num_output / 10,
        "running": 1,
        "waiting": 1,
        "kv_cache_used": 0.075,
        "prefix_hits": 0.0,
    }
    assert text == (
        f"prompt 3.4 tokens/s, output {num_output / 10} tokens/s, running 1, waiting 1, "
        "KV cache used 7.5 %, prefix hits 0.0 %"
    )
    _finish(engine)
    for _ in range(3):
        clock.now += 20
        log.tick()
    [_, (text, fields)] = lines()
    assert (fields["running"], fields["waiting"], fields["kv_cache_used"]) == (0, 0, 0.0)
    assert fields["output_tokens_per_s"] == (40 - num_output) / 20
    # Of the second prompt's 34 tokens, the 32 of whole blocks are the first one's.
    assert fields["prefix_hits"] == round(32 / 34, 4) and "prefix hits 94.1 %" in text
    assert totals_of(engine) == {"requests": 2, "prompt tokens": 68, "output tokens": 40}


def test_a_replica_tells_its_number_and_what_became_of_its_drafts(clock, lines):
    drafting = {"method": "ngram", "adaptive": False}  # whatever the times of this machine
    engine = make_engine(tiny_model(), num_blocks=40, speculative_config=drafting)
    log = LoadLog(engine, 1, replica=3)
    engine.add_request("a", [5, 6, 7, 8] * 6, SamplingParams(max_tokens=30, **GREEDY))
    _finish(engine)
    clock.now += 1
    log.tick()
    [(text, fields)] = lines()
    counts = engine.stats().speculation
    assert counts.num_draft_tokens > 0
    assert fields["accepted_drafts"] == round(counts.acceptance_rate, 4)
    assert (
        text.startswith("replica 3: prompt 24.0 tokens/s, output 30.0") and fields["replica"] == 3
    )
    assert text.endswith(f", accepted drafts {100 * counts.acceptance_rate:.1f} %")


def test_an_interval_of_zero_turns_the_lines_off(clock, lines):
    engine = make_engine(tiny_model(), num_blocks=40)
    log = LoadLog(engine, 0)
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=2, **GREEDY))
    _finish(engine)
    clock.now += 1000
    log.tick()
    assert lines() == []


# ---- the tokens of a request


@pytest.mark.parametrize("is_many", [False, True])
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_requests_in_another_process_are_counted(kind, is_many):
    params = SamplingParams(max_tokens=4, n=1 + is_many, seed=1, ignore_eos=True, output_kind=kind)

    async def main(address):
        meter = TokenMeter()
        METER.set(meter)
        async with connected(address) as client:
            await asyncio.gather(
                collected(client, PROMPT, params), collected(client, PROMPT[:5], params)
            )
            assert meter.num_prompt_tokens == 39
            assert meter.num_output_tokens == 2 * params.n * 4
            assert meter.first_token_time is not None
            await client.embed([[3, 4, 5]])
            assert (meter.num_prompt_tokens, meter.num_output_tokens) == (42, 2 * params.n * 4)

    with served(make_engine(tiny_model(), num_blocks=40)) as (_, address):
        run(main(address))


def test_a_stream_that_is_left_counts_what_came(lines):
    async def main(address):
        meter = TokenMeter()
        METER.set(meter)
        async with connected(address) as client:
            params = SamplingParams(max_tokens=200, output_kind=RequestOutputKind.DELTA, **GREEDY)
            stream = client.generate(PROMPT, params)
            num_seen = 0
            async for output in stream:
                num_seen += len(output.outputs[0].token_ids)
                if num_seen >= 3:
                    break
            await stream.aclose()
        assert meter.num_prompt_tokens == 34 and meter.num_output_tokens >= num_seen

    with served(make_engine(tiny_model(), num_blocks=40)) as (_, address):
        run(main(address))


def test_times_of_another_machines_clock_are_left_out():
    async def main(address):
        meter = TokenMeter()
        METER.set(meter)
        async with connected(address) as client:
            params = SamplingParams(max_tokens=2, **GREEDY)
            async for output in client.generate(PROMPT, params):
                output.metrics.first_token_time = 1e12
        assert meter.num_output_tokens == 2 and meter.first_token_time is None

    with served(make_engine(tiny_model(), num_blocks=40)) as (_, address):
        run(main(address))


CHAT = [{"role": "user", "content": "Hi"}]
BODIES = {
    "/v1/completions": {"prompt": "The capital of France is", "max_tokens": 3},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 3},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": CHAT, "max_tokens": 3, "model": "smollm2"},
    "/inference/v1/generate": {
        "token_ids": [504, 3575, 282, 4649, 314],
        "sampling_params": {"max_tokens": 3},
    },
}


def _lines_of(lines, names):
    """Wait for the lines of these requests, which are written after the answers."""
    end = time.monotonic() + 60
    while len(found := [line for line in lines() if line[1]["request_id"] in names]) < len(names):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def _usage(usage):
    """Return prompt and output tokens of a usage in any protocol."""
    first, second = "prompt_tokens", "completion_tokens"
    if first not in usage:
        first, second = "input_tokens", "output_tokens"
    return usage[first] + usage.get("cache_read_input_tokens", 0), usage[second]


@pytest.mark.parametrize("path", BODIES)
def test_the_access_log_has_tokens_and_time_to_the_first(real_server, lines, path):
    """In every protocol, streamed or whole; the counts are those of the answer's usage."""
    whole = httpx.post(real_server.url + path, json=BODIES[path], timeout=60)
    assert whole.status_code == 200, whole.text
    expected = _usage(whole.json()["usage"])
    body = BODIES[path] | {"stream": True}
    with httpx.stream("POST", real_server.url + path, json=body, timeout=60) as streamed:
        assert streamed.status_code == 200 and streamed.read()
    for response in (whole, streamed):
        name = response.headers["x-request-id"]
        [(text, fields)] = _lines_of(lines, [name])
        assert (fields["prompt_tokens"], fields["output_tokens"]) == expected
        assert 0 < fields["ttft_ms"] <= fields["ms"]
        assert f" prompt_tokens={expected[0]} output_tokens={expected[1]} ttft_ms=" in text


def test_other_lines_of_the_access_log_have_no_tokens(real_server, lines):
    body = {"input": [[1, 2, 3], [4, 5]]}
    responses = [
        httpx.get(real_server.url + "/v1/models"),
        httpx.post(real_server.url + "/v1/embeddings", json=body, timeout=60),
    ]
    names = [response.headers["x-request-id"] for response in responses]
    (_, models), (_, embeddings) = _lines_of(lines, names)
    assert "prompt_tokens" not in models and "ttft_ms" not in models
    assert (embeddings["prompt_tokens"], embeddings["output_tokens"]) == (5, 0)
    assert "ttft_ms" not in embeddings
