"""Read Falcon-H1's multipliers: factors on activations, which weights take over."""

from __future__ import annotations

from typing import Any

from engine.loading._fields import Fields

__all__ = ["weight_factors"]

_SMALLEST = 1e-9
_LARGEST = 1e9


def weight_factors(fields: Fields, head_dim: int) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that stand for the multipliers.

    A factor on the input of a projection scales its weight, one on the output its bias too; one on
    the keys scales the scores.

    Raises
    ------
    ConfigError
        If a multiplier is out of range.
    """
    z, x, b, c, dt = _factors(fields, "ssm_multipliers", 5)
    gate, down = _factors(fields, "mlp_multipliers", 2)
    attn_in = _factor(fields, "attention_in_multiplier")
    ssm_in = _factor(fields, "ssm_in_multiplier")
    inputs = {"qkv": (attn_in, 1.0)}
    mamba = {"z": z, "x": x, "b": b, "c": c, "dt": dt}
    for part, factor in mamba.items():
        inputs[f"mamba_in.mamba_{part}"] = ssm_in * factor, factor
    outputs = {
        "o": _factor(fields, "attention_out_multiplier"),
        "mamba_out": _factor(fields, "ssm_out_multiplier"),
        "gate_up.gate": gate,
        "down": down,
    }
    both = inputs | {name: (factor, factor) for name, factor in outputs.items()}
    return {
        "embed_scale": _factor(fields, "embedding_multiplier"),
        "logits_scale": _factor(fields, "lm_head_multiplier"),
        "attn_scale": _factor(fields, "key_multiplier") * head_dim**-0.5,
        "weight_factors": tuple((name, *pair) for name, pair in both.items() if pair != (1.0, 1.0)),
    }


def _factor(fields: Fields, key: str) -> float:
    value: float = fields.real(key, _SMALLEST, _LARGEST, 1.0)
    return value


def _factors(fields: Fields, key: str, count: int) -> tuple[float, ...]:
    """Return `count` factors; 1 if the key is missing."""
    given = fields.raw(key)
    if given is None:
        return (1.0,) * count
    if (
        not isinstance(given, list | tuple)
        or len(given) != count
        or any(type(one) not in (int, float) for one in given)
        or not all(_SMALLEST <= one <= _LARGEST for one in given)
    ):
        raise fields.error(key, f"{count} numbers from {_SMALLEST} to {_LARGEST}")
    return tuple(map(float, given))
