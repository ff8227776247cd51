"""`engine bench serve`: benchmark any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.commands._http import Server, api_key
from engine.commands._parser import option_name
from engine.commands._record import check_output_file, write_record
from engine.commands.bench_serve.driver import Target, run_load
from engine.commands.bench_serve.figures import describe, parse_goodput, summarize, table
from engine.commands.bench_serve.worker import event_loop_name
from engine.commands.bench_serve.workload import (
    CHAT,
    COMPLETIONS,
    Job,
    Lengths,
    arrivals,
    file_jobs,
    random_jobs,
)
from engine.device import resolve_device
from engine.errors import ConfigError, EngineError
from engine.model_files import excerpt

__all__ = ["add_arguments", "run"]

_MOST = {
    "num_prompts": (1, 1 << 20),
    "num_warmups": (0, 1 << 16),
    "workers": (1, 256),
    "random_input_len": (1, 1 << 24),
    "random_output_len": (1, 1 << 24),
    "random_prefix_len": (0, 1 << 24),
    "random_vocab_size": (1, 1 << 24),
    "custom_output_len": (1, 1 << 24),
    "max_concurrency": (1, 1 << 16),
}
_EPILOG = (
    "Options have the names of `vllm bench serve`. A request's time begins when it is sent, after "
    "any wait for --max-concurrency. The size of an answer is bounded: an endless stream counts as "
    "a failure. The figures are those of requests without a failure."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    _add_server_arguments(parser)
    _add_load_arguments(parser)
    _add_data_arguments(parser)
    _add_result_arguments(parser)


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="URL of the server")
    add("--endpoint", default=COMPLETIONS, choices=(COMPLETIONS, CHAT), help="API endpoint")
    add("--model", help="the model's name on the server (default: the first that it lists)")
    add("--api-key", help="sent as a bearer token (default: OPENAI_API_KEY)")
    add("--timeout", type=float, default=600.0, help="maximum seconds per request")


def _add_load_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--num-prompts", type=int, default=1000, help="requests per run")
    add(
        "--request-rate",
        type=float,
        default=math.inf,
        help="requests per second; inf: all at once",
    )
    add(
        "--burstiness",
        type=float,
        default=1.0,
        help="1: Poisson process; less: bursts; more: more regular; inf: equal intervals",
    )
    add(
        "--max-concurrency",
        type=int,
        nargs="+",
        help="maximum requests in flight; one run per value",
    )
    add("--num-warmups", type=int, default=1, help="unmeasured requests before the runs")
    add("--workers", type=int, default=1, help="processes that generate the load")
    add("--seed", type=int, default=0, help="seed for prompts, lengths and intervals")


def _add_data_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dataset-name", choices=("random", "custom"), help="custom: the file of --dataset-path")
    add(
        "--dataset-path",
        type=Path,
        help='JSONL file: {"prompt": ...} or {"messages": [...]}, optionally with "output_tokens"',
    )
    add(
        "--custom-output-len",
        type=int,
        default=256,
        help="output_tokens for lines without that field",
    )
    add("--random-input-len", type=int, default=1024, help="tokens per prompt")
    add("--random-output-len", type=int, default=128, help="tokens per output")
    add(
        "--random-range-ratio",
        type=float,
        default=0.0,
        help="vary both lengths from (1 - ratio) to (1 + ratio) times the given value",
    )
    add("--random-prefix-len", type=int, default=0, help="tokens of a prefix shared by all prompts")
    add("--random-vocab-size", type=int, default=10_000, help="exclusive upper bound of token ids")
    add("--ignore-eos", action="store_true", help="generate past the end token")
    add("--temperature", type=float, default=0.0, help="0: greedy (default)")
    add("--extra-body", default="{}", help="additional request fields, as a JSON object")


def _add_result_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count requests that meet these limits: ttft:200 tpot:50 e2el:5000",
    )
    add("--json", type=Path, help="also write the result to this file")
    add("--save-detailed", action="store_true", help="include each request's times in --json")
    add(
        "--metadata",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="stored in the --json file, such as card=H200",
    )
    add("--plot", type=Path, help="also draw the result to this .png or .svg file")


def run(arguments: argparse.Namespace) -> int:
    """Run and print each benchmark; return 1 if every request of a run failed."""
    _check(arguments)
    goals = parse_goodput(arguments.goodput)
    metadata = _metadata(arguments.metadata)
    extra = _extra_body(arguments.extra_body)
    jobs = _jobs(arguments)
    moments = arrivals(len(jobs), arguments.request_rate, arguments.burstiness, arguments.seed)
    target = _target(arguments, extra)
    _warm_up(target, jobs[0], arguments.num_warmups)
    rows = []
    details = []
    for limit in arguments.max_concurrency or [0]:
        answers = run_load(
            target,
            jobs,
            moments,
            max_concurrency=limit,
            workers=arguments.workers,
            progress=sys.stderr.isatty(),
        )
        rows.append(_conditions(arguments, target, limit) | summarize(jobs, answers, goals))
        details.append(describe(jobs, answers))
        _print(rows[-1], answers)
    _keep(arguments, metadata, rows, details)
    return 0 if all(row["completed"] for row in rows) else 1


def _check(arguments: argparse.Namespace) -> None:
    """Reject invalid options before sending anything."""
    for name, (least, most) in _MOST.items():
        given = getattr(arguments, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not least <= value <= most:
                raise ConfigError(
                    f"{option_name(name)} must be from {least} to {most}; got {excerpt(value)}"
                )
    for name in ("request_rate", "burstiness", "timeout"):
        value = getattr(arguments, name)
        if not value > 0 or (name == "timeout" and math.isinf(value)):
            raise ConfigError(f"{option_name(name)} must be above 0; got {value}")
    if not 0 <= arguments.random_range_ratio < 1:
        raise ConfigError(
            f"--random-range-ratio must be in [0, 1); got {arguments.random_range_ratio}"
        )
    if not 0 <= arguments.temperature < math.inf:
        raise ConfigError(f"--temperature must be at least 0; got {arguments.temperature}")
    has_file = arguments.dataset_path is not None
    if arguments.dataset_name == "custom" and not has_file:
        raise ConfigError("--dataset-name custom needs --dataset-path")
    if arguments.dataset_name == "random" and has_file:
        raise ConfigError("--dataset-name random takes no --dataset-path")
    _check_files(arguments)


def _check_files(arguments: argparse.Namespace) -> None:
    if arguments.json is not None:
        check_output_file(arguments.json)
    elif arguments.save_detailed or arguments.metadata:
        raise ConfigError("--save-detailed and --metadata need --json")
    if arguments.plot is not None:
        # Imported lazily: matplotlib is an extra, and only this option needs it.
        from engine.commands.bench_serve import plot

        plot.check(arguments.plot)


def _metadata(given: Sequence[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in given]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise ConfigError(f"--metadata must be NAME=VALUE; got {excerpt(name)!r}")
    return {name: value for name, _, value in pairs}


def _extra_body(given: str) -> dict[str, Any]:
    try:
        body = json.loads(given)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise ConfigError(f"--extra-body must be a JSON object; got {excerpt(given)}")
    return body


def _jobs(arguments: argparse.Namespace) -> list[Job]:
    count = arguments.num_prompts
    endpoint = arguments.endpoint
    if arguments.dataset_path is not None:
        return file_jobs(arguments.dataset_path, count, endpoint, arguments.custom_output_len)
    lengths = Lengths(
        arguments.random_input_len,
        arguments.random_output_len,
        arguments.random_range_ratio,
        arguments.random_prefix_len,
    )
    return random_jobs(count, lengths, endpoint, arguments.seed, arguments.random_vocab_size)


def _target(arguments: argparse.Namespace, extra: dict[str, Any]) -> Target:
    key = api_key(arguments.api_key)
    server = Server.parse("--base-url", arguments.base_url, key=key)
    body: dict[str, Any] = {"temperature": arguments.temperature}
    if arguments.ignore_eos:
        body["ignore_eos"] = True
    return Target(
        host=server.host,
        port=server.port,
        tls=server.tls,
        path=server.prefix + arguments.endpoint,
        endpoint=arguments.endpoint,
        model=arguments.model or server.models()[0],
        api_key=key,
        body=body | extra,
        timeout=arguments.timeout,
    )


def _warm_up(target: Target, job: Job, count: int) -> None:
    """Send requests one at a time; the first failure ends the command."""
    if count:
        answers = run_load(target, [job] * count, [0.0] * count, max_concurrency=1)
        for answer in answers:
            if answer.failure:
                raise EngineError(f"a request before the measurement failed: {answer.detail}")


def _conditions(arguments: argparse.Namespace, target: Target, limit: int) -> dict[str, Any]:
    is_random = arguments.dataset_path is None
    names = ["input_len", "output_len", "range_ratio", "prefix_len"] if is_random else []
    finite = math.isfinite(arguments.request_rate)
    return {
        "endpoint": target.endpoint,
        "model": target.model,
        "dataset": "random" if is_random else str(arguments.dataset_path),
        **{f"random_{name}": getattr(arguments, f"random_{name}") for name in names},
        "num_prompts": arguments.num_prompts,
        "request_rate": arguments.request_rate if finite else "inf",
        "burstiness": arguments.burstiness if math.isfinite(arguments.burstiness) else "inf",
        "max_concurrency": limit or None,
        "workers": arguments.workers,
        "event_loop": event_loop_name(),
        "seed": arguments.seed,
    }


def _print(row: dict[str, Any], answers: Sequence[Any]) -> None:
    limit = row["max_concurrency"]
    rate = row["request_rate"]
    what = "no limit" if limit is None else f"at most {limit}"
    print(f"{row['num_prompts']} requests, {rate} requests/s, {what} in flight")
    print(table(row))
    for reason, count in row["failures"].items():
        first = next(answer.detail for answer in answers if answer.failure == reason)
        print(f"failed     {count} x {reason}; the first: {excerpt(first)}")
    if row["short_outputs"]:
        print(f"short      {row['short_outputs']} answers have fewer tokens than asked for")
    if row["without_usage"]:
        print(f"usage      {row['without_usage']} answers gave none: their chunks are counted")


def _keep(
    arguments: argparse.Namespace,
    metadata: dict[str, str],
    rows: list[dict[str, Any]],
    details: list[dict[str, list[Any]]],
) -> None:
    """Write the files of --json and --plot."""
    if arguments.json is not None:  # first: a drawing that fails must not lose the measurement
        kept = rows
        if arguments.save_detailed:
            kept = [row | {"requests": one} for row, one in zip(rows, details, strict=True)]
        cpu = resolve_device("cpu")[0]
        content = {"measures": "a server, from a client", **metadata, "rows": kept}
        write_record(arguments.json, cpu, content)
    if arguments.plot is not None:
        # Imported lazily: matplotlib is an extra, and only this option needs it.
        from engine.commands.bench_serve import plot

        plot.draw(arguments.plot, rows, details)
