"""The driver of a pipeline: this process holds the engine and the last stage, and samples.

Every step is announced to all stages when it is launched. They compute their layers in turn and
pass on the activations; the last stage computes its layers and samples when the step is due.
Meanwhile the earlier stages work on later steps, of other requests. So logits never travel, and a
step's token ids reach the first stage with the announcement.

The GPUs of one host are linked (`engine.distributed.links`): activations and sampled ids go from
device to device, and the last stage, too, launches a step when it is announced.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from importlib import import_module
from os import PathLike
from typing import Any

import numpy as np

from engine import env
from engine.cache.kv_cache import KVCache
from engine.cache.move_arrays import NUM_MOVE_ARRAYS, moves_to_arrays
from engine.cache.state_plan import CacheSizes
from engine.cache.swap import SwapSpace
from engine.checks import shown
from engine.config import ModelConfig
from engine.core.resolve import can_link
from engine.device import Device, resolve_device, to_numpy
from engine.distributed.connection import parse_address
from engine.distributed.links import (
    NO_LAST_IDS,
    LastIds,
    Links,
    SlotShape,
    join_links,
    open_links,
)
from engine.distributed.messages import from_text, to_text
from engine.engine_config import EngineConfig
from engine.errors import ConfigError, RankError, RequestError
from engine.layers.batch import ForwardBatch
from engine.loading.download import resolve_model
from engine.loading.lora import LoraAdapter
from engine.loading.model_config import load_config
from engine.model import Model, load
from engine.models.decoder import Pages, caches_address
from engine.models.draft_heads import DraftTarget
from engine.models.trace import Trace
from engine.parallel.activations import from_wire
from engine.parallel.adapters import SharedAdapters
from engine.parallel.rank import batch_to_message, fingerprint, num_threads, pages_message
from engine.parallel.stage import (
    ADAPTERS,
    CAPTURE,
    DROP,
    EXPERTS,
    FEATURES,
    GRAPH,
    JOIN,
    OPEN,
    PLAN,
    PREPARE,
    SHARE,
    STEP,
)
from engine.parallel.stage_group import StageGroup
from engine.parallel.tensor import check_shards, load_ranks, plain_options
from engine.runner.cuda_graph import DecodeGraphs
from engine.runner.features import Features
from engine.runner.stage_graphs import StagedStep
from engine.speculative.config import HEAD_METHODS
from engine.weights import Stage

__all__ = ["PipelinedModel", "load_stages"]

_LOCAL_SECONDS = 120.0  # startup timeout of stages on this host, which may be busy
_REMOTE_SECONDS = 600.0  # startup timeout of stages started by Ray or a user
_LOG = logging.getLogger("engine")
_NO_MOVES = [np.zeros(0, np.int32)] * NUM_MOVE_ARRAYS


class PipelinedModel(Model):
    """The last stage of a model, which announces each of its steps to the other stages.

    It serves an engine: its steps use that engine's pages only.

    Parameters
    ----------
    own : Model
        This stage's layers, or rank 0's shard of them.
    group : StageGroup
    can_link : bool
        Whether the stages are GPUs of one host.

    Attributes
    ----------
    links : Links or None
        See `link`.
    received_features : mapping of int to array
        Layer of another stage -> its input in the last step computed here; see `keep_features`.
    """

    def __init__(self, own: Model, group: StageGroup, *, can_link: bool) -> None:
        super().__init__(own.decoder, own.load_config, own.source)
        self.own = own
        self.group = group
        self.links: Links | None = None
        self._can_link = can_link
        self.num_ranks = own.num_ranks
        self.num_stages = own.num_stages = group.num_stages
        self._end = weakref.finalize(self, group.end)  # runs at garbage collection too
        self._pages: KVCache | None = None
        self._announced: deque[tuple[int, int]] = deque()  # (step, tokens) not yet computed here
        self._slot_moves: list[Any] = []  # not yet announced; (sources, targets) each
        self._num_steps = 0
        self._feature_layers: list[int] = []  # layers of other stages whose inputs they send
        self.received_features: Features = {}  # those of the last step
        self._adapters = SharedAdapters(partial(group.post, ADAPTERS), group.adapter_errors)

    # ---- links

    def link(self, num_rows: int, max_tokens: int) -> bool:
        """Let the stages write into each other's memory, if they are GPUs of one host.

        Call it once the layers of `keep_features` are known, before graphs are captured.

        Parameters
        ----------
        num_rows : int
            Length of `RequestRows.last_ids`.
        max_tokens : int
            Maximum tokens per step.

        Returns
        -------
        bool
            False if they cannot; then messages carry activations and ids.
        """
        if not self._can_link:
            return False
        features = len(self._feature_layers)
        sizes = self.num_stages, features, max_tokens, self.config.hidden_size, self.dtype
        links, error = open_links(self.device, SlotShape.of(*sizes), has_previous=True)
        numbers = [num_rows, max_tokens, features]
        answers = self.group.ask("opening links", OPEN, numbers)
        plain = [count for _, [count], _ in answers]
        activations, ids = ([bytes(arrays[i]) for _, _, arrays in answers] for i in range(2))
        errors = [from_text(arrays[2]) for _, _, arrays in answers]
        if not any([error, *errors]):
            assert links is not None
            following = [*activations[1:], links.handles[0]]
            answers = self.group.ask(
                "joining links", JOIN, plain, [np.frombuffer(h, np.uint8) for h in following]
            )
            errors = [from_text(array) for _, _, [array] in answers]
            error = join_links(links, b"", ids[0], min(plain))
        if reason := next(filter(None, [error, *errors]), ""):
            _LOG.warning("activations go through host memory, since %s", reason)
            if links is not None:
                links.disconnect()
            for are_unmapped in (0, 1):
                self.group.ask("dropping links", DROP, [are_unmapped])
            if links is not None:
                links.close()
            return False
        assert links is not None
        self.links = links
        self.group.on_ending = links.abort
        return True

    # ---- steps

    def announce(
        self, moves: Any, batch: ForwardBatch | None, last_ids: LastIds = NO_LAST_IDS
    ) -> None:
        """Announce a step to the other stages: its block moves, and its batch if it has one.

        This stage executes both afterwards, in the same order.

        Parameters
        ----------
        moves : Moves
        batch : ForwardBatch or None
            On the host, with all token ids but those that the device holds.
        last_ids : LastIds
        """
        self._announce(moves_to_arrays(moves), batch, last_ids)

    def announce_graph(self, moves: Any, staged: StagedStep, posted: int = 0) -> None:
        """Announce a step that all stages compute with graphs. See `announce`."""
        key = staged.key
        numbers = [key.size, key.max_context_len, key.query_len, int(key.is_tree), posted]
        step = self._next_step(staged.num_tokens)
        what = f"step {step} ({staged.num_tokens} tokens, as a graph)"
        arrays = [*self._all_moves(moves_to_arrays(moves)), staged.data]
        self.group.send(what, GRAPH, [step, staged.num_tokens, *numbers], arrays)

    def announce_slot_moves(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Announce moves of single tokens' pages, with the next step. See `KVCache.move_slots`.

        The steps in flight contain other requests, so it does not matter that a stage computes them
        before the moves.
        """
        self._slot_moves.append(np.array([sources, targets], np.int64))

    def forward(self, batch: ForwardBatch, kv_pages: Pages) -> Any:
        """Compute the oldest announced step in this stage; without one, announce `batch` first."""
        self._check_pages(kv_pages)
        with self.together():
            logits = self.own.forward(self._entered(batch), kv_pages)
        self._add_features(batch)
        return logits

    def hidden_states(self, batch: ForwardBatch, kv_pages: Pages) -> Any:
        """Compute a step up to the final norm. See `forward`."""
        self._check_pages(kv_pages)
        with self.together():
            hidden = self.own.hidden_states(self._entered(batch), kv_pages)
        self._add_features(batch)
        return hidden

    def logits(self, hidden: Any) -> Any:
        """Return the logits of rows of the last `hidden_states`."""
        with self.together():
            return self.own.logits(hidden)

    @property
    def has_activations(self) -> bool:
        """Whether the previous stage has sent the activations of another step."""
        return self.group.has_activations

    def entering(self, num_tokens: int, num_padded: int | None = None) -> tuple[Any, Any]:
        """Return the previous stage's (delta, residual) of the oldest announced step.

        `num_padded`: tokens that a graph computes, if it is one.

        Raises
        ------
        RankError
            If that step does not have `num_tokens` tokens, or a stage has failed.
        """
        step, count = self._announced[0]
        if count != num_tokens:
            raise RankError(f"step {step} has {count} tokens; got {num_tokens}")
        self.device.activate()
        if self.links is None:
            sent = self.group.activations(step)
            received = from_wire(self.device, self.dtype, sent)
        else:
            received = self.links.receive(step, num_tokens, num_padded or num_tokens)
            # A draft head reads features when the slot belongs to a later step.
            received[2:] = [array.copy() for array in received[2:]]
        self._announced.popleft()
        delta, residual, *features = received
        self.received_features = dict(zip(self._feature_layers, features, strict=True))
        return delta, residual

    def keep_features(self, layers: Sequence[int]) -> None:
        """Let the other stages send the inputs of these layers, ascending, with each later step."""
        self._feature_layers = list(layers)
        if layers:
            self.group.send("keeping the inputs of layers", FEATURES, layers)

    @property
    def draft_target(self) -> DraftTarget:
        """Parts of the model that draft heads use; this stage holds the embedding for them."""
        return self.own.draft_target

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Execute a step in this stage; an error ends all stages.

        Raises
        ------
        RankError
            In place of any other error: the other stages cannot undo a step.
        """
        try:
            yield
        except BaseException as error:
            stage = self.num_stages - 1
            doing = self.group.doing
            text = (
                str(error) if isinstance(error, RankError) else f"{type(error).__name__}: {error}"
            )
            failure = self.group.fail(f"stage {stage} failed in {doing}: {text}")
            self._close_own()
            if isinstance(error, Exception):
                raise failure from error
            raise

    # ---- pages

    def stage_sizes(
        self, options: Mapping[str, Any], feature_layers: Sequence[int]
    ) -> list[CacheSizes]:
        """Return what each other stage has room for."""
        own = dict.fromkeys(("speculative_config", "logits_processors", "lora_modules"))
        given = [to_text({**options, **own})]
        answers = self.group.ask("planning pages", PLAN, sorted(set(feature_layers)), given)
        return [CacheSizes(*numbers) for _, numbers, _ in answers]

    def prepare_pages(self, dtype: str) -> str:
        """Load the kernels of a quantized KV cache in all stages. See `Model.prepare_pages`.

        Raises
        ------
        ConfigError
            If scales would have to be measured.
        """
        if dtype == "int8" and not self.decoder.kv_scales.sources[dtype]:
            raise ConfigError(
                "kv_cache_dtype must be 'auto' or 'fp8' with "
                f"pipeline_parallel_size={self.num_stages}, unless the checkpoint has scales; "
                "got 'int8'"
            )
        self.group.send("preparing pages", PREPARE, arrays=[to_text(dtype)])
        return self.own.prepare_pages(dtype)

    def share_pages(self, kv_cache: KVCache, swap: SwapSpace | None) -> None:
        """Let all stages allocate the same number of blocks and slots."""
        self.group.ask("making pages", SHARE, *pages_message(kv_cache, swap))
        self.own.share_pages(kv_cache, swap)
        kv_cache.workers = _StageWorkers(self, kv_cache.workers)
        self._pages = kv_cache

    @property
    def local_model(self) -> Model:
        """The layers of this stage; their steps are not announced."""
        return self.own.local_model

    def share_graphs(self, graphs: DecodeGraphs, max_model_len: int, max_draft_tokens: int) -> None:
        """Let the other stages, and the ranks of this one, begin to capture the same graphs."""
        assert self._pages is not None
        size = self._pages.geometry.block_size
        numbers = [*graphs.table_shape, size, max_model_len, 1, 1 + max_draft_tokens]
        self.group.send("capturing graphs", CAPTURE, numbers)
        self.own.share_graphs(graphs, max_model_len, max_draft_tokens)

    def wait_for_graphs(self) -> None:
        """Wait until they have captured them: the first step would count that as its own time."""
        self.group.answers("capturing graphs")

    @property
    def captured_adapter_kinds(self) -> tuple[str, ...]:
        """(): steps with adapters are computed kernel by kernel."""
        return ()

    # ---- adapters

    def read_adapter(self, name: str, path: str | PathLike[str]) -> LoraAdapter:
        """Read an adapter in all stages, each its layers, while steps go on. See `Model`."""
        adapter = self.own.read_adapter(name, path)
        self._adapters.share(adapter)
        return adapter

    def write_adapter(self, adapter: LoraAdapter, slot: int) -> None:
        """Copy an adapter to a slot in all stages.

        Steps in flight may still use the slot, for a request that has ended: they were launched
        before, and streams keep the order. Steps that this stage has not launched do not use it.
        """
        self._adapters.write(adapter, slot)
        self.own.write_adapter(adapter, slot)

    # ---- the other stages

    def check_ranks(self) -> None:
        """Verify that all stages and the ranks of this one are alive.

        Raises
        ------
        RankError
            Names the first that failed, with its last words.
        """
        self.group.check()
        with self.together():
            self.own.check_ranks()

    def describe_ranks(self) -> str:
        """Return what the other stages and the ranks of this one are doing."""
        return self.group.describe() + self.own.describe_ranks()

    def expert_load(self) -> dict[int, np.ndarray[Any, np.dtype[np.int64]]]:
        """Return the counts of all stages' layers. See `Model.expert_load`.

        Waits for the steps in flight. Once the other stages have ended, only this stage's layers
        are included.
        """
        first = 0 if self._decoder is None else self._decoder.stage.first
        found = {layer + first: load for layer, load in self.own.expert_load().items()}
        if self.group.is_closing or self.config.moe is None:
            return found
        for _, _, (layers, loads) in self.group.ask("reading counts", EXPERTS):
            found |= zip(layers.tolist(), loads, strict=True)
        return dict(sorted(found.items()))

    def end_stages(self) -> None:
        """End the other stages, and free the memory to which they write."""
        self._end()
        if self.links is not None:
            self.links.close()

    def close(self) -> None:
        """Free the weights, and end the other stages."""
        self.end_stages()
        self._close_own()
        super().close()

    # ---- not supported by a pipeline

    def trace(self, token_ids: Any) -> Trace:
        """Raise RequestError: each stage holds only some of the layers."""
        raise RequestError("a model of several pipeline stages cannot be traced")

    def kv_scales_of(self, kv_cache_dtype: str) -> Any:
        """Raise RequestError: each stage holds the scales of its own layers."""
        raise RequestError("kv_scales cannot be read when several pipeline stages share the model")

    def set_kv_scales(self, scales: Any, kv_cache_dtype: str = "fp8") -> None:
        """Raise RequestError: each stage holds the scales of its own layers."""
        raise RequestError("kv_scales cannot be set when several pipeline stages share the model")

    # ---- helpers

    def _announce(
        self,
        moves: Sequence[Any],
        batch: ForwardBatch | None,
        last_ids: LastIds = NO_LAST_IDS,
    ) -> None:
        step = self._next_step(0 if batch is None else batch.num_tokens)
        moves = self._all_moves(moves)
        if batch is None:
            self.group.send(f"step {step}", STEP, [step, 0], moves)
            return
        numbers, arrays = batch_to_message(batch)
        posted, tokens, rows = last_ids
        arrays = [*moves, tokens, rows, to_numpy(batch.token_ids), *arrays]
        what = f"step {step} ({batch.num_tokens} tokens)"
        self.group.send(what, STEP, [step, 1, posted, *numbers], arrays)

    def _next_step(self, num_tokens: int) -> int:
        """Return the number of the next step; 0 tokens: there is nothing to compute."""
        self._adapters.free_dropped()
        self._num_steps += 1
        if num_tokens:
            self._announced.append((self._num_steps, num_tokens))
        return self._num_steps

    def _all_moves(self, block_moves: Sequence[Any]) -> list[Any]:
        """Return the moves of single tokens since the last step, and those of blocks."""
        slot_moves = np.concatenate(self._slot_moves, axis=1) if self._slot_moves else None
        self._slot_moves = []
        return [slot_moves, *block_moves]

    def _check_pages(self, kv_pages: Pages) -> None:
        pages = self._pages
        if pages is None or caches_address(kv_pages) != caches_address(pages.layers):
            raise RequestError(
                "a model of several pipeline stages computes on its engine's pages only: "
                "embeddings, classes, Model.step and calibration need pipeline_parallel_size=1"
            )

    def _entered(self, batch: ForwardBatch) -> ForwardBatch:
        """Return the batch with the activations of the previous stage."""
        if not self._announced:  # a measurement: no step with this batch was announced
            if self.links is not None and self.device.is_cuda:
                # A measurement's result is not read, so nothing else tells when its slot is free.
                self.device.xp.cuda.get_current_stream().synchronize()
            self._announce(_NO_MOVES, batch)
        return replace(batch, entering=self.entering(batch.num_tokens))

    def _add_features(self, batch: ForwardBatch) -> None:
        """Add the inputs of other stages' layers to a step's features."""
        if self._feature_layers and isinstance(batch.features, dict):
            batch.features.update(self.received_features)

    def _close_own(self) -> None:
        """End the ranks of this stage."""
        if self.own.num_ranks > 1:
            self.own.close()


class _StageWorkers:
    """`Workers` of the last stage's cache: its ranks. Other stages are told by announced steps."""

    def __init__(self, model: PipelinedModel, ranks: Any) -> None:
        self._model = weakref.ref(model)
        self._ranks = ranks  # workers of this stage, or None

    def move_blocks(self, moves: Any) -> None:
        if self._ranks is not None:
            self._ranks.move_blocks(moves)

    def move_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if (model := self._model()) is not None:
            model.announce_slot_moves(sources, targets)
        if self._ranks is not None:
            self._ranks.move_slots(sources, targets)

    def close(self) -> None:
        if (model := self._model()) is not None:
            model.end_stages()
        if self._ranks is not None:
            self._ranks.close()


