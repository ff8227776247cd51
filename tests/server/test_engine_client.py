"""ZmqEngineClient and EngineLoop: the outputs of an engine in process, aborts, faults, bounds."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import os
import threading
import time
import tracemalloc

import numpy as np
import pytest

from engine import LLM
from engine.errors import ConfigError, EngineError, RequestError
from engine.llm_engine import QueueFullError
from engine.sampling_params import RequestOutputKind, SamplingParams
from engine.server import messages, sockets
from engine.server.engine_client import ZmqEngineClient
from engine.server.remote_request import _engine_params, engine_params
from engine.tasks.embeddings import embed
from tests.e2e.tiny import VOCAB, Words, check_drained, make_engine, make_llm, tiny_model
from tests.server.loops import TOKEN, collected, connected, eventually, run, served

CUMULATIVE, DELTA, FINAL = RequestOutputKind

MIXED = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3, "top_k": 9},
    {"n": 3, "seed": 5},
    {"n": 2, "best_of": 4, "seed": 6},
    {"n": 2, "best_of": 3, "seed": 7, "logprobs": 2},
    {"logprobs": 3, "prompt_logprobs": 2, "temperature": 0.0},
    {"prompt_logprobs": 0, "seed": 1},
    {"temperature": 0.0, "logit_bias": {5: 10.0, 6: -100.0}},
    {"seed": 9, "allowed_token_ids": list(range(20, 40)), "min_tokens": 3},
    {"seed": 2, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"seed": 4, "stop_token_ids": list(range(40, 60)), "ignore_eos": False},
    {"seed": 11, "min_p": 0.1, "top_p": 0.7},
    {"temperature": 1.0},  # the seed is the engine's
    {"n": 2, "temperature": 1.5},
]
WITH_TEXT = [
    {"seed": 21, "stop": ["w1", "w7"]},
    {"seed": 22, "n": 3, "stop": ["5"], "include_stop_str_in_output": True, "logprobs": 1},
    {"seed": 23, "n": 2, "best_of": 3, "stop": "w2"},
    {"seed": 24, "bad_words": ["w5", "w6"], "skip_special_tokens": False},
    {"seed": 25, "stop": ["8"], "min_tokens": 8},
    {"seed": 26, "detokenize": False, "logprobs": -1},
    {"seed": 27, "stop": ["w"], "min_tokens": 2, "stop_token_ids": [50]},
]


def _params(**options):
    return SamplingParams(**({"max_tokens": 12, "ignore_eos": True} | options))


def _greedy(max_tokens=20, **options):
    return _params(temperature=0.0, max_tokens=max_tokens, **options)


def _joined(outputs):
    """Return the last output with everything that the outputs before it have added."""
    whole = {}
    for output in outputs:
        for new in output.outputs:
            old = whole.get(new.index)
            if old is not None:
                new.text, new.token_ids = old.text + new.text, [*old.token_ids, *new.token_ids]
                if new.logprobs is not None:
                    new.logprobs = [*old.logprobs, *new.logprobs]
            whole[new.index] = new
    prompt_logprobs = outputs[0].prompt_logprobs
    return dataclasses.replace(
        outputs[-1],
        outputs=[whole[index] for index in sorted(whole)],
        prompt_logprobs=prompt_logprobs,
    )


def _without_ids(outputs):
    return [dataclasses.replace(o, request_id="", num_cached_tokens=0) for o in outputs]


@pytest.mark.parametrize(
    "given",
    [
        {"dry_sequence_breakers": []},
        {"dry_sequence_breakers": ["x"], "dry_multiplier": 2.0, "seed": -5},
        {"stop_token_ids": [3], "bad_words": ["a"], "logit_bias": {4: 1.0}, "min_tokens": 2},
        {"allowed_token_ids": [1, 2], "structured": {"regex": "a+"}, "prompt_logprobs": 0},
    ],
)
def test_parameters_arrive_as_they_are(given):
    """Also where an empty sequence is given and the default is not empty."""
    sent = SamplingParams(**given)
    got = engine_params(_engine_params(sent), is_final_only=True)
    for name in given:
        assert getattr(got, name) == getattr(sent, name)


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL])
def test_outputs_are_those_of_the_engine_in_process(kind, transport):
    options = [o for o in MIXED if kind is not DELTA or "best_of" not in o]
    prompts = [[4 + i, 5, 6 + i, *range(7, 7 + 3 * i)] for i in range(len(options))]
    want = make_llm(tiny_model(deterministic=True)).generate(
        prompts, [_params(**o) for o in options]
    )

    async def main(address):
        async with connected(address) as client:
            pairs = zip(prompts, options, strict=True)
            streams = [collected(client, p, _params(**o, output_kind=kind)) for p, o in pairs]
            return await asyncio.gather(*streams)

    engine = make_engine(tiny_model(deterministic=True))
    with served(engine, transport) as (_, address):
        found = run(main(address))
    check_drained(engine)
    if kind is not FINAL:
        assert len(found[0]) > 1
    last = [_joined(o) if kind is DELTA else o[-1] for o in found]
    assert _without_ids(last) == _without_ids(want)


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL])
def test_text_and_stop_strings_are_those_of_the_engine_in_process(kind, monkeypatch):
    monkeypatch.setattr("engine.model.Model.has_tokenizer", True)
    monkeypatch.setattr("engine.model.Model.tokenizer", Words())
    options = [o for o in WITH_TEXT + MIXED if kind is not DELTA or "best_of" not in o]
    prompts = [f"w{4 + i} w5 w{6 + i}" for i in range(len(options))]
    params = [_params(**{"max_tokens": 30} | o) for o in options]
    want = make_llm(tiny_model(deterministic=True)).generate(prompts, params)

    async def main(address):
        async with connected(address, Words()) as client:
            kinds = [dataclasses.replace(p, output_kind=kind) for p in params]
            pairs = zip(prompts, kinds, strict=True)
            found = await asyncio.gather(*(collected(client, *pair) for pair in pairs))
            await eventually(lambda: not client.num_unfinished_requests)
            return found

    engine = make_engine(tiny_model(deterministic=True))
    with served(engine) as (_, address):
        found = run(main(address))
    check_drained(engine)
    last = [_joined(o) if kind is DELTA else o[-1] for o in found]
    assert any(c.stop_reason == "w1" or c.stop_reason == "w7" for c in last[0].outputs)
    assert _without_ids(last) == _without_ids(want)


def test_metrics_have_every_stage():
    async def main(address):
        async with connected(address) as client:
            return (await collected(client, [1, 2, 3], _greedy()))[-1].metrics

    with served(make_engine(tiny_model())) as (_, address):
        metrics = run(main(address))
    times = [
        *(metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time),
        *(metrics.last_token_time, metrics.finished_time),
    ]
    assert times == sorted(times) and times[0] < times[-1]
    assert metrics.num_generation_tokens == 20


@pytest.mark.parametrize(
    ("prompt", "params", "options", "word"),
    [
        ([VOCAB], {}, {}, "prompt"),
        ("text", {}, {}, "no tokenizer"),
        ([1], {"stop": ["a"]}, {}, "stop needs"),
        ([1] * 300, {}, {}, "at most 255 tokens"),
        ([1], {"logits_processors": [lambda ids, logits: logits]}, {}, "functions"),
        ([1], {"stop_token_ids": [VOCAB]}, {}, "stop_token_ids"),
        ([1], {}, {"priority": 1.5}, "priority"),
        ([1], {}, {"timeout": -1}, "timeout"),
        ([1], {}, {"cache_salt": ""}, "cache_salt"),
        ([1], {}, {"request_id": 5}, "request_id"),
        ([], {}, {}, "prompt"),
    ],
)
def test_a_wrong_request_is_refused_and_nothing_is_left(prompt, params, options, word):
    async def main(address):
        async with connected(address) as client:
            with pytest.raises(RequestError, match=word):
                await anext(client.generate(prompt, _params(**params), **options))
            assert not client.num_unfinished_requests
            outputs = await collected(client, [1, 2], _greedy())
            assert outputs[-1].finished

    with served(make_engine(tiny_model())) as (_, address):
        run(main(address))


def test_a_full_queue_says_so_and_ids_are_unique():
    async def main(address):
        async with connected(address) as client:
            streams = [client.generate([1, 2], _greedy(200), request_id=f"r{i}") for i in range(3)]
            for stream in streams[:2]:
                await anext(stream)
            with pytest.raises(RequestError, match="in use"):
                await anext(client.generate([1], _greedy(), request_id="r0"))
            waiting = asyncio.create_task(anext(streams[2]))
            await asyncio.sleep(0)  # it sends its message before ours
            with pytest.raises(QueueFullError):
                await anext(client.generate([1], _greedy()))
            waiting.cancel()
            for stream in streams[:2]:
                await stream.aclose()

    engine = make_engine(tiny_model(), max_num_seqs=2, max_num_queued_requests=1)
    with served(engine) as (_, address):
        run(main(address))
    check_drained(engine)


def test_closing_cancelling_abort_and_timeout_end_a_request():
    engine = make_engine(tiny_model())

    async def main(address):
        async with connected(address) as client:
            closed = client.generate([1, 2], _greedy(200, output_kind=DELTA))
            await anext(closed)
            await closed.aclose()
            task = asyncio.create_task(collected(client, [1, 2], _greedy(200)))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            aborted = client.generate([1, 2], _greedy(200), request_id="mine")
            await anext(aborted)
            await client.abort("mine")
            await client.abort("unknown")
            last = [output async for output in aborted][-1]
            assert last.outputs[0].finish_reason == "abort" and last.finished
            late = await collected(client, [1, 2], _greedy(200), timeout=0.01)
            assert late[-1].outputs[0].stop_reason == "timeout"
            assert not client.num_unfinished_requests

    with served(engine) as (_, address):
        run(main(address))
    check_drained(engine)


def test_a_stop_string_ends_the_engines_work(monkeypatch):
    monkeypatch.setattr("engine.model.Model.has_tokenizer", True)
    monkeypatch.setattr("engine.model.Model.tokenizer", Words())
    engine = make_engine(tiny_model())

    async def main(address):
        async with connected(address, Words()) as client:
            outputs = await collected(client, "w1 w2", _greedy(250, stop=["w"], min_tokens=3))
            assert outputs[-1].outputs[0].finish_reason == "stop"
            stats = client.stats

            async def is_ended():
                return not (await stats()).scheduler.num_requests_running

            await eventually(is_ended)
            return await stats()

    with served(engine) as (_, address):
        stats = run(main(address))
    assert dict(stats.request_success) == {"stop": 1}
    assert stats.generation_tokens < 100
    check_drained(engine)


def test_a_reader_that_is_behind_gets_fewer_outputs_and_every_token():
    async def main(address):
        async with connected(address) as client:
            slow = client.generate([1, 2], _greedy(100, output_kind=DELTA))
            found = [await anext(slow)]
            await collected(client, [1, 2], _greedy(120))
            found += [output async for output in slow]
            return found

    with served(make_engine(tiny_model())) as (_, address):
        found = run(main(address))
    want = make_llm(tiny_model()).generate([1, 2], _greedy(100))[0].outputs[0].token_ids
    assert len(found) <= 4
    assert [i for output in found for i in output.outputs[0].token_ids] == list(want)


def test_calls():
    engine = make_engine(tiny_model())

    async def main(address):
        async with connected(address) as client:
            await collected(client, list(range(5, 40)), _greedy())
            assert (await client.stats()).scheduler.num_cached_blocks
            num_cached = (await client.stats()).scheduler.num_cached_blocks
            assert await client.reset_prefix_cache() == num_cached
            stats = await client.stats()
            assert not stats.scheduler.num_cached_blocks and stats.generation_tokens == 20
            assert stats.time_to_first_token_seconds.count == 1
            await client.sleep(2)
            assert await client.is_sleeping()
            with pytest.raises(EngineError, match="the engine is asleep") as caught:
                await collected(client, [1], _greedy())
            assert not isinstance(caught.value, RequestError)
            assert client.seems_asleep
            await asyncio.sleep(messages.BEAT_SECONDS)
            assert client.seems_asleep  # heartbeats say so too
            await client.wake_up()
            assert not client.seems_asleep
            assert not await client.is_sleeping()
            with pytest.raises(ConfigError, match="level must be 1 or 2"):
                await client.sleep(3)
            stream = client.generate([1], _greedy(), request_id="a/b")
            await anext(stream)
            seen = await client.snapshot()
            assert [r["id"] for r in seen["requests"]] == ["a/b"] and seen["step_ms"] > 0
            await stream.aclose()
            with pytest.raises(RequestError, match="pooling"):
                await client.embed([[1, 2]], "max")
            return await client.embed([[1, 2, 3], [4]], "mean", normalize=False)

    with served(engine) as (_, address):
        found = run(main(address))
    want = embed(tiny_model(), [[1, 2, 3], [4]], "mean", normalize=False)
    np.testing.assert_array_equal(found, want)
    check_drained(engine)


def test_two_clients_with_equal_ids_do_not_meet():
    async def main(address):
        async with connected(address) as one, connected(address) as two:
            return await asyncio.gather(
                *(collected(c, [i, 5], _greedy(), request_id="r") for c, i in ((one, 7), (two, 8)))
            )

    with served(make_engine(tiny_model())) as (_, address):
        found = run(main(address))
    want = make_llm(tiny_model()).generate([[7, 5], [8, 5]], _greedy())
    assert [o[-1].outputs for o in found] == [o.outputs for o in want]


def test_a_client_that_is_gone_loses_its_requests_and_others_go_on():
    engine = make_engine(tiny_model())

    async def main(address):
        async with connected(address) as stays:
            gone = await ZmqEngineClient.connect(address, TOKEN)
            stream = gone.generate([1, 2], _greedy(250))
            await anext(stream)
            # As the kernel does when a process is killed.
            gone._requests.clear()
            await gone.close()

            async def is_alone():
                return not (await stays.snapshot())["requests"]

            await eventually(is_alone)
            outputs = await collected(stays, [1, 2], _greedy())
            assert outputs[-1].finished
            await stream.aclose()

    with served(engine) as (_, address):
        run(main(address))
    check_drained(engine)


def _one_step_of(monkeypatch, engine, num_requests):
    """Run one step, of `num_requests`, and no other until the event that is returned is set."""
    step, go_on, has_run = engine.step, threading.Event(), False

    def paused():
        nonlocal has_run
        num_arrived = sum(1 for _ in engine.scheduler.unfinished_requests())
        if not go_on.is_set() and (has_run or num_arrived < num_requests):
            return []
        has_run = True
        return step()

    monkeypatch.setattr(engine, "step", paused)
    return go_on


def test_a_client_that_does_not_read_is_told_what_it_lost(monkeypatch):
    monkeypatch.setattr(sockets, "MAX_UNREAD", 4)
    engine = make_engine(tiny_model())
    go_on = _one_step_of(monkeypatch, engine, num_requests=4)

    async def main(loop, address):
        async with connected(address) as client:
            # Log-probabilities of the whole vocabulary fill the pipes between the processes.
            streams = [client.generate([1, i], _greedy(250, logprobs=-1)) for i in range(4)]
            await asyncio.gather(*(anext(stream) for stream in streams))
            reading = client._read
            client._loop.remove_reader(sockets.descriptor(client._socket))
            go_on.set()
            await eventually(lambda: loop._clients and _first(loop).is_behind)
            await eventually(lambda: not engine.has_unfinished_requests())
            client._loop.add_reader(sockets.descriptor(client._socket), reading)
            client._read_later()
            for stream in streams:
                with pytest.raises(EngineError, match="in time"):
                    async for _ in stream:
                        pass
            outputs = await collected(client, [1, 2], _greedy(3))  # fewer messages than MAX_UNREAD
            assert outputs[-1].finished

    def _first(loop):
        return next(iter(loop._clients.values()))

    with served(engine) as (loop, address):
        run(main(loop, address))
    check_drained(engine)


def test_an_engine_that_fails_ends_everything_with_its_reason(monkeypatch):
    engine = make_engine(tiny_model())

    async def main(address):
        async with connected(address) as client:
            stream = client.generate([1, 2], _greedy(250))
            await anext(stream)

            def broken():
                raise RuntimeError("a broken step")

            monkeypatch.setattr(engine, "step", broken)
            with pytest.raises(EngineError, match="a broken step"):
                async for _ in stream:
                    pass
            assert "a broken step" in str(client.error) and not client.is_responsive
            with pytest.raises(EngineError, match="a broken step"):
                await anext(client.generate([1], _greedy()))
            with pytest.raises(EngineError, match="a broken step"):
                await client.stats()

    with served(engine, fails=True) as (_, address):
        run(main(address))


def _hang(monkeypatch, engine):
    """Let the third step wait for the event that is returned."""
    step, calls, go_on = engine.step, itertools.count(1), threading.Event()

    def hang():
        if next(calls) == 3:
            with engine.watchdog:
                go_on.wait(30)
        return step()

    monkeypatch.setattr(engine, "step", hang)
    return go_on


@pytest.mark.parametrize("step_timeout", [0.2, None])
def test_a_client_knows_that_a_step_hangs(monkeypatch, step_timeout):
    engine = make_engine(tiny_model(), step_timeout=step_timeout)
    go_on = _hang(monkeypatch, engine)

    async def main(address):
        async with connected(address) as client:
            await asyncio.sleep(1.5)  # idle is not hung
            assert client.is_responsive
            task = asyncio.ensure_future(collected(client, [1, 2], _greedy(20)))
            if step_timeout is None:
                await asyncio.sleep(1.5)
                assert client.is_responsive
            else:
                begin = time.monotonic()
                await eventually(lambda: not client.is_responsive)
                assert time.monotonic() - begin > step_timeout
            go_on.set()
            await eventually(lambda: client.is_responsive)
            assert len((await task)[-1].outputs[0].token_ids) == 20

    with served(engine) as (_, address):
        try:
            run(main(address))
        finally:
            go_on.set()


def test_a_client_that_had_no_time_to_read_does_not_blame_the_engine():
    async def main(address):
        async with connected(address) as client:
            time.sleep(1.5)
            assert client.is_responsive

    with served(make_engine(tiny_model(), step_timeout=0.1)) as (_, address):
        run(main(address))


def test_an_engine_that_stops_ends_everything():
    async def main(loop, address):
        async with connected(address) as client:
            stream = client.generate([1, 2], _greedy(250))
            await anext(stream)
            loop.stop()
            with pytest.raises(EngineError, match=r"closed|ended"):
                async for _ in stream:
                    pass

    with served(make_engine(tiny_model())) as (loop, address):
        run(main(loop, address))


@pytest.mark.slow
def test_thousands_of_requests_leave_nothing_behind():
    engine = make_engine(tiny_model(), debug=False, enable_prefix_caching=False)

    async def several(client, count):
        for start in range(0, count, 20):
            ids = range(start, start + 20)
            streams = [client.generate([1 + i % 50, 5], _greedy(2 + i % 3)) for i in ids]
            await asyncio.gather(*(anext(stream) for stream in streams))
            for stream in streams[::2]:
                async for _ in stream:
                    pass
            for stream in streams:
                await stream.aclose()
            await client.snapshot()

    async def main(loop, address):
        async with connected(address) as client:
            await several(client, 1000)
            tracemalloc.start()
            await several(client, 200)
            gc.collect()
            before, files = tracemalloc.get_traced_memory()[0], len(os.listdir("/proc/self/fd"))
            await several(client, 2000)
            gc.collect()
            after = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            assert after - before < 300_000
            assert len(os.listdir("/proc/self/fd")) == files
            assert not (client._requests or client._handles or client._calls)
            await eventually(lambda: not loop._served)
            assert not any(each.ids or each.lost for each in loop._clients.values())

    with served(engine) as (loop, address):
        run(main(loop, address), 240)
    check_drained(engine)


@pytest.mark.parametrize("cls", [RequestError, QueueFullError, EngineError, MemoryError])
def test_errors_keep_their_class(cls):
    found = messages.error_of(messages.kind_of(cls("why")), "why")
    assert type(found) is (cls if issubclass(cls, EngineError) else EngineError)
    assert str(found) == "why"


@pytest.mark.slow
def test_the_real_model_says_the_same_in_both():
    # Deterministic, as its requests may arrive in other steps here and there, in other batches.
    llm = LLM("smollm2", device="cpu", max_num_seqs=4, num_blocks=256, deterministic=True)
    prompts = ["The capital of France is", "Once upon a time", "1, 2, 3,", "Ünïcödé 你好"]
    params = [
        _params(temperature=0.0, max_tokens=12, ignore_eos=False),
        _params(temperature=0.8, seed=1, max_tokens=12, stop=[".", "\n"], n=2),
        _params(temperature=0.0, max_tokens=12, logprobs=2, prompt_logprobs=1),
        _params(temperature=1.0, seed=5, max_tokens=12, bad_words=["the"]),
    ]
    want = llm.generate(prompts, params)

    async def main(address):
        async with connected(address, llm.tokenizer) as client:
            pairs = zip(prompts, params, strict=True)
            return await asyncio.gather(*(collected(client, *pair) for pair in pairs))

    with served(llm.llm_engine) as (_, address):
        found = run(main(address), 120)
    assert _without_ids(o[-1] for o in found) == _without_ids(want)


def test_the_last_words_of_an_engine_are_read_however_much_precedes_them(tmp_path):
    async def main():
        address = f"ipc://{tmp_path}/e"
        socket = sockets.bound_socket(address, TOKEN)
        client = ZmqEngineClient(*sockets.connected_socket(address, TOKEN), TOKEN, None)
        client._send(messages.Hello())
        address = (await asyncio.to_thread(socket.recv_multipart))[0]
        for message in [*[messages.Heartbeat()] * 500, messages.Ended("the reason")]:
            socket.send_multipart([address, client._pack(message)])
        socket.close()
        time.sleep(0.3)  # all of it has arrived before the client looks
        await eventually(lambda: client.error is not None)
        await client.close()
        return str(client.error)

    assert run(main()) == "the reason"
