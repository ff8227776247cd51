"""Sharding of a decoder: the config of one rank's shard, and the builder of its layers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from engine.config import ModelConfig, MoeConfig
from engine.device import array_module
from engine.errors import ConfigError
from engine.kernels._peer_memory import PeerMemory
from engine.layers.collectives import Collectives
from engine.layers.embedding import Embedding
from engine.layers.linear import Linear
from engine.layers.moe import Experts, MoE, RoutingParams
from engine.layers.norm import Norm
from engine.layers.parallel import (
    AllGatherNorm,
    AllReduceNorm,
    ColumnParallelExperts,
    ColumnParallelLinear,
    ExpertParallelExperts,
    ParallelLMHead,
    ParallelMoE,
    PartialLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from engine.reference.embedding import PADDING_ID
from engine.weights import ALL_LAYERS, Shard, Stage, Weight

__all__ = ["ParallelParts", "WholeParts", "check_support", "local_config"]

# Fields of a ModelConfig with one value per layer.
_BY_LAYER = ("layer_windows", "layer_chunks", "rope_layers", "rope_thetas", "layer_kinds")


def local_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Return the config of one shard: its heads, the features of its MLPs, and its layers.

    The number of experts stays the whole model's, since routers select among all experts.

    Raises
    ------
    ConfigError
        If the heads or features cannot be divided evenly, or the model does not support the way.

    Examples
    --------
    >>> config = ModelConfig("llama", 64, 32, 1, 4, 2, 8, 48, 128)
    >>> local = local_config(config, Shard(0, 4))
    >>> local.num_heads, local.num_kv_heads, local.intermediate_size, local.vocab_size
    (1, 1, 12, 64)
    """
    check_support(config, shard)
    layers = shard.stage.layers
    heads, kv_heads = shard.cut_heads(config.num_heads, config.num_kv_heads)
    sizes: dict[str, Any] = {"num_heads": _length(heads), "num_kv_heads": _length(kv_heads)}
    sizes["layer_sizes"] = tuple(
        replace(
            one,
            num_kv_heads=_length(shard.cut_shared("num_key_value_heads", one.num_kv_heads)),
            intermediate_size=_length(shard.cut("intermediate_size", one.intermediate_size)),
        )
        for one in config.layer_sizes[layers]
    )
    if config.has_mlp:
        width = shard.cut("intermediate_size", config.intermediate_size)
        sizes["intermediate_size"] = _length(width)
    if shard.stage.num_layers:
        sizes["num_layers"] = shard.stage.last - shard.stage.first
        for name in _BY_LAYER:
            sizes[name] = getattr(config, name)[layers]
    sizes |= _local_mixers(config, shard)
    if config.moe is not None:
        sizes["moe"] = _local_moe(config.moe, shard)
    return replace(config, **sizes)


