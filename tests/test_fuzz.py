"""A short run of the fuzzer over all targets, always with the same inputs."""

from __future__ import annotations

import json

import pytest

from tests.fuzz import __main__ as fuzz
from tests.fuzz.worker import case_of

CASES = 400


@pytest.mark.slow
def test_nothing_that_comes_from_outside_crashes_or_hangs(tmp_path, capsys):
    status = fuzz.main(["--cases", str(CASES), "--jobs", "1", "--keep", str(tmp_path)])
    printed = capsys.readouterr().out
    assert status == 0, printed
    rows = [line.split() for line in printed.splitlines()[1:]]
    assert {row[0] for row in rows} == set(fuzz.SHARES)
    assert sum(int(row[1]) for row in rows) == CASES
    # Inputs that all end alike would test nothing.
    assert sum(int(row[2]) for row in rows) > CASES / 4, printed


@pytest.mark.parametrize("target", fuzz.SHARES)
def test_a_case_depends_on_its_seed_only_and_can_be_kept(target):
    cases = [case_of(target, 5, index) for index in range(40)]
    texts = [json.dumps(case) for case in cases]
    assert texts == [json.dumps(case_of(target, 5, index)) for index in range(40)]
    assert len(set(texts)) > 20
    assert json.dumps([json.loads(text) for text in texts]) == json.dumps(cases)
    assert texts != [json.dumps(case_of(target, 6, index)) for index in range(40)]


FAULTS = {
    "crash": ("import os; os.abort()", "Crash: the worker ended with status -6"),
    "hang": ("import time; time.sleep(60)", "Hang: no end after 3 s"),
    "slow": ("import time\nwhile time.process_time() - start < 0.7: pass", "Slow: 0."),
    "memory": ("x = bytearray(1 << 30)", "MemoryError"),
    "raises": ("raise BaseException('panic')", "BaseException: panic"),
}
TARGET = """
import time
from tests.fuzz.limits import Limits
LIMITS = Limits(cpu_seconds=0.5, wall_seconds=3.0, memory_bytes=1 << 28)
def make(rng):
    return {"number": rng.random()}
class Runner:
    def __init__(self, folder):
        pass
    def run(self, case):
        start = time.process_time()
        exec(CODE, {"start": start})
        return "ran"
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fuzzer_finds_keeps_and_replays(fault, tmp_path, repo_root, monkeypatch, capsys):
    """A target with a fault in each case; the driver must see all of them, and go on."""
    code, message = FAULTS[fault]
    package = tmp_path / "path"
    package.mkdir()
    (package / "faulty.py").write_text(f"CODE = {code!r}\n{TARGET}")
    monkeypatch.setattr("tests.fuzz.__path__", [str(repo_root / "tests" / "fuzz"), str(package)])
    monkeypatch.setenv("ENGINE_TEST_TARGETS", str(package))
    monkeypatch.setattr(fuzz, "SHARES", {"faulty": 1.0})
    kept = tmp_path / "kept"
    status = fuzz.main(["--cases", "2", "--jobs", "1", "--keep", str(kept)])
    printed = capsys.readouterr().out
    assert status == 1 and "python -m tests.fuzz --replay" in printed
    assert "faulty            2" in printed
    [first, *_] = sorted(kept.iterdir())
    record = json.loads(first.read_text())
    assert message in record["error"]
    assert record["case"] == case_of("faulty", 0, record["index"])
    assert fuzz.main(["--replay", str(first)]) == 1
    assert message in capsys.readouterr().out
