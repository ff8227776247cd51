"""`python -m tests.quality [NAME ...]`: SmolLM2's perplexity in every format, as JSON and a table.

Each format of `CASES` is compared with the first that is measured, the reference, on the first
50,000 tokens of `text()`, in windows of 512. The results go to docs/benchmarks/quantization.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import engine
from engine.commands._record import check_json_file, conditions
from engine.evaluation import PerplexityResult, compare, perplexity, text_ids
from tests.quality.text import SHA256, text

FILE = Path(__file__).parents[2] / "docs" / "benchmarks" / "quantization.json"
NUM_TOKENS = 50_000


@dataclass(frozen=True)
class Case:
    """A format: its name, and the options of `engine.load` that give it."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("float32", {"dtype": "float32"}),
    Case("bfloat16", {"dtype": "bfloat16"}),
)
BASELINE = "bfloat16"  # the format that the others' perplexity is held against


def measure(
    cases: list[Case], model: str, num_tokens: int, context: int, device: str
) -> tuple[Any, list[dict[str, Any]]]:
    """Return the device and a row for each case; the first one is the reference of the others."""
    reference = engine.load(model, device=device, **cases[0].options)
    token_ids, bos = text_ids(reference, text())
    token_ids = token_ids[:num_tokens]
    how: dict[str, Any] = {"context": context, "bos_token_id": bos, "progress": sys.stderr.isatty()}
    rows: list[dict[str, Any]] = []
    for case in cases[1:]:
        other = engine.load(model, device=device, **case.options)
        start = time.perf_counter()
        result = compare(other, reference, token_ids, **how)
        if not rows:
            rows.append(_row(cases[0], reference, result.reference))
        rows.append(_row(case, other, result.model))
        rows[-1] |= {
            "kl_mean": result.kl_mean,
            "kl_p99": result.kl_p99,
            "top1_agreement": result.top1_agreement,
            "seconds with the reference": time.perf_counter() - start,
        }
        other.close()
        print(_line(rows[-1], rows), file=sys.stderr, flush=True)
    if not rows:
        rows = [_row(cases[0], reference, perplexity(reference, token_ids, **how))]
    return reference.device, rows


def _row(case: Case, model: Any, result: PerplexityResult) -> dict[str, Any]:
    return {
        "format": case.name,
        "options": case.options,
        "weight MB": model.weight_bytes / 1e6,
        "perplexity": result.perplexity,
        "standard error": result.standard_error,
        "scored tokens": result.num_tokens,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        f"| format | weights | perplexity | beside {BASELINE} | KL divergence from "
        f"{rows[0]['format']} | 99 % below | same best token |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_line(row, rows) for row in rows)])


def _line(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    base = next((r["perplexity"] for r in rows if r["format"] == BASELINE), None)
    beside = "" if base is None else f"{100 * (row['perplexity'] / base - 1):+.3f} %"
    cells = [row["format"], f"{row['weight MB']:.0f} MB", f"{row['perplexity']:.4f}", beside]
    if "kl_mean" in row:
        cells += [f"{row['kl_mean']:.2e}", f"{row['kl_p99']:.2e}"]
        cells += [f"{100 * row['top1_agreement']:.2f} %"]
    else:
        cells += ["", "", ""]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure, write the file, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.quality", description=__doc__)
    names = [case.name for case in CASES]
    parser.add_argument("names", nargs="*", help=f"of {', '.join(names)}; none: all")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-tokens", type=int, default=NUM_TOKENS)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--json", type=Path, default=FILE, help=f"instead of {FILE.name}")
    parser.add_argument("--print", type=Path, help="only print the table of this file")
    arguments = parser.parse_args()
    if arguments.print:
        print(table(json.loads(arguments.print.read_text())["rows"]))
        return
    unknown = [name for name in arguments.names if name not in names]
    if unknown:
        parser.error(f"no format is called {unknown[0]!r}; there are {', '.join(names)}")
    check_json_file(arguments.json)
    chosen = [case for case in CASES if case.name in (arguments.names or names)]
    sizes = (arguments.max_tokens, arguments.context, arguments.device)
    device, rows = measure(chosen, arguments.model, *sizes)
    record = {
        **conditions(device),
        "command": "python -m tests.quality " + shlex.join(sys.argv[1:]),
        "model": arguments.model,
        "text sha256": SHA256,
        "text tokens": arguments.max_tokens,
        "context": arguments.context,
        "rows": rows,
    }
    arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
