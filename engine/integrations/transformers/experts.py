"""Experts of transformers' mixtures: our grouped products behind its experts interface."""

from __future__ import annotations

from typing import Any

import torch
from transformers import activations

from engine.errors import ContractError
from engine.integrations import torch as ops

__all__ = ["experts_forward"]

_SILU = (torch.nn.SiLU, activations.SiLUActivation)


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run the chosen experts on each token; for `ExpertsInterface.register`.

    Parameters
    ----------
    module : torch.nn.Module
        Holds gate_up_proj (E, 2F, N) and down_proj (E, N, F); transposed ones are copied.
    hidden_states : (T, N) tensor
    top_k_index, top_k_weights : (T, k) tensors
        Experts of each token, and the factors on their results.

    Returns
    -------
    out : (T, N) tensor of hidden_states' dtype

    Raises
    ------
    ContractError
        If the family's experts are not silu(gate) * up between two products.
    """
    _refuse(module)
    gate_up = module.gate_up_proj
    down = module.down_proj
    if module.is_transposed:
        gate_up = gate_up.transpose(1, 2)
        down = down.transpose(1, 2)
    return ops.moe_experts(hidden_states, gate_up, down, top_k_index, top_k_weights)


def _refuse(module: Any) -> None:
    """Raise a ContractError that names the class, if the kernels do not support its experts."""
    name = type(module).__name__
    gate = type(module)._apply_gate.__name__
    reasons = {
        "they have no gate": not module.has_gate,
        "they have biases": module.has_bias,
        "gate and up are interleaved": not getattr(module, "is_concatenated", True),
        "they norm their results": getattr(module, "has_post_expert_norm", False),
        "they are spread over ranks": getattr(module, "_is_expert_parallel", False),
        "their gate is the family's own": gate != "_default_apply_gate",
        "their activation is not SiLU": not isinstance(getattr(module, "act_fn", None), _SILU),
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ContractError(
            f"experts of {name}: {', '.join(found)}; choose another experts_implementation, such "
            f"as grouped_mm"
        )
