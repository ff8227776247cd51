"""The options of the commands that generate which say how a model is divided among processes."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["EXPERT_HELP", "PARALLEL_FLAG", "PARALLEL_HELP"]
__all__ += ["add_parallel_argument", "parallel_option"]

PARALLEL_FLAG = "-tp"
PARALLEL_HELP = "processes, each with a GPU, among which the model is divided"

EXPERT_HELP = "give each of these processes whole experts, not a part of every expert"


def add_parallel_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        PARALLEL_FLAG, "--tensor-parallel-size", type=int, default=1, help=PARALLEL_HELP
    )
    parser.add_argument("--enable-expert-parallel", action="store_true", help=EXPERT_HELP)


def parallel_option(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords for `LLM` or `LLMEngine`: those that are not at their defaults."""
    size, options = arguments.tensor_parallel_size, {}
    if size != 1:
        options["tensor_parallel_size"] = size
    if arguments.enable_expert_parallel:
        options["enable_expert_parallel"] = True
    return options
