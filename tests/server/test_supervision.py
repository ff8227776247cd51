"""When the supervisor takes an engine for hung, and how long a drain waits; without processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from types import SimpleNamespace

import pytest

from engine.errors import EngineError
from engine.server import api_process, supervisor
from engine.server.server_config import ServerConfig
from engine.server.supervisor import Supervisor

LIMIT = 0.5


@pytest.fixture
def watched(monkeypatch):
    """A supervisor, a child in the place of its engine, and the signals that this one got."""
    monkeypatch.setattr(supervisor, "BEAT_SECONDS", 0.1)
    watcher = Supervisor("model", ServerConfig(), {})
    os.rmdir(watcher._folder)
    found = []

    async def wait():
        watcher._children.clear()

    monkeypatch.setattr(supervisor, "kill_tree", lambda pid: found.append(signal.SIGKILL))
    process = SimpleNamespace(send_signal=found.append, returncode=None, pid=0, wait=wait)
    ready = SimpleNamespace(wait=lambda: asyncio.sleep(0), is_set=lambda: False)
    engine = supervisor._Child(supervisor._ENGINE, 0, process, [], ready, seen=time.monotonic())
    watcher._children.add(engine)
    watcher._engines[0] = engine
    return watcher, engine, found


async def _watch(watcher, engine, when=lambda: None):
    """Watch the engine; call `when` after a look."""
    task = asyncio.ensure_future(watcher._kill_if_hung(engine, LIMIT))
    await asyncio.sleep(0.05)
    when()
    await asyncio.wait_for(task, 10)


def test_a_hung_engine_is_killed_with_its_reason(watched):
    watcher, engine, found = watched
    asyncio.run(_watch(watcher, engine))
    assert found == [signal.SIGQUIT, signal.SIGKILL] and "hang_timeout=0.5" in engine.reason


def test_an_engine_that_has_ended_is_not_hung(watched):
    watcher, engine, found = watched
    asyncio.run(_watch(watcher, engine, watcher._children.clear))
    assert not found and not engine.reason


def test_reports_that_are_none_end_nothing(watched):
    """Garbage of a child is skipped, and the reports after it are read."""
    watcher, engine, _ = watched

    async def main():
        reader = engine.process.stdout = asyncio.StreamReader(limit=1000)
        engine.ready = asyncio.Event()
        following = asyncio.ensure_future(watcher._follow(engine))
        for line in (b"", b"[]", b"{", b"\xff\xfe", b"[" * 900, b"x" * 5000, b"null"):
            reader.feed_data(line + b"\n")
            await asyncio.sleep(0)
        assert not engine.ready.is_set() and not following.done()
        reader.feed_data(b'{"ready": true}\n{"reason": ["no text"], "status": "x"}\n')
        reader.feed_eof()
        await asyncio.wait_for(following, 5)
        assert engine.ready.is_set() and (engine.reason, engine.status) == ("['no text']", 1)
        assert watcher._ended.get_nowait() is engine

    asyncio.run(main())


def test_an_engine_that_fails_after_all_keeps_its_reason(watched):
    watcher, engine, found = watched

    def fail(number):
        found.append(number)
        engine.reason = "a broken step"

    engine.process.send_signal = fail
    asyncio.run(_watch(watcher, engine))
    assert found == [signal.SIGQUIT] and engine.reason == "a broken step"


def test_an_engine_that_was_told_to_end_may_take_its_time(watched, monkeypatch):
    monkeypatch.setattr(supervisor, "_SLACK_SECONDS", 1.5)
    watcher, engine, found = watched

    async def main():
        watching = asyncio.ensure_future(_watch(watcher, engine))
        await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match="did not end within"):
            await watcher._drain()
        await watching

    asyncio.run(main())
    assert found == [signal.SIGTERM] and not engine.reason


def test_a_pause_of_all_processes_does_not_count(watched):
    watcher, engine, found = watched

    async def main():
        task = asyncio.ensure_future(watcher._kill_if_hung(engine, LIMIT))
        await asyncio.sleep(0.05)
        time.sleep(2)  # no process of the container has run
        await asyncio.sleep(0.35)
        assert not found
        await asyncio.wait_for(task, 10)

    asyncio.run(main())
    assert found == [signal.SIGQUIT, signal.SIGKILL]


@pytest.mark.parametrize("is_dead_before", [False, True])
def test_a_drain_does_not_wait_for_a_dead_engine(monkeypatch, is_dead_before):
    monkeypatch.setattr(api_process, "num_active_requests", lambda app: 1)
    monkeypatch.setattr(api_process, "_ERROR_SECONDS", 0.3)
    client = SimpleNamespace(error=EngineError("dead") if is_dead_before else None)

    async def main():
        task = asyncio.ensure_future(api_process._drain(None, client, 60))
        await asyncio.sleep(0.2)
        assert not task.done()
        client.error = EngineError("dead")
        await asyncio.wait_for(task, 10)

    asyncio.run(main())


def test_a_drain_waits_for_its_time(monkeypatch):
    monkeypatch.setattr(api_process, "num_active_requests", lambda app: 1)
    start = time.monotonic()
    asyncio.run(api_process._drain(None, SimpleNamespace(error=None), 0.5))
    assert time.monotonic() - start >= 0.5


def _noted_starts(watcher, monkeypatch):
    """Return a list of the replicas that are started again from now on, in name only."""
    started = []

    async def spawn(number):
        started.append(number)

    monkeypatch.setattr(watcher, "_spawn_engine", spawn)
    return started


def test_a_replica_that_ends_again_and_again_is_given_up(watched, monkeypatch, capfd):
    watcher, engine, _ = watched
    started = _noted_starts(watcher, monkeypatch)

    async def main():
        for _ in range(supervisor._MAX_RESTARTS + 2):
            await watcher._restart_engine(engine)

    asyncio.run(main())
    assert started == [0] * supervisor._MAX_RESTARTS
    assert "replica 0 ended again and again" in capfd.readouterr().err


def test_a_replica_that_never_gets_ready_is_given_up(watched, monkeypatch, capfd):
    """Each start takes longer than the span in which restarts are counted."""
    watcher, engine, _ = watched
    started = _noted_starts(watcher, monkeypatch)
    monkeypatch.setattr(supervisor, "_RESTART_SPAN", 0.0)

    async def main():
        engine.ready = SimpleNamespace(is_set=lambda: True)
        for _ in range(3 * supervisor._MAX_RESTARTS):  # each served for a while
            await watcher._restart_engine(engine)
        assert len(started) == 3 * supervisor._MAX_RESTARTS
        started.clear()
        engine.ready = SimpleNamespace(is_set=lambda: False)
        for _ in range(supervisor._MAX_RESTARTS + 2):
            await watcher._restart_engine(engine)

    asyncio.run(main())
    assert started == [0] * supervisor._MAX_RESTARTS
    assert "replica 0 ended again and again" in capfd.readouterr().err


@pytest.mark.kills
def test_an_api_process_that_cannot_start_ends_a_server_whose_engine_loads(watched):
    watcher, _, _ = watched
    process = SimpleNamespace(returncode=None)
    engine = supervisor._Child(supervisor._ENGINE, 0, process, [], asyncio.Event())
    watcher._engines[0] = engine
    watcher._children.add(engine)
    ended = SimpleNamespace(returncode=2)
    api = supervisor._Child(supervisor._API, 0, ended, [], asyncio.Event(), reason="why", status=2)

    async def main():
        watcher._ended.put_nowait(api)
        with pytest.raises(EngineError, match="an API process could not start: why"):
            await asyncio.wait_for(watcher._watch_over(), 5)

    asyncio.run(main())


@pytest.mark.kills
def test_an_engine_that_cannot_start_is_the_reason_though_an_api_process_ends_first(watched):
    watcher, _, _ = watched
    process = SimpleNamespace(returncode=None)
    engine = supervisor._Child(supervisor._ENGINE, 0, process, [], asyncio.Event())
    watcher._engines[0] = engine
    watcher._children.add(engine)
    ended = SimpleNamespace(returncode=2)
    api = supervisor._Child(supervisor._API, 0, ended, [], asyncio.Event(), reason="its end")

    async def main():
        watcher._ended.put_nowait(api)
        task = asyncio.ensure_future(watcher._watch_over())
        await asyncio.sleep(0.2)
        engine.reason, engine.status = "block_size must be a power of two", 2
        watcher._children.discard(engine)
        with pytest.raises(EngineError, match="block_size") as caught:
            await asyncio.wait_for(task, 5)
        assert caught.value.status == 2

    asyncio.run(main())
