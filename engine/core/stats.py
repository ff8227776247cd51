"""Engine counters since construction, under vLLM's metric names."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.outputs import RequestMetrics
from engine.scheduler.stats import SchedulerStats
from engine.speculative.counts import SpeculationStats

__all__ = ["EngineStats", "Histogram", "StatsCollector"]

_SHORT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 40, 160)
_LONG = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.8, 2, 5)


@dataclass(frozen=True)
class Histogram:
    """Number of values per bin.

    Attributes
    ----------
    bounds : tuple of float
        Upper bounds, ascending and inclusive.
    counts : tuple of int
        Counts per bin, plus a last one for values above all bounds.
    total : float
        Sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Mean of the values; 0 if empty."""
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of the engine's counters.

    Attributes
    ----------
    scheduler : SchedulerStats
        Queues, blocks, prefix cache, preemptions.
    prompt_tokens, generation_tokens : int
        Totals over all requests: prompts count once their first token is generated, including the
        tokens found in the prefix cache.
    request_success : mapping of str to int
        Finish reason -> number of requests ("abort" and "error" included, as in vLLM).
    admission_rejections : int
        Requests refused because the queue was full.
    num_step_failures, num_stuck_steps : int
        Steps that raised and were rolled back; steps the watchdog reported as stuck.
    speculation : SpeculationStats
        Drafts verified and accepted.
    time_to_first_token_seconds, request_queue_time_seconds, request_prefill_time_seconds,
    request_decode_time_seconds, e2e_request_latency_seconds : Histogram
        Over finished requests.
    request_time_per_output_token_seconds : Histogram
        Mean time between the tokens of a request, over finished requests.
    expert_load : mapping of int to tuple of int
        Layer -> tokens routed to each of its E experts; empty for a dense model. A layer's sum is
        top_k times the tokens it computed: tokens found in the prefix cache do not count, tokens
        recomputed after a preemption or rollback count twice, rejected drafts count, and the last
        layer may count only tokens whose logits were needed. Other users of the same `Model` add
        to it. A snapshot synchronizes with the device to read it.
    rank_load : mapping of int to tuple of int
        Layer -> `expert_load` summed over each rank's experts; empty unless each rank holds
        whole experts (`enable_expert_parallel`).
    kernel_runs : mapping of str to int
        Op of `engine.kernels`, or "op=function" where it is overridden -> how often it ran in this
        process, replays of launch plans and CUDA graphs included. Other users of the same `Model`
        add to it.
    """

    scheduler: SchedulerStats
    prompt_tokens: int
    generation_tokens: int
    request_success: Mapping[str, int]
    admission_rejections: int
    num_step_failures: int
    num_stuck_steps: int
    speculation: SpeculationStats
    time_to_first_token_seconds: Histogram
    request_queue_time_seconds: Histogram
    request_prefill_time_seconds: Histogram
    request_decode_time_seconds: Histogram
    e2e_request_latency_seconds: Histogram
    request_time_per_output_token_seconds: Histogram
    expert_load: Mapping[int, tuple[int, ...]]
    rank_load: Mapping[int, tuple[int, ...]]
    kernel_runs: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_requests_running(self) -> int:
        """Requests that hold blocks."""
        return self.scheduler.num_requests_running

    @property
    def num_requests_waiting(self) -> int:
        """Requests in the waiting queue."""
        return self.scheduler.num_requests_waiting

    @property
    def kv_cache_usage_perc(self) -> float:
        """Fraction of the blocks held by requests, 0 to 1 (the name is vLLM's)."""
        return self.scheduler.kv_cache_usage

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions so far."""
        return self.scheduler.num_preemptions

    @property
    def prefix_cache_queries(self) -> int:
        """Tokens looked up in the prefix cache."""
        return self.scheduler.prefix_cache_queries

    @property
    def prefix_cache_hits(self) -> int:
        """Tokens found in the prefix cache."""
        return self.scheduler.prefix_cache_hits


class _Bins:
    """A histogram under construction."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float | None) -> None:
        if value is not None:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._total += value

    def snapshot(self) -> Histogram:
        return Histogram(self._bounds, tuple(self._counts), self._total)


ExpertLoad = Mapping[int, np.ndarray[Any, np.dtype[np.int64]]]


@dataclass
class StatsCollector:
    """Counts finished requests, and the tokens routed to each expert since construction.

    Parameters
    ----------
    expert_load : callable
        `Model.expert_load`.
    expert_runs : sequence of (int, int)
        `Model.expert_runs`.
    kernel_runs : callable
        Returns the number of runs of each kernel.
    """

    expert_load: Callable[[], ExpertLoad]
    expert_runs: Sequence[tuple[int, int]] = ()
    kernel_runs: Callable[[], Mapping[str, int]] = dict
    prompt_tokens: int = 0
    generation_tokens: int = 0
    admission_rejections: int = 0
    request_success: Counter[str] = field(default_factory=Counter)
    _bins: dict[str, _Bins] = field(
        default_factory=lambda: {
            "time_to_first_token_seconds": _Bins(_SHORT),
            "request_queue_time_seconds": _Bins(_LONG),
            "request_prefill_time_seconds": _Bins(_LONG),
            "request_decode_time_seconds": _Bins(_LONG),
            "e2e_request_latency_seconds": _Bins(_LONG),
            "request_time_per_output_token_seconds": _Bins(_PER_TOKEN),
        }
    )

    def __post_init__(self) -> None:
        # Those of other engines and of measurements.
        self._first_load = self.expert_load()
        self._first_runs = self.kernel_runs()

    def add_request(self, finish_reason: str, m: RequestMetrics) -> None:
        """Count a finished request."""
        self.request_success[finish_reason] += 1
        bins = self._bins
        bins["time_to_first_token_seconds"].add(m.ttft)
        bins["request_queue_time_seconds"].add(m.queue_time)
        bins["request_prefill_time_seconds"].add(m.prefill_time)
        bins["request_decode_time_seconds"].add(m.decode_time)
        bins["e2e_request_latency_seconds"].add(m.e2e_time)
        bins["request_time_per_output_token_seconds"].add(m.itl)

    def snapshot(
        self,
        scheduler: SchedulerStats,
        *,
        num_step_failures: int,
        num_stuck_steps: int,
        speculation: SpeculationStats,
    ) -> EngineStats:
        """Return a snapshot; the arguments are counters kept elsewhere."""
        loads = {n: load - self._first_load[n] for n, load in self.expert_load().items()}
        return EngineStats(
            scheduler=scheduler,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            request_success=dict(self.request_success),
            admission_rejections=self.admission_rejections,
            num_step_failures=num_step_failures,
            num_stuck_steps=num_stuck_steps,
            speculation=speculation,
            expert_load={layer: tuple(load.tolist()) for layer, load in loads.items()},
            rank_load={
                layer: tuple(int(load[first:last].sum()) for first, last in self.expert_runs)
                for layer, load in loads.items()
                if self.expert_runs
            },
            kernel_runs={
                kernel: count - first
                for kernel, count in sorted(self.kernel_runs().items())
                if count > (first := self._first_runs.get(kernel, 0))
            },
            **{name: bins.snapshot() for name, bins in self._bins.items()},
        )
