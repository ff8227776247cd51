"""Layers of a tensor-parallel or expert-parallel model: each rank holds a shard of the weights.

Tensor parallelism (Megatron-LM, arXiv:1909.08053): the first matrix of a pair is divided by its
output features, the second by its input features, and the outputs of the second are summed over
the ranks. In deterministic mode no sum may cross ranks, so the second is divided by output features
too: its input and its output are all-gathered, and each dot product is computed by one rank.

Expert parallelism: each rank holds a subset of the experts and computes their (token, expert)
pairs. Every rank has all tokens, so there is no all-to-all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine import kernels
from engine.device import array_module, empty_like
from engine.kernels._peer_memory import PeerMemory
from engine.layers.collectives import Collectives
from engine.layers.embedding import Embedding
from engine.layers.linear import Linear
from engine.layers.moe import Experts, MoE, RoutingParams
from engine.layers.norm import Norm
from engine.reference.embedding import PADDING_ID
from engine.weights import Format, Weight

__all__ = [
    "AllGatherNorm",
    "AllReduceNorm",
    "ColumnParallelExperts",
    "ColumnParallelLinear",
    "ExpertParallelExperts",
    "ParallelLMHead",
    "ParallelMoE",
    "PartialLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
]


class _ParallelLinear(Linear):
    """Linear layer sharded over the ranks, with collectives before and after the product."""

    __slots__ = ("_collectives",)

    def __init__(
        self,
        weight: Weight,
        bias: Weight | None = None,
        *,
        deterministic: bool = False,
        collectives: Collectives,
    ) -> None:
        super().__init__(weight, bias, deterministic=deterministic)
        self._collectives = collectives

    def __call__(
        self,
        x: Any,
        *,
        activation: str | None = None,
        out_dtype: Any = None,
        residual: Any = None,
    ) -> Any:
        """Return activation(x Wᵀ + b) after the collectives; see `Linear`."""
        y = super().__call__(self._input(x), activation=activation, out_dtype=out_dtype)
        y = self._output(y)
        return y if residual is None else kernels.residual_add(y, residual, out=residual)

    def _input(self, x: Any) -> Any:
        """Return the input of the product, given the caller's `x`."""
        return x

    def _output(self, y: Any) -> Any:
        """Return the layer's output, given this rank's product `y`."""
        return y


class RowParallelLinear(_ParallelLinear):
    """Linear layer divided by input features: the products of all ranks are summed.

    Parameters
    ----------
    weight : Weight
        (out, in / ranks).
    bias : Weight, optional
        (out,), on one rank only.
    collectives : Collectives
    """

    __slots__ = ()

    def _output(self, y: Any) -> Any:
        return self._collectives.all_reduce(y, out=y)


class PartialLinear(Linear):
    """Linear layer divided by input features, whose output is this rank's part of a sum.

    Parameters
    ----------
    weight, bias, deterministic
        See `RowParallelLinear`.
    peers : PeerMemory or None
        The products' argument `peers`; None: they send nothing.

    Attributes
    ----------
    is_summed_next : bool
        The group's next operation sums the output: large products send rows of it while they run.
    """

    __slots__ = ("_peers", "is_summed_next")

    def __init__(
        self,
        weight: Weight,
        bias: Weight | None = None,
        *,
        deterministic: bool = False,
        peers: PeerMemory | None,
    ) -> None:
        super().__init__(weight, bias, deterministic=deterministic)
        self._peers = peers
        self.is_summed_next = False

    @property
    def may_send(self) -> bool:
        """Whether products may send rows of the output."""
        return self._peers is not None and self.is_summed_next and self.product.sends

    def _options(self) -> dict[str, Any]:
        options = super()._options()
        return {**options, "peers": self._peers} if self.may_send else options


class ColumnParallelLinear(_ParallelLinear):
    """Linear layer divided by output features; its input is divided among the ranks as well.

    Parameters
    ----------
    weight : Weight
        (out / ranks, in).
    bias : Weight, optional
        (out / ranks,).
    collectives : Collectives
    share : int
        Number of consecutive ranks that hold the same part of the input.
    gather_output : bool
        All-gather the output: (T, out) on every rank instead of its columns (T, out / ranks).
    """

    __slots__ = ("_gather_output", "_share")

    def __init__(
        self,
        weight: Weight,
        bias: Weight | None = None,
        *,
        deterministic: bool = False,
        collectives: Collectives,
        share: int = 1,
        gather_output: bool = False,
    ) -> None:
        super().__init__(weight, bias, deterministic=deterministic, collectives=collectives)
        self._share = share
        self._gather_output = gather_output

    @property
    def input_format(self) -> Format | None:
        """None: parts of x are gathered as they are."""
        return None

    def _input(self, x: Any) -> Any:
        return _gathered(self._collectives, x, self._share)

    def _output(self, y: Any) -> Any:
        return self._collectives.all_gather(y, axis=1) if self._gather_output else y


