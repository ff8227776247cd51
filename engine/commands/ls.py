"""`engine ls`: list the downloaded models."""

from __future__ import annotations

import argparse
import datetime
import sys

from engine.checks import shown_count, shown_size
from engine.commands._table import print_table
from engine.errors import EngineError
from engine.loading.model_cache import CachedModel, cached_models
from engine.loading.model_facts import model_facts

__all__ = ["add_arguments", "run"]

_HEADS = ("NAME", "FORMAT", "WEIGHTS", "SIZE", "PARAMETERS", "PULLED")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare no options."""


def run(arguments: argparse.Namespace) -> int:
    """Print a table of the models in the caches of the engine and of the hub."""
    models = cached_models()
    if not models:
        print("there are no models yet: engine pull smollm2 fetches one", file=sys.stderr)
        return 0
    print_table(_HEADS, [_row(model) for model in models])
    return 0


def _row(model: CachedModel) -> tuple[str, ...]:
    try:
        facts = model_facts(model.source)
        about = facts.weights, shown_count(facts.num_parameters)
    except EngineError:  # a model that the engine does not support, or a damaged file
        about = "-", "-"
    format = "GGUF" if model.source.kind == "gguf" else "safetensors"
    day = datetime.datetime.fromtimestamp(model.pulled).strftime("%Y-%m-%d")
    return model.name, format, about[0], shown_size(model.num_bytes), about[1], day
