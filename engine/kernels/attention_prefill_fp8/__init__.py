"""attention_prefill_fp8: flash attention on 8-bit floats. `attention_prefill_fp8.py` is the op."""

from engine.kernels.attention_prefill_fp8.attention_prefill_fp8 import attention_prefill_fp8, specs

__all__ = ["attention_prefill_fp8", "specs"]
