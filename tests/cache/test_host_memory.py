"""What the host can give: meminfo, and the limits of control groups, from a fake /proc and /sys."""

from __future__ import annotations

import pytest

from engine.cache.host_memory import host_memory

MIB = 1 << 20


def write(root, **files):
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def places(tmp_path):
    write(tmp_path, proc__meminfo=f"MemTotal: 9 kB\nMemAvailable: {900 * 1024} kB\n")
    return tmp_path, {"proc": tmp_path / "proc", "cgroups": tmp_path / "cg"}


def test_without_groups_it_is_what_meminfo_says(places):
    _, where = places
    assert host_memory(**where)[1] == 900 * MIB


@pytest.mark.parametrize(
    ("line", "root", "limit", "usage", "cache"),
    [
        ("0::/a/b", "cg", "memory.max", "memory.current", "inactive_file"),
        (
            "4:cpu,memory:/a/b",
            "cg/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_the_smallest_limit_on_the_way_up_counts(places, line, root, limit, usage, cache):
    base, where = places
    write(base, proc__self__cgroup=f"7:pids:/elsewhere\n{line}\n")
    for group, most, used in (("a/b", "max", 10), ("a", 200 * MIB, 90 * MIB), ("", 500 * MIB, 0)):
        folder = base / root / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit).write_text(f"{most}\n")
        (folder / usage).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\n{cache} {30 * MIB}\n")
    assert host_memory(**where) == (200 * MIB, 140 * MIB)  # 30 of the 90 used can be reclaimed


def test_a_path_of_the_host_falls_back_to_what_is_mounted(places):
    base, where = places
    write(base, proc__self__cgroup="0::/host/only\n", cg__memoryDOTmax=str(100 * MIB))
    write(base, cg__memoryDOTcurrent=str(120 * MIB))
    assert host_memory(**where) == (100 * MIB, 0)


@pytest.mark.parametrize("text", ["", "nonsense", "0", "0:", ":::\n\n", "0::\n4:memory\n"])
def test_damaged_files_set_no_limit(places, text):
    base, where = places
    write(base, proc__self__cgroup=text)
    assert host_memory(**where)[1] == 900 * MIB
