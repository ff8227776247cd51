"""LoRA adapters of one batch: y = x Wᵀ + B (A x), with A and B of each token's adapter [1]_.

Every adapted product has room for several adapters in arrays at fixed addresses, so that launch
plans and CUDA graphs stay valid while adapters come and go. The tokens are sorted by adapter once
per step; two grouped products per weight then read the matrices of the adapters in the batch.

References
----------
.. [1] Hu et al.: LoRA: Low-Rank Adaptation of Large Language Models, arXiv:2106.09685.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from engine import kernels
from engine.errors import ContractError
from engine.layers.batch import ForwardBatch
from engine.layers.linear import Linear, Product

__all__ = ["NO_ADAPTER", "AdaptedProduct", "AdapterSlots", "start_copy"]

NO_ADAPTER = np.iinfo(np.int32).max
"""Slot of a token without an adapter."""

_NUM_SPLITS = 8  # partial sums of A x in deterministic mode, whatever the batch


class AdapterSlots:
    """The slots of a decoder's adapters: their matrices, and the adapter of each token of a step.

    Parameters
    ----------
    xp : module
        `numpy` or `cupy`.
    num_slots : int
        Number of adapters that one step may use (S).
    rank : int
        Largest rank of an adapter, a multiple of 8; smaller ones are padded with zeros.
    bounds : mapping of str to tuple of int
        Weight name -> end of each of its parts in its rows, such as those of q, k and v. An adapter
        has an A for each part. Other weights are not adapted.
    dtype : dtype
        Dtype of the activations and of the matrices.

    Attributes
    ----------
    products : dict of str to AdaptedProduct
        The adapted products by weight name: "layers.0.qkv", ...
    written : dict of int to mapping
        Slot -> the matrices on the host that were written to it.
    kinds : frozenset of str
        Kinds of the weights ("qkv") that an adapter in some slot has changed; the others' products
        are computed as in a model without adapters, unless a batch says otherwise.
    num_writes : int
        Calls of `write` so far: tells an engine that another one has changed the slots.
    """

    def __init__(
        self,
        xp: Any,
        num_slots: int,
        rank: int,
        bounds: Mapping[str, tuple[int, ...]],
        dtype: np.dtype[Any],
    ) -> None:
        self.xp = xp
        self.dtype = dtype
        self.num_slots = num_slots
        self.rank = rank
        self.products: dict[str, AdaptedProduct] = {}
        self.written: dict[int, Mapping[str, tuple[Any, Any, Any]]] = {}
        self.kinds: frozenset[str] = frozenset()
        self.num_writes = 0
        self._bounds = dict(bounds)
        self._copied: dict[int, Any] = {}  # slot -> event after the last copy to it
        self._tokens = _SortedTokens()
        if xp is not np:
            # CuPy compiles indexing by an array on first use, as in `serving`: not within a step.
            one = xp.zeros(1, np.int32)
            _ = one[one]

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots on the device."""
        return sum(product.num_bytes for product in self.products.values())

    def attach(self, name: str, linear: Linear) -> None:
        """Let adapters change the product `linear` of weight `name`, if it is one of those."""
        if (bounds := self._bounds.get(name)) is not None:
            product = AdaptedProduct(self, self._tokens, name, linear, bounds)
            self.products[name] = product
            linear.adapt(product)

    def write(self, slot: int, matrices: Mapping[str, tuple[Any, Any, Any]]) -> None:
        """Write an adapter to a slot.

        Parameters
        ----------
        slot : int
        matrices : mapping
            Weight name -> its A (P·R, K), B (N, R) and bias (N,) or None, on the host. The products
            of other weights are not changed by the adapter.
        """
        for name, product in self.products.items():
            product.write(slot, *matrices.get(name, (None, None, None)))
        if self.xp is not np:
            # SAFETY: the device reads page-locked arrays after this returns. They are kept, and the
            # former adapter's are let go once their copies are done.
            if (former := self._copied.pop(slot, None)) is not None:
                former.synchronize()
            event = self.xp.cuda.Event(disable_timing=True)
            event.record()
            self._copied[slot] = event
        self.written[slot] = matrices
        self.num_writes += 1
        self.kinds |= {name.rpartition(".")[2] for name in matrices}

    def parked(self) -> AdapterSlots:
        """Return slots without memory on the device, with the same adapters; see `restore`."""
        slots = AdapterSlots(self.xp, self.num_slots, self.rank, self._bounds, self.dtype)
        slots.written = dict(self.written)
        slots.kinds = self.kinds
        slots.num_writes = self.num_writes
        return slots

    def restore(self, parked: AdapterSlots) -> None:
        """Write the adapters of `parked` to the same slots of these products."""
        for slot, matrices in parked.written.items():
            self.write(slot, matrices)
        self.kinds |= parked.kinds
        self.num_writes = parked.num_writes

    @contextmanager
    def serving(self, batch: ForwardBatch) -> Iterator[None]:
        """Context in which the products apply the adapters of the tokens of `batch`."""
        slots = batch.adapter_slots
        if slots is None:
            yield
            return
        tokens = self._tokens
        tokens.by_count = {int(slots.shape[0]): self._sort(slots)}
        rows = batch.logits_indices
        if rows is not None and 0 < rows.shape[0] < slots.shape[0]:
            tokens.by_count[int(rows.shape[0])] = self._sort(slots[rows])
        tokens.kinds = self.kinds if batch.adapter_kinds is None else batch.adapter_kinds
        try:
            yield
        finally:
            tokens.by_count = {}

    def _sort(self, slots: Any) -> tuple[Any, Any]:
        """Sort tokens by slot; those without an adapter come last, as an expert of their own."""
        ids = slots[:, None]
        # Any array of floats serves as the weights, which are not read. SAFETY: the embedding waits
        # for this launch before it lets others start, so no later one must.
        routing = kernels.moe_sort(ids, ids.view(np.float32), num_experts=self.num_slots + 1)
        return routing.order, routing.offsets[: self.num_slots + 1]


