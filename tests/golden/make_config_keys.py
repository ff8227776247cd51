"""Measure which keys of config.json change a model's logits in transformers. Not part of CI.

    pip install torch transformers
    python tests/golden/make_config_keys.py [family ...]

For each family, a tiny random model computes logits with its plain configuration, and with one key
changed, from the same weights. Keys that change the shapes of tensors are left out. Named families
replace their lines in the file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Mistral4ForCausalLM,
)

OUT = Path(__file__).with_name("config_keys.json")
SPARSE = (
    *("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "granitemoe", "gpt_oss", "glm4_moe"),
    *("afmoe", "hunyuan_v1_moe", "qwen3_vl_moe_text"),
    *("dots1", "solar_open", "minimax_m2", "hy_v3", "ernie4_5_moe", "exaone_moe", "mellum"),
    *("flex_olmo", "granitemoeshared", "llama4_text", "cohere2_moe", "mimo_v2_flash"),
    *("qwen3_next", "qwen3_5_moe_text", "lfm2_moe", "granitemoehybrid"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "phimoe"),
    *("kimi_linear", "bailing_hybrid", "mistral4", "sarvam_moe", "sarvam_mla"),
    "granitemoe_swa",
)
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "longcat_flash")
LATENT += ("minicpm3", "mistral4", "sarvam_mla")
SWITCHED = ("qwen2", "qwen3", "smollm3", "qwen2_moe", "qwen3_moe")
SWITCHED += ("qwen2_vl_text", "qwen2_5_vl_text")
FAMILIES = (
    *(
        "llama",
        "mistral",
        "ministral",
        "ministral3",
        "qwen2",
        "qwen3",
        "phi3",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
        "gemma4_unified_text",
    ),
    *("granite", "olmo2", "olmo3", "smollm3", "glm4", "starcoder2", "stablelm", "cohere2", "phi"),
    *("gemma", "vaultgemma", "glm", "seed_oss", "ernie4_5", "exaone4", "helium", "hyperclovax"),
    *SPARSE,
    *("arcee", "nemotron", "jais2", "gpt_neox", "hunyuan_v1_dense"),
    *("apertus", "olmo", "nanochat", "youtu", "minicpm3", "bitnet"),
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"),
    *("qwen3_5_text", "lfm2", "nemotron_h", "olmo_hybrid", "falcon_h1", "bamba", "lfm3"),
    *("exaone", "internlm3", "iquestcoder", "cohere", "granite_swa"),
    *("persimmon", "falcon", "gpt2", "opt", "gpt_bigcode", "gpt_neo"),
)
PLAIN = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8, "sliding_window": 3,
}  # fmt: skip
EXPERTS = {
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_shared_experts": 1,
}  # fmt: skip
_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "full_attention_interval": 2,
}  # fmt: skip
_DELTA = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "n_group": 2, "topk_group": 1,
    "linear_num_heads": 4, "linear_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}  # fmt: skip
_TYPES = ["conv", "full_attention", "conv", "full_attention"]
HYBRIDS = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _LINEAR),
    "lfm2": {"layer_types": _TYPES},
    "lfm2_moe": {"layer_types": _TYPES, "num_dense_layers": 1},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mamba_n_heads": 4, "mamba_d_state": 8, "shared_intermediate_size": 16,
    },
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), _DELTA),
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 2},
    "lfm3": {"layer_types": ["conv", "sliding_attention", "full_attention", "conv"]},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_state": 8},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
        "n_routed_experts": 8, "moe_intermediate_size": 16, "n_group": 4, "topk_group": 2,
        "moe_shared_expert_intermediate_size": 16,
        "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8,
    },
}  # fmt: skip
RANKS = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
LONGCAT = {"num_layers": 2, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 16, "moe_topk": 3}
LONGCAT |= {"zero_expert_num": 3}
GROUPED = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "sarvam_mla")
GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
# Text models without a class of their own that computes logits -> the type of the whole model.
WHOLE = {f"{name}_text": name for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")}
LLAMA4 = {"num_experts_per_tok": 1, "attention_chunk_size": 5, "floor_scale": 4}
SHARED = {"num_kv_shared_layers": 1, "hidden_size_per_layer_input": 4}
SHARED |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
TOWER = {"depth": 1, "num_heads": 2, "hidden_size": 8, "out_hidden_size": 32, "patch_size": 4}
SIZES = ("model_type", "vocab_size", "num_hidden_layers", "dtype", "architectures")
IDS = torch.tensor([[5, 9, 3, 17, 30, 2, 11, 8, 7, 33, 21, 4]])


def others(key: str, value: object) -> list:
    """Return values of another kind than the plain one."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, max(1, value // 2)]
    if isinstance(value, float):
        return [round(value * 0.5 + 0.1, 6)]
    if isinstance(value, str):
        return {
            "hidden_act": ["gelu"],
            "hidden_activation": ["silu"],
            "mlp_hidden_act": ["silu"],
            "activation_function": ["gelu"],
        }.get(key, [])
    if isinstance(value, list):
        return (
            [value[::-1], ["full_attention"] * len(value)]
            if key == "layer_types"
            else [value[::-1]]
        )
    if isinstance(value, dict) and "rope_theta" in value:
        return [{**value, "rope_theta": 77.0}]
    return [2, True] if value is None else []


