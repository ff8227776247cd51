"""What the time of a layer depends on: its matrices, pages, states and experts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from engine.cache.layer_cache import LayerCache, StateShape, layer_caches
from engine.config import ModelConfig, MoeConfig
from engine.loading.weight_memory import is_expert, quantized_formats, weight_dtype
from engine.loading.weight_table import weight_shapes
from engine.weights import FORMATS, Format, dense_format

__all__ = ["LayerWork", "Matrix", "PartWork"]

# Kind of layer -> number of its attentions over all keys; no attention by default.
_ATTENTIONS = {"attention": 1, "attention_mamba2": 1, "mla": 1, "shortcut": 2}
# Kinds of the weights that may read a layer's first norm.
_FIRST = (
    *("qkv", "mla_in", "delta_in", "lightning_in", "mamba_in", "conv_in"),
    *("gate_up", "up", "experts_gate_up"),
)


@dataclass(frozen=True)
class Matrix:
    """A matrix, or the matrices of all experts: shape (..., out, in), and format."""

    shape: tuple[int, ...]
    form: Format

    @property
    def num_bytes(self) -> int:
        """Bytes in the format, with scales."""
        return self.form.num_bytes(self.shape)


@dataclass(frozen=True)
class LayerWork:
    """What the time of a layer depends on; equal layers take equal time.

    Attributes
    ----------
    weights : tuple of (str, Matrix)
        Kind and matrix, in the order of `weight_shapes`.
    num_attentions, query_dim, kv_values : int
        Number of attentions; of each, the features of its queries, and the values of one token in
        its pages.
    window : int
        Keys that attention sees on average; 0: all.
    states : tuple of StateShape
        States of convolutions, (rows, channels), and of recurrences, (heads, rows, columns).
    num_sums : int
        Number of sums that are added to the residual stream.
    moe : MoeConfig or None
        The experts.
    """

    weights: tuple[tuple[str, Matrix], ...]
    num_attentions: int
    query_dim: int
    kv_values: int
    window: int
    states: tuple[StateShape, ...]
    num_sums: int
    moe: MoeConfig | None

    @property
    def products(self) -> list[tuple[str, Matrix]]:
        """Kind and matrix of the products over all rows, without those of experts."""
        return [(kind, matrix) for kind, matrix in self.weights if len(matrix.shape) == 2]

    @property
    def experts(self) -> list[Matrix]:
        """The matrices of all experts."""
        return [matrix for _, matrix in self.weights if len(matrix.shape) == 3]

    @property
    def first(self) -> Matrix:
        """The matrix that reads the layer's first norm."""
        weights = dict(self.weights)
        return next(weights[kind] for kind in _FIRST if kind in weights)


@dataclass(frozen=True)
class PartWork:
    """The work of one GPU's part of a model.

    Attributes
    ----------
    layers : mapping of LayerWork to int
        Number of the layers of each kind.
    entry : tuple of Matrix
        Matrices between the embedding and the layers, or the layers and the output.
    output : Matrix
        The output layer.
    """

    layers: Mapping[LayerWork, int]
    entry: tuple[Matrix, ...]
    output: Matrix

    @staticmethod
    @lru_cache(maxsize=256)
    def of(
        local: ModelConfig, dtype: str, quantization: str | None, *, only_experts: bool = False
    ) -> PartWork:
        """Return the work of part `local`, whose matrices have the format `quantization`.

        With `only_experts`, all but those of the experts are in `dtype`.

        Examples
        --------
        >>> config = ModelConfig("llama", 64, 32, 2, 4, 2, 8, 48, 128)
        >>> part = PartWork.of(config, "bfloat16", None)
        >>> [(count, [kind for kind, _ in layer.weights]) for layer, count in part.layers.items()]
        [(2, ['qkv', 'o', 'gate_up', 'down'])]
        """
        form = FORMATS.get(quantization or "")
        formats = {} if form is None else quantized_formats(local, form)
        layers: dict[str, list[tuple[str, Matrix]]] = defaultdict(list)
        others: dict[str, Matrix] = {}
        for name, shape in weight_shapes(local).items():
            layer, _, kind = name.rpartition(".")
            chosen = None if only_experts and not is_expert(name) else formats.get(name)
            matrix = Matrix(shape, chosen or dense_format(weight_dtype(name, dtype)))
            if not layer:
                others[kind] = matrix
            elif _is_matrix(kind, shape):
                layers[layer].append((kind, matrix))
        caches = layer_caches(local, dtype)
        counts = Counter(
            _layer_work(local, index, caches, tuple(layers[f"layers.{index}"]))
            for index in range(local.num_layers)
        )
        entry = (
            matrix
            for kind, matrix in others.items()
            if kind.startswith(("altup_", "per_layer_")) and _is_matrix(kind, matrix.shape)
        )
        return PartWork(counts, tuple(entry), others["lm_head"])


def _is_matrix(kind: str, shape: tuple[int, ...]) -> bool:
    """Tell whether weights of this kind are multiplied with: no norms, biases, convolutions."""
    if kind.startswith("experts_"):
        return len(shape) == 3
    return len(shape) == 2 and "norm" not in kind


def _layer_work(
    local: ModelConfig,
    index: int,
    caches: tuple[LayerCache, ...],
    weights: tuple[tuple[str, Matrix], ...],
) -> LayerWork:
    kind = local.kind(index)
    own = local.at(index)
    cache = caches[index]
    pages = cache.pages if cache.source is None else caches[cache.source].pages
    num_attentions = _ATTENTIONS.get(kind, 0)
    values = sum(page.values_per_token for page in pages)
    num_sums = 1 if local.parallel or local.single_branch else 2
    return LayerWork(
        weights=weights,
        num_attentions=num_attentions,
        query_dim=own.num_heads * own.head_dim,
        kv_values=values // max(1, num_attentions),
        window=local.window(index) or local.chunk(index) // 2,
        states=cache.states,
        num_sums=2 * num_sums if kind == "shortcut" else num_sums,
        moe=local.moe_of(index),
    )
