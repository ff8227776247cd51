"""Measured points of docs/benchmarks, with the predictions of `engine.scaling`.

The figures are read from the benchmark pages' data; this module only describes how each was
measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from engine.commands._bench_models import built_in_config
from engine.commands._bench_workloads import Work
from engine.config import ModelConfig
from engine.scaling import Constants, Division, Speed, Step, StepModel, Workload, find_card
from engine.scaling.layer_work import PartWork
from engine.scaling.plan import plan_scaling

__all__ = ["UNFITTED", "Point", "collective_points", "measured_points"]

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
UNFITTED = "steps of 256 requests, not fitted to", "several GPUs, not fitted to"
"""Groups of points held out from the fit."""

_GROUPS = (
    *("one request", "few requests", "a step of many", "many requests", "prompts", "two stages"),
    *UNFITTED,
)
# Mean number of keys: 128 tokens in, 512 out; 512 in, 256 out.
_LATENCY, _MIDDLE = 128 + 512 / 2, 512 + 256 / 2
_PROMPT, _MAX_MODEL_LEN = 4096, 4096
_PACKED = "int4_g128", "q4_k"
_SMALL = "qwen3-0.6b", "llama-3.2-1b", "qwen2.5-0.5b"  # `_resident` yields their steps
# Weights -> figures of the H100's rows that were measured with kernels replaced since.
_REPLACED = {
    **dict.fromkeys(_PACKED, ("output_tokens_per_s",)),
    "fp8_block": ("ms_per_token", "output_tokens_per_s"),
    "mxfp4": ("ms_per_token", "prompt_tokens_per_s"),
}


@dataclass(frozen=True)
class Point:
    """One measured figure.

    Attributes
    ----------
    group : str
        "one request", "few requests", "a step of many", "many requests", "prompts", "two stages",
        or one of `UNFITTED`.
    case : str
    unit : str
        "ms" or "tokens/s".
    measured : float
    source : str
        File and entry of docs/benchmarks.
    predict : callable
        Constants -> the predicted figure.
    """

    group: str
    case: str
    unit: str
    measured: float
    source: str
    predict: Callable[[Constants], float]

    def error(self, constants: Constants) -> float:
        """Return predicted / measured - 1 in terms of time, whatever the unit."""
        ratio = self.predict(constants) / self.measured
        return ratio - 1 if self.unit == "ms" else 1 / ratio - 1


@dataclass(frozen=True)
class _Listed(Workload):
    """Requests of `engine bench throughput`, with their individual lengths."""

    lengths: tuple[int, ...] = ()
    prompt_tokens: int = 0

    @classmethod
    @cache
    def mixed(cls, num_requests: int) -> _Listed:
        work = Work.mixed(num_requests)
        lengths = tuple(sorted(work.lengths))
        bounds = (lengths[0], lengths[-1])
        return cls(num_requests, (100, 1024), bounds, lengths, work.num_prompt_tokens)

    @property
    def mean_prompt(self) -> float:
        return self.prompt_tokens / self.num_requests

    @property
    def mean_output(self) -> float:
        return sum(self.lengths) / self.num_requests

    def share_alive(self, step: float) -> float:
        return sum(length > step for length in self.lengths) / self.num_requests


@dataclass(frozen=True)
class _OnlyExperts(StepModel):
    """A model whose attention is not quantized, as the published gpt-oss."""

    def part_work(self, local: ModelConfig) -> PartWork:
        return PartWork.of(local, self.dtype, self.quantization, only_experts=True)


@dataclass(frozen=True)
class _Case:
    """What was measured: a model, formats, GPUs.

    Attributes
    ----------
    name : str
    weights, pages : str
        "bfloat16" or a format; "mxfp4" is that of the experts alone.
    card : str
    division : Division
    """

    name: str
    weights: str = "bfloat16"
    pages: str = "bfloat16"
    card: str = "h200"
    division: Division = field(default_factory=Division)

    def __str__(self) -> str:
        ways = self.division
        number = ways.tensor * ways.pipeline
        gpus = f", {number} GPUs" * (number > 1)
        how = ", stages" * (ways.pipeline > 1) + ", whole experts" * ways.expert
        return f"{self.name}, {self.weights}{', H100' * (self.card == 'h100')}{gpus}{how}"

    @cached_property
    def num_running(self) -> int:
        """Requests for which memory has room, at most 256."""
        model = self.speed(Constants()).model
        plan = plan_scaling(model, [self.division], Workload(256), max_model_len=_MAX_MODEL_LEN)
        return plan.rows[0].num_running

    def speed(self, constants: Constants) -> Speed:
        """Return the prediction."""
        kind = _OnlyExperts if self.weights == "mxfp4" else StepModel
        form = None if self.weights == "bfloat16" else self.weights
        size = 2 if self.pages == "bfloat16" else 1
        config, card = built_in_config(self.name), find_card(self.card)
        return Speed(kind(config, "bfloat16", size, form, card, constants), self.division)


def _load(stem: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((FOLDER / f"{stem}.json").read_text())
    return record


def _step(
    case: _Case,
    rows: int,
    context: float,
    ms: float,
    source: str,
    group: str = "",
    *,
    is_graph: bool = False,
) -> Point:
    """Return the point of a decode step; with `is_graph`, of its CUDA graph alone."""
    by_rows = "one request" if rows == 1 else "few requests" if rows <= 16 else "a step of many"

    def predict(constants: Constants) -> float:
        total = case.speed(constants).step_terms(Step.decode(rows, context)).total
        return (total - is_graph * constants.step_us) / 1e3

    what = ", graph alone" * is_graph
    title = f"{case}, {rows} sequence{'s' * (rows > 1)}, {context:.0f} keys{what}"
    return Point(group or by_rows, title, "ms", ms, source, predict)


def _requests(group: str, case: _Case, number: int, rate: float, source: str) -> Point:
    def predict(constants: Constants) -> float:
        return case.speed(constants).requests(_Listed.mixed(number), case.num_running)[0]

    title = f"{case}, {case.pages} pages, {number} requests"
    return Point(group, title, "tokens/s", rate, source, predict)


def _prompts(group: str, case: _Case, rate: float, source: str) -> Point:
    def predict(constants: Constants) -> float:
        # These prompts are 8 steps. Each stage after the first adds one, to fill the pipeline.
        fill = 1 + (case.division.pipeline - 1) / 8
        return 1e6 / case.speed(constants).prompts(_PROMPT).total / fill

    return Point(group, f"{case}, prompts", "tokens/s", rate, source, predict)


def _of_row(case: _Case, row: Mapping[str, Any], source: str, group: str = "") -> Iterator[Point]:
    """Yield what `engine bench latency`, `throughput` and `prefill` measured for a case."""
    if "ms_per_token" in row:
        yield _step(case, 1, _LATENCY, row["ms_per_token"], source, group)
    if "output_tokens_per_s" in row and case.num_running == 256:  # else: as many as memory held
        rate = row["output_tokens_per_s"]
        yield _requests(group or "many requests", case, 256, rate, source)
    if "prompt_tokens_per_s" in row:
        yield _prompts(group or "prompts", case, row["prompt_tokens_per_s"], source)


def measured_points() -> list[Point]:
    """Return all points, in the order of the table in docs/scaling.md."""
    loop, quantized, whole = map(_load, ("decode_loop", "quantized_models", "whole_models"))
    points = [
        *_beside_vllm(loop),
        *_resident(loop),
        *_quantized(quantized),
        *_few_requests(loop),
        *_steps(loop),
        *_third_round(whole),
        *_h200(whole["h200_e82b50f2"]),
        *_packed_batches(loop),
        *_swapped_tiles(loop),
        *_steps_of_experts(_load("moe_gemm")),
        *_stages(whole),
        *_steps_of_requests(loop),
        *_several_gpus(whole),
        *_prompts_of_two(_load("all_reduce")["sent_rows"]),
    ]
    return sorted(points, key=lambda point: _GROUPS.index(point.group))


def _beside_vllm(loop: dict[str, Any]) -> Iterator[Point]:
    key = "beside_vllm_2026_11_23"
    for row in [*loop[key]["rows"], *loop[key]["ours_alone"]]:
        if row["model"] in _SMALL:
            row = {name: value for name, value in row.items() if name != "ms_per_token"}
        yield from _of_row(_Case(row["model"]), row, f"decode_loop.json, {key}")


def _resident(loop: dict[str, Any]) -> Iterator[Point]:
    """Yield the steps of small models, whose products keep their weights in registers."""
    key = "resident_2026_11_30"
    keys = 500 + 30 + 4 * 30 / 2  # the prompt, the steps before, and half of those measured
    for name, rows, _, measured in loop[key]["rows"]:
        yield _step(_Case(name), rows, keys, measured, f"decode_loop.json, {key}")


def _quantized(quantized: dict[str, Any]) -> Iterator[Point]:
    """Yield the points whose kernels have not been replaced since."""
    source = "quantized_models.json"
    for row in quantized["rows"]:
        if row["model"] == "llama-3.1-8b" and row["weights"] not in _PACKED:
            case = _Case(row["model"], row["weights"], row.get("pages", "bfloat16"))
            yield from _of_row(case, row, source)
    for row in quantized["pages_qwen3_0_6b"]["rows"]:
        case = _Case("qwen3-0.6b", "bfloat16", row["pages"])
        yield from _of_row(case, row, f"{source}, pages_qwen3_0_6b")


def _few_requests(loop: dict[str, Any]) -> Iterator[Point]:
    """Yield the steps of the model whose kernels have not been replaced since."""
    key = "streams_or_tiles_2026_11_22"
    for row in loop[key]["rows"]:
        if row["model"] != "qwen3-0.6b":
            continue
        measured = sum(row["mix"]) / 2
        case = _Case(row["model"])
        yield _step(case, row["sequences"], 100, measured, f"decode_loop.json, {key}")


def _steps(loop: dict[str, Any]) -> Iterator[Point]:
    key = "decode_steps_llama_3.1_8b_2026_11_22"
    for rows, *_, measured in loop[key]["rows"]:
        case = _Case("llama-3.1-8b")
        yield _step(case, rows, 570, measured / 1e3, f"decode_loop.json, {key}")


def _third_round(record: dict[str, Any]) -> Iterator[Point]:
    """Yield the points of whole models on one H100, and of batches of an 8B model.

    With packed weights or experts in fp8_block only one request and prompts, with experts in mxfp4
    no prompts, of small models not one request: the other kernels have been replaced since.
    """
    source = "whole_models.json"
    for row in record["rows"]:
        weights, _, pages = row["weights"].partition(", ")
        pages = pages.removesuffix(" pages") or "bfloat16"
        small = ("ms_per_token",) if row["model"] in _SMALL else ()
        replaced = _REPLACED.get(weights, ()) + small
        kept = {key: value for key, value in row.items() if key not in replaced}
        yield from _of_row(_Case(row["model"], weights, pages, "h100"), kept, source)
    for row in record["batches"]["rows"]:
        for weights in ("fp8", "int4_g128"):
            if row["requests"] == 1 or weights not in _PACKED:
                case = _Case("llama-3.1-8b", weights, card="h100")
                ms = row[f"{weights}_ms"]
                yield _step(case, row["requests"], _MIDDLE, ms, f"{source}, batches")


def _h200(record: dict[str, Any]) -> Iterator[Point]:
    """Yield the points of whole models on one H200, and of batches of an 8B model."""
    source = "whole_models.json, h200_e82b50f2"
    for row in record["rows"]:
        weights, _, pages = row["weights"].partition(", ")
        pages = pages.removesuffix(" pages") or "bfloat16"
        yield from _of_row(_Case(row["model"], weights, pages), row, source)
    for row in record["batches"]:
        for weights in ("fp8", "int4_g128"):
            case = _Case("llama-3.1-8b", weights)
            yield _step(case, row["requests"], _MIDDLE, row[f"{weights}_ms"], f"{source}, batches")


def _stages(record: dict[str, Any]) -> Iterator[Point]:
    """Yield the points of two H200s as stages."""
    for row in record["pipeline_h200"]["rows"]:
        if row["case"].endswith("2 GPUs (PP)"):
            case = _Case("llama-3.1-8b", division=Division(pipeline=2))
            yield from _of_row(case, row, "whole_models.json, pipeline_h200", "two stages")


def _packed_batches(loop: dict[str, Any]) -> Iterator[Point]:
    """Yield the steps of an 8B model with packed weights on an H200."""
    key = "packed_products_2026_11_28"
    record, source = loop[key], f"decode_loop.json, {key}"
    for name, weights, rows, keys, _, measured in record["steps"]["rows"]:
        yield _step(_Case(name, weights), rows, keys, measured, source, is_graph=True)
    chosen = ["int4_g128", 1], ["q4_k", 8]  # with streams up to so many rows
    for name, *choice, _, two, four, eight in record["tiles_instead_of_streams"]["rows"]:
        if name == "llama-3.1-8b" and choice in chosen:
            for rows, measured in ((2, two), (4, four), (8, eight)):
                yield _step(_Case(name, choice[0]), rows, 640, measured, source, is_graph=True)


def _swapped_tiles(loop: dict[str, Any]) -> Iterator[Point]:
    """Yield steps of 8 to 64 requests in bfloat16 and fp8 on an H200.

    The model does not know what scales of x by group cost, which int8 has.
    """
    key = "swapped_tiles_2026_11_29"
    for name, weights, rows, keys, _, measured in loop[key]["steps"]["rows"]:
        if rows >= 8 and weights != "int8":
            case = _Case(name, weights)
            yield _step(case, rows, keys, measured, f"decode_loop.json, {key}", is_graph=True)


def _steps_of_experts(record: dict[str, Any]) -> Iterator[Point]:
    """Yield steps of 16 to 256 requests of a model of experts on an H200, medians by the clock."""
    key = "routing_2026_11_29"
    runs: dict[int, list[float]] = {}
    for rows, _, median, *_ in record[key]["by_the_clock"]["rows"]:
        runs.setdefault(rows, []).append(median)
    keys = 500 + 60 + 100 / 2  # the prompt, the steps before, and half of those measured
    for rows, medians in runs.items():
        case, ms = _Case("qwen3-30b-a3b", "fp8_block"), sum(medians) / len(medians)
        yield _step(case, rows, keys, ms, f"moe_gemm.json, {key}, by_the_clock")


def _several_gpus(record: dict[str, Any]) -> Iterator[Point]:
    """Yield the points of two and four H100s that share the layers."""
    for row in record["several_gpus"]:
        found = re.fullmatch(r"(\S+)( \S+)?, (\d) GPUs \((TP|whole experts)\)", row["case"])
        if found is not None:  # stages had no graphs then
            name, weights, gpus, way = found.groups()
            division = Division(int(gpus), expert=way != "TP")
            case = _Case(name, (weights or "bfloat16").strip(), card="h100", division=division)
            yield from _of_row(case, row, "whole_models.json, several_gpus", UNFITTED[1])


def _prompts_of_two(record: dict[str, Any]) -> Iterator[Point]:
    """Yield the prompts of two H200s that share the layers, as measured last."""
    for weights in ("bfloat16", "fp8"):
        runs = record["prompts"][weights]
        rates = runs.get("now", runs["before"])
        case = _Case("llama-3.1-8b", weights, division=Division(2))
        yield _prompts(UNFITTED[1], case, sum(rates) / len(rates), "all_reduce.json, sent_rows")


def _steps_of_requests(loop: dict[str, Any]) -> Iterator[Point]:
    """Yield mean step times of 256 mixed requests, by the number still running, above 64.

    The products of fewer rows have been replaced since.
    """
    key = "padding_tile_last_layer_2026_11_22"
    work = Work.mixed(256)
    running = [
        [len(prompt) + step for prompt, most in zip(work.prompts, work.lengths, strict=True)
         if most > step]
        for step in range(max(work.lengths))
    ]  # fmt: skip
    now = [row for row in loop[key]["rows"] if row[0] == "now"]
    for column, title in enumerate(loop[key]["columns"]):
        bounds = re.fullmatch(r"(\d+)-(\d+)", title)
        if bounds is None or int(bounds[2]) <= 64:
            continue
        low, high = map(int, bounds.groups())
        steps = [contexts for contexts in running if low <= len(contexts) <= high]
        measured = sum(row[column] for row in now) / len(now)
        yield Point(UNFITTED[0], f"llama-3.1-8b, bfloat16, {title} sequences", "ms", measured,
                    f"decode_loop.json, {key}", partial(_mean_step, steps))  # fmt: skip


def _mean_step(steps: list[list[int]], constants: Constants) -> float:
    """Return the mean step time in ms for sequences of these lengths."""
    speed = _Case("llama-3.1-8b").speed(constants)
    found = [
        speed.step_terms(Step.decode(len(contexts), sum(contexts) / len(contexts))).total
        for contexts in steps
    ]
    return sum(found) / len(found) / 1e3


def collective_points(whose: str) -> list[tuple[int, float]]:
    """Return (bytes, us) of all-reduces over two GPUs by "ours" or "NCCL"."""
    rows = json.loads((FOLDER / "scaling.json").read_text())["collectives"][whose]["rows"]
    return [(row["bytes"], row["us"]) for row in rows]
