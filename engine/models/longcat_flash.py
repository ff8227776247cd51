"""LongCat Flash: two latent attentions a layer, and a shortcut with zero-compute experts."""

from __future__ import annotations

from engine.models.deepseek import MLA_NAMES
from engine.models.expert_names import router_names, separate_expert_names
from engine.models.family import HF_NAMES, SECOND, Family, TensorName
from engine.models.moe_family import MoeFamily
from engine.models.mtp_family import MtpFamily

__all__ = ["LONGCAT_FLASH"]

_HALVES = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")


def _half_names(half: int) -> tuple[TensorName, ...]:
    """Name the tensors of a layer's first (0) or second (1) attention, MLP, and norms."""
    own = [name for name in MLA_NAMES if name.checkpoint.startswith("model.layers.")]
    return tuple(
        name._replace(
            checkpoint=_of_half(name.checkpoint, half),
            kind=SECOND + name.kind if half else name.kind,
        )
        for name in own
    )


def _of_half(checkpoint: str, half: int) -> str:
    for module in _HALVES:
        stored = "mlps" if module == "mlp" else module
        checkpoint = checkpoint.replace(f"}}.{module}.", f"}}.{stored}.{half}.")
    return checkpoint


_MTP = "model.mtp.layers.0."
_MTP_MODULES = {
    "transformer_layer.mlp": "mlps.0",
    **{name: f"{name}.0" for name in _HALVES if name != "mlp"},
}

LONGCAT_FLASH = Family(
    model_type="longcat_flash",
    names=(
        *(name for name in HF_NAMES if "{i}" not in name.checkpoint),
        *_half_names(0),
        *_half_names(1),
        *router_names("mlp.router.classifier"),
        TensorName("model.layers.{i}.mlp.router.e_score_correction_bias", "router_correction"),
        *separate_expert_names("mlp"),
    ),
    gguf_names=(),
    defaults={
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e7,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 12,
        "zero_expert_num": 256,
        "routed_scaling_factor": 6.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    key_aliases={
        "num_layers": "num_hidden_layers",
        "ffn_hidden_size": "intermediate_size",
        "expert_ffn_hidden_size": "moe_intermediate_size",
        "moe_topk": "num_experts_per_tok",
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    interleaved_rope=True,
    mla=True,
    latent_scales=True,
    shortcut=True,
    moe=MoeFamily(
        num_experts=512,
        width="moe_intermediate_size",
        renormalize=False,
        correction=True,
        scale="routed_scaling_factor",
        identity_count="zero_expert_num",
    ),
    mtp=MtpFamily(
        layer=_MTP,
        proj=f"{_MTP}eh_proj",
        embed_norm=f"{_MTP}enorm.m",
        hidden_norm=f"{_MTP}hnorm.m",
        final_norm="model.mtp.norm",
        repeated=("model.mtp.embed_tokens",),
        modules=_MTP_MODULES,
    ),
)
