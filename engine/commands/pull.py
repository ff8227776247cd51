"""`engine pull MODEL`: download a model into the cache."""

from __future__ import annotations

import argparse
import sys

from engine.loading.download import pull

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "model",
        nargs="?",
        default="smollm2",
        metavar="MODEL",
        help="smollm2 (default), a hub id, or hub-id:TAG for the .gguf file with TAG in its name",
    )


def run(arguments: argparse.Namespace) -> int:
    """Download the model unless it is in the cache, and print its path."""
    print(pull(arguments.model, progress=sys.stderr.isatty()))
    return 0
