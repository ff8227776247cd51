"""`engine eval perplexity MODEL --file TEXT`: measure a model's quality on a text."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.commands._parser import MODEL_HELP, add_positional_model, chosen_model, split_kind
from engine.commands._quantization import add_quantization_argument, quantization_option
from engine.commands._record import check_output_file, write_record
from engine.commands._streams import read_input
from engine.errors import ConfigError, RequestError
from engine.model import Model, load
from engine.model_files import excerpt, read_file
from engine.tasks.evaluation import Comparison, PerplexityResult, compare, perplexity, text_ids

__all__ = ["add_arguments", "run"]

_MAX_BYTES = 1 << 30
_REFERENCE_OPTIONS = ("model", "dtype", "quantization", "device")
_METHOD = (
    "Windows of --context tokens do not overlap, and the second half of each is scored, as "
    "llama.cpp's tool does it; with --stride windows overlap and every token is scored once."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _METHOD
    parser.add_argument("kind", nargs="?", metavar="perplexity", help="what to measure (default)")
    add_positional_model(parser, f"{MODEL_HELP} (default: smollm2)")
    parser.add_argument("--file", required=True, help="the text, in UTF-8; - is standard input")
    parser.add_argument("--model", help="the same as MODEL")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 or auto")
    parser.add_argument("--dtype", default="auto", help="float32, float16, bfloat16 or auto")
    add_quantization_argument(parser)
    parser.add_argument(
        "--kv-cache-dtype",
        default="auto",
        help="dtype of the KV cache: auto (the model's), fp8 or int8",
    )
    parser.add_argument("--context", type=int, default=512, help="tokens per window")
    parser.add_argument("--stride", type=int, help="tokens between the starts of two windows")
    parser.add_argument("--max-tokens", type=int, help="use only this many tokens of the text")
    parser.add_argument(
        "--compare",
        metavar="REFERENCE",
        help="also measure the KL divergence from another model, or from this one with different "
        "options: a name or path, or for example dtype=float32 or model=PATH,dtype=bfloat16 "
        "(unnamed options are as above, but without --quantization)",
    )
    parser.add_argument("--json", type=Path, help="also write the result to this file")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate, print the result, and write the --json file."""
    _, named = split_kind((arguments.kind, arguments.named_model), ("perplexity",))
    arguments.model = chosen_model(named, arguments.model)
    if arguments.max_tokens is not None and arguments.max_tokens < 1:
        raise ConfigError(f"--max-tokens must be at least 1; got {arguments.max_tokens}")
    if arguments.json is not None:
        check_output_file(arguments.json)
    text = _read(arguments.file)
    reference_options = _reference_options(arguments)
    options: dict[str, Any] = {"device": arguments.device, "dtype": arguments.dtype}
    model = load(arguments.model, **options, **quantization_option(arguments))
    token_ids, bos = text_ids(model, text)
    options = {
        "context": arguments.context,
        "stride": arguments.stride,
        "bos_token_id": bos,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "progress": sys.stderr.isatty(),
    }
    num_in_file = len(token_ids)
    token_ids = token_ids[: arguments.max_tokens]
    result: PerplexityResult | Comparison
    if reference_options is None:
        _check_length(arguments, num_in_file, model.max_model_len)
        start = time.perf_counter()
        result = perplexity(model, token_ids, **options)
    else:
        reference = load(**reference_options)
        _check_tokens(reference, text, token_ids)
        _check_length(arguments, num_in_file, model.max_model_len)
        start = time.perf_counter()
        result = compare(model, reference, token_ids, **options)
        reference.close()
    seconds = time.perf_counter() - start
    print(_report(result, f"{seconds:.1f} s on {model.device}, {model.dtype}"))
    if arguments.json is not None:
        loaded = {"model": arguments.model, "dtype": model.dtype, **quantization_option(arguments)}
        loaded["kv_cache_dtype"] = arguments.kv_cache_dtype
        row = {"loaded": loaded, "num_text_tokens": len(token_ids), "seconds": seconds}
        write_record(arguments.json, model.device, {"rows": [{**row, **asdict(result)}]})
    model.close()
    return 0


def _read(file: str) -> str:
    if file == "-":
        return read_input()
    data = read_file(Path(file), _MAX_BYTES, error=RequestError)
    try:
        return data.decode("utf-8-sig")  # Some editors write a BOM.
    except UnicodeDecodeError as error:
        what = f"{error.reason} at byte {error.start}"
        raise RequestError(f"--file {excerpt(file)} must be UTF-8; {what}") from error


def _check_length(arguments: argparse.Namespace, num_tokens: int, longest: int) -> None:
    """Reject a text that is too short to score, in the words of the command."""
    if not 2 <= arguments.context <= longest:
        return  # `perplexity` rejects it
    least = arguments.context
    what = "a whole window (--context)"
    if arguments.stride is not None:
        least = 2
        what = "one to score"
    if num_tokens < least:
        name = f"--file {excerpt(arguments.file)}"
        raise RequestError(f"{name} must have at least {least} tokens, {what}; got {num_tokens}")
    most = arguments.max_tokens
    if most is not None and most < least:
        raise RequestError(f"--max-tokens must be at least {least}, {what}; got {most}")


def _reference_options(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return the keyword arguments for loading the reference model; None without --compare."""
    given = arguments.compare
    if given is None:
        return None
    options = {name: getattr(arguments, name) for name in ("model", "device", "dtype")}
    is_path = not re.match(r"\w+=", given) or os.path.exists(given)
    if is_path and not re.match(rf"({'|'.join(_REFERENCE_OPTIONS)})=", given):
        return options | {"model": given}
    for part in given.split(","):
        name, _, value = part.partition("=")
        if name not in _REFERENCE_OPTIONS or not value:
            known = ", ".join(f"{each}=" for each in _REFERENCE_OPTIONS)
            raise ConfigError(
                f"--compare must be a model, or options of {known} separated by commas; "
                f"got {excerpt(part)!r}"
            )
        options[name] = value
    return options


def _check_tokens(reference: Model, text: str, token_ids: list[int]) -> None:
    """Reject a reference model whose tokenizer returns different token ids."""
    if text_ids(reference, text)[0][: len(token_ids)] != token_ids:
        raise RequestError("--compare must name a model whose tokenizer gives the same token ids")


def _report(result: PerplexityResult | Comparison, how: str) -> str:
    """Return the text to print."""
    ours = result.model if isinstance(result, Comparison) else result
    lines = [
        f"perplexity {_figure(ours)}",
        f"of {ours.num_tokens} tokens in {ours.num_windows} windows of {ours.context}; {how}",
    ]
    if isinstance(result, Comparison):
        lines[1:1] = [
            f"reference  {_figure(result.reference)}",
            f"ratio      {result.ratio:.5f} +/- {result.ratio_error:.5f}",
            f"KL divergence {result.kl_mean:.6f} +/- {result.kl_error:.6f} nats, "
            f"99th percentile {result.kl_p99:.6f}",
            f"the most probable token is the same for {100 * result.top1_agreement:.2f} %",
        ]
    return "\n".join(lines)


def _figure(result: PerplexityResult) -> str:
    return f"{result.perplexity:.4f} +/- {result.standard_error:.4f}"
