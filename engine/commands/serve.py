"""`engine serve MODEL`: serve a model over HTTP with OpenAI's and Anthropic's protocols."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

from engine.checks import shown
from engine.commands._overrides import KERNELS_HELP, PROCESSORS_HELP, parsed_overrides
from engine.commands._parallel import EXPERT_HELP, PARALLEL_OPTIONS
from engine.commands._parser import MODEL_HELP, add_positional_model, chosen_model
from engine.commands._speculation import SPECULATION_HELP, parsed_config
from engine.errors import ConfigError, unknown_keyword
from engine.model_files import excerpt, read_file
from engine.server.server_config import RANGES, ServerConfig, key_hash

__all__ = ["add_arguments", "run"]

_MAX_CONFIG_BYTES = 1 << 20

# Not derived from `EngineConfig`, which takes a third of a second to import. The engine process
# validates the values while this one opens the port.
_ENGINE: dict[str, tuple[type, str]] = {
    "device": (str, "cpu, cuda, cuda:1 or auto"),
    "dtype": (str, "float32, float16, bfloat16 or auto"),
    "load_format": (str, "dummy: random weights"),
    "quantization": (str, "quantize while loading: fp8, int8, int4 or another format"),
    "deterministic": (bool, "generate the same tokens in any batch; slower"),
    "attention_pattern": (str, "keys that a query sees: FILE.py:NAME of a BlockSparse or Periodic"),
    "max_model_len": (int, "maximum tokens per request, prompt plus output"),
    "max_num_seqs": (int, "maximum number of running requests"),
    "max_num_batched_tokens": (int, "token budget per step"),
    "kv_cache_dtype": (str, "fp8 or int8: halves the KV cache"),
    "state_dtype": (str, "auto, float32 or bfloat16: dtype of recurrent states"),
    "num_state_snapshots": (int, "snapshots of recurrent states for prefix caching"),
    "state_snapshot_interval": (int, "distance of the snapshots along a prompt, in tokens"),
    "block_size": (int, "tokens per KV block: 16, 32, 64 or 128"),
    "num_blocks": (int, "number of KV blocks (default: as many as fit)"),
    "memory_utilization": (float, "share of the device's memory to use"),
    "seed": (int, "seed for requests without a seed of their own"),
    "enable_prefix_caching": (bool, "cache computed prefixes and share them"),
    "max_blocks_per_salt": (int, "maximum cached blocks per cache_salt"),
    "max_prefill_chunk": (int, "maximum prompt tokens per request and step"),
    "speculative_config": (str, SPECULATION_HELP),
    "kernels": (tuple, KERNELS_HELP),
    "logits_processors": (tuple, PROCESSORS_HELP),
    "max_draft_tokens": (int, "maximum draft tokens per request and step"),
    "scheduling_policy": (str, "fcfs, or lpm: longest cached prefix first"),
    "priority_window": (int, "number of later arrivals that one priority level outweighs"),
    "max_num_queued_requests": (int, "maximum waiting requests; more get 429"),
    "max_num_queued_tokens": (int, "maximum waiting prompt tokens"),
    "watermark": (float, "share of blocks kept free for running requests"),
    "swap_space_gb": (float, "host memory for preempted requests and evicted prefixes, in GiB"),
    "preemption_mode": (str, "recompute, swap or auto"),
    "recompute_us_per_token": (float, "cost compared by preemption_mode auto (default: measured)"),
    "swap_us_per_block": (float, "cost compared by preemption_mode auto (default: measured)"),
    "async_scheduling": (bool, "launch each step before the previous one's tokens are known"),
    "cuda_graphs": (bool, "replay decode steps from CUDA graphs"),
    "step_timeout": (float, "seconds after which a step counts as stuck"),
    "raise_on_timeout": (bool, "abandon stuck steps"),
    **{name: (kind, text) for name, (_, kind, text) in PARALLEL_OPTIONS.items()},
    "enable_expert_parallel": (bool, EXPERT_HELP),
    "enable_lora": (bool, "reserve memory for LoRA adapters"),
    "max_loras": (int, "LoRA adapters that one step may use (default 8)"),
    "max_lora_rank": (int, "largest rank of a LoRA adapter (default 16)"),
    "lora_modules": (tuple, "NAME=PATH of a LoRA adapter to load at the start; repeatable"),
    "distributed_executor_backend": (str, "ray: the other stages are actors of a Ray cluster"),
    "pipeline_address": (str, "HOST:PORT where stages on other hosts connect (engine stage)"),
    "collective_timeout": (float, "seconds after which an unresponsive process counts as dead"),
    "debug": (bool, "check all internal tables in each step; slow"),
}
_SHORT = {"quantization": "-q"} | {name: flag for name, (flag, *_) in PARALLEL_OPTIONS.items()}
_ADMIN_HELP = "enable the endpoints that change the engine, for this key only; repeatable"
_ALIASES = {"gpu_memory_utilization": "memory_utilization"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options: those of the server, and those of the engine."""
    parser.argument_default = argparse.SUPPRESS  # only given options override the file
    add_positional_model(parser, f"{MODEL_HELP} (default: smollm2)")
    parser.add_argument("--model", help="the same")
    parser.add_argument("--config", type=Path, help="TOML file with these options")
    server = parser.add_argument_group("server")
    server.add_argument("--api-key", action="append", help="an accepted API key; repeatable")
    server.add_argument("--admin-api-key", action="append", help=_ADMIN_HELP)
    for field in dataclasses.fields(ServerConfig):
        if "help" in field.metadata:
            kind = tuple if isinstance(field.default, tuple) else _kind(field.name, field.default)
            _add(server, field.name, kind, field.metadata["help"], field.default)
    engine = parser.add_argument_group("engine")
    for name, (kind, text) in _ENGINE.items():
        _add(engine, name, kind, text, None)
    for alias in _ALIASES:
        _add(engine, alias, _ENGINE[_ALIASES[alias]][0], "vLLM's name", None)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; a second signal exits immediately."""
    if sys.platform == "win32":
        raise ConfigError("the server needs Linux or macOS; on Windows, run it in WSL")
    given = vars(arguments)
    file = given.pop("config", None)
    if model := chosen_model(given.pop("named_model", None), given.get("model"), None):
        given["model"] = model
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
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"engine serve needs the package {error.name!r}: install rawengine[serve]"
        ) from error
    status: int = getattr(supervisor, function)(model, server, engine)
    return status


def _split(options: dict[str, Any]) -> tuple[str, ServerConfig, dict[str, Any]]:
    """Return the model path, the server's options, and the engine's."""
    for alias, name in _ALIASES.items():
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
    engine = {name: options.pop(name) for name in _ENGINE if name in options}
    overrides = parsed_overrides(engine)
    engine = {name: value for name, value in engine.items() if name not in overrides}
    speculative = {}
    if "speculative_config" in engine:
        speculative = {"speculative_config": parsed_config(engine.pop("speculative_config"))}
    for name, value in engine.items():  # TOML values may be dates or tables
        is_repeatable = _ENGINE[name][0] is tuple and isinstance(value, list)
        if not all(isinstance(v, str | int | float) for v in (value if is_repeatable else [value])):
            raise ConfigError(f"{name} must be a text, a number, true or false; got {value!r:.80}")
    server = ServerConfig.from_options({"served_model_name": (model,)} | options | hashes)
    path, defaults = _model_path(model)
    return (
        path,
        server,
        defaults | {"progress": sys.stderr.isatty()} | engine | speculative | overrides,
    )


def _key_hashes(name: str, options: dict[str, Any]) -> tuple[str, ...]:
    """Remove the keys of an option; return their hashes."""
    keys = options.pop(name, ())
    keys = [keys] if isinstance(keys, str) else keys
    if not isinstance(keys, list | tuple) or not all(isinstance(k, str) and k for k in keys):
        raise ConfigError(f"{name} must be a text that is not empty; got another value")
    return tuple(key_hash(key) for key in keys)


def _model_path(model: str) -> tuple[str, dict[str, Any]]:
    """Resolve a model once, downloading it if needed, before several processes load it."""
    folder = Path(__file__).parents[1] / "testing" / "configs" / model
    if "/" not in model and not Path(model).exists() and (folder / "config.json").exists():
        return str(folder), {"load_format": "dummy"}  # a built-in configuration of `engine bench`
    # Imported lazily: `--help` and invalid options do not need it.
    from engine.loading.download import resolve_model

    return str(resolve_model(model, progress=sys.stderr.isatty()).path), {}


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
    known += ["model", "api_key", "admin_api_key", *_ENGINE, *_ALIASES]
    for name in options:
        if name not in known:
            raise unknown_keyword(f"--config {excerpt(file)}", name, known)
    return options


def _add(group: Any, name: str, kind: type, text: str, default: Any) -> None:
    """Declare an option."""
    flag = "--" + name.replace("_", "-")
    shown_default = "" if default is None or default == () else f" (default {_shown(default)})"
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text + shown_default)
    elif kind is tuple:
        group.add_argument(flag, action="append", metavar="TEXT", help=text + shown_default)
    else:
        short = [_SHORT[name]] if name in _SHORT else []
        group.add_argument(
            *short, flag, type=kind, metavar=kind.__name__.upper(), help=text + shown_default
        )


def _kind(name: str, default: Any) -> type:
    if name in RANGES:
        return int if RANGES[name].integer else float
    return bool if isinstance(default, bool) else str


def _shown(default: Any) -> str:
    return ", ".join(default) if isinstance(default, tuple) else str(default) or '""'
