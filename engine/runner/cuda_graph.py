"""Decode steps as CUDA graphs: one copy in, one launch, one copy out.

A step of decodes is hundreds of kernels, and launching each would take the host longer than the
device needs for all. So they are captured once, at load, for a few sizes of the batch, and replayed
as a whole: the layout of the inputs, the model, the sampler, and the hand-over of the sampled ids.
A batch in between takes the next larger graph, with sequences of padding that write nothing. Steps
with drafts have more tokens a sequence, the same number for all, and graphs of their own. Steps
whose sampling has extras (penalties, log-probabilities, ...) take graphs that end with the logits;
these, and graphs for trees of drafts, are captured when they are first needed.

A graph can be replayed because nothing it touches moves: inputs lie in `StaticInputs`, block tables
and last ids in arrays of the request rows, and what its kernels allocated while they were captured
comes from a pool that nobody else uses. All graphs share that memory, so they run one after
another.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from engine import kernels
from engine.layers.batch import ForwardBatch
from engine.layers.sampler import Sampler, SamplingBatch
from engine.runner.batch import StepInputs, tree_mask
from engine.runner.request_rows import RequestRows
from engine.runner.sampling import SamplingTable
from engine.runner.static_inputs import StagingBuffer, StaticInputs
from engine.runner.transfer import DeviceToHostCopy
from engine.scheduler.output import ScheduledSequence, ScheduleOutput

__all__ = ["DecodeGraphs", "GraphKey", "batch_sizes", "context_buckets"]

IntArray = np.ndarray[Any, np.dtype[Any]]

_SIZES = (1, 2, 4, 8, 16, 64, 128, 192, 256)  # then in steps of 128
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seeds")


@dataclass(frozen=True, order=True)
class GraphKey:
    """Which graph.

    Attributes
    ----------
    size : int
        Sequences, padding included.
    max_context_len : int
        The longest context that it serves.
    query_len : int
        Tokens of each sequence.
    is_tree : bool
        Whether the tokens of a sequence are a tree, not a chain.
    """

    size: int
    max_context_len: int
    query_len: int = 1
    is_tree: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of a step, padding included."""
        return self.size * self.query_len


def batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the sizes for which graphs are captured; the last is `max_num_seqs` or more.

    Above 16 rows the products go by tiles of 64, 128 and 192 rows, and one that is not full takes
    about as long as a full one. So batches are filled up to whole tiles.

    Examples
    --------
    >>> batch_sizes(20), batch_sizes(3), batch_sizes(300)[-3:]
    ((1, 2, 4, 8, 16, 64), (1, 2, 4), (192, 256, 384))
    """
    sizes: list[int] = []
    for size in itertools.chain(_SIZES, itertools.count(_SIZES[-1] + 128, 128)):
        sizes.append(size)
        if size >= max_num_seqs:
            break
    return tuple(sizes)


def context_buckets(size: int, max_model_len: int) -> tuple[int, ...]:
    """Return the context lengths for which graphs of `size` rows are captured.

    How far attention splits the keys of a sequence is fixed in a graph. With many sequences it
    hardly splits, whatever their lengths.

    Examples
    --------
    >>> context_buckets(1, 40960), context_buckets(64, 40960)
    ((1024, 4096, 16384, 40960), (40960,))
    """
    if size > 16:
        return (max_model_len,)
    lengths = (1 << power for power in range(10, 40, 2))
    return (*itertools.takewhile(lambda length: length < max_model_len, lengths), max_model_len)


class _Tokens(NamedTuple):
    """The tokens of a step of decodes, `query_len` of each sequence, (T,) each."""

    token_ids: IntArray  # int32; -1 where the row's last id is the one
    places: IntArray  # int32; where in the sequence's pages their keys go
    positions: IntArray  # int32; where they stand in it: the places, but for branches of a tree
    tree_mask: IntArray | None = None  # uint64


class DecodeGraphs:
    """Computes steps of decodes only, each sampled, with as many tokens a sequence.

    On the CPU the same steps are computed without being captured, which is for tests.

    Parameters
    ----------
    model : RunnableModel
    kv_pages : sequence of (k_pages, v_pages)
    table : RequestRows
    sampling : SamplingTable
    block_size, max_model_len : int
    query_lens : sequence of int
        Tokens a sequence for which graphs are captured.
    """

    def __init__(
        self,
        model: Any,
        kv_pages: Sequence[tuple[Any, Any]],
        table: RequestRows,
        sampling: SamplingTable,
        *,
        block_size: int,
        max_model_len: int,
        query_lens: Sequence[int] = (1,),
    ) -> None:
        self._model = model
        self._pages = kv_pages
        self._table = table
        self._sampling = sampling
        self._block_size = block_size
        self._sampler = Sampler()
        xp = model.device.xp
        num_rows, width = table.block_tables.shape
        self._sizes = np.array(batch_sizes(num_rows))
        max_size = int(self._sizes[-1])
        max_tokens = max_size * max(query_lens)
        self._inputs = StaticInputs(model.device, max_size, max_tokens, num_rows * width)
        self._tables = xp.zeros((num_rows, width), np.int32)  # of the request rows
        self._token_ids = xp.zeros(max_tokens, np.int32)
        self._slot_mapping = xp.zeros(max_tokens, np.int64)
        self._batch_tables = xp.zeros((max_size, width), np.int32)  # of the batch
        index = np.arange(max_size + 1, dtype=np.int32)
        self._cu_seqlens = {n: xp.asarray(index * np.int32(n)) for n in query_lens}
        self._keys = [
            GraphKey(size, length, query_len)
            for query_len in sorted(query_lens)
            for size in self._sizes.tolist()
            for length in context_buckets(size, max_model_len)
        ]
        self._graphs: dict[GraphKey, Any] = {}
        self._forwards: dict[GraphKey, tuple[Any, Any]] = {}  # graphs that end with the logits
        self._pool: Any = None  # what the graphs live on
        self._stream: Any = None

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """All graphs that are captured at load: by tokens a sequence, in ascending order."""
        return tuple(self._keys)

    def capture(self, *, progress: bool = False) -> None:
        """Capture all graphs (nothing on the CPU); a bar on stderr if asked for."""
        if not self._model.device.is_cuda:
            return
        from tqdm import tqdm

        self._model.device.activate()
        cuda = self._model.device.xp.cuda
        cuda.get_current_stream().synchronize()
        self._pool, self._stream = cuda.MemoryPool(), cuda.Stream(non_blocking=True)
        largest_first = sorted(self._keys, key=lambda key: (key.num_tokens, key), reverse=True)
        keys = tqdm(
            largest_first,  # the others fit into its memory
            "capturing graphs",
            file=sys.stderr,
            disable=not progress,
            leave=False,
        )
        with self._capturing() as stream:
            for key in keys:
                # Run once before: modules are loaded, scratch grows, the pool gets its memory.
                self.compute(key)
                self._graphs[key], _ = self._capture(partial(self.compute, key), stream)
            stream.synchronize()

    def key(self, num_sequences: int, max_context_len: int, query_len: int = 1) -> GraphKey:
        """Return the smallest graph for so many sequences, the longest of so many tokens."""
        size = int(self._sizes[np.searchsorted(self._sizes, num_sequences)])
        of_size = (k for k in self._keys if k.size == size and k.query_len == query_len)
        return next(key for key in of_size if key.max_context_len >= max_context_len)

    def launch(
        self, output: ScheduleOutput, rows: IntArray, starts: IntArray
    ) -> DeviceToHostCopy | None:
        """Compute `output`, of these rows and positions, if it is a step of this kind.

        Returns
        -------
        DeviceToHostCopy or None
            Of "token_ids" and "status", `query_len` for each sequence. None: nothing was done;
            compute it another way.
        """
        sequences, query_len = output.sequences, output.query_len
        is_kind = output.num_decodes == len(sequences) and (
            output.is_unchanged or all(s.is_sampled for s in sequences)
        )
        if not is_kind or query_len not in self._cu_seqlens:
            return None
        columns = self._sampling.plain_columns(rows)
        if columns is None:
            return None
        stops = starts + np.int32(query_len)
        key = self.key(len(rows), int(stops.max()), query_len)
        num_blocks = (stops - 1) // self._block_size + 1
        self._table.update_tables(sequences, rows, num_blocks, rewritten=bool(output.copies))
        if query_len > 1:
            columns = {name: column.repeat(query_len) for name, column in columns.items()}
            tokens = self._tokens_with_drafts(output, rows, starts)
            last_positions: Any = -1  # the host sends the next ids, which it knows by then
        else:
            tokens = _Tokens(self._token_ids_of(sequences, rows, starts), starts, starts)
            last_positions = stops
        if tokens.tree_mask is not None:
            key = replace(key, is_tree=True)
        buffer = self._inputs.next_buffer()
        sample_positions = tokens.positions + 1
        buffer.fill(len(rows), key.size, query_len, sample_positions=sample_positions, **columns)
        self._send(buffer, key, rows, tokens, stops)
        self.replay(key)
        self._table.last_positions[rows] = last_positions
        return self._inputs.read(buffer, len(rows) * query_len, key.num_tokens)

    def logits(self, inputs: StepInputs) -> Any:
        """Compute the logits (T, V) of a step of this kind all of whose tokens are sampled.

        They stay as they are until the next step is computed. None: it is no such step, and nothing
        was done.
        """
        batch, rows = inputs.batch, inputs.rows
        is_kind = batch.num_decodes == batch.num_sequences and batch.query_len in self._cu_seqlens
        if not is_kind or len(inputs.sampled_rows) != batch.num_tokens:
            return None
        key = self.key(len(rows), batch.max_context_len, batch.query_len)
        key = replace(key, is_tree=batch.tree_mask is not None)
        ids = batch.token_ids.copy()
        ids[inputs.linked] = -1
        positions = inputs.sampled_positions - np.int32(1)
        mask = None if batch.tree_mask is None else batch.tree_mask.ravel()
        buffer = self._inputs.next_buffer()
        tokens = _Tokens(ids, batch.positions, positions, mask)
        self._send(buffer, key, rows, tokens, batch.context_lens)
        self._inputs.release(buffer)
        return self._replay_forward(key)[: batch.num_tokens]

    def replay(self, key: GraphKey) -> None:
        """Compute a step on what the static inputs hold."""
        if not self._graphs:
            self.compute(key)
            return
        if key not in self._graphs:
            with self._capturing() as stream:
                self._graphs[key], _ = self._capture(partial(self.compute, key), stream)
        self._graphs[key].launch()

    def compute(self, key: GraphKey) -> None:
        """Launch the kernels of a step one by one: what a graph is captured from."""
        there, num_tokens = self._inputs.arrays, key.num_tokens
        shape = key.size, key.query_len
        logits = self._forward(key)
        columns = {name: there[name][:num_tokens] for name in _SAMPLING}
        positions = there["sample_positions"][:num_tokens]
        sampled = self._sampler(logits, SamplingBatch(positions=positions, **columns))
        kernels.decode_outputs(
            sampled.token_ids.reshape(shape),
            sampled.status.reshape(shape),
            there["rows"][: key.size],
            self._table.last_ids,
            out=self._inputs.results[: 2 * num_tokens].reshape(2, *shape),
        )

    def _forward(self, key: GraphKey) -> Any:
        there, size, batch = self._inputs.arrays, key.size, self._batch(key)
        shape = size, key.query_len
        kernels.decode_inputs(
            there["rows"][:size],
            there["token_ids"][: key.num_tokens].reshape(shape),
            batch.positions.reshape(shape),
            self._table.last_ids,
            self._tables,
            there["new_starts"][:size],
            there["cu_new_blocks"][: size + 1],
            there["new_blocks"],
            block_size=self._block_size,
            out=(
                batch.token_ids.reshape(shape),
                batch.slot_mapping.reshape(shape),
                batch.block_tables,
            ),
        )
        return self._model.forward(batch, self._pages)

    def _replay_forward(self, key: GraphKey) -> Any:
        """Compute the logits of what the static inputs hold, (size, V)."""
        if not self._graphs:
            return self._forward(key)
        if key not in self._forwards:
            with self._capturing() as stream:
                self._forwards[key] = self._capture_forward(key, stream)
        graph, logits = self._forwards[key]
        graph.launch()
        return logits

    def _batch(self, key: GraphKey) -> ForwardBatch:
        there, size, num_tokens = self._inputs.arrays, key.size, key.num_tokens
        cu_seqlens = self._cu_seqlens[key.query_len]
        mask = there["tree_mask"][:num_tokens].reshape(size, key.query_len)
        return ForwardBatch(
            token_ids=self._token_ids[:num_tokens],
            positions=there["positions"][:num_tokens],
            rope_positions=there["rope_positions"][:num_tokens],
            slot_mapping=self._slot_mapping[:num_tokens],
            cu_seqlens_q=cu_seqlens[: size + 1],
            context_lens=there["context_lens"][:size],
            block_tables=self._batch_tables[:size],
            logits_indices=None,
            num_decodes=size,
            max_seqlen_q=key.query_len,
            max_context_len=key.max_context_len,
            prefill_cu_seqlens_q=cu_seqlens[:1],
            query_len=key.query_len,
            tree_mask=mask if key.is_tree else None,
        )

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[Any]:
        """Launch on the graphs' stream, and allocate from their pool."""
        cuda = self._model.device.xp.cuda
        with cuda.using_allocator(self._pool.malloc), self._stream:
            yield self._stream

    def _capture(self, launch: Callable[[], Any], stream: Any) -> tuple[Any, Any]:
        """Return the graph of what `launch` does, and what it returned."""
        stream.begin_capture()
        try:
            result = launch()
        except BaseException:
            # SAFETY: `Stream.end_capture` would instantiate what is no graph, and crash.
            with contextlib.suppress(Exception):
                self._model.device.xp.cuda.runtime.streamEndCapture(stream.ptr)
            raise
        return stream.end_capture(), result

    def _capture_forward(self, key: GraphKey, stream: Any) -> tuple[Any, Any]:
        """Return a graph that ends with the logits, and these."""
        graph, logits = self._capture(partial(self._forward, key), stream)
        # SAFETY: their memory goes back to the graphs' pool, where the next graph may write. Until
        # then, on the same stream, they are read; a batch of them each graph would be gigabytes.
        memory = self._model.device.xp.cuda.UnownedMemory(
            logits.data.ptr, logits.nbytes, self._pool, logits.data.device_id
        )
        pointer = self._model.device.xp.cuda.MemoryPointer(memory, 0)
        return graph, self._model.device.xp.ndarray(logits.shape, logits.dtype, pointer)

    def _send(
        self,
        buffer: StagingBuffer,
        key: GraphKey,
        rows: IntArray,
        tokens: _Tokens,
        context_lens: IntArray,
    ) -> None:
        """Send what the model needs, beside what `buffer` holds already."""
        offsets = self._table.rope_offsets[rows]
        if key.query_len > 1:
            offsets = offsets.repeat(key.query_len)
        if key.is_tree:
            buffer.fill(len(rows), key.size, key.query_len, tree_mask=tokens.tree_mask)
        buffer.fill(
            len(rows),
            key.size,
            key.query_len,
            rows=rows,
            token_ids=tokens.token_ids,
            positions=tokens.places,
            rope_positions=tokens.positions + offsets,
            context_lens=context_lens,
        )
        self._inputs.send(buffer, self._fill_blocks(buffer, rows, key.size))
        self._table.num_sent[rows] = self._table.num_blocks[rows]

    def _token_ids_of(
        self, sequences: Sequence[ScheduledSequence], rows: IntArray, starts: IntArray
    ) -> IntArray:
        """Return the ids that the host has to say; -1 where the row's last id is the one."""
        ids = np.full(len(rows), -1, np.int32)
        for index in np.flatnonzero(self._table.last_positions[rows] != starts).tolist():
            start = sequences[index].start
            ids[index] = sequences[index].request.token_ids(start, start + 1)[0]
        return ids

    def _tokens_with_drafts(
        self, output: ScheduleOutput, rows: IntArray, starts: IntArray
    ) -> _Tokens:
        """Return the tokens of decodes that have drafts."""
        sequences, query_len = output.sequences, output.query_len
        ids = np.full((len(rows), query_len), -1, np.int32)
        places = starts[:, None] + np.arange(query_len, dtype=np.int32)
        positions = places
        mask = tree_mask(output)
        if mask is not None:
            mask, positions = mask.ravel(), places.copy()
        linked = self._table.last_positions[rows].tolist()
        for index, sequence in enumerate(sequences):
            reached, drafts = sequence.num_reached_tokens, sequence.drafts
            num_known = reached - sequence.start
            is_linked = linked[index] == reached - 1
            known = sequence.request.token_ids(sequence.start, reached - is_linked)
            ids[index, : num_known - is_linked] = known
            if drafts is not None:
                ids[index, num_known:] = drafts.token_ids
                if drafts.is_tree:
                    positions[index, num_known:] = reached - 1 + np.array(drafts.depths, np.int32)
        return _Tokens(ids.ravel(), places.ravel(), positions.ravel(), mask)

    def _fill_blocks(self, buffer: StagingBuffer, rows: IntArray, size: int) -> int:
        """Write the blocks that the device does not know of; return how many these are."""
        sent = self._table.num_sent[rows]
        counts = self._table.num_blocks[rows] - sent
        buffer.fill(len(rows), size, new_starts=sent)
        places = buffer.fill_blocks(counts, size)
        blocks, tables = buffer.fields["new_blocks"], self._table.block_tables
        for index in np.flatnonzero(counts).tolist():
            new = tables[rows[index], sent[index] : sent[index] + counts[index]]
            blocks[places[index] : places[index + 1]] = new
        return int(places[-1])
