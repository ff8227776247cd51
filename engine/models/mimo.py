"""MiMo-7B: Qwen2 with multi-token prediction layers after the last one.

These are only loaded as a draft head (`loading/mtp.py`).
"""

from __future__ import annotations

from dataclasses import replace

from engine.models.mtp_family import MtpFamily
from engine.models.qwen2 import QWEN2

__all__ = ["MIMO"]

_MTP = "model.mtp_layers.0."

MIMO = replace(
    QWEN2,
    model_type="mimo",
    gguf_arch="",
    gguf_names=(),
    extra_layers="num_nextn_predict_layers",
    mtp=MtpFamily(
        layer=_MTP,
        proj=f"{_MTP}input_proj",
        embed_norm=f"{_MTP}token_layernorm",
        hidden_norm=f"{_MTP}hidden_layernorm",
        final_norm=f"{_MTP}final_layernorm",
        embedding_first=False,
        zero_first=True,
    ),
)
