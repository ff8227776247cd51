"""Conversion of a `ModelConfig` to JSON values, and back."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, get_args, get_origin, get_type_hints

from engine.config import ModelConfig

__all__ = ["config_from_json", "config_to_json"]


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of a configuration as JSON values.

    Examples
    --------
    >>> config = ModelConfig("llama", 64, 32, 1, 4, 2, 8, 48, 128, eos_token_ids=(2,))
    >>> config_from_json(config_to_json(config)) == config
    True
    """
    fields: dict[str, Any] = dataclasses.asdict(config)
    return fields


def config_from_json(fields: Mapping[str, Any]) -> ModelConfig:
    """Undo `config_to_json`."""
    config: ModelConfig = _restored(ModelConfig, fields)
    return config


def _restored(kind: Any, value: Any) -> Any:
    """Return a JSON value as a field of type `kind`: a dataclass, a tuple, or such or None."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        kinds = get_type_hints(kind)
        return kind(**{name: _restored(kinds[name], one) for name, one in value.items()})
    parts = get_args(kind)
    if value is None or not parts:
        return value
    if get_origin(kind) is not tuple:
        return _restored(parts[0], value)
    each = itertools.repeat(parts[0]) if parts[-1] is Ellipsis else parts
    return tuple(map(_restored, each, value))
