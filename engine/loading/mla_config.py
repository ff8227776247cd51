"""Read the keys of a config.json that declare multi-head latent attention."""

from __future__ import annotations

import math
from typing import Any

from engine.config import MlaConfig, RopeConfig
from engine.loading._fields import MAX_HEADS, MAX_WIDTH, Fields
from engine.models.family import Family

__all__ = ["latent_factors", "mla_config", "mla_scale", "rope_width"]

_MAX_RANK = 512  # L that `kernels.mla_decode` supports
_MAX_ROPE = 64
_MAX_HEAD_DIM = 256  # nope + rope that `kernels.attention_prefill` supports
_MAX_QUERY_RANK = 1 << 16


def mla_config(fields: Fields, kind: Family) -> MlaConfig | None:
    """Return the sizes of a family with latent attention; None for other families.

    Raises
    ------
    ConfigError
        If a key is missing or a number is out of range.
    """
    if not kind.mla:
        return None
    rope = fields.integer("qk_rope_head_dim", 2, _MAX_ROPE)
    if rope % 2:
        raise fields.error("qk_rope_head_dim", "even")
    nope = fields.integer("qk_nope_head_dim", 1, _MAX_HEAD_DIM - rope)
    by_width = fields.integer("hidden_size", 1, MAX_WIDTH) // fields.integer(
        "num_attention_heads", 1, MAX_HEADS
    )
    q_rank = fields.integer("q_lora_rank", 1, _MAX_QUERY_RANK, 0)
    if not q_rank and fields.flag("attention_bias", False):
        raise fields.error("attention_bias", "false without q_lora_rank")
    return MlaConfig(
        q_rank=q_rank,
        kv_rank=fields.integer("kv_lora_rank", 1, _MAX_RANK),
        nope_dim=nope,
        rope_dim=rope,
        v_dim=fields.integer("v_head_dim", 1, nope + rope, by_width),
        head_gate=kind.mla_gate,
    )


def rope_width(fields: Fields, mla: MlaConfig) -> int:
    """Return the width of a head that `partial_rotary_factor` divides: its rotated part or all."""
    values = fields.raw("rope_parameters") or fields.raw("rope_scaling") or {}
    is_partial = isinstance(values, dict) and values.get("partial_rotary_factor") not in (None, 1.0)
    return mla.nope_dim + mla.rope_dim if is_partial else mla.rope_dim


def latent_factors(fields: Fields, mla: MlaConfig) -> dict[str, Any]:
    """Return the factors on the latents' norms: sqrt(N / rank), as if the latents were N wide."""
    hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
    ranks = {"q": mla.q_rank, "kv": mla.kv_rank}
    factors = tuple(
        (f"mla_{name}_norm", (hidden / rank) ** 0.5, 1.0)
        for name, rank in ranks.items()
        if rank and fields.flag(f"mla_scale_{name}_lora", True)
    )
    return {"weight_factors": factors}


def mla_scale(mla: MlaConfig, rope: RopeConfig | None) -> float:
    """Return the factor on q·k: the rope scaling's temperature is in it, squared.

    `rope` is None if nothing is rotated.

    Examples
    --------
    >>> sizes = MlaConfig(q_rank=0, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
    >>> yarn = RopeConfig(scaling="yarn", factor=40.0, mscale_all_dim=1.0)
    >>> round(mla_scale(sizes, yarn) * 192**0.5, 3)
    1.874
    """
    scale: float = (mla.nope_dim + mla.rope_dim) ** -0.5
    if rope is None or rope.scaling == "default" or rope.factor <= 1.0:
        return scale
    return scale * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
