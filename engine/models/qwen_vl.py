"""The text models of Qwen2-VL, 2.5-VL and 3-VL: qwen2, qwen3 and qwen3_moe with mrope.

mrope rotates by three positions: time, height and width. Those of a text token are equal, so it is
the rope of the other families, however `mrope_section` divides the frequencies.
"""

from __future__ import annotations

from dataclasses import replace

from engine.models.expert_names import fused_expert_names
from engine.models.family import Family
from engine.models.qwen2 import QWEN2
from engine.models.qwen3 import QWEN3
from engine.models.qwen3_moe import QWEN3_MOE
from engine.models.tensor_layout import Layout

__all__ = ["QWEN2_5_VL_TEXT", "QWEN2_VL_TEXT", "QWEN3_VL_MOE_TEXT", "QWEN3_VL_TEXT"]


def _text(family: Family, model_type: str, gguf_arch: str, **defaults: object) -> Family:
    """Return the text model of a type."""
    return replace(
        family,
        model_type=model_type,
        gguf_arch=gguf_arch,
        defaults={**family.defaults, **defaults},
        rope_aliases={"mrope": "default"},
        mrope=True,
    )


_QWEN2_DEFAULTS = {
    "vocab_size": 152064,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_window_layers": 80,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_QWEN3_DEFAULTS = {"vocab_size": 151936, "max_position_embeddings": 128000, "rope_theta": 5e5}
_EXPERTS = {
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
    "tie_word_embeddings": True,
}

# NOTE: .gguf files of both have one architecture.
QWEN2_VL_TEXT = _text(QWEN2, "qwen2_vl_text", "", **_QWEN2_DEFAULTS)
QWEN2_5_VL_TEXT = _text(QWEN2, "qwen2_5_vl_text", "qwen2vl", **_QWEN2_DEFAULTS)
QWEN3_VL_TEXT = replace(
    _text(QWEN3, "qwen3_vl_text", "qwen3vl", num_key_value_heads=32, **_QWEN3_DEFAULTS),
    windows="never",
)

_moe = _text(
    QWEN3_MOE,
    "qwen3_vl_moe_text",
    "qwen3vlmoe",
    num_key_value_heads=16,
    **_QWEN3_DEFAULTS,
    **_EXPERTS,
)
assert _moe.moe is not None
QWEN3_VL_MOE_TEXT = replace(
    _moe,
    # Published checkpoints store (in, out); transformers 5 writes (out, in).
    names=(*_moe.names, *fused_expert_names(layout=Layout(transposed=True), form="fused_in_out")),
    windows="never",
    moe=replace(_moe.moe, num_experts=60, renormalize=True),
)
