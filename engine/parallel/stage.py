"""Pipeline stage worker: the process of any stage but the last.

It is started by the engine on the same host, by Ray, or by a user with `engine stage` on another
host. It loads its layers, executes the engine's announcements, and ends when its connection to the
engine closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine._version import __version__
from engine.cache.kv_cache import KVCache
from engine.cache.move_arrays import NUM_MOVE_ARRAYS, moves_from_arrays
from engine.cache.state_plan import CacheSizes
from engine.cache.swap import SwapSpace, move_blocks
from engine.core.resolve import resolve
from engine.distributed.connection import Address, Connection, Listener, connect
from engine.distributed.group import STOPPED_SECONDS
from engine.distributed.links import Links, SlotShape, join_links, num_fused_tokens, open_links
from engine.distributed.log_stream import use_bounded_stderr
from engine.distributed.messages import from_text, to_text
from engine.distributed.peer import FAIL, PING, PING_SECONDS, Peer
from engine.distributed.processes import end_with_parent, exit_at_once
from engine.dtypes import np_dtype
from engine.engine_config import EngineConfig
from engine.errors import ConfigError, RankError
from engine.loading.config_json import config_from_json
from engine.loading.download import resolve_model
from engine.model import Model, load
from engine.parallel.activations import ACTIVATIONS, ActivationSender, from_wire
from engine.parallel.adapters import HeldAdapters
from engine.parallel.rank import batch_from_message, fingerprint, shared_pages
from engine.parallel.tensor import load_ranks
from engine.runner.graph_keys import GraphKey
from engine.runner.stage_graphs import StageGraphs
from engine.runner.transfer import HostToDeviceCopy
from engine.text import child_process
from engine.weights import Stage

__all__ = ["StageWorker", "run_child", "run_stage"]

# Kinds of messages; PING, FAIL and ACTIVATIONS are 0 to 2.
HELLO, LINK = range(3, 5)  # a stage's first message to the engine, and to the next stage
READY, ANSWER = range(5, 7)  # from a stage to the engine
# From the engine to the stages.
WELCOME, PLAN, PREPARE, SHARE, STEP, EXPERTS, ADAPTERS, CAPTURE, GRAPH = range(7, 16)
ADAPTER_READ = 16  # from a stage to the engine, at any time
FEATURES, OPEN, JOIN, DROP = range(17, 21)  # from the engine to the stages

_RETRY_SECONDS = 0.2  # pause between connection attempts
_WAIT_SECONDS = 0.5  # wait for a message before checking the other processes
_SILENT_SECONDS = 15.0  # silence of the engine after which its host counts as lost
_END_SECONDS = 2.5  # grace period to end normally once the engine has ended
_LINK_SECONDS = 5.0  # time for the engine to determine why another stage ended


def run_child() -> None:
    """Run the stage described on standard input, in a process that the engine started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine handles it, and ends this process
    use_bounded_stderr()
    frame = child_process.receive(sys.stdin.buffer)
    if frame is None:
        sys.exit(1)
    threading.Thread(target=end_with_parent, daemon=True).start()
    task = json.loads(frame)
    host, port = task["address"]
    try:
        run_stage((host, port), task["stage"], bytes.fromhex(task["secret"]))
    except BaseException:  # already reported to the engine
        exit_at_once(1)
    exit_at_once(0)


def run_stage(
    address: Address, stage: int, secret: bytes, *, model: str = "", seconds: float = 60.0
) -> None:
    """Run a stage until the engine ends.

    Parameters
    ----------
    address : (host, port)
        Address on which the engine listens.
    stage : int
    secret : bytes
    model : str, optional
        Path of the model on this host; by default the path on the engine's host.
    seconds : float
        Time to wait for the engine to listen.

    Raises
    ------
    RankError, ConfigError
        If the engine cannot be reached or refuses the stage, or files differ.
    """
    StageWorker(_connected(address, secret, seconds), address, stage, secret, model).run()


def _connected(address: Address, secret: bytes, seconds: float) -> Connection:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return connect(address, secret)
        except RankError as error:
            if not isinstance(error.__cause__, ConnectionRefusedError | TimeoutError):
                raise
            if time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_SECONDS)


