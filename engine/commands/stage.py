"""`engine stage`: run one pipeline stage for an engine on another host."""

from __future__ import annotations

import argparse
import sys

from engine import env
from engine.distributed.connection import parse_address
from engine.errors import ConfigError, RankError

__all__ = ["add_arguments", "run"]

_WAIT_SECONDS = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--connect",
        required=True,
        metavar="HOST:PORT",
        help="the engine's pipeline_address; ENGINE_PIPELINE_SECRET must be equal on both hosts",
    )
    parser.add_argument("--stage", required=True, type=int, help="index of this stage, from 0")
    parser.add_argument(
        "--model", default="", help="model path on this host, if it differs from the engine's"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the stage until the engine exits; return 1 if the stage fails."""
    try:
        address = parse_address(arguments.connect)
    except ValueError as error:
        raise ConfigError(f"--connect: {error}") from None
    secret = env.pipeline_secret()
    # Imported lazily: `--help` and invalid options do not need it.
    from engine.parallel.stage import run_stage

    try:
        run_stage(address, arguments.stage, secret, model=arguments.model, seconds=_WAIT_SECONDS)
    except RankError as error:
        print(f"engine stage: {error}", file=sys.stderr)
        return 1
    return 0
