"""Windows and macOS, as far as Linux can imitate them: modules and functions that they lack.

What a page claims of them rests on this imitation; see docs/platforms.md.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cache import host_memory

ROOT = Path(__file__).parents[1]

# Run in a process of its own, before `engine` is imported. The standard library is imported first:
# it looks at the platform too, and must work as on the machine that it runs on.
_LACKING = """
import asyncio, ctypes, inspect, multiprocessing, os, signal, socket, subprocess, sys, tempfile
import numpy, safetensors, tokenizers, gguf, tqdm, jinja2

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in {modules!r}:
            raise ImportError(f"no module named {{name}} on {platform}")

sys.meta_path.insert(0, Blocked())
for name in {modules!r}:
    sys.modules.pop(name, None)
for module, names in ((os, {of_os!r}), (signal, {of_signal!r})):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
sys.platform = {platform!r}
"""
_WINDOWS = {
    "platform": "win32",
    "modules": ("fcntl", "resource", "termios", "pwd", "grp", "pty", "tty", "syslog"),
    "of_os": (
        *("register_at_fork", "fork", "sysconf", "sysconf_names", "getuid", "geteuid", "pread"),
        *("sched_getaffinity", "sched_yield", "posix_fallocate", "killpg", "setsid", "mkfifo"),
    ),
    "of_signal": ("SIGPROF", "SIGKILL", "SIGHUP", "SIGUSR1", "setitimer", "pthread_sigmask"),
}
_MACOS = {
    "platform": "darwin",
    "modules": (),
    "of_os": ("sched_getaffinity", "posix_fallocate"),
    "of_signal": (),
}
_MEMORY = """
from engine.cache import host_memory
host_memory._windows_memory = lambda: (32 << 30, 24 << 30)
"""


def _run(system, code):
    code = _LACKING.format(**system) + _MEMORY + code
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


_GENERATE = """
from engine import LLM, SamplingParams
llm = LLM("smollm2", device="cpu")
greedy = SamplingParams(temperature=0, max_tokens=3)
print(llm.generate("The capital of France is", greedy)[0].outputs[0].text)
question = [{"role": "user", "content": "What is the capital of France?"}]
"""


@pytest.mark.parametrize("system", [_WINDOWS, _MACOS], ids=["windows", "macos"])
def test_a_model_answers(system):
    assert " Paris" in _run(system, _GENERATE)


def test_conversations_work_on_macos():
    assert _run(_MACOS, _GENERATE + "print(llm.chat(question, greedy)[0].outputs[0].text)")


def test_conversations_on_windows_say_what_to_do():
    code = _GENERATE + (
        "from engine.errors import TemplateError\n"
        "try: llm.chat(question, greedy)\n"
        "except TemplateError as error: print(error)\n"
    )
    assert "on Windows, run in WSL" in _run(_WINDOWS, code)


def test_the_server_on_windows_says_what_to_do():
    code = (
        "from engine.cli import main\n"
        "sys.argv = ['engine', 'serve', 'smollm2']\n"
        "sys.stderr = sys.stdout\n"
        "try: main()\n"
        "except SystemExit as end: print('exit', end.code)\n"
    )
    said = "engine serve: the server needs Linux or macOS; on Windows, run it in WSL\nexit 2\n"
    assert _run(_WINDOWS, code) == said


def test_every_public_name_can_be_imported_on_windows():
    code = (
        "import engine\n"
        "for name in engine.__all__: getattr(engine, name)\n"
        "from engine.commands import doctor, generate, chat, kernels\n"
        "from engine.cli import main\n"
    )
    _run(_WINDOWS, code)


def test_memory_on_macos_is_the_total(monkeypatch, tmp_path):
    names = {name for name in os.sysconf_names if name != "SC_AVPHYS_PAGES"}
    monkeypatch.setattr(os, "sysconf_names", names)
    total, available = host_memory.host_memory(proc=tmp_path, cgroups=tmp_path)
    assert total == available == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_memory_on_windows_is_asked_of_its_interface(monkeypatch):
    class Kernel32:
        @staticmethod
        def GlobalMemoryStatusEx(pointer):
            status = pointer._obj
            assert status.length == ctypes.sizeof(status) == 64
            status.total = 8 << 30
            status.available = 3 << 30
            return 1

    windll = type("windll", (), {"kernel32": Kernel32})
    monkeypatch.setattr(ctypes, "windll", windll, raising=False)
    monkeypatch.setattr(sys, "platform", "win32")
    assert host_memory.host_memory() == (8 << 30, 3 << 30)
