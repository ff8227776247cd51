"""`load`'s `attention_pattern`: which keys the queries of each layer see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.checks import is_integer, shown_with_type
from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.kernels import BlockSparse, Periodic
from engine.kernels._override.places import load_place
from engine.loading.load_config import LoadConfig

__all__ = ["layer_patterns"]

Pattern = BlockSparse | Periodic
_WANTED = "a kernels.Periodic, a kernels.BlockSparse, or a mapping of layers to such"


def layer_patterns(given: Any, config: ModelConfig, options: LoadConfig) -> dict[int, Pattern]:
    """Return the pattern of each layer that has one; a single pattern is for all full attention.

    Raises
    ------
    ConfigError
        If `given` is no pattern, names a layer that the model does not have, or cannot be combined
        with the options.
    """
    if given is None:
        return {}
    if isinstance(given, str):
        given = load_place("attention_pattern", given)
    if isinstance(given, Pattern):
        layers = range(config.num_layers)
        full = [layer for layer in layers if not config.window(layer) and not config.chunk(layer)]
        given = dict.fromkeys(full, given)
    if not isinstance(given, Mapping):
        raise ConfigError(f"attention_pattern must be {_WANTED}; got {shown_with_type(given)}")
    for layer, pattern in given.items():
        is_layer = is_integer(layer) and 0 <= layer < config.num_layers
        if not is_layer or not isinstance(pattern, Pattern):
            raise ConfigError(
                f"attention_pattern must be {_WANTED} from 0 to {config.num_layers - 1}; "
                f"got {shown_with_type(layer if not is_layer else pattern)}"
            )
        if config.chunk(layer):
            raise ConfigError(f"attention_pattern must not be of layer {layer}: it has chunks")
    if options.deterministic and not options.device.is_cuda:
        raise ConfigError(
            "attention_pattern must be left out with deterministic=True on the CPU: the order of "
            "its sums depends on the batch there"
        )
    return {int(layer): pattern for layer, pattern in given.items()}
