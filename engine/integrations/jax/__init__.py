"""The engine's kernels as operations of JAX: `jit`, `grad`, `vmap`, `scan`, without a compiler.

CUDA arrays run the kernels on XLA's stream, CPU arrays run the NumPy mirrors. XLA owns all memory,
scratch memory too, and captures the calls into its CUDA graphs.
"""

from engine.integrations.jax._handlers import register
from engine.integrations.jax.activations import geglu, gelu, relu, silu, swiglu
from engine.integrations.jax.attention import attention, attention_varlen
from engine.integrations.jax.cross_entropy import cross_entropy
from engine.integrations.jax.embedding import embedding
from engine.integrations.jax.linear import linear, linear_fp8, linear_int8
from engine.integrations.jax.linear_cross_entropy import linear_cross_entropy
from engine.integrations.jax.moe import moe_experts, moe_route
from engine.integrations.jax.norms import layernorm, rmsnorm
from engine.integrations.jax.paged import attention_paged, kv_store
from engine.integrations.jax.rotary import rope

__all__ = [
    "attention",
    "attention_paged",
    "attention_varlen",
    "cross_entropy",
    "embedding",
    "geglu",
    "gelu",
    "kv_store",
    "layernorm",
    "linear",
    "linear_cross_entropy",
    "linear_fp8",
    "linear_int8",
    "moe_experts",
    "moe_route",
    "relu",
    "rmsnorm",
    "rope",
    "silu",
    "swiglu",
]

register()
