"""`python -m tests.quality [NAME ...]`: SmolLM2's perplexity in every format, as JSON and a table.

Each format of `CASES`, or those named, is compared with the first of them, the reference, on the
first 50,000 tokens of `text()`, in windows of 512. The results go to
docs/benchmarks/quantization.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf

import engine
from engine.commands._record import check_output_file, conditions
from engine.device import array_module, to_numpy
from engine.errors import ConfigError
from engine.loading.download import resolve_model
from engine.loading.weight_memory import is_quantized
from engine.loading.weights import load_weights
from engine.model import Model
from engine.models.decoder import Decoder
from engine.tasks.evaluation import PerplexityResult, compare_all, perplexity, text_ids
from engine.weights import FORMATS, Weight, unpack_weight
from engine.weights.quantize import QUANTIZABLE
from tests.quality.text import SHA256, text

FILE = Path(__file__).parents[2] / "docs" / "benchmarks" / "quantization.json"
NUM_TOKENS = 50_000


@dataclass(frozen=True)
class Case:
    """A format: its name, and the options of `engine.load` that give it.

    With `rounded_to`, only the rounding of the weights is measured: the matrices of layers are
    quantized to this format, and computed with as dense float32 weights. No product of the format
    takes part. With `by_gguf`, the gguf package quantizes them, by llama.cpp's formulas.
    `pages` is the `kv_cache_dtype`; with `calibrated`, the scales of pages are chosen by 2,048
    tokens of the text that are not scored.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    rounded_to: str = ""
    by_gguf: bool = False
    pages: str = "auto"
    calibrated: bool = False

    def load(self, model: str, device: str) -> Model:
        """Return the model in this format."""
        if not self.rounded_to:
            made = engine.load(model, device=device, **self.options)
            if self.calibrated:
                ids = text_ids(made, text())[0][NUM_TOKENS : NUM_TOKENS + 2048]
                made.calibrate_kv_scales([ids[i : i + 512] for i in range(0, len(ids), 512)])
            return made
        plain = engine.load(model, device=device, **self.options)
        how = plain.load_config
        weights = load_weights(
            resolve_model(model),
            plain.config,
            device=how.device,
            dtype=how.dtype,
            quantization=None if self.by_gguf else FORMATS[self.rounded_to],
            max_model_len=how.max_model_len,
            progress=False,
        )
        dense = {name: self._rounded(name, weight) for name, weight in weights.items()}
        return Model(Decoder(plain.config, dense, how.max_model_len), how)

    def _rounded(self, name: str, weight: Weight) -> Weight:
        if self.by_gguf and is_quantized(name):
            kind = gguf.GGMLQuantizationType[self.rounded_to.upper()]
            codes = gguf.quants.quantize(to_numpy(weight.data), kind)
            array = gguf.quants.dequantize(codes, kind)
            return Weight.dense(array_module(weight.data).asarray(array, weight.data.dtype))
        return weight if weight.format.is_dense else Weight.dense(unpack_weight(weight))


_FLOAT32 = {"dtype": "float32", "quantization": "none"}
_BFLOAT16 = {"dtype": "bfloat16", "quantization": "none"}
CASES = (
    Case("float32", _FLOAT32),
    Case("bfloat16", _BFLOAT16),
    *(Case(form, {"dtype": "bfloat16", "quantization": form}) for form in QUANTIZABLE),
    *(Case(f"{form} pages", _BFLOAT16, pages=form) for form in ("fp8", "int8")),
    *(
        Case(f"{form} pages, calibrated", _BFLOAT16, pages=form, calibrated=True)
        for form in ("fp8", "int8")
    ),
    *(Case(f"{form}, weights only", _FLOAT32, form) for form in ("fp8", "int8", "q8_0")),
    Case("q8_0 of gguf, weights only", _FLOAT32, "q8_0", by_gguf=True),
)
BASELINE = "bfloat16"  # the format that the others' perplexity is held against
OTHERS = (  # measured only where they are named
    *(
        Case(f"{form}, weights only", _FLOAT32, form)
        for form in QUANTIZABLE
        if form not in ("fp8", "int8", "q8_0")
    ),
    *(
        Case(f"{form} of gguf, weights only", _FLOAT32, form, by_gguf=True)
        for form in ("q5_1", "q5_0", "q4_1", "q4_0")
    ),
)


def measure(
    cases: Sequence[Case], model: str, num_tokens: int, context: int, device: str
) -> tuple[Any, list[dict[str, Any]]]:
    """Return the device and a row for each case; the first one is the reference of the others.

    All are in memory at the same time, so that the reference is computed once.
    """
    reference, *others = [case.load(model, device) for case in cases]
    token_ids, bos = text_ids(engine.load(model, device="cpu"), text())
    how: dict[str, Any] = {"context": context, "bos_token_id": bos, "progress": sys.stderr.isatty()}
    token_ids = token_ids[:num_tokens]
    if not others:
        return reference.device, [
            _row(cases[0], reference, perplexity(reference, token_ids, **how))
        ]
    pages = [case.pages for case in cases[1:]]
    results = compare_all(others, reference, token_ids, kv_cache_dtypes=pages, **how)
    rows = [_row(cases[0], reference, results[0].reference)]
    for case, other, result in zip(cases[1:], others, results, strict=True):
        rows.append(_row(case, other, result.model))
        rows[-1] |= {
            "ratio": result.ratio,
            "ratio error": result.ratio_error,
            "kl_mean": result.kl_mean,
            "kl_error": result.kl_error,
            "kl_p99": result.kl_p99,
            "top1_agreement": result.top1_agreement,
        }
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
    known = {case.name: case for case in (*CASES, *OTHERS)}
    standard = [case.name for case in CASES]
    parser.add_argument("names", nargs="*", help=f"of {', '.join(known)}; none: {standard}")
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
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        parser.error(f"no format is called {unknown[0]!r}; there are {', '.join(known)}")
    try:
        check_output_file(arguments.json)
    except ConfigError as error:
        parser.error(str(error))
    chosen = [known[name] for name in arguments.names or standard]
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
