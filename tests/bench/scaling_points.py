"""Measured points of docs/benchmarks, with the predictions of `engine.scaling`.

The figures are read from the benchmark pages' data; this module only describes how each was
measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from engine.commands._bench_models import built_in_config
from engine.commands._bench_workloads import Work
from engine.scaling import Constants, Division, Speed, Step, StepModel, Workload, find_card

__all__ = ["UNFITTED", "Point", "collective_points", "measured_points"]

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
UNFITTED = "steps of 256 requests, not fitted to", "H100s, not fitted to"
"""Groups of points held out from the fit."""

_LATENCY, _SHORT = 128 + 512 / 2, 128 + 200 / 2  # mean number of keys: 128 in, 512 or 200 out
_PROMPT = 4096


@dataclass(frozen=True)
class Point:
    """One measured figure.

    Attributes
    ----------
    group : str
        "one request", "few requests", "a step of many", "many requests", "prompts", or one of
        `UNFITTED`.
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


def _speed(name: str, weights: str, pages: str, constants: Constants) -> Speed:
    quantization = None if weights == "bfloat16" else weights
    card = find_card("h200")
    config = built_in_config(name)
    model = StepModel(
        config, "bfloat16", 2 if pages == "bfloat16" else 1, quantization, card, constants
    )
    return Speed(model, Division())


