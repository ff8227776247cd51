"""The number of CPU threads: what is available, what is asked for, what pays off."""

from __future__ import annotations

import os

import pytest

from engine import threads
from engine.errors import ConfigError

MATRIX = (3072, 576)


@pytest.fixture
def machine(monkeypatch):
    """A machine of four cores whose BLAS has as many threads, all of which pay off."""

    class Library:
        num_threads = 4

        def set_num_threads(self, number):
            self.num_threads = number

    library = Library()
    monkeypatch.setattr(threads, "_chosen", None)
    monkeypatch.setattr(threads, "_num_blas", None)
    monkeypatch.setattr(threads, "_blas", lambda: [library])
    monkeypatch.setattr(threads, "quota", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    for name in ("ENGINE_NUM_THREADS", *threads._BLAS_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    return library


def pretend(monkeypatch, library, seconds):
    """Let a run of the probe take `seconds[number of BLAS threads]`."""
    clock = [0.0]

    def run():
        clock[0] += seconds[library.num_threads]

    monkeypatch.setattr(threads, "_probe", lambda shape: run)
    monkeypatch.setattr(threads.time, "perf_counter", lambda: clock[0])


def test_the_fewest_threads_that_are_fast_enough(monkeypatch, machine):
    for seconds, wanted in (
        ({1: 0.004, 2: 0.002, 4: 0.001}, 4),
        ({1: 0.004, 2: 0.002, 4: 0.0019}, 2),
        ({1: 0.004, 2: 0.020, 4: 0.024}, 1),
    ):
        pretend(monkeypatch, machine, seconds)
        found = threads.choose(MATRIX)
        assert found.count == threads.count() == machine.num_threads == wanted
    assert found.reason == "4 threads take 6.0 times as long"
    assert str(found) == "1 thread"


def test_a_slow_machine_is_measured_for_a_limited_time(monkeypatch, machine):
    pretend(monkeypatch, machine, {1: 0.5, 2: 3.0, 4: 6.0})
    assert threads.choose(MATRIX).count == 1
    assert threads.time.perf_counter() == 6.0 + 0.5 + 3.0 + 6.0  # each once, after the warm-up


def test_a_small_matrix_is_not_measured(monkeypatch, machine):
    monkeypatch.setattr(threads, "_measured", None)
    assert threads.choose((64, 64)) == threads.Threads(4, "all available")


def test_the_environment_wins(monkeypatch, machine):
    monkeypatch.setattr(threads, "_measured", None)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads.choose(MATRIX) == threads.Threads(3, "OMP_NUM_THREADS")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    assert threads.choose(MATRIX) == threads.Threads(2, "OPENBLAS_NUM_THREADS")
    monkeypatch.setenv("ENGINE_NUM_THREADS", "6")
    assert threads.choose(MATRIX) == threads.Threads(6, "ENGINE_NUM_THREADS")
    assert machine.num_threads == 6
    for wrong in ("0", "-1", "many", ""):
        monkeypatch.setenv("ENGINE_NUM_THREADS", wrong)
        with pytest.raises(ConfigError, match="whole number >= 1; got"):
            threads.choose(MATRIX)


def test_a_limit_of_the_users_is_kept(monkeypatch, machine):
    machine.num_threads = 2
    pretend(monkeypatch, machine, {1: 0.004, 2: 0.002})
    assert threads.choose(MATRIX) == threads.Threads(2, "BLAS is limited to it")


def test_an_earlier_choice_is_no_limit(monkeypatch, machine):
    pretend(monkeypatch, machine, {1: 0.004, 2: 0.020, 4: 0.024})
    assert threads.choose(MATRIX).count == 1
    pretend(monkeypatch, machine, {1: 0.004, 2: 0.002, 4: 0.001})
    assert threads.choose(MATRIX).count == 4


def test_blas_gets_its_threads_back(monkeypatch, machine):
    """A model whose products are in C takes them, until the next one is loaded."""
    pretend(monkeypatch, machine, {1: 0.004, 2: 0.002, 4: 0.001})
    assert threads.choose(MATRIX).count == 4
    for variable in (None, "3"):
        threads.take_from_blas()
        assert machine.num_threads == 1
        if variable is not None:
            monkeypatch.setenv("OPENBLAS_NUM_THREADS", variable)
        wanted = int(variable or 4)
        assert threads.choose(MATRIX).count == threads.count() == machine.num_threads == wanted


def test_a_quota_limits_them(monkeypatch, machine):
    monkeypatch.setattr(threads, "quota", lambda: 2.5)
    assert threads.available() == threads.Threads(2, "the container may use 2.5 CPUs")
    monkeypatch.setattr(threads, "quota", lambda: 0.5)
    assert threads.available().count == 1
    monkeypatch.setattr(threads, "quota", lambda: 16.0)
    assert threads.available().count == 4


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        (  # the group's parent has the lower limit
            {
                "proc/self/cgroup": "0::/pod/box\n",
                "sys/fs/cgroup/pod/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/pod/box/cpu.max": "400000 100000\n",
            },
            2.0,
        ),
        (  # version 1, in a container that sees its own group as the root
            {
                "proc/self/cgroup": "5:memory:/docker/ab\n4:cpu,cpuacct:/docker/ab\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/a\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_quotas_of_both_versions_of_cgroups(tmp_path, files, wanted):
    write(tmp_path, files)
    assert threads.quota(tmp_path) == wanted


def test_the_libraries_follow():
    """The real ones; at least NumPy's own BLAS is found."""
    before = threads.current()
    try:
        threads._apply(threads.Threads(1, "a test"))
        assert all(library.num_threads == 1 for library in threads._blas())
    finally:
        threads._apply(before)


def test_the_probe_multiplies():
    threads._probe((3072, 576))()
    threads._probe((128256, 4096))()
