"""The options of several GPUs, of the commands that generate."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["PARALLEL_OPTIONS", "add_parallel_argument", "parallel_option"]

PARALLEL_OPTIONS: dict[str, tuple[str, type, str]] = {
    "tensor_parallel_size": (
        "-tp",
        int,
        "processes, each with a GPU, among which the model is divided",
    ),
    "pipeline_parallel_size": (
        "-pp",
        int,
        "stages, each with its part of the layers and as many processes",
    ),
}
"""Keyword of `EngineConfig` -> short flag, type and description."""


def add_parallel_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    for name, (flag, kind, text) in PARALLEL_OPTIONS.items():
        parser.add_argument(flag, "--" + name.replace("_", "-"), type=kind, default=1, help=text)


def parallel_option(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords for `LLM` or `LLMEngine`; nothing if it is one process."""
    found = {name: getattr(arguments, name) for name in PARALLEL_OPTIONS}
    return {name: size for name, size in found.items() if size != 1}
