"""Convert a config file's rope settings, under old or new keys, to a `RopeConfig`.

Old files have `rope_theta` and `rope_scaling` ({"type" or "rope_type": ...}); new files have
`rope_parameters`, which includes theta and may hold one object per layer type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.config import RopeConfig
from engine.errors import ConfigError
from engine.layers.rotary import attention_factor
from engine.loading._fields import REQUIRED, Fields
from engine.loading.config_keys import refuse_unread_rope
from engine.models.family import Family

__all__ = ["MAX_POSITIONS", "MAX_THETA", "MIN_THETA", "rope_configs", "scaled_max_position"]

MAX_POSITIONS = 1 << 24
MIN_THETA = 1.0 + 1e-6
MAX_THETA = 1e12
_MAX_FACTOR = 1e4
_LAYER_KINDS = ("full_attention", "sliding_attention")
_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


def rope_configs(
    fields: Fields, family: Family, head_dim: int, max_position: int, local_head_dim: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the ropes of the full-attention layers and of the sliding-window layers.

    Parameters
    ----------
    fields : Fields
        The config.json, with the family's defaults filled in.
    head_dim : int
        D of the full-attention layers.
    max_position : int
        `max_position_embeddings`, the default training length.
    local_head_dim : int
        D of the sliding-window layers.

    Returns
    -------
    (RopeConfig, RopeConfig or None)
        The second is None if all layers share one rope.

    Raises
    ------
    ConfigError
        If the scaling is unknown or one of its numbers is invalid.
    """
    full, local = _rope_objects(fields, family)
    is_shared = local is None
    first = _RopeReader(fields, full, family, head_dim, max_position, is_shared).read()
    if local is None:
        return first, None
    return first, _RopeReader(fields, local, family, local_head_dim, max_position, False).read()


def scaled_max_position(rope: RopeConfig, max_position: int, family: Family) -> int:
    """Return the maximum sequence length in tokens, with rope scaling applied.

    Hugging Face's `max_position_embeddings` is the training length for linear and dynamic scaling,
    and the extended length for llama3 and longrope; for yarn it may be either.
    """
    stretched = max_position
    if rope.scaling == "dynamic" or (
        rope.scaling == "linear" and not family.max_position_is_scaled
    ):
        stretched = int(max_position * rope.factor)
    elif rope.scaling == "yarn":
        stretched = max(max_position, int(rope.original_max_position * rope.factor))
    return min(stretched, MAX_POSITIONS)


