"""`python -m tests.bench OP [OP ...] [--json FILE]`: verify, time, print one table; or `--list`."""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np

from engine import device
from engine.errors import ConfigError, DeviceError
from engine.testing.timing import time_cpu, time_gpu
from tests.bench import listing
from tests.bench.case import num_copies


def _measure(case, xp):
    on_gpu = xp is not np
    copies = (case.copies or num_copies(case.nbytes)) if on_gpu else 1
    args = [case.make(xp, 100 * i) for i in range(copies)]
    if case.check is not None:
        case.check(args[0], case.run(*args[0]))

    def seconds(run):
        if on_gpu:
            return time_gpu([lambda a=a: run(*a) for a in args])
        return time_cpu(lambda: run(*args[0]), repeats=5)

    row = {"case": case.name, "us": seconds(case.run) * 1e6}
    row["GB/s"] = case.nbytes / row["us"] * 1e-3
    row["TFLOP/s"] = case.flops / row["us"] * 1e-6
    for name, baseline in (case.baselines or {}).items():
        row[f"{name} us"] = seconds(baseline) * 1e6
        row[f"x {name}"] = row[f"{name} us"] / row["us"]
    if case.peers and on_gpu:
        args.clear()
        xp.get_default_memory_pool().free_all_blocks()  # peers use their own memory pools
        for name, peer in case.peers.items():
            row |= _peer_columns(name, peer, case.nbytes, row["us"])
    return row


def _peer_columns(name, peer, nbytes, us):
    """Return a peer's columns, or why it has none: a peer's error must not end the benchmark."""
    try:
        theirs = peer() * 1e6
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        return {f"no {name}": f"{type(error).__name__}: {reason}"}
    return {f"{name} us": theirs, f"{name} GB/s": nbytes / theirs * 1e-3, f"x {name}": theirs / us}


def _line(row):
    """Return a row as text: op and case unlabelled, all numbers and reasons labelled."""
    parts = []
    for name, value in row.items():
        if isinstance(value, float):
            parts.append(f"{name} {value:.4g}")
        else:
            parts.append(f"{name} ({value})" if name.startswith("no ") else value)
    return "  ".join(parts)


def _conditions(chosen):
    """Return the provenance of the figures: card, date, commit, command."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    if chosen.is_cuda:
        card = chosen.xp.cuda.runtime.getDeviceProperties(chosen.index)["name"].decode()
    else:
        card = f"{platform.machine()}, {os.cpu_count()} cores"
    return {
        "card": card,
        "date": datetime.date.today().isoformat(),
        "commit": commit or os.environ.get("ENGINE_COMMIT", "unknown"),
        "command": "python -m tests.bench " + " ".join(sys.argv[1:]),
    }


def main() -> None:
    known = [each.name for each in listing.benchmarks()]
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("ops", nargs="*", metavar="OP", help="a name that --list prints, or all")
    parser.add_argument("--list", action="store_true", help="print every benchmark in a line")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    if options.list:
        print(listing.table())
        return
    unknown = [op for op in options.ops if op not in (*known, "all")]
    if unknown or not options.ops:
        said = f"no benchmark is called {unknown[0]!r}" if unknown else "name a benchmark"
        parser.error(f"{said}; python -m tests.bench --list prints all")
    if options.json is not None and (options.json.is_dir() or not options.json.parent.is_dir()):
        parser.error(f"--json must be a file in a folder that exists; got {options.json}")
    try:
        chosen, reason = device.resolve_device(options.device)
    except (ConfigError, DeviceError) as error:
        parser.error(str(error))
    chosen.activate()
    print(f"device {chosen}: {reason}")
    rows = []
    for op in known if "all" in options.ops else options.ops:
        module = importlib.import_module(f"tests.bench.bench_{op}")
        if hasattr(module, "main"):
            rows += module.main(chosen) if module.main.__code__.co_argcount else module.main()
            continue
        for case in module.CASES:
            row = {"op": op, **_measure(case, chosen.xp)}
            rows.append(row)
            print(_line(row))
    if options.json:
        record = {**_conditions(chosen), "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
