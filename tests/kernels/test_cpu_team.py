"""The threads that share the pieces of a computation on the CPU."""

from __future__ import annotations

import os
import threading
from functools import partial

import pytest

from engine import threads
from engine.kernels._cpu import team


@pytest.fixture(autouse=True)
def three_threads(monkeypatch):
    monkeypatch.setattr(threads, "count", lambda: 3)


def test_every_piece_is_computed_once():
    for number in (0, 1, 2, 50):
        done = []
        team.run([partial(done.append, piece) for piece in range(number)])
        assert sorted(done) == list(range(number))


def test_helpers_take_pieces():
    """Each piece waits for the others: only three threads can finish them."""
    meeting = threading.Barrier(3, timeout=60)
    seen = set()

    def piece():
        seen.add(threading.get_ident())
        meeting.wait()

    team.run([piece] * 3)
    assert len(seen) == 3


def test_a_late_helper_holds_nobody_up():
    """While the helpers are stuck in a piece, the caller computes all the others."""
    is_over = threading.Event()
    own = threading.get_ident()
    done = []

    def piece():
        if threading.get_ident() == own:
            done.append(1)
            if len(done) == 8:
                is_over.set()
        else:
            is_over.wait(60)

    team.run([piece] * 10)
    assert len(done) >= 8


def test_an_error_reaches_the_caller():
    done = []

    def fail():
        raise ValueError("piece 1")

    with pytest.raises(ValueError, match="piece 1"):
        team.run([fail, *[partial(done.append, 1)] * 9])
    assert len(done) == 9
    team.run([partial(done.append, 1)] * 3)
    assert len(done) == 12


def test_a_second_caller_works_alone():
    results = []

    def outer():
        team.run([partial(results.append, threading.get_ident())] * 2)

    team.run([outer] * 3)
    assert len(results) == 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # fork with threads
def test_a_forked_process_has_threads_of_its_own():
    team.run([int] * 5)
    if not (child := os.fork()):
        meeting = threading.Barrier(3, timeout=60)
        team.run([meeting.wait] * 3)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