def _rope_objects(
    fields: Fields, family: Family
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Return the rope keys of full-attention layers and of sliding-window layers (None: shared)."""
    flat = {"rope_theta": fields.raw("rope_theta")}
    old = fields.raw("rope_scaling")
    new = fields.raw("rope_parameters")
    for key, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, Mapping):
            raise fields.error(key, "an object")
    nested = new is not None and any(kind in new for kind in _LAYER_KINDS)
    if not nested and not family.local_rope:
        return {**flat, **(old or new or {})}, None
    scaling = old or (None if nested else new) or {}  # scaling of the full-attention layers
    full, local = (_layer_kind(fields, new if nested else {}, kind) for kind in _LAYER_KINDS)
    if "rope_theta" not in local:
        theta = fields.raw("rope_local_base_freq") or scaling.get("rope_theta", flat["rope_theta"])
        local = {"rope_theta": theta, **local}
    return {**flat, **full, **scaling}, local


def _layer_kind(fields: Fields, new: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    value = new.get(kind)
    if value is not None and not isinstance(value, Mapping):
        raise fields.error("rope_parameters", f"an object per kind of layer ({kind})")
    return value or {}


class _RopeReader:
    """Reader of one rope object of a config file; it has a method per scaling type."""

    def __init__(
        self,
        config: Fields,
        values: Mapping[str, Any],
        family: Family,
        head_dim: int,
        max_position: int,
        is_shared: bool,
    ) -> None:
        self.config = config
        self.rope = config.beside(values, "rope parameters")
        self.family = family
        self.head_dim = head_dim
        self.max_position = max_position
        self.is_shared = is_shared  # by all layers

    def read(self) -> RopeConfig:
        kind = self._kind()
        theta = self.rope.real("rope_theta", MIN_THETA, MAX_THETA, 10000.0)
        dim = self._rotary_dim()
        if kind == "dynamic" and self.family.rope_alpha and self.rope.has("alpha"):
            kind = "default"
            theta *= self.rope.real("alpha", 1e-6, 1e6) ** (dim / max(dim - 2, 1))
        common: dict[str, Any] = {"theta": theta, "rotary_dim": dim, "scaling": kind}
        common["is_reversed"] = self.family.reversed_rope
        common["mscale_all_dim"] = self.rope.real("mscale_all_dim", 0.0, 1e3, 0.0)
        readers = {
            "linear": self._linear,
            "dynamic": self._dynamic,
            "yarn": self._yarn,
            "llama3": self._llama3,
            "longrope": self._longrope,
            "proportional": self._proportional,
        }
        extra = readers[kind](common["rotary_dim"]) if kind in readers else {}
        config = RopeConfig(**{**common, **extra, **self._q_scale()})
        beyond = self.rope.real("attn_factor", 0.0, 1e3, 1.0)
        refuse_unread_rope(self.rope, self.family)
        if beyond == 1.0:
            return config
        return replace(config, attention_factor=beyond * attention_factor(config))

    def _kind(self) -> str:
        key = "rope_type" if self.rope.has("rope_type") else "type"
        if not self.rope.has(key) and self.rope.real("factor", 0.0, _MAX_FACTOR, 1.0) != 1.0:
            raise self.rope.error("rope_type", "given beside a factor")
        kind = self.rope.text(key, "default")
        kind = self.family.rope_aliases.get(kind, kind)
        known: tuple[str, ...] = _KINDS
        if self.family.layers_differ or self.family.local_rope:
            known = (*_KINDS, "proportional")
        elif self.family.rope_mscales:
            known = ("default", "longrope")
        if kind not in known:
            raise self.rope.error(key, f"one of {', '.join(known)}")
        return kind

    def _rotary_dim(self) -> int:
        if self._kind() == "proportional":
            return self.head_dim
        key = "partial_rotary_factor"
        source = self.rope if self.rope.has(key) else self.config
        if self.family.rotary_dim and not source.has(key):
            return self._rotary_count(self.family.rotary_dim)
        factor = source.real(key, 0.0, 1.0, 1.0)
        if factor != 1.0 and not self.family.has_partial_rope:
            raise source.error(key, f"1 ({self.family.model_type} rotates whole heads)")
        rotary_dim = int(self.head_dim * factor)
        if rotary_dim < 2 or rotary_dim % 2:
            raise source.error(
                key, f"such that an even number >= 2 of {self.head_dim} features is rotated"
            )
        return rotary_dim

    def _rotary_count(self, key: str) -> int:
        """Return the number of rotated features under `key`; all if it is absent."""
        count: int = self.config.integer(key, 2, self.head_dim, self.head_dim)
        if count % 2:
            raise self.config.error(key, "even")
        return count

    def _q_scale(self) -> dict[str, Any]:
        if not self.family.q_scale:
            return {}
        return {
            "q_scale_beta": self.rope.real("llama_4_scaling_beta", 0.0, 1e3, 0.0),
            "q_scale_length": self._original(self.max_position),
        }

    def _factor(self, default: Any = REQUIRED) -> float:
        factor: float = self.rope.real("factor", 1.0, _MAX_FACTOR, default)
        return factor

    def _original(self, default: int) -> int:
        """Return the training length.

        A value outside the rope object (Phi-3) takes precedence, unless there is one object for
        each kind of layer: transformers then reads these alone.
        """
        key = "original_max_position_embeddings"
        source = self.config if self.is_shared and self.config.has(key) else self.rope
        original: int = source.integer(key, 2, MAX_POSITIONS, default)
        return original

    def _linear(self, rotary_dim: int) -> dict[str, Any]:
        return {"factor": self._factor()}

    def _proportional(self, rotary_dim: int) -> dict[str, Any]:
        """Return the number of pairs that rotate: the others are part of the same heads."""
        share = self.rope.real("partial_rotary_factor", 0.0, 1.0, 1.0)
        pairs = int(share * rotary_dim // 2)
        if not pairs:
            raise self.rope.error("partial_rotary_factor", f"such that some of {rotary_dim} rotate")
        return {"factor": self._factor(1.0), "num_frequencies": pairs}

    def _dynamic(self, rotary_dim: int) -> dict[str, Any]:
        if rotary_dim < 4:
            raise ConfigError(f"dynamic rope needs at least 4 rotated features; got {rotary_dim}")
        return {"factor": self._factor(), "original_max_position": self.max_position}

    def _yarn(self, rotary_dim: int) -> dict[str, Any]:
        original = self._original(self.max_position)
        fast = self.rope.real("beta_fast", 1e-3, 1e6, 32.0)
        if (slow := self.rope.real("beta_slow", 1e-3, 1e6, 1.0)) > fast:
            raise self.rope.error("beta_slow", f"at most beta_fast ({fast:g})")
        return {
            "factor": self._factor(max(1.0, self.max_position / original)),
            "original_max_position": original,
            "beta_fast": fast,
            "beta_slow": slow,
            "attention_factor": self.rope.real("attention_factor", 0.0, 1e3, None),
            "mscale": self.rope.real("mscale", 0.0, 1e3, 0.0),
            "truncate": self.rope.flag("truncate", True),
        }

    def _llama3(self, rotary_dim: int) -> dict[str, Any]:
        low = self.rope.real("low_freq_factor", 1e-3, 1e6)
        if (high := self.rope.real("high_freq_factor", 1e-3, 1e6)) < low:
            raise self.rope.error("high_freq_factor", f"at least low_freq_factor ({low:g})")
        return {
            "factor": self._factor(),
            "original_max_position": self._original(self.max_position),
            "low_freq_factor": low,
            "high_freq_factor": high,
        }

    def _longrope_factors(self) -> dict[str, Any]:
        if not self.family.rope_mscales:
            return {"attention_factor": self.rope.real("attention_factor", 0.0, 1e3, None)}
        return {
            "attention_factor": self.rope.real("short_mscale", 0.0, 1e3),
            "long_attention_factor": self.rope.real("long_mscale", 0.0, 1e3),
        }

    def _longrope(self, rotary_dim: int) -> dict[str, Any]:
        original = self._original(self.max_position)
        count = rotary_dim // 2
        return {
            "factor": self._factor(max(1.0, self.max_position / original)),
            "original_max_position": original,
            **self._longrope_factors(),
            "short_factor": self.rope.reals("short_factor", count, 1e-3, 1e6),
            "long_factor": self.rope.reals("long_factor", count, 1e-3, 1e6),
        }
