"""Megatron-core on the engine's kernels: norms, attention, grouped experts and gated activations.

`EngineSpecProvider` names the modules, `gpt_layer_spec` and `gpt_block_spec` put them into
Megatron's GPT specs. Parameters keep Megatron's names, and distributed checkpoints its keys and
shapes, so a run can change between the local spec and this one. Written against megatron-core
0.16.1.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_mlp_module_spec_for_backend,
)
from megatron.core.tensor_parallel.layers import (
    _initialize_affine_weight_cpu,
    _initialize_affine_weight_gpu,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_object_for_checkpoint,
    make_sharded_tensors_for_checkpoint,
)

from engine.errors import ConfigError
from engine.integrations import torch as ops
from engine.integrations._bounds import length_bound

__all__ = [
    "DENSE_LAYER",
    "MOE_LAYER",
    "EngineActivation",
    "EngineAttention",
    "EngineGroupedMLP",
    "EngineLayerNorm",
    "EngineNorm",
    "EngineRMSNorm",
    "EngineSpecProvider",
    "gpt_block_spec",
    "gpt_layer_spec",
]


class EngineSpecProvider(BackendSpecProvider):
    """Megatron's protocol for the modules of a spec. Linears are Megatron's local ones."""

    _local = LocalSpecProvider()

    def column_parallel_linear(self) -> type:
        """Return Megatron's `ColumnParallelLinear`."""
        return self._local.column_parallel_linear()

    def row_parallel_linear(self) -> type:
        """Return Megatron's `RowParallelLinear`."""
        return self._local.row_parallel_linear()

    def fuse_layernorm_and_linear(self) -> bool:
        """Return False: norm and linear are two modules."""
        return self._local.fuse_layernorm_and_linear()

    def column_parallel_layer_norm_linear(self) -> type | None:
        """Return None."""
        return self._local.column_parallel_layer_norm_linear()

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        """Return `EngineNorm`, which follows `config.normalization`."""
        return EngineNorm

    def core_attention(self) -> type:
        """Return `EngineAttention`."""
        return EngineAttention

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool
    ) -> tuple[type, MLPSubmodules | None]:
        """Return `EngineGroupedMLP` for grouped GEMM, else Megatron's `SequentialMLP`."""
        if moe_use_grouped_gemm:
            return EngineGroupedMLP, None
        return self._local.grouped_mlp_modules(False, moe_use_legacy_grouped_gemm)

    def activation_func(self) -> type:
        """Return `EngineActivation`; it is built if `config.use_te_activation_func` is set."""
        return EngineActivation


class EngineRMSNorm(torch.nn.Module):
    """RMSNorm of the last axis.

    Parameters
    ----------
    config : TransformerConfig
        `layernorm_zero_centered_gamma`: the weight is stored minus 1. `sequence_parallel`: flag on
        the weight, whose gradient Megatron then sums over the tensor-parallel group.
    hidden_size : int
    eps : float
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        if config.memory_efficient_layer_norm:
            raise ConfigError("memory_efficient_layer_norm must be False; got True")
        self.eps = eps
        self.weight_offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 1.0 - self.weight_offset))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x (..., hidden_size)."""
        y: torch.Tensor = ops.rmsnorm(x, self.weight, self.eps, weight_offset=self.weight_offset)
        return y


class EngineLayerNorm(EngineRMSNorm):
    """LayerNorm of the last axis; its bias has the flag `sequence_parallel`, too."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size))
        self.bias.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x (..., hidden_size)."""
        y: torch.Tensor = ops.layernorm(
            x, self.weight, self.bias, self.eps, weight_offset=self.weight_offset
        )
        return y


_NORMS = {"RMSNorm": EngineRMSNorm, "LayerNorm": EngineLayerNorm}


