"""Time of a step on one GPU of one pipeline stage, from bytes, operations and launches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from engine.cards import CARDS, Card
from engine.config import ModelConfig, MoeConfig
from engine.dtypes import itemsize
from engine.errors import ConfigError
from engine.kernels.gemm_wna16.sm90 import max_few_rows
from engine.loading.weight_memory import quantized_formats, weight_dtype
from engine.loading.weight_table import weight_shapes
from engine.runner.cuda_graph import batch_sizes
from engine.scaling.constants import Constants
from engine.scaling.division import Division
from engine.scaling.terms import Terms
from engine.weights import FORMATS, Format, dense_format

__all__ = ["Step", "StepModel"]

# Kind of layer -> the product that reads its norm.
_FIRST = {
    "attention": "qkv",
    "mla": "mla_in",
    "gated_delta": "delta_in",
    "lightning": "lightning_in",
    "mamba2": "mamba_in",
    "short_conv": "conv_in",
}
_MATRICES = (
    *_FIRST.values(),
    "o",
    *("mla_q_up", "mla_kv_up", "mla_out"),
    *("delta_z_up", "delta_a_up", "delta_out"),
    *("lightning_out", "mamba_out", "conv_out"),
    "gate_up",
    "up",
    "down",
    "router",
    "shared_gate_up",
    "shared_down",
)
_FUSED_ROWS = 1  # maximum number of rows for GEMMs with fused norm and rope
_ROUTED_ROWS = range(2, 257)  # rows for which one op is norm, router and choice of experts
_SORTED_ROWS = 16  # maximum number of rows that it sorts by expert, too
_FEW_ROWS = 16  # maximum number of rows for skinny GEMMs, bound by reading weights
_FEW_PAIRS = 8  # the same limit for the tokens of one expert
_TILE_ROWS = 128  # rows of a GEMM tile
_EXPERT_TILE_ROWS = 256  # tokens of one expert in a tile
_LOGIT_BYTES = 4
_DELTA_CHUNK = 64  # tokens of a chunk of the gated delta rule


@dataclass(frozen=True)
class Step:
    """The work of one step.

    Attributes
    ----------
    num_tokens : int
        Number of query tokens.
    context : float
        Mean number of keys that a token attends to, including its own.
    num_rows : int
        Number of tokens whose logits are computed.
    is_decode : bool
        Whether the step is a CUDA graph with one token per sequence.
    """

    num_tokens: int
    context: float
    num_rows: int
    is_decode: bool = True

    @classmethod
    def decode(cls, num_seqs: int, context: float) -> Step:
        """Return a decode step: one token for each of `num_seqs` sequences."""
        return cls(num_seqs, context, num_seqs)

    @property
    def rows(self) -> int:
        """Rows of a GEMM, padded to the size of a graph or to whole tiles."""
        if not self.is_decode:
            return -(-self.num_tokens // _TILE_ROWS) * _TILE_ROWS
        return next(n for n in batch_sizes(self.num_tokens) if n >= self.num_tokens)


@dataclass(frozen=True)
class StepModel:
    """Predicts the time of a step.

    Attributes
    ----------
    config : ModelConfig
        The whole model.
    dtype : str
        Dtype of activations and dense weights.
    page_itemsize : int
        Bytes per element of the pages.
    quantization : str or None
        Format of the layers' matrices; None: `dtype`.
    card : Card
        The GPU.
    constants : Constants
        Measured constants.

    Raises
    ------
    ConfigError
        If the card does not support the format's arithmetic.
    """

    config: ModelConfig
    dtype: str
    page_itemsize: int
    quantization: str | None
    card: Card
    constants: Constants

    def __post_init__(self) -> None:
        if itemsize(self.dtype) != 2:
            raise ConfigError(f"dtype must be bfloat16 or float16 on a GPU; got {self.dtype}")
        form = FORMATS.get(self.quantization or "")
        if form is not None and form.activations and not self._rate_8(form):
            raise ConfigError(
                f"quantization must be a format that {self.card.title} can multiply; "
                f"got {form.name}, and it has no tensor cores for {form.activations}"
            )

    def stage_terms(
        self, local: ModelConfig, step: Step, division: Division, *, is_last: bool
    ) -> Terms:
        """Return the device time of `step` on one GPU, without host work, `step_us` or transfers.

        Parameters
        ----------
        local : ModelConfig
            The GPU's part of the model (`stages`).
        step : Step
            The step's work.
        division : Division
            The division of the model.
        is_last : bool
            Whether the stage holds the output layer.
        """
        shapes, formats, kinds = _weights(local, self.quantization)
        terms = Terms()
        for (layer, window), count in kinds.items():
            terms += self._layer(local, layer, window, shapes, formats, step, division).times(count)
        return terms + self._output(shapes, formats, step, division) if is_last else terms

    def _layer(
        self,
        local: ModelConfig,
        layer: int,
        window: int,
        shapes: Mapping[str, tuple[int, ...]],
        formats: Mapping[str, Format],
        step: Step,
        division: Division,
    ) -> Terms:
        found = {kind: shapes.get(f"layers.{layer}.{kind}") for kind in _MATRICES}
        chosen = {kind: self._format(f"layers.{layer}.{kind}", formats) for kind in found}
        own = local.kind(layer)
        is_recurrent = own in _STATES
        terms = (
            self._states(local, own, step) if is_recurrent else self._attention(local, window, step)
        )
        moe = local.moe_of(layer)
        if _has_fused_routing(moe, step, division):
            found["router"] = None
        for kind, shape in found.items():
            if shape is not None:
                terms += self._product(shape, chosen[kind], step.rows)
        if moe is not None:
            terms += self._experts(moe, layer, shapes, formats, step, division)
        first = chosen[_FIRST.get(own, "qkv")]
        terms += self._elementwise(local, moe, first, step, division)
        sums = 1 if local.parallel else 2
        return terms + self._sum(step.num_tokens, division).times(sums)

    def _format(self, name: str, formats: Mapping[str, Format]) -> Format:
        return formats.get(name) or dense_format(weight_dtype(name, self.dtype))

    def _product(self, shape: tuple[int, ...], form: Format, rows: int) -> Terms:
        """Return the time of x W^T for `rows` rows of x."""
        reading = self._read_us(form.num_bytes(shape), self._read_share(form))
        if rows > (max_few_rows(form) if form.is_packed else _FEW_ROWS):
            operations = 2 * rows * math.prod(shape) * (1 + self.constants.edge / shape[-1])
            # Decoding is not hidden behind the products.
            products = self._multiply_us(operations, form)
            products += self._decode_us(math.prod(shape), form)
        elif form.is_packed:
            rows = 1 if rows == 1 else 8  # rows that the kernel computes
            products = rows * math.prod(shape) / self.constants.packed_rows / 1e6 * self._speed()
        else:
            products = 0.0
        return self._both(reading, products)

    def _decode_us(self, num_codes: float, form: Format) -> float:
        """Return the time to decode packed codes for the tensor cores; 0 for other formats."""
        if not form.is_packed:
            return 0.0
        constants = self.constants
        rate = constants.super_tile if form.super_block else constants.packed_tile
        return num_codes / rate / 1e6 * self._speed()

    def _experts(
        self,
        moe: MoeConfig,
        layer: int,
        shapes: Mapping[str, tuple[int, ...]],
        formats: Mapping[str, Format],
        step: Step,
        division: Division,
    ) -> Terms:
        """Return the time of the grouped GEMMs over all experts chosen by any token."""
        whole = self.config.moe
        assert whole is not None
        used, pairs = _chosen_experts(whole, step.num_tokens, division)
        constants = self.constants
        terms = Terms(routing=self.constants.route_us)
        rows = _padded(pairs / used, 16)
        for kind in ("experts_gate_up", "experts_down"):
            shape = shapes[f"layers.{layer}.{kind}"]
            name = f"layers.{layer}.{kind}"
            form = self._format(name, formats)
            share = self._expert_read_share(form)
            reading = self._read_us(form.num_bytes(shape) * used / moe.num_experts, share)
            operations = 2 * rows * used * shape[1] * shape[2]
            products = self._multiply_us(operations, form) / constants.tensor_experts
            if pairs / used > _FEW_PAIRS:
                decode = self._decode_us(used * shape[1] * shape[2], form)
                products = math.hypot(products, decode * math.ceil(rows / _EXPERT_TILE_ROWS))
            terms += self._both(reading, products)
        return terms

    def _attention(self, local: ModelConfig, window: int, step: Step) -> Terms:
        """Return the time of attention, including fused rope and KV append."""
        context = min(step.context, window) if window else step.context
        constants = self.constants
        heads = local.num_heads
        cached = 2 * local.num_kv_heads * local.head_dim
        if local.mla is not None:
            cached = local.mla.cache_dim
        kv_bytes = cached * self.page_itemsize
        if step.is_decode:
            share = constants.read_pages if self.page_itemsize > 1 else constants.read_page_codes
            reading = self._read_us(step.num_tokens * context * kv_bytes, share)
            tail = constants.sequence_us * math.sqrt(step.num_tokens)
            return Terms(pages=reading + tail, launches=constants.launch_us)
        operations = 4 * heads * local.head_dim * step.num_tokens * context
        rate = constants.tensor_attention * self.card.tensor_16
        return Terms(attention=operations / rate / 1e6, launches=constants.launch_us)

    def _states(self, local: ModelConfig, kind: str, step: Step) -> Terms:
        """Return the time of linear attention without its projections."""
        heads, key_dim, value_dim = _STATES[kind](local)
        constants = self.constants
        state = heads * key_dim * value_dim
        launches = 2 * constants.elementwise_us + constants.launch_us
        if step.is_decode:  # each state is read and written
            reading = self._read_us(step.num_tokens * 2 * 4 * state, constants.read_pages)
            return Terms(pages=reading, launches=launches)
        # A chunk multiplies with the state three times, and twice with its own keys and values.
        chunk = 2 * _DELTA_CHUNK * (key_dim + value_dim)
        operations = 2 * step.num_tokens * (3 * state + chunk * heads)
        rate = constants.tensor_attention * self.card.tensor_16
        return Terms(attention=operations / rate / 1e6, launches=launches)

    def _elementwise(
        self,
        local: ModelConfig,
        moe: MoeConfig | None,
        form: Format,
        step: Step,
        division: Division,
    ) -> Terms:
        """Return the time of the elementwise launches between a layer's GEMMs."""
        if step.rows <= _FUSED_ROWS and division.tensor == 1:  # all are parts of the products
            return Terms()
        size = itemsize(self.dtype)
        hidden = local.hidden_size
        own = local.gated_delta
        mixed = local.qkv_dim if own is None else max(local.qkv_dim, own.in_dim)
        features = mixed + (0 if moe is None else (moe.top_k + 1) * hidden)
        # All-reduces apply the norms, but do not quantize their results.
        launches = 2 if division.tensor == 1 or form.activations else 0
        moved = 8 * hidden + 2 * features
        if form.activations:
            launches += 2
            moved += local.num_heads * local.head_dim * 2
            moved += 4 * local.intermediate_size if moe is None else 0
        if _has_fused_routing(moe, step, division):
            # One sums over experts in the next norm, one is norm and router, one sorts.
            launches = 2 + (step.rows > _SORTED_ROWS)
        elif moe is not None:
            # Sum over experts, permutation of tokens, and their quantization.
            launches += 2 + (1 if form.activations else 0)
        if moe is not None and division.expert:  # clears the rows of other ranks' pairs
            launches = launches + 1
            moved = moved + moe.top_k * hidden
        reading = self._read_us(step.rows * moved * size, self.constants.elementwise)
        return Terms(elementwise=reading, launches=launches * self.constants.elementwise_us)

    def _output(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        formats: Mapping[str, Format],
        step: Step,
        division: Division,
    ) -> Terms:
        rows = step.rows if step.is_decode else step.num_rows
        terms = self._product(shapes["lm_head"], self._format("lm_head", formats), rows)
        logits = step.num_rows * self.config.vocab_size
        sampling = self.constants.sample_us * logits / 1e6 * self._speed()
        terms += Terms(sampling=sampling, launches=4 * self.constants.elementwise_us)
        if division.tensor == 1:
            return terms
        # An all-gather moves half the bytes of a two-shot all-reduce.
        gathered = self._collective(logits * _LOGIT_BYTES / 2, division)
        embedding = self._sum(step.num_tokens, division)
        return terms + gathered + embedding

    def _sum(self, num_tokens: int, division: Division) -> Terms:
        num_bytes = num_tokens * self.config.hidden_size * itemsize(self.dtype)
        return self._collective(num_bytes, division)

    def _collective(self, num_bytes: float, division: Division) -> Terms:
        if division.tensor == 1:
            return Terms()
        ways = self.constants.collectives
        link = self.card.link_rate
        return Terms(collectives=min(way.us(num_bytes, division.tensor, link) for way in ways))

    def _both(self, reading: float, products: float) -> Terms:
        """Return the terms of a launch that overlaps reading and multiplying."""
        whole = math.hypot(reading, products) or 1.0
        return Terms(
            weights=reading * reading / whole,
            products=products * products / whole,
            launches=self.constants.launch_us,
        )

    def _read_us(self, num_bytes: float, share: float) -> float:
        return num_bytes / (self.card.memory_rate * share) / 1e6

    def _multiply_us(self, operations: float, form: Format) -> float:
        constants = self.constants
        share = constants.tensor_8 if form.activations else constants.tensor_16
        share = constants.tensor_packed if form.is_packed else share
        return operations / (share * self._peak(form)) / 1e6

    def _peak(self, form: Format) -> float:
        return self._rate_8(form) if form.activations else self.card.tensor_16

    def _rate_8(self, form: Format) -> float:
        return self.card.tensor_int8 if form.activations == "int8" else self.card.tensor_fp8

    def _read_share(self, form: Format) -> float:
        constants = self.constants
        if form.is_dense:
            return constants.read
        if form.activations or form.bits == 8:  # packed or not
            return constants.read_codes
        return constants.read_super if form.super_block else constants.read_packed

    def _expert_read_share(self, form: Format) -> float:
        constants = self.constants
        if form.is_dense:
            return constants.read_experts
        return constants.read_expert_codes if form.activations else constants.read_packed_experts

    def _speed(self) -> float:
        """Time of arithmetic outside tensor cores, relative to the measured card."""
        return CARDS["h200"].vector / self.card.vector


