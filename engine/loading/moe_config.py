"""Converts the keys of a config.json that describe experts to a `MoeConfig`."""

from __future__ import annotations

from dataclasses import replace

from engine.config import MoeConfig
from engine.kernels.moe_route import MAX_EXPERTS, MAX_TOP_K
from engine.loading._fields import Fields
from engine.models.moe_family import MoeFamily

__all__ = ["moe_config"]

_MAX_WIDTH = 1 << 20
_MAX_TENSORS = 1 << 16  # experts of all layers together
_COUNT_KEYS = ("num_experts", "num_local_experts")
_SILU = ("silu", "swish")


def moe_config(fields: Fields, kind: MoeFamily | None, num_layers: int) -> MoeConfig | None:
    """Return the experts of a model whose family is declared as `kind`; None if it has none.

    Raises
    ------
    ConfigError
        If a key is missing or a number is out of range.
    """
    if kind is None:
        return None
    num_experts = _num_experts(fields, kind.num_experts, num_layers)
    sparse = _sparse_layers(fields, num_layers) if kind.has_dense_layers else (True,) * num_layers
    if not any(sparse):
        return None
    renormalize = kind.renormalize
    if isinstance(renormalize, str):
        renormalize = fields.flag(renormalize, False)
    shared = fields.integer(kind.shared_width, 1, _MAX_WIDTH) if kind.shared_width else 0
    config = MoeConfig(
        num_experts=num_experts,
        top_k=fields.integer("num_experts_per_tok", 1, min(num_experts, MAX_TOP_K)),
        intermediate_size=fields.integer(kind.width, 1, _MAX_WIDTH),
        sparse_layers=sparse,
        renormalize=renormalize,
        shared_size=shared,
        shared_gate=kind.shared_gate,
        router_bias=kind.router_bias,
        expert_bias=kind.expert_bias,
        activation=kind.activation,
    )
    if kind.activation == "swiglu_clamped":
        alpha = fields.real("swiglu_alpha", 1e-3, 1e3, config.alpha)
        return replace(
            config, alpha=alpha, limit=fields.real("swiglu_limit", 1e-3, 1e6, config.limit)
        )
    if fields.text("hidden_act", "silu") not in _SILU:
        raise fields.error("hidden_act", f"one of {', '.join(_SILU)}, as the experts need")
    return config


def _num_experts(fields: Fields, default: int, num_layers: int) -> int:
    """Return the number of experts of a layer, for which files have two keys."""
    counts = {key: fields.integer(key, 1, MAX_EXPERTS) for key in _COUNT_KEYS if fields.has(key)}
    key = next(iter(counts), _COUNT_KEYS[0])
    if len(set(counts.values())) > 1:
        raise fields.error(key, f"{counts[_COUNT_KEYS[1]]}, as {_COUNT_KEYS[1]} says")
    count = counts.get(key, default)
    if count * num_layers > _MAX_TENSORS:
        raise fields.error(key, f"at most {_MAX_TENSORS // num_layers} (of {num_layers} layers)")
    return count


def _sparse_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Tell for every layer whether it has experts: every n-th, but none of a list."""
    step = fields.integer("decoder_sparse_step", 1, 1 << 31, 1)
    dense = fields.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(one) is not int or one < 0 for one in dense):
        raise fields.error("mlp_only_layers", "a list of layers")
    left_out = set(dense)
    return tuple(i not in left_out and (i + 1) % step == 0 for i in range(num_layers))
