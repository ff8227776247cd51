"""Time of a step on one GPU of one pipeline stage, from bytes, operations and launches."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import NormalDist

from engine.cache.layer_cache import StateShape
from engine.cards import CARDS, Card
from engine.config import ModelConfig, MoeConfig
from engine.dtypes import itemsize
from engine.errors import ConfigError
from engine.kernels.gemm_wna16.sm90 import max_few_rows
from engine.runner.cuda_graph import batch_sizes
from engine.scaling.constants import Constants
from engine.scaling.division import Division
from engine.scaling.layer_work import LayerWork, Matrix, PartWork
from engine.scaling.terms import Terms
from engine.weights import FORMATS, Format

__all__ = ["Step", "StepModel"]

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
        work = self.part_work(local)
        terms = Terms()
        for layer, count in work.layers.items():
            terms += self._layer(local, layer, step, division).times(count)
        for matrix in work.entry:
            terms += self._product(matrix, step.rows)
        return terms + self._output(work.output, step, division) if is_last else terms

    def part_work(self, local: ModelConfig) -> PartWork:
        """Return the work of the GPU's part `local`."""
        return PartWork.of(local, self.dtype, self.quantization)

    def _layer(self, local: ModelConfig, layer: LayerWork, step: Step, division: Division) -> Terms:
        terms = self._attention(layer, step).times(layer.num_attentions)
        for state in layer.states:
            terms += self._state(state, step)
        for kind, matrix in layer.products:
            if kind != "router" or not _has_fused_routing(layer.moe, step, division):
                terms += self._product(matrix, step.rows)
        if layer.moe is not None:
            terms += self._experts(layer.moe, layer.experts, step, division)
        terms += self._elementwise(local, layer, step, division)
        return terms + self._sum(step.num_tokens, division).times(layer.num_sums)

    def _product(self, matrix: Matrix, rows: int) -> Terms:
        """Return the time of x W^T for `rows` rows of x."""
        form = matrix.form
        num_codes = math.prod(matrix.shape)
        reading = self._read_us(matrix.num_bytes, self._read_share(form))
        if rows > (max_few_rows(form) if form.is_packed else _FEW_ROWS):
            operations = 2 * rows * num_codes * (1 + self.constants.edge / matrix.shape[-1])
            # Decoding is not hidden behind the products.
            products = self._multiply_us(operations, form) + self._decode_us(num_codes, form)
        elif form.is_packed:
            rows = 1 if rows == 1 else 8  # rows that the kernel computes
            products = rows * num_codes / self.constants.packed_rows / 1e6 * self._speed()
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
        self, moe: MoeConfig, matrices: Iterable[Matrix], step: Step, division: Division
    ) -> Terms:
        """Return the time of the grouped GEMMs over all experts chosen by any token."""
        assert self.config.moe is not None
        whole = replace(self.config.moe, top_k=moe.top_k)
        used, pairs = _chosen_experts(whole, step.num_tokens, division)
        constants = self.constants
        terms = Terms(routing=self.constants.route_us)
        rows = _padded(pairs / used, 16)
        for matrix in matrices:
            form = matrix.form
            share = self._expert_read_share(form)
            reading = self._read_us(matrix.num_bytes * used / moe.num_experts, share)
            num_codes = used * math.prod(matrix.shape[1:])
            products = self._multiply_us(2 * rows * num_codes, form) / constants.tensor_experts
            if pairs / used > _FEW_PAIRS:
                decode = self._decode_us(num_codes, form)
                products = math.hypot(products, decode * math.ceil(rows / _EXPERT_TILE_ROWS))
            terms += self._both(reading, products)
        return terms

    def _attention(self, layer: LayerWork, step: Step) -> Terms:
        """Return the time of one attention, including fused rope and KV append."""
        window = layer.window
        context = min(step.context, window) if window else step.context
        constants = self.constants
        if step.is_decode:
            share = constants.read_pages if self.page_itemsize > 1 else constants.read_page_codes
            num_bytes = layer.kv_values * self.page_itemsize
            reading = self._read_us(step.num_tokens * context * num_bytes, share)
            tail = constants.sequence_us * math.sqrt(step.num_tokens)
            return Terms(pages=reading + tail, launches=constants.launch_us)
        operations = 4 * layer.query_dim * step.num_tokens * context
        rate = constants.tensor_attention * self.card.tensor_16
        return Terms(attention=operations / rate / 1e6, launches=constants.launch_us)

    def _state(self, state: StateShape, step: Step) -> Terms:
        """Return the time of a convolution (state: rows, channels) or a recurrence (heads, ...)."""
        constants = self.constants
        is_recurrence = len(state.shape) == 3
        # A norm follows a recurrence.
        us = constants.elementwise_us + (constants.launch_us if is_recurrence else 0.0)
        if step.is_decode:  # each state is read and written
            moved = step.num_tokens * 2 * state.num_bytes
            return Terms(pages=self._read_us(moved, constants.read_pages), launches=us)
        if not is_recurrence:
            return Terms(launches=us)
        # A chunk multiplies with the state three times, and twice with its own keys and values.
        heads, rows, columns = state.shape
        chunk = 2 * _DELTA_CHUNK * (rows + columns)
        operations = 2 * step.num_tokens * heads * (3 * rows * columns + chunk)
        rate = constants.tensor_attention * self.card.tensor_16
        return Terms(attention=operations / rate / 1e6, launches=us)

    def _elementwise(
        self,
        local: ModelConfig,
        layer: LayerWork,
        step: Step,
        division: Division,
    ) -> Terms:
        """Return the time of the elementwise launches between a layer's GEMMs."""
        if step.rows <= _FUSED_ROWS and division.tensor == 1:  # all are parts of the products
            return Terms()
        size = itemsize(self.dtype)
        hidden = local.hidden_size
        moe = layer.moe
        form = layer.first.form
        features = layer.first.shape[-2] + (0 if moe is None else (moe.top_k + 1) * hidden)
        # All-reduces apply the norms, but do not quantize their results.
        launches = layer.num_sums if division.tensor == 1 or form.activations else 0
        moved = 4 * layer.num_sums * hidden + 2 * features
        if form.activations:
            launches += layer.num_sums
            moved += layer.query_dim * 2
            moved += 4 * local.intermediate_size if moe is None else 0
        if _has_fused_routing(moe, step, division):
            # One sums over experts in the next norm, one is norm and router, one sorts.
            launches = layer.num_sums + (step.rows > _SORTED_ROWS)
        elif moe is not None:
            # Sum over experts, permutation of tokens, and their quantization.
            launches += 2 + (1 if form.activations else 0)
        if moe is not None and division.expert:  # clears the rows of other ranks' pairs
            launches = launches + 1
            moved = moved + moe.top_k * hidden
        reading = self._read_us(step.rows * moved * size, self.constants.elementwise)
        return Terms(elementwise=reading, launches=launches * self.constants.elementwise_us)

    def _output(self, matrix: Matrix, step: Step, division: Division) -> Terms:
        terms = self._product(matrix, step.rows if step.is_decode else step.num_rows)
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