def load_stages(model: Any, config: EngineConfig, loading: Mapping[str, Any]) -> PipelinedModel:
    """Start the other stages, load the model in all of them, and return the last stage.

    Parameters
    ----------
    model : str or path
    config : EngineConfig
        `pipeline_parallel_size`, `pipeline_layers`, `pipeline_address` and the fields of
        `load_ranks` are read.
    loading : mapping
        Keywords of `load`.

    Raises
    ------
    ConfigError, DeviceError, DownloadError
        If the model or an option cannot be used.
    RankError
        If a stage fails; the message includes its last words.
    """
    given = dict(loading)
    size = config.pipeline_parallel_size
    place, _ = resolve_device(given.get("device", "auto"))
    if place.is_cuda and given.get("device", "auto") not in ("auto", "cuda"):
        raise ConfigError(
            f"device must be 'cpu', 'cuda' or 'auto' with pipeline_parallel_size={size}: stages "
            f"take the GPUs in order; got {shown(given['device'])}"
        )
    name, plain = plain_options(model, given)
    num_layers = _num_layers(name, given)
    sizes = config.pipeline_layers
    stages = [Stage.of(index, size, num_layers, sizes) for index in range(size)]
    drafting = config.speculative_config
    has_head = drafting is not None and drafting.method in HEAD_METHODS
    stages[-1] = replace(stages[-1], has_embedding=has_head)
    check_shards(name, given, config.tensor_parallel_size, stages)
    gpus = _gpus(config, place)
    fields = {"tensor_parallel_size", "pipeline_parallel_size", "collective_timeout"}
    options = {
        "model": name,
        "name": str(model),
        "loading": plain,
        "fingerprint": fingerprint(name, plain),
        "layers": [astuple(stage) for stage in stages],
        "engine": {field: getattr(config, field) for field in fields},
        "device": place.kind,
        "gpus": gpus,
    }
    group = _group(config, place.is_cuda)
    own: Model | None = None
    try:
        group.welcome(options)
        if config.tensor_parallel_size > 1:
            own = load_ranks(name, config, given, stage=stages[-1], gpus=gpus[-1])
        else:
            if place.is_cuda:
                given["device"] = f"cuda:{gpus[-1][0]}"
            own = load(name, **given, stage=stages[-1])
        group.wait_until_ready()
        return PipelinedModel(own, group, can_link=can_link(config, is_cuda=place.is_cuda))
    except BaseException as error:
        group.end()
        if own is not None:
            own.close()
        elif isinstance(error, RankError) and not group.failure:
            raise RankError(f"stage {size - 1} failed while it loaded: {error}") from error
        raise


