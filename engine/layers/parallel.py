"""Layers of a model that several ranks share: each has a part of the weights.

Tensor parallelism (Megatron-LM, arXiv:1909.08053): the first matrix of a pair is divided by its
output features, the second by its input features, and what the second gives is summed over the
ranks. Where no sum may cross ranks (deterministic), the second is divided by output features too,
its input and its output are gathered, and every number is one dot product in one rank.

Expert parallelism: a rank has some experts whole, and computes the pairs (token, expert) of these.
All ranks have all tokens, so none is sent to another rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine import kernels
from engine.device import array_module, empty_like
from engine.layers.collectives import Collectives
from engine.layers.embedding import Embedding
from engine.layers.linear import Linear
from engine.layers.moe import Experts, MoE
from engine.layers.norm import Norm
from engine.reference.embedding import PADDING_ID
from engine.weights import Format, Weight

__all__ = [
    "GatheredExperts",
    "GatheredLinear",
    "GatheredNorm",
    "GatheringLinear",
    "LocalExperts",
    "ParallelMoE",
    "SummedLinear",
    "SummedNorm",
    "VocabularyEmbedding",
    "VocabularyLinear",
]


class SummedLinear(Linear):
    """A matrix divided by its input features: the products of all ranks are added up.

    Parameters
    ----------
    weight : Weight
        (out, in / ranks).
    bias : Weight, optional
        (out,); rank 0 adds it.
    collectives : Collectives
    """

    __slots__ = ("_collectives",)

    def __init__(
        self,
        weight: Weight,
        bias: Weight | None = None,
        *,
        deterministic: bool = False,
        collectives: Collectives,
    ) -> None:
        own = bias if collectives.rank == 0 else None
        super().__init__(weight, own, deterministic=deterministic)
        self._collectives = collectives

    def __call__(
        self,
        x: Any,
        *,
        activation: str | None = None,
        out_dtype: Any = None,
        residual: Any = None,
    ) -> Any:
        """Return x Wᵀ + b, (T, out), the same on all ranks; as `Linear`."""
        y = super().__call__(x, activation=activation, out_dtype=out_dtype)
        y = self._collectives.all_reduce(y, out=y)
        return y if residual is None else kernels.residual_add(y, residual, out=residual)


class GatheredLinear(Linear):
    """A matrix divided by its output features, whose input the ranks have in parts.

    Parameters
    ----------
    weight : Weight
        (out / ranks, in).
    bias : Weight, optional
        (out / ranks,).
    collectives : Collectives
    share : int
        Ranks that have the same part of the input, one behind the other.
    """

    __slots__ = ("_collectives", "_share")

    def __init__(
        self,
        weight: Weight,
        bias: Weight | None = None,
        *,
        deterministic: bool = False,
        collectives: Collectives,
        share: int = 1,
    ) -> None:
        super().__init__(weight, bias, deterministic=deterministic)
        self._collectives = collectives
        self._share = share

    def __call__(
        self,
        x: Any,
        *,
        activation: str | None = None,
        out_dtype: Any = None,
        residual: Any = None,
    ) -> Any:
        """Return this rank's columns (T, out / ranks), for its part of the input.

        `residual` has this rank's columns, too.
        """
        whole = _gathered(self._collectives, x, self._share)
        return super().__call__(
            whole, activation=activation, out_dtype=out_dtype, residual=residual
        )


class GatheringLinear(GatheredLinear):
    """As `GatheredLinear`, but all ranks get the whole output."""

    __slots__ = ()

    def __call__(
        self,
        x: Any,
        *,
        activation: str | None = None,
        out_dtype: Any = None,
        residual: Any = None,
    ) -> Any:
        """Return x Wᵀ + b, (T, out), for this rank's part of the input."""
        own = super().__call__(x, activation=activation, out_dtype=out_dtype)
        y = self._collectives.all_gather(own, axis=1)
        return y if residual is None else kernels.residual_add(y, residual, out=residual)


