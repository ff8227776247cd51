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

from engine import device
from engine.errors import ConfigError, DeviceError
from engine.testing.bench_case import cases_for_cpu, measure
from tests.bench import listing


def _line(row):
    """Return a row as text: op and case unlabelled, all numbers and reasons labelled."""
    parts = []
    for name, value in row.items():
        if name in ("us low", "us high"):
            continue  # in the --json file
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


def _cases(op, module, on_gpu):
    """Return the cases for the device: on a CPU those that the NumPy mirrors run in seconds."""
    if on_gpu:
        return module.CASES
    cases = getattr(module, "CPU_CASES", None) or cases_for_cpu(module.CASES)
    print(f"{op}: the mirror in NumPy, on {len(cases)} small shapes; the kernels need a GPU")
    return cases


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
        for case in _cases(op, module, chosen.is_cuda):
            row = {"op": op, **measure(case, chosen.xp).row()}
            rows.append(row)
            print(_line(row), flush=True)
    if options.json:
        record = {**_conditions(chosen), "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
