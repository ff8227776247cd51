"""One rank's view of its group: states of the ranks, waiting for them, and shutdown."""

from __future__ import annotations

import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from engine.distributed.segment import Segment
from engine.errors import ConfigError, RankError

__all__ = ["STOPPED_SECONDS", "Group", "GroupEnded"]

# Fields of a rank in `Segment.ranks`. SIZES is two fields, one for each of the rank's buffers.
STATE = 0
COUNT = 1
MESSAGES = 2
SIZES = 3
WORDS = 5
PID = 6
ANSWERED = 7
BEAT = 8
# Field of `Segment.group`.
_CLOSING = 0
# States of a rank.
_STARTING, _READY, _FAILED, _ENDED = range(4)

_DOING = 2  # index of the text that describes a rank's current operation
_TURNS = 200  # number of polls before the first pause: a rank may arrive within microseconds
_SHORTEST = 20e-6  # first pause between two polls, in seconds
_LONGEST = 1e-3  # longest pause, in seconds
_SOON = 0.1  # seconds after which pauses grow
_CHECK_SECONDS = 0.02  # interval at which a waiting rank checks the states of the others
_SILENT_SECONDS = 60.0  # time without a heartbeat after which a rank is not waited for any longer
STOPPED_SECONDS = 2.0  # a longer pause between two looks: this process was stopped meanwhile


class GroupEnded(RankError):
    """Rank 0 has ended the group; nothing failed."""


