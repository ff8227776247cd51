"""Load a model in one process or several, and construct its engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from engine.engine_config import CONFIG_OPTIONS, EngineConfig
from engine.model import LOAD_OPTIONS, Model, load

__all__ = ["make_engine"]

EngineT = TypeVar("EngineT")


def make_engine(make: Callable[..., EngineT], model: str, options: dict[str, Any]) -> EngineT:
    """Return ``make(model, **options)`` for the model of this name.

    Parameters
    ----------
    make : callable
        Called with the loaded model, and the options that `load` does not accept.
    model : str
    options : dict
        Keywords of `load` and of `EngineConfig`.

    Raises
    ------
    UnknownOptionError, ConfigError
        If an option is invalid; raised before anything is loaded.
    """
    names = LOAD_OPTIONS.keys() - CONFIG_OPTIONS  # max_model_len is a keyword of both
    loading = {name: options.pop(name) for name in names if name in options}
    config = EngineConfig.from_options(options, names)  # raise now, not after the load
    if "max_model_len" in options:
        loading["max_model_len"] = options["max_model_len"]
    if config.tensor_parallel_size == config.pipeline_parallel_size == 1:
        return make(load(model, **loading), **options)
    # Imported on demand: most engines run in one process.
    from engine.parallel.pipeline import load_stages
    from engine.parallel.tensor import load_ranks

    is_pipelined = config.pipeline_parallel_size > 1
    loaded: Model = (load_stages if is_pipelined else load_ranks)(model, config, loading)
    try:
        return make(loaded, **options)
    except BaseException:
        loaded.close()
        raise
