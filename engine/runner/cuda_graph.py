"""Decode steps as CUDA graphs: one host-to-device copy, one launch, one device-to-host copy.

A decode step is hundreds of kernels; launching them one by one would take the host longer than the
device needs to run them. So they are captured once, at load, for a few batch sizes, and replayed as
a whole: input preparation, model, sampler, and storing the sampled ids for the next step. Other
batch sizes use the next larger graph; its padding sequences write nothing. Steps with the same
number of drafts for every sequence have graphs of their own. Steps whose sampling needs more
(penalties, log-probabilities, ...) use graphs that end with the logits; these graphs, and those for
draft trees, are captured on first use. Steps with LoRA adapters have graphs in which every
adaptable product reads the adapters; those in which only the products that adapters have changed do
are captured when no request runs, or after many steps. With other overrides (`kernels.override`) a
step has graphs of its own, captured after its first use; one such table is kept beside the one at
load.

Replay works because every address a graph uses stays valid: inputs live in `StaticInputs`, block
tables and last ids in fixed-size arrays, and memory allocated during capture comes from a pool that
only graphs use. All graphs share this pool, so they must run one after another.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from engine import kernels
from engine.kernels._override.dispatch import add_runs, recorded_runs
from engine.kernels._override.scope import current_overrides
from engine.kernels._override.table import NO_OVERRIDES, Overrides
from engine.layers.batch import ForwardBatch
from engine.layers.sampler import Sampler, SamplingBatch
from engine.runner.batch import StepInputs
from engine.runner.graph_inputs import GraphInputs, Tokens
from engine.runner.graph_keys import GraphKey, batch_sizes, context_buckets
from engine.runner.request_rows import RequestRows
from engine.runner.sampling import SamplingTable
from engine.runner.state_arrays import state_arrays
from engine.runner.static_inputs import NUM_BUFFERS, StagingBuffer
from engine.runner.transfer import DeviceToHostCopy
from engine.scheduler.output import ScheduleOutput

__all__ = ["DecodeGraphs", "GraphKey", "batch_sizes", "context_buckets"]

IntArray = np.ndarray[Any, np.dtype[Any]]

_log = logging.getLogger(__name__)

_MAX_MISSES = 512  # steps after which a general graph has cost more than capturing their own

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seeds")


class _Graph:
    """A captured step.

    Parameters
    ----------
    graph : cupy.cuda.Graph
    result : array, tuple or None
        Logits (T, V) that the step writes, if it ends with them; a pipeline stage's activations.
    runs : dict of str to int
        Number of runs of each kernel in the step.
    """

    __slots__ = ("_graph", "_runs", "result")

    def __init__(self, graph: Any, result: Any, runs: dict[str, int]) -> None:
        self._graph = graph
        self._runs = runs
        self.result = result

    def launch(self) -> None:
        """Replay the step."""
        self._graph.launch()
        add_runs(self._runs)


class DecodeGraphs:
    """Computes steps in which every sequence is a sampled decode of `query_len` tokens.

    On the CPU the same kernels are launched without capture, for tests.

    Parameters
    ----------
    model : RunnableModel
    kv_pages : sequence of tuple of array
        `KVCache.layers`.
    table : RequestRows
    sampling : SamplingTable
    block_size, max_model_len : int
    query_lens : sequence of int
        Query tokens per sequence to capture graphs for.
    adapter_kinds : tuple of str
        Kinds of the weights that LoRA adapters may change; (): their graphs are captured on first
        use.
    new_features : callable, optional
        ``new_features(num_tokens)`` allocates the arrays of `ForwardBatch.features`.

    Attributes
    ----------
    features : mapping of int to array
        Layer -> features (T, N) of the last replayed step; empty without `new_features`.
    on_send : callable or None
        Called before each launch with the graph's key and the used bytes of the staging buffer.
    """

    _num_buffers = NUM_BUFFERS

    def __init__(
        self,
        model: Any,
        kv_pages: Sequence[tuple[Any, ...]],
        table: RequestRows,
        sampling: SamplingTable,
        *,
        block_size: int,
        max_model_len: int,
        query_lens: Sequence[int] = (1,),
        adapter_kinds: tuple[str, ...] = (),
        new_features: Callable[[int], Mapping[int, Any]] = lambda num_tokens: {},
    ) -> None:
        self.on_send: Callable[[GraphKey, Any], None] | None = None
        self._model = model
        self._pages = kv_pages
        self._table = table
        self._block_size = block_size
        self._sampler = Sampler()
        xp = model.device.xp
        num_rows, width = table.block_tables.shape
        self._sizes = batch_sizes(num_rows)
        max_size = self._sizes[-1]
        max_tokens = max_size * max(query_lens)
        self.features = new_features(max_tokens)
        sizes = max_size, max(query_lens), self._num_buffers
        self._filling = GraphInputs(model.device, table, sampling, *sizes)
        self._inputs = self._filling.static
        self._tables = xp.zeros((num_rows, width), np.int32)  # block tables of all request rows
        self._token_ids = xp.zeros(max_tokens, np.int32)
        self._slot_mapping = xp.zeros(max_tokens, np.int64)
        self._batch_tables = xp.zeros((max_size, width), np.int32)  # block tables of the batch
        index = np.arange(max_size + 1, dtype=np.int32)
        self._cu_seqlens = {n: xp.asarray(index * np.int32(n)) for n in query_lens}
        lens = self._max_context_lens = {s: context_buckets(s, max_model_len) for s in self._sizes}
        self._by_size = {
            (size, n): [GraphKey(size, length, n) for length in lens[size]]
            for n in sorted(query_lens)
            for size in self._sizes
        }
        self._keys = [key for keys in self._by_size.values() for key in keys]
        self._adapter_kinds = adapter_kinds
        if adapter_kinds:
            self._keys += [replace(key, adapters=adapter_kinds) for key in self._keys]
        self._misses: dict[GraphKey, int] = {}  # graph to capture -> steps that have missed it
        self._is_captured = False
        self._own = NO_OVERRIDES  # the overrides at load
        self._graphs: dict[tuple[Overrides, GraphKey], _Graph] = {}
        # Graphs that end with the logits.
        self._forwards: dict[tuple[Overrides, GraphKey], _Graph] = {}
        self._uncaptured: set[Overrides] = set()  # a step with these cannot be captured
        self._pool: Any = None  # pool of the memory allocated during capture
        self._memory: list[Any] = []  # memory of the pool, kept until `close`
        self._stream: Any = None

    @property
    def table_shape(self) -> tuple[int, int]:
        """Number of request rows, and of blocks per row."""
        return self._tables.shape[0], self._tables.shape[1]

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """All graphs captured at load, by `query_len` in ascending order."""
        return tuple(self._keys)

    def capture(self, *, progress: bool = False) -> None:
        """Capture all graphs (no-op on the CPU); `progress` shows a bar on stderr."""
        if not self._model.device.is_cuda:
            return
        from tqdm import tqdm

        self._model.device.activate()
        cuda = self._model.device.xp.cuda
        cuda.get_current_stream().synchronize()
        self._pool = cuda.MemoryPool(partial(_allocate, cuda, self._memory))
        self._stream = cuda.Stream(non_blocking=True)
        largest_first = sorted(self._keys, key=lambda key: (key.num_tokens, key), reverse=True)
        keys = tqdm(
            largest_first,  # so that smaller graphs reuse the largest one's memory
            "capturing graphs",
            file=sys.stderr,
            disable=not progress,
            leave=False,
        )
        self._is_captured = True
        self._own = current_overrides()
        with self._capturing() as stream:
            for key in keys:
                # Warm-up: loads modules, grows scratch memory, fills the pool.
                self.compute(key)
                if not self._add(self._graphs, key, partial(self.compute, key), stream):
                    break
            stream.synchronize()

    def close(self) -> None:
        """Drop the graphs and return their memory to the device; no step may be running."""
        self._is_captured = False
        self._graphs.clear()
        self._forwards.clear()
        if self._pool is not None:
            self._pool.free_all_blocks()
        self._memory.clear()

    def key(self, num_sequences: int, max_context_len: int, query_len: int = 1) -> GraphKey:
        """Return the smallest captured graph that fits this number of sequences and context."""
        size = self._sizes[bisect_left(self._sizes, num_sequences)]
        of_size = self._by_size[size, query_len]
        return of_size[bisect_left(self._max_context_lens[size], max_context_len)]

    def _key_of(self, context_lens: IntArray, query_len: int) -> GraphKey:
        """Return `key`; computes the longest context only if the size has several graphs."""
        size = self._sizes[bisect_left(self._sizes, len(context_lens))]
        of_size = self._by_size[size, query_len]
        lens = self._max_context_lens[size]
        if len(lens) == 1:
            return of_size[0]
        return of_size[bisect_left(lens, max(context_lens.tolist()))]

    def launch(
        self, output: ScheduleOutput, rows: IntArray, starts: IntArray
    ) -> DeviceToHostCopy | None:
        """Compute `output` if a graph supports it and its sampling needs nothing extra.

        `rows`, `starts` (B,): row and first query position of each sequence.

        Returns
        -------
        DeviceToHostCopy or None
            "token_ids" and "status", `query_len` values per sequence. None: nothing was launched;
            compute the step kernel by kernel.
        """
        sequences = output.sequences
        query_len = output.query_len
        is_supported = output.num_decodes == len(sequences) and (
            output.is_unchanged or all([s.is_sampled for s in sequences])
        )
        if not is_supported or query_len not in self._cu_seqlens:
            return None
        columns = self._filling.columns(rows, query_len)
        if columns is None:
            return None
        stops = starts + query_len
        key = self._key_of(stops, query_len)
        self._table.update_tables(sequences, rows, stops, rewritten=bool(output.copies))
        states = state_arrays(output, rows, self._table)
        tokens = self._filling.tokens(output, rows, starts)
        if tokens.tree_mask is not None:
            key = replace(key, is_tree=True)
        if self._table.adapters_of(rows) is not None:
            key = self._with_adapters(key)
        buffer = self._filling.fill(columns, key.size, tokens, stops, states)
        self._send(buffer, key, rows, tokens)
        self.replay(key)
        # With drafts, the next step starts after this one is read, so the host sends its ids.
        self._table.last_positions[rows] = -1 if output.num_draft_tokens else stops
        return self._inputs.read(buffer, len(rows) * query_len, key.num_tokens)

    def _with_adapters(self, key: GraphKey) -> GraphKey:
        """Return the key of a step with adapters: that of a captured graph, if there is one."""
        exact = replace(key, adapters=self._model.adapter_kinds)
        general = replace(key, adapters=self._adapter_kinds)
        overrides = current_overrides()
        if (
            not self._adapter_kinds
            or (overrides, exact) in self._graphs
            or (overrides, general) not in self._graphs
        ):
            return exact
        misses = self._misses.pop(exact, 0) + 1
        if misses >= _MAX_MISSES:
            return exact
        self._misses[exact] = misses
        return general

    def capture_missed(self) -> None:
        """Capture the graphs that steps have missed; takes longer than a step."""
        while self._misses:
            key, _ = self._misses.popitem()
            self._add_later(self._graphs, key, partial(self.compute, key))

    def logits(self, inputs: StepInputs) -> Any:
        """Compute the logits (T, V) of a decode step in which every token is sampled.

        They are valid until the next step is computed. Returns None, without launching anything, if
        no graph supports the step.
        """
        batch = inputs.batch
        rows = inputs.rows
        is_supported = (
            batch.num_decodes == batch.num_sequences and batch.query_len in self._cu_seqlens
        )
        if not is_supported or len(inputs.sampled_rows) != batch.num_tokens:
            return None
        key = self.key(len(rows), batch.max_context_len, batch.query_len)
        key = replace(key, is_tree=batch.tree_mask is not None)
        if batch.adapter_slots is not None:
            key = replace(key, adapters=self._model.adapter_kinds)
        ids = batch.token_ids.copy()
        ids[inputs.last_id_tokens] = -1
        positions = inputs.sampled_positions - np.int32(1)
        mask = None if batch.tree_mask is None else batch.tree_mask.ravel()
        tokens = Tokens(ids, batch.positions, positions, mask)
        size = key.size
        query_len = key.query_len
        states: dict[str, IntArray] = {}
        if batch.state_slots is not None:
            states = {"state_slots": batch.state_slots, "state_targets": batch.state_targets}
        stops = batch.context_lens
        buffer = self._filling.fill_all(rows, size, query_len, tokens, stops, states)
        self._send(buffer, key, rows, tokens)
        self._inputs.release(buffer)
        return self._replay_forward(key)[: batch.num_tokens]

    def sampled_ids(self, num_sequences: int, query_len: int = 1) -> Any:
        """Return the last id (num_sequences,) the last step sampled for each sequence.

        The array lives on the device, and is valid until the next step is computed.
        """
        ids = self._inputs.results[: num_sequences * query_len]
        return ids.reshape(num_sequences, query_len)[:, -1]

    def repeat(self, key: GraphKey) -> None:
        """Repeat the step held in the static inputs, on all ranks, to measure its time."""
        if self.on_send is not None:
            self.on_send(key, np.empty(0, np.uint8))
        self.replay(key)

    def replay(self, key: GraphKey) -> None:
        """Compute a step from the static inputs, on this rank."""
        graph = self._graphs.get((current_overrides(), key))
        if graph is not None:
            graph.launch()
            return
        self.compute(key)
        self._add_later(self._graphs, key, partial(self.compute, key))

    def compute(self, key: GraphKey) -> Any:
        """Launch a step's kernels one by one; graphs are captured from these launches."""
        arrays = self._inputs.arrays
        num_tokens = key.num_tokens
        shape = key.size, key.query_len
        logits = self._forward(key)
        columns = {name: arrays[name][:num_tokens] for name in _SAMPLING}
        positions = arrays["sample_positions"][:num_tokens]
        sampled = self._sampler(logits, SamplingBatch(positions=positions, **columns))
        kernels.decode_outputs(
            sampled.token_ids.reshape(shape),
            sampled.status.reshape(shape),
            arrays["rows"][: key.size],
            self._table.last_ids,
            out=self._inputs.results[: 2 * num_tokens].reshape(2, *shape),
        )

    def _forward(self, key: GraphKey) -> Any:
        arrays = self._inputs.arrays
        size = key.size
        batch = self._batch(key)
        shape = size, key.query_len
        kernels.decode_inputs(
            arrays["rows"][:size],
            arrays["token_ids"][: key.num_tokens].reshape(shape),
            batch.positions.reshape(shape),
            self._table.last_ids,
            self._tables,
            arrays["new_starts"][:size],
            arrays["cu_new_blocks"][: size + 1],
            arrays["new_blocks"],
            block_size=self._block_size,
            out=(
                batch.token_ids.reshape(shape),
                batch.slot_mapping.reshape(shape),
                batch.block_tables,
            ),
        )
        return self._run(batch)

    def _run(self, batch: ForwardBatch) -> Any:
        return self._model.forward(batch, self._pages)

    def _replay_forward(self, key: GraphKey) -> Any:
        """Compute the logits (T, V) for the static inputs, padding included."""
        return self._replayed(self._forwards, key)

    def _replayed(self, graphs: dict[tuple[Overrides, GraphKey], _Graph], key: GraphKey) -> Any:
        """Return the result of a step without sampling, from the static inputs."""
        graph = graphs.get((current_overrides(), key))
        if graph is not None:
            graph.launch()
            return graph.result
        result = self._forward(key)
        self._add_later(graphs, key, partial(self._forward, key))
        return result

    def _batch(self, key: GraphKey) -> ForwardBatch:
        arrays = self._inputs.arrays
        size = key.size
        num_tokens = key.num_tokens
        cu_seqlens = self._cu_seqlens[key.query_len]
        mask = arrays["tree_mask"][:num_tokens].reshape(size, key.query_len)
        return ForwardBatch(
            token_ids=self._token_ids[:num_tokens],
            positions=arrays["positions"][:num_tokens],
            rope_positions=arrays["rope_positions"][:num_tokens],
            slot_mapping=self._slot_mapping[:num_tokens],
            cu_seqlens_q=cu_seqlens[: size + 1],
            context_lens=arrays["context_lens"][:size],
            block_tables=self._batch_tables[:size],
            logits_indices=None,
            num_decodes=size,
            max_seqlen_q=key.query_len,
            max_context_len=key.max_context_len,
            prefill_cu_seqlens_q=cu_seqlens[:1],
            query_len=key.query_len,
            tree_mask=mask if key.is_tree else None,
            features={layer: array[:num_tokens] for layer, array in self.features.items()},
            adapter_slots=arrays["adapter_slots"][:num_tokens] if key.adapters else None,
            adapter_kinds=key.adapters,
            **self._states(key),
        )

    def _states(self, key: GraphKey) -> dict[str, Any]:
        """Return the slots that the sequences read and write; {} without recurrent layers."""
        if self._table.state_slots is None:
            return {}
        targets = self._inputs.arrays["state_targets"][: key.num_tokens]
        shape = (key.size, key.query_len) if key.query_len > 1 else (key.size,)
        slots = self._inputs.arrays["state_slots"][: key.size]
        return {"state_slots": slots, "state_targets": targets.reshape(shape)}

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[Any]:
        """Context that launches on the graphs' stream and allocates from their pool."""
        cuda = self._model.device.xp.cuda
        with cuda.using_allocator(self._pool.malloc), self._stream:
            yield self._stream

    def _capture(self, launch: Callable[[], Any], stream: Any) -> tuple[Any, Any]:
        """Capture the kernels that `launch` launches; return the graph and its return value."""
        stream.begin_capture()
        try:
            result = launch()
        except BaseException:
            # SAFETY: `Stream.end_capture` would instantiate an invalid graph and crash.
            with contextlib.suppress(Exception):
                self._model.device.xp.cuda.runtime.streamEndCapture(stream.ptr)
            raise
        return stream.end_capture(), result

    def _add_later(
        self,
        graphs: dict[tuple[Overrides, GraphKey], _Graph],
        key: GraphKey,
        launch: Callable[[], Any],
    ) -> None:
        """Capture a step that was just computed, for the next one like it; see `capture`."""
        if self._is_captured and current_overrides() not in self._uncaptured:
            with self._capturing() as stream:
                self._add(graphs, key, launch, stream)

    def _add(
        self,
        graphs: dict[tuple[Overrides, GraphKey], _Graph],
        key: GraphKey,
        launch: Callable[[], Any],
        stream: Any,
    ) -> bool:
        """Capture `launch` and add its graph to `graphs`; False if an override prevents that."""
        overrides = current_overrides()
        for table in {table for table, _ in graphs} - {self._own, overrides}:
            for other in [other for other in graphs if other[0] == table]:
                del graphs[other]
        try:
            with recorded_runs() as runs:
                graph, result = self._capture(launch, stream)
        except Exception as error:
            if not overrides:
                raise
            self._uncaptured.add(overrides)
            _log.warning(
                "decode steps are launched kernel by kernel, since a step with the overrides %s "
                "cannot be captured in a CUDA graph: %s",
                *(overrides, error),
            )
            return False
        graphs[overrides, key] = _Graph(graph, self._unowned(result), runs)
        return True

    def _unowned(self, logits: Any) -> Any:
        """Return the result of a captured step, an array or several, without its memory."""
        # SAFETY: the logits' memory returns to the graphs' pool, so another graph may overwrite it.
        # They are read before that, on the same stream. A separate buffer per graph would take
        # gigabytes.
        if logits is None:
            return None
        if isinstance(logits, tuple):
            return tuple(map(self._unowned, logits))
        memory = self._model.device.xp.cuda.UnownedMemory(
            logits.data.ptr, logits.nbytes, self._pool, logits.data.device_id
        )
        pointer = self._model.device.xp.cuda.MemoryPointer(memory, 0)
        return self._model.device.xp.ndarray(logits.shape, logits.dtype, pointer)

    def _send(self, buffer: StagingBuffer, key: GraphKey, rows: IntArray, tokens: Tokens) -> None:
        """Add the block ids the device does not have yet, and send the buffer."""
        num_new_blocks = self._filling.fill_blocks(buffer, rows, key.size)
        if self.on_send is not None:
            self.on_send(key, self._inputs.used(buffer, num_new_blocks))
        self._filling.send(buffer, num_new_blocks, tokens)


def _allocate(cuda: Any, kept: list[Any], size: int) -> Any:
    """Return new device memory for a pool, and add it to `kept`."""
    # SAFETY: when memory runs out, a pool frees what no array uses. Graphs may still use it.
    kept.append(cuda.Memory(size))
    return cuda.MemoryPointer(kept[-1], 0)
