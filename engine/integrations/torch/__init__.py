"""The engine's kernels as operators of PyTorch: autograd, `torch.compile`, CUDA graphs, vmap.

CUDA tensors run the kernels on the current stream, CPU tensors run the NumPy mirrors. Results come
from torch's allocator. The operators are `torch.ops.engine.*`; the functions here are their public
names.
"""

from engine.integrations.torch.activations import geglu, gelu, relu, silu, swiglu
from engine.integrations.torch.attention import (
    attention,
    attention_varlen,
    scaled_dot_product_attention,
)
from engine.integrations.torch.cross_entropy import cross_entropy
from engine.integrations.torch.embedding import embedding
from engine.integrations.torch.linear_cross_entropy import linear_cross_entropy
from engine.integrations.torch.moe import moe_experts, moe_route
from engine.integrations.torch.norms import layernorm, rmsnorm
from engine.integrations.torch.paged_attention import attention_paged
from engine.integrations.torch.quantized import (
    QuantizedLinear,
    quantize_linears,
    quantized_linear,
)
from engine.integrations.torch.rotary import rope

__all__ = [
    "QuantizedLinear",
    "attention",
    "attention_paged",
    "attention_varlen",
    "cross_entropy",
    "embedding",
    "geglu",
    "gelu",
    "layernorm",
    "linear_cross_entropy",
    "moe_experts",
    "moe_route",
    "quantize_linears",
    "quantized_linear",
    "relu",
    "rmsnorm",
    "rope",
    "scaled_dot_product_attention",
    "silu",
    "swiglu",
]