def _local_mixers(config: ModelConfig, shard: Shard) -> dict[str, Any]:
    """Return the fields of one shard's layers without attention, for those that the model has."""
    sizes: dict[str, Any] = {}
    if (conv := config.short_conv) is not None:
        channels = shard.cut("channels of the convolution", conv.num_channels)
        sizes["short_conv"] = replace(conv, num_channels=_length(channels))
    if (mamba := config.mamba2) is not None:
        groups = _length(shard.cut("mamba_n_groups", mamba.num_groups))
        heads_of_groups = mamba.num_heads // shard.count
        sizes["mamba2"] = replace(mamba, num_groups=groups, num_heads=heads_of_groups)
    if (lightning := config.lightning) is not None:
        own_groups = shard.cut("group_norm_size", lightning.num_groups)
        first, last = (one * lightning.num_heads // lightning.num_groups for one in own_groups)
        sizes["lightning"] = replace(
            lightning,
            num_heads=last - first,
            num_groups=_length(own_groups),
            slopes=lightning.slopes[first:last],
            layer_factors=lightning.layer_factors[shard.stage.layers],
        )
    if (delta := config.gated_delta) is not None:
        key_heads = _length(shard.cut("linear_num_key_heads", delta.num_key_heads))
        value_heads = delta.num_value_heads // shard.count
        sizes["gated_delta"] = replace(delta, num_key_heads=key_heads, num_value_heads=value_heads)
    return sizes


def _local_moe(moe: MoeConfig, shard: Shard) -> MoeConfig:
    layers = shard.stage.layers
    width = moe.intermediate_size
    if not shard.expert_parallel:
        width = _length(shard.cut("the width of an expert", width))
    return replace(
        moe,
        sparse_layers=moe.sparse_layers[layers],
        layer_top_k=moe.layer_top_k[layers],
        intermediate_size=width,
        shared_size=_length(shard.cut("the width of the shared expert", moe.shared_size)),
    )


def _length(bounds: tuple[int, int]) -> int:
    return bounds[1] - bounds[0]


def check_support(config: ModelConfig, shard: Shard) -> None:
    """Check that a model with layers of several kinds can be divided this way.

    Raises
    ------
    ConfigError
        If it cannot; the message names the way.
    """
    reads_others = config.per_layer_input or config.altup or config.kv_sources
    if shard.stage.num_layers and reads_others:
        raise ConfigError(f"pipeline stages are not supported for {config.model_type}")
    if config.moe is not None and config.moe.latent_size and shard.by_output and shard.count > 1:
        raise ConfigError(
            f"batch-invariant tensor parallelism of {shard.count} ranks is not supported for "
            f"{config.model_type} with moe_latent_size"
        )
    # Ranks that share a key/value head hold all its query heads: as many in every layer, or none.
    is_uneven = shard.by_output and any(
        one.head_dim != config.head_dim or one.num_kv_heads < shard.count
        for one in config.layer_sizes
    )
    if shard.count > 1 and (config.activation_sparsity or is_uneven):
        how = "batch-invariant tensor" if is_uneven else "tensor"
        raise ConfigError(
            f"{how} parallelism of {shard.count} ranks is not supported for {config.model_type}"
        )


_CLEARED_ROWS = 1 << 16  # rows cleared per launch: 8192 tokens with 8 experts each


class WholeParts:
    """Builds the layers of an undivided model, or of a pipeline stage.

    Parameters
    ----------
    config : ModelConfig, optional
        Config of the whole model; None: that of the layers.
    stage : Stage
    """

    def __init__(self, config: ModelConfig | None = None, stage: Stage = ALL_LAYERS) -> None:
        self._whole_config = config
        self._stage = stage

    @property
    def expert_runs(self) -> tuple[tuple[int, int], ...]:
        """Ranges [first, last) of each rank's experts; empty without expert parallelism."""
        return ()

    @property
    def is_shard(self) -> bool:
        """Whether other ranks hold the rest of each layer."""
        return False

    @property
    def can_plan(self) -> bool:
        """Whether layers launch only kernels, so that a launch plan can replay them."""
        return True

    @property
    def peers(self) -> PeerMemory | None:
        """The ranks to which products send rows of partial sums; None: they send nothing."""
        return None

    @property
    def can_fuse(self) -> bool:
        """Whether products may add their output to the residual stream."""
        return True

    def norm(self, norm: Norm) -> Norm:
        """Return a norm whose `add` adds a branch's output to the residual stream."""
        return norm

    def attention_output(
        self, weight: Weight, bias: Weight | None, *, deterministic: bool
    ) -> Linear:
        """Return the output projection of attention."""
        return Linear(weight, bias, deterministic=deterministic)

    def down(self, weight: Weight, bias: Weight | None, *, deterministic: bool) -> Linear:
        """Return the down projection of an MLP."""
        return Linear(weight, bias, deterministic=deterministic)

    def shared_down(self, weight: Weight, bias: Weight | None, *, deterministic: bool) -> Linear:
        """Return the down projection of a shared expert."""
        return Linear(weight, bias, deterministic=deterministic)

    def row_norm(self, norm: Norm, num_heads: int) -> Norm:
        """Return a norm of all `num_heads` heads together."""
        return norm

    def feature_norm(self, norm: Norm) -> Norm:
        """Return a norm of all features of an MLP."""
        return norm

    def embedding(self, embedding: Embedding) -> Embedding:
        """Return the token embedding."""
        return embedding

    def lm_head(self, weight: Weight, bias: Weight | None, *, deterministic: bool) -> Linear:
        """Return the output layer."""
        return Linear(weight, bias, deterministic=deterministic)

    def moe(self, params: RoutingParams, router: Linear, experts: Experts, **options: Any) -> MoE:
        """Return a mixture of experts; `options` are keywords of `MoE`."""
        return MoE(params, router, experts, **options)

    def whole(self, config: ModelConfig) -> tuple[ModelConfig, Shard]:
        """Return the configuration of the whole model, and the shard that `config` describes."""
        return self._whole_config or config, Shard(stage=self._stage)

    @property
    def own_kv_heads(self) -> tuple[int, int, int] | None:
        """(first, last, count): this rank's K/V heads [first, last) of `count`; None for all."""
        return None

    def all_heads(self, x: Any) -> Any:
        """Return (..., H) for all query heads of the model, given this rank's `x` (..., h)."""
        return x

    def all_kv_heads(self, x: Any) -> Any:
        """Return (..., K) for all key/value heads of the model, given this rank's `x` (..., k)."""
        return x

    def summed(self, x: Any) -> Any:
        """Return a branch's complete output; ranks may hold partial sums of it."""
        return x

    def entering(self, delta: Any, residual: Any) -> tuple[Any, Any]:
        """Return (delta, residual) for the first layer, as received from the previous stage."""
        return delta, residual

    def leaving(self, delta: Any) -> Any:
        """Return the complete output of a stage's last layer, for the next stage."""
        return delta


@dataclass(frozen=True)
class ParallelParts(WholeParts):
    """Builds the layers of one rank's shard of a model.

    Attributes
    ----------
    config : ModelConfig
        Config of the whole model.
    shard : Shard
    collectives : Collectives
    """

    config: ModelConfig
    shard: Shard
    collectives: Collectives
    _padding_ids: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def expert_runs(self) -> tuple[tuple[int, int], ...]:
        """Ranges [first, last) of each rank's experts; empty without expert parallelism."""
        shard = self.shard
        moe = self.config.moe
        if moe is None or not shard.expert_parallel:
            return ()
        ranks = (replace(shard, index=index) for index in range(shard.count))
        return tuple(rank.cut_experts(moe.num_experts) for rank in ranks)

    @property
    def is_shard(self) -> bool:
        """Whether other ranks hold the rest of each layer."""
        return True

    @property
    def can_plan(self) -> bool:
        """Whether layers launch only kernels, which all-gathers do not: they also copy."""
        c = self.config
        return not (self.shard.by_output or c.whole_qk_norm or c.inner_norms)

    @property
    def peers(self) -> PeerMemory | None:
        """The ranks to which products send rows of partial sums; None: they send nothing."""
        return self.collectives.peers

    @property
    def can_fuse(self) -> bool:
        """Whether products may add their output to the residual stream."""
        return not self._sums_in_norms

    @property
    def _sums_in_norms(self) -> bool:
        """Whether the next norm all-reduces the branches' outputs (`AllReduceNorm`)."""
        c = self.config
        is_plain = c.pre_norms and not (c.parallel or c.post_norms or c.layer_norm)
        return is_plain and c.branch_scale == 1.0 and not self.shard.by_output

    def norm(self, norm: Norm) -> Norm:
        """Return a norm whose `add` adds the outputs of all ranks to the residual stream."""
        return AllReduceNorm(norm, self.collectives) if self._sums_in_norms else norm

    def attention_output(
        self, weight: Weight, bias: Weight | None, *, deterministic: bool
    ) -> Linear:
        """Return attention's output projection: complete on all ranks, or partial sums."""
        return self._second(weight, bias, deterministic, self._share(self.config.num_heads))

    def down(self, weight: Weight, bias: Weight | None, *, deterministic: bool) -> Linear:
        """Return an MLP's down projection: complete on all ranks, or partial sums."""
        return self._second(weight, bias, deterministic, 1)

    def shared_down(self, weight: Weight, bias: Weight | None, *, deterministic: bool) -> Linear:
        """Return the down projection of a shared expert: divided like the experts' outputs."""
        if not self.shard.by_output:
            own = bias if self.collectives.rank == 0 else None  # added on rank 0 only
            return Linear(weight, own, deterministic=deterministic)
        if self.shard.expert_parallel:  # all ranks get the complete outputs of the experts
            return self._second(weight, bias, deterministic, 1)
        return ColumnParallelLinear(
            weight, bias, deterministic=deterministic, collectives=self.collectives
        )

    def row_norm(self, norm: Norm, num_heads: int) -> Norm:
        """Return a norm of all `num_heads` heads together, which are divided among the ranks."""
        return AllGatherNorm(norm, self.collectives, self._share(num_heads))

    def feature_norm(self, norm: Norm) -> Norm:
        """Return a norm of all features of an MLP, which are divided among the ranks."""
        return AllGatherNorm(norm, self.collectives)

    def embedding(self, embedding: Embedding) -> Embedding:
        """Return the token embedding, divided by rows of the vocabulary."""
        return VocabParallelEmbedding(embedding, self.collectives)

    def lm_head(self, weight: Weight, bias: Weight | None, *, deterministic: bool) -> Linear:
        """Return the output layer, divided by rows of the vocabulary."""
        return ParallelLMHead(
            weight,
            bias,
            deterministic=deterministic,
            vocab_size=self.config.vocab_size,
            collectives=self.collectives,
        )

    def moe(self, params: RoutingParams, router: Linear, experts: Experts, **options: Any) -> MoE:
        """Return a mixture with this rank's experts, or with its slice of every expert."""
        is_complete = self._sums_in_norms
        if self.shard.expert_parallel:
            experts = self._expert_parallel(experts, array_module(router.weight.data))
            # With `by_output` the pairs are all-reduced first, so each rank's sum is complete.
            is_complete = is_complete or self.shard.by_output
        elif self.shard.by_output:
            experts = ColumnParallelExperts(**vars(experts), collectives=self.collectives)
        elif self.collectives.rank != 0:  # rank 0 adds the bias of the second product
            experts = replace(experts, down_bias=None, adds_identity=False)
        if is_complete:
            return MoE(params, router, experts, **options)
        return ParallelMoE(params, router, experts, collectives=self.collectives, **options)

    def whole(self, config: ModelConfig) -> tuple[ModelConfig, Shard]:
        """Return the configuration of the whole model, and this rank's shard."""
        return self.config, self.shard

    @property
    def own_kv_heads(self) -> tuple[int, int, int] | None:
        """(first, last, count): this rank's K/V heads [first, last) of `count`."""
        c = self.config
        _, (first, last) = self.shard.cut_heads(c.num_heads, c.num_kv_heads)
        return first, last, c.num_kv_heads

    def all_heads(self, x: Any) -> Any:
        """Return (..., H) for all query heads of the model, given this rank's `x` (..., h)."""
        return self._all(x, self.config.num_heads)

    def all_kv_heads(self, x: Any) -> Any:
        """Return (..., K) for all key/value heads of the model, given this rank's `x` (..., k)."""
        return self._all(x, self.config.num_kv_heads)

    def summed(self, x: Any) -> Any:
        """Return a branch's complete output; ranks may hold partial sums of it."""
        return self.collectives.all_reduce(x) if self._sums_in_norms else x

    def _all(self, x: Any, num_heads: int) -> Any:
        whole = self.collectives.all_gather(x.reshape(-1, x.shape[-1]), axis=1)
        parts = whole.reshape(-1, self.collectives.size, x.shape[-1])
        return parts[:, :: self._share(num_heads)].reshape(*x.shape[:-1], num_heads)

    def _expert_parallel(self, experts: Experts, xp: Any) -> ExpertParallelExperts:
        if not self._padding_ids:  # one array for all layers
            self._padding_ids.append(xp.full(_CLEARED_ROWS, PADDING_ID, np.int32))
        return ExpertParallelExperts(
            **vars(experts) | {"adds_identity": self.shard.by_output or self.collectives.rank == 0},
            first=self.expert_runs[self.shard.index][0],
            padding_ids=self._padding_ids[0],
            collectives=self.collectives if self.shard.by_output else None,
        )

    def entering(self, delta: Any, residual: Any) -> tuple[Any, Any]:
        """Return (delta, residual) for the first layer; rank 0, which received them, broadcasts."""
        for array in (residual, delta):
            if array is not None:  # viewed as integers, which every device can copy
                self.collectives.broadcast(array.view(f"u{array.itemsize}"))
        if delta is not None and self._sums_in_norms and self.collectives.rank != 0:
            delta.view(f"u{delta.itemsize}").fill(0)  # rank 0 holds the sum
        return delta, residual

    def leaving(self, delta: Any) -> Any:
        """Return the complete output of a stage's last layer, on all ranks."""
        if delta is None or not self._sums_in_norms:
            return delta
        return self.collectives.all_reduce(delta, out=delta)

    def _share(self, num_heads: int) -> int:
        """Return the number of ranks per shard of `num_heads` (q or k/v) heads."""
        c = self.config
        heads, kv_heads = self.shard.cut_heads(c.num_heads, c.num_kv_heads)
        first, last = heads if num_heads == c.num_heads else kv_heads
        return self.shard.count * (last - first) // num_heads

    def _second(
        self, weight: Weight, bias: Weight | None, deterministic: bool, share: int
    ) -> Linear:
        options: dict[str, Any] = {"deterministic": deterministic, "collectives": self.collectives}
        if self.shard.by_output:
            return ColumnParallelLinear(weight, bias, share=share, gather_output=True, **options)
        own = bias if self.collectives.rank == 0 else None  # added on rank 0 only
        if self._sums_in_norms:
            return PartialLinear(weight, own, deterministic=deterministic, peers=self.peers)
        return RowParallelLinear(weight, own, **options)
