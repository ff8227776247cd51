"""Keys of config.json that change a model's result, and the values at which they do not.

A key is read with the family that has it. In a file of another family it must be null or have one
of its neutral values: what that family computes anyway. Keys that only say which tensors exist,
such as `attention_bias` or a number of experts, are not listed, because missing and unexpected
tensors are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.config import ModelConfig, MoeConfig
from engine.errors import ConfigError
from engine.loading._fields import Fields
from engine.loading.gguf_keys import is_neutral
from engine.models.family import Family

__all__ = ["CONFIG_KEYS", "ROPE_KEYS", "refuse_unread", "refuse_unread_rope"]

_OFF = (0, False, "")
_NONE = ()

CONFIG_KEYS: Mapping[str, tuple[Any, ...]] = {
    # Factors and caps
    "attention_multiplier": _NONE,
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "scale_emb": (1,),
    "scale_depth": _OFF,
    "dim_model_base": _OFF,
    "mup_enabled": _OFF,
    "lm_head_multiplier": (1,),
    "key_multiplier": (1,),
    "query_pre_attn_scalar": _OFF,
    "attn_logit_softcapping": _OFF,
    "final_logit_softcapping": _OFF,
    "router_logit_softcapping": _OFF,
    "clip_qkv": _OFF,
    "attention_value_scale": (1,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": _OFF,
    "swiglu_limit": _OFF,
    "swiglu_alpha": _OFF,
    "expert_swiglu_limit_list": _OFF,
    "share_expert_swiglu_limit_list": _OFF,
    # Which positions attend to which
    "use_bidirectional_attention": _OFF,
    "is_causal": (True,),
    "is_encoder_decoder": _OFF,
    "add_cross_attention": _OFF,
    "layer_types": ("full_attention",),
    "attention_types": _NONE,
    "attention_layers": _NONE,
    "use_sliding_window": (False, True),
    "sliding_window_pattern": _OFF,
    "interleaved_sliding_window": _OFF,
    "attention_chunk_size": _OFF,
    "full_attention_interval": (1, 0),
    # Rope
    "position_embedding_type": ("rope", "rotary", "rope_gptj", "rope_llama", "absolute"),
    "use_rope": (True,),
    "no_rope_layers": (1,),
    "layer_rope_theta": _NONE,
    "no_rope_layer_interval": _OFF,
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "rotary_pct": (1,),
    "rope_pct": (1,),
    "rotary_dim": _NONE,
    "rope_ratio": (1,),
    "rope_local_base_freq": _NONE,
    "use_mrope": _OFF,
    "alibi": _OFF,
    "use_alibi": _OFF,
    "attn_temperature_tuning": _OFF,
    # Norms and blocks
    "do_layer_norm_before": (True,),
    "_remove_final_layer_norm": _OFF,
    "layer_norm_elementwise_affine": (True,),
    "word_embed_proj_dim": _NONE,
    "qk_layernorm": _OFF,
    "use_qk_norm": _OFF,
    "use_parallel_residual": _OFF,
    "use_parallel_block": _OFF,
    "parallel_attn": _OFF,
    "use_gated_activation": (True,),
    "mla_use_nope": (True,),
    "linear_rope": (True,),
    "linear_silu": _OFF,
    "use_linear_silu": _OFF,
    "gated_attention_proj_granularity_type": ("head_wise",),
    "q_lora_rank": _OFF,
    "mla_scale_q_lora": _OFF,
    "mla_scale_kv_lora": _OFF,
    "kv_lora_rank": _OFF,
    "v_head_dim": _NONE,
    "num_kv_shared_layers": _OFF,
    "attention_k_eq_v": _OFF,
    "use_double_wide_mlp": _OFF,
    "global_head_dim": _NONE,
    "num_global_key_value_heads": _NONE,
    "hidden_size_per_layer_input": _OFF,
    "altup_num_inputs": (1, 0),
    "laurel_rank": _OFF,
    "activation_sparsity_pattern": _OFF,
    "per_layer_config": _NONE,
    "block_configs": _NONE,
    # Experts
    "mlp_layer_types": _NONE,
    "moe_layer_start_index": _OFF,
    "moe_layer_end_index": (-1,),
    "moe_layer_interval": (1,),
    "enable_moe_block": _OFF,
    "experts_per_token": _NONE,
    "first_k_dense_replace": _OFF,
    "moe_layer_freq": (1,),
    "moe_shared_expert_intermediate_size": _NONE,
    "interleave_moe_layer_step": (1,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": _NONE,
    "norm_topk_prob": (True, False),
    "scoring_func": ("softmax",),
    "topk_method": ("greedy",),
    "n_group": (1, 0),
    "topk_group": (1, 0),
    "routed_scaling_factor": (1, False),
    "moe_norm_min": (1e-12, 0, 1e-20),
    "apply_router_weight_on_input": _OFF,
    "zero_expert_num": _OFF,
    "router_bias": _OFF,
}
"""Keys of config.json -> values at which they change nothing, unless `_implied` has others."""

ROPE_KEYS: Mapping[str, tuple[Any, ...]] = {
    "alpha": (1,),
    "llama_4_scaling_beta": _OFF,
    "extrapolation_factor": (1,),
    "rope_ratio": (1,),
}
"""The same for keys of `rope_scaling` and `rope_parameters`, which no family here reads."""

# Keys of config.json that some rope type, or another program, reads; HF and vLLM ignore the rest.
_INERT_ROPE_KEYS = frozenset((
    *("type", "rope_type", "rope_theta", "partial_rotary_factor", "finetuned", "factor"),
    *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale"),
    *("mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor", "short_factor"),
    *("long_factor", "short_mscale", "long_mscale", "mrope_section", "mrope_interleaved"),
    *("full_attention", "sliding_attention", "max_position_embeddings", "apply_yarn_scaling"),
))  # fmt: skip


def refuse_unread(
    fields: Fields, given: Mapping[str, Any], kind: Family, config: ModelConfig
) -> None:
    """Refuse keys in `given` that were not read and that say something else than `config`.

    Raises
    ------
    ConfigError
        The message names the first such key, and its value.
    """
    implied = _implied(kind, config)
    implied |= {key: (given.get(key),) for key in _overruled(given, kind, config)}
    for key in fields.unread():
        if key not in CONFIG_KEYS or key not in given or key in kind.idle_keys:
            continue
        neutral = implied.get(key, CONFIG_KEYS[key])
        if not is_neutral(given[key], neutral):
            raise _wrong(fields, key, neutral, kind)


def refuse_unread_rope(rope: Fields, kind: Family) -> None:
    """Do the same for an object of rope parameters; keys on no list are logged as warnings."""
    for key in rope.unread():
        value = rope.raw(key)
        if value is None:
            continue
        if key in ROPE_KEYS and not is_neutral(value, ROPE_KEYS[key]):
            raise _wrong(rope, key, ROPE_KEYS[key], kind)
        if key not in ROPE_KEYS and key not in _INERT_ROPE_KEYS:
            rope.warn(key, "is unknown and not read")


def _wrong(fields: Fields, key: str, neutral: tuple[Any, ...], kind: Family) -> ConfigError:
    wanted = f"null or {neutral[0]!r}" if neutral and neutral[0] != "" else "null"
    return fields.error(key, f"{wanted} ({kind.model_type} has nothing else)")


def _overruled(given: Mapping[str, Any], kind: Family, config: ModelConfig) -> list[str]:
    """Return the keys that do not matter, since a list of layers in the file takes precedence."""
    keys = []
    if "pattern" in kind.windows or not any(config.layer_windows):
        keys.append("sliding_window_pattern")  # or no layer has a window
    if kind.moe is not None and kind.moe.lists_layers and "mlp_layer_types" in given:
        keys.append("first_k_dense_replace")
    return keys


def _implied(kind: Family, config: ModelConfig) -> dict[str, tuple[Any, ...]]:
    """Return the neutral values that depend on the family, or on keys that were read."""
    rotated = config.rope.rotary_dim / config.head_dim
    implied: dict[str, tuple[Any, ...]] = {
        # Gemma's "vision" is about the tokens of images alone.
        "use_bidirectional_attention": (*_OFF, "vision"),
        "rotary_pct": (rotated,),
        "rope_pct": (rotated,),
        "rotary_dim": (config.rope.rotary_dim,),
        "rope_local_base_freq": ((config.rope_local or config.rope).theta,),
        "v_head_dim": (config.head_dim,),
        "word_embed_proj_dim": (config.hidden_size,),
        "use_gated_activation": (config.gated_mlp,),
    }
    implied |= dict.fromkeys(
        ("use_parallel_residual", "use_parallel_block", "parallel_attn"), (config.parallel,)
    )
    implied |= dict.fromkeys(("rope_interleave", "rope_interleaved"), (config.interleaved_rope,))
    if config.qk_norm:
        implied |= dict.fromkeys(("qk_layernorm", "use_qk_norm"), (True, False))
    if any(config.layer_windows):
        implied["use_sliding_window"] = (True,)
    if kind.rope_layers == "no_rope_layers":
        implied["no_rope_layer_interval"] = tuple(range(1025))  # `no_rope_layers` says it
    if (moe := config.moe) is not None:
        implied["experts_per_token"] = (moe.top_k,)
        implied["norm_topk_prob"] = (moe.renormalize,)
        # dots.llm1 calls it as DeepSeek's method of selection.
        implied["scoring_func"] = (moe.score, "noaux_tc") if moe.correction else (moe.score,)
        implied["topk_method"] = _topk_methods(moe)
        implied["moe_shared_expert_intermediate_size"] = (moe.intermediate_size,)
    if (mla := config.mla) is not None:
        implied["v_head_dim"] = (mla.v_dim,)
    return implied


def _topk_methods(moe: MoeConfig) -> tuple[str, ...]:
    """Return DeepSeek's names of the selection of experts."""
    if moe.correction:
        return ("noaux_tc",)
    grouped = "group_limited_greedy"
    return (grouped,) if moe.top_groups < moe.num_groups else ("greedy", grouped)
