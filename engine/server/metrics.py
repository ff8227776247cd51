"""Engine metrics in Prometheus's format, with vLLM's names if the meaning is the same.

The engine keeps all counters, so every API process returns the same values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from engine.core.stats import EngineStats, Histogram

__all__ = ["CONTENT_TYPE", "COUNTERS", "GAUGES", "HISTOGRAMS", "metrics_text"]


class _Value(NamedTuple):
    name: str
    attribute: str  # attribute path in `EngineStats`
    text: str


GAUGES = (
    _Value("vllm:num_requests_running", "num_requests_running", "Requests that hold blocks."),
    _Value("vllm:num_requests_waiting", "num_requests_waiting", "Requests in the queue."),
    _Value("vllm:kv_cache_usage_perc", "kv_cache_usage_perc", "Share of held blocks, 0 to 1."),
    _Value("engine:kv_cache_blocks", "scheduler.num_blocks", "Blocks of the KV cache."),
    _Value("engine:kv_cache_free_blocks", "scheduler.num_free_blocks", "Free blocks."),
    _Value("engine:kv_cache_cached_blocks", "scheduler.num_cached_blocks",
           "Blocks held by the prefix cache only."),
    _Value("engine:state_slots", "scheduler.num_state_slots", "Slots of recurrent states."),
    _Value("engine:state_free_slots", "scheduler.num_free_state_slots", "Free state slots."),
    _Value("engine:state_snapshots", "scheduler.num_state_snapshots",
           "State slots held by the prefix cache."),
)  # fmt: skip
"""Gauges."""

COUNTERS = (
    _Value("vllm:num_preemptions", "num_preemptions", "Preemptions."),
    _Value("vllm:prompt_tokens", "prompt_tokens", "Prompt tokens, once computed or found."),
    _Value("vllm:generation_tokens", "generation_tokens", "Tokens generated."),
    _Value("vllm:prefix_cache_queries", "prefix_cache_queries", "Tokens looked up."),
    _Value("vllm:prefix_cache_hits", "prefix_cache_hits", "Tokens found in the prefix cache."),
    _Value("engine:admission_rejections", "admission_rejections", "Requests refused: queue full."),
    _Value("engine:step_failures", "num_step_failures", "Steps rolled back."),
    _Value("engine:stuck_steps", "num_stuck_steps", "Steps reported by the watchdog."),
    _Value("engine:steps", "scheduler.num_steps", "Steps."),
    _Value("engine:swaps", "scheduler.num_swaps", "Requests swapped out."),
    _Value("vllm:spec_decode_num_drafts", "speculation.num_drafts",
           "Verifications of a request's drafts."),
    _Value("vllm:spec_decode_num_draft_tokens", "speculation.num_draft_tokens", "Draft tokens."),
    _Value("vllm:spec_decode_num_accepted_tokens", "speculation.num_accepted_tokens",
           "Draft tokens that were accepted."),
    _Value("engine:spec_decode_proposer_failures", "speculation.num_proposer_failures",
           "Proposals that failed and were dropped."),
    _Value("engine:evicted_blocks", "scheduler.num_evicted_blocks", "Blocks evicted."),
    _Value("engine:evicted_state_snapshots", "scheduler.num_evicted_snapshots",
           "Snapshots of recurrent states evicted."),
)  # fmt: skip
"""Counters; Prometheus appends ``_total`` to their names."""

HISTOGRAMS = (
    _Value("vllm:time_to_first_token_seconds", "time_to_first_token_seconds",
           "From arrival to the first token."),
    _Value("vllm:request_time_per_output_token_seconds", "request_time_per_output_token_seconds",
           "Mean time between the tokens of a request."),
    _Value("vllm:e2e_request_latency_seconds", "e2e_request_latency_seconds",
           "From arrival to the end."),
    _Value("vllm:request_queue_time_seconds", "request_queue_time_seconds",
           "From arrival to the first step."),
    _Value("vllm:request_prefill_time_seconds", "request_prefill_time_seconds",
           "From the first step to the first token."),
    _Value("vllm:request_decode_time_seconds", "request_decode_time_seconds",
           "From the first token to the end."),
)  # fmt: skip
"""Histograms over finished requests."""

REQUESTS = "vllm:request_success"
"""Counter of finished requests, with a label `finished_reason`; ``_total`` is appended."""

ACCEPTED_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
"""Counter of accepted draft tokens, with a label `position` from 0; ``_total`` is appended."""

KERNEL_RUNS = "engine:kernel_runs"
"""Counter of the runs of each kernel, with a label `kernel`; ``_total`` is appended."""

_LABELS = ("model_name", "engine")


class _Snapshot(Collector):
    """Snapshot of all replicas' metrics."""

    def __init__(self, stats: Mapping[int, EngineStats], model_name: str) -> None:
        self._stats = {(model_name, str(number)): found for number, found in stats.items()}

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        for value in GAUGES:
            gauge = GaugeMetricFamily(value.name, value.text, labels=_LABELS)
            for labels, stats in self._stats.items():
                gauge.add_metric(labels, _number(stats, value))
            yield gauge
        for value in COUNTERS:
            counter = CounterMetricFamily(value.name, value.text, labels=_LABELS)
            for labels, stats in self._stats.items():
                counter.add_metric(labels, _number(stats, value))
            yield counter
        for value in HISTOGRAMS:
            family = HistogramMetricFamily(value.name, value.text, labels=_LABELS)
            for labels, stats in self._stats.items():
                found: Histogram = getattr(stats, value.attribute)
                family.add_metric(labels, _buckets(found), found.total)
            yield family
        yield self._accepted_per_position()
        yield self._requests()
        yield self._kernel_runs()

    def _accepted_per_position(self) -> Metric:
        family = CounterMetricFamily(
            ACCEPTED_PER_POSITION,
            "Accepted draft tokens, by distance from the last known one.",
            labels=(*_LABELS, "position"),
        )
        for labels, stats in self._stats.items():
            for position, count in enumerate(stats.speculation.num_accepted_tokens_per_pos):
                family.add_metric([*labels, str(position)], count)
        return family

    def _requests(self) -> Metric:
        names = (*_LABELS, "finished_reason")
        family = CounterMetricFamily(REQUESTS, "Finished requests.", labels=names)
        for labels, stats in self._stats.items():
            counts = dict.fromkeys(("stop", "length", "abort", "error"), 0)
            for reason, count in (counts | dict(stats.request_success)).items():
                family.add_metric([*labels, reason], count)
        return family

    def _kernel_runs(self) -> Metric:
        text = "Runs of each kernel; 'op=function' where an op is overridden."
        family = CounterMetricFamily(KERNEL_RUNS, text, labels=(*_LABELS, "kernel"))
        for labels, stats in self._stats.items():
            for kernel, count in stats.kernel_runs.items():
                family.add_metric([*labels, kernel], count)
        return family


def _number(stats: EngineStats, value: _Value) -> float:
    owner: object = stats
    for name in value.attribute.split("."):
        owner = getattr(owner, name)
    return float(owner)  # type: ignore[arg-type]


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return the histogram as cumulative buckets, as Prometheus expects."""
    found = []
    count = 0
    bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
    for bound, number in zip(bounds, histogram.counts, strict=True):
        count += number
        found.append((bound, float(count)))
    return found


def metrics_text(stats: Mapping[int, EngineStats], model_name: str) -> bytes:
    """Return all metrics in Prometheus's text format.

    Parameters
    ----------
    stats : mapping of int to EngineStats
        Stats by replica index, which becomes the label `engine` of every metric.
    model_name : str
        Value of every metric's label `model_name`.
    """
    registry = CollectorRegistry()
    registry.register(_Snapshot(stats, model_name))
    return generate_latest(registry)
