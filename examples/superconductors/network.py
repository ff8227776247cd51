"""An attention network on arrays: forward pass, backward pass, Adam; NumPy or CuPy, no framework.

Attention, norms and gated units are the engine's ops, each with its gradient: kernels for CuPy
arrays, NumPy mirrors for NumPy arrays. The same network reads compositions and crystals: a `Batch`
holds tokens, and says which of them see each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import numpy as np

from engine import kernels
from engine.kernels import BlockSparse, Periodic

from . import ops
from .elements import PROPERTIES

__all__ = [
    "NEIGHBOUR",
    "Adam",
    "Batch",
    "Config",
    "Group",
    "Network",
    "absolute_slope",
    "packed",
]

NEIGHBOUR = len(PROPERTIES)  # in place of an element: a known composition
Array = np.ndarray[Any, Any]
Pattern = BlockSparse | Periodic | None
Backward = Callable[[Any], Any]


@dataclass(frozen=True)
class Config:
    """Sizes of the network.

    Attributes
    ----------
    hidden, num_heads, ffn, num_layers : int
        Features of a token, attention heads of ``hidden / num_heads`` features each, inner size of
        the gated units, and layers of attention and a gated unit.
    num_features : int
        Features of a token beside its element.
    dropout : float
        Share of the values of each residual branch that training sets to 0.
    seed : int
        Of the first weights and of the dropout.
    """

    hidden: int = 128
    num_heads: int = 4
    ffn: int = 256
    num_layers: int = 2
    num_features: int = ops.NUM_FEATURES
    dropout: float = 0.0
    seed: int = 0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads


@dataclass(frozen=True)
class Group:
    """Sequences of one length, whose tokens stand together in a batch.

    Attributes
    ----------
    start, count, length : int
        First token in the batch, number of sequences, tokens of each.
    cu_seqlens : (S + 1,) array of int32
        Bounds of the S sequences that the attention op sees, which are `packed` ones or the same.
    max_seqlen : int
        Longest of those.
    pattern : BlockSparse, Periodic or None
    """

    start: int
    count: int
    length: int
    cu_seqlens: Any
    max_seqlen: int
    pattern: Pattern = None

    @property
    def tokens(self) -> slice:
        """The group's rows in the batch."""
        return slice(self.start, self.start + self.count * self.length)

    @property
    def bounds(self) -> dict[str, Any]:
        """Keywords of the attention op."""
        return {
            "cu_seqlens_q": self.cu_seqlens,
            "cu_seqlens_k": self.cu_seqlens,
            "max_seqlen_q": self.max_seqlen,
            "causal": False,
            "pattern": self.pattern,
        }


@dataclass(frozen=True)
class Batch:
    """Tokens of many sequences, those of one length together.

    Attributes
    ----------
    elements : (T,) array of int32
        Atomic number of each token; 0 for a token that stands for a whole composition, `NEIGHBOUR`
        for one that stands for a known one.
    features : (T, F) array
    groups : tuple of Group
    roots : (B,) array of int64, or None
        Token from which each sequence's result is read; if None, from the mean of its tokens.
    order : (T,) array of int64
        The tokens sorted by element, which the gradient of the elements' table needs.
    """

    elements: Any
    features: Any
    groups: tuple[Group, ...]
    roots: Any = None

    @cached_property
    def order(self) -> Any:
        return self.elements.argsort(kind="stable")

    def __len__(self) -> int:
        return sum(group.count for group in self.groups)


