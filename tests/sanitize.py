"""Run a part of the kernel tests under compute-sanitizer, with a process per test function.

    python -m tests.sanitize --tool memcheck
    python -m tests.sanitize --tool racecheck --per-test 1 --jobs 12
    python -m tests.sanitize --tool racecheck tests/kernels/test_gemm.py

Runs a few cases of every GPU test in `tests/kernels` (all of them would take hours under the
tool), and prints which kernels were launched, since an empty run would be clean, too. It fails if
the tool found something, a test failed, a process took too long, or an op's kernels were never
launched.

Without --tool the cases run in this process: so the child processes are started.
"""

from __future__ import annotations

import argparse
import collections
import os
import pkgutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine import kernels
from engine.kernels import _launch

_ALL = "tests/kernels"
_TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
_LAUNCHED = "launched "
_OPTIONS = ("-q", "-p", "no:cacheprovider")
# Tests that need gigabytes, time or statistics, and launch no kernels beyond those of the others.
_TOO_LARGE = (
    "two_to_the_31",
    "frequenc",
    "draws",
    "chi",
    "graph",
    "real_model",
    "large",
    "thousands",
)
# Reported by racecheck, but right: experts that overlap, by wrong offsets, write the same tile, and
# each writes a valid one; racecheck does not follow `bar.arrive`, by which mamba2's warps release
# a chunk (docs/lab-notebook.md).
_RACING = ("of_wrong_routings", "test_mamba2.py")


class _FewCases:
    """A pytest plugin that keeps `per_test` cases of each test function and tier, spread evenly."""

    def __init__(self, per_test: int) -> None:
        self.per_test = per_test
        self.functions: list[str] = []

    def pytest_collection_modifyitems(self, config, items):
        groups = collections.defaultdict(list)
        for item in items:
            wanted = item.get_closest_marker("gpu")
            if wanted and not any(word in item.nodeid for word in _TOO_LARGE):
                tier = item.callspec.params.get("tier") if hasattr(item, "callspec") else None
                groups[item.nodeid.split("[")[0], str(tier)].append(item)
        self.functions = list(dict.fromkeys(function for function, _ in groups))
        kept = []
        for group in groups.values():
            step = max(1, len(group) // self.per_test)
            kept += group[::step][: self.per_test]
        config.hook.pytest_deselected(items=[i for i in items if i not in kept])
        items[:] = kept


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sanitize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tool", choices=_TOOLS, help="of compute-sanitizer")
    parser.add_argument("--per-test", type=int, default=2, help="cases of each test function")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--timeout", type=float, default=300, help="seconds a process may take")
    parser.add_argument("tests", nargs="*", default=[_ALL], help="files or tests")
    options = parser.parse_args()
    return _run(options) if options.tool is None else _share(options)


def _run(options: argparse.Namespace) -> int:
    """Run the cases here, and print which kernels they launched."""
    launched: collections.Counter[str] = collections.Counter()
    launch = _launch.Kernel.launch

    def counting(self, spec, *args, **kwargs):
        launched[f"{spec.file} {self.entry}"] += 1
        return launch(self, spec, *args, **kwargs)

    _launch.Kernel.launch = counting
    status = pytest.main([*_OPTIONS, *options.tests], plugins=[_FewCases(options.per_test)])
    for name, count in sorted(launched.items()):
        print(f"{_LAUNCHED}{name} {count}")
    return 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else int(status)


def _share(options: argparse.Namespace) -> int:
    """Run the cases of each test function in a separate process, under the tool."""
    plugin = _FewCases(options.per_test)
    pytest.main([*_OPTIONS, "-qq", "--collect-only", *options.tests], plugins=[plugin])
    functions = plugin.functions
    if options.tool == "racecheck":
        functions = [name for name in functions if not any(word in name for word in _RACING)]
    launched: collections.Counter[str] = collections.Counter()
    num_failed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for status, text in pool.map(lambda name: _check(name, options), functions):
            num_failed += status != 0
            print(text, flush=True)
            for line in text.splitlines():
                if line.startswith(_LAUNCHED):
                    name, count = line.removeprefix(_LAUNCHED).rsplit(" ", 1)
                    launched[name] += int(count)
    for name, count in sorted(launched.items()):
        print(f"launched {count:6} times  {name}")
    print(
        f"{options.tool}: {len(functions)} test functions, {num_failed} failed; "
        f"{len(launched)} kernels were launched {launched.total()} times"
    )
    idle = _idle_ops(launched) if options.tests == [_ALL] else []
    if idle:
        print(f"not launched: {', '.join(idle)}")
    return 1 if num_failed or idle else 0


def _check(function: str, options: argparse.Namespace) -> tuple[int, str]:
    """Return the exit status of one process, and a line, or all of its output if it failed."""
    command = ["compute-sanitizer", "--tool", options.tool, "--error-exitcode", "9"]
    command += [sys.executable, "-m", "tests.sanitize", "--per-test", str(options.per_test)]
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [*command, function],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=options.timeout,
        )
    except subprocess.TimeoutExpired:
        return 1, f"{function}: took more than {options.timeout:g} s"
    head = f"{function}: {'ok' if done.returncode == 0 else f'FAILED, status {done.returncode}'}"
    text = f"{head}, {time.monotonic() - begin:.0f} s"
    lines = done.stdout.splitlines()
    if done.returncode == 0:
        lines = [line for line in lines if line.startswith(_LAUNCHED)]
    return done.returncode, "\n".join([text, *lines])


def _idle_ops(launched: collections.Counter[str]) -> list[str]:
    """Return the ops whose portable kernels were not among those launched."""
    ops = [m.name for m in pkgutil.iter_modules(kernels.__path__) if not m.name.startswith("_")]
    files = {name.split(" ")[0].rsplit("/", 1)[-1] for name in launched}
    return [op for op in ops if f"{op}.cu" not in files]


if __name__ == "__main__":
    sys.exit(main())
