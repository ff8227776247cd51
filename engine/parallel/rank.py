"""Worker of a tensor-parallel group: ranks 1, 2, ... execute rank 0's announcements."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine._version import __version__
from engine.cache.kv_cache import KVCache, KVGeometry
from engine.cache.memory_pool import MemoryPool
from engine.cache.move_arrays import moves_from_arrays
from engine.cache.swap import SwapSpace, move_blocks
from engine.device import Device, resolve_device, to_numpy
from engine.distributed.collectives import SharedMemoryCollectives
from engine.distributed.cuda_collectives import CudaCollectives
from engine.distributed.group import Group
from engine.distributed.messages import Messages, from_text, to_text, unpack
from engine.dtypes import np_dtype
from engine.errors import RankError
from engine.layers.batch import ForwardBatch
from engine.layers.collectives import Collectives
from engine.loading.config_json import config_from_json
from engine.loading.gguf import part_paths
from engine.model import Model, load
from engine.parallel.adapters import HeldAdapters
from engine.runner.cuda_graph import GraphKey
from engine.runner.worker_graphs import WorkerGraphs
from engine.weights import Stage

__all__ = [
    "RankWorker",
    "compare_ranks",
    "exchange_errors",
    "make_collectives",
    "num_threads",
    "run",
]

TARGET = "engine.parallel.rank:run"

# Message kinds.
PREPARE, SHARE, FORWARD, LOGITS, MOVE_BLOCKS, MOVE_SLOTS, CAPTURE, GRAPH = range(8)
FREE, TRACE, SCALES, SET_SCALES, CALIBRATE, EMBED, ADAPTERS, UPDATE = range(8, 16)

# Results of a step.
WANTS_HIDDEN, WANTS_LOGITS, WANTS_STAGE = range(3)

_BATCH_NUMBERS = ("num_decodes", "max_seqlen_q", "max_context_len", "query_len")
_BATCH_ARRAYS = (
    *("positions", "rope_positions", "slot_mapping", "cu_seqlens_q", "context_lens"),
    *("block_tables", "logits_indices", "prefill_cu_seqlens_q", "tree_mask"),
    *("state_slots", "state_targets", "snapshot_slots", "snapshot_offsets", "adapter_slots"),
)


def batch_to_message(batch: ForwardBatch) -> tuple[list[int], list[Any]]:
    """Encode a batch, without its token ids, as the numbers and arrays of a message."""
    arrays = [getattr(batch, name) for name in _BATCH_ARRAYS]
    numbers = [int(getattr(batch, name)) for name in _BATCH_NUMBERS]
    return numbers, [None if array is None else to_numpy(array) for array in arrays]


def batch_from_message(token_ids: Any, numbers: list[int], arrays: list[Any]) -> ForwardBatch:
    """Rebuild a batch from token ids (T,) and the result of `batch_to_message`."""
    fields: dict[str, Any] = dict(zip(_BATCH_ARRAYS, arrays, strict=True))
    fields |= zip(_BATCH_NUMBERS, numbers, strict=True)
    return ForwardBatch(token_ids=token_ids, **fields)


def run(group: Group, options: Mapping[str, Any]) -> None:
    """Load a rank's shard of the model, and execute announcements until rank 0 ends the group.

    Parameters
    ----------
    group : Group
    options : mapping
        "model": its path; "devices": the device of each rank; "loading": keywords of `load`;
        "stage": the fields of a `Stage`.
    """
    group.set_doing("comparing files")
    compare_ranks(group, options["model"], options["loading"])
    place, _ = resolve_device(options["devices"][group.rank])
    collectives = make_collectives(group, place)
    group.set_doing("loading")
    loading = dict(options["loading"])
    if loading.get("config") is not None:
        loading["config"] = config_from_json(loading["config"])
    model = load(
        options["model"],
        device=place,
        progress=False,
        collectives=collectives,
        stage=Stage(*options["stage"]),
        **loading,
    )
    group.set_ready()
    RankWorker(group, model, collectives).run()


def pages_message(kv_cache: KVCache, swap: SwapSpace | None) -> tuple[list[int], list[Any]]:
    """Encode the sizes of a KV cache, and of its host memory, for other processes."""
    g = kv_cache.geometry
    num_host = (0, 0) if swap is None else (swap.num_blocks, swap.num_slots)
    numbers = [g.block_size, kv_cache.num_blocks, kv_cache.num_slots, *num_host]
    return numbers, [to_text(g.dtype), to_text(g.state_dtype)]


def shared_pages(
    model: Model, numbers: list[int], arrays: list[Any]
) -> tuple[KVCache, SwapSpace | None]:
    """Allocate what `pages_message` describes, for the layers and heads of `model`."""
    block_size, num_blocks, num_slots, num_host_blocks, num_host_slots = numbers
    dtypes = map(from_text, arrays)
    geometry = KVGeometry.of_model(model.config, model.dtype, block_size, *dtypes)
    pages = KVCache(geometry, num_blocks, MemoryPool(model.device), num_slots=num_slots)
    if not num_host_blocks:
        return pages, None
    return pages, SwapSpace(pages, num_host_blocks, num_slots=num_host_slots)


class RankWorker:
    """Executes rank 0's announcements on this rank's shard of the model and of the KV cache.

    Parameters
    ----------
    group : Group
    model : Model
    collectives : Collectives
    """

    def __init__(self, group: Group, model: Model, collectives: Collectives) -> None:
        self._group = group
        self._model = model
        self._collectives = collectives
        self._messages = Messages(group)
        self._pages: dict[int, KVCache] = {}  # by the number that rank 0 assigned; 0: the engine's
        self._swap: SwapSpace | None = None
        self._graphs: WorkerGraphs | None = None
        self._hidden: Any = None
        self._actions: dict[int, Callable[[list[int], list[Any]], None]] = {
            PREPARE: self._prepare,
            SHARE: self._share,
            FORWARD: self._forward,
            LOGITS: self._logits,
            MOVE_BLOCKS: self._move_blocks,
            MOVE_SLOTS: self._move_slots,
            CAPTURE: self._capture,
            GRAPH: self._graph,
            FREE: self._free,
            TRACE: self._trace,
            SCALES: self._scales,
            SET_SCALES: self._set_scales,
            CALIBRATE: self._calibrate,
            EMBED: self._embed,
            ADAPTERS: HeldAdapters(model, group.answer).follow,
            UPDATE: self._update,
        }

    def run(self) -> None:
        """Execute each message, until rank 0 ends the group (`GroupEnded`)."""
        with self._model.kernels.active():
            while True:
                self._group.set_doing("waiting for a step")
                kind, numbers, arrays = unpack(self._messages.receive())
                self._actions[kind](numbers, arrays)

    def _prepare(self, numbers: list[int], arrays: list[Any]) -> None:
        self._group.set_doing("preparing pages")
        self._model.prepare_pages(from_text(arrays[0]))

    def _share(self, numbers: list[int], arrays: list[Any]) -> None:
        self._group.set_doing("making pages")
        which, *sizes = numbers
        pages, swap = shared_pages(self._model, sizes, arrays)
        self._pages[which] = pages
        self._swap = swap or self._swap
        self._collectives.barrier("pages")

    def _free(self, numbers: list[int], arrays: list[Any]) -> None:
        for which in numbers:
            self._pages.pop(which).close()

    def _forward(self, numbers: list[int], arrays: list[Any]) -> None:
        step, num_tokens, which, wants, has_delta, *others = numbers
        *arrays, layers = arrays  # layers: indices of the layers whose input rank 0 keeps
        self._group.set_doing(f"step {step} ({num_tokens} tokens)")
        # The embedding takes rank 0's token ids: only its device may know them.
        ids = np.zeros(num_tokens, np.int32)
        batch = batch_from_message(ids, others, arrays).to(self._model.device)
        features = {layer: self._hidden_rows(num_tokens) for layer in layers.tolist()}
        batch = replace(batch, features=features)
        if not self._model.decoder.stage.is_first:
            batch = replace(batch, entering=self._entering(num_tokens, bool(has_delta)))
        pages = self._the_pages(which).layers
        if wants == WANTS_LOGITS:
            self._model.forward(batch, pages)
        elif wants == WANTS_HIDDEN:
            self._hidden = self._model.hidden_states(batch, pages)
        else:
            self._model.run_stage(batch, pages)

    def _entering(self, num_tokens: int, has_delta: bool) -> tuple[Any, Any]:
        """Return arrays to receive the activations that the previous stage sent to rank 0."""
        xp = self._model.device.xp
        shape = (num_tokens, self._model.config.hidden_size)
        residual, delta = (xp.empty(shape, np_dtype(self._model.dtype)) for _ in range(2))
        return delta if has_delta else None, residual

    def _logits(self, numbers: list[int], arrays: list[Any]) -> None:
        self._group.set_doing("logits")
        first, count = numbers
        if first >= 0:
            hidden = self._hidden[first : first + count]
        else:
            hidden = self._collectives.broadcast(self._hidden_rows(count))
        self._model.logits(hidden)

    def _embed(self, numbers: list[int], arrays: list[Any]) -> None:
        self._group.set_doing("an embedding of drafts")
        self._model.draft_target.embed(self._model.device.xp.zeros(numbers[0], np.int32))

    def _hidden_rows(self, count: int) -> Any:
        """Return a new array (count, N) for hidden states or a residual stream."""
        model = self._model
        return model.device.xp.empty((count, model.config.hidden_size), np_dtype(model.dtype))

    def _trace(self, numbers: list[int], arrays: list[Any]) -> None:
        self._group.set_doing("a trace")
        self._model.trace(arrays[0])

    def _scales(self, numbers: list[int], arrays: list[Any]) -> None:
        self._group.set_doing("gathering scales")
        self._model.kv_scales_of(from_text(arrays[0]))

    def _set_scales(self, numbers: list[int], arrays: list[Any]) -> None:
        self._group.set_doing("setting scales")
        self._model.set_kv_scales(arrays[0], from_text(arrays[1]))

    def _calibrate(self, numbers: list[int], arrays: list[Any]) -> None:
        self._group.set_doing("calibrating scales")
        self._model.calibrate_kv_scales(arrays)

    def _update(self, numbers: list[int], arrays: list[Any]) -> None:
        self._group.set_doing("reading new weights")
        error = ""
        try:
            update = self._model.opened_update(from_text(arrays[0]))
        except Exception as failure:
            error = str(failure) or type(failure).__name__
        if exchange_errors(self._group, error):
            return
        self._model.write_update(update)
        exchange_errors(self._group, "")

    def _move_blocks(self, numbers: list[int], arrays: list[Any]) -> None:
        move_blocks(self._the_pages(), self._swap, moves_from_arrays(arrays))

    def _move_slots(self, numbers: list[int], arrays: list[Any]) -> None:
        self._the_pages().move_slots(*(array.tolist() for array in arrays))

    def _capture(self, numbers: list[int], arrays: list[Any]) -> None:
        self._group.set_doing("capturing graphs")
        pages = self._the_pages()
        self._graphs = WorkerGraphs.of_numbers(
            self._model,
            pages.layers,
            numbers,
            arrays[0].tolist(),  # rank 0's layers: every rank takes part in their all-reduce
            has_states=pages.num_slots > 0,
        )
        self._graphs.capture()

    def _graph(self, numbers: list[int], arrays: list[Any]) -> None:
        step, size, max_context_len, query_len, is_tree, has_adapters, has_delta = numbers
        self._group.set_doing(f"step {step} ({size * query_len} tokens, as a graph)")
        if self._graphs is None:
            raise RankError(f"rank {self._group.rank} was told of a graph before it had any")
        kinds = self._model.adapter_kinds if has_adapters else ()
        key = GraphKey(size, max_context_len, query_len, bool(is_tree), kinds, bool(has_delta))
        self._graphs.replay_staged(key, arrays[0])

    def _the_pages(self, which: int = 0) -> KVCache:
        if which not in self._pages:
            raise RankError(f"rank {self._group.rank} was told of a step before it had pages")
        return self._pages[which]


def make_collectives(group: Group, device: Device) -> Collectives:
    """Return the collectives of a rank on this device."""
    shared = SharedMemoryCollectives(group)
    if not device.is_cuda:
        return shared
    device.activate()
    return CudaCollectives(group.rank, group.size, shared.exchange, timeout=group.timeout)


def exchange_errors(group: Group, error: str) -> dict[str, str]:
    """Wait for all ranks, which may read files; return each error but "" by its rank's name."""
    data = error.encode("utf-8", "replace")[:4096]
    texts = SharedMemoryCollectives(group).exchange(data, math.inf)
    return {
        f"rank {rank}": text.decode("utf-8", "replace") for rank, text in enumerate(texts) if text
    }


