"""Predicted memory and speed of a model on n GPUs, for every division."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from engine.cache.kv_cache import KVGeometry
from engine.cache.memory_pool import format_bytes
from engine.core.resolve import budget_with_states, default_budget
from engine.errors import ConfigError
from engine.loading.weight_memory import quantized_formats, weight_bytes
from engine.models.rope_tables import rope_bytes
from engine.scaling.division import Division, stages
from engine.scaling.speed import Speed, Workload
from engine.scaling.step_time import StepModel
from engine.scaling.terms import Terms
from engine.weights import FORMATS

__all__ = ["PlanRow", "ScalingPlan", "plan_scaling"]

_BLOCK = 16  # tokens per page


@dataclass(frozen=True)
class PlanRow:
    """Predictions for one division.

    Attributes
    ----------
    division : Division
        The division.
    reason : str
        Reason why the division is impossible; "" if it is possible.
    weights, activations, collectives, pages : int
        Bytes on the fullest GPU: `collectives` includes what the previous stage writes; `pages` is
        negative if the rest does not fit.
    states : int
        Bytes of the state slots of recurrent layers on that GPU.
    max_num_seqs : int
        Maximum number of concurrent requests per replica: with recurrent layers, their states must
        leave room for pages.
    num_tokens : int
        Tokens that fit in the pages of a replica.
    longest : int
        Maximum number of tokens per request.
    num_running : int
        Number of concurrent requests per replica.
    ms_per_token : float
        Latency per token of a single request.
    output_tokens_per_s, prompt_tokens_per_s : float
        Throughput of all requests, and of many prompts, over all replicas.
    token, requests : Terms
        Time of one token of a single request, and of all requests, by part.
    """

    division: Division
    reason: str = ""
    weights: int = 0
    activations: int = 0
    collectives: int = 0
    pages: int = 0
    states: int = 0
    max_num_seqs: int = 0
    num_tokens: int = 0
    longest: int = 0
    num_running: int = 0
    ms_per_token: float = math.inf
    output_tokens_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    token: Terms = field(default_factory=Terms)
    requests: Terms = field(default_factory=Terms)

    def as_dict(self) -> dict[str, Any]:
        """Return the row as numbers, strings and dicts of these."""
        found = asdict(self) | {"name": str(self.division)}
        if self.reason:
            return {name: found[name] for name in ("name", "division", "reason")}
        return found


@dataclass(frozen=True)
class ScalingPlan:
    """Predictions for the divisions of a model over some GPUs.

    Attributes
    ----------
    model : StepModel
        The model, its formats, and the card.
    num_gpus : int
        Number of GPUs in each division.
    work : Workload
        Requests for which `output_tokens_per_s` is predicted.
    prompt_len : int
        Prompt length in tokens for `prompt_tokens_per_s`.
    max_model_len : int
        Maximum number of tokens per sequence.
    rows : tuple of PlanRow
        One per division.
    """

    model: StepModel
    num_gpus: int
    work: Workload
    prompt_len: int
    max_model_len: int
    rows: tuple[PlanRow, ...]

    @property
    def possible(self) -> list[PlanRow]:
        """The rows of possible divisions."""
        return [row for row in self.rows if not row.reason]

    @property
    def fastest_token(self) -> PlanRow | None:
        """The row with the lowest latency; on a tie, the one with the most tokens/s."""
        order = [(_latency(row), -row.output_tokens_per_s) for row in self.possible]
        return self.possible[order.index(min(order))] if order else None

    @property
    def most_tokens(self) -> PlanRow | None:
        """The row with the most output tokens per second."""
        return max(self.possible, key=lambda row: row.output_tokens_per_s, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as numbers, strings, and dicts and lists of these."""
        latency = self.fastest_token
        throughput = self.most_tokens
        return {
            "gpu": asdict(self.model.card),
            "num_gpus": self.num_gpus,
            "weights": self.model.quantization or self.model.dtype,
            "page_itemsize": self.model.page_itemsize,
            "workload": asdict(self.work),
            "prompt_len": self.prompt_len,
            "max_model_len": self.max_model_len,
            "rows": [row.as_dict() for row in self.rows],
            "fastest_token": None if latency is None else str(latency.division),
            "most_tokens": None if throughput is None else str(throughput.division),
        }

    def __str__(self) -> str:
        lines = [_HEAD, *map(_line, self.possible)]
        lines += [f"{row.division!s:24} {row.reason}" for row in self.rows if row.reason]
        latency = self.fastest_token
        throughput = self.most_tokens
        if latency is not None and throughput is not None:
            lines.append(
                f"lowest latency: {latency.division}, {latency.ms_per_token:.2f} ms a token: "
                f"{_largest_parts(latency.token)}"
            )
            lines.append(
                f"highest throughput: {throughput.division}, "
                f"{throughput.output_tokens_per_s:,.0f} tokens/s: "
                f"{_largest_parts(throughput.requests)}"
            )
        return "\n".join(lines)


