"""Read the keys of a config.json that declare lightning attention."""

from __future__ import annotations

import math

from engine.config import LightningConfig
from engine.loading._fields import MAX_HEADS, MAX_WIDTH, Fields

__all__ = ["lightning_config"]

_MAX_HEAD_DIM = 256  # columns that `kernels.mamba2` supports


def lightning_config(fields: Fields, num_layers: int) -> LightningConfig:
    """Return the sizes and decay rates.

    Raises
    ------
    ConfigError
        If a number is out of range.
    """
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
    head_dim = fields.integer("head_dim", 2, _MAX_HEAD_DIM, hidden // heads)
    groups = fields.integer("group_norm_size", 1, heads)
    if heads % groups:
        raise fields.error("group_norm_size", f"a divisor of the {heads} heads")
    if fields.has("qk_rope_head_dim"):
        rotated = int(head_dim * fields.real("linear_partial_rotary_factor", 0.0, 1.0))
        if fields.integer("qk_rope_head_dim", 2, _MAX_HEAD_DIM) != rotated:  # one table for all
            raise fields.error("qk_rope_head_dim", f"{rotated}, as in lightning attention")
    last = max(1, num_layers - 1)
    return LightningConfig(
        heads,
        head_dim,
        groups,
        fields.flag("use_qk_norm", True),
        _slopes(heads),
        # As in the modeling file beside the checkpoints: the first layer counts as -1.
        tuple(1.0 - (layer - 1) / last + 1e-5 for layer in range(num_layers)),
    )


def _slopes(num_heads: int) -> tuple[float, ...]:
    """Return ALiBi's slopes: 2^(-8 i / n), i from 1 on.

    Beyond the largest power of 2, n, below the number of heads, they are those of 2 n between them.
    """
    power: int = 1 << int(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    between = [2.0 ** (-4.0 * i / power) for i in range(1, 2 * power + 1, 2)]
    return (*slopes, *between[: num_heads - power])
