"""TorchTitan on the engine's kernels: overrides of attention, norms, RoPE, MLP and experts.

Each function at the end is an override, named on the command line by its path:

    --override.imports engine.integrations.torchtitan.rmsnorm

Modules keep TorchTitan's checkpoint names, so a run can change between its modules and these.
Written against torchtitan 0.3.0; its option debug.spmd_typechecking must be off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import spmd_types as spmd
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import local_map
from torchtitan.config import derive, override
from torchtitan.models.common import attention as titan_attention
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE
from torchtitan.protocols.sharding import ShardingConfig, SpmdLayout

from engine.errors import ConfigError
from engine.integrations import torch as ops
from engine.integrations._bounds import length_bound

__all__ = [
    "EngineAttention",
    "EngineComplexRoPE",
    "EngineCosSinRoPE",
    "EngineFeedForward",
    "EngineGroupedExperts",
    "EngineRMSNorm",
    "EngineVarlenAttention",
    "attention",
    "feed_forward",
    "grouped_experts",
    "rmsnorm",
    "rope_complex",
    "rope_cos_sin",
    "varlen_attention",
]

# ---- attention -------------------------------------------------------------------------------


class EngineVarlenAttention(titan_attention.VarlenAttention):
    """Attention within packed documents, in q's dtype; the backend "varlen" of language models."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan_attention.VarlenAttention.Config):
        """See TorchTitan."""

    def __init__(self, config: Config) -> None:
        torch.nn.Module.__init__(self)  # VarlenAttention's would select a FlashAttention
        self.window_size = config.window_size
        self.causal, self.window = _window(config.window_size)

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: titan_attention.VarlenMetadata,
        scale: float | None = None,
        out_transform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Attend. `out_transform` receives the output and the log-sum-exp (B, L, N)."""
        masks = attention_masks
        narrower = q_BLNH.shape[-1] - v_BLNH.shape[-1]  # latent attention has narrower values
        padded = torch.nn.functional.pad(v_BLNH, (0, narrower)) if narrower else v_BLNH
        out, lse = ops.attention_varlen(
            q_BLNH.flatten(0, 1),
            k_BLNH.flatten(0, 1),
            padded.flatten(0, 1),
            masks.cu_seq_q,
            masks.cu_seq_k,
            length_bound(masks.max_q),
            length_bound(masks.max_k),
            causal=self.causal,
            window=self.window,
            scale=scale,
            return_lse=True,
        )
        out = out.view(q_BLNH.shape)[..., : v_BLNH.shape[-1]]
        if out_transform is None:
            return out
        return out_transform(out, lse.view(q_BLNH.shape[:3]))


class EngineAttention(titan_attention.ScaledDotProductAttention):
    """Dense attention, of models without documents (Flux)."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan_attention.ScaledDotProductAttention.Config):
        """See TorchTitan."""

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
        **_: Any,
    ) -> torch.Tensor:
        """Attend; with `is_causal`, query i sees keys 0 to i."""
        if attention_masks is not None:
            raise ConfigError("attention_masks must be None: use the attention backend varlen")
        out = ops.scaled_dot_product_attention(
            q_BLNH.transpose(1, 2),
            k_BLNH.transpose(1, 2),
            v_BLNH.transpose(1, 2),
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return out.transpose(1, 2)


def _window(window_size: tuple[int, int]) -> tuple[bool, int]:
    """Return (causal, window) for TorchTitan's window of (left, right) tokens."""
    left, right = window_size
    if (left, right) == (-1, -1):
        return False, 0
    if right != 0:
        raise ConfigError(f"window_size must be (-1, -1) or (left, 0); got {window_size}")
    return True, left + 1 if left >= 0 else 0


# ---- norm and rotary embedding ---------------------------------------------------------------


class EngineRMSNorm(RMSNorm):
    """RMSNorm of the last axis."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        """See TorchTitan."""

    def __init__(self, config: Config) -> None:
        if not config.elementwise_affine:
            raise ConfigError("elementwise_affine of RMSNorm must be True; got False")
        super().__init__(config)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise `input` (..., N)."""

        def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = ops.rmsnorm(x, weight, self.eps)
            return y

        if not isinstance(input, DTensor):
            return norm(input, self.weight)
        rows = input.placements
        if any(p.is_partial() or p.is_shard(input.ndim - 1) for p in rows):
            raise ConfigError(f"RMSNorm needs whole rows; got a tensor placed as {rows}")
        sums = tuple(Partial() if p.is_shard() else Replicate() for p in rows)
        whole = self.weight.placements
        return _on_shards(norm, input.device_mesh, (rows, whole), rows, (rows, sums))(
            input, self.weight
        )


class _RoPE:
    """The rotation, on a table of cosines and sines (P, D), in float32."""

    cache: torch.Tensor
    _interleaved: bool

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate query (B, L, N, H) and key; without `positions`, token i has position i."""
        table, places = (_local(x) for x in (self.cache, positions))

        def rotate(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            at = torch.arange(q.shape[1], device=q.device) if places is None else places
            return ops.rope(q, k, table, at, interleaved=self._interleaved)

        if not isinstance(query, DTensor):
            return rotate(query, key)
        both = (query.placements, key.placements)
        result: tuple[torch.Tensor, torch.Tensor] = _on_shards(
            rotate, query.device_mesh, both, both, both
        )(query, key)
        return result


class EngineComplexRoPE(_RoPE, ComplexRoPE):
    """RoPE of pairs (2i, 2i + 1)."""

    _interleaved = True

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        """See TorchTitan."""

    def _precompute_cache(self) -> torch.Tensor:
        turns = ComplexRoPE._precompute_cache(self)
        return torch.cat([turns.real, turns.imag], dim=-1)


class EngineCosSinRoPE(_RoPE, CosSinRoPE):
    """RoPE of pairs (i, i + H/2)."""

    _interleaved = False

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """See TorchTitan."""

    def _precompute_cache(self) -> torch.Tensor:
        cos, _, sin, _ = CosSinRoPE._precompute_cache(self).chunk(4, dim=-1)
        return torch.cat([cos, sin], dim=-1)


# ---- MLP and experts -------------------------------------------------------------------------


class EngineFeedForward(FeedForward):
    """SwiGLU MLP: one product for gate and up, and the activation on its packed rows.

    The product's weight is w1 and w3, one below the other: a copy in each pass, whose cost does not
    grow with the tokens. For the backward pass only the packed rows are kept.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        """See TorchTitan."""

    def __init__(self, config: Config) -> None:
        for name in ("w1", "w3"):
            linear = getattr(config, name)
            if type(linear) is not Linear.Config or linear.bias:
                raise ConfigError(
                    f"{name} of FeedForward must be a Linear without bias; got {linear}"
                )
        super().__init__(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return w2(silu(w1 x) * (w3 x))."""
        arguments = (x, self.w1.weight, self.w3.weight)
        if not isinstance(x, DTensor):
            return self.w2(_gated(*arguments))
        return self.w2(_gated_on_shards(*arguments))


def _gated(x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor) -> torch.Tensor:
    return ops.swiglu(torch.nn.functional.linear(x, torch.cat([w1, w3])))


def _gated_on_shards(x: DTensor, w1: DTensor, w3: DTensor) -> torch.Tensor:
    """Compute each rank's features (weights sharded by rows) or tokens (weights replicated)."""
    axes = zip(x.placements, w1.placements, strict=True)
    rules = [_placements(tokens, weight, x.ndim - 1) for tokens, weight in axes]
    out, dx, dw = (tuple(part) for part in zip(*rules, strict=True))
    placed = (x.placements, w1.placements, w3.placements)
    mapped = _on_shards(_gated, x.device_mesh, placed, out, (dx, dw, dw))
    result: torch.Tensor = mapped(x, w1, w3)
    return result


def _placements(tokens: Any, weight: Any, last: int) -> tuple[Any, Any, Any]:
    """Return the placements of the result and of the gradients of x and of the weight."""
    if tokens.is_replicate() and weight.is_shard(0):
        return Shard(last), Partial(), weight
    if tokens.is_replicate() and weight.is_replicate():
        return tokens, tokens, weight
    if tokens.is_shard() and not tokens.is_shard(last) and weight.is_replicate():
        return tokens, tokens, Partial()
    raise ConfigError(f"FeedForward cannot be placed as x {tokens}, weights {weight}")


class EngineGroupedExperts(GroupedExperts):
    """Experts in bfloat16, as TorchTitan's: grouped products with a fused SwiGLU.

    Gate and up are one parameter, `w13` (E, 2, F, D); in checkpoints it is `w1_EFD` and `w3_EFD`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """See TorchTitan."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        del self.w1_EFD, self.w3_EFD
        self.w13 = torch.nn.Parameter(
            torch.empty(config.num_experts, 2, config.hidden_dim, config.dim)
        )
        self.register_state_dict_post_hook(_split_gate_up)
        self.register_load_state_dict_pre_hook(_join_gate_up)

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Apply each expert to its rows of x_RD, which are sorted by expert."""
        gate_up, down = (_local(w).bfloat16() for w in (self.w13, self.w2_EDF))
        experts = torch.arange(len(gate_up), device=x_RD.device)
        ids = experts.repeat_interleave(num_tokens_per_expert_E, output_size=len(x_RD))[:, None]
        weights = torch.ones(ids.shape, device=x_RD.device)
        y = ops.moe_experts(x_RD.bfloat16(), gate_up.flatten(1, 2), down, ids, weights)
        return y.type_as(x_RD)


def _split_gate_up(_: Any, state_dict: dict[str, Any], prefix: str, __: Any) -> None:
    w13 = state_dict.pop(f"{prefix}w13")
    state_dict[f"{prefix}w1_EFD"] = w13[:, 0].contiguous()
    state_dict[f"{prefix}w3_EFD"] = w13[:, 1].contiguous()


def _join_gate_up(_: Any, state_dict: dict[str, Any], prefix: str, *__: Any) -> None:
    names = [f"{prefix}{name}" for name in ("w1_EFD", "w3_EFD")]
    if all(name in state_dict for name in names):
        parts = [state_dict.pop(name) for name in names]
        state_dict[f"{prefix}w13"] = torch.stack(parts, dim=1)


def _with_gate_up(fields: dict[str, Any], join: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Return `fields` of the parameters with one entry for `w13`."""
    rest = dict(fields)
    parts = [rest.pop(name) for name in ("w1_EFD", "w3_EFD")]
    return rest | {"w13": join(*parts)}


def _joint_init(gate: Callable[..., Any], up: Callable[..., Any]) -> Callable[..., Any]:
    def initialise(w13: torch.Tensor) -> None:
        gate(w13[:, 0])
        up(w13[:, 1])

    return initialise


def _joint_layout(gate: SpmdLayout, _: SpmdLayout) -> SpmdLayout:
    """Return the layout of (E, 2, F, D) for that of (E, F, D)."""
    if gate.partition_spec is not None:
        raise ConfigError(f"experts cannot be sharded as {gate}")
    moved = {
        axis: spmd.S(kind.dim + 1) if isinstance(kind, spmd.Shard) and kind.dim > 0 else kind
        for axis, kind in gate.axis_types.items()
    }
    return SpmdLayout(moved)


# ---- shards ----------------------------------------------------------------------------------


def _local(x: Any) -> Any:
    return x.to_local() if isinstance(x, DTensor) else x


def _on_shards(
    function: Callable[..., Any], mesh: Any, given: Any, results: Any, gradients: Any
) -> Callable[..., Any]:
    """Return `function` on local tensors, with the placements of arguments, results, gradients."""
    is_single = not isinstance(results[0], tuple)
    return local_map(
        function,
        out_placements=(results,) if is_single else results,
        in_placements=given,
        in_grad_placements=gradients,
        device_mesh=mesh,
    )


# ---- overrides -------------------------------------------------------------------------------


@override(target=titan_attention.VarlenAttention.Config, exact=True, description="engine")
def varlen_attention(config: Any) -> EngineVarlenAttention.Config:
    """Override the attention of language models, `attn_backend="varlen"`."""
    return derive(config, EngineVarlenAttention.Config)


@override(target=titan_attention.ScaledDotProductAttention.Config, exact=True, description="engine")
def attention(config: Any) -> EngineAttention.Config:
    """Override dense attention."""
    return derive(config, EngineAttention.Config)


@override(target=RMSNorm.Config, exact=True, description="engine")
def rmsnorm(config: Any) -> EngineRMSNorm.Config:
    """Override RMSNorm, also of queries and keys."""
    return derive(config, EngineRMSNorm.Config)


@override(target=ComplexRoPE.Config, exact=True, description="engine")
def rope_complex(config: Any) -> EngineComplexRoPE.Config:
    """Override the RoPE of Llama and DeepSeek."""
    return derive(config, EngineComplexRoPE.Config)


@override(target=CosSinRoPE.Config, exact=True, description="engine")
def rope_cos_sin(config: Any) -> EngineCosSinRoPE.Config:
    """Override the RoPE of Qwen."""
    return derive(config, EngineCosSinRoPE.Config)


@override(target=FeedForward.Config, exact=True, description="engine")
def feed_forward(config: Any) -> EngineFeedForward.Config:
    """Override the SwiGLU MLP."""
    return derive(config, EngineFeedForward.Config)


@override(target=GroupedExperts.Config, exact=True, description="engine")
def grouped_experts(config: Any) -> EngineGroupedExperts.Config:
    """Override the experts of a mixture, with any token dispatcher that leaves no padding."""
    changes: dict[str, Any] = {}
    if config.param_init is not None:
        changes["param_init"] = _with_gate_up(config.param_init, _joint_init)
    base: ShardingConfig | None = config.sharding_config
    if base is not None:
        shards = _with_gate_up(base.state_shardings, _joint_layout)
        changes["sharding_config"] = replace(base, state_shardings=shards)
    return derive(config, EngineGroupedExperts.Config, **changes)
