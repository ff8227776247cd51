"""Ranks as processes: collectives, messages, and every way in which a group ends."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from engine.distributed import group, segment
from engine.distributed.collectives import SharedMemoryCollectives
from engine.distributed.messages import Messages
from engine.distributed.processes import RankProcesses
from engine.distributed.segment import Segment
from engine.errors import OutOfMemoryError, RankError
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


def test_memory_that_cannot_be_mapped_leaves_no_descriptor(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(segment.mmap, "mmap", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OutOfMemoryError, match=r"shared memory .*Cannot allocate memory"):
        Segment.create(2)
    assert os.listdir("/proc/self/fd") == before


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
def test_a_rank_that_does_not_run_is_not_waited_for_without_end(targets, monkeypatch):
    """While it loads, or reads an adapter, which may take any time."""
    monkeypatch.setattr(group, "_SILENT_SECONDS", 1.5)
    with _ranks("answer_late", 2, {"seconds": 3}) as processes:
        assert processes.group.answers(7, "an adapter") == {1: "late"}
        os.kill(processes.pids[0], signal.SIGSTOP)
        words = r"rank 1 \(in: starting\) has not been heard of for 1.5 s; it did not come to the s"
        with pytest.raises(RankError, match=words):
            processes.group.wait_until_ready(math.inf)


def test_time_in_which_all_were_stopped_does_not_count(monkeypatch):
    """As that of a container that is paused."""
    jumped, real, turns = [0.0], time.monotonic, iter(range(10_000))
    monkeypatch.setattr(group.time, "monotonic", lambda: real() + sum(jumped))
    one = group.Group(Segment.in_process(2), 0, timeout=5.0)

    def missing():
        turn = next(turns)
        if turn == 300:
            jumped.append(100.0)
        return [1] if turn < 400 else []

    one.wait(missing, "a step")
    one.wait(lambda: [1] if next(turns) < 800 else [], "the start", math.inf)
    with pytest.raises(RankError, match=r"rank 1 .* did not come to a step within 0.1 s"):
        one.wait(lambda: [1], "a step", 0.1)


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
        pytest.raises(RankError, match="no attribute 'nothing'"),
        _ranks("nothing", 2, {}, timeout=5.0),
    ):
        pass


def test_imports_of_a_rank_have_more_time_than_a_collective(targets, tmp_path, monkeypatch):
    (tmp_path / "slow_target.py").write_text(
        "import time\ntime.sleep(2)\nfrom rank_targets import rounds\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    processes = RankProcesses("slow_target:rounds", 2, {"count": 8}, timeout=1.0)
    try:
        targets.rounds(processes.group, {"count": 8})
    finally:
        processes.close()


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
