"""Runs steps: moves blocks, builds the batch, runs the model, samples.

`launch` starts a step and `read` waits for it, so that the next step can be launched in between:
sampled ids stay on the device, where the next step reads them. If sampling needs the previous
step's ids on the host (for a grammar mask, say), `launch` only starts the model, and `sample`
starts the rest once those ids have been read; the host prepares it while the device runs the
model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from engine.cache.kv_cache import KVCache
from engine.cache.swap import SwapSpace, move_blocks
from engine.config import ModelConfig
from engine.device import Device
from engine.layers.batch import ForwardBatch
from engine.layers.sampler import Sampler, SamplingBatch
from engine.loading.lora import LoraAdapter
from engine.reference.sample import BAD_ID
from engine.request import Request
from engine.runner.adapter_places import AdapterPlaces
from engine.runner.batch import StepInputs, build_inputs
from engine.runner.cuda_graph import DecodeGraphs
from engine.runner.features import FeatureTap
from engine.runner.history import HistoryTable, history_indices
from engine.runner.processors import apply_processors
from engine.runner.prompt_logprobs import PromptPart, ScoredPart, prompt_parts, score_parts
from engine.runner.request_rows import IntArray, RequestRows
from engine.runner.result import StepResult, logprob_entries, ranks_of
from engine.runner.sampling import SamplingSpec, SamplingTable
from engine.runner.transfer import DeviceToHostCopy, HostToDeviceCopy
from engine.scheduler.output import ScheduledSequence, ScheduleOutput

__all__ = ["LaunchedStep", "ModelRunner", "RunnableModel", "StepResult", "note_replayed"]

BatchT = TypeVar("BatchT", ForwardBatch, SamplingBatch)

_NO_SAMPLE = "its logits are NaN, or leave no token to choose"
_NO_ID = "the function for the op 'sample' chose an id outside the vocabulary"


def _no_sample(spec: SamplingSpec, arrays: Mapping[str, Any], row: int) -> str:
    """Return why no token was sampled from a row of logits: several options may forbid them all."""
    if arrays["status"][row] == BAD_ID:
        return _NO_ID
    names = spec.forbidding
    if len(names) < 2 or arrays["is_unusable"][row]:
        return _NO_SAMPLE
    return f"conflicting options: {' and '.join(names)} leave no token"


class RunnableModel(Protocol):
    """Members of `Model` that the runner uses; `engine.models.mock_model` has them too."""

    @property
    def config(self) -> ModelConfig:
        """Model configuration."""

    @property
    def device(self) -> Device:
        """Device that runs the model."""

    @property
    def long_rope_offset(self) -> int:
        """First row of the long factors in the rope table; 0 if it has none."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence."""

    def forward(self, batch: ForwardBatch, kv_pages: Any) -> Any:
        """Return the logits (R, V) float32 for the batch's `logits_indices`."""

    def hidden_states(self, batch: ForwardBatch, kv_pages: Any) -> Any:
        """Return the hidden states (R, N), the input of `logits`."""

    def logits(self, hidden: Any) -> Any:
        """Return the logits (R, V) float32 of hidden states."""

    @property
    def local_model(self) -> RunnableModel:
        """This process's shard; its forward passes are not announced to other ranks."""

    def share_graphs(self, graphs: DecodeGraphs, max_model_len: int, max_draft_tokens: int) -> None:
        """Have the other ranks capture the same graphs, and replay them in step with these."""

    def check_ranks(self) -> None:
        """Verify that all ranks are alive; raise a RankError otherwise."""

    @property
    def num_adapter_slots(self) -> int:
        """Number of LoRA adapters that one step may use; 0: none."""

    @property
    def adapter_kinds(self) -> tuple[str, ...]:
        """Kinds of the weights that the adapters written so far change."""

    @property
    def captured_adapter_kinds(self) -> tuple[str, ...]:
        """Kinds of the weights in graphs with adapters that are captured at load; (): no graphs."""

    @property
    def num_adapter_writes(self) -> int:
        """Number of times that an adapter was written to a slot, by whichever engine."""

    def write_adapter(self, adapter: LoraAdapter, slot: int) -> None:
        """Copy an adapter to a slot on the device."""