class GatheredNorm(Norm):
    """The norm of rows whose features the ranks have in parts.

    Parameters
    ----------
    norm : Norm
        Of whole rows.
    collectives : Collectives
    share : int
        Ranks that have the same part, one behind the other.
    """

    __slots__ = ("_collectives", "_share")

    def __init__(self, norm: Norm, collectives: Collectives, share: int = 1) -> None:
        super().__init__(norm.weight, norm.eps, norm.offset, norm.branch_scale)
        self._collectives = collectives
        self._share = share

    @property
    def is_plain(self) -> bool:
        """As of `Norm`: no, a row is of all ranks' parts."""
        return False

    def __call__(self, x: Any, *, out: Any = None) -> Any:
        """Return this rank's part (T, N) of the norm of whole rows."""
        own = array_module(x).ascontiguousarray(x)
        whole = super().__call__(_gathered(self._collectives, own, self._share))
        first = self._collectives.rank // self._share * x.shape[1]
        own = whole[:, first : first + x.shape[1]]
        if out is None:
            return own
        out[...] = own
        return out


class SummedNorm(Norm):
    """A norm whose `add` first sums what the ranks have: the sum and the norm are one operation.

    Parameters
    ----------
    norm : Norm
        An RMSNorm without a factor.
    collectives : Collectives
    """

    __slots__ = ("_collectives",)

    def __init__(self, norm: Norm, collectives: Collectives) -> None:
        super().__init__(norm.weight, norm.eps, norm.offset)
        self._collectives = collectives

    def add(self, x: Any, residual: Any, *, is_late: bool = False) -> tuple[Any, Any]:
        """Return (norm(h), h) of h = the sum of all ranks' x + residual; as `Norm.add`."""
        if self.offset:
            x = self._collectives.all_reduce(x, out=x)
            return super().add(x, residual, is_late=is_late)
        return self._collectives.all_reduce_rmsnorm(x, residual, self.weight, self.eps, out=x)

    def add_for(self, form: Format | None, x: Any, residual: Any) -> tuple[Any, Any]:
        """As `add`, for a product whose weight has this format; as `Norm.add_for`."""
        if form is None or not form.activations:
            return self.add(x, residual, is_late=form is not None and form.is_packed)
        return super().add_for(form, self._collectives.all_reduce(x, out=x), residual)


class VocabularyEmbedding(Embedding):
    """An embedding whose table is divided by rows.

    Parameters
    ----------
    embedding : Embedding
        Of this rank's rows.
    collectives : Collectives
    """

    __slots__ = ("_collectives", "_first")

    def __init__(self, embedding: Embedding, collectives: Collectives) -> None:
        super().__init__(embedding.weight, embedding.scale)
        self._collectives = collectives
        self._first = collectives.rank * embedding.weight.shape[0]

    def __call__(self, token_ids: Any) -> Any:
        """Return the rows (T, N) of rank 0's `token_ids` (T,) int32; zeros for an unknown id.

        Those of other ranks are overwritten: only rank 0's device may know them.
        """
        self._collectives.broadcast(token_ids)
        xp = array_module(token_ids)
        num_rows = self.weight.shape[0]
        own = token_ids - np.int32(self._first)
        is_own = own.view(np.uint32) < np.uint32(num_rows)
        rows = super().__call__(xp.where(is_own, own, np.int32(PADDING_ID)))
        return self._collectives.all_reduce(rows, out=rows)


class VocabularyLinear(Linear):
    """The output layer, divided by rows.

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

    __slots__ = ("_collectives", "_vocab_size")

    def __init__(
        self,
        weight: Weight,
        bias: Weight | None = None,
        *,
        deterministic: bool = False,
        vocab_size: int,
        collectives: Collectives,
    ) -> None:
        super().__init__(weight, bias, deterministic=deterministic)
        self._collectives = collectives
        self._vocab_size = vocab_size

    def __call__(
        self,
        x: Any,
        *,
        activation: str | None = None,
        out_dtype: Any = None,
        residual: Any = None,
    ) -> Any:
        """Return the logits (T, V) of hidden states (T, N), the same on all ranks."""
        own = super().__call__(x, activation=activation, out_dtype=out_dtype)
        logits = self._collectives.all_gather(own, axis=1)
        if logits.shape[1] == self._vocab_size:
            return logits
        return array_module(logits).ascontiguousarray(logits[:, : self._vocab_size])


class _PairedExperts(Experts):
    """Experts that do more to the outputs of pairs than a product, so the sum comes apart."""

    def combined(
        self, x: Any, routing: kernels.Routing, *, deterministic: bool = False, **others: Any
    ) -> Any:
        """Return the sum over a token's pairs that a call returns; as `Experts`."""
        return kernels.moe_combine(self(x, routing, deterministic=deterministic), **others)


