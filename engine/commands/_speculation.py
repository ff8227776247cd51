"""The `--speculative-config` option, shared by the commands that generate."""

from __future__ import annotations

import argparse
import json
from typing import Any

from engine.checks import shown
from engine.errors import ConfigError

__all__ = ["SPECULATION_HELP", "add_speculation_argument", "parsed_config", "speculation_option"]

SPECULATION_HELP = 'speculative decoding, as JSON: {"method": "ngram"}'


def add_speculation_argument(parser: argparse.ArgumentParser, help: str = SPECULATION_HELP) -> None:
    """Declare the option."""
    parser.add_argument("--speculative-config", metavar="JSON", help=help)


def speculation_option(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword argument for `LLM` or `LLMEngine`; empty without the option."""
    given = arguments.speculative_config
    return {} if given is None else {"speculative_config": parsed_config(given)}


def parsed_config(given: Any) -> dict[str, Any]:
    """Return the config as a dict, given JSON text or a TOML table.

    Raises
    ------
    ConfigError
        If it is neither, or contains a value that JSON cannot represent, such as a TOML date.
    """
    config = given
    if isinstance(given, str):
        try:
            config = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"--speculative-config must be a JSON object; got {shown(given)} ({error})"
            ) from None
    if not isinstance(config, dict):
        raise ConfigError(f"--speculative-config must be a JSON object; got {shown(given)}")
    for name, value in config.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            raise ConfigError(
                f"speculative_config.{name:.80} must be a value of JSON; got {shown(value)}"
            ) from None
    return config
