"""`engine rm MODEL`: remove a downloaded model."""

from __future__ import annotations

import argparse
import sys

from engine.checks import shown_size
from engine.commands._streams import read_input
from engine.errors import ConfigError, did_you_mean
from engine.loading.model_cache import cached_models, remove_model

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("model", nargs="+", metavar="MODEL", help="a name that engine ls shows")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")


def run(arguments: argparse.Namespace) -> int:
    """Remove the models; return 1 if the user says no."""
    models = {model.name: model for model in cached_models()}
    for name in arguments.model:
        if name not in models:
            hint = did_you_mean(name, models, "engine ls lists them")
            raise ConfigError(f"{name!r:.120} is no downloaded model{hint}")
    chosen = [models[name] for name in dict.fromkeys(arguments.model)]
    total = shown_size(sum(model.num_bytes for model in chosen))
    if not arguments.yes and not _confirms(f"remove {', '.join(m.name for m in chosen)} ({total})"):
        return 1
    for model in chosen:
        remove_model(model)
        print(f"removed {model.name}")
    print(f"{total} freed", file=sys.stderr)
    return 0


def _confirms(question: str) -> bool:
    """Ask on the terminal.

    Raises
    ------
    ConfigError
        If standard input is none.
    """
    if not sys.stdin.isatty():
        raise ConfigError("--yes is needed where nobody can be asked")
    print(f"{question}? [y/N] ", end="", file=sys.stderr, flush=True)
    return read_input(line=True).strip().lower() in ("y", "yes")
