"""Decode steps as CUDA graphs: one copy in, one launch, one copy out.

A step of decodes is hundreds of kernels, and launching each would take the host longer than the
device needs for all. So they are captured once, at load, for a few sizes of the batch, and replayed
as a whole: the layout of the inputs, the model, the sampler, and the hand-over of the sampled ids.
A batch in between takes the next larger graph, with rows of padding that write nothing. Steps whose
sampling has extras (penalties, log-probabilities, ...) take graphs that end with the logits; these
are captured when they are first needed.

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
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from engine import kernels
from engine.layers.batch import ForwardBatch
from engine.layers.sampler import Sampler, SamplingBatch
from engine.runner.batch import StepInputs
from engine.runner.request_rows import RequestRows
from engine.runner.sampling import SamplingTable
from engine.runner.static_inputs import StaticInputs, Turn
from engine.runner.transfer import Readback
from engine.scheduler.output import ScheduledSequence, ScheduleOutput

__all__ = ["DecodeGraphs", "GraphKey", "batch_sizes", "context_buckets"]

IntArray = np.ndarray[Any, np.dtype[Any]]

_SIZES = (1, 2, 4, 8, 16, 64, 128, 192, 256)  # then in steps of 128
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seeds")


@dataclass(frozen=True, order=True)
class GraphKey:
    """Which graph: rows of the batch, padding included, and the longest context that it serves."""

    size: int
    max_context_len: int


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


class DecodeGraphs:
    """Computes steps in which every sequence has one token and is sampled.

    On the CPU the same steps are computed without being captured, which is for tests.

    Parameters
    ----------
    model : RunnableModel
    kv_pages : sequence of (k_pages, v_pages)
    table : RequestRows
    sampling : SamplingTable
    block_size, max_model_len : int
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
        max_rows = int(self._sizes[-1])
        self._inputs = StaticInputs(model.device, max_rows, num_rows * width)
        self._tables = xp.zeros((num_rows, width), np.int32)  # of the request rows
        self._token_ids = xp.zeros(max_rows, np.int32)
        self._slot_mapping = xp.zeros(max_rows, np.int64)
        self._batch_tables = xp.zeros((max_rows, width), np.int32)  # of the batch
        self._cu_seqlens = xp.asarray(np.arange(max_rows + 1, dtype=np.int32))
        self._keys = [
            GraphKey(size, length)
            for size in self._sizes.tolist()
            for length in context_buckets(size, max_model_len)
        ]
        self._graphs: dict[GraphKey, Any] = {}
        self._forwards: dict[GraphKey, tuple[Any, Any]] = {}  # graphs that end with the logits
        self._pool: Any = None  # what the graphs live on
        self._stream: Any = None

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """All graphs there are, in ascending order."""
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
        keys = tqdm(
            self._keys[::-1],  # the largest first: the others fit into its memory
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

    def key(self, num_rows: int, max_context_len: int) -> GraphKey:
        """Return the smallest graph for so many sequences, the longest of so many tokens."""
        size = int(self._sizes[np.searchsorted(self._sizes, num_rows)])
        of_size = (key for key in self._keys if key.size == size)
        return next(key for key in of_size if key.max_context_len >= max_context_len)

    def launch(self, output: ScheduleOutput, rows: IntArray, starts: IntArray) -> Readback | None:
        """Compute `output`, of these rows and positions, if it is a step of this kind.

        Returns
        -------
        Readback or None
            Of "token_ids" and "status". None: nothing was done; compute it another way.
        """
        sequences = output.sequences
        is_kind = output.num_decodes == len(sequences) and (
            output.is_unchanged or all(s.is_sampled for s in sequences)
        )
        if not is_kind:
            return None
        columns = self._sampling.plain_columns(rows)
        if columns is None:
            return None
        key = self.key(len(rows), int(starts.max()) + 1)
        num_blocks = starts // self._block_size + 1
        self._table.update_tables(sequences, rows, num_blocks, rewritten=bool(output.copies))
        turn = self._inputs.next_turn()
        turn.fill(len(rows), key.size, sample_positions=starts + 1, **columns)
        ids = self._token_ids_of(sequences, rows, starts)
        self._send(turn, key, rows, ids, starts)
        self.replay(key)
        self._table.last_positions[rows] = starts + 1
        return self._inputs.read(turn, len(rows), key.size)

    def logits(self, inputs: StepInputs) -> Any:
        """Compute the logits (B, V) of a step in which every sequence has one token and is sampled.

        They stay as they are until the next step is computed. None: it is no such step, and nothing
        was done.
        """
        batch, rows = inputs.batch, inputs.rows
        if not len(inputs.sampled) == batch.num_decodes == batch.num_sequences:
            return None
        key = self.key(len(rows), batch.max_context_len)
        ids = batch.token_ids.copy()
        ids[inputs.linked] = -1
        turn = self._inputs.next_turn()
        self._send(turn, key, rows, ids, batch.positions)
        self._inputs.release(turn)
        return self._replay_forward(key)[: len(rows)]

    def replay(self, key: GraphKey) -> None:
        """Compute a step on what the static inputs hold."""
        if self._graphs:
            self._graphs[key].launch()
        else:
            self.compute(key)

    def compute(self, key: GraphKey) -> None:
        """Launch the kernels of a step one by one: what a graph is captured from."""
        there, size = self._inputs.arrays, key.size
        logits = self._forward(key)
        columns = {name: there[name][:size] for name in _SAMPLING}
        positions = there["sample_positions"][:size]
        sampled = self._sampler(logits, SamplingBatch(positions=positions, **columns))
        kernels.decode_outputs(
            sampled.token_ids,
            sampled.status,
            there["rows"][:size],
            self._table.last_ids,
            out=self._inputs.results[: 2 * size].reshape(2, size),
        )

    def _forward(self, key: GraphKey) -> Any:
        there, size, batch = self._inputs.arrays, key.size, self._batch(key)
        kernels.decode_inputs(
            there["rows"][:size],
            there["token_ids"][:size],
            batch.positions,
            self._table.last_ids,
            self._tables,
            there["new_starts"][:size],
            there["cu_new_blocks"][: size + 1],
            there["new_blocks"],
            block_size=self._block_size,
            out=(batch.token_ids, batch.slot_mapping, batch.block_tables),
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
        there, size = self._inputs.arrays, key.size
        return ForwardBatch(
            token_ids=self._token_ids[:size],
            positions=there["positions"][:size],
            rope_positions=there["rope_positions"][:size],
            slot_mapping=self._slot_mapping[:size],
            cu_seqlens_q=self._cu_seqlens[: size + 1],
            context_lens=there["context_lens"][:size],
            block_tables=self._batch_tables[:size],
            logits_indices=None,
            num_decodes=size,
            max_seqlen_q=1,
            max_context_len=key.max_context_len,
            prefill_cu_seqlens_q=self._cu_seqlens[:1],
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
        self, turn: Turn, key: GraphKey, rows: IntArray, token_ids: IntArray, positions: IntArray
    ) -> None:
        """Send what the model needs, beside what `turn` holds already."""
        turn.fill(
            len(rows),
            key.size,
            rows=rows,
            token_ids=token_ids,
            positions=positions,
            rope_positions=positions + self._table.rope_offsets[rows],
            context_lens=positions + 1,
        )
        self._inputs.send(turn, self._fill_blocks(turn, rows, key.size))
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

    def _fill_blocks(self, turn: Turn, rows: IntArray, size: int) -> int:
        """Write the blocks that the device does not know of; return how many these are."""
        sent = self._table.num_sent[rows]
        counts = self._table.num_blocks[rows] - sent
        turn.fill(len(rows), size, new_starts=sent)
        places = turn.fill_blocks(counts, size)
        blocks, tables = turn.fields["new_blocks"], self._table.block_tables
        for index in np.flatnonzero(counts).tolist():
            new = tables[rows[index], sent[index] : sent[index] + counts[index]]
            blocks[places[index] : places[index + 1]] = new
        return int(places[-1])
