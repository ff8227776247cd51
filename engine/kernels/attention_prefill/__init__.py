"""attention_prefill: flash attention forward. `attention_prefill.py` is the op."""

from engine.kernels.attention_prefill.attention_prefill import attention_prefill, choose_tile, specs

__all__ = ["attention_prefill", "choose_tile", "specs"]
