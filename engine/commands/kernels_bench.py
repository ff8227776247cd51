"""`engine kernels bench FILE.py | OP`: time a kernel of the user's own, or an op of the catalog."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine import kernels
from engine.commands._kernel_options import dtype_names, sizes_of
from engine.commands._record import check_output_file, commit_of, write_record
from engine.commands.kernels import op_names
from engine.device import Device, resolve_device
from engine.errors import ConfigError, did_you_mean
from engine.kernels._module import source_dir
from engine.kernels._tools.bench import bench_cases
from engine.kernels._tools.bench_report import BenchReport
from engine.kernels._user.files import load_name, load_ops
from engine.testing.bench_case import cases_for_cpu

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "target", help="FILE.py, FILE.py:NAME, or an op of the catalog (in a checkout)"
    )
    parser.add_argument(
        "--sizes",
        action="append",
        default=[],
        help="a shape, such as T=8192,N=4096; may be repeated (default: bench= of the definition)",
    )
    parser.add_argument("--dtype", default="", help="dtypes of scalar_t, such as float16,bfloat16")
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="NAME=FILE.py:FUNCTION",
        help="time this function of the same arguments beside it; may be repeated",
    )
    parser.add_argument("--warm", action="store_true", help="leave the inputs in L2")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 or auto")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, help="draw a roofline into this file, such as x.png")


def run(arguments: argparse.Namespace) -> int:
    """Measure; return 1 if a result is wrong, or faster than the card can be."""
    for option, file in (("--json", arguments.json), ("--plot", arguments.plot)):
        if file is not None:
            check_output_file(file, option)
    chosen = resolve_device(arguments.device)[0]
    chosen.activate()
    if arguments.plot is not None and not chosen.is_cuda:
        raise ConfigError("--plot draws the limits of a GPU; this run is on a CPU")
    is_own = ".py" in arguments.target
    reports = []
    for report in _own(arguments) if is_own else [_catalog(arguments, chosen)]:
        print(report, end="\n\n", flush=True)
        reports.append(report)
    if arguments.json is not None:
        _write(arguments, chosen, reports)
    if arguments.plot is not None:
        _plot(arguments.plot, reports)
    return 0 if all(report.ok for report in reports) else 1


def _own(arguments: argparse.Namespace) -> Iterator[BenchReport]:
    against = dict(_rival(text) for text in arguments.against)
    options: dict[str, Any] = {"warm": arguments.warm, "device": arguments.device}
    sizes = [sizes_of(text) for text in arguments.sizes] or None
    ops = [*load_ops(arguments.target).values()]
    known = {name for op in ops for name in op.signature.scalar_dtypes}
    for op in ops:
        # An op takes the dtypes that it has, or its own; one that no op has is an error.
        names = [
            name
            for name in dtype_names(arguments.dtype)
            if name in op.signature.scalar_dtypes or name not in known
        ]
        yield kernels.bench(op, sizes, names, against=against, **options)


def _rival(text: str) -> tuple[str, Callable[..., Any]]:
    name, _, target = text.partition("=")
    if not target:
        raise ConfigError(f"--against must be NAME=FILE.py:FUNCTION; got {text!r}")
    function = load_name(target)
    if not callable(function):
        raise ConfigError(f"--against must name a function; {target} is {function!r}")
    return name, function


def _catalog(arguments: argparse.Namespace, device: Device) -> BenchReport:
    """Measure the cases of an op's benchmark, which a checkout holds in tests/bench/."""
    op = arguments.target
    if op not in op_names():
        hint = did_you_mean(op, op_names())
        raise ConfigError(
            "op must be a Python file or one of those that `engine kernels` lists; got "
            f"{op!r}{hint}"
        )
    if arguments.sizes or arguments.dtype or arguments.against or arguments.warm:
        raise ConfigError("--sizes, --dtype, --against and --warm are for a kernel of your own")
    root = source_dir().parent
    if not (root / "tests" / "bench").is_dir():
        raise ConfigError(
            f"the benchmark of {op!r} comes with a checkout of the repository, not with the "
            "installed package; engine kernels bench FILE.py measures a kernel of your own"
        )
    sys.path.insert(0, str(root))
    try:
        module = importlib.import_module(f"tests.bench.bench_{op}")
    finally:
        sys.path.remove(str(root))
    if not hasattr(module, "CASES"):
        raise ConfigError(f"{op} runs on several GPUs: python -m tests.bench {op}")
    cases = module.CASES
    if not device.is_cuda:
        cases = getattr(module, "CPU_CASES", None) or cases_for_cpu(cases)
    return bench_cases(op, cases, device)


def _write(arguments: argparse.Namespace, device: Device, reports: list[BenchReport]) -> None:
    records = [report.record() for report in reports]
    rows = [row for record in records for row in record.pop("rows")]
    more = {key: value for key, value in records[0].items() if key not in ("op", "card", "date")}
    file = arguments.target.partition(":")[0]
    if ".py" in file and (commit := commit_of(Path(file).resolve().parent)):
        more["file commit"] = commit
    write_record(arguments.json, device, {**more, "rows": rows})


def _plot(file: Path, reports: list[BenchReport]) -> None:
    for index, report in enumerate(reports):
        name = file if index == 0 else file.with_stem(f"{file.stem}_{report.op}")
        report.plot(name)
        print(f"wrote {name}")
