"""Records of the servers that run on this machine, for `engine ps`.

A server writes its record into its own temporary folder, which it removes when it ends. A record
whose process has gone, as after SIGKILL, is removed by whoever finds it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.checks import parse_object

__all__ = ["PREFIX", "ServerRecord", "running_servers", "tree_memory"]

PREFIX = "engine-"
"""Begin of the name of a server's temporary folder."""

_FILE = "server.json"
_MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class ServerRecord:
    """A running server.

    Attributes
    ----------
    model, url : str
        Name of the model, and address.
    is_ready : bool
        Whether it serves; otherwise it is loading the model.
    since : float
        When it was started, in seconds since the epoch.
    pid : int
        Its main process.
    process_start : str
        Start time of that process, which tells it from a later one of the same id.
    """

    model: str
    url: str
    is_ready: bool
    since: float
    pid: int
    process_start: str

    @classmethod
    def of_this_process(cls, model: str, url: str) -> ServerRecord:
        """Return the record of this process, before it is ready."""
        pid = os.getpid()
        start = _processes().get(pid, _Process(0, 0, "")).start
        return cls(model, url, False, time.time(), pid, start)

    def write(self, folder: str) -> None:
        """Write the record into the server's folder; without room for it there is none."""
        with contextlib.suppress(OSError):
            part = Path(folder) / f"{_FILE}.part"
            part.write_text(json.dumps(asdict(self)))
            part.replace(Path(folder) / _FILE)


@dataclass(frozen=True)
class _Process:
    """A process: parent, memory in bytes, start time."""

    parent: int
    num_bytes: int
    start: str


def running_servers() -> list[ServerRecord]:
    """Return this user's servers, the oldest first; remove records of servers that have gone."""
    found: list[ServerRecord] = []
    records = list(_records())
    if not records or not (processes := _processes()):
        return []
    for folder, record in records:
        process = processes.get(record.pid)
        if process is None or process.start != record.process_start:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            found.append(record)
    return sorted(found, key=lambda record: record.since)


def tree_memory(pid: int) -> int:
    """Return the host memory of a process and its descendants, in bytes.

    Pages that several of them share count once where the system tells (Linux).
    """
    processes = _processes()
    tree = {pid}
    while more := {pid for pid, each in processes.items() if each.parent in tree} - tree:
        tree |= more
    return sum(_own_memory(pid, processes[pid].num_bytes) for pid in tree if pid in processes)


def _records() -> Iterator[tuple[Path, ServerRecord]]:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        # SAFETY: the temporary folder is everybody's, and another user's record may say anything.
        with contextlib.suppress(OSError, TypeError):
            info = folder.lstat()
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
                continue
            with (folder / _FILE).open("rb") as file:
                yield folder, ServerRecord(**(parse_object(file.read(_MAX_BYTES)) or {}))


def _processes() -> dict[int, _Process]:
    """Return the running processes by id; none if the system does not tell."""
    try:
        return _processes_of_proc() if sys.platform == "linux" else _processes_of_ps()
    except OSError:  # /proc is not mounted, or there is no program ps
        return {}


def _processes_of_proc() -> dict[int, _Process]:
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                text = Path("/proc", name, "stat").read_text(errors="replace")
                fields = text.rpartition(")")[2].split()  # a program's name may have any character
                memory = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
                if fields[0] != "Z":  # ended, and not yet reaped
                    found[int(name)] = _Process(int(fields[1]), memory, fields[19])
    return found


def _processes_of_ps() -> dict[int, _Process]:
    command = ["ps", "-A", "-o", "pid=,ppid=,rss=,lstart="]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [line.split(maxsplit=3) for line in done.stdout.splitlines()]
    return {
        int(pid): _Process(int(parent), int(kilobytes) << 10, start)
        for pid, parent, kilobytes, start in rows
    }


def _own_memory(pid: int, resident: int) -> int:
    """Return a process's share of the memory that it uses; `resident` where it is not known."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return resident
