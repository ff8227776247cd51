"""The engine's kernels for Hugging Face transformers: attention, experts, norms, activations.

After `register()` a model is loaded with ``attn_implementation="engine"`` and, if it is a mixture
of experts, ``experts_implementation="engine"``. `kernelize` replaces norms and activations. CUDA
tensors run the kernels, CPU tensors their NumPy mirrors.
"""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ExpertsInterface

from engine.integrations.transformers.attention import attention_forward
from engine.integrations.transformers.experts import experts_forward
from engine.integrations.transformers.layers import kernel_mapping, kernelize
from engine.integrations.transformers.masks import AttentionMask, make_mask

__all__ = [
    "AttentionMask",
    "attention_forward",
    "experts_forward",
    "kernel_mapping",
    "kernelize",
    "make_mask",
    "register",
]


def register(name: str = "engine") -> None:
    """Make the kernels known to transformers; models that are loaded do not change.

    Parameters
    ----------
    name : str
        Name for `attn_implementation` and `experts_implementation`.

    Examples
    --------
    >>> import torch
    >>> import transformers
    >>> register()
    >>> config = transformers.LlamaConfig(
    ...     hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    ...     num_key_value_heads=2, vocab_size=50)
    >>> model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="engine")
    >>> model(torch.arange(6).view(2, 3)).logits.shape
    torch.Size([2, 3, 50])
    """
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, make_mask)
    ExpertsInterface.register(name, experts_forward)
