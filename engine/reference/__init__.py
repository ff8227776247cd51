"""The NumPy mirrors: one file per op, each the specification of the kernel of the same name."""

from engine.reference.activation_backward import activation_backward
from engine.reference.all_gather import all_gather
from engine.reference.all_reduce import all_reduce
from engine.reference.all_reduce_rmsnorm import all_reduce_rmsnorm
from engine.reference.altup_correct import altup_correct
from engine.reference.altup_predict import altup_predict
from engine.reference.attention_backward import attention_backward
from engine.reference.attention_decode import attention_decode
from engine.reference.attention_prefill import attention_prefill
from engine.reference.attention_prefill_fp8 import attention_prefill_fp8
from engine.reference.causal_conv import causal_conv
from engine.reference.clamp import clamp
from engine.reference.cross_entropy import cross_entropy
from engine.reference.decode_inputs import decode_inputs
from engine.reference.decode_outputs import decode_outputs
from engine.reference.dequantize import dequantize
from engine.reference.embedding import embedding
from engine.reference.embedding_backward import embedding_backward
from engine.reference.gated_delta import gated_delta
from engine.reference.gated_norm import gated_norm
from engine.reference.gaussian_topk import gaussian_topk
from engine.reference.geglu import geglu
from engine.reference.geglu_backward import geglu_backward
from engine.reference.gelu import gelu
from engine.reference.gemm import gemm
from engine.reference.gemm_fp8 import gemm_fp8
from engine.reference.gemm_int8 import gemm_int8
from engine.reference.gemm_wna16 import gemm_wna16
from engine.reference.head_gemm import head_gemm
from engine.reference.kv_copy import kv_copy
from engine.reference.kv_gather import kv_gather
from engine.reference.kv_store import kv_store
from engine.reference.kv_swap import kv_swap
from engine.reference.lora_expand import lora_expand
from engine.reference.lora_shrink import lora_shrink
from engine.reference.mamba2 import mamba2
from engine.reference.match_rms import match_rms
from engine.reference.merge_states import merge_states
from engine.reference.mla_decode import mla_decode
from engine.reference.mla_expand import mla_expand
from engine.reference.mla_store import mla_store
from engine.reference.moe_activation_backward import moe_activation_backward
from engine.reference.moe_combine import moe_combine
from engine.reference.moe_combine_rmsnorm import moe_combine_rmsnorm
from engine.reference.moe_gemm import moe_gemm
from engine.reference.moe_gemm_combine import moe_gemm_combine
from engine.reference.moe_route import Routing, moe_route
from engine.reference.moe_route_backward import moe_route_backward
from engine.reference.moe_sort import moe_sort
from engine.reference.moe_wgrad import moe_wgrad
from engine.reference.permute_columns import permute_columns
from engine.reference.qk_norm_rope_store import qk_norm_rope_store
from engine.reference.quantize_heads import quantize_heads
from engine.reference.quantize_rows import quantize_rows
from engine.reference.relu import relu
from engine.reference.residual_add import residual_add
from engine.reference.rmsnorm import rmsnorm
from engine.reference.rmsnorm_backward import rmsnorm_backward
from engine.reference.rmsnorm_gemm import rmsnorm_gemm
from engine.reference.rmsnorm_gemm_wna16 import rmsnorm_gemm_wna16
from engine.reference.rmsnorm_moe_route import rmsnorm_moe_route
from engine.reference.rmsnorm_quantize import rmsnorm_quantize
from engine.reference.rope import rope
from engine.reference.sample import sample
from engine.reference.scale_rows import scale_rows
from engine.reference.sigmoid_gate import sigmoid_gate
from engine.reference.silu import silu
from engine.reference.swiglu import swiglu
from engine.reference.swiglu_backward import swiglu_backward
from engine.reference.swiglu_quantize import swiglu_quantize
from engine.reference.xielu import xielu

__all__ = [
    "Routing",
    "activation_backward",
    "all_gather",
    "all_reduce",
    "all_reduce_rmsnorm",
    "altup_correct",
    "altup_predict",
    "attention_backward",
    "attention_decode",
    "attention_prefill",
    "attention_prefill_fp8",
    "causal_conv",
    "clamp",
    "cross_entropy",
    "decode_inputs",
    "decode_outputs",
    "dequantize",
    "embedding",
    "embedding_backward",
    "gated_delta",
    "gated_norm",
    "gaussian_topk",
    "geglu",
    "geglu_backward",
    "gelu",
    "gemm",
    "gemm_fp8",
    "gemm_int8",
    "gemm_wna16",
    "head_gemm",
    "kv_copy",
    "kv_gather",
    "kv_store",
    "kv_swap",
    "lora_expand",
    "lora_shrink",
    "mamba2",
    "match_rms",
    "merge_states",
    "mla_decode",
    "mla_expand",
    "mla_store",
    "moe_activation_backward",
    "moe_combine",
    "moe_combine_rmsnorm",
    "moe_gemm",
    "moe_gemm_combine",
    "moe_route",
    "moe_route_backward",
    "moe_sort",
    "moe_wgrad",
    "permute_columns",
    "qk_norm_rope_store",
    "quantize_heads",
    "quantize_rows",
    "relu",
    "residual_add",
    "rmsnorm",
    "rmsnorm_backward",
    "rmsnorm_gemm",
    "rmsnorm_gemm_wna16",
    "rmsnorm_moe_route",
    "rmsnorm_quantize",
    "rope",
    "sample",
    "scale_rows",
    "sigmoid_gate",
    "silu",
    "swiglu",
    "swiglu_backward",
    "swiglu_quantize",
    "xielu",
]
