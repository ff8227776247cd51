"""`LogStream`: what is written arrives, and a reader that stops stops nobody."""

from __future__ import annotations

import fcntl
import os
import threading
import time

import pytest

from engine.distributed import log_stream
from engine.distributed.log_stream import LogStream


@pytest.fixture
def pipe():
    """A pipe of one page."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    yield reading, writing
    for end in (reading, writing):
        os.close(end)


def read(descriptor, enough):
    """Read until `enough(data)`."""
    data = b""
    end = time.monotonic() + 10
    while not enough(data):
        assert time.monotonic() < end
        data += os.read(descriptor, 65536)
    return data.decode()


def test_everything_arrives_in_order(pipe):
    stream = LogStream(pipe[1])
    print("one", 1, file=stream)
    stream.write("two\nthr")
    stream.write("ee\n")
    stream.write("no end")
    assert stream.drain(5)
    assert read(pipe[0], lambda data: b"no end" in data) == "one 1\ntwo\nthree\nno end"
    assert stream.fileno() == pipe[1] and not stream.isatty() and stream.encoding == "utf-8"


def test_lines_of_threads_are_whole(pipe):
    stream = LogStream(pipe[1])

    def write(letter):
        for _ in range(200):
            print(letter * 20, file=stream)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "abc"]
    for each in threads:
        each.start()
    found = read(pipe[0], lambda data: data.count(b"\n") == 600)
    assert {line.replace("\n", "") for line in found.split("\n") if line} == {
        letter * 20 for letter in "abc"
    }


def test_a_reader_that_stops_costs_lines_and_is_told_how_many(pipe, caplog):
    os.write(pipe[1], b"full" * 1024)
    stream = LogStream(pipe[1], max_chars=2000)
    begin = time.monotonic()
    for number in range(1000):
        stream.write(f"line {number:5}\n")
    assert not stream.drain(0.05)
    assert time.monotonic() - begin < 2
    lost = stream.num_lost
    assert 0 < lost < 1000 and stream._num_chars <= 2000
    found = read(pipe[0], lambda data: data.count(b"\n") >= 1000 - lost)
    assert found.removeprefix("full" * 1024).splitlines() == [
        f"line {number:5}" for number in range(1000 - lost)
    ]
    assert stream.drain(5)
    end = time.monotonic() + 5
    while "lines of the log were lost" not in caplog.text and time.monotonic() < end:
        time.sleep(0.01)
    assert f"{lost} lines of the log were lost" in caplog.text
    assert stream.num_lost == 0


def test_a_descriptor_that_does_not_block_loses_nothing(pipe):
    """Another process with the same terminal may have made it so."""
    os.set_blocking(pipe[1], False)
    stream = LogStream(pipe[1])
    lines = [f"line {number:5}" for number in range(1000)]
    stream.write("\n".join(lines) + "\n")
    assert not stream.drain(0.05)
    found = read(pipe[0], lambda data: data.count(b"\n") >= 1000)
    assert found.splitlines() == lines and stream.drain(5)


def test_a_reader_that_is_gone_costs_nothing():
    reading, writing = os.pipe()
    os.close(reading)
    stream = LogStream(writing)
    stream.write("x\n" * 10)
    assert stream.drain(5)
    os.close(writing)


def test_within_the_context_stderr_is_bounded(monkeypatch, pipe):
    before = log_stream.sys.stderr
    monkeypatch.setattr(log_stream, "LogStream", lambda _: LogStream(pipe[1]))
    with log_stream.bounded_stderr():
        print("inside", file=log_stream.sys.stderr)
    assert log_stream.sys.stderr is before
    assert read(pipe[0], lambda data: b"\n" in data) == "inside\n"