class EngineNorm:
    """Build the norm that `config.normalization` names."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> Any:
        """Return an `EngineRMSNorm` or an `EngineLayerNorm`."""
        norm = _NORMS.get(config.normalization)
        if norm is None:
            raise ConfigError(
                f"normalization must be one of {list(_NORMS)}; got {config.normalization!r}"
            )
        return norm(config, hidden_size, eps)


class EngineAttention(MegatronModule):
    """softmax(scale Q K^T) V on Megatron's (S, B, H, D) layout, without copies.

    The batch is folded into the heads, (S, B * H, D): head b * H + h of the queries then reads head
    b * K + h // (H / K) of the keys, as grouped queries want it, and the output has Megatron's
    layout.

    Parameters
    ----------
    config : TransformerConfig
        Read: attention_dropout (must be 0), window_size, window_attn_skip_freq, softmax_type,
        deterministic_mode (gradients with the same bits every time). With
        `apply_query_key_layer_scaling` nothing changes: it only scales intermediate values of half
        precision, and scores are float32 here.
    layer_number : int
        Counts from 1.
    attn_mask_type : AttnMaskType
        Mask of a call that names none.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        _check_attention(config, dropout)
        self.attn_mask_type = attn_mask_type
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.window = 0
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, max(1, layer_number)
        ):
            self.window = _window(config.window_size)
        group = parallel_state.get_tensor_model_parallel_group
        self.tp_group = group() if pg_collection is None else pg_collection.tp
        self._add_sinks(config.num_attention_heads // self.tp_group.size())

    def _add_sinks(self, num_heads: int) -> None:
        """Add `softmax_offset`: None, a buffer of zeros, or a parameter."""
        config = self.config
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        sinks = torch.zeros(num_heads, device=device, dtype=config.params_dtype)
        if config.softmax_type == "learnable":
            if config.perform_initialization:
                config.init_method(sinks)
            self.softmax_offset = torch.nn.Parameter(sinks)
        else:
            off_by_one = config.softmax_type == "off-by-one"
            self.register_buffer("softmax_offset", sinks if off_by_one else None, persistent=False)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attend.

        Parameters
        ----------
        query : (S, B, H, D) tensor, or (T, H, D) if packed
        key, value : (S_k, B, K, D) tensors, or (T_k, K, D) if packed
        attention_mask : ignored
            The mask type decides; types that need a tensor are refused.
        attn_mask_type : AttnMaskType, optional
            causal, causal_bottom_right, no_mask; packed also padding and padding_causal.
        attention_bias : must be None
        packed_seq_params : PackedSeqParams, optional
            With qkv_format "thd"; no padding between sequences.

        Returns
        -------
        (S, B, H * D) tensor, or (T, H, D) if packed
        """
        if attention_bias is not None:
            raise ConfigError("attention_bias must be None: biases of scores are not supported")
        mask = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            return self._packed(query, key, value, mask, packed_seq_params)
        (length, batch, _, _) = query.shape
        sinks = self.softmax_offset
        out: torch.Tensor = ops.attention(
            *(x.flatten(1, 2).unsqueeze(0) for x in (query, key, value)),
            causal=_is_causal(mask, length, len(key), self.window),
            scale=self.scale,
            window=self.window,
            sinks=None if sinks is None else sinks.repeat(batch),
            deterministic=self.config.deterministic_mode,
        )
        return out.view(length, batch, -1)

    def _packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, packed: Any
    ) -> torch.Tensor:
        causal = mask in (AttnMaskType.causal, AttnMaskType.padding_causal)
        if not causal and mask not in (AttnMaskType.no_mask, AttnMaskType.padding):
            raise ConfigError(f"attn_mask_type of packed sequences cannot be {mask.name}")
        for padded in (packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded):
            if padded is not None:
                raise ConfigError("packed_seq_params must have no padding between sequences")
        out: torch.Tensor = ops.attention_varlen(
            *(query, key, value, packed.cu_seqlens_q, packed.cu_seqlens_kv),
            *(_bound(packed.max_seqlen_q, query), _bound(packed.max_seqlen_kv, key)),
            causal=causal,
            scale=self.scale,
            window=self.window,
            sinks=self.softmax_offset,
            deterministic=self.config.deterministic_mode,
        )
        return out

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Return the sharded learnable sinks; empty without them."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def _bound(length: Any, rows: torch.Tensor) -> int:
    """Return an upper bound of the lengths of packed sequences, without asking the GPU."""
    return length_bound(length if isinstance(length, int) else len(rows))


def _check_attention(config: TransformerConfig, dropout: float) -> None:
    """Raise if the configuration needs an unsupported feature of attention."""
    if dropout > 0:
        raise ConfigError(f"attention_dropout must be 0; got {dropout}")
    for name, wanted in (("context_parallel_size", 1), ("qk_clip", False)):
        if (given := getattr(config, name)) != wanted:
            raise ConfigError(f"{name} must be {wanted}; got {given}")
    if config.log_max_attention_logit:
        raise ConfigError("log_max_attention_logit must be False; got True")


def _window(size: tuple[int, int]) -> int:
    """Return the number of visible keys, the query's own included; 0 is no window."""
    (left, right) = size
    if right > 0:
        raise ConfigError(f"window_size must not look ahead, (left, 0); got {size}")
    return left + 1 if left >= 0 else 0


def _is_causal(mask: AttnMaskType, num_queries: int, num_keys: int, window: int) -> bool:
    """Return whether the kernels' causal rule is wanted; it aligns the last query and key."""
    if mask == AttnMaskType.causal_bottom_right:
        return True
    if mask == AttnMaskType.causal and num_queries == num_keys:
        return True
    if mask == AttnMaskType.no_mask:
        if window and num_queries > 1:
            raise ConfigError("attn_mask_type no_mask with a window must have one query")
        return num_queries == 1
    if mask == AttnMaskType.causal:
        raise ConfigError(
            f"attn_mask_type causal needs as many queries as keys; got {num_queries} and "
            f"{num_keys}: use causal_bottom_right"
        )
    raise ConfigError(
        "attn_mask_type must be causal, causal_bottom_right or no_mask for sequences that are not "
        f"packed; got {mask.name}"
    )


class EngineActivation(torch.nn.Module):
    """The activation of an MLP, on packed [gate | up] rows if it is gated."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        functional = torch.nn.functional
        exact = partial(ops.geglu, approximate="none")
        gated: dict[Any, Any] = {functional.silu: ops.swiglu, functional.gelu: exact}
        plain: dict[Any, Any] = {
            functional.silu: ops.silu,
            functional.gelu: ops.gelu,
            functional.relu: ops.relu,
        }
        function = (gated if config.gated_linear_unit else plain).get(config.activation_func)
        if function is None or config.activation_func_clamp_value is not None:
            raise ConfigError(
                "activation_func must be silu or gelu, or relu if not gated, without a clamp; got "
                f"{config.activation_func}, clamp {config.activation_func_clamp_value}"
            )
        if config.glu_linear_offset:
            raise ConfigError(f"glu_linear_offset must be 0; got {config.glu_linear_offset}")
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x (..., 2F) to (..., F) if gated, else (..., F) to (..., F)."""
        y: torch.Tensor = self._function(x)
        return y


class EngineGroupedMLP(MegatronModule):
    """Gated experts on tokens that the dispatcher has sorted by expert.

    `weight1` (E, 2F, hidden) holds gate above up, `weight2` (E, hidden, F): the layout of a linear
    per expert, so distributed checkpoints are those of `SequentialMLP`. The router's probabilities
    multiply the second product; Megatron multiplies its input, which differs by rounding only.

    Parameters
    ----------
    num_local_experts : int
        Experts of this rank, E.
    config : TransformerConfig
    pg_collection : ProcessGroupCollection
        Read: ep, expt_tp, expt_dp.
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: Any = None
    ) -> None:
        super().__init__(config=config)
        self.activation = _expert_activation(config)
        self.num_local_experts = num_local_experts
        self.ep_group = pg_collection.ep
        self.tp_group = pg_collection.expt_tp
        self.dp_group = pg_collection.expt_dp
        ffn = config.moe_ffn_hidden_size
        hidden = config.hidden_size
        self.weight1 = self._parameter((2 * ffn, hidden), 0, config.init_method)
        self.weight2 = self._parameter((hidden, ffn), 1, config.output_layer_init_method)
        self.register_load_state_dict_post_hook(_ignore_extra_state)

    def _parameter(self, shape: tuple[int, int], axis: int, init: Any) -> torch.nn.Parameter:
        """Return the experts' matrices, of which this rank holds a part along `axis`."""
        config = self.config
        size = self.tp_group.size()
        if shape[axis] % size:
            raise ConfigError(f"moe_ffn_hidden_size must be divisible by {size}; got {shape[axis]}")
        own = list(shape)
        own[axis] //= size
        on_cpu = config.use_cpu_initialization
        weight = torch.nn.Parameter(
            torch.empty(
                (self.num_local_experts, *own),
                dtype=config.params_dtype,
                device=None if on_cpu else torch.cuda.current_device(),
            )
        )
        for matrix in weight.detach() if config.perform_initialization else ():
            if on_cpu:
                _initialize_affine_weight_cpu(
                    *(matrix, *shape, own[axis], axis, init),
                    params_dtype=config.params_dtype,
                    rank=self.tp_group.rank(),
                    world_size=size,
                )
            else:
                _initialize_affine_weight_gpu(matrix, init, axis, is_expert=True)
        set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=1 + axis, stride=1)
        weight.allreduce = config.expert_model_parallel_size == 1
        return weight

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Return (P, hidden) outputs and no bias.

        Parameters
        ----------
        permuted_local_hidden_states : (P, hidden) tensor
            Tokens, sorted by expert.
        tokens_per_expert : (E,) integer tensor
        permuted_probs : (P,) tensor
        """
        x = permuted_local_hidden_states
        probs = permuted_probs
        if self.config.moe_apply_probs_on_input:
            x = (x * probs.unsqueeze(-1)).to(x.dtype)
            probs = torch.ones_like(probs)
        experts = torch.arange(self.num_local_experts, device=x.device, dtype=torch.int32)
        counts = tokens_per_expert.to(x.device, non_blocking=True)
        ids = experts.repeat_interleave(counts, output_size=len(x)).unsqueeze(1)
        out = ops.moe_experts(
            *(x, self.weight1, self.weight2, ids, probs.unsqueeze(1)),
            activation=self.activation,
        )
        return out, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Return `SequentialMLP`'s keys and shapes: one shard per expert, gate and up apart."""
        singleton = ensure_metadata_has_dp_cp_group(metadata).get("singleton_local_shards", False)
        replica = (0, 0, self.dp_group.rank())
        found = {}
        for name, module in (("weight1", "linear_fc1"), ("weight2", "linear_fc2")):
            is_gated = name == "weight1"
            found[f"{prefix}{name}"] = ShardedTensorFactory(
                f"{prefix}experts.{module}.weight",
                getattr(self, name),
                partial(self._shards, is_gated, sharded_offsets, singleton),
                partial(_stacked, parts=2 if is_gated else 1),
                replica,
            )
            state = f"{module}._extra_state"
            for expert, key, offsets in self._experts(
                f"{prefix}experts.{state}", sharded_offsets, singleton
            ):
                found[f"{prefix}expert{expert}.{state}"] = make_sharded_object_for_checkpoint(
                    None, key, offsets, (0, self.tp_group.rank(), self.dp_group.rank())
                )
        return found

    def _experts(self, key: str, sharded_offsets: Any, singleton: bool) -> Any:
        """Yield the global number, key and offsets of each local expert's part of `key`."""
        first = self.ep_group.rank() * self.num_local_experts
        total = self.ep_group.size() * self.num_local_experts
        (head, _, tail) = key.rpartition("experts.")
        for expert in range(first, first + self.num_local_experts):
            if singleton:
                yield expert, f"{head}experts.{expert}.{tail}", sharded_offsets
            else:
                axis = (len(sharded_offsets), expert, total)
                yield expert, key, (*sharded_offsets, axis)

    @torch.no_grad()
    def _shards(
        self,
        is_gated: bool,
        sharded_offsets: Any,
        singleton: bool,
        key: str,
        tensor: torch.Tensor,
        replica_id: Any,
        _flattened_range: Any,
    ) -> list[Any]:
        """Return the shards of `tensor`, the weight or a tensor of its optimizer state."""
        rank = self.tp_group.rank()
        size = self.tp_group.size()
        suffixes = ("_w", "_v") if singleton else ("", "")
        joined = is_gated and not singleton  # gate and up are the halves of one tensor
        found = []
        experts = self._experts(key, sharded_offsets, singleton)
        for matrix, (_, name, offsets) in zip(tensor, experts, strict=True):
            parts = zip(matrix.chunk(2), suffixes, strict=True) if is_gated else ((matrix, ""),)
            for i, (part, suffix) in enumerate(parts):
                place = (rank + i * size, 2 * size) if joined else (rank, size)
                axis = len(offsets) + (0 if is_gated else 1)
                found.append(
                    ShardedTensor.from_rank_offsets(
                        *(name + suffix, part, *offsets, (axis, *place)),
                        replica_id=replica_id,
                        prepend_axis_num=len(offsets),
                    )
                )
        return found

    def backward_dw(self) -> None:
        """Do nothing: the backward pass has computed the weights' gradients."""