class ParallelLMHead(_ParallelLinear):
    """Output layer divided by rows of the vocabulary; every rank receives all logits (T, V).

    Parameters
    ----------
    weight : Weight
        (V / ranks, N), padded with zeros.
    bias : Weight, optional
        (V / ranks,).
    vocab_size : int
        V, without padding.
    collectives : Collectives
    """

    __slots__ = ("_vocab_size",)

    def __init__(
        self,
        weight: Weight,
        bias: Weight | None = None,
        *,
        deterministic: bool = False,
        vocab_size: int,
        collectives: Collectives,
    ) -> None:
        super().__init__(weight, bias, deterministic=deterministic, collectives=collectives)
        self._vocab_size = vocab_size

    def _output(self, y: Any) -> Any:
        logits = self._collectives.all_gather(y, axis=1)
        if logits.shape[1] == self._vocab_size:
            return logits
        return array_module(logits).ascontiguousarray(logits[:, : self._vocab_size])


class VocabParallelEmbedding(Embedding):
    """Embedding table divided by rows of the vocabulary.

    Parameters
    ----------
    embedding : Embedding
        This rank's rows.
    collectives : Collectives
    """

    __slots__ = ("_collectives", "_first")

    def __init__(self, embedding: Embedding, collectives: Collectives) -> None:
        super().__init__(embedding.weight, embedding.scale)
        self._collectives = collectives
        self._first = collectives.rank * embedding.weight.shape[0]

    def __call__(self, token_ids: Any) -> Any:
        """Return the rows (T, N) of rank 0's `token_ids` (T,) int32; zeros for an unknown id.

        The other ranks' ids are overwritten: only rank 0's device may know them.
        """
        self._collectives.broadcast(token_ids)
        xp = array_module(token_ids)
        num_rows = self.weight.shape[0]
        own = token_ids - np.int32(self._first)
        is_own = own.view(np.uint32) < np.uint32(num_rows)
        rows = super().__call__(xp.where(is_own, own, np.int32(PADDING_ID)))
        return self._collectives.all_reduce(rows, out=rows)


class AllGatherNorm(Norm):
    """Norm over full rows whose features are divided among the ranks: all-gathers, then normalises.

    Parameters
    ----------
    norm : Norm
        The norm of whole rows.
    collectives : Collectives
    share : int
        Number of consecutive ranks that hold the same features.
    """

    __slots__ = ("_collectives", "_share")

    def __init__(self, norm: Norm, collectives: Collectives, share: int = 1) -> None:
        super().__init__(norm.weight, norm.eps, norm.offset, norm.branch_scale)
        self._collectives = collectives
        self._share = share

    @property
    def is_plain(self) -> bool:
        """False: a call receives only this rank's part of each row."""
        return False

    def __call__(self, x: Any, *, out: Any = None) -> Any:
        """Return this rank's features (T, N) of the normalised rows."""
        own = array_module(x).ascontiguousarray(x)
        whole = super().__call__(_gathered(self._collectives, own, self._share))
        first = self._collectives.rank // self._share * x.shape[1]
        own = whole[:, first : first + x.shape[1]]
        if out is None:
            return own
        out[...] = own
        return out


class AllReduceNorm(Norm):
    """Norm whose `add` also sums `x` over the ranks: all-reduce and norm in one operation.

    Parameters
    ----------
    norm : Norm
        An RMSNorm with branch_scale 1.
    collectives : Collectives
    """

    __slots__ = ("_collectives",)

    def __init__(self, norm: Norm, collectives: Collectives) -> None:
        super().__init__(norm.weight, norm.eps, norm.offset)
        self._collectives = collectives

    def add(self, x: Any, residual: Any, *, is_late: bool = False) -> tuple[Any, Any]:
        """Return (norm(h), h) of h = residual + the sum of all ranks' `x`. See `Norm.add`."""
        if self.offset:
            x = self._collectives.all_reduce(x, out=x)
            return super().add(x, residual, is_late=is_late)
        return self._collectives.all_reduce_rmsnorm(x, residual, self.weight, self.eps, out=x)

    def add_for(
        self, form: Format | None, x: Any, residual: Any, *, keeps_numbers: bool = False
    ) -> tuple[Any, Any]:
        """Add, normalise, and quantize for a product of weight format `form`.

        See `Norm.add_for`. Quantizing needs the sum first, as an operation of its own.
        """
        if form is None or not form.activations:
            return self.add(x, residual, is_late=form is not None and form.is_packed)
        x = self._collectives.all_reduce(x, out=x)
        return super().add_for(form, x, residual, keeps_numbers=keeps_numbers)


