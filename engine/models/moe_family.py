"""The declaration of a family's mixture of experts: keys of config.json."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MoeFamily"]


@dataclass(frozen=True)
class MoeFamily:
    """What families with experts differ in.

    Attributes
    ----------
    num_experts : int
        Where no key of config.json says it.
    width : str
        The key with an expert's features.
    renormalize : bool or str
        Whether a token's weights are divided by their sum, or the key that tells.
    gguf_renormalize : bool
        The same where a key tells, for a .gguf, which does not have it.
    has_dense_layers : bool
        Whether `decoder_sparse_step` and `mlp_only_layers` say which layers have no experts.
    shared_width : str
        The key with the features of the shared expert; "" if there is none.
    shared_gate, router_bias, expert_bias : bool
        Which weights exist.
    activation : str
        Of the experts: "swiglu" (`hidden_act` must agree), or "swiglu_clamped" (with
        `swiglu_alpha` and `swiglu_limit`).
    """

    num_experts: int
    width: str = "intermediate_size"
    renormalize: bool | str = True
    gguf_renormalize: bool = False
    has_dense_layers: bool = False
    shared_width: str = ""
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    activation: str = "swiglu"
