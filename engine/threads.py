"""The CPU threads that products run on: how many are available, and how many of them pay off.

BLAS starts a thread for each core that it sees. Its threads wait for each other several times in
every product, so where a core is busy or a container has a quota of CPU time, many threads can be
several times slower than one. So the number is measured when a model is loaded on the CPU. It holds
for the whole process: for BLAS and for the engine's own threads.
"""

from __future__ import annotations

import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from engine import env

__all__ = ["Threads", "are_own", "available", "choose", "count", "current", "quota"]
__all__ += ["take_from_blas"]

# Variables that set BLAS's threads, in the order in which OpenBLAS, MKL and OpenMP read them.
_BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
_MIN_SIZE = 1 << 18  # smallest matrix, in elements, that is measured
_MAX_SIZE = 1 << 22  # elements of a larger matrix that are measured
_MAX_SECONDS = 0.25  # time of a measurement
_NUM_SAMPLES = 5  # samples of each candidate, if the time allows
_MIN_GAIN = 1.1  # speedup that justifies more threads


@dataclass(frozen=True)
class Threads:
    """A number of CPU threads, and why it was chosen."""

    count: int
    reason: str

    def __str__(self) -> str:
        return f"{self.count} thread{'s' if self.count > 1 else ''}"


_lock = threading.Lock()
_chosen: Threads | None = None
_num_blas: int | None = None  # the threads that BLAS was given here


def count() -> int:
    """Return the number of threads to compute with."""
    return current().count


def current() -> Threads:
    """Return the chosen number of threads; until `choose` was called, the available ones."""
    return _chosen or _default()


@cache
def _default() -> Threads:
    return _requested() or available()


def choose(shape: tuple[int, int]) -> Threads:
    """Choose the number of threads for products with matrices of a shape, and set it.

    Parameters
    ----------
    shape : (int, int)
        Output and input features of a typical matrix of the model. Products of this shape are timed
        with several numbers of threads, for up to 0.25 s together.

    Returns
    -------
    Threads
        `ENGINE_NUM_THREADS`, or else a variable that sets BLAS's threads, always wins. Otherwise
        the smallest number that is within 10 % of the fastest, at most the available one and what
        BLAS is limited to (`threadpoolctl.threadpool_limits`). All available ones for a small
        matrix, which BLAS multiplies on one thread anyway.
    """
    global _chosen
    with _lock:
        found = _requested()
        if found is not None and found.reason in _BLAS_VARIABLES:
            _chosen = found  # BLAS has read it
            if _num_blas is not None:
                _give_blas(found.count)
            return found
        if found is None:
            most = available()
            limit = _blas_limit()
            if limit is not None and limit < most.count:
                most = Threads(limit, "BLAS is limited to it")
            found = most
            if most.count > 1 and math.prod(shape) >= _MIN_SIZE:
                found = _measured(_probe(shape), most)
        _apply(found)
    return found


def take_from_blas() -> None:
    """Let BLAS compute on one thread, until the next `choose`.

    It is for models whose products the engine's own threads compute. BLAS's would compete with
    them: they spin for tens of milliseconds after each of its products.
    """
    with _lock:
        _give_blas(1)


def are_own() -> bool:
    """Tell whether BLAS has one thread, so that the engine's own may use the others."""
    return _num_blas == 1


def available() -> Threads:
    """Return the number of CPUs that this process may use: by affinity and by cgroup quota."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    time_share = quota()
    if time_share is not None and time_share < cores:
        return Threads(max(1, int(time_share)), f"the container may use {time_share:g} CPUs")
    return Threads(cores, "all available")


def quota(root: Path = Path("/")) -> float | None:
    """Return the CPU time per time that the process's cgroups allow; None if unlimited.

    Both versions of cgroups are read, and all groups from the process's own up to the root.
    """
    shares = [share for group in _groups(root) if (share := _share(group)) is not None]
    return min(shares, default=None)


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of the CPU controller's groups that hold this process."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    base = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = (base / controllers, base / "cpu") if controllers else (base, base / "unified")
        for mount in mounts:
            # A container may see its own group as the root, but the path outside in the file.
            own = mount / path.lstrip("/")
            yield mount
            while own != mount and mount in own.parents:
                yield own
                own = own.parent


def _share(group: Path) -> float | None:
    """Return a group's own limit in CPUs."""
    try:
        if (v2 := group / "cpu.max").exists():
            limit, period = v2.read_text().split()
        else:
            limit = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
        return int(limit) / int(period) if int(limit) > 0 else None
    except (OSError, ValueError):  # no such group, or "max"
        return None


def _requested() -> Threads | None:
    """Return the number that the environment asks for."""
    if (own := env.num_threads()) is not None:
        return Threads(own, "ENGINE_NUM_THREADS")
    for name in _BLAS_VARIABLES:
        text = os.environ.get(name, "")
        if text.isdecimal() and int(text) > 0:
            return Threads(int(text), name)
    return None


def _probe(shape: tuple[int, int]) -> Callable[[], Any]:
    """Return a function that decodes some tokens and reads a short prompt with one matrix."""
    columns = shape[1]
    matrix = np.ones((min(shape[0], _MAX_SIZE // columns), columns), np.float32)
    token = matrix[:1]
    prompt = np.ones((32, columns), np.float32)

    def run() -> None:
        for _ in range(4):
            np.matmul(token, matrix.T)
        np.matmul(prompt, matrix.T)

    return run


def _measured(probe: Callable[[], Any], most: Threads) -> Threads:
    """Return the number of threads that `probe` pays off with, at most `most`."""
    global _chosen
    candidates = [1]
    while candidates[-1] < most.count:
        candidates.append(min(2 * candidates[-1], most.count))
    seconds: dict[int, list[float]] = {number: [] for number in candidates}
    _apply(Threads(most.count, "measured now"))
    probe()  # starts the threads, and reads the weights
    start = time.perf_counter()
    for _ in range(_NUM_SAMPLES):
        for number in candidates:
            if seconds[number] and time.perf_counter() - start > _MAX_SECONDS:
                continue
            _apply(Threads(number, "measured now"))
            begin = time.perf_counter()
            probe()
            seconds[number].append(time.perf_counter() - begin)
    medians = {number: statistics.median(times) for number, times in seconds.items()}
    best = min(medians.values())
    chosen = next(n for n in candidates if medians[n] <= _MIN_GAIN * best)
    if chosen == most.count:
        return most
    slower = medians[most.count] / medians[chosen]
    return Threads(chosen, f"{most.count} threads take {slower:.1f} times as long")


def _apply(threads: Threads) -> None:
    global _chosen
    _chosen = threads
    _give_blas(threads.count)


def _give_blas(number: int) -> None:
    global _num_blas
    _num_blas = number
    for library in _blas():
        library.set_num_threads(number)


def _blas_limit() -> int | None:
    """Return the number of BLAS threads that others have set; None if they have not."""
    numbers = [library.num_threads for library in _blas()]
    is_own = all(number == _num_blas for number in numbers)
    return None if is_own or not numbers else max(numbers)


@cache
def _blas() -> list[Any]:
    """Return the controllers of the BLAS libraries of this process."""
    controllers: list[Any] = ThreadpoolController().select(user_api="blas").lib_controllers
    return controllers
