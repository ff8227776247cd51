"""The catalog of ops: each runs its NumPy mirror (CPU) or its CUDA kernel; what a chip allows
(architecture, tier, limits) is in `_chip.py`, ops of the user's own (`define`) in `_user/`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from engine.errors import did_you_mean
from engine.kernels._attention_pattern import BlockSparse, Periodic
from engine.kernels._override.dispatch import dispatched
from engine.kernels._override.scope import override
from engine.kernels._tools.headers import Header, headers
from engine.kernels._user.define import define
from engine.kernels._user.op import Op
from engine.kernels._user.problem import Launch, Problem
from engine.kernels.activation_backward import activation_backward
from engine.kernels.all_gather import all_gather
from engine.kernels.all_reduce import all_reduce
from engine.kernels.all_reduce_rmsnorm import all_reduce_rmsnorm
from engine.kernels.altup_correct import altup_correct
from engine.kernels.altup_predict import altup_predict
from engine.kernels.attention_backward import attention_backward
from engine.kernels.attention_decode import attention_decode
from engine.kernels.attention_prefill import attention_prefill
from engine.kernels.attention_prefill_fp8 import attention_prefill_fp8
from engine.kernels.causal_conv import causal_conv
from engine.kernels.clamp import clamp
from engine.kernels.cross_entropy import cross_entropy
from engine.kernels.decode_inputs import decode_inputs
from engine.kernels.decode_outputs import decode_outputs
from engine.kernels.dequantize import dequantize
from engine.kernels.embedding import embedding
from engine.kernels.embedding_backward import embedding_backward
from engine.kernels.gated_delta import gated_delta
from engine.kernels.gated_norm import gated_norm
from engine.kernels.gaussian_topk import gaussian_topk
from engine.kernels.geglu import geglu
from engine.kernels.geglu_backward import geglu_backward
from engine.kernels.gelu import gelu
from engine.kernels.gemm import gemm
from engine.kernels.gemm_fp8 import gemm_fp8
from engine.kernels.gemm_int8 import gemm_int8
from engine.kernels.gemm_wna16 import gemm_wna16
from engine.kernels.head_gemm import head_gemm
from engine.kernels.kv_copy import kv_copy
from engine.kernels.kv_gather import kv_gather
from engine.kernels.kv_store import kv_store
from engine.kernels.kv_swap import kv_swap
from engine.kernels.lora_expand import lora_expand
from engine.kernels.lora_shrink import lora_shrink
from engine.kernels.mamba2 import mamba2
from engine.kernels.match_rms import match_rms
from engine.kernels.merge_states import merge_states
from engine.kernels.mla_decode import mla_decode
from engine.kernels.mla_expand import mla_expand
from engine.kernels.mla_store import mla_store
from engine.kernels.moe_activation_backward import moe_activation_backward
from engine.kernels.moe_combine import moe_combine
from engine.kernels.moe_combine_rmsnorm import moe_combine_rmsnorm
from engine.kernels.moe_gemm import moe_gemm
from engine.kernels.moe_gemm_combine import moe_gemm_combine
from engine.kernels.moe_route import Routing, moe_route
from engine.kernels.moe_route_backward import moe_route_backward
from engine.kernels.moe_sort import moe_sort
from engine.kernels.moe_wgrad import moe_wgrad
from engine.kernels.permute_columns import permute_columns
from engine.kernels.qk_norm_rope_store import qk_norm_rope_store
from engine.kernels.quantize_heads import quantize_heads
from engine.kernels.quantize_rows import quantize_rows
from engine.kernels.relu import relu
from engine.kernels.residual_add import residual_add
from engine.kernels.rmsnorm import rmsnorm
from engine.kernels.rmsnorm_backward import rmsnorm_backward
from engine.kernels.rmsnorm_gemm import rmsnorm_gemm
from engine.kernels.rmsnorm_gemm_wna16 import rmsnorm_gemm_wna16
from engine.kernels.rmsnorm_moe_route import rmsnorm_moe_route
from engine.kernels.rmsnorm_quantize import rmsnorm_quantize
from engine.kernels.rope import rope
from engine.kernels.sample import sample
from engine.kernels.scale_rows import scale_rows
from engine.kernels.sigmoid_gate import sigmoid_gate
from engine.kernels.silu import silu
from engine.kernels.swiglu import swiglu
from engine.kernels.swiglu_backward import swiglu_backward
from engine.kernels.swiglu_quantize import swiglu_quantize
from engine.kernels.xielu import xielu

if TYPE_CHECKING:
    from engine.kernels._tools.bench import bench
    from engine.kernels._tools.bench_report import BenchReport
    from engine.kernels._tools.check import check
    from engine.kernels._tools.check_report import CheckReport
    from engine.kernels._tools.profile import profile
    from engine.kernels._tools.profile_report import ProfileReport
    from engine.kernels._tools.watch import Watcher, watch

__all__ = [
    "BenchReport",
    "BlockSparse",
    "CheckReport",
    "Header",
    "Launch",
    "Op",
    "Periodic",
    "Problem",
    "ProfileReport",
    "Routing",
    "Watcher",
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
    "bench",
    "causal_conv",
    "check",
    "clamp",
    "cross_entropy",
    "decode_inputs",
    "decode_outputs",
    "define",
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
    "headers",
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
    "override",
    "permute_columns",
    "profile",
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
    "watch",
    "xielu",
]

_TOOLS = {  # modules of `_tools/`, imported on demand
    "BenchReport": "bench_report",
    "CheckReport": "check_report",
    "ProfileReport": "profile_report",
    "Watcher": "watch",
    **{name: name for name in ("bench", "check", "profile", "watch")},
}


def __getattr__(name: str) -> Any:
    if name in _TOOLS:
        return getattr(importlib.import_module(f"engine.kernels._tools.{_TOOLS[name]}"), name)
    hint = "" if name.startswith("_") else did_you_mean(name, __all__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


# Every op is called through a dispatcher, which finds its override; see `_override/dispatch.py`.
for _name, _op in list(globals().items()):
    if callable(_op) and _op.__module__.startswith(f"{__name__}.{_name}"):
        globals()[_name] = dispatched(_op)
