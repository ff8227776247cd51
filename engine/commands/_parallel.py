"""The option `--tensor-parallel-size` of the commands that generate."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["PARALLEL_FLAG", "PARALLEL_HELP", "add_parallel_argument", "parallel_option"]

PARALLEL_FLAG = "-tp"
PARALLEL_HELP = "processes, each with a GPU, among which the model is divided"


def add_parallel_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the option."""
    parser.add_argument(
        PARALLEL_FLAG, "--tensor-parallel-size", type=int, default=1, help=PARALLEL_HELP
    )


def parallel_option(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword for `LLM` or `LLMEngine`; nothing if it is one process."""
    size = arguments.tensor_parallel_size
    return {} if size == 1 else {"tensor_parallel_size": size}