def _stacked(tensors: list[torch.Tensor], *, parts: int) -> torch.Tensor:
    """Return the matrices (E, rows, columns) of loaded shards, `parts` a matrix."""
    (rows, columns) = tensors[0].shape
    return torch.cat(tensors).view(-1, parts * rows, columns)


def _ignore_extra_state(_module: Any, keys: Any) -> None:
    """Drop the linears' empty states, which a distributed checkpoint holds, from the report."""
    keys.unexpected_keys[:] = [key for key in keys.unexpected_keys if "_extra_state" not in key]


def _expert_activation(config: TransformerConfig) -> str:
    """Return the name of the experts' activation; raise for unsupported experts."""
    for name, wanted in (("add_bias_linear", False), ("moe_latent_size", None), ("fp8", None)):
        if (given := getattr(config, name)) != wanted:
            raise ConfigError(f"{name} must be {wanted} with grouped experts; got {given}")
    selective = config.recompute_granularity == "selective"
    if selective and "moe_act" in config.recompute_modules:
        raise ConfigError("recompute_modules must not contain 'moe_act' with grouped experts")
    function = config.activation_func
    plain = config.activation_func_clamp_value is None and not config.glu_linear_offset
    if config.gated_linear_unit and function is torch.nn.functional.silu and plain:
        return "swiglu"
    raise ConfigError(
        "grouped experts must have activation_func silu and gated_linear_unit, without clamp and "
        f"offset; got {function}, {config.gated_linear_unit}"
    )