class GatheredExperts(_PairedExperts):
    """Experts whose second matrix is divided by output features: (E, N / ranks, I)."""

    def __init__(self, experts: Experts, collectives: Collectives) -> None:
        super().__init__(**vars(experts))
        object.__setattr__(self, "_collectives", collectives)

    def __call__(self, x: Any, routing: kernels.Routing, *, deterministic: bool = False) -> Any:
        """Return this rank's columns (T, k, N / ranks); as `Experts`."""
        collectives: Collectives = vars(self)["_collectives"]
        rows = self.first_product(x, routing, deterministic=deterministic)
        whole = collectives.all_gather(rows, axis=1)
        return self.second_product(whole, routing, deterministic=deterministic)


@dataclass(frozen=True, eq=False)
class LocalExperts(_PairedExperts):
    """Some of a layer's experts, whole; the other ranks have the others.

    Attributes
    ----------
    first : int
        Number of the first expert.
    padding_ids : (P,) array of int32
        `PADDING_ID` in all places; as many as rows are cleared in one launch.
    collectives : Collectives, optional
        If given, the outputs of the pairs are gathered, so that all ranks get those of all experts.
    """

    first: int = 0
    padding_ids: Any = None
    collectives: Collectives | None = None

    def __call__(self, x: Any, routing: kernels.Routing, *, deterministic: bool = False) -> Any:
        """Return (T, k, N) as `Experts`: zeros for pairs of other ranks' experts, if not gathered.

        Pairs are sorted by expert, so those of this rank's are a run: the products of the others
        are not computed, and their rows of the first product not written.
        """
        last = self.first + self.gate_up.shape[0]
        own = routing._replace(offsets=routing.offsets[self.first : last + 1])
        # SAFETY: before the first product, whose wait the second one relies on (`Experts`).
        pairs = self._zeros(x, routing.order.shape[0])
        options = {"deterministic": deterministic, "num_experts": routing.offsets.shape[0] - 1}
        rows = self.first_product(x, own, **options)
        pairs = self.second_product(rows, own, **options, out=pairs)
        if self.collectives is None:
            return pairs
        return self.collectives.all_reduce(pairs, out=pairs)  # x + 0 is x, in any order

    def _zeros(self, x: Any, num_rows: int) -> Any:
        """Return rows (num_rows, N) of zeros; an op's, as a launch plan takes nothing else."""
        rows = empty_like(x, shape=(num_rows, x.shape[1]))
        step = len(self.padding_ids)
        for first in range(0, num_rows, step):
            part = rows[first : first + step]
            kernels.embedding(self.padding_ids[: len(part)], x, out=part)
        return rows


class ParallelMoE(MoE):
    """Experts that the ranks have in parts, or some of them: outputs are summed, or gathered.

    Parameters
    ----------
    moe : MoE
        Of this rank's parts.
    collectives : Collectives
    """

    __slots__ = ("_collectives",)

    def __init__(self, moe: MoE, collectives: Collectives) -> None:
        super().__init__(
            moe.params,
            moe.router,
            moe.experts,
            correction=moe.correction,
            shared=moe.shared,
            shared_gate=moe.shared_gate,
            deterministic=moe.deterministic,
        )
        self._collectives = collectives

    def __call__(
        self, x: Any, *, norm: Norm | None = None, residual: Any = None, slots: Any = None
    ) -> Any:
        """Return the output (T, N) of all ranks together; as `MoE`."""
        own = super().__call__(x, norm=norm, slots=slots)
        if isinstance(self.experts, GatheredExperts):
            y = self._collectives.all_gather(own, axis=1)
        else:
            y = self._collectives.all_reduce(own, out=own)
        return y if residual is None else kernels.residual_add(y, residual, out=residual)


def _gathered(collectives: Collectives, x: Any, share: int) -> Any:
    """Return the whole rows of which each rank has a part `x` (T, n), `share` ranks the same."""
    whole = collectives.all_gather(x, axis=1)
    if share == 1:
        return whole
    parts = whole.reshape(x.shape[0], collectives.size, x.shape[1])[:, ::share]
    return array_module(x).ascontiguousarray(parts).reshape(x.shape[0], -1)
