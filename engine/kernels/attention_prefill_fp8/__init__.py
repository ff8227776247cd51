"""Prefill attention on e4m3 queries, keys and values: configurations and launches."""

from engine.kernels.attention_prefill_fp8.attention_prefill_fp8 import attention_prefill_fp8, specs

__all__ = ["attention_prefill_fp8", "specs"]