_HEAD = (
    f"{'':24} {'weights':>10} {'pages':>10} {'tokens':>11} {'longest':>8} {'running':>7} "
    f"{'ms/token':>8} {'tokens/s':>9} {'prompt/s':>9}  largest part of a token; of all requests"
)


def _line(row: PlanRow) -> str:
    return (
        f"{row.division!s:24} {format_bytes(row.weights):>10} {format_bytes(row.pages):>10} "
        f"{row.num_tokens:>11,} {row.longest:>8,} {row.num_running:>7} {row.ms_per_token:>8.2f} "
        f"{row.output_tokens_per_s:>9,.0f} {row.prompt_tokens_per_s:>9,.0f}  "
        f"{_part(row.token, row.token.largest)}; {_part(row.requests, row.requests.largest)}"
    )


def _part(terms: Terms, name: str) -> str:
    return f"{name} {100 * getattr(terms, name) / terms.total:.0f} %"


def _largest_parts(terms: Terms) -> str:
    parts = terms.as_dict()
    order = sorted(parts, key=lambda name: -parts[name])[:3]
    return ", ".join(_part(terms, name) for name in order if parts[name] > 0)


def plan_scaling(
    model: StepModel,
    ways: Iterable[Division],
    work: Workload,
    *,
    max_model_len: int,
    prompt_len: int = 4096,
    max_num_seqs: int = 256,
    gpus_per_host: int = 8,
    fastest_only: bool = False,
) -> ScalingPlan:
    """Predict memory and speed of each division of a model. Nothing is allocated.

    Parameters
    ----------
    model : StepModel
        The model, its formats, and the card.
    ways : iterable of Division
        Divisions over the same number of GPUs.
    work : Workload
        Requests for which `output_tokens_per_s` is predicted.
    max_model_len : int
        Maximum number of tokens per sequence.
    prompt_len : int
        Prompt length in tokens for `prompt_tokens_per_s`.
    max_num_seqs : int
        Maximum number of concurrent requests per replica.
    gpus_per_host : int
        Number of GPUs per host, connected by the card's link.
    fastest_only : bool
        Leave out the divisions that are possible but not those of the lowest latency, whose
        throughput takes most of the time to predict.

    Raises
    ------
    ConfigError
        If `ways` is empty, or the longest request of the workload exceeds `max_model_len`.
    """
    longest = work.prompt[1] + work.output[1]
    if max(longest, prompt_len) > max_model_len:
        raise ConfigError(
            f"prompts and outputs must have at most {max_model_len} tokens together, the longest "
            f"sequence; got {max(longest, prompt_len)}"
        )
    ways = tuple(ways)
    if not ways:
        raise ConfigError("there must be a way to divide the model; got none")
    speeds = [Speed(model, way, gpus_per_host) for way in ways]
    rows = [_fitting_row(speed, work, max_model_len, max_num_seqs) for speed in speeds]
    least = min(map(_latency, rows)) if fastest_only else math.inf
    timed = (
        row if row.reason else _with_throughput(row, speed, work, prompt_len)
        for row, speed in zip(rows, speeds, strict=True)
        if row.reason or _latency(row) <= least
    )
    return ScalingPlan(model, ways[0].num_gpus, work, prompt_len, max_model_len, tuple(timed))


