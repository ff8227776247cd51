"""Frames to and from a child process, whatever the child does."""

from __future__ import annotations

import contextlib
import time

import pytest

from engine.text.child_process import ask, end, start

_IMPORTS = "import json, sys, time; sys.path[:0] = json.loads(sys.argv[1]); "
_FRAMES = _IMPORTS + "from engine.text.child_process import receive, send\n"
_ECHO = (
    _FRAMES
    + """
while frame := receive(sys.stdin.buffer):
    send(sys.stdout.buffer, frame)
"""
)


@contextlib.contextmanager
def _child(code):
    process = start(code, {})
    try:
        yield process
    finally:
        end(process)


def test_frames_of_any_size_come_back():
    with _child(_ECHO) as process:
        for frame in (b"a", bytes(range(256)) * 20_000, b"\0" * 65536):
            assert ask(process, frame, 20) == frame


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_child_that_does_not_read_is_late(size):
    with _child("import time; time.sleep(60)") as process:
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            ask(process, b"x" * size, 0.2)
        assert 0.2 <= time.monotonic() - begin < 5


def test_a_child_that_writes_part_of_its_answer_is_late():
    code = "import os, time; os.write(1, b'\\x05' + bytes(7) + b'abc'); time.sleep(60)"
    with _child(code) as process, pytest.raises(TimeoutError):
        ask(process, b"x", 0.5)


def test_a_child_that_drips_its_answer_is_late():
    code = (
        "import os, time\nfor b in b'\\xff' + bytes(999): os.write(1, bytes([b])); time.sleep(0.01)"
    )
    with _child(code) as process, pytest.raises(TimeoutError):
        ask(process, b"x", 0.5)


@pytest.mark.parametrize("code", ["", "import os; os.write(1, b'\\x05' + bytes(7) + b'abc')"])
def test_a_child_that_has_ended_has_no_answer(code):
    with _child(code) as process:
        process.wait(20)
        assert ask(process, b"x" * (1 << 20), 20) is None