class _PairedExperts(Experts):
    """Experts that write out every pair and then sum, instead of fusing product and sum."""

    def coded_format(self, num_tokens: int) -> Format | None:
        """Return None: the tokens themselves are read, too."""
        return None

    def routes_with_codes(self, num_tokens: int) -> bool:
        """Return False, for the same reason."""
        return False

    def combined(
        self, x: Any, routing: kernels.Routing, *, deterministic: bool = False, **others: Any
    ) -> Any:
        """Return the sum over a token's pairs. See `Experts.combined`."""
        pairs = self(x, routing, deterministic=deterministic)
        return kernels.moe_combine(pairs, **self._identity(x, routing), **others)


@dataclass(frozen=True, eq=False, kw_only=True)
class ColumnParallelExperts(_PairedExperts):
    """Experts whose second matrix is divided by its output features: (E, N / ranks, I)."""

    collectives: Collectives

    def __call__(self, x: Any, routing: kernels.Routing, *, deterministic: bool = False) -> Any:
        """Return this rank's columns of each pair, (T, k, N / ranks). See `Experts`."""
        own, options = self._with_matrices(routing)
        options["deterministic"] = deterministic
        rows = self.first_product(x, own, as_codes=False, **options)
        whole = self.collectives.all_gather(rows, axis=1)
        return self.second_product(whole, own, **options)

    def _identity(self, x: Any, routing: kernels.Routing) -> dict[str, Any]:
        """Return the options of `kernels.moe_combine`, for this rank's columns of `x`."""
        size = self.down.shape[1]
        first = self.collectives.rank * size
        columns = array_module(x).ascontiguousarray(x[:, first : first + size])
        return super()._identity(columns, routing)


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertParallelExperts(_PairedExperts):
    """Expert parallel: this rank's subset of the experts.

    Attributes
    ----------
    first : int
        Index of this rank's first expert.
    padding_ids : (P,) array of int32
        Filled with `PADDING_ID`; P is the number of rows cleared per launch.
    collectives : Collectives, optional
        If given, pairs are all-reduced: every rank gets the outputs of all experts.
    """

    first: int
    padding_ids: Any
    collectives: Collectives | None = None

    def __call__(self, x: Any, routing: kernels.Routing, *, deterministic: bool = False) -> Any:
        """Return (T, k, N). Without `collectives`, pairs of other ranks' experts are zeros.

        Pairs are sorted by expert, so this rank's pairs are consecutive. The products of all other
        pairs are skipped, and their rows of the first product are not written.
        """
        last = self.first + self.gate_up.shape[0]
        own = routing._replace(offsets=routing.offsets[self.first : last + 1])
        # SAFETY: cleared before the first product; the second relies on the wait of the first one.
        pairs = self._zeros(x, routing.order.shape[0])
        options = {"deterministic": deterministic, "num_experts": routing.offsets.shape[0] - 1}
        rows = self.first_product(x, own, **options)
        pairs = self.second_product(rows, own, **options, out=pairs)
        if self.collectives is None:
            return pairs
        return self.collectives.all_reduce(pairs, out=pairs)  # x + 0 is x, in any order

    def _zeros(self, x: Any, num_rows: int) -> Any:
        """Return zeros (num_rows, N), written by an op: a launch plan records only ops."""
        rows = empty_like(x, shape=(num_rows, x.shape[1]))
        step = len(self.padding_ids)
        for first in range(0, num_rows, step):
            part = rows[first : first + step]
            kernels.embedding(self.padding_ids[: len(part)], x, out=part)
        return rows


class ParallelMoE(MoE):
    """Mixture of experts over several ranks: each computes some output columns or a partial sum.

    Parameters
    ----------
    params, router, experts, **options
        See `MoE`; `experts` are this rank's.
    collectives : Collectives
    """

    __slots__ = ("_collectives",)

    def __init__(
        self,
        params: RoutingParams,
        router: Linear,
        experts: Experts,
        *,
        collectives: Collectives,
        **options: Any,
    ) -> None:
        super().__init__(params, router, experts, **options)
        self._collectives = collectives

    def combined(self, x: Any, routing: kernels.Routing, rows: Any, *, residual: Any = None) -> Any:
        """Return the output (T, N) of all ranks together. See `MoE`."""
        own = super().combined(x, routing, rows)
        if isinstance(self.experts, ColumnParallelExperts):
            y = self._collectives.all_gather(own, axis=1)
        else:
            y = self._collectives.all_reduce(own, out=own)
        return y if residual is None else kernels.residual_add(y, residual, out=residual)


def _gathered(collectives: Collectives, x: Any, share: int) -> Any:
    """Return the whole rows, all-gathered from the ranks' parts `x` (T, n).

    `share` consecutive ranks hold the same part.
    """
    whole = collectives.all_gather(x, axis=1)
    if share == 1:
        return whole
    parts = whole.reshape(x.shape[0], collectives.size, x.shape[1])[:, ::share]
    # Not -1: a step that ends no prompt has no rows here, and -1 would not be known.
    width = parts.shape[1] * x.shape[1]
    return array_module(x).ascontiguousarray(parts).reshape(x.shape[0], width)
