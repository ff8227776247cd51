"""Requests to a worker and their answers, whatever the worker does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from engine.text.child_process import Worker, WorkerEndedError

_SERVE = "import os, time; from engine.text.child_process import reply, incoming, set_limits\n"
_ECHO = _SERVE + "for request in incoming(): reply(request)"
_SLEEP = "import time; time.sleep(60)"
_MAX_BYTES = 8 << 20


@contextlib.contextmanager
def _worker(code, **options):
    worker = Worker(code, _MAX_BYTES, **options)
    try:
        yield worker
    finally:
        worker.close()


def _code_of_death(worker, request=b"x", seconds=20.0, **options):
    with pytest.raises(WorkerEndedError) as caught:
        worker.ask(request, seconds, **options)
    return caught.value.code


def test_frames_of_any_size_come_back():
    with _worker(_ECHO) as worker:
        for frame in (b"", b"a", bytes(range(256)) * 20_000, b"\0" * 65536):
            assert worker.ask(frame, 20, wait=20) == frame


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_child_that_does_not_read_is_late(size):
    with _worker(_SLEEP) as worker:
        begin = time.monotonic()
        assert _code_of_death(worker, b"x" * size, wait=0.2) is None
        assert 0.2 <= time.monotonic() - begin < 5
        assert worker.pid is None


def test_a_child_that_writes_part_of_its_answer_is_late():
    code = "import os, time; os.write(1, b'\\x05' + bytes(7) + b'abc'); time.sleep(60)"
    with _worker(code) as worker:
        assert _code_of_death(worker, wait=0.5) is None


def test_a_child_that_drips_its_answer_is_late():
    code = (
        "import os, time\nfor b in b'\\xff' + bytes(999): os.write(1, bytes([b])); time.sleep(0.01)"
    )
    with _worker(code) as worker:
        assert _code_of_death(worker, wait=0.5) is None


@pytest.mark.parametrize("code", ["", "import os; os.write(1, b'\\x05' + bytes(7) + b'abc')"])
def test_a_child_that_has_ended_has_no_answer(code):
    with _worker(code) as worker:
        worker.start()
        worker._child.process.wait(20)
        assert _code_of_death(worker, b"x" * (1 << 20)) == 0


def test_a_child_that_announces_too_long_an_answer_is_ended():
    code = f"import os, time; os.write(1, ({_MAX_BYTES} + 1).to_bytes(8, 'little')); os._exit(3)"
    with _worker(code) as worker:
        assert _code_of_death(worker) == 3


def test_each_request_has_its_own_cpu_time():
    busy = "\n    end = time.process_time() + 0.3\n    while time.process_time() < end: pass\n    "
    with _worker(_SERVE + "for request in incoming():" + busy + "reply(request)") as worker:
        assert [worker.ask(b"x", 0.8) for _ in range(4)] == [b"x"] * 4
        assert _code_of_death(worker, seconds=0.1) == -signal.SIGPROF
        assert worker.ask(b"y", 20) == b"y"


def test_memory_is_limited():
    code = _SERVE + "set_limits(1 << 30)\nfor request in incoming(): bytearray(2 << 30)"
    with _worker(code) as worker:
        assert _code_of_death(worker) == 1


def test_a_child_that_ends_between_two_requests_is_replaced():
    code = _SERVE + "for request in incoming(): reply(str(os.getpid()).encode()); os._exit(0)"
    with _worker(code) as worker:
        assert len({worker.ask(b"x", 20) for _ in range(3)}) == 3


@pytest.mark.parametrize(("tries", "count"), [(1, 1), (2, 2)])
def test_a_child_that_is_killed_is_asked_again(tries, count, tmp_path):
    code = (
        _SERVE + f"for request in incoming(): open({str(tmp_path / 'log')!r}, 'a').write('x'); "
        "os.kill(os.getpid(), 9)"
    )
    with _worker(code) as worker:
        assert _code_of_death(worker, tries=tries) == -signal.SIGKILL
    assert (tmp_path / "log").read_text() == "x" * count


def test_every_new_child_gets_the_setup_first():
    code = (
        _SERVE + "found = incoming()\nsetup = next(found)\nfor request in found: "
        "reply(setup + request); os._exit(0)"
    )
    with _worker(code, setup=(b"setup ", 20.0)) as worker:
        assert [worker.ask(b"x", 20) for _ in range(2)] == [b"setup x"] * 2
    busy = "while True: pass"
    with _worker(_SERVE + "next(incoming())\n" + busy, setup=(b"", 0.1)) as worker:
        assert _code_of_death(worker) == -signal.SIGPROF


def test_it_ends_with_its_object():
    worker = Worker(_ECHO, _MAX_BYTES)
    worker.ask(b"x", 20)
    process = worker._child.process
    del worker
    assert process.wait(20) == 0


def test_a_forked_process_has_its_own():
    code = f"""
import os
from engine.text.child_process import Worker
worker = Worker({_SERVE + "for request in incoming(): reply(str(os.getpid()).encode())"!r}, 99)
first = worker.ask(b"x", 20)
if not (child := os.fork()):
    assert worker.pid is None
    assert worker.ask(b"x", 20) != first
    raise SystemExit(7)  # which must not end the parent's
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert worker.ask(b"x", 20) == first
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_only_named_variables_are_inherited(monkeypatch):
    monkeypatch.setenv("A_SECRET", "x")
    monkeypatch.setenv("TZ", "UTC")
    code = _SERVE + "for request in incoming(): reply(' '.join(sorted(os.environ)).encode())"
    with _worker(code, env={"MINE": "1"}) as worker:
        names = set(worker.ask(b"x", 20).decode().split())
    assert {"MINE", "TZ"} <= names <= {"MINE", "TZ", "LD_LIBRARY_PATH", "LC_CTYPE"}
    assert os.environ["A_SECRET"] == "x"
