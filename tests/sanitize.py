"""A short walk through the kernel suite, for compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 9 python -m tests.sanitize
    compute-sanitizer --tool racecheck --error-exitcode 9 python -m tests.sanitize

Runs a few cases of every GPU test in `tests/kernels` (all of them would take hours under the
tool), and prints which kernels were launched: a clean run of nothing proves nothing. It fails if
an op's kernels were not among them.
"""

from __future__ import annotations

import argparse
import collections
import pkgutil
import sys

import pytest

from engine import kernels
from engine.kernels import _launch

# Tests that want gigabytes, time or statistics, and launch nothing that the others do not.
_TOO_LARGE = ("two_to_the_31", "frequenc", "draws", "chi", "graph", "real_model", "large")


_ALL = "tests/kernels"


class _FewCases:
    """A pytest plugin that keeps `per_test` cases of each test function, spread evenly."""

    def __init__(self, per_test: int, only: str) -> None:
        self.per_test = per_test
        self.only = only

    def pytest_collection_modifyitems(self, config, items):
        groups = collections.defaultdict(list)
        for item in items:
            wanted = item.get_closest_marker("gpu") and self.only in item.nodeid
            if wanted and not any(word in item.nodeid for word in _TOO_LARGE):
                groups[item.location[0], item.originalname].append(item)
        kept = []
        for group in groups.values():
            step = max(1, len(group) // self.per_test)
            kept += group[::step][: self.per_test]
        config.hook.pytest_deselected(items=[i for i in items if i not in kept])
        items[:] = kept


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sanitize", description=__doc__)
    parser.add_argument("--per-test", type=int, default=3, help="cases of each test function")
    parser.add_argument("--only", default="", help="only tests whose name contains this")
    parser.add_argument("tests", nargs="*", default=[_ALL], help="files or tests")
    options = parser.parse_args()
    launched: collections.Counter[str] = collections.Counter()
    launch = _launch.Kernel.launch

    def counting(self, spec, *args, **kwargs):
        launched[f"{spec.file} {self.entry}"] += 1
        return launch(self, spec, *args, **kwargs)

    _launch.Kernel.launch = counting
    plugin = _FewCases(options.per_test, options.only)
    status = pytest.main(["-q", "-p", "no:cacheprovider", *options.tests], plugins=[plugin])
    for name, count in sorted(launched.items()):
        print(f"launched {count:5} times  {name}")
    ops = [m.name for m in pkgutil.iter_modules(kernels.__path__) if not m.name.startswith("_")]
    idle = [op for op in ops if not any(name.startswith(f"{op}.cu ") for name in launched)]
    if idle and not options.only and options.tests == [_ALL]:
        print(f"not launched: {', '.join(idle)}", file=sys.stderr)
        return 1
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
