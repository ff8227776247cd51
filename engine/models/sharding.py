"""How a decoder is built of the parts that one rank has: its sizes, and its layers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from engine.config import ModelConfig
from engine.device import array_module
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
    RowParallelLinear,
    VocabParallelEmbedding,
)
from engine.reference.embedding import PADDING_ID
from engine.weights import Shard, Weight

__all__ = ["ParallelParts", "WholeParts", "local_config"]


def local_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Return the sizes of one shard: its heads, the features of its MLPs, and its layers.

    The number of experts is the whole model's, from which tokens choose, though the shard may have
    some of them only.

    Raises
    ------
    ConfigError
        If they cannot be divided.

    Examples
    --------
    >>> config = ModelConfig("llama", 64, 32, 1, 4, 2, 8, 48, 128)
    >>> local = local_config(config, Shard(0, 4))
    >>> local.num_heads, local.num_kv_heads, local.intermediate_size, local.vocab_size
    (1, 1, 12, 64)
    """

    def part(bounds: tuple[int, int]) -> int:
        return bounds[1] - bounds[0]

    heads, kv_heads = shard.cut_heads(config.num_heads, config.num_kv_heads)
    sizes: dict[str, Any] = {"num_heads": part(heads), "num_kv_heads": part(kv_heads)}
    if config.has_mlp:
        sizes["intermediate_size"] = part(shard.cut("intermediate_size", config.intermediate_size))
    layers = shard.stage.layers
    moe = config.moe
    if shard.stage.num_layers:
        sizes["num_layers"] = shard.stage.last - shard.stage.first
        sizes["layer_windows"] = config.layer_windows[layers]
        sizes["rope_layers"] = config.rope_layers[layers]
    if moe is not None:
        width = moe.intermediate_size
        shared = moe.shared_size
        if not shard.expert_parallel:
            width = part(shard.cut("the width of an expert", width))
        shared = part(shard.cut("the width of the shared expert", shared))
        sparse = moe.sparse_layers[layers]
        moe = replace(moe, sparse_layers=sparse, intermediate_size=width, shared_size=shared)
    return replace(config, moe=moe, **sizes)


_CLEARED_ROWS = 1 << 16  # in a launch: those of 8192 tokens with 8 experts each


class WholeParts:
    """The layers of a model that one process has whole."""

    @property
    def expert_runs(self) -> tuple[tuple[int, int], ...]:
        """Ranges [first, last) of the experts that each rank has whole; none if it has parts."""
        return ()

    @property
    def can_plan(self) -> bool:
        """Tell whether layers launch nothing but kernels, so that a plan can repeat them."""
        return True

    @property
    def can_fuse(self) -> bool:
        """Tell whether the matrices may add their output to the residual stream themselves."""
        return True

    def norm(self, norm: Norm) -> Norm:
        """Return a norm that adds the output of attention, or of an MLP, to the residual stream."""
        return norm

    def attention_output(
        self, weight: Weight, bias: Weight | None, *, deterministic: bool
    ) -> Linear:
        """Return the matrix behind attention."""
        return Linear(weight, bias, deterministic=deterministic)

    def down(self, weight: Weight, bias: Weight | None, *, deterministic: bool) -> Linear:
        """Return the second matrix of an MLP."""
        return Linear(weight, bias, deterministic=deterministic)

    def shared_down(self, weight: Weight, *, deterministic: bool) -> Linear:
        """Return the second matrix of a shared expert."""
        return Linear(weight, deterministic=deterministic)

    def row_norm(self, norm: Norm, num_heads: int) -> Norm:
        """Return the norm of all `num_heads` heads together."""
        return norm

    def embedding(self, embedding: Embedding) -> Embedding:
        """Return the token embedding."""
        return embedding

    def lm_head(self, weight: Weight, bias: Weight | None, *, deterministic: bool) -> Linear:
        """Return the output layer."""
        return Linear(weight, bias, deterministic=deterministic)

    def moe(self, params: RoutingParams, router: Linear, experts: Experts, **options: Any) -> MoE:
        """Return a mixture of experts; `options` are those of `MoE`."""
        return MoE(params, router, experts, **options)

    @property
    def own_kv_heads(self) -> tuple[int, int, int] | None:
        """Which key/value heads these are of how many: first, last, count; None: all."""
        return None

    def all_heads(self, x: Any) -> Any:
        """Return (..., H) for all query heads of the model from `x` (..., h), that of its own."""
        return x

    def all_kv_heads(self, x: Any) -> Any:
        """Return (..., K) for all key/value heads of the model from `x` (..., k)."""
        return x

    def summed(self, x: Any) -> Any:
        """Return the output of a branch, which the ranks may have in summands, whole."""
        return x

    def entering(self, delta: Any, residual: Any) -> tuple[Any, Any]:
        """Return what a stage begins with, of what the stage before has sent."""
        return delta, residual

    def leaving(self, delta: Any) -> Any:
        """Return the last layer's output of a stage, whole, for the next stage."""
        return delta