def _latency(row: PlanRow) -> float:
    """Return the milliseconds per token in a precision in which equal layouts are equal."""
    return round(row.ms_per_token, 4)


def _fitting_row(speed: Speed, work: Workload, max_model_len: int, max_num_seqs: int) -> PlanRow:
    """Return a division's memory and latency, or why it is impossible."""
    division = speed.division
    model = speed.model
    try:
        division.check(model.config, speed.gpus_per_host, FORMATS.get(model.quantization or ""))
    except ConfigError as error:
        return PlanRow(division, str(error))
    row = _memory(speed, max_model_len, max_num_seqs)
    if row.pages < 0:
        return replace(row, reason=f"does not fit: {format_bytes(-row.pages)} a GPU are missing")
    if row.num_tokens < work.prompt[1] + work.output[1]:
        return replace(row, reason=f"pages for {row.num_tokens:,} tokens: not for one request")
    fitting = int(row.num_tokens / (work.mean_prompt + work.mean_output))
    mine = math.ceil(work.num_requests / division.data)
    running = max(1, min(row.max_num_seqs, fitting, mine))
    token = speed.token(work.mean_prompt + work.mean_output / 2)
    return replace(
        row,
        longest=min(max_model_len, row.num_tokens),
        num_running=running,
        ms_per_token=token.total / 1e3,
        token=token,
    )


def _with_throughput(row: PlanRow, speed: Speed, work: Workload, prompt_len: int) -> PlanRow:
    rate, requests = speed.requests(work, row.num_running)
    return replace(
        row,
        output_tokens_per_s=rate,
        prompt_tokens_per_s=1e6 / speed.prompts(prompt_len).total * row.division.data,
        requests=requests,
    )


def _memory(speed: Speed, max_model_len: int, max_num_seqs: int) -> PlanRow:
    """Return the memory of the fullest GPU: in the stage whose pages hold the fewest tokens."""
    model = speed.model
    division = speed.division
    found = []
    for index, local in enumerate(stages(model.config, division)):
        weights = _stage_weights(model, division, index) + rope_bytes(local, max_model_len)
        whole_logits = replace(local, vocab_size=model.config.vocab_size)  # gathered on each rank
        budget = default_budget(
            whole_logits,
            model.dtype,
            "cuda",
            model.card.memory,
            weights,
            num_ranks=division.tensor,
            num_stages=division.pipeline if speed.is_linked else 1,
            max_num_seqs=max_num_seqs,
        )
        geometry = KVGeometry.of_model(local, model.dtype, _BLOCK)
        (budget, seqs) = budget_with_states(budget, geometry, max_num_seqs)
        per_token = max(1, geometry.bytes_per_token * model.page_itemsize // 2)
        tokens = max(0, budget.left) // (per_token * _BLOCK) * _BLOCK
        sizes = budget.activations, budget.collectives + budget.links, budget.left
        row = PlanRow(division, "", weights, *sizes, budget.states, seqs, tokens)
        found.append((budget.left / per_token, index, row))
    return min(found)[2]


def _stage_weights(model: StepModel, division: Division, stage: int) -> int:
    """Return the bytes of one rank's weights in one pipeline stage."""
    shard = division.shard(model.config, stage)
    form = FORMATS.get(model.quantization or "")
    formats = {} if form is None else quantized_formats(model.config, form, shard)
    return weight_bytes(model.config, model.dtype, shard, formats)
