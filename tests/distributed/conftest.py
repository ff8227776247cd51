"""Ranks and stages as threads of the test's process: fast, with the same code."""

from __future__ import annotations

import contextlib
import threading

import pytest

from engine.distributed.collectives import SharedMemoryCollectives
from engine.distributed.group import Group
from engine.distributed.segment import Segment
from engine.parallel.stage import run_stage
from engine.parallel.stage_group import StageGroup


@pytest.fixture
def on_ranks():
    """Return a function that calls `work(collectives)` in a thread for each rank."""

    def run(size, work, timeout=60.0):
        segment, results, errors = Segment.in_process(size), [None] * size, [None] * size

        def of_rank(rank):
            group = Group(segment, rank, timeout=timeout)
            try:
                results[rank] = work(SharedMemoryCollectives(group))
            except Exception as error:
                group.fail(error)
                errors[rank] = error

        threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            if error is not None:
                raise error
        return results

    return run


@pytest.fixture
def in_threads(monkeypatch):
    """Let stages be threads of this process, which start at once; the sockets are the same."""

    def run(*arguments):
        with contextlib.suppress(Exception):  # the engine is told
            run_stage(*arguments)

    def start(group, num_threads):
        for stage in range(group.num_stages - 1):
            arguments = (group.address, stage, group._secret)
            threading.Thread(target=run, args=arguments, daemon=True).start()

    monkeypatch.setattr(StageGroup, "start_processes", start)
