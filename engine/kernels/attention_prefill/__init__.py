"""Prefill attention (flash attention, forward pass): configurations and launches."""

from engine.kernels.attention_prefill.attention_prefill import attention_prefill, choose_tile, specs

__all__ = ["attention_prefill", "choose_tile", "specs"]
