"""Ranks as processes: collectives, messages, and every way in which a group ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from engine.distributed.collectives import SharedMemoryCollectives
from engine.distributed.messages import Messages
from engine.distributed.processes import RankProcesses
from engine.errors import RankError
from tests.distributed.engines import is_alive

FOLDER = str(Path(__file__).parent)


@pytest.fixture
def targets(monkeypatch):
    """The module whose functions the ranks run, importable here and there."""
    monkeypatch.syspath_prepend(FOLDER)
    import rank_targets

    return rank_targets


@contextlib.contextmanager
def _ranks(name, size, options, **settings):
    processes = RankProcesses(f"rank_targets:{name}", size, options, **settings)
    pids = processes.pids
    try:
        yield processes
    finally:
        start = time.monotonic()
        processes.close()
        assert time.monotonic() - start < 8
        assert not any(map(is_alive, pids))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_ranks_get_the_same_bits(targets, size):
    options = {"count": 1000 if size < 4 else 600_000}  # more than a buffer holds
    with _ranks("rounds", size, options) as processes:
        totals = targets.rounds(processes.group, options)
    parts = [targets.array_of(rank, np.float32, options["count"]) for rank in range(size)]
    wanted = parts[0]
    for part in parts[1:]:
        wanted = wanted + part
    assert totals[0] == wanted.tobytes()
    assert totals[2] == parts[-1].tobytes()
    gathered = np.concatenate([part[:8].reshape(2, 4) for part in parts], axis=1)
    assert totals[1] == gathered.tobytes()


def test_messages_of_any_length_arrive(targets):
    sizes = [1, 100, 300_000, 3_000_000, *[1000] * 50]
    with _ranks("echo", 3, {}) as processes:
        messages = Messages(processes.group)
        for size in sizes:
            messages.send(bytes(size))
        messages.send(b"")
        _, *received = SharedMemoryCollectives(processes.group).exchange(b"")
    assert received == [repr(sizes).encode()] * 2


@pytest.mark.kills
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("kill", "rank 2 was killed by SIGKILL; it was last in: step 7"),
        ("exit", "rank 2 ended with exit status 3"),
        ("raise", r"rank 2 failed; its last words:(?s:.)*ValueError: the weights are upside down"),
        ("stick", r"rank 2 \(in: step 7\) did not come to all_reduce float32 \(4,\) \(number 2\)"),
    ],
)
def test_a_dead_or_stuck_rank_is_named(targets, kind, words):
    options, start = {"kind": kind}, time.monotonic()
    with (
        _ranks("die", 3, options, timeout=3.0) as processes,
        pytest.raises(RankError, match=words),
    ):
        targets.die(processes.group, {"kind": ""})
    assert time.monotonic() - start < 40


@pytest.mark.kills
def test_ranks_that_call_different_operations_are_told(targets):
    with (
        _ranks("disagree", 2, {}, timeout=5.0) as processes,
        pytest.raises(RankError, match=r"rank 0 is in all_reduce float32 .*rank 1 in all_gather"),
    ):
        targets.disagree(processes.group, {})


def test_nobody_is_waited_for_after_the_end(targets):
    with _ranks("rounds", 2, {"count": 8}, timeout=30.0) as processes:
        targets.rounds(processes.group, {"count": 8})
    start = time.monotonic()
    with pytest.raises(RankError, match="the group has ended"):
        SharedMemoryCollectives(processes.group).exchange(b"")
    assert time.monotonic() - start < 5


def test_a_target_that_is_not_there_is_told(targets):
    with (
        _ranks("nothing", 2, {}, timeout=5.0) as processes,
        pytest.raises(RankError, match="no attribute 'nothing'"),
    ):
        SharedMemoryCollectives(processes.group).barrier("start")


@pytest.mark.kills
def test_no_rank_outlives_its_parent(tmp_path):
    code = (
        "import sys, time; from engine.distributed.processes import RankProcesses\n"
        f"sys.path.insert(0, {FOLDER!r})\n"
        "p = RankProcesses('rank_targets:sleep', 3, {}); print(*p.pids, flush=True)\n"
        "time.sleep(600)"
    )
    root = str(Path(__file__).parents[2])
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root}
    )
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(is_alive, pids))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))
