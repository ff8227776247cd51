"""The `--quantization` option, shared by every command that loads a model."""

from __future__ import annotations

import argparse
from typing import Any

from engine.errors import ConfigError
from engine.loading.download import ModelSource
from engine.loading.model_facts import quantization_formats
from engine.weights import FORMATS

__all__ = ["add_quantization_argument", "planned_quantization", "quantization_option"]


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


def planned_quantization(given: str | None, source: ModelSource | None) -> str | None:
    """Return the format to plan a model in: `given`, or that of its files; None for none.

    Raises
    ------
    ConfigError
        If a folder's files contain several formats, and none is given.
    """
    if given is not None or source is None:
        return given
    names = quantization_formats(source)
    if len(names) > 1:
        raise ConfigError(
            f"the model's files have several formats ({', '.join(names)}): name one with -q"
        )
    return next((name.lower() for name in names if name.lower() in FORMATS), None)