def _group(config: EngineConfig, is_cuda: bool) -> StageGroup:
    """Start the other stages, and return their group once all have connected."""
    size = config.pipeline_parallel_size
    address = ("127.0.0.1", 0)
    secret = secrets.token_bytes(32)
    placed = None
    if config.pipeline_address is not None:
        address = parse_address(config.pipeline_address)
        secret = env.pipeline_secret()
    elif config.distributed_executor_backend == "ray":
        ray_stages = import_module("engine.parallel.ray_stages")  # imported late: needs Ray
        placed = ray_stages.RayStages(size, config.tensor_parallel_size if is_cuda else 0)
        address = placed.host, 0
    try:
        group = StageGroup(size, secret, address, timeout=config.collective_timeout)
    except RankError:
        if placed is not None:
            placed.close()
        raise
    try:
        if placed is not None:
            group.on_end = placed.close
            placed.start(group.address, secret)
        elif config.pipeline_address is None:
            count = size * config.tensor_parallel_size
            group.start_processes(None if is_cuda else num_threads(count))
        else:
            where = f"{group.address[0]}:{group.address[1]}"
            print(f"engine: waiting for {size - 1} stages at {where}", file=sys.stderr)
        group.wait_for_stages(_LOCAL_SECONDS if config.is_one_host else _REMOTE_SECONDS)
    except BaseException:
        group.end()
        raise
    return group


def _num_layers(name: str, loading: Mapping[str, Any]) -> int:
    config = loading.get("config")
    if not isinstance(config, ModelConfig):
        config = load_config(resolve_model(name))
    return config.num_layers


def _gpus(config: EngineConfig, place: Device) -> list[list[int]]:
    """Return the GPUs of each stage.

    A stage on its own host uses the first GPUs. If all stages share a host, the last stage uses
    the first GPUs, and the others use the next ones.

    Raises
    ------
    ConfigError
        If this host has too few GPUs.
    """
    size = config.pipeline_parallel_size
    num_ranks = config.tensor_parallel_size
    first = list(range(num_ranks))
    if not (config.is_one_host and place.is_cuda):
        return [first] * size
    count = place.xp.cuda.runtime.getDeviceCount()
    if count < size * num_ranks:
        raise ConfigError(
            f"pipeline_parallel_size * tensor_parallel_size must be at most {count}, the GPUs; "
            f"got {size} * {num_ranks}"
        )
    others = [[(stage + 1) * num_ranks + gpu for gpu in first] for stage in range(size - 1)]
    return [*others, first]
