"""`engine serve` with a model that two processes share: answers, faults, ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from engine.cli import main
from tests.server.test_serve import (
    SMALL,
    _body,
    _children,
    _end,
    _is_alive,
    _post,
    _rest,
    _stream,
    _wait_until,
    model,  # noqa: F401
    serving,
)


@pytest.fixture
def small(model):  # noqa: F811
    options = ("--deterministic", "--collective-timeout", "20", "--served-model-name", "tiny")
    return (model, *SMALL, *options)


@pytest.fixture
def deeper(model, tmp_path):  # noqa: F811
    """The same with two layers."""
    folder = Path(shutil.copytree(model, tmp_path / "deeper"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    return str(folder)


def _rank_1(server):
    """Return the id of the engine's process, and of its rank 1."""
    [engine] = _children(server.process.pid, "engine.server.engine_process")
    [rank] = _children(engine, "engine.distributed.processes")
    return engine, rank


def test_answers_are_those_of_one_process(small):
    texts = []
    for options in ((), ("-tp", "2")):
        with serving(*small, *options) as server:
            response = _post(server, _body(40))
            assert response.status == 200
            texts.append(json.loads(response.read())["choices"])
            embedding = _post(server, {"model": "tiny", "input": "a"}, path="/v1/embeddings")
            assert embedding.status == 200
            texts[-1].append(json.loads(embedding.read())["data"])
            if options:
                pids = _rank_1(server)
                server.process.send_signal(signal.SIGTERM)
                assert _end(server)[0] == 0
                _wait_until(lambda pids=pids: not any(map(_is_alive, pids)))
    assert texts[0] == texts[1]


@pytest.mark.kills
@pytest.mark.parametrize("is_busy", [True, False])
def test_a_killed_rank_ends_the_server_with_its_last_words(small, is_busy):
    with serving(*small, "-tp", "2") as server:
        response = _stream(server, 16000) if is_busy else None
        engine, rank = _rank_1(server)
        start = time.monotonic()
        os.kill(rank, signal.SIGKILL)
        status, text = _end(server)
        assert status == 2 and time.monotonic() - start < 10
        assert "rank 1 was killed by SIGKILL; it was last in: " in text
        assert not _is_alive(engine)
        if response is not None:
            assert b"rank 1 was killed by SIGKILL" in _rest(response)


@pytest.mark.kills
def test_a_killed_engine_leaves_no_rank(small):
    with serving(*small, "-tp", "2") as server:
        engine, rank = _rank_1(server)
        os.kill(engine, signal.SIGKILL)
        _end(server)
        _wait_until(lambda: not _is_alive(rank))


@pytest.mark.kills
@pytest.mark.parametrize("hangs", [True, False])
def test_a_stopped_rank_is_killed_with_its_engine(small, hangs):
    """It cannot see that the engine has ended: killed since it hangs, or without a supervisor."""
    with serving(*small, "-tp", "2", "--hang-timeout", "1") as server:
        response = _stream(server, 16000) if hangs else None
        engine, rank = _rank_1(server)
        os.kill(rank, signal.SIGSTOP)
        if response is None:
            os.kill(server.process.pid, signal.SIGKILL)
        _end(server)
        _wait_until(lambda: not (_is_alive(engine) or _is_alive(rank)), 10)


@pytest.mark.kills
def test_a_killed_stage_ends_an_idle_server_with_its_last_words(deeper):
    options = ("--deterministic", "--served-model-name", "tiny", "-pp", "2")
    with serving(deeper, *SMALL, *options) as server:
        assert len(json.loads(_post(server, _body(40)).read())["choices"]) == 1
        embedding = _post(server, {"model": "tiny", "input": "a"}, path="/v1/embeddings")
        assert embedding.status == 400 and b"pipeline_parallel_size=1" in embedding.read()
        assert _post(server, _body(2)).status == 200
        [engine] = _children(server.process.pid, "engine.server.engine_process")
        [stage] = _children(engine, "engine.parallel.stage")
        start = time.monotonic()
        os.kill(stage, signal.SIGKILL)
        status, text = _end(server)
        assert status == 2 and time.monotonic() - start < 10
        assert "stage 0 was killed by SIGKILL; it was last in: " in text
        assert not _is_alive(engine)


def test_commands_take_the_number_of_ranks(deeper, capsys):
    options = ["--model", deeper, "--device", "cpu", "--load-format", "dummy"]
    lengths = ["--prompt-len", "8", "--output-len", "6", "--repeats", "1"]
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "latency", *options, *lengths, "-tp", "2"])
    assert "tensor_parallel_size 2" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):  # before any process is started
        main(["generate", "abc", *options, "-tp", "2", "--enable-expert-parallel"])
    assert "a model without experts: llama is dense" in capsys.readouterr().err
    texts = []
    for sizes in ([], ["--tensor-parallel-size", "2"], ["-pp", "2"]):
        greedy = ["--temperature", "0", "--max-tokens", "5", "--max-model-len", "64"]
        generate = ["generate", "abc", *options, *greedy, *sizes]
        with pytest.raises(SystemExit, match="0"):
            main(generate)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2]