@lru_cache(maxsize=256)
def _delta_state(local: ModelConfig) -> tuple[int, int, int]:
    delta = local.gated_delta
    assert delta is not None
    return delta.num_value_heads, delta.key_head_dim, delta.value_head_dim


def _lightning_state(local: ModelConfig) -> tuple[int, int, int]:
    lightning = local.lightning
    assert lightning is not None
    return lightning.num_heads, lightning.head_dim, lightning.head_dim


def _mamba_state(local: ModelConfig) -> tuple[int, int, int]:
    mamba = local.mamba2
    assert mamba is not None
    return mamba.num_heads, mamba.state_size, mamba.head_dim


# Kind of layer -> function that returns the number of its states, and their rows and columns.
_STATES: dict[str, Callable[[ModelConfig], tuple[int, int, int]]] = {
    "gated_delta": _delta_state,
    "lightning": _lightning_state,
    "mamba2": _mamba_state,
}


@lru_cache(maxsize=256)
def _weights(
    local: ModelConfig, quantization: str | None
) -> tuple[Mapping[str, tuple[int, ...]], Mapping[str, Format], Mapping[tuple[int, int], int]]:
    """Return shapes and formats of the weights, and the number of layers of each kind.

    A kind is identified by its first layer and its window.
    """
    shapes = weight_shapes(local)
    form = FORMATS.get(quantization or "")
    formats = {} if form is None else quantized_formats(local, form)
    first: dict[tuple[object, ...], int] = {}
    kinds: Counter[tuple[int, int]] = Counter()
    for layer in range(local.num_layers):
        window = local.window(layer) or local.chunk(layer) // 2  # keys seen on average
        key = local.kind(layer), window, local.moe_of(layer) is not None
        kinds[first.setdefault(key, layer), window] += 1
    return shapes, formats, kinds


