"""Driver of a tensor-parallel model: rank 0 samples, the workers repeat its steps.

Rank 0 holds the engine. It announces each operation on the model or the KV cache in one message
through shared memory, then executes it on its own shard; the workers (`parallel/rank.py`) execute
it on theirs. Inside the model all ranks meet in collectives. So scheduling, grammars,
log-probabilities and drafts need no multi-rank code.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from os import PathLike
from typing import Any

import numpy as np

from engine.cache.array_cache import Cache
from engine.cache.kv_cache import KVCache, KVGeometry, quantized_kv_dtype
from engine.cache.move_arrays import moves_to_arrays
from engine.cache.swap import SwapSpace
from engine.checks import shown
from engine.config import ModelConfig
from engine.device import Device, resolve_device
from engine.distributed.messages import Messages, pack, to_text
from engine.distributed.processes import RankProcesses
from engine.dtypes import np_dtype
from engine.engine_config import EngineConfig
from engine.errors import ConfigError, RankError, RequestError, WeightsError
from engine.kernels._memory import address
from engine.kernels._override.places import place_of
from engine.kernels._override.scope import forbid_override
from engine.kernels._override.table import Overrides
from engine.layers.batch import ForwardBatch
from engine.layers.collectives import Collectives
from engine.layers.token_ids import checked_sequence
from engine.loading.config_json import config_to_json
from engine.loading.download import resolve_model
from engine.loading.load_config import expert_count
from engine.loading.lora import LoraAdapter
from engine.loading.model_config import load_config
from engine.loading.page_calibration import checked_sequences
from engine.model import Model, load
from engine.models.decoder import Decoder, Pages
from engine.models.draft_heads import DraftTarget
from engine.models.sharding import local_config
from engine.models.trace import Trace
from engine.parallel.adapters import SharedAdapters
from engine.parallel.pages import SharedPages
from engine.parallel.rank import (
    ADAPTERS,
    CALIBRATE,
    CAPTURE,
    EMBED,
    FORWARD,
    GRAPH,
    LOGITS,
    MOVE_BLOCKS,
    MOVE_SLOTS,
    PREPARE,
    SCALES,
    SET_SCALES,
    TARGET,
    TRACE,
    UPDATE,
    WANTS_HIDDEN,
    WANTS_LOGITS,
    WANTS_STAGE,
    batch_to_message,
    compare_ranks,
    exchange_errors,
    make_collectives,
    num_threads,
)
from engine.runner.cuda_graph import DecodeGraphs, GraphKey
from engine.weights import ALL_LAYERS, Shard, Stage

__all__ = ["TensorParallelModel", "check_shards", "load_ranks", "plain_options"]


class DriverRank:
    """Announces rank 0's operations to the workers, and ends the group when a rank fails.

    Parameters
    ----------
    processes : RankProcesses
    collectives : Collectives
    """

    def __init__(self, processes: RankProcesses, collectives: Collectives) -> None:
        self.processes = processes
        self.collectives = collectives
        self._group = processes.group
        self._messages = Messages(processes.group)
        self._group.on_failure = collectives.abort
        self._sending = threading.Lock()

    def send(
        self, what: str, kind: int, numbers: Sequence[int] = (), arrays: Sequence[Any] = ()
    ) -> None:
        """Announce an operation to the workers; `what` names it in errors.

        Raises
        ------
        RankError
            If a rank has failed; the group has then ended.
        """
        self._group.set_doing(what)
        self.post(kind, numbers, arrays)

    def post(self, kind: int, numbers: Sequence[int], arrays: Sequence[Any] = ()) -> None:
        """Send the workers a message that is no operation of its own, from any thread.

        Raises
        ------
        RankError
            See `send`.
        """
        if self._group.is_closing:
            self.processes.close()  # waits, if the watching thread is still ending them
            raise RankError(
                f"the ranks have ended; {self._group.failure or 'the model was closed'}"
            )
        with self.together():
            self._group.check()
            with self._sending:
                self._messages.send(pack(kind, numbers, arrays))

    def adapter_errors(self, serial: int) -> dict[str, str]:
        """Wait until each worker has read an adapter; return the error of each that could not.

        Raises
        ------
        RankError
            If a rank has failed.
        """
        try:
            errors = self._group.answers(serial, "an adapter")
        except RankError:
            with self.together():  # not for Ctrl-C: the workers can go on
                raise
        return {f"rank {rank}": error for rank, error in errors.items()}

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Execute the announced operation on this rank's shard; an error ends the group.

        Raises
        ------
        RankError
            In place of any other error: the workers have begun the operation and cannot undo it.
        """
        try:
            yield
        except BaseException as error:
            text = f"rank 0 failed in {self._group.doing(0)}: {type(error).__name__}: {error}"
            self._group.failure = self._group.failure or text
            with contextlib.suppress(Exception):  # the group ends even if this fails
                self._group.on_failure()
            self.close()
            if isinstance(error, RankError) or not isinstance(error, Exception):
                raise
            raise RankError(text) from error

    def move_blocks(self, moves: Any) -> None:
        """Announce a step's block moves, unless there are none. See `Workers`."""
        arrays = moves_to_arrays(moves)
        if any(array.size for array in arrays):
            self.send("block moves", MOVE_BLOCKS, arrays=arrays)

    def move_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Announce copies of single tokens. See `Workers`."""
        arrays = [np.array(slots, np.int64) for slots in (sources, targets)]
        self.send("the moves of accepted drafts", MOVE_SLOTS, arrays=arrays)

    def check(self) -> None:
        """Verify that all ranks are alive.

        Raises
        ------
        RankError
        """
        with self.together():
            if self._group.failure:
                raise RankError(self._group.failure)
            self.collectives.check()

    def describe(self) -> str:
        """Return the current operation of each rank, as text for messages."""
        group = self._group
        return "".join(f"; rank {r} is in: {group.doing(r)}" for r in range(group.size))

    def close(self) -> None:
        """End the workers."""
        self.processes.close()
        self.collectives.close()


class TensorParallelModel(Model):
    """Rank 0's shard of a model, which announces each of its steps to the workers.

    Its steps use pages that exist on all ranks: its engine's, and pages built by `make_cache`.

    Parameters
    ----------
    model : Model
        Rank 0's shard.
    driver : DriverRank
    """

    def __init__(self, model: Model, driver: DriverRank) -> None:
        super().__init__(model.decoder, model.load_config, model.source)
        self.driver = driver
        self.num_ranks = driver.collectives.size
        self._pages: KVCache | None = None  # the engine's cache
        self._shared = SharedPages(driver.send)
        self._adapters = SharedAdapters(partial(driver.post, ADAPTERS), driver.adapter_errors)
        self._hidden: Any = None  # hidden states of the last step, for `logits`
        self._num_steps = 0

    def share_pages(self, kv_cache: KVCache, swap: SwapSpace | None) -> None:
        """Let all ranks allocate the same pages."""
        self._share(kv_cache, swap)
        kv_cache.workers = self.driver
        self._pages = kv_cache

    def make_cache(self, geometry: KVGeometry, batch_size: int, max_tokens: int) -> Cache:
        """Return an empty `Cache` with pages on all ranks. See `Model.make_cache`.

        Once it is closed or garbage-collected, the workers free their pages before the next step.
        """
        cache = super().make_cache(geometry, batch_size, max_tokens)
        self._shared.free_closed()
        self._share(cache.kv)
        return cache

    def prepare_pages(self, dtype: str) -> str:
        """Load kernels and measure scales of a quantized KV cache on all ranks. See `Model`."""
        self.driver.send("preparing pages", PREPARE, arrays=[to_text(dtype)])
        with self.driver.together():
            # Steps that measure scales are not announced: the workers run them on their own.
            return self.local_model.prepare_pages(dtype)

    def forward(self, batch: ForwardBatch, kv_pages: Pages) -> Any:
        """Compute one step on all ranks; see `Decoder.forward`."""
        self._announce(batch, kv_pages, WANTS_LOGITS)
        with self.driver.together():
            return super().forward(batch, kv_pages)

    def hidden_states(self, batch: ForwardBatch, kv_pages: Pages) -> Any:
        """Compute one step up to the final norm on all ranks; see `Decoder.hidden_states`."""
        self._announce(batch, kv_pages, WANTS_HIDDEN)
        with self.driver.together():
            self._hidden = super().hidden_states(batch, kv_pages)
        return self._hidden

    def run_stage(self, batch: ForwardBatch, kv_pages: Pages) -> tuple[Any, Any]:
        """Compute the layers of a pipeline stage on all ranks; see `Decoder.run_stage`."""
        self._announce(batch, kv_pages, WANTS_STAGE)
        with self.driver.together():
            return super().run_stage(batch, kv_pages)

    def logits(self, hidden: Any) -> Any:
        """Return the logits (R, V) of hidden states (R, N), computed on all ranks.

        The workers hold the hidden states of the last step; any others are broadcast.
        """
        first = self._first_row(hidden)
        self.driver.send("logits", LOGITS, [first, hidden.shape[0]])
        with self.driver.together():
            if first < 0:
                self.driver.collectives.broadcast(hidden)
            return super().logits(hidden)

    def trace(self, token_ids: Any) -> Trace:
        """Trace a sequence on all ranks. See `Model.trace`."""
        if self.device.is_cuda:
            return super().trace(token_ids)  # raises: tracing needs the CPU
        ids = checked_sequence(token_ids, self.config.vocab_size)
        self.driver.send("a trace", TRACE, arrays=[ids])
        with self.driver.together():
            return super().trace(ids)

    def kv_scales_of(self, kv_cache_dtype: str) -> Any:
        """Return the scales of the heads of all ranks. See `Model.kv_scales_of`."""
        name = quantized_kv_dtype(kv_cache_dtype)
        self.driver.send("gathering scales", SCALES, arrays=[to_text(name)])
        with self.driver.together():
            return super().kv_scales_of(name)

    def set_kv_scales(self, scales: Any, kv_cache_dtype: str = "fp8") -> None:
        """Set the scales on all ranks. See `Model.set_kv_scales`."""
        super().set_kv_scales(scales, kv_cache_dtype)
        arrays = [np.asarray(scales, np.float32), to_text(kv_cache_dtype)]
        self.driver.send("setting scales", SET_SCALES, arrays=arrays)

    def calibrate_kv_scales(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Calibrate the scales on all ranks. See `Model.calibrate_kv_scales`."""
        sequences = checked_sequences(self, token_ids)
        self.driver.send("calibrating scales", CALIBRATE, arrays=sequences)
        with self.driver.together():
            self.local_model.calibrate_kv_scales(sequences)

    def update_weights(self, source: Any) -> tuple[str, ...]:
        """Write new weights on all ranks; each reads its part of the files. See `Model`.

        Once it returns, no rank reads the files any more.

        Raises
        ------
        WeightsError
            If `source` is a mapping: arrays are not sent to other ranks. Or if a rank cannot use
            the files; then no rank writes anything.
        RankError
            If a rank fails while it writes.
        """
        if isinstance(source, Mapping):
            raise WeightsError(
                f"source must be a folder with tensor_parallel_size={self.num_ranks}: arrays are "
                "not sent to other ranks; got a mapping"
            )
        update = self.opened_update(source)
        path = os.path.abspath(source)  # this process may have changed its folder since the start
        self.driver.send("new weights", UPDATE, arrays=[to_text(path)])
        with self.driver.together():
            errors = exchange_errors(self.driver.processes.group, "")
            if not errors:
                names = self.write_update(update)
                exchange_errors(self.driver.processes.group, "")
        if errors:
            who, error = next(iter(errors.items()))
            raise WeightsError(f"{error} ({who})")
        return names

    @property
    def captured_adapter_kinds(self) -> tuple[str, ...]:
        """(): all ranks capture a graph with adapters together, after its first use."""
        return ()

    def read_adapter(self, name: str, path: str | PathLike[str]) -> LoraAdapter:
        """Read an adapter on all ranks, each its part, while steps go on. See `Model`."""
        adapter = super().read_adapter(name, path)
        self._adapters.share(adapter)
        return adapter

    def write_adapter(self, adapter: LoraAdapter, slot: int) -> None:
        """Copy an adapter to a slot on all ranks."""
        super().write_adapter(adapter, slot)  # first: it checks the slot
        self._adapters.write(adapter, slot)

    @property
    def draft_target(self) -> DraftTarget:
        """The target of draft heads, which only rank 0 holds."""
        return _DraftTarget(self.decoder, self._embed, self.logits)

    @property
    def local_model(self) -> Model:
        """This rank's shard, whose steps are not announced."""
        shard = Model(self.decoder, self.load_config, self.source)
        shard.num_stages = self.num_stages
        return shard

    def share_graphs(self, graphs: DecodeGraphs, max_model_len: int, max_draft_tokens: int) -> None:
        """Let the workers capture the same graphs, and replay them when rank 0 does."""
        assert self._pages is not None
        table = graphs.table_shape
        size = self._pages.geometry.block_size
        numbers = [*table, size, max_model_len, 1, 1 + max_draft_tokens]
        layers = np.array(list(graphs.features), np.int32)
        self.driver.send("capturing graphs", CAPTURE, numbers, [layers])
        graphs.on_send = self._announce_graph

    def describe_ranks(self) -> str:
        """Return the current operation of each rank, as text for messages."""
        return self.driver.describe()

    def check_ranks(self) -> None:
        """Verify that all ranks are alive.

        Raises
        ------
        RankError
            Names the first rank that failed, with its last words.
        """
        self.driver.check()

    def close(self) -> None:
        """Free the weights, and end the workers."""
        self.driver.close()
        super().close()

    def _embed(self, token_ids: Any) -> Any:
        """Look up token ids on all ranks."""
        self.driver.send("an embedding of drafts", EMBED, [token_ids.shape[0]])
        with self.driver.together():
            return self.decoder.embed(token_ids)

    def _share(self, kv_cache: KVCache, swap: SwapSpace | None = None) -> None:
        self._shared.share(kv_cache, swap)
        with self.driver.together():
            self.driver.collectives.barrier("pages")

    def _announce(self, batch: ForwardBatch, kv_pages: Pages, wants: int) -> None:
        forbid_override(self.num_ranks)
        self._shared.free_closed()
        self._adapters.free_dropped()
        which = self._shared.number_of(kv_pages)
        host = batch.on_host or batch
        self._num_steps += 1
        has_delta = int(batch.entering is not None and batch.entering[0] is not None)
        numbers, arrays = batch_to_message(host)
        numbers = [self._num_steps, batch.num_tokens, which, wants, has_delta, *numbers]
        arrays.append(np.array(list(batch.features or ()), np.int32))
        what = f"step {self._num_steps} ({batch.num_tokens} tokens)"
        self.driver.send(what, FORWARD, numbers, arrays)

    def _announce_graph(self, key: GraphKey, staged: Any) -> None:
        self._num_steps += 1
        numbers = [key.size, key.max_context_len, key.query_len, int(key.is_tree)]
        numbers += [int(bool(key.adapters)), int(key.has_delta)]
        what = f"step {self._num_steps} ({key.num_tokens} tokens, as a graph)"
        self.driver.send(what, GRAPH, [self._num_steps, *numbers], [staged])

    def _first_row(self, hidden: Any) -> int:
        """Return the first row of `hidden` in the last step's hidden states; -1 if not in them.

        Raises
        ------
        RequestError
            If it does not have the shape or dtype of hidden states.
        """
        width = self.config.hidden_size
        dtype = np_dtype(self.dtype)
        last = self._hidden
        if hidden.ndim != 2 or hidden.shape[1] != width or hidden.dtype != dtype:
            raise RequestError(
                f"hidden must be {dtype} (R, {width}), as hidden_states returns; got "
                f"{hidden.dtype} {hidden.shape}"
            )
        if last is not None and hidden.flags.c_contiguous:
            first, rest = divmod(address(hidden) - address(last), width * dtype.itemsize)
            if not rest and first >= 0 and first + hidden.shape[0] <= last.shape[0]:
                return int(first)
        return -1


