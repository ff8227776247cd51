"""MiMo-7B: Qwen2 with multi-token prediction layers after the last one.

These are only loaded as a draft head (`loading/mtp.py`).
"""

from __future__ import annotations

from dataclasses import replace

from engine.models.qwen2 import QWEN2

__all__ = ["MIMO"]

MIMO = replace(
    QWEN2,
    model_type="mimo",
    gguf_arch="",
    gguf_names=(),
    extra_layers="num_nextn_predict_layers",
)