def compare_ranks(group: Group, model: str, loading: Mapping[str, Any]) -> None:
    """Verify that all ranks have the same program, files and options.

    Raises
    ------
    RankError
        If a rank differs from rank 0; the message names the rank and the difference.
    """
    own = fingerprint(model, loading)
    answers = SharedMemoryCollectives(group).exchange(json.dumps(own).encode(), math.inf)
    first = json.loads(answers[0])
    for rank, answer in enumerate(answers):
        theirs = json.loads(answer)
        for name, value in first.items():
            if theirs.get(name) != value:
                raise RankError(
                    f"rank {rank} differs from rank 0 in {name}: {theirs.get(name)}, not {value}"
                )


def fingerprint(model: str, loading: Mapping[str, Any]) -> dict[str, str]:
    """Return the properties that must be equal on all ranks: version, files and options."""
    path = Path(model)
    files = sorted(path.iterdir()) if path.is_dir() else part_paths(path)
    files = [file for file in files if file.exists()]
    found = {"engine's version": __version__, "options": json.dumps(loading, sort_keys=True)[:2000]}
    for file in files:
        if file.suffix in (".safetensors", ".gguf"):
            found[f"the size of {file.name}"] = str(file.stat().st_size)
        elif file.name in ("config.json", "model.safetensors.index.json"):
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            found[f"the content of {file.name}"] = digest[:16]
    return found


def num_threads(size: int) -> int:
    """Return the number of threads per process if `size` processes share this machine."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, cores // size)
