"""Deliberate bugs, a file each: the report of `kernels.check` names the cause."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from engine import kernels

BUGS = sorted((Path(__file__).parent / "bugs").glob("*.py"))


def _module(path):
    spec = importlib.util.spec_from_file_location(f"bug_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _cases(on_gpu):
    return list(_each_case(on_gpu))


def _each_case(on_gpu):
    for path in BUGS:
        module = _module(path)
        if on_gpu or not module.NEEDS_GPU:
            slow = [pytest.mark.slow] if getattr(module, "OPTIONS", {}).get("huge") else []
            yield pytest.param(module, id=path.stem, marks=slow)


def _check_words(module, **options):
    for _ in range(getattr(module, "ATTEMPTS", 1)):
        report = kernels.check(module.op, show=False, **options, **getattr(module, "OPTIONS", {}))
        if not report.ok:
            break
    text = str(report)
    missing = [words for words in module.WORDS if words not in text]
    assert not missing, f"the report does not say {missing}:\n{text}"
    return report


@pytest.mark.parametrize("module", _cases(on_gpu=False))
def test_a_bug_is_told_without_a_gpu(module):
    report = _check_words(module, arch="sm_90a")
    assert report.findings


@pytest.mark.gpu
@pytest.mark.parametrize("module", _cases(on_gpu=True))
def test_a_bug_is_told_on_a_gpu(module, cp):
    assert not _check_words(module).ok