def gpt_layer_spec(
    num_experts: int | None = None,
    *,
    qk_layernorm: bool = False,
    moe_grouped_gemm: bool = True,
) -> ModuleSpec:
    """Return the spec of a GPT layer, Megatron's local one with our modules in it.

    Parameters
    ----------
    num_experts : int, optional
        For a layer of experts; their number is that of the model's configuration.
    qk_layernorm : bool
        Norms of queries and keys.
    moe_grouped_gemm : bool
        `EngineGroupedMLP`; else Megatron's `SequentialMLP`.
    """
    spec = get_gpt_layer_local_spec(num_experts=num_experts, qk_layernorm=qk_layernorm)
    return _with_our_modules(spec, num_experts, moe_grouped_gemm)


def gpt_block_spec(
    config: TransformerConfig, *, vp_stage: int | None = None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """Return the spec of all layers of a pipeline stage and of the final norm.

    Parameters
    ----------
    config : TransformerConfig
        Dense and expert layers alternate by its `moe_layer_freq`.
    vp_stage, pp_rank : int, optional
        As in Megatron's `get_gpt_decoder_block_spec`.
    """
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, vp_stage=vp_stage, pp_rank=pp_rank
    )
    common = (config.num_moe_experts, config.moe_grouped_gemm)
    layers = [_with_our_modules(spec, *common) for spec in block.layer_specs]
    return replace(block, layer_specs=layers, layer_norm=EngineSpecProvider().layer_norm())


