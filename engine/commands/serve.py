"""`engine serve MODEL`: serve a model over HTTP with OpenAI's and Anthropic's protocols."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

from engine.checks import shown
from engine.commands._overrides import parsed_overrides
from engine.commands._parser import MODEL_HELP, add_positional_model, chosen_model
from engine.commands._serve_options import (
    ALIASES,
    LLM_OPTIONS,
    add_serve_options,
    shown_defaults,
)
from engine.commands._speculation import parsed_config
from engine.errors import ConfigError, unknown_keyword
from engine.model_files import excerpt, read_file
from engine.server.server_config import ServerConfig, key_hash

__all__ = ["add_arguments", "run", "shown_defaults"]

_MAX_CONFIG_BYTES = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options: those of the server, and those of the engine."""
    parser.argument_default = argparse.SUPPRESS  # only given options override the file
    add_positional_model(parser, f"{MODEL_HELP} (default: smollm2)")
    parser.add_argument("--model", help="the same")
    parser.add_argument("--config", type=Path, help="TOML file with these options")
    add_serve_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; a second signal exits immediately."""
    if sys.platform == "win32":
        raise ConfigError("the server needs Linux or macOS; on Windows, run it in WSL")
    given = _given(arguments)
    file = given.pop("config", None)
    options = ({} if file is None else _read(file)) | given
    model, server, engine = _split(options)
    name = "engine.server.supervisor"
    function = "supervise"
    if server.nodes:
        name = "engine.server.replicas.ray_supervisor"
        function = "supervise_on_ray"
    try:
        supervisor = importlib.import_module(name)
        importlib.import_module("zmq")
        importlib.import_module("uvicorn.config")
        files = importlib.import_module("engine.server.option_files")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"engine serve needs the package {error.name!r}: install rawengine[serve]"
        ) from error
    if not server.nodes:  # a cluster's machines have files of their own
        files.check_files(server)
    path = _model_path(model, engine.get("load_format"))
    status: int = getattr(supervisor, function)(path, server, engine)
    return status


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the command line, with "model" for either form of it."""
    given = vars(arguments)
    if model := chosen_model(given.pop("named_model", None), given.get("model"), None):
        given["model"] = model
    return given


def _split(options: dict[str, Any]) -> tuple[str, ServerConfig, dict[str, Any]]:
    """Return the model's name, the server's options, and the engine's."""
    for alias, name in ALIASES.items():
        if alias in options:
            if name in options:
                raise ConfigError(f"give {name} or {alias}, not both")
            options[name] = options.pop(alias)
    hashes = {
        "api_key_hashes": _key_hashes("api_key", options),
        "admin_key_hashes": _key_hashes("admin_api_key", options),
    }
    model = options.pop("model", "smollm2")
    if not isinstance(model, str) or not model:
        raise ConfigError(f"model must be a name or a path; got {shown(model)}")
    engine = {name: options.pop(name) for name in LLM_OPTIONS if name in options}
    overrides = parsed_overrides(engine)
    engine = {name: value for name, value in engine.items() if name not in overrides}
    speculative = {}
    if "speculative_config" in engine:
        speculative = {"speculative_config": parsed_config(engine.pop("speculative_config"))}
    for name, value in engine.items():  # TOML values may be dates or tables
        may_be_list = LLM_OPTIONS[name][0] is tuple or name == "pipeline_layers"
        values = value if may_be_list and isinstance(value, list) else [value]
        if not all(isinstance(v, str | int | float) for v in values):
            raise ConfigError(f"{name} must be a text, a number, true or false; got {value!r:.80}")
    server = ServerConfig.from_options({"served_model_name": (model,)} | options | hashes)
    return model, server, {"progress": sys.stderr.isatty()} | engine | speculative | overrides


def _key_hashes(name: str, options: dict[str, Any]) -> tuple[str, ...]:
    """Remove the keys of an option; return their hashes."""
    keys = options.pop(name, ())
    keys = [keys] if isinstance(keys, str) else keys
    if not isinstance(keys, list | tuple) or not all(isinstance(k, str) and k for k in keys):
        raise ConfigError(f"{name} must be a text that is not empty; got another value")
    return tuple(key_hash(key) for key in keys)


def _model_path(model: str, load_format: object) -> str:
    """Resolve a model once, downloading it if needed, before several processes load it."""
    # Imported lazily: `--help` and invalid options do not need it.
    from engine.loading.built_in import built_in_names, config_folder
    from engine.loading.download import resolve_model

    if load_format == "dummy" and model in built_in_names() and not Path(model).exists():
        return str(config_folder(model))
    return str(resolve_model(model, progress=sys.stderr.isatty()).path)


def _read(file: Path) -> dict[str, Any]:
    """Return the options in a file; "-" in their names becomes "_"."""
    try:
        toml = importlib.import_module("tomllib")  # Python 3.11
    except ModuleNotFoundError:
        try:
            toml = importlib.import_module("tomli")
        except ModuleNotFoundError:
            raise ConfigError("--config needs Python 3.11, or the package 'tomli'") from None
    data = read_file(file, _MAX_CONFIG_BYTES)
    try:
        found = toml.loads(data.decode("utf-8"))
    except ValueError as error:  # invalid TOML or UTF-8
        raise ConfigError(f"--config {excerpt(file)}: {excerpt(error)}") from error
    options = {name.replace("-", "_"): value for name, value in found.items()}
    known = [f.name for f in dataclasses.fields(ServerConfig) if "help" in f.metadata]
    known += ["model", "api_key", "admin_api_key", *LLM_OPTIONS, *ALIASES]
    for name in options:
        if name not in known:
            raise unknown_keyword(f"--config {excerpt(file)}", name, known)
    return options
