"""The kernels launched by a model, compiled before the first step."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection
from typing import Any

from engine.config import ModelConfig
from engine.device import Device
from engine.kernels import _module
from engine.kernels._module import ModuleSpec
from engine.models.rope_tables import has_q_factors
from engine.weights import Format

__all__ = ["kernel_specs", "prepare_kernels", "prepare_quantized_kv", "quantized_kv_specs"]

# Activation of an MLP -> the op that applies it to up, and the one that multiplies gate and up.
_PLAIN = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu", "xielu": "xielu"}
_PLAIN |= dict.fromkeys(("relu", "relu2"), "relu")
_GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu", "relu2": "relu"}
_MOE_OPS = (
    *("moe_combine", "moe_combine_rmsnorm", "moe_gemm", "moe_gemm_combine", "moe_route"),
    "rmsnorm_moe_route",
)
_PAGE_OPS = (
    "attention_decode",
    "attention_prefill",
    "kv_copy",
    "kv_swap",
    "qk_norm_rope_store",
)
_LATENT_OPS = ("mla_decode", "mla_store", "mla_expand", "head_gemm", "kv_gather")
_KIND_OPS: dict[str, tuple[str, ...]] = {
    "attention": (),
    "gated_delta": ("causal_conv", "gated_delta", "gated_norm"),
    "lightning": ("rope", "mamba2", "gated_norm"),
    "short_conv": ("causal_conv", "residual_add"),
    "mamba2": ("causal_conv", "mamba2", "gated_norm", "swiglu"),
    "attention_mamba2": ("causal_conv", "mamba2", "gated_norm", "swiglu", "residual_add"),
    "mlp": (),
    "moe": ("relu", "residual_add"),
    "shortcut": ("residual_add", *_LATENT_OPS),
    "mla": _LATENT_OPS,
}
# Op -> dtypes besides the model's: logits and barriers are float32, ids move as float16.
_RANK_OPS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("float32",),
    "all_reduce_rmsnorm": (),
    "all_gather": ("float32", "float16"),
    "residual_add": (),
}
_OPS = (
    "attention_decode",
    "attention_prefill",
    "decode_inputs",
    "decode_outputs",
    "embedding",
    "gemm",
    "kv_copy",
    "kv_swap",
    "qk_norm_rope_store",
    "rmsnorm",
    "rmsnorm_gemm",
    "sample",
)


def kernel_specs(
    config: ModelConfig,
    dtype: str,
    formats: Collection[Format] = (),
    *,
    is_shared: bool = False,
    has_patterns: bool = False,
    has_adapters: bool = False,
    deterministic: bool = False,
) -> list[ModuleSpec]:
    """Return every kernel module that the model in `dtype` may launch.

    `formats`: formats of its weights; dense ones may be omitted. `is_shared`: the model is one
    rank's shard. `has_patterns`: some layers have an attention pattern. `has_adapters`: there is
    room for LoRA adapters. `deterministic`: its products are launched with `deterministic=True`.

    Examples
    --------
    >>> config = ModelConfig("llama", 64, 32, 1, 4, 2, 8, 48, 128)
    >>> any(spec.file == "rmsnorm.cu" for spec in kernel_specs(config, "float16"))
    True
    """
    chosen = [_GATED[config.activation] if config.gated_mlp else _PLAIN[config.activation]]
    is_bare = not config.pre_norms or config.norms_by_kind
    has_sums = config.parallel or is_bare or config.layer_scale or config.altup
    if has_sums or config.learned_positions:
        chosen.append("residual_add")
    if config.kv_sources:
        chosen.append("rope")
    if config.altup is not None:
        chosen += ["altup_predict", "altup_correct", "match_rms", "gaussian_topk"]
    if config.qk_norm and config.own_qk_norms:
        chosen.append("gated_norm")
    if config.clip_qkv:
        chosen.append("clamp")
    if config.attn_gate or (config.mla is not None and config.mla.head_gate):
        chosen.append("sigmoid_gate")
    specs: list[ModuleSpec] = []
    for kind in dict.fromkeys(config.layer_kinds):
        chosen += _KIND_OPS[kind]
    if config.moe is not None:
        chosen += _MOE_OPS
    if _scales_rows(config):
        chosen.append("scale_rows")
    if has_adapters:
        chosen += ("moe_sort", "lora_shrink", "lora_expand")
    chosen += _quantized_ops(formats)
    for op in (*_OPS, *chosen):
        # Imported by name: the package's attribute `op` is the function, not the module.
        module = importlib.import_module(f"engine.kernels.{op}")
        for head_dim in config.head_dims:
            specs += module.specs(
                dtype,
                head_dim=head_dim,
                latent_dim=None if config.mla is None else config.mla.kv_rank,
                subtract_mean=config.layer_norm,
                norm_after_rope=config.qk_norm_after_rope,
                q_factors=has_q_factors(config),
                formats=tuple(form.name for form in formats),
                deterministic=deterministic,
                has_peers=is_shared,
                **({"patterns": True} if has_patterns and op == "attention_prefill" else {}),
                **(_delta_heads(config) if op == "gated_delta" else {}),
                **(_mamba_states(config) if op == "mamba2" else {}),
            )
    if config.mla is not None and has_q_factors(config):  # looked up in a table of float32
        specs += importlib.import_module("engine.kernels.embedding").specs("float32")
    if is_shared:
        specs += _collective_specs(dtype)
    return list(dict.fromkeys(specs))


def _delta_heads(config: ModelConfig) -> dict[str, Any]:
    """Return the sizes of gated delta heads as options of `specs`."""
    delta = config.gated_delta
    assert delta is not None
    dims = {"key_dim": delta.key_head_dim, "value_dim": delta.value_head_dim}
    return {**dims, "has_channel_gate": delta.channel_gate}


def _mamba_states(config: ModelConfig) -> dict[str, Any]:
    """Return the shape of a state of `mamba2` as an option of `specs`."""
    if config.lightning is not None:
        return {"state_shape": (config.lightning.head_dim,) * 2}
    assert config.mamba2 is not None
    return {"state_shape": (config.mamba2.head_dim, config.mamba2.state_size)}


def _scales_rows(config: ModelConfig) -> bool:
    """Tell whether layers scale rows of experts' inputs or outputs, or of attention's output."""
    moe = config.moe
    has_factor = moe is not None and (moe.scales_input or moe.shared_scale != 1.0)
    has_factor = has_factor or (config.mla is not None and has_q_factors(config))
    return has_factor or config.v_scale != 1.0 or bool(config.v_head_dim)


def _collective_specs(dtype: str) -> list[ModuleSpec]:
    """Return the kernel modules of the collectives, for activations, logits and token ids."""
    specs: list[ModuleSpec] = []
    for op, dtypes in _RANK_OPS.items():
        module = importlib.import_module(f"engine.kernels.{op}")
        for each in (dtype, *dtypes):
            specs += module.specs(each)
    return specs


def quantized_kv_specs(
    config: ModelConfig, dtype: str, kv_dtype: str, *, deterministic: bool = False
) -> list[ModuleSpec]:
    """Return the additional modules, beyond `kernel_specs`, for a KV cache in `kv_dtype`.

    Examples
    --------
    >>> config = ModelConfig("llama", 64, 32, 1, 4, 2, 8, 48, 128)
    >>> "kv_copy.cu" in {spec.file for spec in quantized_kv_specs(config, "float16", "int8")}
    True
    """
    specs: list[ModuleSpec] = []
    for op in _PAGE_OPS:
        module = importlib.import_module(f"engine.kernels.{op}")
        for head_dim in config.head_dims:
            specs += module.specs(
                dtype,
                head_dim=head_dim,
                kv_dtype=kv_dtype,
                deterministic=deterministic,
                norm_after_rope=config.qk_norm_after_rope,
                q_factors=has_q_factors(config),
            )
    return list(dict.fromkeys(specs))


def _quantized_ops(formats: Collection[Format]) -> list[str]:
    """Return the ops for products with weights of these formats."""
    ops: list[str] = []
    for form in formats:
        if form.activations:
            ops += [f"gemm_{form.activations}", "rmsnorm_quantize"]
        elif form.is_packed:
            ops += ["gemm_wna16", "rmsnorm_gemm_wna16"]
    return list(dict.fromkeys(ops))


def prepare_kernels(
    config: ModelConfig,
    dtype: str,
    device: Device,
    *,
    formats: Collection[Format] = (),
    is_shared: bool = False,
    has_patterns: bool = False,
    has_adapters: bool = False,
    deterministic: bool = False,
    progress: bool = False,
) -> None:
    """Load all kernels of a model; compile those not cached. Later compilations are counted.

    Raises
    ------
    CompileError
        If NVRTC fails to compile one.
    """
    specs = kernel_specs(
        config,
        dtype,
        formats,
        is_shared=is_shared,
        has_patterns=has_patterns,
        has_adapters=has_adapters,
        deterministic=deterministic,
    )
    _prepare(specs, device, progress=progress)


def prepare_quantized_kv(
    config: ModelConfig,
    dtype: str,
    kv_dtype: str,
    device: Device,
    *,
    deterministic: bool = False,
) -> None:
    """Load the kernels for a KV cache in `kv_dtype`, a name in KV_CODE_DTYPES; none on the CPU.

    Raises
    ------
    CompileError
        If NVRTC fails to compile one.
    """
    if device.is_cuda:
        specs = quantized_kv_specs(config, dtype, kv_dtype, deterministic=deterministic)
        _prepare(specs, device, progress=sys.stderr.isatty())


def _prepare(specs: list[ModuleSpec], device: Device, *, progress: bool) -> None:
    _module.mark_ready(False)
    device.activate()
    arch = _module.current_architecture(device.index)
    _module.compile_all(specs, arch, progress=progress)
    for spec in specs:
        if spec.supports(arch):
            _module.load_module(spec)
    _module.mark_ready()