class Group:
    """A group of ranks in shared memory, seen by one of them.

    Parameters
    ----------
    segment : Segment
    rank : int
    timeout : float
        Seconds of waiting after which a missing rank counts as stuck.
    dead : callable, optional
        Returns (rank, reason) for each process that has ended. Only rank 0 passes it, since it
        started them.

    Attributes
    ----------
    count : int
        Number of operations that this rank has begun.
    failure : str
        Reason for the group's end; "" if it has not ended, or ended normally.
    on_failure : callable
        Called from any thread, before the processes of a failed group are ended.

    Raises
    ------
    ConfigError
        If `rank` is not in [0, size).
    """

    def __init__(
        self,
        segment: Segment,
        rank: int,
        *,
        timeout: float = 60.0,
        dead: Callable[[], Iterable[tuple[int, str]]] = tuple,
    ) -> None:
        if not 0 <= rank < segment.size:
            raise ConfigError(f"rank must be in [0, {segment.size}); got {rank}")
        self.segment = segment
        self.rank = rank
        self.size = segment.size
        self.timeout = timeout
        self.count = 0
        self.failure = ""
        self.on_failure: Callable[[], object] = tuple
        self._finding = threading.Lock()
        self._dead = dead
        self._fence = threading.Lock()

    # ---- state of this rank

    def set_doing(self, text: str) -> None:
        """Record what this rank is doing, for error messages of other ranks."""
        self.write_text(_DOING, text)

    def set_ready(self) -> None:
        """Record that this rank has loaded its shard."""
        self.segment.ranks[self.rank, STATE] = _READY

    def fail(self, error: BaseException) -> None:
        """Record an error and its traceback as this rank's last words; the group fails."""
        lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        words = self.segment.words[self.rank]
        room = self.segment.words.shape[1]
        data = lines.encode("utf-8", "replace")[-room:]
        words[: len(data)] = bytearray(data)
        self.segment.ranks[self.rank, WORDS] = len(data)
        self.fence()
        self.segment.ranks[self.rank, STATE] = _FAILED

    def end(self) -> None:
        """Record that this rank ends normally."""
        self.segment.ranks[self.rank, STATE] = _ENDED

    def close(self) -> None:
        """Tell all ranks to end."""
        self.segment.group[_CLOSING] = 1

    def write_text(self, which: int, text: str) -> None:
        """Write one of this rank's texts."""
        _write(self.segment.texts[self.rank, which], text)

    def answer(self, number: int, error: str) -> None:
        """Record that this rank has ended background task `number`, with an error or ""."""
        _write(self.segment.answers[self.rank], error)
        self.fence()
        self.segment.ranks[self.rank, ANSWERED] = number

    def fence(self) -> None:
        """Make earlier writes visible to other processes before later ones.

        SAFETY: x86 keeps the order of writes. Elsewhere, acquiring a lock twice does: the second
        acquisition comes after the first release, which comes after all earlier writes.
        """
        for _ in range(2):
            with self._fence:
                pass

    # ---- states of the other ranks

    @property
    def is_closing(self) -> bool:
        """Tell whether rank 0 has ended the group."""
        return bool(self.segment.group[_CLOSING])

    def text(self, rank: int, which: int) -> str:
        """Return one of a rank's texts."""
        return _text(self.segment.texts[rank, which])

    def doing(self, rank: int) -> str:
        """Return what a rank is doing."""
        return self.text(rank, _DOING) or "starting"

    def check(self) -> None:
        """Verify that no other rank has failed.

        Raises
        ------
        RankError
            Names the first rank that failed, with its last words; the same at every later call.
        """
        if self.is_closing and self.rank != 0:
            raise GroupEnded(f"rank 0 has ended the group; rank {self.rank} was waiting")
        with self._finding:
            if not self.failure and not self.is_closing:
                self.failure = self._first_failure()
        if self.failure:
            raise RankError(self.failure)

    def wait(
        self, missing: Callable[[], Iterable[int]], what: str, timeout: float | None = None
    ) -> None:
        """Wait until no rank is missing.

        Parameters
        ----------
        missing : callable
            Returns the ranks that have not arrived yet.
        what : str
            Name of the awaited event, for errors.
        timeout : float, optional
            Seconds, instead of the group's timeout. Infinity waits while all ranks are alive; then
            rank 0 gives up on one that does not run, and has no heartbeat.

        Raises
        ------
        RankError
            If a rank has failed, or is still missing after `timeout`. Time in which this process
            was stopped does not count: the others may have been stopped, too.
        """
        seconds = self.timeout if timeout is None else timeout
        start = looked = last = time.monotonic()
        watches = seconds == math.inf and self.rank == 0
        heartbeats = None
        turns = 0
        pause = _SHORTEST
        while absent := list(missing()):
            turns += 1
            if turns < _TURNS:
                os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(0)
                continue
            now = time.monotonic()
            if now - last > STOPPED_SECONDS:
                start += now - last
                heartbeats = None
            last = now
            if now - looked > _CHECK_SECONDS or turns == _TURNS:
                looked = now
                if watches and heartbeats is None:
                    heartbeats = _Heartbeats(self.segment.ranks[:, BEAT])
                if heartbeats is not None and (silent := heartbeats.silent(absent, now)):
                    who = ", ".join(f"rank {r} (in: {self.doing(r)})" for r in silent)
                    raise RankError(
                        f"{who} has not been heard of for {_SILENT_SECONDS:g} s; it did not come "
                        f"to {what}"
                    )
                self.check()
                if self.is_closing:  # this is rank 0, which has told the others to end
                    raise GroupEnded(f"the group has ended; nobody comes to {what}")
            if now - start > seconds:
                who = ", ".join(f"rank {r} (in: {self.doing(r)})" for r in absent)
                raise RankError(f"{who} did not come to {what} within {seconds:g} s")
            time.sleep(pause)
            if now - start > _SOON:
                pause = min(2 * pause, _LONGEST)

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until all ranks are ready."""
        states = self.segment.ranks[:, STATE]
        self.wait(lambda: (states == _STARTING).nonzero()[0].tolist(), "the start", timeout)

    def answers(self, number: int, what: str) -> dict[int, str]:
        """Wait until all other ranks have ended background task `number`.

        Returns
        -------
        dict of int to str
            The error of each rank whose task has failed.

        Raises
        ------
        RankError
            If a rank has failed, or the group has ended.
        """
        answered = self.segment.ranks[:, ANSWERED]
        others = [rank for rank in range(self.size) if rank != self.rank]
        self.wait(lambda: [rank for rank in others if answered[rank] != number], what, math.inf)
        self.fence()
        errors = {rank: _text(self.segment.answers[rank]) for rank in others}
        return {rank: error for rank, error in errors.items() if error}

    def _first_failure(self) -> str:
        """Describe the first rank that failed or died; "" if none has."""
        states = self.segment.ranks[:, STATE]
        # Read before the states: a process may leave last words just before it dies.
        dead = dict(self._dead())
        for rank in (states == _FAILED).nonzero()[0].tolist():
            if rank != self.rank:
                return f"rank {rank} failed; its last words:\n{self._words(rank)}"
        for rank, how in dead.items():
            return f"rank {rank} {how}; it was last in: {self.doing(rank)}"
        return ""

    def _words(self, rank: int) -> str:
        count = int(self.segment.ranks[rank, WORDS])
        words: bytes = self.segment.words[rank, :count].tobytes()
        return words.decode("utf-8", "replace").strip()


class _Heartbeats:
    """Finds the ranks whose heartbeat has stopped since this object was made.

    `beats` (size,) int64: a counter of each rank.
    """

    def __init__(self, beats: Any) -> None:
        self._beats = beats
        self._seen = beats.tolist()
        self._heard = [time.monotonic()] * len(beats)  # time of each rank's last heartbeat

    def silent(self, ranks: Iterable[int], now: float) -> list[int]:
        """Return those of `ranks` without a heartbeat for `_SILENT_SECONDS`."""
        for rank, beat in enumerate(self._beats.tolist()):
            if beat != self._seen[rank]:
                self._seen[rank] = beat
                self._heard[rank] = now
        return [rank for rank in ranks if now - self._heard[rank] > _SILENT_SECONDS]


def _write(row: Any, text: str) -> None:
    """Write a text to a row of bytes, cut to its size."""
    data = text.encode("utf-8", "replace")[: len(row) - 1]
    row[: len(data)] = bytearray(data)
    row[len(data)] = 0


def _text(row: Any) -> str:
    data: bytes = row.tobytes()
    return data[: max(0, data.find(b"\0"))].decode("utf-8", "replace")