def packed(start: int, count: int, length: int, xp: Any, room: int = 128) -> Group:
    """Return a group whose short sequences share tiles of the attention kernel.

    A kernel's tile holds 128 queries. One sequence of 8 tokens per tile would leave 15/16 of it
    empty, so as many as fit in `room` tokens are laid out as one, and a `BlockSparse` pattern with
    the identity as its mask lets each see only itself. Nothing is padded.
    """
    together = max(1, room // length)
    ends = np.arange(0, count + together, together).clip(max=count) * length
    pattern = _identity(together, length) if together > 1 else None
    return Group(start, count, length, xp.asarray(ends, np.int32), together * length, pattern)


@cache
def _identity(count: int, length: int) -> BlockSparse:
    return BlockSparse(np.eye(count, dtype=bool), length, length)


class Network:
    """The network and its weights.

    Parameters
    ----------
    config : Config
    xp : module
        numpy or cupy.
    dtype : dtype
        Of the activations, and of the copy of the weights that is used: float32, float64 (NumPy),
        bfloat16 or float16. The weights that are trained are float32 (float64 for float64).

    Attributes
    ----------
    flat : (P,) array
        All trained weights.
    weights : dict of str to array
        Views of their copy in `dtype`.
    table : (98, hidden) array
        Rows of the elements: what was learned for each alone, plus a function of its properties.
    """

    def __init__(self, config: Config, xp: Any = np, dtype: Any = np.float32) -> None:
        self.config = config
        self.xp = xp
        self.dtype = np.dtype(dtype)
        self._places: dict[str, tuple[slice, tuple[int, ...]]] = {}
        rng = np.random.default_rng(config.seed)
        parts = []
        size = 0
        for name, shape, scale in self._shapes():
            count = math.prod(shape)
            self._places[name] = (slice(size, size + count), shape)
            size += count
            is_norm = name.endswith("norm")
            parts.append(np.ones(count) if is_norm else rng.standard_normal(count) * scale)
        wide = np.float64 if self.dtype == np.float64 else np.float32
        self.flat = xp.asarray(np.concatenate(parts), wide)
        self._narrow = xp.empty(size, self.dtype)
        self.weights = self.views(self._narrow)
        self.table = xp.empty_like(self.weights["embedding"])
        self._properties = xp.asarray(np.pad(PROPERTIES, ((0, 1), (0, 0))), self.dtype)
        self._num_masks = config.seed << 20  # dropout masks drawn
        self.update()

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...], float]]:
        """Yield name, shape and deviation of each weight; products are (out, in)."""
        c = self.config
        n, f = c.hidden, c.ffn
        yield "embedding", (NEIGHBOUR + 1, n), 0.5
        yield "properties", (n, PROPERTIES.shape[1]), 0.3
        yield "features", (n, c.num_features), c.num_features**-0.5
        for i in range(c.num_layers + 1):
            if i:
                yield f"{i}.attention_norm", (n,), 0.0
                yield f"{i}.qkv", (3 * n, n), n**-0.5
                yield f"{i}.out", (n, n), n**-0.5 / 2
            yield f"{i}.mlp_norm", (n,), 0.0
            yield f"{i}.gate_up", (2 * f, n), n**-0.5
            yield f"{i}.down", (n, f), f**-0.5 / 2
        yield "final_norm", (n,), 0.0
        yield "head", (1, n), n**-0.5

    def views(self, flat: Any) -> dict[str, Any]:
        """Return the parts of a flat array by name."""
        return {name: flat[part].reshape(shape) for name, (part, shape) in self._places.items()}

    def update(self, flat: Any = None) -> None:
        """Take over `flat` as the weights (default: `self.flat`, after it was changed)."""
        if flat is not None:
            self.flat[...] = flat
        self._narrow[...] = self.flat
        self.table[...] = product(self._properties, self.weights["properties"])
        self.table += self.weights["embedding"]

    def predict(self, batch: Batch) -> Any:
        """Return the outputs, (B, 1) float32."""
        return self._run(batch, None)[0]

    def gradient(self, batch: Batch, dloss: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Return the outputs and the gradient of a loss of them with respect to `flat`.

        dloss : callable
            Gradient of the loss with respect to the outputs, from the outputs.
        """
        gradient = self.xp.zeros_like(self.flat)
        outputs, backward = self._run(batch, self.views(gradient))
        backward(dloss(outputs).astype(self.dtype))
        return outputs, gradient

    def _run(self, batch: Batch, grads: dict[str, Any] | None) -> tuple[Any, Backward]:
        """Return the outputs, and the function that adds their gradient to `grads`."""
        steps: list[tuple[Backward, bool]] = []

        def add(function: Any, x: Any, *options: Any) -> Any:
            """Return x + function(x); in training, with dropout of the second term."""
            y, backward = function(x, grads, *options)
            if grads is None or not self.config.dropout:
                steps.append((backward, True))
                return added(x, y)
            self._num_masks += 1
            drop = partial(self._drop, self._num_masks)
            steps.append((lambda d: backward(drop(d)), True))
            return added(x, drop(y))

        def apply(function: Any, x: Any, *options: Any) -> Any:
            y, backward = function(x, grads, *options)
            steps.append((backward, False))
            return y

        x = apply(self._embed, batch)
        x = add(self._mlp, x, 0)
        for layer in range(1, self.config.num_layers + 1):
            x = add(self._attend, x, layer, batch)
            x = add(self._mlp, x, layer)
        x = apply(self._pool, x, batch)
        x = apply(self._norm, x, "final_norm")
        outputs = apply(self._linear, x, "head")

        def backward(d: Any) -> None:
            for step, is_residual in reversed(steps):
                d = added(d, step(d)) if is_residual else step(d)

        return outputs.astype(self.flat.dtype), backward

    def _drop(self, number: int, y: Any) -> Any:
        """Return y with the mask of this number: a share is set to 0, the rest scaled up."""
        rate = self.config.dropout
        if isinstance(y, np.ndarray):
            return y * ops.keep_factors(y.size, number, rate).astype(y.dtype).reshape(y.shape)
        return ops.dropout(y.reshape(-1), number % 2**32, rate).reshape(y.shape)

    def _linear(self, x: Any, grads: Any, name: str) -> tuple[Any, Backward]:
        weight = self.weights[name]

        def backward(dy: Any) -> Any:
            grads[name] += weight_gradient(dy, x)
            return product(dy, weight.T)

        return product(x, weight), backward

    def _norm(self, x: Any, grads: Any, name: str) -> tuple[Any, Backward]:
        weight = self.weights[name]

        def backward(dy: Any) -> Any:
            dx, dweight = kernels.rmsnorm_backward(dy, x, weight)
            grads[name] += dweight.astype(self.flat.dtype)
            return dx

        return kernels.rmsnorm(x, weight), backward

    def _embed(self, batch: Batch, grads: Any) -> tuple[Any, Backward]:
        features = batch.features.astype(self.dtype, copy=False)
        x, of_features = self._linear(features, grads, "features")

        def backward(dx: Any) -> None:
            order = batch.order
            table = kernels.embedding_backward(dx, batch.elements[order], order, len(self.table))
            grads["embedding"] += table.astype(self.flat.dtype)
            grads["properties"] += weight_gradient(table, self._properties)
            of_features(dx)

        return x + kernels.embedding(batch.elements, self.table), backward

    def _mlp(self, x: Any, grads: Any, layer: int) -> tuple[Any, Backward]:
        y, norm = self._norm(x, grads, f"{layer}.mlp_norm")
        packed_gate, gate_up = self._linear(y, grads, f"{layer}.gate_up")
        y, down = self._linear(kernels.swiglu(packed_gate), grads, f"{layer}.down")

        def backward(dy: Any) -> Any:
            return norm(gate_up(kernels.swiglu_backward(down(dy), packed_gate)))

        return y, backward

    def _attend(self, x: Any, grads: Any, layer: int, batch: Batch) -> tuple[Any, Backward]:
        y, norm = self._norm(x, grads, f"{layer}.attention_norm")
        rows, of_qkv = self._linear(y, grads, f"{layer}.qkv")
        heads = rows.reshape(len(x), 3, self.config.num_heads, self.config.head_dim)
        mixed = self.xp.empty_like(heads[:, 0])
        logs = [attention(heads, group, mixed) for group in batch.groups]
        y, of_out = self._linear(mixed.reshape(x.shape), grads, f"{layer}.out")

        def backward(dy: Any) -> Any:
            dmixed = of_out(dy).reshape(mixed.shape)
            dheads = self.xp.empty_like(heads)
            for group, lse in zip(batch.groups, logs, strict=True):
                attention_gradient(dmixed, heads, mixed, lse, group, dheads)
            return norm(of_qkv(dheads.reshape(rows.shape)))

        return y, backward

    def _pool(self, x: Any, grads: Any, batch: Batch) -> tuple[Any, Backward]:
        if batch.roots is not None:

            def to_roots(dy: Any) -> Any:
                dx = self.xp.zeros_like(x)
                dx[batch.roots] = dy
                return dx

            return x[batch.roots], to_roots

        def to_tokens(dy: Any) -> Any:
            dx = self.xp.empty_like(x)
            first = 0
            for g in batch.groups:
                share = dy[first : first + g.count].astype(self.flat.dtype) / g.length
                dx[g.tokens].reshape(g.count, g.length, -1)[...] = share[:, None]
                first += g.count
            return dx

        means = [
            x[g.tokens].reshape(g.count, g.length, -1).astype(self.flat.dtype).mean(1)
            for g in batch.groups
        ]
        return self.xp.concatenate(means).astype(self.dtype), to_tokens


def added(x: Any, y: Any) -> Any:
    """Return x + y."""
    return x + y if isinstance(x, np.ndarray) else kernels.residual_add(x, y)


def absolute_slope(outputs: Any, wanted: Any) -> Any:
    """Return the gradient of the mean absolute error of outputs (B, 1) with respect to them."""
    return np.sign(outputs - wanted) / len(wanted)


def attention(heads: Any, group: Group, out: Any) -> Any:
    """Attend within a group; write its rows of `out`, return their log-sum-exp.

    heads : (T, 3, H, D) array
        Queries, keys and values.
    """
    q, k, v = (heads[group.tokens, i] for i in range(3))
    _, lse = kernels.attention_prefill(
        *(q, k, v),
        **group.bounds,
        out=out[group.tokens],
        return_lse=True,
    )
    return lse


def attention_gradient(
    dout: Any, heads: Any, out: Any, lse: Any, group: Group, dheads: Any
) -> None:
    """Write the gradients of a group's queries, keys and values to its rows of `dheads`."""
    rows = group.tokens
    q, k, v = (heads[rows, i] for i in range(3))
    dq, dk, dv = (dheads[rows, i] for i in range(3))
    kernels.attention_backward(
        *(dout[rows], q, k, v, out[rows], lse),
        **group.bounds,
        max_seqlen_k=group.max_seqlen,
        dq=dq,
        dk=dk,
        dv=dv,
    )


def product(x: Any, weight: Any) -> Any:
    """Return x Wᵀ in x's dtype: the engine's GEMM, but NumPy's product for float32 and float64."""
    if _is_plain(x):
        return x @ weight.T
    return kernels.gemm(x, _contiguous(weight))


def weight_gradient(dy: Any, x: Any) -> Any:
    """Return dyᵀ x, (out, in), in float32 (float64 for float64)."""
    if _is_plain(x):
        return dy.T @ x
    if x.dtype.itemsize == 2 and dy.shape[1] % 8 == x.shape[1] % 8 == 0:
        return ops.weight_gradient(dy, x)
    return kernels.gemm(_contiguous(dy.T), _contiguous(x.T), out_dtype=np.float32)


def _is_plain(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.itemsize >= 4


def _contiguous(x: Any) -> Any:
    return x if x.flags.c_contiguous else x.copy()


@dataclass
class Adam:
    """Adam with decoupled weight decay, gradient clipping, and a mean of the weights over steps.

    The mean of the last weights predicts better than they do: it is what a run returns.

    Attributes
    ----------
    learning_rate : float
        The highest. It rises over a twentieth of the steps and falls along a cosine to 0.
    num_steps : int
    weight_decay, clip, mean_decay : float
        Clipping is by the gradient's norm; `mean_decay` is the share of the mean that a step keeps.
    """

    learning_rate: float
    num_steps: int
    weight_decay: float = 0.02
    clip: float = 1.0
    mean_decay: float = 0.995
    betas: tuple[float, float] = (0.9, 0.99)
    _step: int = field(default=0, init=False)
    _moments: Any = field(default=None, init=False)
    mean: Any = field(default=None, init=False)

    def rate(self) -> float:
        """Return the learning rate of the next step."""
        warm = max(1, self.num_steps // 20)
        falling = 0.5 + 0.5 * math.cos(math.pi * self._step / self.num_steps)
        return self.learning_rate * min((self._step + 1) / warm, falling)

    def step(self, network: Network, gradient: Any) -> None:
        """Change the network's weights."""
        self.apply(network, gradient, network.xp.asarray(self.schedule()))

    def schedule(self) -> Array:
        """Return what changes from step to step, for the next one. See `ops.adam_formula`."""
        rate = self.rate()
        self._step += 1
        beta_1, beta_2 = self.betas
        correction = math.sqrt(1 - beta_2**self._step) / (1 - beta_1**self._step)
        mean_share = 1 - min(self.mean_decay, self._step / (self._step + 10))
        return np.array([rate, correction, mean_share], np.float32)

    def apply(self, network: Network, gradient: Any, schedule: Any) -> None:
        """Change the network's weights by a step of this schedule."""
        xp, flat = network.xp, network.flat
        if self._moments is None:
            self._moments = (xp.zeros_like(flat), xp.zeros_like(flat))
            self.mean = flat.copy()
        formula = ops.adam_formula if xp is np else ops.adam_step
        formula(
            *(flat, *self._moments, self.mean, gradient, schedule),
            decay=self.weight_decay,
            clip=self.clip,
            beta_1=self.betas[0],
            beta_2=self.betas[1],
        )
        network.update()