class _DraftTarget:
    """`DraftTarget` of a draft head on rank 0: embedding and output layer run on all ranks.

    Features and the final norm are the same on every rank.

    Parameters
    ----------
    decoder : Decoder
        Rank 0's shard.
    embed : callable
        Looks up token ids (T,) on all ranks: (T, N).
    logits : callable
        Returns the logits (R, V) of hidden states (R, N), computed on all ranks.
    """

    def __init__(
        self, decoder: Decoder, embed: Callable[[Any], Any], logits: Callable[[Any], Any]
    ) -> None:
        self.embed = embed
        self.logits = logits
        self.num_layers = decoder.num_layers
        self.final_norm = decoder.final_norm
        self.max_model_len = decoder.max_model_len
        self.xp = decoder.xp


def load_ranks(
    model: Any,
    config: EngineConfig,
    loading: Mapping[str, Any],
    *,
    stage: Stage = ALL_LAYERS,
    gpus: Sequence[int] | None = None,
) -> TensorParallelModel:
    """Start the workers, load the model in all ranks, and return rank 0's shard.

    Parameters
    ----------
    model : str or path
    config : EngineConfig
        `tensor_parallel_size` and `collective_timeout` are read.
    loading : mapping
        Keywords of `load`.
    stage : Stage
        The layers that are divided among the ranks.
    gpus : sequence of int, optional
        GPU of each rank; by default the first GPUs.

    Raises
    ------
    ConfigError, DeviceError, DownloadError
        If the model or an option cannot be used.
    RankError
        If a rank fails; the message includes its last words.
    """
    size = config.tensor_parallel_size
    given = dict(loading)
    place, _ = resolve_device(given.get("device", "auto"))
    devices = _devices(place, given.get("device", "auto"), size, gpus)
    name, plain = plain_options(model, given)
    check_shards(name, given, size, [stage])
    options = {"model": name, "devices": devices, "loading": plain, "stage": astuple(stage)}
    processes = RankProcesses(
        TARGET,
        size,
        options,
        timeout=config.collective_timeout,
        num_threads=None if place.is_cuda else num_threads(size * config.pipeline_parallel_size),
    )
    try:
        compare_ranks(processes.group, name, plain)
        first, _ = resolve_device(devices[0])
        collectives = make_collectives(processes.group, first)
        driver = DriverRank(processes, collectives)
        processes.group.set_doing("loading")
        if gpus is not None and place.is_cuda:
            given["device"] = first
        own = load(name, **given, collectives=collectives, stage=stage)
        processes.group.set_ready()
        processes.group.wait_until_ready(float("inf"))
        loaded = TensorParallelModel(own, driver)
        if stage == ALL_LAYERS:
            loaded.try_kernels()
        return loaded
    except BaseException:
        processes.close()
        raise


