"""The compilation of the C kernels for the CPU, and the threads that share their tasks."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from engine import threads
from engine.errors import CompileError
from engine.kernels._cpu import compiled, panels
from engine.kernels._disk_cache import cache_folder
from engine.weights.panels import Panels

pytestmark = pytest.mark.skipif(compiled.kernels() is None, reason=compiled.description())


@pytest.fixture
def weight():
    rng = np.random.default_rng(0)
    codes = rng.integers(-8, 8, (3000, 576)).astype(np.int8)
    return Panels.of(codes, rng.random((3000, 18), dtype=np.float32), None)


@pytest.fixture
def x():
    return np.random.default_rng(1).standard_normal((2, 576), dtype=np.float32)


@pytest.fixture(autouse=True)
def small_products_are_shared(monkeypatch):
    monkeypatch.setattr(panels, "_MIN_SHARED", 0)


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path / "cache"))


def compiler_with_a_log(folder):
    """Return the command of a compiler that counts its calls in `folder`/log."""
    path = folder / "logged-cc"
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    path.write_text(f'#!/bin/sh\necho call >> {folder}/log\nexec {compiler} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def num_calls(folder):
    return len((folder / "log").read_text().splitlines())


@pytest.mark.skipif(os.name == "nt", reason="the compiler is a shell script")
def test_a_library_is_compiled_once(own_cache, monkeypatch, tmp_path):
    command = compiler_with_a_log(tmp_path)
    for _ in range(2):
        assert isinstance(compiled._compiled(command), compiled.Kernels)
        assert num_calls(tmp_path) == 1
    (library,) = cache_folder().iterdir()
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path / "damaged"))
    damaged = cache_folder() / library.name
    damaged.write_bytes(b"damaged")
    assert isinstance(compiled._compiled(command), compiled.Kernels)
    assert num_calls(tmp_path) == 2
    assert damaged.read_bytes() == library.read_bytes()


@pytest.mark.skipif(os.name == "nt", reason="the compiler is a shell script")
def test_without_a_cache_it_is_compiled_again(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path / "file"))
    assert isinstance(compiled._compiled(compiler_with_a_log(tmp_path)), compiled.Kernels)
    assert num_calls(tmp_path) == 1


def test_a_compiler_that_was_asked_for_must_work(own_cache):
    assert compiled._compiled("none") == "ENGINE_CC=none"
    with pytest.raises(CompileError, match=r"ENGINE_CC=no-such-cc: .*no-such-cc"):
        compiled._compiled("no-such-cc")
    with pytest.raises(CompileError, match="exit status 1: "):
        compiled._compiled(f"{sys.executable} -m no_such_compiler")
    for value in (" ", 'gcc "x'):
        with pytest.raises(CompileError, match=f"^ENGINE_CC={value}: must be a command"):
            compiled._compiled(value)


def test_a_library_without_the_functions_is_not_used(own_cache, monkeypatch, tmp_path):
    (tmp_path / "other.c").write_text("int other;")
    monkeypatch.setattr(compiled, "_SOURCES", (str(tmp_path / "other.c"),))
    assert "panels_multiply" in compiled._compiled(None)


def test_without_a_compiler_numpy_computes(own_cache, monkeypatch):
    for value in (" ", 'gcc "x'):
        monkeypatch.setenv("CC", value)
        assert compiled._compiled(None).startswith(f"{value}: must be a command")
    monkeypatch.setenv("CC", f"{sys.executable} -m no_such_compiler")
    assert "no_such_compiler: exit status 1" in compiled._compiled(None)
    monkeypatch.delenv("CC")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert compiled._compiled(None) == "no C compiler found"


def test_helpers_sleep_and_wake_up(monkeypatch, weight, x):
    monkeypatch.setattr(threads, "count", lambda: 3)
    right = x @ weight.numbers().T
    helpers = compiled.kernels().helpers
    for _ in range(3):
        np.testing.assert_allclose(panels.multiply(x, weight), right, rtol=1e-4, atol=1e-3)
        deadline = time.monotonic() + 60
        while any(awake.is_set() for awake in helpers._awake[:2]):
            assert time.monotonic() < deadline, "a helper does not sleep"
            time.sleep(0.001)


def test_without_more_threads_the_caller_computes(monkeypatch, weight, x):
    def fails(thread):
        raise RuntimeError("can't start new thread")

    right = panels.multiply(x, weight)
    monkeypatch.setattr(compiled, "_found", None)  # kernels without helpers
    helpers = compiled.kernels().helpers
    monkeypatch.setattr(threads, "count", lambda: 3)
    monkeypatch.setattr(threading.Thread, "start", fails)
    np.testing.assert_array_equal(panels.multiply(x, weight), right)
    assert not helpers._awake


def test_callers_do_not_disturb_each_other(monkeypatch, weight, x):
    """Only one caller at a time has the helpers."""
    monkeypatch.setattr(threads, "count", lambda: 2)
    inputs = [x * np.float32(factor) for factor in range(1, 5)]
    rights = [panels.multiply(each, weight) for each in inputs]

    def repeat(number):
        for _ in range(50):
            np.testing.assert_array_equal(panels.multiply(inputs[number], weight), rights[number])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(repeat, range(4)))


_FORK = """
import os, threading
import numpy as np
from engine import threads
from engine.kernels._cpu import panels
from engine.weights.panels import Panels
threads.count = lambda: 3
panels._MIN_SHARED = 0
weight = Panels.of(np.ones((3000, 64), np.int8), np.ones((3000, 2), np.float32), None)
x = np.ones((1, 64), np.float32)
def busy():
    while True:
        panels.multiply(x, weight)
threading.Thread(target=busy, daemon=True).start()
for _ in range(20):
    assert (panels.multiply(x, weight) == 64).all()
    child = os.fork()
    if not child:
        assert (panels.multiply(x, weight) == 64).all()
        os._exit(threading.active_count())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_starts_its_own_helpers():
    """The parent is forked in the midst of a task that it shares with its helpers."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", _FORK], check=True, timeout=120)


def test_the_process_ends_while_helpers_compute():
    code = _FORK[: _FORK.index("for _ in")] + "panels.multiply(x, weight)\n"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_threads_of_helpers_are_daemons(monkeypatch, weight, x):
    monkeypatch.setattr(threads, "count", lambda: 2)
    panels.multiply(x, weight)
    names = [t.name for t in threading.enumerate() if t.daemon]
    assert "engine-cpu-helper-0" in names
