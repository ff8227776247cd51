"""What cannot be compiled is found without a vocabulary, in a process that may be lost."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from engine.errors import RequestError
from engine.structured import check_structured, grammar
from engine.structured.check_process import CheckProcess
from engine.structured_output import StructuredOutput


def test_it_raises_what_compiling_would():
    check_structured(StructuredOutput(json={"type": "object"}))
    with pytest.raises(RequestError, match="structured: json cannot be compiled: Invalid type: x"):
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
    process = CheckProcess()
    assert process.check("regex", "a") == ""
    os.kill(process._process.pid, signal.SIGKILL)
    assert process.check("regex", "a") == ""
    assert "unclosed group" in process.check("regex", "(")
    process._forget()


def test_a_process_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr("engine.structured.check_process.MAX_WAIT", 0.2)
    process, requests = CheckProcess(), []
    monkeypatch.setattr(
        "engine.structured.check_process.send", lambda pipe, frame: requests.append(frame)
    )
    assert process.check("regex", "a") == "it takes more than 0.2 s to compile"
    assert len(requests) == 1  # a second one would wait as long again
    assert process._process is None