def _load(stem: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((FOLDER / f"{stem}.json").read_text())
    return record


def _step(
    group: str, name: str, weights: str, rows: int, context: float, measured: float, source: str
) -> Point:
    def predict(constants: Constants) -> float:
        speed = _speed(name, weights, "bfloat16", constants)
        return speed.step_terms(Step.decode(rows, context)).total / 1e3

    case = f"{name}, {weights}, {rows} sequence{'s' * (rows > 1)}"
    return Point(group, case, "ms", measured, source, predict)


def _requests(
    name: str, weights: str, pages: str, number: int, measured: float, source: str
) -> Point:
    def predict(constants: Constants) -> float:
        work = _Listed.mixed(number)
        return _speed(name, weights, pages, constants).requests(work, 256)[0]

    case = f"{name}, {weights}, {pages} pages, {number} requests"
    return Point("many requests", case, "tokens/s", measured, source, predict)


def _prompts(name: str, weights: str, measured: float, source: str) -> Point:
    def predict(constants: Constants) -> float:
        return 1e6 / _speed(name, weights, "bfloat16", constants).prompts(_PROMPT).total

    return Point("prompts", f"{name}, {weights}", "tokens/s", measured, source, predict)


def measured_points() -> list[Point]:
    """Return all points, in the order of the table in docs/scaling.md."""
    loop, quantized = _load("decode_loop"), _load("quantized_models")
    return [*_one_request(loop, quantized), *_few_requests(loop), *_steps(loop),
            *_many_requests(loop, quantized), *_many_prompts(loop, quantized),
            *_steps_of_requests(loop), *_other_cards(_load("scaling"))]  # fmt: skip


def _one_request(loop: dict[str, Any], quantized: dict[str, Any]) -> Iterator[Point]:
    beside = loop["beside_vllm_2026_11_23"]
    source = "decode_loop.json, beside_vllm_2026_11_23"
    for row in [*beside["rows"], *beside["ours_alone"]]:
        if "ms_per_token" in row:
            yield _step("one request", row["model"], "bfloat16", 1, _LATENCY,
                        row["ms_per_token"], source)  # fmt: skip
    for row in quantized["rows"]:
        if "ms_per_token" in row:
            yield _step("one request", row["model"], row["weights"], 1, _LATENCY,
                        row["ms_per_token"], "quantized_models.json")  # fmt: skip


def _few_requests(loop: dict[str, Any]) -> Iterator[Point]:
    key = "several_requests_just_before_c8bef53"
    for name, figures in loop[key].items():
        if name != "what":
            for rows, measured in zip((2, 8), figures[1:], strict=True):
                yield _step("few requests", name, "bfloat16", rows, _SHORT, measured,
                            f"decode_loop.json, {key}")  # fmt: skip
    key = "streams_or_tiles_2026_11_22"
    for row in loop[key]["rows"]:
        measured = sum(row["mix"]) / 2
        yield _step("few requests", row["model"], "bfloat16", row["sequences"], 100, measured,
                    f"decode_loop.json, {key}")  # fmt: skip


def _steps(loop: dict[str, Any]) -> Iterator[Point]:
    key = "decode_steps_llama_3.1_8b_2026_11_22"
    for rows, *_, measured in loop[key]["rows"]:
        yield _step("a step of many", "llama-3.1-8b", "bfloat16", rows, 570, measured / 1e3,
                    f"decode_loop.json, {key}")  # fmt: skip


def _many_requests(loop: dict[str, Any], quantized: dict[str, Any]) -> Iterator[Point]:
    for row in loop["beside_vllm_2026_11_23"]["rows"]:
        yield _requests(row["model"], "bfloat16", "bfloat16", 256, row["output_tokens_per_s"],
                        "decode_loop.json, beside_vllm_2026_11_23")  # fmt: skip
    for row in quantized["rows"]:
        if "output_tokens_per_s" in row:
            yield _requests(row["model"], row["weights"], row.get("pages", "bfloat16"), 256,
                            row["output_tokens_per_s"], "quantized_models.json")  # fmt: skip
    for row in quantized["pages_qwen3_0_6b"]["rows"]:
        yield _requests("qwen3-0.6b", "bfloat16", row["pages"], 256, row["output_tokens_per_s"],
                        "quantized_models.json, pages_qwen3_0_6b")  # fmt: skip
    for row in quantized["q4_k_by_requests"]["rows"]:
        yield _requests("llama-3.1-8b", "q4_k", "bfloat16", row["requests"],
                        row["output_tokens_per_s"],
                        "quantized_models.json, q4_k_by_requests")  # fmt: skip


def _many_prompts(loop: dict[str, Any], quantized: dict[str, Any]) -> Iterator[Point]:
    for row in loop["beside_vllm_2026_11_23"]["rows"]:
        yield _prompts(row["model"], "bfloat16", row["prompt_tokens_per_s"],
                       "decode_loop.json, beside_vllm_2026_11_23")  # fmt: skip
    for row in quantized["rows"]:
        if "prompt_tokens_per_s" in row:
            yield _prompts(row["model"], row["weights"], row["prompt_tokens_per_s"],
                           "quantized_models.json")  # fmt: skip


def _other_cards(record: dict[str, Any]) -> Iterator[Point]:
    """Yield the points measured on one and two H100s."""

    def speed(name: str, gpus: int, constants: Constants) -> Speed:
        config, card = built_in_config(name), find_card("h100")
        model = StepModel(config, "bfloat16", 2, None, card, constants)
        return Speed(model, Division(gpus))

    def token(name: str, gpus: int, constants: Constants) -> float:
        return speed(name, gpus, constants).token(128 + 128 / 2).total / 1e3

    def prompts(name: str, gpus: int, constants: Constants) -> float:
        return 1e6 / speed(name, gpus, constants).prompts(_PROMPT).total

    for row in record["rows"]:
        name, gpus = row["model"], row["gpus"]
        case = f"{name}, bfloat16, {gpus} GPU{'s' * (gpus > 1)}"
        yield Point(UNFITTED[1], f"{case}, 1 sequence", "ms", row["ms_per_token"],
                    "scaling.json, h100", partial(token, name, gpus))  # fmt: skip
        if "prompt_tokens_per_s" in row:
            yield Point(UNFITTED[1], f"{case}, prompts", "tokens/s", row["prompt_tokens_per_s"],
                        "scaling.json, h100", partial(prompts, name, gpus))  # fmt: skip


def _steps_of_requests(loop: dict[str, Any]) -> Iterator[Point]:
    """Yield mean step times of 256 mixed requests, by the number still running."""
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
        if bounds is None:
            continue
        low, high = map(int, bounds.groups())
        steps = [contexts for contexts in running if low <= len(contexts) <= high]
        measured = sum(row[column] for row in now) / len(now)
        yield Point(UNFITTED[0], f"llama-3.1-8b, bfloat16, {title} sequences", "ms", measured,
                    f"decode_loop.json, {key}", partial(_mean_step, steps))  # fmt: skip


def _mean_step(steps: list[list[int]], constants: Constants) -> float:
    """Return the mean step time in ms for sequences of these lengths."""
    speed = _speed("llama-3.1-8b", "bfloat16", "bfloat16", constants)
    found = [
        speed.step_terms(Step.decode(len(contexts), sum(contexts) / len(contexts))).total
        for contexts in steps
    ]
    return sum(found) / len(found) / 1e3


def collective_points(whose: str) -> list[tuple[int, float]]:
    """Return (bytes, us) of all-reduces over two GPUs by "ours" or "NCCL"."""
    rows = json.loads((FOLDER / "scaling.json").read_text())["collectives"][whose]["rows"]
    return [(row["bytes"], row["us"]) for row in rows]
