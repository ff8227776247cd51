"""Host memory available to this process: the machine's memory, limited by control groups."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

__all__ = ["host_memory"]


class _Files(NamedTuple):
    """File names of one cgroup version."""

    limit: str
    usage: str
    reclaimable: str  # name of its line in memory.stat


_VERSION_1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Files("memory.max", "memory.current", "inactive_file")


def host_memory(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> tuple[int, int]:
    """Return (total, available) bytes for this process.

    A container or a job is often limited to a part of the machine: the smallest limit among the
    process's control group and its ancestors applies (cgroup v1 and v2). Page cache that the kernel
    can reclaim counts as available.

    Parameters
    ----------
    proc, cgroups : Path
        Mount points of procfs and of the cgroup file systems. A missing file sets no limit.
    """
    total, available = _windows_memory() if sys.platform == "win32" else _unix_memory(proc)
    for group, files in _groups(proc, cgroups):
        limit = _number(group / files.limit)
        usage = _number(group / files.usage)
        if limit is None or usage is None:
            continue
        reclaimable = _value(group / "memory.stat", files.reclaimable) or 0
        total = min(total, limit)
        available = min(available, limit - max(usage - reclaimable, 0))
    return total, max(0, min(total, available))


def _unix_memory(proc: Path) -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    available = _value(proc / "meminfo", "MemAvailable:", 1024)
    if available is None:  # not Linux; macOS tells only the total
        known = "SC_AVPHYS_PAGES" in os.sysconf_names
        available = page * os.sysconf("SC_AVPHYS_PAGES") if known else total
    return total, available


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of the Windows API."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load_percent", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("available", ctypes.c_uint64),
        ("others", ctypes.c_uint64 * 5),  # page file, address space
    )


def _windows_memory() -> tuple[int, int]:
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    windll: Any = getattr(ctypes, "windll")  # noqa: B009  mypy knows it on Windows only
    if not windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise OSError("GlobalMemoryStatusEx failed")
    return status.total, status.available


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield the directories of this process's memory cgroups and of their ancestors."""
    for line in _lines(proc / "self" / "cgroup"):
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0":
            root = cgroups
            files = _VERSION_2
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            files = _VERSION_1
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for group in (inside, *inside.parents):
            # In a container, the path may be the host's, but only its root is mounted.
            yield root / group, files


def _value(path: Path, name: str, unit: int = 1) -> int | None:
    """Return the number after `name` in a file of "name number" lines, times `unit` bytes."""
    for line in _lines(path):
        words = line.split()
        if len(words) >= 2 and words[0] == name and words[1].isdecimal():
            return int(words[1]) * unit
    return None


def _number(path: Path) -> int | None:
    """Return the number in a file; None if the file is missing or holds "max" (no limit)."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
