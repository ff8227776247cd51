"""`engine kernels check FILE.py`: check kernels of the user's own against their references."""

from __future__ import annotations

import argparse
from typing import Any

from engine import kernels
from engine.commands._kernel_options import sizes_of
from engine.kernels._tools.check_cases import SPECIAL
from engine.kernels._tools.sanitizer import TOOLS
from engine.kernels._user.files import load_ops

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("file", help="FILE.py, or FILE.py:NAME for one of its ops")
    parser.add_argument("--sizes", help="only this shape, such as T=3,N=5")
    parser.add_argument("--dtype", default="", help="only this dtype of scalar_t")
    parser.add_argument("--seed", type=int, default=0, help="seed of the arguments")
    parser.add_argument(
        "--special",
        nargs="?",
        const=",".join(SPECIAL),
        default="",
        help=f"put such values into float arguments: any of {','.join(SPECIAL)} (default: all)",
    )
    parser.add_argument("--arch", default="", help='compile for this architecture, or "all"')
    parser.add_argument(
        "--sanitizer",
        nargs="?",
        const="memcheck",
        default="",
        choices=TOOLS,
        help="run a few shapes under compute-sanitizer (default: memcheck)",
    )
    parser.add_argument(
        "--allow-nondeterministic",
        action="store_true",
        help="two runs need not be equal bit by bit: for atomics in floating point",
    )
    parser.add_argument("--huge", action="store_true", help="check more than 2**31 elements, too")
    parser.add_argument("--quick", action="store_true", help="a few shapes only")
    parser.add_argument(
        "--in-process", action="store_true", help="run the kernel in this process, for a debugger"
    )
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds a call may take")
    parser.add_argument("--max-seconds", type=float, default=60.0, help="seconds for each op")
    parser.add_argument("--watch", action="store_true", help="check again when a file is saved")


def run(arguments: argparse.Namespace) -> int:
    """Check the ops of the file; return 1 if one of them fails."""
    options = _options(arguments)
    if arguments.watch:
        watcher = kernels.watch(arguments.file, background=False, **options)
        return 0 if watcher.ok else 1
    reports = [kernels.check(op, **options) for op in load_ops(arguments.file).values()]
    return 0 if all(report.ok for report in reports) else 1


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("dtype", "seed", "arch", "sanitizer", "huge", "quick", "timeout", "max_seconds")
    options = {name: getattr(arguments, name) for name in names}
    options["special"] = [word for word in arguments.special.split(",") if word]
    options["allow_nondeterministic"] = arguments.allow_nondeterministic
    options["isolate"] = not arguments.in_process
    options["sizes"] = sizes_of(arguments.sizes) if arguments.sizes else None
    return options