@dataclass(frozen=True)
class ParallelParts(WholeParts):
    """The layers of a model of which each rank has a part.

    Attributes
    ----------
    config : ModelConfig
        Of the whole model.
    shard : Shard
    collectives : Collectives
    """

    config: ModelConfig
    shard: Shard
    collectives: Collectives
    _padding_ids: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def expert_runs(self) -> tuple[tuple[int, int], ...]:
        """Ranges [first, last) of the experts that each rank has whole; none if it has parts."""
        shard = self.shard
        moe = self.config.moe
        if moe is None or not shard.expert_parallel:
            return ()
        ranks = (replace(shard, index=index) for index in range(shard.count))
        return tuple(rank.cut_experts(moe.num_experts) for rank in ranks)

    @property
    def can_plan(self) -> bool:
        """Tell whether layers launch nothing but kernels: what is gathered is also copied."""
        return not (self.shard.by_output or self.config.whole_qk_norm)

    @property
    def can_fuse(self) -> bool:
        """Tell whether the matrices may add their output to the residual stream themselves."""
        return not self._sums_in_norms

    @property
    def _sums_in_norms(self) -> bool:
        """Tell whether outputs are summed by the norm that comes next."""
        c = self.config
        is_plain = c.pre_norms and not (c.parallel or c.post_norms or c.layer_norm)
        return is_plain and c.branch_scale == 1.0 and not self.shard.by_output

    def norm(self, norm: Norm) -> Norm:
        """Return a norm that adds the outputs of all ranks to the residual stream."""
        return AllReduceNorm(norm, self.collectives) if self._sums_in_norms else norm

    def attention_output(
        self, weight: Weight, bias: Weight | None, *, deterministic: bool
    ) -> Linear:
        """Return the matrix behind attention, whose output the ranks have whole or in summands."""
        return self._second(weight, bias, deterministic, self._share(self.config.num_heads))

    def down(self, weight: Weight, bias: Weight | None, *, deterministic: bool) -> Linear:
        """Return the second matrix of an MLP, whose output the ranks have whole or in summands."""
        return self._second(weight, bias, deterministic, 1)

    def shared_down(self, weight: Weight, *, deterministic: bool) -> Linear:
        """Return the second matrix of a shared expert, whose output is summed with the others'."""
        if not self.shard.by_output:
            return Linear(weight, deterministic=deterministic)
        if self.shard.expert_parallel:  # whose outputs are whole on all ranks
            return self._second(weight, None, deterministic, 1)
        return ColumnParallelLinear(
            weight, deterministic=deterministic, collectives=self.collectives
        )

    def row_norm(self, norm: Norm, num_heads: int) -> Norm:
        """Return the norm of all `num_heads` heads together, of which each rank has some."""
        return AllGatherNorm(norm, self.collectives, self._share(num_heads))

    def embedding(self, embedding: Embedding) -> Embedding:
        """Return the token embedding, divided by rows."""
        return VocabParallelEmbedding(embedding, self.collectives)

    def lm_head(self, weight: Weight, bias: Weight | None, *, deterministic: bool) -> Linear:
        """Return the output layer, divided by rows."""
        return ParallelLMHead(
            weight,
            bias,
            deterministic=deterministic,
            vocab_size=self.config.vocab_size,
            collectives=self.collectives,
        )

    def moe(self, params: RoutingParams, router: Linear, experts: Experts, **options: Any) -> MoE:
        """Return a mixture whose experts are divided, each of them or among the ranks."""
        is_complete = self._sums_in_norms
        if self.shard.expert_parallel:
            experts = self._expert_parallel(experts, array_module(router.weight.data))
            # With `by_output` the pairs are all-reduced first, so each rank's sum is complete.
            is_complete = is_complete or self.shard.by_output
        elif self.shard.by_output:
            experts = ColumnParallelExperts(**vars(experts), collectives=self.collectives)
        elif self.collectives.rank != 0:  # rank 0 adds the bias of the second product
            experts = replace(experts, down_bias=None)
        if is_complete:
            return MoE(params, router, experts, **options)
        return ParallelMoE(params, router, experts, collectives=self.collectives, **options)

    @property
    def own_kv_heads(self) -> tuple[int, int, int] | None:
        """Which key/value heads these are of how many: first, last, count."""
        c = self.config
        _, (first, last) = self.shard.cut_heads(c.num_heads, c.num_kv_heads)
        return first, last, c.num_kv_heads

    def all_heads(self, x: Any) -> Any:
        """Return (..., H) for all query heads of the model from `x` (..., h), that of its own."""
        return self._all(x, self.config.num_heads)

    def all_kv_heads(self, x: Any) -> Any:
        """Return (..., K) for all key/value heads of the model from `x` (..., k)."""
        return self._all(x, self.config.num_kv_heads)

    def summed(self, x: Any) -> Any:
        """Return the output of a branch, which the ranks may have in summands, whole."""
        return self.collectives.all_reduce(x) if self._sums_in_norms else x

    def _all(self, x: Any, num_heads: int) -> Any:
        whole = self.collectives.all_gather(x.reshape(-1, x.shape[-1]), axis=1)
        parts = whole.reshape(-1, self.collectives.size, x.shape[-1])
        return parts[:, :: self._share(num_heads)].reshape(*x.shape[:-1], num_heads)

    def _expert_parallel(self, experts: Experts, xp: Any) -> ExpertParallelExperts:
        if not self._padding_ids:  # one array for all layers
            self._padding_ids.append(xp.full(_CLEARED_ROWS, PADDING_ID, np.int32))
        return ExpertParallelExperts(
            **vars(experts),
            first=self.expert_runs[self.shard.index][0],
            padding_ids=self._padding_ids[0],
            collectives=self.collectives if self.shard.by_output else None,
        )

    def entering(self, delta: Any, residual: Any) -> tuple[Any, Any]:
        """Return what a stage begins with; only rank 0 has been sent anything."""
        for array in (residual, delta):
            if array is not None:  # as integers, which every device can copy
                self.collectives.broadcast(array.view(f"u{array.itemsize}"))
        if delta is not None and self._sums_in_norms and self.collectives.rank != 0:
            delta.view(f"u{delta.itemsize}").fill(0)  # rank 0 has the sum
        return delta, residual

    def leaving(self, delta: Any) -> Any:
        """Return the last layer's output of a stage, whole, on all ranks."""
        if delta is None or not self._sums_in_norms:
            return delta
        return self.collectives.all_reduce(delta, out=delta)

    def _share(self, num_heads: int) -> int:
        """Return how many ranks have the same heads, of `num_heads` query or key/value heads."""
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
        own = bias if self.collectives.rank == 0 else None  # rank 0 adds it
        if self._sums_in_norms:
            return Linear(weight, own, deterministic=deterministic)
        return RowParallelLinear(weight, own, **options)
