"""Workloads of `engine bench`: seeded pseudo-random requests, identical on every machine."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.errors import EngineError
from engine.llm_engine import LLMEngine
from engine.models.decoder import Decoder
from engine.sampling_params import RequestOutputKind, SamplingParams

__all__ = ["Work", "latency", "prefill", "serve", "throughput"]

_LENGTHS = (100, 1024)  # shortest and longest prompt and output, in tokens
_MAX_ID = 9999  # largest token id; every benchmarked model has it in its vocabulary
_COUNTED_STEPS = 64  # number of decode steps over which expert hits are averaged


@dataclass(frozen=True)
class Work:
    """Requests of a benchmark: prompt token ids, and the number of tokens to generate for each.

    Examples
    --------
    >>> work = Work.mixed(256)
    >>> work.num_prompt_tokens, work.num_output_tokens
    (141664, 150245)
    """

    prompts: Sequence[list[int]]
    lengths: Sequence[int]
    temperature: float = 0.0

    @classmethod
    def mixed(
        cls,
        num_requests: int,
        longest: int = _LENGTHS[1],
        max_id: int = _MAX_ID,
        *,
        longest_output: int | None = None,
    ) -> Work:
        """Return requests with prompts and outputs of 100 to 1024 tokens, temperature 0.6.

        `longest` replaces 1024, for outputs too unless `longest_output` is given. A `longest` below
        100 also replaces the minimum.
        """
        rng = random.Random(0)
        shortest = min(_LENGTHS[0], longest)
        prompts = [
            [rng.randint(0, max_id) for _ in range(rng.randint(shortest, longest))]
            for _ in range(num_requests)
        ]
        most = longest if longest_output is None else longest_output
        least = min(_LENGTHS[0], most)
        return cls(prompts, [rng.randint(least, most) for _ in prompts], 0.6)

    @classmethod
    def same(
        cls, num_requests: int, prompt_len: int, output_len: int, max_id: int = _MAX_ID
    ) -> Work:
        """Return greedy requests of equal length."""
        rng = random.Random(0)
        prompts = [[rng.randint(0, max_id) for _ in range(prompt_len)] for _ in range(num_requests)]
        return cls(prompts, [output_len] * num_requests)

    @property
    def num_prompt_tokens(self) -> int:
        """Total number of prompt tokens."""
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        """Total number of output tokens."""
        return sum(self.lengths)


def serve(engine: LLMEngine, work: Work) -> tuple[float, list[Any]]:
    """Queue all requests, and step until they are done.

    Returns
    -------
    seconds : float
        Time from the first step to the last output.
    metrics : list of RequestMetrics
        In request order.

    Raises
    ------
    EngineError
        If a request ended early, since the figures would be wrong.
    """
    _queue(engine, work, RequestOutputKind.FINAL_ONLY)
    metrics: dict[str, Any] = {}
    start = time.perf_counter()
    while engine.has_unfinished_requests():
        for output in engine.step():
            metrics[output.request_id] = output.metrics
    seconds = time.perf_counter() - start
    for index, length in enumerate(work.lengths):
        made = metrics[str(index)].num_generation_tokens
        if made != length:
            raise EngineError(f"request {index} ended after {made} of {length} tokens")
    return seconds, [metrics[str(i)] for i in range(len(work.prompts))]


def _queue(engine: LLMEngine, work: Work, output_kind: RequestOutputKind) -> None:
    engine.reset_prefix_cache()
    for index, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
        params = SamplingParams(
            temperature=work.temperature,
            max_tokens=length,
            ignore_eos=True,
            output_kind=output_kind,
        )
        engine.add_request(str(index), prompt, params)


def latency(engine: LLMEngine, work: Work, repeats: int) -> dict[str, float]:
    """Return the time per output token, excluding prefill, and the time to first token.

    Both are medians over all requests of all runs except the first. The row also contains the GB of
    weights that a decode step reads, and the resulting bandwidth (a lower bound on memory traffic:
    KV pages are not counted). For an MoE model, an additional untimed run counts the experts hit
    per step.
    """
    runs = [serve(engine, work)[1] for _ in range(repeats + 1)]
    metrics = [each for run in runs[1:] for each in run]
    gaps = max(1, work.lengths[0] - 1)
    times = [(each.last_token_time - each.first_token_time) / gaps for each in metrics]
    row = {
        "ms_per_token": statistics.median(times) * 1e3,
        "ttft_ms": statistics.median(each.ttft for each in metrics) * 1e3,
    }
    if engine.model.num_stages > 1:  # this process holds the weights of one stage only
        return row
    hits = _expert_hits(engine, work) if engine.model.config.moe else {}
    decoder = engine.model.decoder
    read = _dense_bytes(decoder) + _expert_bytes(decoder, hits)
    row["weight_GB_per_step"] = read * 1e-9
    if hits:
        row["experts_per_step"] = statistics.fmean(hits.values())
    if engine.config.speculative is None:  # with speculative decoding, a step yields several tokens
        row["weight_TB_per_s"] = read / row["ms_per_token"] * 1e-9
    return row


def throughput(engine: LLMEngine, work: Work, repeats: int) -> dict[str, float]:
    """Return output tokens per second."""
    times = [serve(engine, work)[0] for _ in range(repeats)]
    seconds = statistics.median(times)
    return {
        "output_tokens_per_s": work.num_output_tokens / seconds,
        "total_tokens_per_s": (work.num_output_tokens + work.num_prompt_tokens) / seconds,
        "seconds": seconds,
    }


def prefill(engine: LLMEngine, work: Work, repeats: int) -> dict[str, float]:
    """Return prompt tokens per second; one token is generated per request."""
    serve(engine, work)
    seconds = statistics.median(serve(engine, work)[0] for _ in range(repeats))
    return {"prompt_tokens_per_s": work.num_prompt_tokens / seconds, "seconds": seconds}


def _dense_bytes(decoder: Decoder) -> int:
    """Return the bytes of weights that every decode step reads.

    That excludes the experts, and an embedding that is not tied to the output layer.
    """
    weights = decoder.weights
    unread = [weights[name] for name in weights if _is_expert(name)]
    if weights["embed"] is not weights["lm_head"]:
        unread.append(weights["embed"])
    return decoder.num_bytes - decoder.table_bytes - sum(each.num_bytes for each in unread)


def _expert_bytes(decoder: Decoder, hits: Mapping[int, float]) -> float:
    """Return the bytes of weights of `hits[layer]` experts in each layer."""
    return sum(
        weight.num_bytes / weight.shape[0] * hits[int(name.split(".")[1])]
        for name, weight in decoder.weights.items()
        if _is_expert(name)
    )


def _is_expert(name: str) -> bool:
    return name.rpartition(".")[2].startswith("experts_")


def _expert_hits(engine: LLMEngine, work: Work) -> dict[int, float]:
    """Return the mean number of distinct experts per layer that a decode step hits.

    The mean is over at most 64 steps. Reading the counters synchronizes the host with every step,
    so this is never part of a timed run. With `enable_expert_parallel`, only this process's experts
    count.
    """
    model = engine.model
    own = slice(*model.expert_runs[0]) if model.expert_runs else slice(None)
    lengths = [min(length, _COUNTED_STEPS + 1) for length in work.lengths]
    _queue(engine, replace(work, lengths=lengths), RequestOutputKind.DELTA)
    started: set[str] = set()  # ids of requests that have produced a token
    steps: list[dict[int, int]] = []
    while engine.has_unfinished_requests():
        if len(started) < len(lengths):
            steps.clear()  # drop prefills and, if async, perhaps one decode step
        before = model.expert_load()
        started.update(output.request_id for output in engine.step())
        load = {layer: after - before[layer] for layer, after in model.expert_load().items()}
        if all(each.any() for each in load.values()):  # the last call launches no work
            steps.append({n: int(np.count_nonzero(each[own])) for n, each in load.items()})
    steps = steps[1:] or steps
    return {layer: statistics.fmean(step[layer] for step in steps) for layer in load}
