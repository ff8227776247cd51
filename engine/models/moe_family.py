"""`MoeFamily`: declares a family's mixture of experts by config.json keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["MoeFamily", "SparseRule"]

SparseRule = Literal["all", "steps", "after_first", "interval", "moe_layers", "layer_types"]


@dataclass(frozen=True)
class MoeFamily:
    """Declaration of a family's mixture of experts.

    Attributes
    ----------
    num_experts : int
        Default if config.json lacks the key.
    enabled : str
        Key of the flag that turns the experts on; "" if there is none.
    width : str
        Key of an expert's intermediate size.
    renormalize : bool or str
        Divide a token's weights by their sum; or the key of that flag.
    gguf_renormalize : bool
        Value of `renormalize` for a .gguf without that key; most lack it.
    sparse_layers : str
        Layers with experts: "all", "steps" (by `decoder_sparse_step` and `mlp_only_layers`),
        "after_first" (all but the first `first_k_dense_replace`), "interval" (every
        `moe_layer_interval`-th from `moe_layer_start_index` to `moe_layer_end_index`),
        "moe_layers" (those that key lists; without it, every `interleave_moe_layer_step`-th), or
        "layer_types" (those that it calls "moe").
    lists_layers : bool
        Whether `mlp_layer_types` ("sparse" or "dense" per layer) takes precedence if given.
    score_key : str
        Key of `score`; with it, "softmax" is over the logits of the chosen experts only.
    score : str
        Function of the router's logits: "softmax", "sigmoid" or "sparsemixer" (with
        `router_jitter_noise`, and two experts per token).
    correction : bool or str
        Add a bias per expert to the scores when experts are selected; or the key of that flag.
    scales_input : bool
        A token's only weight multiplies the input of its expert instead of the output.
    scale : str
        Key of the factor on a token's weights; "" for none.
    has_groups : bool
        Whether `n_group` and `topk_group` limit the selection.
    choice_key : str
        Key that says whether groups limit the selection ("group_limited_greedy") or not ("greedy");
        "" if they do whenever there are any.
    sums_groups : bool
        See `MoeConfig.sums_groups`.
    dense_width : str
        Key of the MLP's width in a model with 0 experts; "" if there are none.
    shared_width : str
        Key of the shared expert's intermediate size; "" for none.
    shared_count : str
        Key of the number of shared experts, each of size `width`; "" for none.
    shared_sum : str
        Key that says whether the outputs of the shared expert and the others are added ("sum") or
        averaged ("average"); "" if they are added.
    shared_gate, router_bias, expert_bias, shared_bias : bool or str
        Whether these weights exist; `shared_bias` may be the key of that flag.
    activation : str
        Activation of the experts: "swiglu", "geglu" or "relu2" (`hidden_act` must agree), or
        "swiglu_clamped" (with `swiglu_alpha` and `swiglu_limit`).
    beside_mlp : bool
        Layers with experts have an MLP too. See `MoeConfig`.
    latent_width, latent_bias : str
        Key of `MoeConfig.latent_size`, "" if there is none; and key of the flag `latent_bias`.
    identity_count : str
        Key of the number of zero-compute experts; "" if there are none.
    """

    num_experts: int
    enabled: str = ""
    width: str = "intermediate_size"
    renormalize: bool | str = True
    gguf_renormalize: bool = False
    sparse_layers: SparseRule = "all"
    lists_layers: bool = False
    score_key: str = ""
    score: str = "softmax"
    correction: bool | str = False
    scales_input: bool = False
    scale: str = ""
    has_groups: bool = False
    choice_key: str = ""
    sums_groups: bool = False
    dense_width: str = ""
    shared_width: str = ""
    shared_count: str = ""
    shared_sum: str = ""
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    shared_bias: bool | str = False
    activation: str = "swiglu"
    beside_mlp: bool = False
    latent_width: str = ""
    latent_bias: str = ""
    identity_count: str = ""
