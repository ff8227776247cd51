"""Conversion of a `ModelConfig` to JSON values, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from engine.config import ModelConfig, MoeConfig, RopeConfig

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
    given = _with_tuples(fields)
    for name in ("rope", "no_rope"):
        given[name] = RopeConfig(**_with_tuples(given[name]))
    if given["rope_local"] is not None:
        given["rope_local"] = RopeConfig(**_with_tuples(given["rope_local"]))
    if given["moe"] is not None:
        given["moe"] = MoeConfig(**_with_tuples(given["moe"]))
    return ModelConfig(**given)


def _with_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
