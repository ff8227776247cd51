"""The workloads of `engine bench`: the same pseudo-random requests on every machine."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import EngineError
from engine.llm_engine import LLMEngine
from engine.sampling_params import RequestOutputKind, SamplingParams

__all__ = ["Work", "latency", "prefill", "serve", "throughput"]

_LENGTHS = (100, 1024)  # of prompts and of outputs, both ends included
_MAX_ID = 9999  # within every vocabulary that is measured


@dataclass(frozen=True)
class Work:
    """Requests: prompts as token ids, and how many tokens to generate for each.

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

        `longest` replaces 1024, for outputs too unless `longest_output` is given; and 100 if less.
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
        """Return greedy requests of equal lengths."""
        rng = random.Random(0)
        prompts = [[rng.randint(0, max_id) for _ in range(prompt_len)] for _ in range(num_requests)]
        return cls(prompts, [output_len] * num_requests)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(self.lengths)


def serve(engine: LLMEngine, work: Work) -> tuple[float, list[Any]]:
    """Queue all requests and step until they are done.

    Returns
    -------
    seconds : float
        From the first step to the last output.
    metrics : list of RequestMetrics
        In the order of the requests.

    Raises
    ------
    EngineError
        If a request ended early, which would make the figures wrong.
    """
    engine.reset_prefix_cache()
    for index, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
        params = SamplingParams(
            temperature=work.temperature,
            max_tokens=length,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine.add_request(str(index), prompt, params)
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


def latency(engine: LLMEngine, work: Work, repeats: int) -> dict[str, float]:
    """Return the time per token, without the prefill, and the time to the first token.

    Medians over all requests of all runs but the first.
    """
    runs = [serve(engine, work)[1] for _ in range(repeats + 1)]
    metrics = [each for run in runs[1:] for each in run]
    gaps = max(1, work.lengths[0] - 1)
    times = [(each.last_token_time - each.first_token_time) / gaps for each in metrics]
    row = {
        "ms_per_token": statistics.median(times) * 1e3,
        "ttft_ms": statistics.median(each.ttft for each in metrics) * 1e3,
    }
    if engine.model.num_stages > 1:  # of which this process has the weights of one
        return row
    streamed = engine.model.weight_bytes - _unread_bytes(engine)
    return row | {"weight_TB_per_s": streamed / row["ms_per_token"] * 1e-9}


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


def _unread_bytes(engine: LLMEngine) -> int:
    """Return the bytes of weights that decoding does not read: an embedding that is not tied."""
    decoder = engine.model.decoder
    embed = decoder.weights["embed"]
    is_tied = embed is decoder.weights["lm_head"]
    return decoder.table_bytes + (0 if is_tied else embed.num_bytes)
