"""`engine serve --data-parallel-size`: processes that are killed, and what clients see of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import time

import pytest

from tests.server.test_serve import (
    SMALL,
    _body,
    _children,
    _end,
    _health,
    _post,
    _rest,
    _stream,
    _wait_until,
    model,
    serving,
)

__all__ = ["model"]


@pytest.fixture
def two(model):
    options = ("--data-parallel-size", "2", "--deterministic", "--served-model-name", "tiny")
    return (model, *SMALL, *options)


def _replicas(server):
    return json.loads(_health(server)[1])["replicas"]


def _wait_for(server, *states):
    wanted = {str(number): state for number, state in enumerate(states)}
    _wait_until(lambda: _replicas(server) == wanted, 20)


def _get(server, path):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().read().decode()


def _answers(server, count, **more):
    """Start streams of prompts of their own."""
    bodies = [_body(400, stream=True, prompt=[4 + i, 5, 6], **more) for i in range(count)]
    return [_post(server, body) for body in bodies]


def _text(response, read=b""):
    """Return the text of a stream, part of which is read; it must have ended whole."""
    lines = (read + _rest(response)).splitlines()
    events = [line[6:] for line in lines if line.startswith(b"data: ")]
    assert events.pop() == b"[DONE]", events[-1]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


@pytest.mark.kills
@pytest.mark.parametrize("apis", ["1", "2"])
def test_a_killed_replica_breaks_no_stream_and_changes_no_token(two, apis):
    with serving(*two, "--api-server-count", apis) as server:
        sampled = {"temperature": 1.0, "seed": 5}
        want = [_text(response) for response in _answers(server, 6, **sampled)]
        assert len(set(want)) > 1
        streams = _answers(server, 6, **sampled)
        firsts = [response.readline() for response in streams]
        victim = _children(server.process.pid, "engine_process")[0]
        os.kill(victim, signal.SIGKILL)
        assert [_text(*pair) for pair in zip(streams, firsts, strict=True)] == want
        _wait_for(server, "ready", "ready")
        assert [_text(response) for response in _answers(server, 6, **sampled)] == want
        metrics = _get(server, "/metrics")
        assert all(f'engine:steps_total{{engine="{n}",model_name="tiny"}}' in metrics for n in "01")
        server.process.send_signal(signal.SIGTERM)
        status, errors = _end(server)
        assert status == 0, errors
        assert re.search(r"replica [01] ended \(killed by SIGKILL\) and is started again", errors)


@pytest.mark.kills
def test_answers_that_are_not_streamed_survive_too(two):
    with serving(*two) as server:
        body = _body(600, temperature=1.0)
        connections = [
            http.client.HTTPConnection("127.0.0.1", server.port, timeout=60) for _ in range(4)
        ]
        for connection in connections:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
        time.sleep(0.3)
        os.kill(_children(server.process.pid, "engine_process")[1], signal.SIGKILL)
        for connection in connections:
            answer = json.loads(connection.getresponse().read())
            connection.close()
            assert answer["usage"]["completion_tokens"] == 600


@pytest.mark.kills
def test_the_last_replica_ends_the_server_with_its_reason(two):
    with serving(*two) as server:
        response = _stream(server, 16000)
        start = time.monotonic()
        for pid in _children(server.process.pid, "engine_process"):
            os.kill(pid, signal.SIGKILL)
        assert b"the engine's process has ended" in _rest(response)
        status, errors = _end(server)
        assert status == 1 and "the engine's process ended: killed by SIGKILL" in errors
        assert time.monotonic() - start < 10


@pytest.mark.kills
def test_a_replica_that_dies_in_a_drain_cuts_nothing(two):
    with serving(*two, "--shutdown-timeout", "60") as server:
        streams = _answers(server, 4)
        server.process.send_signal(signal.SIGTERM)
        _wait_until(lambda: _post(server, _body(1)).status == 503)
        os.kill(_children(server.process.pid, "engine_process")[0], signal.SIGKILL)
        for response in streams:
            assert _text(response)
        assert _end(server, 30)[0] == 0


@pytest.mark.kills
def test_a_hung_replica_is_replaced(two):
    with serving(*two, "--hang-timeout", "1") as server:
        stream = _answers(server, 1)[0]
        pids = _children(server.process.pid, "engine_process")
        os.kill(pids[0], signal.SIGSTOP)
        os.kill(pids[1], signal.SIGSTOP)
        os.kill(pids[1], signal.SIGCONT)
        assert _text(stream)
        _wait_until(lambda: pids[0] not in _children(server.process.pid, "engine_process"), 20)
        _wait_for(server, "ready", "ready")


@pytest.mark.kills
def test_a_wrong_device_ends_it_with_a_reason(two):
    with serving(*two, "--device", "cuda:1", wait=False) as server:
        status, errors = _end(server)
    assert status == 2 and "with data_parallel_size > 1; got 'cuda:1'" in errors
