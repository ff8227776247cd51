"""``python -m tests.fuzz``: see the package."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests.fuzz.driver import Campaign, Result, replay

SHARES = {  # of the cases: how much there is to find, over what a case costs
    "loader": 0.45,
    "template": 0.15,
    "tokenizer": 0.15,
    "api": 0.19,
    "cli": 0.01,
    "scheduler": 0.05,
}
_ROW = "{:10} {:>8} {:>9} {:>9} {:>9} {:>10}"


def main(argv: list[str] | None = None) -> int:
    """Return 0 if everything held, 1 if something failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, help="number of inputs (default 2000)")
    parser.add_argument("--seconds", type=float, help="wall time, instead of a number of inputs")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same inputs")
    parser.add_argument("--only", choices=SHARES, action="append", help="repeatable")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="worker processes")
    parser.add_argument("--keep", type=Path, default=Path(".fuzz"), help="folder of failing inputs")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run one kept input again")
    options = parser.parse_args(argv)
    if options.replay is not None:
        return 0 if replay(options.replay, sys.stdout) else 1
    if options.cases is None and options.seconds is None:
        options.cases = 2000
    results = _run(options)
    _print(results)
    return 1 if any(result.num_failures for result in results) else 0


def _run(options: argparse.Namespace) -> list[Result]:
    chosen = {name: SHARES[name] for name in SHARES if name in (options.only or SHARES)}
    whole, results = sum(chosen.values()), []
    for name, share in chosen.items():
        cases = None if options.cases is None else round(options.cases * share / whole)
        seconds = None if options.seconds is None else options.seconds / len(chosen)
        campaign = Campaign(name, options.seed, options.keep, max(options.jobs or 1, 1), sys.stdout)
        results.append(campaign.run(cases, seconds))
    return results


def _print(results: list[Result]) -> None:
    print(_ROW.format("target", "inputs", "outcomes", "failures", "inputs/s", "slowest/s"))
    for r in results:
        rate = f"{r.num_cases / max(r.seconds, 1e-9):.1f}"
        slowest = f"{r.slowest:.2f}"
        print(_ROW.format(r.target, r.num_cases, len(r.outcomes), r.num_failures, rate, slowest))
        for kind, count in r.kinds.most_common():
            print(f"  {count} x {kind}")


if __name__ == "__main__":
    sys.exit(main())