def _with_our_modules(
    spec: ModuleSpec, num_experts: int | None, moe_grouped_gemm: bool
) -> ModuleSpec:
    """Return a layer's spec with the provider's norms, attention and MLP."""
    backend = EngineSpecProvider()
    layer = spec.submodules
    attention = layer.self_attention
    if attention.module is not SelfAttention:
        raise ConfigError(f"attention must be SelfAttention; got {attention.module.__name__}")
    own = attention.submodules
    norms = {
        name: module if module in (IdentityOp, L2Norm) else backend.layer_norm(for_qk=True)
        for name, module in (("q_layernorm", own.q_layernorm), ("k_layernorm", own.k_layernorm))
    }
    own = replace(own, core_attention=backend.core_attention(), **norms)
    mlp = get_mlp_module_spec_for_backend(
        backend,
        num_experts=num_experts if layer.mlp.module is MoELayer else None,
        moe_grouped_gemm=moe_grouped_gemm,
        use_te_activation_func=True,  # built only if the configuration says so, too
    )
    ours = replace(
        layer,
        input_layernorm=backend.layer_norm(),
        self_attention=replace(attention, submodules=own),
        pre_mlp_layernorm=backend.layer_norm(),
        mlp=mlp,
    )
    return replace(spec, submodules=ours)


DENSE_LAYER = gpt_layer_spec()
"""For `--spec engine.integrations.megatron DENSE_LAYER`."""

MOE_LAYER = gpt_layer_spec(1)
"""For `--spec engine.integrations.megatron MOE_LAYER`; the model has the number of experts."""
