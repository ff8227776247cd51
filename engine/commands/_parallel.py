"""Parallelism options of the commands that generate."""

from __future__ import annotations

import argparse
from typing import Any

from engine.commands._parser import option_name

__all__ = [
    "EXPERT_HELP",
    "LAYERS_HELP",
    "PARALLEL_OPTIONS",
    "add_parallel_argument",
    "parallel_option",
]

PARALLEL_OPTIONS: dict[str, tuple[str, type, str]] = {
    "tensor_parallel_size": (
        "-tp",
        int,
        "tensor-parallel ranks, one GPU each",
    ),
    "pipeline_parallel_size": (
        "-pp",
        int,
        "pipeline stages; each holds a range of the layers",
    ),
}
"""Keyword of `EngineConfig` -> short flag, type and description."""

LAYERS_HELP = "layers of each pipeline stage, such as 17,15 (default: as equal as possible)"
EXPERT_HELP = "expert parallelism: distribute experts over the ranks instead of sharding each one"


def add_parallel_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    for name, (flag, kind, text) in PARALLEL_OPTIONS.items():
        parser.add_argument(flag, option_name(name), type=kind, default=1, help=text)
    parser.add_argument("--pipeline-layers", metavar="N,N", help=LAYERS_HELP)
    parser.add_argument("--enable-expert-parallel", action="store_true", help=EXPERT_HELP)


def parallel_option(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the non-default options as keyword arguments for `LLM` or `LLMEngine`."""
    found = {name: getattr(arguments, name) for name in PARALLEL_OPTIONS}
    options: dict[str, Any] = {name: size for name, size in found.items() if size != 1}
    if arguments.pipeline_layers is not None:
        options["pipeline_layers"] = arguments.pipeline_layers
    if arguments.enable_expert_parallel:
        options["enable_expert_parallel"] = True
    return options
