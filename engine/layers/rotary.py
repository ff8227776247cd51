"""Rope tables: one row of [cos | sin] per position, for every kind of scaling.

The angle of frequency i at position p is p times that frequency. Scalings differ in how they lower
the frequencies beyond the training length. Tables are computed in float64 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from engine.config import RopeConfig
from engine.errors import ConfigError

__all__ = ["attention_factor", "inverse_frequencies", "long_rope_offset", "rope_table"]
__all__ += ["q_factors", "rope_rows", "table_shape"]

Array = np.ndarray[Any, Any]

_ROWS = 8192  # rows computed at a time, to keep the float64 intermediates small


def rope_table(config: RopeConfig, num_positions: int) -> Array:
    """Return the table that `kernels.rope` reads.

    Parameters
    ----------
    config : RopeConfig
    num_positions : int
        Maximum sequence length in tokens.

    Returns
    -------
    (P, R) array of float32
        Row p = [cos(angles of p) | sin(angles of p)], times the attention factor. P is
        `num_positions`, or twice that for longrope beyond the training length: rows of the short
        factors, then, from `long_rope_offset` on, rows of the long factors.

    Notes
    -----
    Dynamic NTK: row p uses the base of a sequence of p + 1 tokens. Other implementations do so only
    when they decode token by token; here it also holds for prompts, however they are chunked.

    Examples
    --------
    >>> rope_table(RopeConfig(theta=10000.0, rotary_dim=2), 2).round(3)
    array([[1.   , 0.   ],
           [0.54 , 0.841]], dtype=float32)
    """
    table = np.empty(table_shape(config, num_positions), np.float32)
    for first, rows in rope_rows(config, num_positions, 0, num_positions):
        table[first : first + len(rows)] = rows
    return table


def rope_rows(
    config: RopeConfig, num_positions: int, start: int, stop: int
) -> Iterator[tuple[int, Array]]:
    """Yield (first row, rows) of `rope_table` for the positions [start, stop), in small parts."""
    scales = attention_factor(config), config.long_attention_factor
    for part in range(table_shape(config, num_positions)[0] // num_positions):
        scale = scales[0] if scales[part] is None else scales[part]
        for first in range(start, stop, _ROWS):
            positions = np.arange(first, min(first + _ROWS, stop))
            angles = positions[:, None] * _frequencies_at(config, positions, is_long=part > 0)
            sines = np.sin(-angles if config.is_reversed else angles)
            rows = np.concatenate([np.cos(angles), sines], axis=1) * scale
            yield part * num_positions + first, rows.astype(np.float32)


def q_factors(config: RopeConfig, positions: Array) -> Array:
    """Return the factors (len(positions),) float32 on rotated queries.

    Examples
    --------
    >>> scaled = RopeConfig(q_scale_beta=0.1, q_scale_length=4)
    >>> q_factors(scaled, np.array([3, 4, 8])).round(3)
    array([1.   , 1.069, 1.11 ], dtype=float32)
    """
    steps = (positions + config.q_scale_start) // config.q_scale_length
    factors = 1.0 + config.q_scale_beta * np.log1p(steps)
    rounded: Array = factors.astype(np.float32)
    return rounded


def table_shape(config: RopeConfig, num_positions: int) -> tuple[int, int]:
    """Return the shape (P, R) of `rope_table`."""
    halves = 2 if long_rope_offset(config, num_positions) else 1
    return halves * num_positions, config.rotary_dim


def long_rope_offset(config: RopeConfig, num_positions: int) -> int:
    """Return the index of the first row with longrope's long factors; 0 for a table without them.

    Examples
    --------
    >>> factors = dict(short_factor=(1.0,), long_factor=(2.0,), original_max_position=4096)
    >>> long_rope_offset(RopeConfig(scaling="longrope", **factors), 8192)
    8192
    """
    is_longer = num_positions > config.original_max_position
    return num_positions if config.has_two_ropes and is_longer else 0


def inverse_frequencies(config: RopeConfig, *, is_long: bool = False, length: int = 0) -> Array:
    """Return the R/2 angles of position 1, in radians (float64).

    Parameters
    ----------
    config : RopeConfig
    is_long : bool
        Longrope: use the long factors.
    length : int
        Dynamic NTK: sequence length in tokens.

    References
    ----------
    Su et al., arXiv:2104.09864 (rope); Chen et al., arXiv:2306.15595 (linear); Peng et al.,
    arXiv:2309.00071 (dynamic NTK, yarn); Ding et al., arXiv:2402.13753 (longrope); Llama 3.1's
    model card (llama3).

    Examples
    --------
    >>> inverse_frequencies(RopeConfig(rotary_dim=4, scaling="linear", factor=4.0))
    array([0.25  , 0.0025])
    """
    if config.scaling == "dynamic":
        only: Array = _dynamic(config, np.array([length]))[0]
        return only
    if config.scaling == "none":
        return np.zeros(config.rotary_dim // 2)
    frequencies = _powers(config.theta, config.rotary_dim)
    if config.scaling == "default":
        return frequencies
    if config.scaling == "linear":
        return frequencies / config.factor
    if config.scaling == "proportional":
        is_rotated = np.arange(len(frequencies)) < config.num_frequencies
        partial: Array = frequencies * is_rotated / config.factor
        return partial
    if config.scaling == "yarn":
        return _yarn(config, frequencies)
    if config.scaling == "llama3":
        return _llama3(config, frequencies)
    if config.scaling == "longrope":
        factors = np.array(config.long_factor if is_long else config.short_factor)
        stretched: Array = frequencies / factors
        return stretched
    raise ConfigError(f"rope scaling must be a known one; got {config.scaling!r}")


def attention_factor(config: RopeConfig) -> float:
    """Return the factor on cos and sin: yarn and longrope sharpen attention with it.

    Examples
    --------
    >>> attention_factor(RopeConfig(scaling="yarn", factor=math.e))
    1.1
    """
    if config.attention_factor is not None:
        return config.attention_factor
    if config.scaling == "yarn":
        if config.mscale and config.mscale_all_dim:
            return _mscale(config.factor, config.mscale) / _mscale(
                config.factor, config.mscale_all_dim
            )
        return _mscale(config.factor, 1.0)
    if config.scaling == "longrope" and config.factor > 1.0:
        return math.sqrt(1.0 + math.log(config.factor) / math.log(config.original_max_position))
    return 1.0


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _frequencies_at(config: RopeConfig, positions: Array, is_long: bool) -> Array:
    """Return the frequencies (R/2,), or (len(positions), R/2) if they depend on the position."""
    if config.scaling == "dynamic":
        return _dynamic(config, positions + 1)
    return inverse_frequencies(config, is_long=is_long)


def _powers(theta: float | Array, rotary_dim: int) -> Array:
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    powers: Array = np.asarray(theta, np.float64)[..., None] ** -exponents
    return powers


def _dynamic(config: RopeConfig, lengths: Array) -> Array:
    """Return the frequencies for sequences of `lengths` tokens; the base grows with the length."""
    dim = config.rotary_dim
    original = config.original_max_position
    stretch = config.factor * np.maximum(lengths, original) / original - (config.factor - 1.0)
    return _powers(config.theta * stretch ** (dim / (dim - 2)), dim)


def _yarn(config: RopeConfig, frequencies: Array) -> Array:
    """Divide frequencies below beta_slow rotations in training, keep those above beta_fast."""
    dim = config.rotary_dim

    def bound(rotations: float) -> float:
        """Return the fractional index of the frequency with `rotations` per training length."""
        wavelengths = config.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(wavelengths) / (2 * math.log(config.theta))

    low = bound(config.beta_fast)
    high = bound(config.beta_slow)
    if config.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    # A ramp of width 0 would divide by zero; the constant is Hugging Face's.
    width = high - low or 0.001
    stretched = np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)
    blend: Array = stretched / config.factor + (1.0 - stretched)
    return frequencies * blend


def _llama3(config: RopeConfig, frequencies: Array) -> Array:
    """Stretch long wavelengths, keep short ones, and interpolate between them."""
    turns = config.original_max_position * frequencies / (2 * math.pi)  # rotations in training
    # With equal bounds (Llama 4) nothing is interpolated: a tiny span rounds to a step.
    span = max(config.high_freq_factor - config.low_freq_factor, 1e-12)
    keep = np.clip((turns - config.low_freq_factor) / span, 0.0, 1.0)
    blend: Array = keep + (1.0 - keep) / config.factor
    return frequencies * blend
