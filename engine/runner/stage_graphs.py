"""Decode graphs of a pipeline stage: they begin with the previous stage's activations.

The engine stages a step on the host when it announces it, and sends the bytes to all stages. Each
of them, the last one included, copies them to its own static inputs when it executes the step. The
activations of the previous stage have fixed addresses too. The last stage's graphs end as those of
a single process; the others' end with the activations for the next stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from engine.device import CPU
from engine.dtypes import np_dtype
from engine.layers.batch import ForwardBatch
from engine.runner.batch import StepInputs
from engine.runner.cuda_graph import DecodeGraphs, GraphKey
from engine.runner.features import FeatureTap
from engine.runner.graph_inputs import GraphInputs
from engine.runner.request_rows import IntArray, RequestRows
from engine.runner.sampling import SamplingTable
from engine.runner.state_arrays import state_arrays
from engine.runner.static_inputs import NUM_BUFFERS, StagingBuffer
from engine.runner.transfer import DeviceToHostCopy
from engine.scheduler.output import ScheduleOutput

__all__ = ["StageGraphs", "StagedStep"]

G = TypeVar("G", bound="StageGraphs")

Entering = tuple[Any, Any]
"""(delta, residual) of `ForwardBatch.entering`."""


class StagedStep(NamedTuple):
    """A decode step for which graphs were captured, as host data for every stage.

    Attributes
    ----------
    key : GraphKey
    data : (n,) uint8
        Used bytes of the staging buffer.
    num_tokens : int
        Without padding.
    is_plain : bool
        Whether the last stage's graph samples, too.
    rows : (B,) int64
        Request row of each sequence.
    positions : (B,) int32
        Position of the id that it samples for each; -1: the host will know and send it.
    """

    key: GraphKey
    data: Any
    num_tokens: int
    is_plain: bool
    rows: IntArray
    positions: IntArray


class StageGraphs(DecodeGraphs):
    """Decode graphs of the layers of one stage. See `DecodeGraphs` for the parameters."""

    def __init__(
        self,
        model: Any,
        kv_pages: Sequence[tuple[Any, ...]],
        table: RequestRows,
        sampling: SamplingTable,
        **options: Any,
    ) -> None:
        # The last stage may compute all steps in flight, one more than stages, before any is read.
        self._num_buffers = max(NUM_BUFFERS, model.num_stages + 2)
        super().__init__(model, kv_pages, table, sampling, **options)
        self._stage = model.decoder.stage
        self._loaded: GraphKey | None = None  # non-plain step in the static inputs
        max_size = self._sizes[-1]
        max_query_len = max(options["query_lens"])
        self._staging_sizes = sampling, max_size, max_query_len
        self._entering: Entering = (None, None)
        if self._stage.is_first:
            return
        shape = max_size * max_query_len, model.config.hidden_size
        delta, residual = (model.device.xp.zeros(shape, np_dtype(model.dtype)) for _ in range(2))
        self._entering = delta, residual
        # A guess, for the capture at load: another stage decides whether it sends a delta.
        self._by_size = {
            size: [self._guessed(key) for key in keys] for size, keys in self._by_size.items()
        }
        self._keys = [self._guessed(key) for key in self._keys]

    @classmethod
    def of_numbers(
        cls: type[G],
        model: Any,
        kv_pages: Sequence[tuple[Any, ...]],
        numbers: Sequence[int],
        feature_layers: Sequence[int],
        *,
        has_states: bool,
        last_ids: Any = None,
    ) -> G:
        """Return the graphs of a process that does not sample, not captured yet.

        Parameters
        ----------
        model : Model
        kv_pages : sequence of tuple of array
            `KVCache.layers`.
        numbers : sequence of int
            Request rows, blocks per row, block size and longest sequence of the engine, and the
            lengths to capture.
        feature_layers : sequence of int
            Layers of this process whose inputs are kept.
        has_states : bool
            Whether any stage has recurrent layers.
        last_ids : array, optional
            `Links.last_ids`; without it, the host sends all ids.
        """
        num_rows, max_blocks, block_size, max_model_len, *query_lens = numbers
        table = RequestRows(
            num_rows,
            max_blocks,
            block_size,
            model.device,
            has_states=has_states,
            has_adapters=model.num_adapter_slots > 0,
        )
        if last_ids is not None:
            table.last_ids = last_ids
        return cls(
            model,
            kv_pages,
            table,
            SamplingTable(1, model.config.vocab_size, (), model.device),
            block_size=block_size,
            max_model_len=max_model_len,
            query_lens=sorted(set(query_lens)),
            new_features=FeatureTap(model, feature_layers).new_for_graphs,
        )

    @cached_property
    def _staging(self) -> GraphInputs:
        # Steps are staged long before this stage sends them, so not in buffers for copies.
        return GraphInputs(CPU, self._table, *self._staging_sizes)

    # ---- in the engine's process

    def stage(self, output: ScheduleOutput, rows: IntArray, starts: IntArray) -> StagedStep | None:
        """Stage `output` on the host, if graphs support it; nothing is launched.

        `rows`, `starts` (B,): row and first query position of each sequence.
        """
        sequences = output.sequences
        query_len = output.query_len
        is_supported = output.num_decodes == len(sequences) and all(
            [s.is_sampled for s in sequences]
        )
        if not is_supported or query_len not in self._cu_seqlens:
            return None
        if self._table.adapters_of(rows) is not None:
            return None
        stops = starts + query_len
        key = self._key_of(stops, query_len)
        self._table.update_tables(sequences, rows, stops, rewritten=bool(output.copies))
        states = state_arrays(output, rows, self._table)
        staging = self._staging
        tokens = staging.tokens(output, rows, starts)
        if tokens.drafts is not None:  # a draft model's, on this device only: read and send them
            ids = np.array(tokens.token_ids, np.int32).reshape(-1, query_len)
            ids[:, 1:] = [s.drafts.token_ids for s in sequences if s.drafts is not None]
            tokens = tokens._replace(token_ids=ids.ravel(), drafts=None)
        key = replace(key, is_tree=tokens.tree_mask is not None)
        columns = staging.columns(rows, query_len)
        if columns is not None:
            buffer = staging.fill(columns, key.size, tokens, stops, states)
        else:
            buffer = staging.fill_all(rows, key.size, query_len, tokens, stops, states)
        num_new_blocks = staging.fill_blocks(buffer, rows, key.size)
        data = staging.static.used(buffer, num_new_blocks).copy()
        positions = np.full_like(stops, -1) if output.num_draft_tokens else stops
        is_plain = columns is not None
        return StagedStep(key, data, len(rows) * query_len, is_plain, rows, positions)

    def launch_staged(self, staged: StagedStep, entering: Entering) -> DeviceToHostCopy | None:
        """Compute a step in the last stage.

        Returns
        -------
        DeviceToHostCopy or None
            See `DecodeGraphs.launch`. None: the step is not plain; `logits` computes it.
        """
        key, buffer = self._load(staged.key, staged.data, entering, staged.num_tokens)
        if not staged.is_plain:
            self._inputs.release(buffer)
            self._loaded = key
            return None
        self.replay(key)
        return self._inputs.read(buffer, staged.num_tokens, key.num_tokens)

    def logits(self, inputs: StepInputs) -> Any:
        """Compute the logits (T, V) of the step just loaded; None if there is none."""
        key, self._loaded = self._loaded, None
        return None if key is None else self._replay_forward(key)[: inputs.batch.num_tokens]

    # ---- in the other stages

    def follow(
        self, key: GraphKey, data: Any, entering: Entering | None, num_tokens: int
    ) -> tuple[Entering, list[Any]]:
        """Compute a step in a stage that is not the last one.

        Parameters
        ----------
        key : GraphKey
        data : (n,) uint8
            `StagedStep.data`.
        entering : (array or None, array), or None
            Activations (num_tokens, N) of the previous stage; None in the first stage.
        num_tokens : int

        Returns
        -------
        (delta, residual)
            See `Decoder.run_stage`. On CUDA, the next replay overwrites them, and the features.
        list of array
            Features (num_tokens, N), the inputs of this stage's `features`.
        """
        key, buffer = self._load(key, data, entering, num_tokens)
        delta, residual = self._replay_forward(key)
        self._inputs.release(buffer)
        residual = residual[:num_tokens]
        delta = None if delta is None else delta[:num_tokens]
        features = [array[:num_tokens] for array in self.features.values()]
        if self._model.device.is_cuda:
            return (delta, residual), features
        # They may be the static arrays, which the next step overwrites while these are sent.
        leaving = None if delta is None else delta.copy(), residual.copy()
        return leaving, [array.copy() for array in features]

    # ---- in all stages

    def compute(self, key: GraphKey) -> Any:
        """Launch a step's kernels one by one; they end with activations, or sample."""
        return super().compute(key) if self._stage.is_last else self._forward(key)

    def _replay_forward(self, key: GraphKey) -> Any:
        # Stages that do not sample have one kind of graph: `capture` has captured it.
        graphs = self._forwards if self._stage.is_last else self._graphs
        return self._replayed(graphs, key)

    def _run(self, batch: ForwardBatch) -> Any:
        if not self._stage.is_first:
            # SAFETY: no embedding waits here for `decode_inputs`, whose tables attention may read
            # before it waits (`Attention._decode`); kernels after a copy start once all before it
            # have ended.
            batch.context_lens.copy()
        run = self._model.forward if self._stage.is_last else self._model.run_stage
        return run(batch, self._pages)

    def _batch(self, key: GraphKey) -> ForwardBatch:
        batch = super()._batch(key)
        delta, residual = self._entering
        if residual is None:
            return batch
        count = key.num_tokens
        entering = delta[:count] if key.has_delta else None, residual[:count]
        return replace(batch, entering=entering)

    def _load(
        self, key: GraphKey, data: Any, entering: Entering | None, num_tokens: int
    ) -> tuple[GraphKey, StagingBuffer]:
        """Copy a staged step and its activations to the static inputs; return its key here."""
        buffer = self._inputs.load(data)
        key = replace(key, has_delta=entering is not None and entering[0] is not None)
        if entering is not None:
            self._load_entering(entering, num_tokens, key.num_tokens)
        if self.on_send is not None:
            self.on_send(key, data)
        return key, buffer

    def _load_entering(self, entering: Entering, num_tokens: int, num_padded: int) -> None:
        for array, given in zip(self._entering, entering, strict=True):
            if given is not None:
                # Flat: of one row, CuPy would compile a kernel instead of copying memory.
                array[:num_tokens].reshape(-1)[:] = given.reshape(-1)
                # Layers write to these arrays: what they leave for padding would grow step by step.
                padding = array[num_tokens:num_padded]
                padding.view(f"u{padding.itemsize}").fill(0)  # any device can fill integers

    def _guessed(self, key: GraphKey) -> GraphKey:
        is_fused = getattr(self._model.decoder.layers[0], "is_fused", lambda num_tokens: False)
        return replace(key, has_delta=not is_fused(key.num_tokens))
