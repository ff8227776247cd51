"""Benchmark metrics, named as in `vllm bench serve`; times are in milliseconds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from engine.commands.bench_serve.connection import Answer
from engine.commands.bench_serve.workload import Job
from engine.errors import ConfigError, did_you_mean

__all__ = ["METRICS", "RequestTimes", "describe", "parse_goodput", "summarize", "table"]

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "time between chunks of tokens",
    "e2el": "time from request to end",
}
_PERCENTILES = (50, 90, 99)
_GOALS = ("ttft", "tpot", "e2el")


class RequestTimes:
    """Latencies of one successful request, in milliseconds.

    Attributes
    ----------
    ttft, e2el : float
    tpot : float or None
        None if only one token was generated.
    itl : list of float
    num_output_tokens : int
        The server's count; the number of chunks if it sends none.
    """

    def __init__(self, answer: Answer) -> None:
        times = answer.times
        self.num_output_tokens = answer.num_output_tokens
        if self.num_output_tokens < 0:
            self.num_output_tokens = len(times)
        self.ttft = (times[0] - answer.start) * 1e3
        self.e2el = (answer.end - answer.start) * 1e3
        self.itl = [(after - before) * 1e3 for before, after in pairwise(times)]
        gaps = self.num_output_tokens - 1
        self.tpot = (times[-1] - times[0]) * 1e3 / gaps if gaps > 0 else None

    def meets(self, goals: Mapping[str, float]) -> bool:
        """Return whether every time meets its goal."""
        return all((getattr(self, name) or 0.0) <= most for name, most in goals.items())


def parse_goodput(given: Sequence[str]) -> dict[str, float]:
    """Parse the goals of `--goodput`, such as ``ttft:200``, in milliseconds.

    Raises
    ------
    ConfigError
        If a name or value is invalid.
    """
    goals = {}
    for word in given:
        name, _, text = word.partition(":")
        if name not in _GOALS:
            hint = did_you_mean(name, _GOALS, f"known: {', '.join(_GOALS)}")
            raise ConfigError(f"--goodput got an unknown name {name[:80]!r}{hint}")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise ConfigError(f"--goodput {name} must have positive milliseconds; got {text!r}")
        goals[name] = value
    return goals


def summarize(
    jobs: Sequence[Job], answers: Sequence[Answer], goals: Mapping[str, float]
) -> dict[str, Any]:
    """Return the summary row of a run: counts, rates, and mean and percentiles of each time.

    The duration runs from the first request to the end of the last response. Times and tokens count
    successful requests only.
    """
    good = [(job, a) for job, a in zip(jobs, answers, strict=True) if not a.failure]
    times = [RequestTimes(answer) for _, answer in good]
    duration = max(a.end for a in answers) - min(a.start for a in answers)
    inputs = sum(
        job.num_prompt_tokens if answer.num_prompt_tokens < 0 else answer.num_prompt_tokens
        for job, answer in good
    )
    outputs = sum(each.num_output_tokens for each in times)
    short = sum(
        each.num_output_tokens < job.num_output_tokens
        for (job, _), each in zip(good, times, strict=True)
    )
    row: dict[str, Any] = {
        "completed": len(good),
        "failed": len(answers) - len(good),
        "failures": dict(Counter(a.failure for a in answers if a.failure).most_common()),
        "short_outputs": short,
        "without_usage": sum(answer.num_output_tokens < 0 for _, answer in good),
        "duration": duration,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
    }
    if goals:
        row["request_goodput"] = sum(each.meets(goals) for each in times) / duration
    return row | _distributions(times)


def _distributions(times: Sequence[RequestTimes]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in METRICS:
        if name == "itl":
            values = [gap for each in times for gap in each.itl]
        else:
            values = [v for each in times if (v := getattr(each, name)) is not None]
        if values:
            found[f"mean_{name}_ms"] = float(np.mean(values))
            for percent in _PERCENTILES:
                found[f"p{percent}_{name}_ms"] = float(np.percentile(values, percent))
    return found


def describe(jobs: Sequence[Job], answers: Sequence[Answer]) -> dict[str, list[Any]]:
    """Return per-request metrics for `--save-detailed`; None for failed requests."""
    good = [None if answer.failure else RequestTimes(answer) for answer in answers]
    start = min(answer.start for answer in answers)
    return {
        "start_times": [answer.start - start for answer in answers],
        "ttfts": [each and each.ttft for each in good],
        "itls": [each and each.itl for each in good],
        "e2els": [each and each.e2el for each in good],
        "output_lens": [each and each.num_output_tokens for each in good],
        "wanted_lens": [job.num_output_tokens for job in jobs],
        "errors": [answer.detail if answer.failure else "" for answer in answers],
    }


def table(row: Mapping[str, Any]) -> str:
    """Return the text printed for one run."""
    lines = [
        f"requests   {row['completed']} completed, {row['failed']} failed, "
        f"in {row['duration']:.2f} s",
        f"tokens     {row['total_input_tokens']} in, {row['total_output_tokens']} out",
        f"throughput {row['request_throughput']:.2f} requests/s, "
        f"{row['output_throughput']:.1f} output tokens/s, "
        f"{row['total_token_throughput']:.1f} tokens/s",
    ]
    if "request_goodput" in row:
        lines.append(f"goodput    {row['request_goodput']:.2f} requests/s")
    lines.append(f"{'ms':10} {'mean':>9} {'p50':>9} {'p90':>9} {'p99':>9}")
    for name, meaning in METRICS.items():
        if f"mean_{name}_ms" in row:
            names = ("mean", *(f"p{percent}" for percent in _PERCENTILES))
            cells = " ".join(f"{row[f'{each}_{name}_ms']:9.2f}" for each in names)
            lines.append(f"{name:10} {cells}  {meaning}")
    return "\n".join(lines)
