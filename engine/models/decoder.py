"""The decoder: embedding, layers of attention and MLP, final norm, logits.

One class serves every model family. Families differ only in fields of `ModelConfig`, declared by
the other modules of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

import numpy as np

from engine import kernels
from engine.config import ModelConfig, RopeConfig
from engine.device import array_module, to_numpy
from engine.errors import ConfigError, OutOfMemoryError, WeightsError
from engine.kernels._memory import address
from engine.kernels._override.scope import ModelKernels
from engine.layers.arrays import arrays_of
from engine.layers.attention import Attention, AttentionParams, SharedAttention
from engine.layers.batch import ForwardBatch
from engine.layers.embedding import Embedding
from engine.layers.linear import Linear, NormedLinear
from engine.layers.lora import AdapterSlots
from engine.layers.mixer import FeedForward, JointMixer, Mixer
from engine.layers.mla import Mla
from engine.layers.mlp import MLP
from engine.layers.moe import DenseAndExperts, MoE
from engine.layers.norm import HeadNorm, NoNorm, Norm
from engine.layers.parallel import PartialLinear
from engine.layers.rotary import long_rope_offset
from engine.models.altup_layer import AltUpLayer
from engine.models.chunks import active_chunk, chunk_patterns
from engine.models.family import SECOND
from engine.models.kv_scales import KVScales
from engine.models.layer_plans import LayerPlans
from engine.models.mixers import MIXERS, build_lightning
from engine.models.moe_layer import build_dense_and_experts, build_moe, scaled_router_norm
from engine.models.rope_tables import RopeTable, rope_index, ropes
from engine.models.sandwich_layer import SandwichLayer
from engine.models.sharding import WholeParts
from engine.models.shortcut_layer import AttentionAndMlp, ShortcutLayer
from engine.models.stream_layers import Parts, build_input, build_stream_layer, build_streams
from engine.weights import ALL_LAYERS, Stage, Weight

__all__ = ["Decoder", "DecoderLayer", "summed_experts"]

Pages = Sequence[tuple[Any, ...]]
"""Caches of each layer: (k_pages, v_pages) of attention, both (P, K, block_size, D), or states."""

_FLOAT32 = np.dtype(np.float32)
_WHOLE = WholeParts()


# In the last layer, only tokens with requested logits need the work after attention. Dropping the
# others means calling a GPU layer instead of replaying a plan, which costs 1 ms of host time. It
# pays off above this number of saved multiply-adds (0.4 ms on an H200).
_MIN_SAVED = 1 << 37

_VECTOR = 16  # features of which every dtype has whole 16-byte vectors

# Up to this many rows, a norm is fused with the product after it, and a residual addition with the
# product before it. For one row the saved launches outweigh the slower kernels; for two, separate
# kernels are as fast, and for more they are faster (docs/benchmarks/decode_loop.md).
_MAX_FUSED_ROWS = 1


def _first_with_experts(layers: Sequence[Any]) -> int:
    """Return the index of the first layer with experts, or the number of layers."""
    kinds = [isinstance(getattr(layer, "mlp", None), MoE) for layer in layers]
    return kinds.index(True) if True in kinds else len(layers)


def summed_experts(delta: Any) -> Any:
    """Return a layer's delta, summed over a token's experts if they are apart."""
    return kernels.moe_combine(delta) if delta is not None and delta.ndim == 3 else delta


class DecoderLayer:
    """Attention and MLP or experts, each with its norms, around one residual stream.

    In a parallel block attention and MLP read the same stream, and their sum is added to it.
    Without an `mlp_norm` both read the same norm of it. Some layers of hybrid models have another
    `Mixer` than attention, or, without an `mlp`, only that branch.

    `can_fuse` allows fused kernels for few tokens. They round sums one time fewer, so a token's
    bits depend on the number of tokens, unless the products sum in parts (`Linear.sums_in_parts`).
    """

    __slots__ = (
        *("attn", "attn_norm", "mlp", "mlp_norm", "post_attn_norm", "post_mlp_norm"),
        *("attn_format", "mlp_format", "can_fuse", "is_parallel"),
    )

    def __init__(
        self,
        attn: Mixer,
        mlp: MLP | MoE | None,
        attn_norm: Norm,
        mlp_norm: Norm | None = None,
        post_attn_norm: Norm | None = None,
        post_mlp_norm: Norm | None = None,
        *,
        is_parallel: bool = False,
        can_fuse: bool = True,
    ) -> None:
        self.is_parallel = is_parallel
        # The fused kernels support neither post-norms, nor LayerNorm, nor a branch scale.
        norms = (not is_parallel, post_attn_norm is None, post_mlp_norm is None)
        is_plain = attn_norm.branch_scale == 1.0 and not attn_norm.subtract_mean
        self.can_fuse = can_fuse and is_plain and all(norms)
        self.attn = attn
        self.mlp = mlp
        self.attn_norm = attn_norm
        self.mlp_norm = attn_norm if mlp_norm is None else mlp_norm
        self.post_attn_norm = post_attn_norm
        self.post_mlp_norm = post_mlp_norm
        if mlp is not None and isinstance(attn, Attention) and isinstance(attn.o, PartialLinear):
            attn.o.is_summed_next = not is_parallel and post_attn_norm is None
        # Weight formats of the products that read each norm: the norm quantizes its output for
        # them. In a parallel block both branches may read the attention norm, unquantized.
        self.attn_format = None if is_parallel else attn.input_format
        self.mlp_format = None if is_parallel or mlp is None else mlp.input_format

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array of the layer."""
        yield from arrays_of(
            attn=self.attn,
            attn_norm=self.attn_norm,
            mlp=self.mlp,
            mlp_norm=self.mlp_norm,
            post_attn_norm=self.post_attn_norm,
            post_mlp_norm=self.post_mlp_norm,
        )

    def __call__(
        self,
        delta: Any,
        residual: Any,
        batch: ForwardBatch,
        pages: tuple[Any, ...],
        rows: Any = None,
    ) -> tuple[Any, Any]:
        """Run the layer.

        Parameters
        ----------
        delta : (T, N) or (T, k, N) array, or None
            The previous layer's output, if it is not yet added to the residual stream, or the
            outputs of each token's experts, of which it is the sum.
        residual : (T, N) array
            The residual stream; overwritten.
        batch : ForwardBatch
        pages : tuple of array
            The layer's caches: pages of keys and values, or states. See `engine.layers`.
        rows : (R,) int32 array, optional
            Tokens to continue with; for the others only the caches are updated.

        Returns
        -------
        (delta, residual)
            Arguments of the next layer, (R, N) with `rows`: its norm adds delta to the stream.
            delta is None if fused kernels have added it already.
        """
        # `rows` contains no padding, and the gathered tokens have no slots here.
        slots = batch.slot_mapping if rows is None else None
        if delta is None and rows is None and self.is_fused(residual.shape[0]):
            residual = self.attn(residual, batch, *pages, norm=self.attn_norm, residual=residual)
            if self.mlp is None:
                return None, residual
            out = self.mlp(residual, norm=self.mlp_norm, residual=residual, slots=slots)
            return None, out
        if delta is None:
            x = self.attn_norm(residual)
        else:
            x, residual = self.attn_norm.add_for(self.attn_format, delta, residual)
        given = x
        x = self.attn(x, batch, *pages, rows=rows)
        if rows is not None:
            residual = kernels.embedding(rows, residual)
        if self.mlp is None:
            return x, residual
        if self.is_parallel:
            if self.mlp_norm is not self.attn_norm:
                given = self.mlp_norm(residual)
            elif rows is not None:
                given = kernels.embedding(rows, given)
            return kernels.residual_add(self.mlp(given, slots=slots), x, out=x), residual
        if self.post_attn_norm is not None:
            x = self.post_attn_norm(x, out=x)
        if isinstance(self.mlp, MoE):
            x, residual = self.mlp.after_add(x, residual, self.mlp_norm, slots=slots)
        else:
            x, residual = self.mlp_norm.add_for(self.mlp_format, x, residual)
            x = self.mlp(x, slots=slots)
        if self.post_mlp_norm is not None:
            x = self.post_mlp_norm(x, out=x)
        return x, residual

    @property
    def output(self) -> PartialLinear | None:
        """The product that returns this rank's part of the layer's output; None if none does."""
        last: Any = None
        if isinstance(self.mlp, MLP):
            last = self.mlp.down
        elif self.mlp is None and isinstance(self.attn, Attention):
            last = self.attn.o
        is_partial = isinstance(last, PartialLinear) and not self.is_parallel
        return last if is_partial and self.post_mlp_norm is None else None

    @property
    def passes_experts(self) -> bool:
        """Whether the layer may take and return the outputs of a token's experts, not their sum."""
        if self.is_parallel or self.post_mlp_norm is not None or not isinstance(self.mlp, MoE):
            return False
        is_plain_sum = self.mlp.is_plain_sum and self.mlp.fuses(self.mlp_norm)
        return is_plain_sum and self.attn_norm.is_plain_add

    def can_plan(self, batch: ForwardBatch) -> bool:
        """Tell whether a call launches only kernels, so that a launch plan can replay it."""
        return not isinstance(self.attn, Mla) or self.attn.can_plan(batch)

    def is_fused(self, num_tokens: int) -> bool:
        """Tell whether a layer called without delta adds its output to the residual stream."""
        return self.can_fuse and num_tokens <= _MAX_FUSED_ROWS


