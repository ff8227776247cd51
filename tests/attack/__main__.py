"""`python -m tests.attack [KIND ...] [--json FILE]`: attack a server on the loopback.

Prints a table of figures, and exits with 1 if one has passed its limit.
"""

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

from tests.attack import KINDS
from tests.attack.figures import Figure
from tests.attack.target import ROOT, Target

_ROW = "{:9} {:54} {:>10} {:>8}  {}"


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every figure is within its limit, otherwise 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{', '.join(KINDS)}; or all")
    parser.add_argument("--scale", type=float, default=1.0, help="how much is sent (default 1)")
    parser.add_argument("--source", type=Path, default=ROOT, help="repository of the engine served")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(argv)
    unknown = [kind for kind in options.kinds if kind not in (*KINDS, "all")]
    if unknown:
        parser.error(f"no kind is called {unknown[0]!r}; there are {', '.join(KINDS)}")
    chosen = [kind for kind in KINDS if {kind, "all"} & set(options.kinds or ["all"])]
    rows: list[tuple[str, Figure]] = []
    print(_ROW.format("kind", "figure", "value", "limit", "unit"))
    for kind in chosen:
        module = importlib.import_module(f"tests.attack.{kind}")
        with Target(*getattr(module, "OPTIONS", ()), source=options.source) as target:
            for figure in module.attack(target, options.scale):
                rows.append((kind, figure))
                limit = "" if figure.limit is None else f"{figure.limit:g}"
                mark = "  PASSED ITS LIMIT" if figure.is_passed else ""
                print(
                    _ROW.format(kind, figure.name, f"{figure.value:.4g}", limit, figure.unit + mark)
                )
    if options.json is not None:
        record = _conditions(options.source, sys.argv[1:])
        record["figures"] = [
            {"kind": kind, "figure": f.name, "value": f.value, "unit": f.unit, "limit": f.limit}
            for kind, f in rows
        ]
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if any(figure.is_passed for _, figure in rows) else 0


def _conditions(source: Path, arguments: list[str]) -> dict:
    """Return the provenance of the figures: machine, date, commit, command."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.date.today().isoformat(),
        "commit": commit or "unknown",
        "command": "python -m tests.attack " + " ".join(arguments),
    }


if __name__ == "__main__":
    sys.exit(main())