@dataclass(eq=False)
class LaunchedStep:
    """A step launched on the device.

    SAFETY: owns the host memory the device writes to; keep it until `ModelRunner.read`.
    """

    output: ScheduleOutput
    sampled: Sequence[ScheduledSequence] = ()
    # Row of each sequence's first logits in the results; None: one row per sequence.
    first_logits_rows: Sequence[int] | None = None
    counts: Sequence[int | None] = ()  # `num_logprobs` of each sequence
    tokens: DeviceToHostCopy | None = None
    unsampled: tuple[Any, StepInputs] | None = None  # logits and inputs, until `ModelRunner.sample`
    prompts: list[ScoredPart] = field(default_factory=list)
    failed: dict[Request, str] = field(default_factory=dict)
    # By row of logits behind a draft: why no token can be sampled if the draft is accepted.
    failed_rows: dict[int, str] = field(default_factory=dict)
    ended: DeviceToHostCopy | None = None  # copy of no array, for the end of an unsampled step

    def note_failure(self, inputs: StepInputs, row: int, why: str) -> None:
        """Record why no token can be sampled at this row of logits."""
        if inputs.paths is not None and inputs.paths[row]:
            self.failed_rows[row] = why
        else:
            self.failed[inputs.sampled[row].request] = why


class ModelRunner:
    """Computes scheduled steps on one model and one KV cache.

    Parameters
    ----------
    model : RunnableModel
    kv_cache : KVCache
        On the model's device.
    max_num_seqs, max_model_len : int
        Maximum sequences per step, and tokens per sequence.
    swap : SwapSpace, optional
        Host memory for swapped blocks.
    is_debug : bool
        Check every block table before use.
    feature_layers : sequence of int
        Layers whose inputs are kept in each step (`ForwardBatch.features`).

    Attributes
    ----------
    features : FeatureTap
        Passes on the inputs of these layers.
    adapters : AdapterPlaces
    is_linked : bool
        Whether it is the last stage of a pipeline whose GPUs are linked.
    """

    is_linked = False
    _graphs_type: type[DecodeGraphs] = DecodeGraphs
    _tap_type: type[FeatureTap] = FeatureTap

    def __init__(
        self,
        model: RunnableModel,
        kv_cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        swap: SwapSpace | None = None,
        is_debug: bool = False,
        feature_layers: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.sampler = Sampler()
        self.graphs: DecodeGraphs | None = None
        self.features = self._tap_type(model, feature_layers)
        self._block_size = kv_cache.geometry.block_size
        self._pages = kv_cache.layers
        self._swap = swap
        self._is_debug = is_debug
        nothing = np.zeros(0, np.int64)
        # Id, rows and starts of the last step.
        self._last_step: tuple[int, IntArray, IntArray] = (-1, nothing, nothing)
        max_blocks = -(-max_model_len // self._block_size)
        self._table = RequestRows(
            max_num_seqs,
            max_blocks,
            self._block_size,
            model.device,
            has_states=kv_cache.num_slots > 0,
            has_adapters=model.num_adapter_slots > 0,
        )
        self.adapters = AdapterPlaces(model, model.num_adapter_slots)
        self._sampling = SamplingTable(
            max_num_seqs, model.config.vocab_size, model.eos_token_ids, model.device
        )
        if model.device.is_cuda:
            _use_once(model.device)

    def capture_graphs(
        self, max_model_len: int, max_draft_tokens: int = 0, *, progress: bool = False
    ) -> None:
        """Capture CUDA graphs for decodes without drafts and with `max_draft_tokens` each."""
        self.graphs = self._graphs_type(
            self.model.local_model,
            self._pages,
            self._table,
            self._sampling,
            block_size=self._block_size,
            max_model_len=max_model_len,
            query_lens=sorted({1, 1 + max_draft_tokens}),
            adapter_kinds=self.model.captured_adapter_kinds,
            new_features=self.features.new_for_graphs,
        )
        self.model.share_graphs(self.graphs, max_model_len, max_draft_tokens)
        self.graphs.capture(progress=progress)
        # CuPy compiles indexing by an array on first use: trigger it now, not in the first step.
        last_ids = self._table.last_ids
        first = self.model.device.xp.zeros(1, np.int64)
        last_ids[first] = last_ids[first]

    def detach(self) -> None:
        """Drop the graphs and all references to the KV cache; no request may be running."""
        if self.graphs is not None:
            self.graphs.close()
            self.graphs = None
        self._pages = []
        self._swap = None

    def attach(self, kv_cache: KVCache, swap: SwapSpace | None) -> None:
        """Compute on this KV cache from now on; the runner has been detached.

        Parameters
        ----------
        kv_cache : KVCache
            With the geometry of the first.
        swap : SwapSpace or None
        """
        self.kv_cache = kv_cache
        self._pages = kv_cache.layers
        self._swap = swap

    def release(self, requests: Iterable[Request]) -> None:
        """Release the rows of these requests; they may be scheduled again."""
        for request in requests:
            if request.row >= 0:
                self._sampling.release(request)
                self._table.release(request)

    def drop_last_ids(self, requests: Iterable[Request]) -> None:
        """Make the next step take these requests' ids from the host, which knows them all."""
        self._table.last_positions[[r.row for r in requests if r.row >= 0]] = -1

    def recover(self) -> None:
        """After a failed step, wait for the device and free cached memory."""
        if self.model.device.is_cuda:
            cp = self.model.device.xp
            # SAFETY: the failed step's pinned buffers may be reused only once it has ended.
            cp.cuda.get_current_stream().synchronize()
            cp.get_default_memory_pool().free_all_blocks()

    def check_integrity(self) -> None:
        """Verify the rows of running requests.

        Raises
        ------
        EngineError
            If they are inconsistent; the message names the row.
        """
        self._table.check_integrity()

    def launch(self, output: ScheduleOutput) -> LaunchedStep:
        """Start the step `output`; launch steps in the order they were scheduled."""
        self.model.device.activate()
        if self._is_debug:
            self._check_copies(output)
        move_blocks(self.kv_cache, self._swap, output)
        if not output.sequences:
            return LaunchedStep(output)
        if self._table.adapter_slots is not None:
            self.adapters.restore(self._running_adapters)
        rows, starts = self._rows_and_starts(output)
        if self._is_debug:
            self._check_tables(output, rows, starts)
        tokens = self.graphs.launch(output, rows, starts) if self.graphs is not None else None
        if tokens is not None:
            self.features.report_graph(output)
            return note_replayed(LaunchedStep(output), tokens)
        inputs = build_inputs(output, rows, starts, self._table, self._block_size)
        return self._compute(LaunchedStep(output), inputs)

    def sample(self, step: LaunchedStep) -> None:
        """Start sampling a step, if that had to wait for earlier steps' tokens."""
        if step.unsampled is None:
            return
        (logits, inputs) = step.unsampled
        step.unsampled = None
        sampling = self._sampling.build(
            inputs.sampled, inputs.sampled_rows, inputs.sampled_positions, inputs.paths
        )
        for row, why in self._sampling.grammar_errors.items():
            step.note_failure(inputs, row, why)
        arrays = _sampling_arrays(inputs, sampling)
        on_device = HostToDeviceCopy(self.model.device, arrays).arrays
        self._sample(step, logits, inputs, sampling, on_device)

    def read(self, step: LaunchedStep, timeout: float | None = None) -> StepResult:
        """Wait for a step and return its result; samples it first if that is still pending.

        Raises
        ------
        StepTimeoutError
            If the device takes more than `timeout` seconds.
        """
        self.sample(step)
        result = StepResult(failed=step.failed)
        if step.tokens is not None:
            arrays = step.tokens.wait(timeout)
            self.model.check_ranks()  # the logits are NaN if another rank died in this step
            self._read_tokens(step, arrays, result)
        for scored in step.prompts:
            scored.read(result)
        return result

    # ---- launch

    def _rows_and_starts(self, output: ScheduleOutput) -> tuple[IntArray, IntArray]:
        """Return each sequence's row (B,) int64 and first query position (B,) int32."""
        step_id, rows, starts = self._last_step
        if output.is_unchanged and step_id == output.step_id - 1:
            starts = starts + np.int32(1)
        else:
            found = [s.request.row for s in output.sequences]
            if min(found) < 0:
                found = [self._row(s.request) for s in output.sequences]
            if rows.tolist() != found:
                rows = np.array(found, np.int64)
            starts = np.array([s.start for s in output.sequences], np.int32)
        self._last_step = output.step_id, rows, starts
        return rows, starts

    def _running_adapters(self) -> dict[int, LoraAdapter]:
        """Return the adapters of running requests, by slot."""
        slots = self._table.adapter_slots
        assert slots is not None
        owners = [owner for owner in self._table.owners if owner and owner.adapter]
        return {int(slots[owner.row]): owner.adapter for owner in owners}

    def _row(self, request: Request) -> int:
        """Return a request's row, assigning one if the request is new or resumed."""
        if request.row >= 0:
            return request.row
        slots = self._table.adapter_slots
        slot = 0
        if slots is not None:
            running = {adapter.serial for adapter in self._running_adapters().values()}
            # Before a row is assigned, since this may raise, and a request with a row is released
            # as if it had run.
            slot = self.adapters.place(request.adapter, running)
        row = self._table.assign(request)
        self._table.rope_offsets[row] = request.long_rope * self.model.long_rope_offset
        if slots is not None:
            slots[row] = slot
        self._sampling.assign(request)
        return row

    def _check_copies(self, output: ScheduleOutput) -> None:
        self.kv_cache.check_blocks([b for pair in output.copies for b in pair], "block copies")

    def _check_tables(self, output: ScheduleOutput, rows: IntArray, starts: IntArray) -> None:
        """Verify block tables, rows and positions before launching anything (debug mode)."""
        sequences = output.sequences
        size = self._block_size
        lens = starts + np.array([s.num_scheduled_tokens for s in sequences], np.int32)
        self._table.update_tables(sequences, rows, lens, rewritten=bool(output.copies))
        self._table.check(sequences, rows, starts, self.kv_cache.num_blocks, size)
        for access in output.state_access:
            used = [access.source, *access.targets, max(access.snapshot, 0)]
            self.kv_cache.check_slots(used, f"slots of request {access.request.request_id!r}")

    def _compute(self, step: LaunchedStep, inputs: StepInputs) -> LaunchedStep:
        """Run the model on a step, and start sampling unless that has to wait."""
        output = step.output
        logits, step.prompts = self._forward(inputs, self._prompt_parts(output, inputs))
        self.features.report(output, inputs.batch.cu_seqlens_q[:-1])
        step.sampled = inputs.sampled
        if inputs.paths is not None:
            step.sampled = [s for s in output.sequences if s.is_sampled]
            step.first_logits_rows = np.cumsum([0] + [s.num_logits for s in step.sampled])[
                :-1
            ].tolist()
        if inputs.sampled:
            step.unsampled = logits, inputs
            if not self._sampling.needs_host_ids(inputs.sampled_rows):
                self.sample(step)
        return step

    def _prompt_parts(self, output: ScheduleOutput, inputs: StepInputs) -> list[PromptPart]:
        if not self._sampling.num_prompt_scored:
            return []
        counts = [s.request.spec.params.prompt_logprobs for s in output.sequences]
        return prompt_parts(output.sequences, inputs.batch.cu_seqlens_q[:-1].tolist(), counts)

    def _send(self, batch: ForwardBatch, inputs: StepInputs) -> dict[str, Any]:
        """Copy the arrays the model needs to the device."""
        arrays = _arrays(batch) | {
            name: getattr(inputs, name) for name in ("last_id_tokens", "last_id_rows")
        }
        return HostToDeviceCopy(self.model.device, arrays).arrays

    def _forward(
        self, inputs: StepInputs, parts: Sequence[PromptPart]
    ) -> tuple[Any, list[ScoredPart]]:
        """Return the logits of the sampled sequences, and the scored prompt tokens."""
        if self.graphs is not None and not parts:
            logits = self.graphs.logits(inputs)
            if logits is not None:
                self.features.note_graph(inputs.batch.num_tokens)
                return logits, []
        host = _with(inputs.batch, _indices_with(inputs.batch, parts))
        on_device = self._send(host, inputs)
        arrays = {name: on_device[name] for name in _arrays(host)}
        batch = self.features.add_to(_with(host, {**arrays, "on_host": host}))
        if inputs.last_id_tokens.size:
            last_ids = self._table.last_ids[on_device["last_id_rows"]]
            batch.token_ids[on_device["last_id_tokens"]] = last_ids
        model = self.model
        if not parts:
            return model.forward(batch, self._pages), []
        hidden = model.hidden_states(batch, self._pages)
        num_sampled = len(inputs.sampled_rows)
        scored = score_parts(
            parts,
            hidden[num_sampled:],
            model.logits,
            self.sampler,
            model.device,
            model.config.vocab_size,
        )
        return model.logits(hidden[:num_sampled]) if num_sampled else None, scored

    def _sample(
        self,
        step: LaunchedStep,
        logits: Any,
        inputs: StepInputs,
        sampling: SamplingBatch,
        on_device: Mapping[str, Any],
    ) -> None:
        """Sample, keep the ids on the device for the next step, and start copying them back."""
        rows = inputs.sampled_rows
        self._apply_processors(step, logits, inputs)
        columns = {n: on_device[f"sampling.{n}"] for n in _arrays(sampling)}
        if sampling.history_lens is not None:
            longest = int(sampling.history_lens.max())
            history = self._sampling.history.gather(on_device["sampled_rows"], longest)
            if inputs.paths is not None:
                history[on_device["path_rows"], on_device["path_columns"]] = on_device["path_ids"]
            columns["history"] = history
        sampled = self.sampler(logits, _with(sampling, columns))
        self._table.last_ids[on_device["sampled_rows"]] = sampled.token_ids
        self._table.last_positions[rows] = inputs.sampled_positions
        # `rows`, not `request.row`: a request finished by the previous step has lost its row.
        for sequence, first in zip(step.sampled, step.first_logits_rows or (), strict=False):
            if sequence.drafts is not None:  # the host will know the next id and send it
                self._table.last_positions[rows[first]] = -1
        if "penalised" in on_device:
            chosen = on_device["penalised"]
            history_rows = on_device["sampled_rows"][chosen]
            positions = columns["positions"][chosen]
            self._sampling.history.append(history_rows, positions, sampled.token_ids[chosen])
        wanted = {"token_ids": sampled.token_ids, "status": sampled.status}
        if self._sampling.may_conflict[rows].any():
            wanted["is_unusable"] = ~(logits < np.inf).all(axis=1)  # some are NaN or inf
        if sampling.num_logprobs is not None:
            step.counts = [s.request.spec.num_logprobs for s in step.sampled]
            xp = self.model.device.xp
            wanted |= {
                "logprobs": sampled.logprobs,
                "top_ids": sampled.top_ids,
                "top_logprobs": sampled.top_logprobs,
                "ranks": ranks_of(xp, logits, sampled.token_ids),
            }
        step.tokens = DeviceToHostCopy(self.model.device, wanted)

    def _apply_processors(self, step: LaunchedStep, logits: Any, inputs: StepInputs) -> None:
        """Apply logits processors to the rows of requests that use them."""
        for index in np.flatnonzero(self._sampling.has_processors[inputs.sampled_rows]).tolist():
            request = inputs.sampled[index].request
            if request.is_finished:  # finished by the previous step, after this one was launched
                continue
            processors = request.spec.params.logits_processors or ()
            output_ids = request.output_token_ids
            path = inputs.paths[index] if inputs.paths is not None else ()
            given = [*output_ids, *path] if path else output_ids
            why = apply_processors(processors, given, logits[index])
            if why:
                step.note_failure(inputs, index, why)

    # ---- read

    def _read_tokens(self, step: LaunchedStep, arrays: dict[str, Any], result: StepResult) -> None:
        if step.first_logits_rows is not None:
            self._read_drafted(step, step.first_logits_rows, arrays, result)
            return
        token_ids = arrays["token_ids"].tolist()
        sampled = step.sampled
        result.token_ids = {s.request: [i] for s, i in zip(sampled, token_ids, strict=True)}
        for index in np.flatnonzero(arrays["status"]).tolist():
            request = sampled[index].request
            result.failed.setdefault(request, _no_sample(request.spec, arrays, index))
        for request in result.failed:
            result.token_ids.pop(request, None)
        for index, count in enumerate(step.counts):
            request = sampled[index].request
            if count is not None and request not in result.failed:
                entries = logprob_entries(arrays, [index], [token_ids[index]], count)
                result.logprobs[request] = entries

    def _read_drafted(
        self,
        step: LaunchedStep,
        first_logits_rows: Sequence[int],
        arrays: dict[str, Any],
        result: StepResult,
    ) -> None:
        """Read a step with drafts: each sequence gets its accepted drafts plus one token.

        Where no token can be sampled behind accepted drafts, it gets only these.
        """
        all_ids = arrays["token_ids"].tolist()
        status = arrays["status"].tolist()
        has_failures = any(status) or bool(step.failed_rows)
        is_penalised = self._sampling.is_penalised
        moves: list[tuple[int, int]] = []
        counts = step.counts or [None] * len(step.sampled)
        for sequence, first, count in zip(step.sampled, first_logits_rows, counts, strict=True):
            request = sequence.request
            drafts = sequence.drafts
            accepted = [0]
            if drafts is not None:
                accepted = drafts.accepted_rows(all_ids[first : first + 1 + len(drafts)])
                if drafts.parents is not None:
                    moves += self._slot_moves(sequence, drafts.moves(accepted))
            if request in result.failed:
                continue
            for index, row in enumerate(accepted) if has_failures else ():
                why = step.failed_rows.get(first + row)
                if not why and status[first + row]:
                    why = _no_sample(request.spec, arrays, first + row)
                if why:
                    result.failed[request] = why
                    accepted = accepted[:index]
                    break
            if not accepted:
                continue
            ids = result.token_ids[request] = [all_ids[first + row] for row in accepted]
            if count is not None:
                rows = [first + row for row in accepted]
                result.logprobs[request] = logprob_entries(arrays, rows, ids, count)
            if drafts is not None and request.row >= 0 and is_penalised[request.row]:
                self._sampling.history.write(request.row, sequence.num_reached_tokens, ids)
        if moves:
            self.kv_cache.move_slots(*zip(*moves, strict=True))

    def _slot_moves(
        self, sequence: ScheduledSequence, moves: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Return (source, target) slots of the accepted drafts whose keys must move."""
        row = sequence.request.row
        if not moves or row < 0:  # without a row it has ended or will be recomputed
            return []
        positions = np.array(moves) + sequence.num_reached_tokens
        blocks = self._table.block_tables[row, positions // self._block_size].astype(np.int64)
        slots = blocks * self._block_size + positions % self._block_size
        return [(source, target) for source, target in slots.tolist()]


def _use_once(device: Device) -> None:
    """Run what CuPy compiles when it is first used, so that no step waits for it.

    That is the indexing for penalties and the ranks for log-probabilities; see `_sample`.
    """
    xp = device.xp
    history = HistoryTable(2, device)
    for count in (1, 2):  # CuPy has other kernels for one id, row or column
        history.assign(0, [0] * count, count)
        rows = xp.arange(count, dtype=np.int64)
        ids = xp.zeros(count, np.int32)
        history.append(rows[rows], rows[rows], ids[rows])
        for length in (1, 3):
            history.gather(rows, length)[rows, xp.zeros_like(rows)] = ids
        ranks_of(xp, xp.zeros((count, 4), np.float32), ids)


def note_replayed(step: LaunchedStep, tokens: DeviceToHostCopy) -> LaunchedStep:
    """Add the results of a graph to a step."""
    output = step.output
    step.sampled = output.sequences
    step.tokens = tokens
    if output.query_len > 1:
        step.first_logits_rows = [
            (index + 1) * output.query_len - s.num_logits
            for index, s in enumerate(output.sequences)
        ]
    return step


def _sampling_arrays(inputs: StepInputs, sampling: SamplingBatch) -> dict[str, IntArray]:
    """Return the arrays `_sample` needs; those in `sampling` are named "sampling.<name>"."""
    arrays = {f"sampling.{n}": a for n, a in _arrays(sampling).items()}
    if sampling.history_lens is not None:
        arrays |= history_indices(inputs, sampling.history_lens)
    return arrays | {"sampled_rows": inputs.sampled_rows}


def _indices_with(batch: ForwardBatch, parts: Sequence[PromptPart]) -> dict[str, Any]:
    """Return `logits_indices` extended by the prompt tokens to score; {} if there are none."""
    if not parts:
        return {}
    wanted = [batch.logits_indices, *(part.rows for part in parts)]
    return {"logits_indices": np.concatenate(wanted)}


def _with(batch: BatchT, arrays: Mapping[str, Any]) -> BatchT:
    """Return `batch` with `arrays` replaced; ten times as fast as `dataclasses.replace`."""
    other = object.__new__(type(batch))
    vars(other).update(vars(batch), **arrays)
    return other


def _arrays(batch: ForwardBatch | SamplingBatch) -> dict[str, Any]:
    """Return the NumPy arrays in `batch`, by name."""
    return {name: value for name, value in vars(batch).items() if isinstance(value, np.ndarray)}
