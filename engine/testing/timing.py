"""GPU timing: median over graph replays, with rotating inputs that exceed L2."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from engine import device

__all__ = ["time_cpu", "time_gpu"]


def time_cpu(call: Callable[[], Any], *, repeats: int = 20, warmup: int = 2) -> float:
    """Return the median time of `call()` on the host, in seconds."""
    for _ in range(warmup):
        call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def time_gpu(
    calls: Sequence[Callable[[], Any]], *, replays: int = 20, min_launches: int = 20
) -> float:
    """Return the median time of one call in seconds, without launch overhead.

    Parameters
    ----------
    calls : sequence of callables
        The same work on different inputs, which together should exceed the L2 cache several times.
        The calls are captured in one graph.
    replays : int
        Timed replays of the graph.
    min_launches : int
        Minimum number of calls in the graph, which repeats `calls`.
    """
    cupy = device.cupy()
    # SAFETY: inputs were written on other streams; a non-blocking stream does not wait for those.
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    rounds = -(-min_launches // len(calls))
    kept = []
    with stream:
        for call in calls:
            kept.append(call())
        stream.synchronize()
        stream.begin_capture()
        for _ in range(rounds):
            kept.extend(call() for call in calls)
        graph = stream.end_capture()
        graph.launch(stream)
        times: list[float] = []
        for _ in range(replays):
            start = cupy.cuda.Event()
            stop = cupy.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            stop.record(stream)
            stop.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, stop) * 1e-3)
    return statistics.median(times) / (rounds * len(calls))