class Decoder:
    """A decoder-only transformer.

    Parameters
    ----------
    config : ModelConfig
    weights : mapping of str to Weight
        From `loading.weights.load_weights`, on one device.
    max_model_len : int
        Maximum sequence length in tokens: the number of positions in the rope tables.
    deterministic : bool
        Batch invariance: a token's bits depend on neither the batch nor the chunk size.
    parts : WholeParts or ParallelParts
        Builds the layers of a whole model, or of one rank's shard; then `config` and `weights` are
        the shard's.
    stage : Stage
        The layers of a pipeline stage. Only the first stage has an embedding, and only the last one
        computes logits.
    model_kernels : ModelKernels, optional
        Overrides of ops.
    patterns : mapping of int to (BlockSparse or Periodic)
        Layer of the whole model -> further restriction of the keys that its queries see.
    adapters : AdapterSlots, optional
        Room for LoRA adapters.

    Attributes
    ----------
    kernels : ModelKernels
        Overrides of ops, and how often each kernel ran.
    patterns : dict of int to (BlockSparse or Periodic)
    layers : tuple of DecoderLayer, SandwichLayer, AltUpLayer or ShortcutLayer
    weights : dict of str to Weight
        Weights by name: "layers.0.qkv", ... An MLP may be padded to more features than the config
        says (`loading.mlp_padding`).
    rope_tables : tuple of array
        (P, R) float32 tables: one for all layers, or one for full attention and one for windows. If
        some layers have no rope, a table with zero angles comes last. `extend_ropes` computes them.
    kv_scales : KVScales
        Scales of a quantized KV cache, by layer and head.
    long_rope_offset : int
        First row of longrope's long factors in the table; 0 for a table without them.
    short_rope_len : int
        Longest sequence that uses the short factors, in tokens; 0 for such a table.

    Raises
    ------
    WeightsError
        If a weight that the config requires is missing.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        max_model_len: int,
        *,
        deterministic: bool = False,
        parts: WholeParts = _WHOLE,
        stage: Stage = ALL_LAYERS,
        model_kernels: ModelKernels | None = None,
        patterns: Mapping[int, Any] | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.config = config
        self.adapters = adapters
        self.patterns = chunk_patterns(config, stage, max_model_len) | dict(patterns or {})
        self.kernels = ModelKernels() if model_kernels is None else model_kernels
        self.parts = parts
        self.deterministic = deterministic
        self.weights = dict(weights)
        self.max_model_len = max_model_len
        self.stage = stage
        self.xp = array_module(next(iter(self.weights.values())).data)
        self._ropes = tuple(self._rope_table(rope) for rope in ropes(config))
        self.rope_tables = tuple(table.array for table in self._ropes)
        self.long_rope_offset = long_rope_offset(config.rope, max_model_len)
        self.short_rope_len = config.rope.original_max_position if self.long_rope_offset else 0
        if stage.embeds:
            self.embed = parts.embedding(self._embedding())
        if stage.is_first:
            self._embed_norm = self._norm("embed_norm") if config.embed_norm else None
            has_positions = config.learned_positions
            self._positions = self._weight("embed_positions").data if has_positions else None
        self.per_layer_input = build_input(config, self._stream_parts)
        self.streams = build_streams(config, self._stream_parts)
        self.kv_scales = KVScales(self.xp, config.num_layers, config.num_kv_heads)
        self.layers = tuple(self._layer(index) for index in range(config.num_layers))
        self._mark_summed_outputs()
        numbers = [self._numbers(index) for index in range(len(self.layers))]
        self._run_layers = LayerPlans(self.layers, numbers, parts.peers)
        self._parts_of_layers: tuple[LayerPlans, LayerPlans] | None = None
        if (first := config.num_storing_layers) < len(self.layers):
            storing = LayerPlans(self.layers[:first], numbers[:first], parts.peers)
            reading = LayerPlans(self.layers[first:], numbers[first:], parts.peers)
            self._parts_of_layers = storing, reading
        if stage.is_last:
            self.final_norm = parts.norm(self._norm("final_norm"))
            self.lm_head = self._linear("lm_head", config.lm_head_bias, parts.lm_head)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of weights, activations and pages."""
        dtype: np.dtype[Any] = self.embed.weight.data.dtype
        return dtype

    @property
    def num_layers(self) -> int:
        """Number of layers of the whole model."""
        return self.stage.num_layers or len(self.layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights, of adapters and of rope tables; a tied weight counts once."""
        weights = {id(weight): weight.num_bytes for weight in self.weights.values()}
        adapters = 0 if self.adapters is None else self.adapters.num_bytes
        return sum(weights.values()) + adapters + self.table_bytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the rope tables."""
        return sum(table.num_bytes for table in self._ropes)

    def rope_offsets(self, lengths: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return the row of the rope table for position 0 of sequences of `lengths` tokens (B,).

        It is `long_rope_offset` for sequences longer than `short_rope_len`, otherwise 0.
        """
        offsets: np.ndarray[Any, np.dtype[np.int32]] = np.where(
            np.asarray(lengths) > self.short_rope_len, np.int32(self.long_rope_offset), np.int32(0)
        )
        return offsets

    def forward(self, batch: ForwardBatch, kv_pages: Pages) -> Any:
        """Compute one step.

        Parameters
        ----------
        batch : ForwardBatch
            On the weights' device.
        kv_pages : sequence of tuples of array
            For each layer (k_pages, v_pages), both (P, K, block_size, D), in the activations' dtype
            or quantized; or the states of a layer without attention. They are written to.

        Returns
        -------
        (R, V) array of float32
            Logits of the tokens `batch.logits_indices`, or of all T tokens.
        """
        with self.kernels.active(), self._adapting(batch):
            return self._logits(self._hidden_states(batch, kv_pages))

    def hidden_states(self, batch: ForwardBatch, kv_pages: Pages) -> Any:
        """Return the normalised last hidden states (R, N) of the tokens `batch.logits_indices`."""
        with self.kernels.active(), self._adapting(batch):
            return self._hidden_states(batch, kv_pages)

    def _hidden_states(self, batch: ForwardBatch, kv_pages: Pages) -> Any:
        rows = batch.logits_indices
        delta, x, kv_pages = self._enter(batch, kv_pages)
        features = batch.features or {}
        last = len(self.layers)
        keep = partial(self._keep, features) if features else None
        can_drop = rows is not None and self.stage.first + last not in features
        if can_drop and self._can_run_apart(batch, features):
            delta, residual = self._run_apart(x, batch, kv_pages, rows, keep)
        elif can_drop and self._drops_early(batch.num_tokens - rows.shape[0]):
            delta, residual = self._run_layers(x, batch, kv_pages, rows, keep, delta)
        else:
            delta, residual = self._run_layers(x, batch, kv_pages, None, keep, delta)
            self._keep(features, last, delta, residual)
            delta = summed_experts(delta)
            if rows is not None:
                # Gathering rows by index is the same op as the embedding lookup.
                delta = None if delta is None else kernels.embedding(rows, delta)
                residual = kernels.embedding(rows, residual)
        if self.streams is not None:
            return self.final_norm(self.streams.leave(delta, residual))
        if delta is None:
            return self.final_norm(residual)
        return self.final_norm.add(summed_experts(delta), residual)[0]

    def run_stage(self, batch: ForwardBatch, kv_pages: Pages) -> tuple[Any, Any]:
        """Compute the layers of a stage that is not the last one.

        Returns
        -------
        (delta, residual)
            New arrays (T, N), or None for delta: `ForwardBatch.entering` of the next stage. See
            `DecoderLayer`.
        """
        with self.kernels.active(), self._adapting(batch):
            delta, x, kv_pages = self._enter(batch, kv_pages)
            keep = partial(self._keep, batch.features) if batch.features else None
            delta, residual = self._run_layers(x, batch, kv_pages, None, keep, delta)
            return self.parts.leaving(summed_experts(delta)), residual

    def _adapting(self, batch: ForwardBatch) -> AbstractContextManager[None]:
        """Return a context in which products apply the adapters of the tokens of `batch`."""
        return nullcontext() if self.adapters is None else self.adapters.serving(batch)

    def refresh(self, names: Iterable[str]) -> None:
        """Compute anew what layers have derived from these weights, which have been overwritten."""
        for name in names:
            layer, _, kind = name.rpartition(".")
            if kind not in ("router_norm", "conv_taps") and not kind.startswith("xielu_"):
                continue
            block: Any = self.layers[int(layer.rpartition(".")[2])]
            if kind == "conv_taps":
                block.attn.refresh()
            elif kind == "router_norm":
                block.mlp.router_norm.weight[...] = scaled_router_norm(self.weights[name].data)
            else:
                block.mlp.coefficients[...] = self._xielu(f"{layer}.")

    def extend_ropes(self, num_positions: int) -> None:
        """Compute the rope tables for sequences of up to `num_positions` tokens."""
        for table in self._ropes:
            table.extend(num_positions)

    def _enter(self, batch: ForwardBatch, kv_pages: Pages) -> tuple[Any, Any, Any]:
        """Return (delta, residual) before the first layer, and the caches of each layer."""
        if batch.max_context_len > self._ropes[0].num_computed:
            self.extend_ropes(batch.max_context_len)
        if not self.stage.is_first:
            assert batch.entering is not None
            if self.adapters is not None and batch.adapter_slots is not None:
                # SAFETY: no embedding waits here for the sort of the tokens by adapter, whose
                # result kernels read before they wait (`AdapterSlots`); those after a copy start
                # once all before it have ended.
                batch.adapter_slots.copy()
            return *self.parts.entering(*batch.entering), kv_pages
        x = self.embedded(batch.token_ids, batch.rope_positions)
        caches = self._with_inputs(kv_pages, batch, x)
        return None, x if self.streams is None else self.streams.enter(x), caches

    def _with_inputs(self, kv_pages: Pages, batch: ForwardBatch, x: Any) -> Any:
        """Return the caches of each layer: its pages and, if layers have one, its input (T, P)."""
        if self.per_layer_input is None:
            return kv_pages
        inputs = self.per_layer_input(batch.token_ids, x, self.config.vocab_size)
        return [(*pages, inputs[:, layer]) for layer, pages in enumerate(kv_pages)]

    def embedded(self, token_ids: Any, positions: Any) -> Any:
        """Return the residual stream that enters the first layer.

        Parameters
        ----------
        token_ids : (T,) int32
        positions : (T,) int32
            Position of each token, below `max_model_len`: in a tree of drafts, by its depth.

        Returns
        -------
        (T, N) array
        """
        x = self.embed(token_ids)
        if self._positions is not None:
            x = kernels.residual_add(kernels.embedding(positions, self._positions), x, out=x)
        return x if self._embed_norm is None else self._embed_norm(x, out=x)

    def _keep(self, features: Mapping[int, Any], layer: int, delta: Any, residual: Any) -> None:
        """Write the residual stream that enters the stage's `layer` to its feature, if any."""
        out = features.get(self.stage.first + layer)
        scale = self.config.branch_scale
        if out is None:
            return
        if delta is None:
            out[...] = residual
            return
        delta = self.parts.summed(summed_experts(delta))
        if scale == 1.0:
            kernels.residual_add(delta, residual, out=out)
        else:
            out[...] = delta * delta.dtype.type(scale) + residual

    def _drops_early(self, num_dropped: int) -> bool:
        """Tell whether to drop the tokens without logits after attention in the last layer."""
        last = self.layers[-1]
        multiplied = 0 if last.mlp is None else last.mlp.num_multiplied
        saved = num_dropped * (last.attn.o.weight.num_elements + multiplied)
        return saved >= (1 if self.xp is np else _MIN_SAVED)

    def _can_run_apart(self, batch: ForwardBatch, features: Mapping[int, Any]) -> bool:
        """Tell whether to run the last layers, which store nothing, for tokens with logits only.

        These tokens are then decoded, each with its own read of the keys: that pays off for one
        token of a prompt, but not for many.
        """
        if self._parts_of_layers is None or batch.tree_mask is not None:
            return False
        count = batch.logits_indices.shape[0]
        most = batch.num_sequences - batch.num_decodes + batch.num_decode_tokens
        is_read = any(layer > self.config.num_storing_layers for layer in features)
        return count < batch.num_tokens and count <= most and not is_read

    def _run_apart(self, x: Any, batch: ForwardBatch, caches: Any, rows: Any, keep: Any) -> Any:
        """Return (delta, residual) of the tokens `rows` (R,), after all layers."""
        assert self._parts_of_layers is not None
        run_storing, run_reading = self._parts_of_layers
        first = self.config.num_storing_layers
        delta, residual = run_storing(x, batch, caches[:first], None, keep)
        if keep is not None:
            keep(first, delta, residual)
        delta = summed_experts(delta)
        delta = None if delta is None else kernels.embedding(rows, delta)
        residual = kernels.embedding(rows, residual)
        if not rows.shape[0]:
            return delta, residual
        own = [
            (k, v, *(kernels.embedding(rows, one) for one in inputs))
            for k, v, *inputs in caches[first:]
        ]
        return run_reading(residual, batch.of_rows(rows), own, delta=delta)

    def logits(self, hidden: Any) -> Any:
        """Return the logits (R, V) float32 of normalised hidden states (R, N)."""
        with self.kernels.active():
            return self._logits(hidden)

    def _logits(self, hidden: Any) -> Any:
        logits = self.lm_head(hidden, out_dtype=_FLOAT32)
        if self.config.logits_scale != 1.0:
            logits *= np.float32(self.config.logits_scale)
        if cap := self.config.final_softcap:
            logits /= np.float32(cap)
            self.xp.tanh(logits, out=logits)
            logits *= np.float32(cap)
        return logits

    def expert_load(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the number of tokens each expert has computed since the model was loaded.

        Returns
        -------
        (layers with experts, E) array of int64
            On the host, in the order of the layers; (0, 0) for a model without experts. Experts
            that return their input are the last ones. A row sums up to top_k times the tokens that
            its layer has computed. Padding of CUDA graphs is not counted. The last layer may skip
            tokens whose logits are not requested. A token computed twice (after a preemption or a
            failed step) counts twice.

        Notes
        -----
        The call waits for all earlier launches on the current stream.
        """
        branches = (
            layer.attn.mlp if isinstance(layer.attn, FeedForward) else layer.mlp
            for layer in self.layers
        )
        loads = [one.load for one in branches if isinstance(one, MoE | DenseAndExperts)]
        if not loads:
            return np.zeros((0, 0), np.int64)
        return to_numpy(self.xp.stack(loads))

    def _mark_summed_outputs(self) -> None:
        """Leave sums over the ranks or over a token's experts to the next layer's norm.

        The outputs of the last layer, and of the last that stores keys, may be gathered first, so
        their products must not send rows; experts' outputs are summed first, by `summed_experts`.
        Experts are left to the next norm only if all layers after the first with experts have them,
        equally many per token: a launch plan is for layers that return what they take.
        """
        gathered = (len(self.layers) - 1, self.config.num_storing_layers - 1)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, DecoderLayer) and layer.output is not None:
                layer.output.is_summed_next = index not in gathered
        layers = self.layers[_first_with_experts(self.layers) :]
        alike = [one for one in layers if isinstance(one, DecoderLayer) and one.passes_experts]
        moes = [one.mlp for one in alike if isinstance(one.mlp, MoE)]
        if len(moes) == len(layers) and len({one.num_chosen for one in moes}) == 1:
            for moe in moes:
                moe.is_summed_next = True

    def _numbers(self, layer: int) -> tuple[Hashable, ...]:
        """Return the non-array values that determine a layer's launches."""
        pattern = self.patterns.get(self.stage.first + layer)
        c = self.config
        moe = c.moe_of(layer)
        top_k = 0 if moe is None else moe.top_k
        own_features = 0 if c.per_layer_input is None else c.per_layer_input.size
        place = layer * own_features % _VECTOR  # alignment of the layer's part of wider rows
        rule: tuple[Hashable, ...] = c.kind(layer), c.window(layer), rope_index(c, layer), pattern
        one = self.layers[layer]
        output = one.output if isinstance(one, DecoderLayer) else None
        sends = output is not None and output.may_send
        if c.attn_scale_by_layer:
            rule = (*rule, self._score_scale(layer))
        numbers = (*rule, top_k, c.sparsity(layer), place, sends)
        return numbers if self.parts.can_plan else (*numbers, layer)  # each layer is its own kind

    def _weight(self, name: str) -> Weight:
        try:
            return self.weights[name]
        except KeyError:
            raise WeightsError(f"weight {name!r}, which the config requires, is missing") from None

    def _linear(self, name: str, has_bias: bool, make: Callable[..., Linear] = Linear) -> Linear:
        bias = self._weight(f"{name}_bias") if has_bias else None
        linear = make(self._weight(name), bias, deterministic=self.deterministic)
        if self.adapters is not None:
            self.adapters.attach(name, linear)
        return linear

    def _with_norm(self, name: str, divide: Callable[[Norm], Norm], linear: Linear) -> Linear:
        """Return `linear` behind the norm of its input, if the model has inner norms."""
        if not self.config.inner_norms:
            return linear
        return NormedLinear(divide(Norm(self._weight(name).data, self.config.rms_norm_eps)), linear)

    @property
    def _stream_parts(self) -> Parts:
        return Parts(self._weight, partial(self._linear, has_bias=False), self._norm)

    def _embedding(self) -> Embedding:
        c = self.config
        return Embedding(self._weight("embed"), c.embed_scale, rounds_scale=c.rounds_embed_scale)

    def _head_norm(self, layer: int, part: str) -> Norm | None:
        """Return the QK-norm of q or k: of each head, or over all heads of the model together."""
        c = self.config
        if not c.has_qk_norm(layer):
            return None
        if c.bare_qk_norm:
            return Norm(self._unit_weight, c.qk_norm_eps or c.rms_norm_eps)
        if c.own_qk_norms:
            return HeadNorm(self._weight(f"layers.{layer}.{part}_head_norm").data, c.rms_norm_eps)
        norm = self._norm(f"layers.{layer}.{part}_norm", c.qk_norm_eps)
        if not self.config.whole_qk_norm:
            return norm
        return self.parts.row_norm(norm, norm.weight.shape[0] // self.config.head_dim)

    def _v_norm(self, head_dim: int) -> Norm:
        return Norm(self._unit_weight[:head_dim], self.config.rms_norm_eps)

    def _norm(self, name: str, eps: float = 0.0) -> Norm:
        c = self.config
        return Norm(
            self._weight(name).data,
            eps or c.rms_norm_eps,
            c.norm_weight_offset,
            c.branch_scale,
            subtract_mean=c.layer_norm,
            bias=self._weight(f"{name}_bias").data if c.norm_bias else None,
        )

    @cached_property
    def _v_factor(self) -> Any:
        """Factor on the values, (1,); None if they are as wide as the keys and not scaled."""
        c = self.config
        has_none = c.v_scale == 1.0 and not c.v_head_dim
        return None if has_none else self.xp.full(1, c.v_scale, np.float32)

    @cached_property
    def _unit_weight(self) -> Any:
        """Weight of norms without one: (D,) ones in the dtype of the other norms."""
        dtype = self._weight("layers.0.attn_norm").data.dtype
        return self.xp.ones(self.config.head_dim, dtype)

    def _pre_norm(self, layer: int, name: str) -> Norm:
        c = self.config
        if not c.has_pre_norms(layer):
            return NoNorm(c.branch_scale)
        return self.parts.norm(self._norm(f"layers.{layer}.{name}"))

    def _post_norm(self, layer: int, name: str) -> Norm | None:
        has_norm = self.config.has_post_norms(layer)
        return self._norm(f"layers.{layer}.{name}") if has_norm else None

    def _rope_table(self, rope: RopeConfig) -> RopeTable:
        try:
            return RopeTable(self.xp, rope, self.max_model_len)
        except MemoryError as error:  # a limit that the memory plan cannot see, such as `ulimit -v`
            raise OutOfMemoryError(
                f"no room for the rope tables of max_model_len={self.max_model_len} ({error})"
            ) from error

    def plain_layers(
        self, what: str, mixers: tuple[type[Mixer], ...] = (Attention,)
    ) -> tuple[DecoderLayer, ...]:
        """Return the layers, if all are a `DecoderLayer` with one of the `mixers`.

        Raises
        ------
        ConfigError
            If some are not: `what` does not support the model.
        """
        plain = tuple(layer for layer in self.layers if isinstance(layer, DecoderLayer))
        has_others = any(not isinstance(layer.attn, mixers) for layer in plain)
        if has_others or len(plain) < len(self.layers):
            raise ConfigError(f"{what} is not supported for {self.config.model_type}")
        return plain

    def _layer(self, index: int) -> DecoderLayer | SandwichLayer | AltUpLayer | ShortcutLayer:
        config = self.config
        name = f"layers.{index}"
        if config.kind(index) == "shortcut":
            return self._shortcut(index)
        mlp = None if config.single_branch else self._mlp(index)
        if config.completes_stream or isinstance(mlp, DenseAndExperts):
            attn = self._attention(index)
            return build_stream_layer(config, name, self._stream_parts, attn, mlp)
        mixer = self._mixer(index)
        return DecoderLayer(
            mixer,
            mlp,
            self._pre_norm(index, "attn_norm"),
            self._pre_norm(index, "mlp_norm") if config.has_mlp_norms else None,
            self._post_norm(index, "post_attn_norm"),
            self._post_norm(index, "post_mlp_norm"),
            is_parallel=config.parallel,
            can_fuse=self.parts.can_fuse and self._can_fuse(mixer, mlp),
        )

    def _can_fuse(self, mixer: Mixer, mlp: MLP | MoE | DenseAndExperts | None) -> bool:
        """Tell whether fused kernels are allowed: with `deterministic`, those with equal bits."""
        if not self.deterministic:
            return True
        is_plain = type(mixer) is Attention and type(mlp) is MLP and self.adapters is None
        if not is_plain or self.parts.is_shard:
            return False
        assert isinstance(mixer, Attention) and isinstance(mlp, MLP)
        products = (mixer.qkv, mixer.o, mlp.gate_up, mlp.down)
        return all(type(product) is Linear and product.sums_in_parts for product in products)

    def _shortcut(self, index: int) -> ShortcutLayer:
        moe = self._mlp(index)
        assert isinstance(moe, MoE)
        first, second = (
            AttentionAndMlp(
                self._mla(index, prefix),
                self._dense_mlp(f"layers.{index}.{prefix}", index),
                self._pre_norm(index, f"{prefix}attn_norm"),
                self._pre_norm(index, f"{prefix}mlp_norm"),
            )
            for prefix in ("", SECOND)
        )
        return ShortcutLayer(first, second, moe)

    def _mlp(self, index: int) -> MLP | MoE | DenseAndExperts:
        config = self.config
        name = f"layers.{index}"
        moe = config.moe_of(index)
        if moe is None:
            return self._dense_mlp(f"{name}.", index)
        build = partial(
            build_moe,
            moe,
            config.activation,
            name,
            self._weight,
            deterministic=self.deterministic,
            parts=self.parts,
        )
        if moe.beside_mlp:
            dense = self._dense_mlp(f"{name}.", index)
            return build_dense_and_experts(dense, build(), name, self._norm)
        return build()

    def _dense_mlp(self, name: str, index: int) -> MLP:
        config = self.config
        return MLP(
            self._linear(f"{name}{'gate_up' if config.gated_mlp else 'up'}", config.mlp_bias),
            self._with_norm(
                f"{name}down_norm",
                self.parts.feature_norm,
                self._linear(f"{name}down", config.mlp_bias, self.parts.down),
            ),
            config.activation,
            is_gated=config.gated_mlp,
            coefficients=self._xielu(name) if config.activation == "xielu" else None,
            sparsity=config.sparsity(index),
        )

    def _xielu(self, name: str) -> Any:
        """Return the coefficients of a layer's `kernels.xielu`."""
        kinds = ("alpha_p", "alpha_n", "beta", "eps")
        stored = [to_numpy(self._weight(f"{name}xielu_{kind}").data) for kind in kinds]
        positive, negative, slope, eps = np.concatenate(stored).astype(np.float64)
        softplus = np.logaddexp(0.0, (positive, negative))
        values = np.array([softplus[0], slope + softplus[1], slope, eps], np.float32)
        return self.xp.asarray(values)

    def _mixer(self, index: int) -> Mixer:
        kind = self.config.kind(index)
        if kind == "attention":
            return self._attention(index)
        if kind == "mla":
            return self._mla(index)
        if kind in ("mlp", "moe"):
            mlp = self._mlp(index)
            assert not isinstance(mlp, DenseAndExperts)
            return FeedForward(mlp)
        if kind == "lightning":
            table = self.rope_tables[rope_index(self.config, index)]
            options = self._weight, self._linear, self.parts
            return build_lightning(self.config, index, table, *options)
        is_joint = kind == "attention_mamba2"
        build = MIXERS["mamba2" if is_joint else kind]
        mixer = build(self.config, f"layers.{index}.", self._weight, self._linear, self.parts)
        return JointMixer(self._attention(index), mixer) if is_joint else mixer

    def _mla(self, index: int, prefix: str = "") -> Mla:
        config = self.config
        mla = config.mla
        assert mla is not None
        name = f"layers.{index}.{prefix}"
        rope = self._ropes[rope_index(config, index)]
        q_norm = q_up = None
        if mla.q_rank:
            q_norm = Norm(self._weight(f"{name}mla_q_norm").data, mla.norm_eps)
            q_up = self._linear(f"{name}mla_q_up", has_bias=False)
        return Mla(
            mla,
            AttentionParams(
                config.num_heads,
                config.num_heads,
                config.head_dim,
                config.attn_scale,
                deterministic=self.deterministic,
            ),
            self._linear(f"{name}mla_in", config.qkv_bias),
            Norm(self._weight(f"{name}mla_kv_norm").data, mla.norm_eps),
            self._weight(f"{name}mla_kv_up").data,
            self._linear(f"{name}mla_out", config.o_bias, self.parts.attention_output),
            rope.array,
            q_norm,
            q_up,
            rope.q_factors,
        )

    def _score_scale(self, layer: int) -> float:
        """Return the factor on q·k in the stage's `layer`."""
        config = self.config.at(layer)
        scale = config.attn_scale or config.head_dim**-0.5
        return scale / (self.stage.first + layer + 1) if config.attn_scale_by_layer else scale

    def _attention(self, index: int) -> Attention:
        config = self.config.at(index)
        name = f"layers.{index}"
        source = config.kv_source(index)
        is_shared = source != index
        params = AttentionParams(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            scale=self._score_scale(index),
            window=config.window(index),
            softcap=config.attn_softcap,
            v_head_dim=config.v_head_dim,
            clip=config.clip_qkv,
            norm_after_rope=config.qk_norm_after_rope,
            gate=config.attn_gate,
            deterministic=self.deterministic,
            pattern=self.patterns.get(self.stage.first + index),
            chunk=active_chunk(config, index, self.max_model_len),
            values_from_keys=config.values_from_keys,
        )
        rope = self._ropes[rope_index(config, index)]
        make = SharedAttention if is_shared else Attention
        return make(
            params,
            self._linear(f"{name}.qkv", config.qkv_bias),
            self._with_norm(
                f"{name}.o_norm",
                lambda norm: self.parts.row_norm(norm, len(norm.weight) // config.head_dim),
                self._linear(f"{name}.o", config.o_bias, self.parts.attention_output),
            ),
            rope.array,
            self._head_norm(index, "q"),
            None if is_shared else self._head_norm(index, "k"),
            self._weight(f"{name}.sinks").data if config.sinks else None,
            self.kv_scales.of_layer(source, config.num_kv_heads),
            rope.q_factors,
            self._v_norm(config.head_dim) if config.v_norm and not is_shared else None,
            self._v_factor,
        )


def caches_address(caches: Pages) -> int:
    """Return the address of the first array of the layers' caches, which identifies them.

    0 if they have none: a pipeline stage may have layers without caches only.
    """
    first = next((array for arrays in caches for array in arrays), None)
    return 0 if first is None else address(first)
