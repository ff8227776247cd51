"""The declaration of a family's mixture of experts: keys of config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["MoeFamily", "SparseRule"]

SparseRule = Literal["all", "steps", "after_first"]


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
        The same where a key tells, for a .gguf, most of which do not have it.
    sparse_layers : str
        Which layers have experts: "all", "steps" (as `decoder_sparse_step` and `mlp_only_layers`
        say), or "after_first" (not the first `first_k_dense_replace`).
    score : str
        What the router's logits become: "softmax" or "sigmoid".
    correction : bool
        Whether a number per expert is added to the scores when choosing.
    scale : str
        The key with the factor on the weights; "" if there is none.
    has_groups : bool
        Whether `n_group` and `topk_group` limit the choice.
    shared_width : str
        The key with the features of the shared expert; "" if there is none.
    shared_count : str
        The key with the number of shared experts, of `width` features each; "" if there is none.
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
    sparse_layers: SparseRule = "all"
    score: str = "softmax"
    correction: bool = False
    scale: str = ""
    has_groups: bool = False
    shared_width: str = ""
    shared_count: str = ""
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    activation: str = "swiglu"
