"""What each layer caches of a sequence: pages of tokens, and slots of state.

A page array holds the same number of values for every token: keys, values, or MLA's latent. A state
array has a fixed size however long the sequence is: the recurrent state of linear attention, or the
last inputs of a short convolution. A layer declares any number of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from engine import dtypes
from engine.checks import shown
from engine.config import ModelConfig
from engine.errors import ConfigError

__all__ = ["STATE_DTYPES", "LayerCache", "PageShape", "StateShape", "layer_caches"]

STATE_DTYPES = ("auto", "float32", "bfloat16")
"""Allowed values of `state_dtype`; "auto" is float32."""


@dataclass(frozen=True)
class PageShape:
    """One page array of a layer: K heads of D values for each token.

    Examples
    --------
    >>> PageShape(1, 576).values_per_token  # MLA: 512 latent values, 64 of the rotated key
    576
    """

    num_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1; got {getattr(self, name)}")

    @property
    def values_per_token(self) -> int:
        """Number of values of one token."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class StateShape:
    """One state array of a layer: its shape and dtype in one slot.

    Examples
    --------
    >>> StateShape((32, 128, 128), "float32").num_bytes
    2097152
    """

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1:
            raise ConfigError(f"shape of a state must hold sizes of at least 1; got {self.shape}")
        dtypes.page_dtype(self.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of the array in one slot."""
        return math.prod(self.shape) * dtypes.page_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class LayerCache:
    """The arrays that one layer reads and writes, in the order in which it receives them.

    Attributes
    ----------
    pages : tuple of PageShape
        Page arrays: (keys, values) of attention, (latent,) of MLA.
    states : tuple of StateShape
        State arrays, which follow the page arrays.
    source : int or None
        Index of an earlier layer whose arrays this layer uses instead of its own; `pages` and
        `states` are then empty.
    """

    pages: tuple[PageShape, ...] = ()
    states: tuple[StateShape, ...] = ()
    source: int | None = None

    @property
    def arrays(self) -> tuple[PageShape | StateShape, ...]:
        """The shapes of all arrays, pages first."""
        return (*self.pages, *self.states)

    @classmethod
    def attention(cls, num_kv_heads: int, head_dim: int, v_head_dim: int = 0) -> LayerCache:
        """Return the cache of attention: keys, and values of `v_head_dim` (0: `head_dim`)."""
        keys = PageShape(num_kv_heads, head_dim)
        return cls((keys, PageShape(num_kv_heads, v_head_dim or head_dim)))


def layer_caches(
    config: ModelConfig, dtype: str, state_dtype: str = "auto"
) -> tuple[LayerCache, ...]:
    """Return the cache of every layer of a model.

    Parameters
    ----------
    config : ModelConfig
    dtype : str
        Dtype of the activations, which convolutions keep.
    state_dtype : str
        Dtype of recurrent states, one of STATE_DTYPES.

    Raises
    ------
    ConfigError
        If `state_dtype` is none of them.

    Examples
    --------
    >>> config = ModelConfig("llama", 64, 32, 1, 4, 2, 8, 48, 128)
    >>> layer_caches(config, "bfloat16")[0].pages
    (PageShape(num_heads=2, head_dim=8), PageShape(num_heads=2, head_dim=8))
    """
    if state_dtype not in STATE_DTYPES:
        wanted = ", ".join(map(repr, STATE_DTYPES))
        raise ConfigError(f"state_dtype must be one of {wanted}; got {shown(state_dtype)}")
    states = "float32" if state_dtype == "auto" else state_dtype
    return tuple(
        CACHES_OF_KIND[config.kind(layer)](config, layer, dtype, states)
        for layer in range(config.num_layers)
    )


def _attention(config: ModelConfig, layer: int, dtype: str, states: str) -> LayerCache:
    if (source := config.kv_source(layer)) != layer:
        return LayerCache(source=source)
    own = config.at(layer)
    return LayerCache.attention(own.num_kv_heads, own.head_dim)


def _gated_delta(config: ModelConfig, layer: int, dtype: str, states: str) -> LayerCache:
    delta = config.gated_delta
    assert delta is not None
    conv = StateShape((delta.conv_size - 1, delta.conv_dim), dtype)
    heads = delta.num_value_heads, delta.value_head_dim, delta.key_head_dim
    return LayerCache(states=(conv, StateShape(heads, states)))


def _lightning(config: ModelConfig, layer: int, dtype: str, states: str) -> LayerCache:
    lightning = config.lightning
    assert lightning is not None
    heads = lightning.num_heads, lightning.head_dim, lightning.head_dim
    return LayerCache(states=(StateShape(heads, states),))


def _short_conv(config: ModelConfig, layer: int, dtype: str, states: str) -> LayerCache:
    conv = config.short_conv
    assert conv is not None
    return LayerCache(states=(StateShape((conv.state_rows, conv.num_channels), dtype),))


def _mamba2(config: ModelConfig, layer: int, dtype: str, states: str) -> LayerCache:
    mamba = config.mamba2
    assert mamba is not None
    conv = StateShape((mamba.conv_size - 1, mamba.conv_dim), dtype)
    heads = mamba.num_heads, mamba.head_dim, mamba.state_size
    return LayerCache(states=(conv, StateShape(heads, states)))


def _mla(config: ModelConfig, layer: int, dtype: str, states: str) -> LayerCache:
    assert config.mla is not None
    return LayerCache((PageShape(1, config.mla.cache_dim),))


def _shortcut(config: ModelConfig, layer: int, dtype: str, states: str) -> LayerCache:
    return LayerCache(2 * _mla(config, layer, dtype, states).pages)


def _attention_mamba2(config: ModelConfig, layer: int, dtype: str, states: str) -> LayerCache:
    pages = _attention(config, layer, dtype, states).pages
    return LayerCache(pages, _mamba2(config, layer, dtype, states).states)


CACHES_OF_KIND: dict[str, Callable[[ModelConfig, int, str, str], LayerCache]] = {
    "attention": _attention,
    "gated_delta": _gated_delta,
    "lightning": _lightning,
    "short_conv": _short_conv,
    "mamba2": _mamba2,
    "attention_mamba2": _attention_mamba2,
    "mlp": lambda config, layer, dtype, states: LayerCache(),
    "moe": lambda config, layer, dtype, states: LayerCache(),
    "mla": _mla,
    "shortcut": _shortcut,
}
"""Kind of layer -> function of (config, layer, activation dtype, recurrent state dtype)."""
