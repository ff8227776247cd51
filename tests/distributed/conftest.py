"""Ranks and stages as threads of the test's process: fast, with the same code."""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import ClassVar

import numpy as np
import pytest

from engine.distributed import links
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


class HostInbox:
    """An `Inbox` in host memory, for stages that are threads: the thread waits, not a stream."""

    by_handle: ClassVar = {}
    _numbers = itertools.count()

    def __init__(self, place, num_bytes):
        self.memory = np.full(num_bytes, 0xFF, np.uint8)  # NaN, and no id
        self.handle = next(self._numbers).to_bytes(8, "little")
        self.by_handle[self.handle] = self
        self.count = 0
        self.changed = threading.Condition()

    def wait(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: self.count >= count, 60.0), "nobody has posted"

    def abort(self):
        self._set(2**63 - 1)

    def post(self, count):
        assert count > self.count or self.count == 2**63 - 1, "a count must grow"
        self._set(count)  # also after an abort, as a device does

    def _set(self, count):
        with self.changed:
            self.count = count
            self.changed.notify_all()

    def close(self):
        self.by_handle.pop(self.handle, None)


class HostOutbox:
    """The sending end of a `HostInbox`."""

    def __init__(self, place, handle):
        self._inbox = HostInbox.by_handle[handle]
        self.post = self._inbox.post

    def write(self, offset, array):
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._inbox.memory[offset : offset + data.size] = data

    def close(self):
        pass


@pytest.fixture(params=["messages", "links"])
def in_threads(request, monkeypatch):
    """Let stages be threads of this process, which start at once; the sockets are the same.

    With "links" they write into each other's memory, as GPUs of one host do.
    """
    if request.param == "links":
        monkeypatch.setattr(links, "Inbox", HostInbox)
        monkeypatch.setattr(links, "Outbox", HostOutbox)
        for module in ("core.resolve", "parallel.pipeline"):
            monkeypatch.setattr(f"engine.{module}.can_link", lambda config, is_cuda: True)

    def run(*arguments):
        with contextlib.suppress(Exception):  # the engine is told
            run_stage(*arguments)

    def start(group, num_threads):
        for stage in range(group.num_stages - 1):
            arguments = (group.address, stage, group._secret)
            threading.Thread(target=run, args=arguments, daemon=True).start()

    monkeypatch.setattr(StageGroup, "start_processes", start)