def _has_fused_routing(moe: MoeConfig | None, step: Step, division: Division) -> bool:
    """Tell whether the norm before the experts is one op with the router."""
    return moe is not None and step.rows in _ROUTED_ROWS and division.tensor == 1


def _chosen_experts(moe: MoeConfig, num_tokens: int, division: Division) -> tuple[float, float]:
    """Return the experts that the busiest GPU reads, and its (token, expert) pairs.

    Tokens are assumed to choose at random. With expert parallelism, the busiest of n GPUs exceeds
    the mean by as many standard deviations as the expected maximum of n normal variables.

    Examples
    --------
    >>> moe = MoeConfig(8, 2, 4, (True,))
    >>> [round(n, 2) for n in _chosen_experts(moe, 1, Division())]
    [2.0, 2.0]
    >>> [round(n, 2) for n in _chosen_experts(moe, 1, Division(4, expert=True))]
    [1.06, 1.06]
    """
    missed = (1 - moe.top_k / moe.num_experts) ** num_tokens
    used = moe.num_experts * (1 - missed)
    pairs = float(num_tokens * moe.top_k)
    if not division.expert:
        return used, pairs
    count = division.tensor
    deviations = NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
    others = (1 - 1 / count) / count  # variance of one choice
    more_used = deviations * math.sqrt(used * missed * others)
    more_pairs = deviations * math.sqrt(pairs * (1 - moe.top_k / moe.num_experts) * others)
    most_used = math.ceil(moe.num_experts / count)  # maximum number of experts on one GPU
    return min(used / count + more_used, most_used), pairs / count + more_pairs


def _padded(rows: float, tile: int) -> float:
    return max(1.0, math.ceil(rows / tile)) * tile