def check_shards(name: str, loading: Mapping[str, Any], size: int, stages: Iterable[Stage]) -> None:
    """Verify, before starting any process, that the model can be divided: by heads, by features.

    Raises
    ------
    ConfigError
        If it cannot, or has fewer experts than ranks with whole experts.
    """
    config = loading.get("config")
    config = load_config(name) if config is None else config
    if not isinstance(config, ModelConfig):
        return  # `load` raises the error
    has_whole_experts = bool(loading.get("enable_expert_parallel"))
    for stage in stages:
        shard = Shard(0, size, bool(loading.get("deterministic")), has_whole_experts, stage)
        if has_whole_experts:
            shard.cut_experts(expert_count(config))
        local_config(config, shard)


def _devices(place: Device, given: Any, size: int, gpus: Sequence[int] | None) -> list[str]:
    """Return the device of each rank.

    Raises
    ------
    ConfigError
        If the host has too few GPUs, or the option names one.
    """
    if not place.is_cuda:
        return ["cpu"] * size
    if given not in ("auto", "cuda"):
        raise ConfigError(
            f"device must be 'cpu', 'cuda' or 'auto' with tensor_parallel_size={size}: ranks take "
            f"cuda:0, cuda:1, ...; got {shown(given)}"
        )
    gpus = range(size) if gpus is None else gpus
    count = place.xp.cuda.runtime.getDeviceCount()
    if count <= max(gpus):
        raise ConfigError(f"tensor_parallel_size must be at most {count}, the GPUs; got {size}")
    return [f"cuda:{gpu}" for gpu in gpus]


def plain_options(model: Any, loading: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a model's path, and the keywords of `load` as JSON values.

    "device" and "progress" are left out: they differ between processes.
    """
    is_dummy = loading.get("config") is not None and loading.get("load_format") == "dummy"
    name = str(model) if is_dummy else str(resolve_model(model).path)
    plain = {key: value for key, value in loading.items() if key not in ("device", "progress")}
    if isinstance(plain.get("config"), ModelConfig):
        plain["config"] = config_to_json(plain["config"])
    if plain.get("kernels"):
        plain["kernels"] = Overrides.from_option(plain["kernels"]).places()
    pattern = plain.get("attention_pattern")
    if pattern is not None and not isinstance(pattern, str):
        plain["attention_pattern"] = place_of("attention_pattern", pattern)
    dtype = plain.get("dtype", "auto")
    if not isinstance(dtype, str):
        plain["dtype"] = np.dtype(dtype).name
    return name, plain
