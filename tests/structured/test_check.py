"""What cannot be compiled is found without a vocabulary, in a process that may be lost."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from engine.errors import RequestError
from engine.structured import check_worker, grammar
from engine.structured.grammar import check_structured
from engine.structured.spec import StructuredOutput
from engine.text import child_process


def test_it_raises_what_compiling_would():
    check_structured(StructuredOutput(json={"type": "object"}))
    with pytest.raises(RequestError, match="structured: json cannot be compiled: type must be one"):
        check_structured(StructuredOutput(json={"type": "x"}))


def test_what_is_known_to_compile_is_not_checked_again(monkeypatch):
    check_structured(StructuredOutput(choice=["once"]))
    monkeypatch.setattr(grammar, "check", None)
    check_structured(StructuredOutput(choice=["once"]))


def test_without_llguidance_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"install 'rawengine\[grammar\]'"):
        check_structured(StructuredOutput(choice=["not checked before"]))


def test_a_process_that_was_killed_is_replaced():
    assert check_worker.check("regex", "a").why == ""
    os.kill(check_worker._WORKER.pid, signal.SIGKILL)
    assert check_worker.check("regex", "a").why == ""
    assert "unclosed group" in check_worker.check("regex", "(").why


@pytest.mark.parametrize("text", ["a", "a" * 1_000_000], ids=["short", "fills-the-socket"])
def test_a_process_that_does_not_answer_is_given_up(monkeypatch, text):
    started = []

    def start_hanging(code, *args, **options):
        started.append(child_process_start("import time; time.sleep(60)", *args, **options))
        return started[-1]

    child_process_start = child_process.start
    check_worker._WORKER.close()
    monkeypatch.setattr(check_worker, "MAX_WAIT", 0.2)
    monkeypatch.setattr(child_process, "start", start_hanging)
    begin = time.monotonic()
    assert check_worker.check("regex", text).why == "it takes more than 0.2 s to compile"
    assert time.monotonic() - begin < 5
    assert len(started) == 1  # a second one would wait as long again
    assert check_worker._WORKER.pid is None and started[0].poll() is not None
