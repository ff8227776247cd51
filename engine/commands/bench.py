"""`engine bench latency | throughput | prefill | startup`: measure a model on this machine."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from engine import __version__
from engine.device import Device

__all__ = ["add_arguments", "run"]

_KINDS = {
    "latency": "one request, greedy: milliseconds a token",
    "throughput": "256 requests of 100 to 1024 tokens in and out: tokens a second",
    "prefill": "16 prompts of 4096 tokens: prompt tokens a second",
    "startup": "a new process: seconds until the first token, without and with cached kernels",
}
_DEFAULTS = {"latency": (1, 128, 512), "throughput": (256, 1024, 1024), "prefill": (16, 4096, 1)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    kinds = "; ".join(f"{name}: {text}" for name, text in _KINDS.items())
    parser.add_argument("kind", choices=_KINDS, metavar="kind", help=kinds)
    parser.add_argument(
        "--model",
        default="qwen3-0.6b",
        help="a built-in configuration (random weights): qwen2.5-0.5b, qwen3-0.6b, llama-3.2-1b, "
        "llama-3.1-8b; or a name, folder, .gguf file or hub id",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 or auto")
    parser.add_argument("--dtype", default="auto", help="float32, float16, bfloat16 or auto")
    parser.add_argument("--load-format", default="auto", help="dummy takes random weights")
    parser.add_argument("--num-requests", type=int, help="how many requests")
    parser.add_argument("--prompt-len", type=int, help="tokens of a prompt (throughput: at most)")
    parser.add_argument("--output-len", type=int, help="tokens of an output (latency)")
    parser.add_argument("--repeats", type=int, default=3, help="runs, of which the median counts")
    parser.add_argument("--max-num-seqs", type=int, help="most requests at once")
    parser.add_argument("--max-num-batched-tokens", type=int, help="token budget of a step")
    parser.add_argument("--no-cuda-graphs", action="store_true", help="launch kernel by kernel")
    parser.add_argument("--no-async", action="store_true", help="wait for each step")
    parser.add_argument("--compare", action="store_true", help="transformers beside it (latency)")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--in-child", action="store_true", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print a table, and write JSON if asked for."""
    from engine.commands import _bench_startup

    if arguments.in_child:
        _bench_startup.child(arguments)
        return 0
    if arguments.kind == "startup":
        from engine.device import resolve_device

        device = resolve_device(arguments.device)[0]
        rows = _bench_startup.measure(arguments)
    else:
        device, rows = _measure(arguments)
    for row in rows:
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{v}" for k, v in row.items()))
    if arguments.json is not None:
        record = {**_conditions(device), "rows": rows}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _measure(arguments: argparse.Namespace) -> tuple[Device, list[dict[str, Any]]]:
    from engine.commands import _bench_compare, _bench_workloads
    from engine.commands._bench_models import make_engine
    from engine.commands._bench_workloads import Work

    kind = arguments.kind
    given = (arguments.num_requests, arguments.prompt_len, arguments.output_len)
    sizes = [a if a is not None else b for a, b in zip(given, _DEFAULTS[kind], strict=True)]
    length = sizes[1] + max(sizes[1:] if kind == "throughput" else sizes[2:])
    engine = make_engine(arguments, max_model_len=length, max_num_seqs=max(1, sizes[0]))
    max_id = min(9999, engine.model.config.vocab_size - 1)
    if kind == "throughput":
        work = Work.mixed(sizes[0], sizes[1], max_id)
        _bench_workloads.serve(engine, Work.mixed(min(8, sizes[0]), min(64, sizes[1]), max_id))
    else:
        work = Work.same(sizes[0], sizes[1], sizes[2], max_id)
    row = {
        "kind": kind,
        "model": arguments.model,
        "dtype": engine.model.dtype,
        "num_requests": sizes[0],
        "prompt_tokens": work.num_prompt_tokens,
        "output_tokens": work.num_output_tokens,
        "cuda_graphs": engine.config.cuda_graphs,
    }
    row |= getattr(_bench_workloads, kind)(engine, work, arguments.repeats)
    device = engine.model.device
    engine.close()
    engine.model.close()
    rows = [row]
    if arguments.compare and kind == "latency":
        rows.append(_bench_compare.transformers_latency(arguments, work, arguments.repeats))
    return device, rows


def _conditions(device: Device) -> dict[str, str]:
    """Return what a figure means nothing without: card, date, version, commit, command."""
    if device.is_cuda:
        card = device.xp.cuda.runtime.getDeviceProperties(device.index)["name"].decode()
    else:
        card = f"{platform.machine()}, {os.cpu_count()} cores"
    commit = os.environ.get("ENGINE_COMMIT", "")
    folder = Path(__file__).parents[2]
    if not commit and (folder / ".git").exists():
        command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "card": card,
        "date": datetime.date.today().isoformat(),
        "version": __version__,
        "commit": commit or "unknown",
        "command": "engine " + " ".join(sys.argv[1:]),
    }
