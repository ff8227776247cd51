"""`python -m tests.bench.scaling_record`: write the predictions of docs/benchmarks/scaling.json.

Measurements in that file are kept; `--table` prints the table of docs/scaling.md instead.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from typing import Any

from engine.commands._bench_models import built_in_config
from engine.scaling import NCCL, OURS, Constants, Division, Speed, StepModel, Workload, find_card
from engine.scaling.plan import PlanRow, plan_scaling
from engine.server.protocol.completion import CompletionChunks
from tests.bench.figure import FOLDER
from tests.bench.fit_scaling import best_us
from tests.bench.scaling_points import collective_points, measured_points

__all__ = ["predictions", "table"]

_FILE = FOLDER / "scaling.json"
_MODELS = (
    ("llama-3.1-8b", None),
    ("llama-3.1-70b", "fp8"),
    ("qwen3-30b-a3b", "fp8_block"),
    ("qwen3-235b-a22b", "fp8_block"),
    ("gpt-oss-120b", "mxfp4"),
)
_GPUS = 1, 2, 4, 8
_MAX_MODEL_LEN, _REQUESTS, _REPLICAS = 16384, 256, 1000


def predictions() -> dict[str, Any]:
    """Return all predictions, rounded as stored."""
    constants = Constants()
    link_rate = find_card("h200").link_rate
    return {
        "constants": asdict(constants),
        "collectives_us": {
            whose: [_short(best_us(ways, size, link_rate)) for size, _ in collective_points(whose)]
            for whose, ways in (("ours", OURS), ("NCCL", NCCL))
        },
        "points": [
            {
                "group": point.group,
                "case": point.case,
                "unit": point.unit,
                "measured": point.measured,
                "predicted": _short(point.predict(constants)),
                "error_of_time_percent": round(100 * point.error(constants), 1),
                "source": point.source,
            }
            for point in measured_points()
        ],
        "over_gpus": [row for name, form in _MODELS for row in _over_gpus(name, form)],
        "replicas": _replicas(constants),
    }


def _short(number: float) -> float:
    return float(f"{number:.4g}")


def _over_gpus(name: str, form: str | None) -> list[dict[str, Any]]:
    """Return the predictions for 1 to 8 GPUs, with tensor parallelism or replicas."""
    rows = []
    config, card = built_in_config(name), find_card("h200")
    for sums, ways_to_add in (("ours", OURS), ("NCCL", NCCL)):
        constants = replace(Constants(), collectives=ways_to_add)
        model = StepModel(config, "bfloat16", 2, form, card, constants)
        for gpus in _GPUS:
            ways = [Division(gpus)]
            if model.config.moe is not None and gpus > 1:
                ways.append(Division(gpus, expert=True))
            if sums == "ours" and gpus > 1:
                ways.append(Division(data=gpus))
            plan = plan_scaling(model, ways, Workload(_REQUESTS), max_model_len=_MAX_MODEL_LEN)
            rows += [{"model": name, "weights": form or "bfloat16", "gpus": gpus, "sums": sums,
                      **_figures(row)} for row in plan.rows]  # fmt: skip
    return rows


def _figures(row: PlanRow) -> dict[str, Any]:
    found: dict[str, Any] = {"division": str(row.division)}
    if row.reason:
        return found | {"reason": row.reason}
    return found | {
        "ms_per_token": _short(row.ms_per_token),
        "output_tokens_per_s": _short(row.output_tokens_per_s),
        "prompt_tokens_per_s": _short(row.prompt_tokens_per_s),
        "token_us": {name: _short(us) for name, us in row.token.as_dict().items() if us},
        "requests_share": {
            name: _short(us / row.requests.total)
            for name, us in row.requests.as_dict().items()
            if us
        },
    }


def _replicas(constants: Constants) -> dict[str, Any]:
    """Return the load that 1,000 replicas put on the front-end processes."""
    model = StepModel(
        built_in_config("llama-3.1-8b"), "bfloat16", 2, None, find_card("h200"), constants
    )
    work = Workload(_REQUESTS)
    tokens = _REPLICAS * Speed(model, Division()).requests(work, _REQUESTS)[0]
    requests = tokens / work.mean_output
    serve = json.loads((FOLDER / "serve.json").read_text())
    one = next(row for row in serve["rows"] if row["case"] == "server, 1 API process")
    chunk_us = 1e6 * one["api_cpu_s"][0] / one["chunks"]
    chunk = CompletionChunks("cmpl-" + 32 * "0", "llama-3.1-8b", 1_700_000_000, shows_usage=False)
    num_bytes = len(chunk.text(0, " word"))
    return {
        "replicas": _REPLICAS,
        "model": "llama-3.1-8b, bfloat16, one H200 each",
        "output_tokens_per_s": _short(tokens),
        "requests_per_s": _short(requests),
        "api_us_per_chunk": _short(chunk_us),
        "api_cores": _short(tokens * chunk_us / 1e6),
        "bytes_per_chunk": num_bytes,
        "gigabytes_per_s": _short(tokens * num_bytes / 1e9),
        "us_between_requests": _short(1e6 / requests),
        "blocks_per_prompt": _short(work.mean_prompt / 16),
    }


def _lines(value: Any, indent: int = 0) -> str:
    """Return JSON with one line per dict entry and per row of a list of dicts."""
    pad = " " * (indent + 1)
    if isinstance(value, dict) and indent < 2:
        found = (f"{pad}{json.dumps(k)}: {_lines(v, indent + 1)}" for k, v in value.items())
        return "{\n" + ",\n".join(found) + "\n" + " " * indent + "}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        rows = (pad + json.dumps(row) for row in value)
        return "[\n" + ",\n".join(rows) + "\n" + " " * indent + "]"
    return json.dumps(value)


def table(record: dict[str, Any]) -> str:
    """Return the table of measured points, for docs/scaling.md."""
    lines = ["| | measured | predicted | error of the time |", "|---|---|---|---|"]
    group = unit = ""
    for row in record["predicted"]["points"]:
        if row["group"] != group:
            group, unit = row["group"], row["unit"]
            lines.append(f"| **{group}** | {row['unit']} | | |")
        measured, predicted = (
            f"{value:,.0f}" + " tokens/s" * (row["unit"] != unit)
            if row["unit"] == "tokens/s"
            else f"{value:.3f}"
            for value in (row["measured"], row["predicted"])
        )
        error = row["error_of_time_percent"]
        lines.append(f"| {row['case']} | {measured} | {predicted} | {error:+.1f} % |")
    return "\n".join(lines)


def main() -> None:
    """Write the file, or print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.scaling_record")
    parser.add_argument("--table", action="store_true")
    record = json.loads(_FILE.read_text())
    if parser.parse_args().table:
        print(table(record))
        return
    record["predicted"] = predictions()
    _FILE.write_text(_lines(record) + "\n")


if __name__ == "__main__":
    main()
