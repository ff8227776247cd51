"""Keys of .gguf metadata that change a model's result, and the values at which they do not.

A key is read by `gguf_config`, or a value other than its neutral ones is refused. Keys are written
without the architecture's name in front, as in "rope.freq_base" for "llama.rope.freq_base".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["FILE_KEYS", "INERT_KEYS", "MODEL_KEYS", "is_neutral"]

_OFF = (0, False, "")
_FACTOR = (1, 0)  # llama.cpp takes 0 for "not given"

MODEL_KEYS: Mapping[str, tuple[Any, ...]] = {
    # Layers
    "block_count": (),
    "embedding_length": (),
    "embedding_length_out": _OFF,
    "embedding_length_per_layer_input": _OFF,
    "features_length": _OFF,
    "feed_forward_length": (),
    "context_length": (),
    "use_parallel_residual": (),
    "tensor_data_layout": _OFF,
    "nextn_predict_layers": _OFF,
    "n_deepstack_layers": _OFF,
    "decoder_block_count": _OFF,
    "decoder_start_token_id": _OFF,
    "full_attention_interval": _OFF,
    "swin_norm": _OFF,
    "rescale_every_n_layers": _OFF,
    "token_shift_count": _OFF,
    "time_mix_extra_dim": _OFF,
    "time_decay_extra_dim": _OFF,
    "activation_sparsity_scale": _OFF,
    "altup.active_idx": _OFF,
    "altup.num_inputs": _FACTOR,
    "dense_2_feat_in": _OFF,
    "dense_2_feat_out": _OFF,
    "dense_3_feat_in": _OFF,
    "dense_3_feat_out": _OFF,
    "classifier.output_labels": _OFF,
    # Factors and caps
    "logit_scale": _FACTOR,
    "embedding_scale": _FACTOR,
    "residual_scale": _FACTOR,
    "attn_logit_softcapping": _OFF,
    "final_logit_softcapping": _OFF,
    "router_logit_softcapping": _OFF,
    "swiglu_clamp_exp": _OFF,
    "swiglu_clamp_shexp": _OFF,
    # Experts
    "expert_count": _OFF,
    "expert_used_count": (),
    "expert_feed_forward_length": (),
    "expert_shared_count": _OFF,
    "expert_shared_feed_forward_length": _OFF,
    "expert_chunk_feed_forward_length": _OFF,
    "expert_group_count": _FACTOR,
    "expert_group_used_count": _FACTOR,
    "expert_group_scale": _FACTOR,
    "experts_per_group": _OFF,
    "expert_gating_func": (1, 0),  # 1 is softmax over all experts
    "expert_weights_norm": (True,),
    "expert_weights_scale": _FACTOR,
    "leading_dense_block_count": _OFF,
    "interleave_moe_layer_step": _FACTOR,
    "moe_every_n_layers": _FACTOR,
    "moe_latent_size": _OFF,
    # Attention
    "attention.head_count": (),
    "attention.head_count_kv": (),
    "attention.key_length": (),
    "attention.value_length": (),
    "attention.key_length_swa": (),
    "attention.value_length_swa": (),
    "attention.key_length_mla": _OFF,
    "attention.value_length_mla": _OFF,
    "attention.group_norm_epsilon": _OFF,
    "attention.group_norm_groups": _OFF,
    "attention.causal": (True,),
    "attention.clamp_kqv": _OFF,
    "attention.max_alibi_bias": _OFF,
    "attention.scale": _OFF,
    "attention.output_scale": _FACTOR,
    "attention.sliding_window": _OFF,
    "attention.sliding_window_pattern": _OFF,
    "attention.shared_kv_layers": _OFF,
    "attention.temperature_length": _OFF,
    "attention.temperature_scale": _OFF,
    "attention.relative_buckets_count": _OFF,
    "attention.q_lora_rank": _OFF,
    "attention.kv_lora_rank": _OFF,
    "attention.decay_lora_rank": _OFF,
    "attention.iclr_lora_rank": _OFF,
    "attention.value_residual_mix_lora_rank": _OFF,
    "attention.gate_lora_rank": _OFF,
    "attention.gate_per_head": _OFF,
    "attention.indexer.head_count": _OFF,
    "attention.indexer.key_length": _OFF,
    "attention.indexer.top_k": _OFF,
    # Rope
    "rope.dimension_count": (),
    "rope.dimension_count_swa": (),
    "rope.dimension_sections": _OFF,
    "rope.freq_base": (),
    "rope.freq_base_swa": (),
    "rope.freq_base_per_layer": _OFF,
    "rope.global.freq_base": (),  # Ollama's names of freq_base and freq_base_swa in Gemma 3
    "rope.local.freq_base": (),
    "rope.scale_linear": _FACTOR,
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": _FACTOR,
    "rope.scaling.alpha": _FACTOR,
    "rope.scaling.attn_factor": _FACTOR,
    "rope.scaling.mscale": _FACTOR,
    "rope.scaling.yarn_log_multiplier": _OFF,
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.scaling.yarn_attn_factor": (1, -1),
    # Other kinds of layers
    "ssm.conv_kernel": _OFF,
    "ssm.inner_size": _OFF,
    "ssm.state_size": _OFF,
    "ssm.time_step_rank": _OFF,
    "ssm.group_count": _OFF,
    "ssm.dt_b_c_rms": _OFF,
    "kda.head_dim": _OFF,
    "wkv.head_size": _OFF,
    "posnet.embedding_length": _OFF,
    "posnet.block_count": _OFF,
    "convnext.embedding_length": _OFF,
    "convnext.block_count": _OFF,
    "shortconv.l_cache": _OFF,
}
"""Keys below the architecture's name. An empty tuple: neutral only where the value is implied."""

INERT_KEYS = (
    "vocab_size",  # the embedding says it
    "pooling_type",  # see `default_pooling`
    "rope.scaling.finetuned",
    # Of the other kind of norm; the family's own is required.
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    # Bounds of a scaling, read with it.
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)
"""Keys below the architecture's name that do not change the logits, or only if another does."""

FILE_KEYS: Mapping[str, tuple[Any, ...]] = {
    "general.type": ("model",),
    "general.quantization_version": (2,),
    "adapter.type": _OFF,
    "adapter.lora.alpha": _OFF,
    "diffusion.shift_logits": _OFF,
    "xielu.alpha_p": _OFF,
    "xielu.alpha_n": _OFF,
    "xielu.beta": _OFF,
    "xielu.eps": _OFF,
    "clip.projector_type": _OFF,
    "clip.has_vision_encoder": _OFF,
    "clip.has_audio_encoder": _OFF,
}
"""Keys with their whole name; what the tokenizer needs is in `engine.text.gguf_vocab`."""


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Tell whether a value, or each value of an array, is one of `neutral`.

    Numbers are compared to float32's precision, in which the files store them.

    Examples
    --------
    >>> is_neutral(0.0, (1, 0)), is_neutral([1, 0], (1, 0)), is_neutral("yarn", ("none",))
    (True, True, False)
    >>> is_neutral(10**400, (1, 0))
    False
    """
    if isinstance(value, list):
        return all(is_neutral(one, neutral) for one in value)
    if type(value) is int and abs(value) >= 1 << 64:  # too large for `isclose`
        return False
    if type(value) in (int, float):
        numbers = (one for one in neutral if type(one) in (int, float, bool))
        return any(math.isclose(value, one, rel_tol=1e-6) for one in numbers)
    return value in neutral
