"""Time of a call: median and quartiles; on a GPU without launch overhead and with a cold L2."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine import device

__all__ = ["L2_BYTES", "Timing", "measure_cpu", "measure_gpu", "num_copies", "time_cpu", "time_gpu"]

L2_BYTES = 60 << 20
"""Size of the L2 cache of the largest Hopper, in bytes."""

_MAX_COPIES = 16


@dataclass(frozen=True)
class Timing:
    """Seconds of one call.

    Attributes
    ----------
    samples : tuple of float
        Seconds of a call in each repetition.
    has_launches : bool
        Whether launch overhead is included: the calls could not be captured in a CUDA graph.
    """

    samples: tuple[float, ...]
    has_launches: bool = False

    @property
    def median(self) -> float:
        """The median, in seconds."""
        return float(np.median(self.samples))

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third quartile, in seconds.

        Examples
        --------
        >>> Timing((1.0, 2.0, 3.0, 4.0, 9.0)).quartiles
        (2.0, 4.0)
        """
        low, high = np.percentile(self.samples, (25, 75))
        return float(low), float(high)


def num_copies(nbytes: float, l2_bytes: int = L2_BYTES) -> int:
    """Return how many copies of `nbytes` to rotate through so that none is found in L2.

    Examples
    --------
    >>> num_copies(64 << 20), num_copies(1 << 30)
    (3, 2)
    """
    return max(2, min(_MAX_COPIES, -int(-3 * l2_bytes // max(nbytes, 1))))


def measure_cpu(
    call: Callable[[], Any], *, repeats: int = 20, warmup: int = 2, seconds: float = float("inf")
) -> Timing:
    """Time `call()` on the host: `repeats` times, or fewer (but 3) to stay within `seconds`."""
    for _ in range(warmup):
        call()
    times: list[float] = []
    while len(times) < repeats and (len(times) < 3 or sum(times) < seconds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return Timing(tuple(times))


def time_cpu(call: Callable[[], Any], *, repeats: int = 20) -> float:
    """Return the median time of `call()` on the host, in seconds."""
    return measure_cpu(call, repeats=repeats).median


def measure_gpu(
    calls: Sequence[Callable[[], Any]],
    *,
    replays: int = 20,
    min_launches: int = 20,
    needs_graph: bool = True,
    seconds: float = 10.0,
) -> Timing:
    """Time a call on the GPU; a CUDA graph of many calls leaves out the launch overhead.

    Parameters
    ----------
    calls : sequence of callables
        The same work on different inputs, which together should exceed the L2 cache several times.
        The calls are captured in one graph.
    replays : int
        Timed replays of the graph: one sample each.
    min_launches : int
        Minimum number of calls in the graph, which repeats `calls`; fewer if their results would
        not fit in memory.
    needs_graph : bool
        False: calls that cannot be captured, such as those of cuBLAS through CuPy, are launched
        back to back between two events (`Timing.has_launches`). The GPU hides what that costs the
        host if a call takes longer than its launch, which is tens of microseconds.
    seconds : float
        Limit for all replays together: slow calls are repeated less often than `min_launches`.

    Returns
    -------
    Timing
    """
    cupy = device.cupy()
    # SAFETY: inputs were written on other streams; a non-blocking stream does not wait for those.
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        used = cupy.get_default_memory_pool().used_bytes()
        kept = [call() for call in calls]
        once = _elapsed(cupy, stream, lambda: [call() for call in calls])
        at_most = max(1, int(seconds / max(once * replays, 1e-9)))
        rounds = min(-(-min_launches // len(calls)), at_most, _num_rounds(cupy, used))
        try:
            launch = _captured(stream, calls, rounds, kept)
        except Exception:
            if needs_graph:
                raise
            kept.clear()
            launch = None
        launch_all = launch or (lambda: [call() for _ in range(rounds) for call in calls])
        launch_all()
        times = [_elapsed(cupy, stream, launch_all) for _ in range(replays)]
    num_calls = rounds * len(calls)
    return Timing(tuple(each / num_calls for each in times), has_launches=launch is None)


def _num_rounds(cupy: Any, used_before: int) -> int:
    """Return how often the calls may be captured: their results take half the memory at most."""
    pool = cupy.get_default_memory_pool()
    each = pool.used_bytes() - used_before
    free = cupy.cuda.runtime.memGetInfo()[0] + pool.free_bytes()
    return max(1, int(free // (2 * max(each, 1))))


def _captured(
    stream: Any, calls: Sequence[Callable[[], Any]], rounds: int, kept: list[Any]
) -> Callable[[], Any]:
    """Return the launch of a graph of the calls; `kept` holds the results that it writes."""
    stream.begin_capture()
    try:
        for _ in range(rounds):
            kept.extend(call() for call in calls)
    except BaseException:
        with contextlib.suppress(Exception):  # the capture is already invalid
            stream.end_capture()
        raise
    graph = stream.end_capture()
    return lambda: graph.launch(stream)


def _elapsed(cupy: Any, stream: Any, launch: Callable[[], Any]) -> float:
    start = cupy.cuda.Event()
    stop = cupy.cuda.Event()
    start.record(stream)
    launch()
    stop.record(stream)
    stop.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, stop)) * 1e-3


def time_gpu(
    calls: Sequence[Callable[[], Any]], *, replays: int = 20, min_launches: int = 20
) -> float:
    """Return the median time of one call in seconds. See `measure_gpu`."""
    return measure_gpu(calls, replays=replays, min_launches=min_launches).median