def build(family: str, values: dict):
    if family in WHOLE:
        tower = {**TOWER, "embed_dim": 8, "hidden_size": 32} if "qwen2_vl" in family else TOWER
        config = AutoConfig.for_model(
            WHOLE[family], text_config=values, vision_config=tower, tie_word_embeddings=False
        )
        whole = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
        return whole.float().eval()
    config = AutoConfig.for_model(family, **values)
    config._attn_implementation = "eager"
    if family == "mistral4":  # not in AutoModelForCausalLM
        return Mistral4ForCausalLM(config).float().eval()
    return AutoModelForCausalLM.from_config(config).float().eval()


def measure(family: str) -> dict:
    values = dict(PLAIN)
    values |= EXPERTS if family in SPARSE else {}
    values |= RANKS if family in LATENT else {}
    values |= {"head_dim": 16} if family == "mistral4" else {}
    values |= LONGCAT if family == "longcat_flash" else {}
    values |= GROUPS if family in GROUPED else {}
    values |= {"use_sliding_window": True, "max_window_layers": 1} if family in SWITCHED else {}
    values |= {"rope_parameters": MROPE} if family in WHOLE else {}
    values |= LLAMA4 if family == "llama4_text" else {}
    values |= {"v_head_dim": 6} if family == "mimo_v2_flash" else {}
    values |= HYBRIDS.get(family, {})
    values |= SHARED if family in ("gemma3n_text", "gemma4_text") else {}
    values |= {"global_head_dim": 8} if family.startswith("gemma4") else {}
    if family == "falcon":
        values.pop("head_dim")
    if family == "gpt_neo":
        values |= {"attention_types": [[["global", "local"], 2]], "window_size": 5}
    model = build(family, values)
    generator = torch.Generator().manual_seed(1)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    weights = {
        name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()
    }

    def logits(model):
        model.load_state_dict(weights)
        with torch.no_grad():
            return model(IDS).logits

    plain = logits(model)
    changed = {}
    for key, value in model.config.get_text_config().to_dict().items():
        for other in others(key, value) if key not in SIZES else ():
            try:
                found = build(family, {**values, key: other})
                if {name: one.shape for name, one in found.state_dict().items()} != shapes:
                    continue
                got = logits(found)
            except Exception:  # transformers refuses the value
                continue
            if not torch.allclose(got, plain, atol=1e-5):
                changed[key] = other
                break
    return {"config": values, "changed": changed}


if __name__ == "__main__":
    torch.set_num_threads(1)
    known = json.loads(OUT.read_text()) if sys.argv[1:] else {}
    found = {**known, **{one: measure(one) for one in sys.argv[1:] or FAMILIES}}
    lines = [f" {json.dumps(one)}: {json.dumps(values)}" for one, values in found.items()]
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