class StageWorker:
    """Executes the engine's announcements on one stage's layers and KV cache.

    Parameters
    ----------
    connection : Connection
        Connection to the engine.
    address : (host, port)
        Address of the engine.
    stage : int
    secret : bytes
    model : str
        See `run_stage`.
    """

    def __init__(
        self, connection: Connection, address: Address, stage: int, secret: bytes, model: str
    ) -> None:
        self._address = address
        self._stage = stage
        self._secret = secret
        self._name = model
        self._connection = connection
        self._engine = Peer(connection, "the engine")
        self._doing = "starting"
        self._has_ended = False
        self._previous: Peer | None = None  # the stage that sends this one its input
        self._link: Connection | None = None  # connection to the next stage
        self._sender: ActivationSender | None = None
        self._links: Links | None = None  # in place of `_previous` and `_sender`
        self._model: Model | None = None
        self._adapters: HeldAdapters | None = None
        self._pages: KVCache | None = None
        self._swap: SwapSpace | None = None
        self._graphs: StageGraphs | None = None
        self._feature_layers: list[int] = []  # this stage's layers whose inputs it sends
        self._num_earlier = 0  # features that it passes on
        self._listener = Listener(connection.own_host, 0, secret, self._accept) if stage else None
        port = self._listener.port if self._listener else 0
        hello = {"port": port, "version": __version__, "pid": os.getpid()}
        connection.send(HELLO, [stage], [to_text(hello)])
        threading.Thread(target=self._beat, daemon=True).start()
        self._actions: dict[int, Callable[[list[int], list[Any]], None]] = {
            PLAN: self._plan,
            PREPARE: self._prepare,
            SHARE: self._share,
            STEP: self._step,
            EXPERTS: self._experts,
            ADAPTERS: self._follow_adapters,
            CAPTURE: self._capture,
            GRAPH: self._graph,
            FEATURES: self._keep_features,
            OPEN: self._open_links,
            JOIN: self._join_links,
            DROP: self._drop_links,
        }

    def run(self) -> None:
        """Load the layers, and execute the engine's messages until it ends.

        Raises
        ------
        Exception
            Any failure; it was reported to the engine.
        """
        try:
            message = self._next()
            if message is None:
                raise RankError(self._engine.words or "the engine has ended")
            self._load(json.loads(from_text(message[2][0])))
            self._connection.send(READY)
            self._follow()
        except BaseException as error:
            if self._engine.lost and not self._engine.words and isinstance(error, RankError):
                return  # the engine has ended in the middle of a step
            with contextlib.suppress(OSError):
                self._connection.send(FAIL, (), [to_text(_last_words(error))])
            raise
        finally:
            self._close()
            if self._model is not None:
                self._model.close()
            # Last, so that `_beat` ends a process that hangs in the lines above.
            self._has_ended = True

    def _close(self) -> None:
        previous = self._previous.connection if self._previous is not None else None
        ends = self._sender, self._listener, self._adapters
        for each in (self._connection, previous, self._link, *ends):
            if each is not None:
                each.close()
        if self._links is not None:
            self._links.abort()

    # ---- messages from the engine

    def _follow(self) -> None:
        while True:
            self._doing = "waiting for a step"
            message = self._next()
            if message is None:
                return
            kind, numbers, arrays = message
            self._actions[kind](numbers, arrays)

    def _load(self, options: dict[str, Any]) -> None:
        self._doing = "comparing files"
        name = _path(self._name, options)
        loading = dict(options["loading"])
        _compare(self._stage, options["fingerprint"], fingerprint(name, loading))
        there = options["next"] or self._address
        self._link = connect((there[0], there[1]), self._secret)
        self._link.send(LINK, [self._stage])
        self._doing = "loading"
        if loading.get("config") is not None:
            loading["config"] = config_from_json(loading["config"])
        layers = Stage(*options["layers"][self._stage])
        config = EngineConfig(**options["engine"])
        gpus = options["gpus"][self._stage]
        is_cpu = options["device"] == "cpu"
        if config.tensor_parallel_size > 1:
            loading["device"] = "cpu" if is_cpu else "cuda"
            self._model = load_ranks(name, config, loading, stage=layers, gpus=gpus)
        else:
            device = "cpu" if is_cpu else f"cuda:{gpus[0]}"
            self._model = load(name, device=device, progress=False, stage=layers, **loading)
        self._model.num_stages = config.pipeline_parallel_size
        self._adapters = HeldAdapters(self._model, self._answer_adapter)
        check = self._model.check_ranks  # activations are NaN if a rank died in this step
        self._sender = ActivationSender(self._link, self._model.device, check)
        while self._stage and self._previous is None:
            self._check()
            time.sleep(0.01)
        if self._listener is not None:
            self._listener.close()

    def _plan(self, numbers: list[int], arrays: list[Any]) -> None:
        self._doing = "planning pages"
        config = EngineConfig(**json.loads(from_text(arrays[0])))
        model = self._the_model()
        # Features of earlier stages pass through this one.
        num_features = sum(layer < model.decoder.stage.last for layer in numbers)
        limits = resolve(config, model, num_features=num_features).scheduler
        sizes = [getattr(limits, name) for name in CacheSizes._fields]
        self._connection.send(ANSWER, sizes)

    def _prepare(self, numbers: list[int], arrays: list[Any]) -> None:
        self._doing = "preparing pages"
        self._the_model().prepare_pages(from_text(arrays[0]))

    def _share(self, numbers: list[int], arrays: list[Any]) -> None:
        self._doing = "making pages"
        model = self._the_model()
        (self._pages, self._swap) = shared_pages(model, numbers, arrays)
        model.share_pages(self._pages, self._swap)
        self._connection.send(ANSWER)

    def _step(self, numbers: list[int], arrays: list[Any]) -> None:
        assert self._pages is not None
        step, has_batch, *described = numbers
        self._doing = f"step {step}"
        arrays = self._move(arrays)
        if not has_batch:
            return
        posted, *others = described
        tokens, rows, token_ids, *rest = arrays
        host = batch_from_message(token_ids, others, rest)
        self._doing = f"step {step} ({host.num_tokens} tokens)"
        model = self._the_model()
        model.device.activate()
        # Through pinned memory: a copy from any other would wait for the previous step.
        named = {name: array for name, array in vars(host).items() if isinstance(array, np.ndarray)}
        last_ids = None if self._links is None or not posted else self._links.last_ids
        if last_ids is not None:
            named |= {"tokens": tokens, "rows": rows}
        on_device = HostToDeviceCopy(model.device, named).arrays
        if self._links is not None and last_ids is not None:
            self._links.wait_for_ids(posted)
            rows = on_device.pop("rows")
            on_device["token_ids"][on_device.pop("tokens")] = last_ids[rows]
        batch = replace(host, on_host=host, **on_device)
        entering, earlier = self._receive(step, host.num_tokens, host.num_tokens)
        shape = host.num_tokens, model.config.hidden_size
        xp = model.device.xp
        own = {layer: xp.empty(shape, np_dtype(model.dtype)) for layer in self._feature_layers}
        batch = replace(batch, entering=entering, features=own)
        leaving = model.run_stage(batch, self._pages.layers)
        self._send(step, [*leaving, *earlier, *own.values()])

    def _send(self, step: int, activations: list[Any]) -> None:
        """Send the delta, the residual stream and the features of a step to the next stage."""
        if self._links is not None:
            self._links.send(step, activations)
            return
        assert self._sender is not None
        self._sender.send(step, *activations)

    def _move(self, arrays: list[Any]) -> list[Any]:
        """Execute the moves at the head of a step's arrays; return the rest."""
        assert self._pages is not None
        slot_moves, *arrays = arrays
        if slot_moves is not None:
            self._pages.move_slots(*slot_moves.tolist())
        move_blocks(self._pages, self._swap, moves_from_arrays(arrays[:NUM_MOVE_ARRAYS]))
        return arrays[NUM_MOVE_ARRAYS:]

    def _capture(self, numbers: list[int], arrays: list[Any]) -> None:
        assert self._pages is not None
        self._doing = "capturing graphs"
        model = self._the_model()
        model.device.activate()
        with model.kernels.loading(), model.kernels.active():
            has_states = self._pages.num_slots > 0
            self._graphs = StageGraphs.of_numbers(
                model.local_model,
                self._pages.layers,
                numbers,
                self._feature_layers,
                has_states=has_states,
                last_ids=None if self._links is None else self._links.last_ids,
            )
            *_, max_model_len, least, most = numbers
            model.share_graphs(self._graphs, max_model_len, most - least)
            self._graphs.capture()
        self._connection.send(ANSWER)

    def _graph(self, numbers: list[int], arrays: list[Any]) -> None:
        if self._graphs is None:
            raise RankError(f"stage {self._stage} was told of a graph before it had any")
        step, num_tokens, size, max_context_len, query_len, is_tree, posted = numbers
        self._doing = f"step {step} ({num_tokens} tokens, as a graph)"
        model = self._the_model()
        model.device.activate()
        [data] = self._move(arrays)
        key = GraphKey(size, max_context_len, query_len, bool(is_tree))
        entering, earlier = self._receive(step, num_tokens, key.num_tokens)
        if self._links is not None:
            self._links.wait_for_ids(posted)
        with model.kernels.active():
            leaving, own = self._graphs.follow(key, data, entering, num_tokens)
            self._send(step, [*leaving, *earlier, *own])

    def _open_links(self, numbers: list[int], arrays: list[Any]) -> None:
        """Allocate what the other stages write to; answer with its handles."""
        self._doing = "opening links"
        num_rows, max_tokens, num_features = numbers
        model = self._the_model()
        config = model.config
        shape = SlotShape.of(
            model.num_stages, num_features, max_tokens, config.hidden_size, model.dtype
        )
        has_previous = self._stage > 0
        self._links, error = open_links(
            model.device, shape, has_previous=has_previous, num_ids=0 if has_previous else num_rows
        )
        if self._links is not None and self._links.last_ids is not None:
            # CuPy compiles indexing by an array on first use: trigger it now, not in a step.
            for count in (1, 2):  # it has other kernels for one id
                rows = model.device.xp.zeros(count, np.int64)
                self._links.last_ids[rows] = self._links.last_ids[rows]
        num_plain = num_fused_tokens(model.decoder.layers, max_tokens)
        handles = (b"", b"") if self._links is None else self._links.handles
        sent = [np.frombuffer(handle, np.uint8) for handle in handles]
        self._connection.send(ANSWER, [num_plain], [*sent, to_text(error)])

    def _drop_links(self, numbers: list[int], arrays: list[Any]) -> None:
        """Unmap the next stage's memory, and once all stages have, free this one's."""
        [are_unmapped] = numbers
        if self._links is not None:
            self._links.disconnect()
            if are_unmapped:
                self._links.close()
                self._links = None
        self._connection.send(ANSWER)

    def _join_links(self, numbers: list[int], arrays: list[Any]) -> None:
        """Map the next stage's memory."""
        self._doing = "joining links"
        assert self._links is not None
        num_plain = min(numbers[: self._stage], default=0)
        error = join_links(self._links, bytes(arrays[self._stage]), b"", num_plain)
        self._connection.send(ANSWER, (), [to_text(error)])

    def _keep_features(self, numbers: list[int], arrays: list[Any]) -> None:
        stage = self._the_model().decoder.stage
        self._num_earlier = sum(layer < stage.first for layer in numbers)
        self._feature_layers = [layer for layer in numbers if stage.first <= layer < stage.last]

    def _receive(
        self, step: int, num_tokens: int, num_padded: int
    ) -> tuple[tuple[Any, Any] | None, list[Any]]:
        """Return what the previous stage sends of a step: its (delta, residual), and features.

        The first stage has none. `num_padded`: tokens that the previous stage computes.
        """
        if not self._stage:
            return None, []
        if self._links is not None:
            delta, residual, *features = self._links.receive(step, num_tokens, num_padded)
            return (delta, residual), features[: self._num_earlier]
        assert self._previous is not None
        message = None
        while message is None:
            self._check()
            try:
                message = self._previous.next(_WAIT_SECONDS)
            except RankError:
                self._wait_for_end()
                raise
        kind, numbers, arrays = message
        if kind != ACTIVATIONS or numbers != [step]:
            raise RankError(f"{self._previous.name} sent step {numbers} instead of step {step}")
        model = self._the_model()
        delta, residual, *features = from_wire(model.device, model.dtype, arrays)
        return (delta, residual), features

    def _experts(self, numbers: list[int], arrays: list[Any]) -> None:
        model = self._the_model()
        found = model.expert_load()
        layers = np.array(list(found), np.int64) + model.decoder.stage.first
        loads = np.array(list(found.values()), np.int64)
        self._connection.send(ANSWER, (), [layers, loads])

    def _follow_adapters(self, numbers: list[int], arrays: list[Any]) -> None:
        assert self._adapters is not None
        self._adapters.follow(numbers, arrays)

    def _answer_adapter(self, serial: int, error: str) -> None:
        self._connection.send(ADAPTER_READ, [serial], [to_text(error)])

    # ---- the other processes

    def _accept(self, connection: Connection) -> None:
        try:
            kind, numbers, _ = connection.receive()
        except (OSError, RankError):
            connection.close()
            return
        if kind == LINK and numbers == [self._stage - 1] and self._previous is None:
            self._previous = Peer(connection, f"stage {self._stage - 1}")
        else:
            connection.close()

    def _next(self) -> tuple[int, list[int], list[Any]] | None:
        """Return the engine's next message; None if the engine has ended.

        Raises
        ------
        RankError
            If a rank of this stage fails while it waits.
        """
        while True:
            try:
                message = self._engine.next(_WAIT_SECONDS)
            except RankError:
                return None
            if message is not None:
                return message
            self._check()

    def _check(self) -> None:
        """Verify that the engine, this stage's ranks and the link to the next stage are alive."""
        if self._engine.lost:
            raise RankError("the engine has ended")
        if self._model is not None:
            self._model.check_ranks()
        if self._sender is not None and self._sender.error is not None:
            self._wait_for_end()
            raise self._sender.error

    def _wait_for_end(self) -> None:
        """Wait until the engine ends this stage, as it does after another one has ended."""
        deadline = time.monotonic() + _LINK_SECONDS
        while not self._engine.lost and time.monotonic() < deadline:
            time.sleep(0.05)

    def _the_model(self) -> Model:
        if self._model is None:
            raise RankError(f"stage {self._stage} was told of a step before it was loaded")
        return self._model

    def _beat(self) -> None:
        """Send heartbeats to the engine; end this process once the engine has ended."""
        engine = self._engine
        looked = awake = time.monotonic()  # awake: since when this process runs without a pause
        while not self._has_ended:
            ranks = self._model.describe_ranks() if self._model is not None else ""
            with contextlib.suppress(OSError):
                self._connection.send(PING, (), [to_text(self._doing + ranks)])
            now = time.monotonic()
            awake = now if now - looked > STOPPED_SECONDS else awake
            looked = now
            is_late = engine.lost and now - engine.lost_since > _END_SECONDS
            if is_late or now - max(engine.heard, awake) > _SILENT_SECONDS:
                exit_at_once(1)
            time.sleep(PING_SECONDS)


def _path(own: str, options: Mapping[str, Any]) -> str:
    """Return the model's path on this host: `own`, the engine's path, or its name's."""
    loading = options["loading"]
    name = own or options["model"]
    if loading.get("config") is not None and loading.get("load_format") == "dummy":
        return str(name)
    there = name if own or Path(name).exists() else options["name"]
    return str(resolve_model(there).path)


def _compare(stage: int, wanted: dict[str, str], found: dict[str, str]) -> None:
    """Verify that a stage's program, files and options match the engine's."""
    for name, value in wanted.items():
        if found.get(name) != value:
            raise ConfigError(
                f"stage {stage} differs from the engine in {name}: {found.get(name)}, not {value}"
            )


def _last_words(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))[-8000:]