class _SortedTokens:
    """The tokens of the batch that is served, sorted by slot.

    All products read it, so none refers to the slots: that cycle would keep their memory.

    Attributes
    ----------
    by_count : dict of int to tuple of array
        Number of rows of a product -> their order and offsets; empty without adapters.
    kinds : collection of str
        Kinds of the weights that the batch's adapters may change.
    """

    def __init__(self) -> None:
        self.by_count: dict[int, tuple[Any, Any]] = {}
        self.kinds: Collection[str] = ()

    def of(self, kind: str, num_rows: int) -> tuple[Any, Any] | None:
        """Return (order, offsets) of the rows of a product; None if no adapter changes them.

        Raises
        ------
        ContractError
            If the rows are neither all tokens of the step nor those with logits.
        """
        if not self.by_count or not num_rows or kind not in self.kinds:
            return None
        if num_rows not in self.by_count:
            raise ContractError(
                f"num_rows must be one of {sorted(self.by_count)}, the tokens of the step or those "
                f"with logits; got {num_rows}"
            )
        return self.by_count[num_rows]


class AdaptedProduct:
    """The product of one weight, and the adapters that change it.

    Parameters
    ----------
    slots : AdapterSlots
        Their number, rank and dtype are read.
    tokens : _SortedTokens
    name : str
    linear : Linear
        Computes the product without adapters.
    bounds : tuple of int

    Attributes
    ----------
    a : (S, P·R, K) array
        A of each slot and part.
    b : (S, N, R) array
        B of each slot, multiplied by the adapter's scale.
    bias : (S, N) array
        Added to the products of each slot.
    rank : int
        R, the rows of A for each part.
    """

    def __init__(
        self,
        slots: AdapterSlots,
        tokens: _SortedTokens,
        name: str,
        linear: Linear,
        bounds: tuple[int, ...],
    ) -> None:
        xp = slots.xp
        dtype = slots.dtype
        rows, columns = linear.weight.shape
        self.bounds = bounds
        self.a = xp.zeros((slots.num_slots, len(bounds) * slots.rank, columns), dtype)
        self.b = xp.zeros((slots.num_slots, rows, slots.rank), dtype)
        self.bias = xp.zeros((slots.num_slots, rows), dtype)
        self.kind = name.rpartition(".")[2]
        self.rank = slots.rank
        self._xp = xp
        self._tokens = tokens
        self._base: Product = linear.product

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return int(self.a.nbytes + self.b.nbytes + self.bias.nbytes)

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array."""
        yield from (("a", self.a), ("b", self.b), ("bias", self.bias))

    def write(self, slot: int, a: Any, b: Any, bias: Any) -> None:
        """Write an adapter's matrices to a slot; None stands for zeros."""
        for target, source in ((self.a, a), (self.b, b), (self.bias, bias)):
            if source is None:
                own = target[slot]
                own.view(f"u{own.itemsize}").fill(0)  # CuPy fills no bfloat16
            elif isinstance(target, np.ndarray):
                target[slot] = source
            else:
                start_copy(self._xp, target, slot, source)

    def plain(
        self,
        x: Any,
        weight: Any,
        *,
        activation: str | None = None,
        out: Any = None,
        **options: Any,
    ) -> Any:
        """Return activation(x Wᵀ + B (A x) + b) + residual. See `Product.plain`.

        The adapters' part is added to the finished product, and "swiglu" follows both.
        """
        found = self._tokens.of(self.kind, x.shape[0])
        if found is None and activation == "swiglu" and options.get("deterministic"):
            # Beside adapters SwiGLU reads the rounded product; fused, it would read unrounded sums.
            return kernels.swiglu(self._base.plain(x, weight, **options), out=out)
        if found is None:
            return self._base.plain(x, weight, activation=activation, out=out, **options)
        if activation not in (None, "swiglu"):
            raise ContractError(
                f'activation must be None or "swiglu" with adapters; got {activation!r}'
            )
        splits = _NUM_SPLITS if options.get("deterministic") else None
        low = kernels.lora_shrink(x, self.a, *found, num_splits=splits, pdl=True)
        y = self._base.plain(x, weight, out=None if activation else out, **options)
        high = {"bounds": self.bounds, "bias": self.bias, "accumulate": True, "pdl": True}
        kernels.lora_expand(low, self.b, *found, **high, out=y)
        return kernels.swiglu(y, out=out) if activation else y

    def of_normed(self, x: Any, norm: Any, weight: Any, **options: Any) -> Any:
        """Return the product of ``norm(x)``. See `Product.of_normed`."""
        if self._tokens.of(self.kind, x.shape[0]) is None:
            return self._base.of_normed(x, norm, weight, **options)
        return self.plain(norm(x), weight, **options)


def start_copy(cp: Any, target: Any, slot: int, source: Any) -> None:
    """Start a copy of an array on the host to a slot, in the order of the current stream."""
    source = np.ascontiguousarray(source, target.dtype)
    if source.shape != target.shape[1:]:
        raise ContractError(f"source must have shape {target.shape[1:]}; got {source.shape}")
    # `ndarray.set` would wait for the copy, and for the step in flight before it.
    cp.cuda.runtime.memcpyAsync(
        target.data.ptr + slot * source.nbytes,
        source.ctypes.data,
        source.nbytes,
        cp.cuda.runtime.memcpyHostToDevice,
        cp.cuda.get_current_stream().ptr,
    )
