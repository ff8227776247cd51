"""`engine show MODEL`: what a model is, without loading its weights."""

from __future__ import annotations

import argparse
import os

from engine.checks import shown_count, shown_size
from engine.commands._parser import MODEL_HELP, add_positional_model, chosen_model
from engine.errors import DownloadError, did_you_mean
from engine.loading.download import ModelSource, is_hub_id, resolve_model, wheel_names
from engine.loading.generation_config import sampling_defaults
from engine.loading.gguf import GgufFile, part_paths
from engine.loading.model_cache import cached_models
from engine.loading.model_facts import model_facts
from engine.model_files import excerpt
from engine.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_positional_model(parser, f"{MODEL_HELP} (default: smollm2); it must be on this machine")
    parser.add_argument("--model", help="the same")
    parser.add_argument("--template", action="store_true", help="print only the chat template")


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each fact; with --template, the chat template."""
    name = chosen_model(arguments.named_model, arguments.model) or ""
    source = _source_here(name)
    if arguments.template:
        template = _tokenizer(source).chat_template
        print(template or "")
        return 0 if template else 1
    facts = model_facts(source)
    defaults = sampling_defaults(source.path)
    values = ", ".join(f"{name} {value}" for name, value in defaults.values.items())
    origin = "of the model" if defaults.is_own else "of the engine: the model names none"
    lines = {
        "model": name,
        "files": f"{source.path} ({shown_size(_num_bytes(source))})",
        "architecture": facts.architecture,
        "parameters": shown_count(facts.num_parameters),
        "context": f"{facts.context} tokens",
        "weights": facts.weights,
        "template": _template(_tokenizer(source)),
        "defaults": f"{values} ({origin})",
        "license": facts.license or "not named in its files",
    }
    for key, value in lines.items():
        print(f"{key:14}{excerpt(value)}")
    return 0


def _source_here(name: str) -> ModelSource:
    """Return a model that is on this machine; nothing is downloaded.

    Raises
    ------
    DownloadError
        If it is not here.
    """
    models = {model.name: model for model in cached_models()}
    if name in models:
        return models[name].source
    if os.path.exists(os.path.expanduser(name)) or not (is_hub_id(name) or name in wheel_names()):
        return resolve_model(name, others=sorted(models.keys() - wheel_names()))
    hint = did_you_mean(name, models, f"engine pull {name} fetches it")
    raise DownloadError(f"model {name!r:.120} is not on this machine{hint}")


def _tokenizer(source: ModelSource) -> Tokenizer:
    is_gguf = source.kind == "gguf"
    return load_tokenizer(GgufFile(source.path).metadata if is_gguf else source.path)


def _template(tokenizer: Tokenizer) -> str:
    """Return whether there is a chat template, and the variables that it reads."""
    if tokenizer.chat_template is None:
        return "none: the model continues text"
    variables = ", ".join(sorted(tokenizer.template_variables(has_tools=True)))
    return f"yes{variables and ', reads '}{variables} (--template prints it)"


def _num_bytes(source: ModelSource) -> int:
    """Return the size of a model's files."""
    folder = source.path.is_dir()
    files = source.path.rglob("*") if folder else part_paths(source.path)
    return sum(file.stat().st_size for file in files if file.is_file())
