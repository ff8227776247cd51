"""`engine kernels profile FILE.py`: occupancy of a user's kernels, and what they wait for."""

from __future__ import annotations

import argparse

from engine import kernels
from engine.commands._kernel_options import sizes_of
from engine.kernels._user.files import load_ops

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("target", metavar="file", help="FILE.py, or FILE.py:NAME")
    parser.add_argument("--sizes", help="such as T=8192,N=4096 (default: bench= of the definition)")
    parser.add_argument("--dtype", default="", help="dtype of scalar_t (default: one of 16 bits)")
    parser.add_argument("--no-counters", action="store_true", help="do not run ncu")


def run(arguments: argparse.Namespace) -> int:
    """Profile the ops of the file."""
    sizes = sizes_of(arguments.sizes) if arguments.sizes else None
    for op in load_ops(arguments.target).values():
        counters = not arguments.no_counters
        print(kernels.profile(op, sizes, arguments.dtype, counters=counters))
        print()
    return 0
