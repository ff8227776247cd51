"""The `--quantization` option, shared by every command that loads a model."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["add_quantization_argument", "quantization_option"]


def add_quantization_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the option."""
    parser.add_argument(
        "-q",
        "--quantization",
        metavar="NAME",
        help="quantize the linear layers during loading: fp8, int8, int4 or another format",
    )


def quantization_option(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword argument for `load`, `LLM` or `LLMEngine`; empty without the option."""
    return {} if arguments.quantization is None else {"quantization": arguments.quantization}
