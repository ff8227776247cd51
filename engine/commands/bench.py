"""`engine bench latency | throughput | prefill | startup [MODEL]`: measure a model here.

`engine bench serve` is a separate command; see `bench_serve/`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from engine.commands._overrides import add_override_arguments
from engine.commands._parallel import add_parallel_argument, parallel_option
from engine.commands._parser import (
    MODEL_HELP,
    add_positional_model,
    chosen_model,
    option_name,
    split_kind,
)
from engine.commands._quantization import add_quantization_argument, quantization_option
from engine.commands._record import check_output_file, write_record
from engine.commands._speculation import add_speculation_argument
from engine.device import Device
from engine.errors import ConfigError
from engine.loading.built_in import built_in_names
from engine.model_files import excerpt

__all__ = ["add_arguments", "run"]

_KINDS = {
    "latency": "one greedy request, 128 prompt and 512 output tokens: milliseconds per token",
    "throughput": "256 requests, 100 to 1024 prompt and output tokens: tokens per second",
    "prefill": "16 prompts of 4096 tokens: prompt tokens per second",
    "startup": "a new process: seconds until the first token, without and with cached kernels",
}
_DEFAULTS = {"latency": (1, 128, 512), "throughput": (256, 1024, 1024), "prefill": (16, 4096, 1)}
_REPEATS = 3
_MAX_REPEATS = 10_000
_MAX_COUNT = 1 << 24

_COUNTS = (
    *("num_requests", "prompt_len", "output_len", "repeats"),
    *("max_num_seqs", "max_num_batched_tokens"),
)
_MEANT_FOR = {
    "num_requests": ("latency", "throughput", "prefill"),
    "prompt_len": ("latency", "throughput", "prefill"),
    "output_len": ("latency", "throughput"),
    "repeats": ("latency", "throughput", "prefill"),
    "compare": ("latency",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = "`engine bench serve --help`: benchmark a server that is already running."
    kinds = "; ".join(f"{name}: {text}" for name, text in _KINDS.items())
    parser.add_argument("kind", nargs="?", help=f"{kinds} (default: latency)")
    add_positional_model(
        parser,
        "a built-in configuration (random weights; default: qwen3-0.6b): "
        f"{', '.join(built_in_names())}; or a {MODEL_HELP}",
    )
    parser.add_argument("--model", help="the same as MODEL")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 or auto")
    parser.add_argument("--dtype", default="auto", help="float32, float16, bfloat16 or auto")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    add_quantization_argument(parser)
    parser.add_argument("--kv-cache-dtype", default="auto", help="fp8 or int8: halves the KV cache")
    add_speculation_argument(parser)
    add_override_arguments(parser)
    add_parallel_argument(parser)
    parser.add_argument("--num-requests", type=int, help="number of requests")
    parser.add_argument("--prompt-len", type=int, help="tokens per prompt (throughput: maximum)")
    parser.add_argument("--output-len", type=int, help="tokens per output (throughput: maximum)")
    parser.add_argument("--repeats", type=int, help="runs; the median is reported (default 3)")
    parser.add_argument("--max-num-seqs", type=int, help="maximum number of running requests")
    parser.add_argument("--max-num-batched-tokens", type=int, help="token budget per step")
    parser.add_argument("--no-cuda-graphs", action="store_true", help="launch kernels one by one")
    parser.add_argument("--no-async", action="store_true", help="disable async scheduling")
    parser.add_argument("--compare", action="store_true", help="measure transformers too (latency)")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--in-child", action="store_true", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark, print a table, and write the --json file."""
    arguments.kind, named = split_kind((arguments.kind, arguments.named_model), [*_KINDS])
    arguments.model = chosen_model(named, arguments.model, "qwen3-0.6b")
    # Imported lazily: a child process times the import of the engine itself.
    from engine.commands import _bench_startup

    if arguments.in_child:
        _bench_startup.child(arguments)
        return 0
    _check(arguments)
    if arguments.kind == "startup":
        # Imported lazily: a child process times the import of the engine itself.
        from engine.device import resolve_device

        device = resolve_device(arguments.device)[0]
        rows = _bench_startup.measure(arguments)
    else:
        device, rows = _measure(arguments)
    for row in rows:
        print("  ".join(_cell(name, value) for name, value in row.items()))
    if arguments.json is not None:
        write_record(arguments.json, device, {"rows": rows})
    return 0


def _cell(name: str, value: Any) -> str:
    """Format a table cell: a string as it is, a number with its name."""
    if isinstance(value, str):
        return value
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"


def _check(arguments: argparse.Namespace) -> None:
    """Reject invalid options before loading anything."""
    kind = arguments.kind
    for name in _COUNTS:
        value = getattr(arguments, name)
        least = 2 if (kind, name) == ("latency", "output_len") else 1  # at least one decode step
        most = _MAX_REPEATS if name == "repeats" else _MAX_COUNT
        if value is not None and not least <= value <= most:
            raise ConfigError(
                f"{option_name(name)} must be from {least} to {most}; got {excerpt(value)}"
            )
    for name, kinds in _MEANT_FOR.items():
        if getattr(arguments, name) and kind not in kinds:
            raise ConfigError(f"{option_name(name)} applies to {', '.join(kinds)}; got {kind}")
    if arguments.compare:
        # Imported lazily: a child process times the import of the engine itself.
        from engine.commands import _bench_compare

        _bench_compare.check(arguments)
    if arguments.json is not None:
        check_output_file(arguments.json)


def _sizes(arguments: argparse.Namespace) -> tuple[int, int, int]:
    """Return the number of requests, and the prompt and output lengths (throughput: maximums)."""
    num_requests, prompt_len, output_len = _DEFAULTS[arguments.kind]
    if arguments.prompt_len and arguments.kind == "throughput":
        output_len = arguments.prompt_len
    return (
        arguments.num_requests or num_requests,
        arguments.prompt_len or prompt_len,
        arguments.output_len or output_len,
    )


def _measure(arguments: argparse.Namespace) -> tuple[Device, list[dict[str, Any]]]:
    # Imported lazily: a child process times the import of the engine itself.
    from engine.commands import _bench_compare, _bench_workloads
    from engine.commands._bench_models import make_engine
    from engine.commands._bench_workloads import Work

    kind = arguments.kind
    repeats = arguments.repeats or _REPEATS
    num_requests, prompt_len, output_len = _sizes(arguments)
    length = prompt_len + output_len
    engine = make_engine(arguments, max_model_len=length, max_num_seqs=num_requests)
    max_id = min(9999, engine.model.config.vocab_size - 1)
    if kind == "throughput":
        work = Work.mixed(num_requests, prompt_len, max_id, longest_output=output_len)
        warm_up = (min(8, num_requests), min(64, prompt_len), max_id)
        _bench_workloads.serve(engine, Work.mixed(*warm_up, longest_output=min(64, output_len)))
    else:
        work = Work.same(num_requests, prompt_len, output_len, max_id)
    row = {
        "kind": kind,
        "model": arguments.model,
        "dtype": engine.model.dtype,
        **quantization_option(arguments),
        **parallel_option(arguments),
        "num_requests": num_requests,
        "prompt_tokens": work.num_prompt_tokens,
        "output_tokens": work.num_output_tokens,
        "cuda_graphs": engine.config.cuda_graphs,
    }
    row |= getattr(_bench_workloads, kind)(engine, work, repeats)
    device = engine.model.device
    engine.close()
    engine.model.close()
    rows = [row]
    if arguments.compare:
        same = {"dtype": row["dtype"], "device": str(device)}
        rows.append(_bench_compare.transformers_latency(arguments, work, repeats, **same))
    return device, rows
