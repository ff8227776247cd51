"""`ReplicaClient`: an `EngineClient` for several replicas of a model.

The router chooses a replica for each request. If that replica dies, another one receives the prompt
and the tokens so far, and generates the same tokens that the first would have: every request has a
seed from the start, and each draw depends only on the seed and the position.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from engine.core.stats import EngineStats
from engine.errors import EngineError, RequestError
from engine.lora_request import LoRARequest
from engine.outputs import RequestOutput
from engine.scheduler.admission import QueueFullError
from engine.server import messages as m
from engine.server.engine_client import CLIENT_CLOSED, ZmqEngineClient
from engine.server.remote_request import RemoteRequest
from engine.server.replicas.router import PrefixRouter, Route
from engine.server.request_client import Answerer, RequestClient
from engine.tasks.logit_lens import LogitLens

__all__ = ["ReplicaClient"]

_MAX_CRASHES = 3  # a request fails once this many replicas crashed while serving it
GRACE_SECONDS = 1.0
_RETRY_SECONDS = 0.2  # seconds between attempts to reach a replica
_STATS_SECONDS = 5.0  # timeout for a replica's counters; Prometheus waits 10 s
_DEADLINE_SLACK = 1.0  # seconds that an engine has to end a request after its deadline
_CHUNK_SIZE = 64  # tokens; raised to the engine's block size
_log = logging.getLogger("engine.server")

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Placed:
    """Placement of a request: its replica, if any, and those whose full queues refused it."""

    route: Route | None = None
    client: ZmqEngineClient | None = None
    refusing: set[int] = field(default_factory=set)


class ReplicaClient(RequestClient):
    """Distributes requests over replicas, which may join and leave; bound to one event loop.

    `connect` returns a client that has at least one replica.

    Parameters
    ----------
    token : str
        The engines' token.
    tokenizer : Tokenizer or None
    seed : sequence of int
        Seed of the generator that seeds requests without a seed.
    has_peers : bool
        Whether the replicas also serve other clients; if so, their load is taken from heartbeats.
    grace_seconds : float
        Seconds that requests wait for a replica, if none is left, before they fail.
    """

    def __init__(
        self,
        token: str,
        tokenizer: Any = None,
        *,
        seed: Sequence[int] = (0,),
        has_peers: bool,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        super().__init__(tokenizer)
        self._token = token
        self._seed = list(seed)
        self._num_seeds = itertools.count()
        self._has_peers = has_peers
        self._grace_seconds = grace_seconds
        self._has_begun = asyncio.Event()  # set when the first replica joins
        # Placeholder: rebuilt when the first replica reports its block size.
        self._router = PrefixRouter(chunk_size=_CHUNK_SIZE)
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by replica index, connected or not
        self._addresses: dict[int, str] = {}
        self._clients: dict[int, ZmqEngineClient] = {}  # by replica index, connected only
        self._requests: dict[str, RemoteRequest] = {}
        self._placed: dict[RemoteRequest, _Placed] = {}
        self._stuck: set[int] = set()  # unresponsive replicas
        self._error: EngineError | None = None
        self._last_error = EngineError("no replica is ready")
        self._ending: asyncio.TimerHandle | None = None
        self._answer: Answerer | None = None
        # Held while all replicas are changed, and while one catches up and joins: a change that is
        # neither in the record below nor made on the new replica would be lost.
        self._changing = asyncio.Lock()
        self._updates: dict[str, None] = {}  # folders of new weights, by their last update
        self._added: dict[str, LoRARequest] = {}  # adapters added while serving, by name
        self._removed: set[str] = set()  # names of adapters removed while serving
        self._sleep_level: int | None = None
        self._ticking = asyncio.ensure_future(self._tick())

    @classmethod
    async def connect(
        cls, addresses: Mapping[int, str], token: str, tokenizer: Any = None, **options: Any
    ) -> ReplicaClient:
        """Connect to replicas, and wait until one is ready.

        Parameters
        ----------
        addresses : mapping of int to str
            Address of each replica, by index.
        token, tokenizer, **options
            See `ReplicaClient`.
        """
        client = cls(token, tokenizer, **options)
        try:
            await client.set_replicas(addresses)
            await client.wait_until_ready()
        except BaseException:
            await client.close()
            raise
        return client

    # ---- replicas

    async def set_replicas(
        self, addresses: Mapping[int, str], *, keep_connected: bool = False
    ) -> None:
        """Set the replicas: connect as they start, and reconnect when a connection is lost.

        Requests on removed replicas move to the others. With `keep_connected`, connected replicas
        missing from `addresses` are kept until they exit.
        """
        for number, address in list(self._addresses.items()):
            default = address if keep_connected and number in self._clients else None
            if addresses.get(number, default) != address:
                del self._addresses[number]
                task = self._tasks.pop(number)
                task.cancel()
                await asyncio.wait([task])
        for number in addresses.keys() - self._addresses.keys():
            address = self._addresses[number] = addresses[number]
            self._tasks[number] = asyncio.ensure_future(self._keep_connected(number, address))

    async def wait_until_ready(self) -> None:
        """Wait until the first replica has joined."""
        await self._has_begun.wait()

    @property
    def has_replica(self) -> bool:
        """Whether any replica is connected; without one, requests wait."""
        return bool(self._clients)

    @property
    def replicas(self) -> dict[int, str]:
        """The state of each replica: "ready", "stuck" (in a long step) or "starting"."""
        return {
            number: "starting"
            if number not in self._clients
            else ("ready" if self._clients[number].is_responsive else "stuck")
            for number in sorted(self._tasks)
        }

    async def _keep_connected(self, number: int, address: str) -> None:
        while True:
            try:
                client = await ZmqEngineClient.connect(address, self._token, self.tokenizer)
            except EngineError as error:
                _log.warning("replica %d has ended before it was ready: %s", number, error)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            ended = asyncio.Event()
            try:
                async with self._changing:
                    await self._catch_up(number, client)
                    if client.error is not None:
                        continue  # it has ended meanwhile
                    self._join(number, client, ended)
                await ended.wait()
            finally:
                await client.close()  # moves its requests, unless the replica has already exited

    def _join(self, number: int, client: ZmqEngineClient, ended: asyncio.Event) -> None:
        def on_end(requests: list[RemoteRequest], error: EngineError) -> None:
            ended.set()
            self._leave(number, requests, error)

        client.on_end = on_end
        client.on_refusal = self._on_refusal
        client.answer = self._answer
        if not self._has_begun.is_set():
            self._take_model(client.model_info)
            self._router = PrefixRouter(chunk_size=max(_CHUNK_SIZE, client.block_size))
            self._has_begun.set()
        self._clients[number] = client
        self._router.add_replica(number, client.num_cache_tokens)
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        self._place_waiting()

    async def _catch_up(self, number: int, client: ZmqEngineClient) -> None:
        """Make the changes on a new replica that were made on the others while it was away."""
        changes: list[Callable[[], Coroutine[Any, Any, Any]]] = [
            *(partial(client.update_weights, path) for path in self._updates),
            *(partial(client.add_lora, each, load_inplace=True) for each in self._added.values()),
            *(partial(client.remove_lora, each) for each in self._removed & {*client.adapters}),
        ]
        if self._sleep_level is not None:
            changes.append(partial(client.sleep, self._sleep_level))
        for change in changes:
            try:
                await change()
            except EngineError as error:
                _log.warning("replica %d lacks a change made while serving: %s", number, error)

    def _leave(self, number: int, requests: list[RemoteRequest], error: EngineError) -> None:
        """Remove a replica that has exited, and move its requests to others."""
        del self._clients[number]
        self._router.remove_replica(number)
        self._last_error = error
        _log.warning("replica %d is lost with %d requests: %s", number, len(requests), error)
        if not self._clients and self._ending is None:
            loop = asyncio.get_running_loop()
            self._ending = loop.call_later(self._grace_seconds, self._end)
        for request in requests:
            if request not in self._placed:
                continue  # its reader has just dropped it
            self._placed[request] = _Placed()
            request.num_crashes += str(error) not in (m.CLOSED, CLIENT_CLOSED)
            if request.is_aborted:
                request.abort()
            elif request.num_crashes >= _MAX_CRASHES:
                reason = f"{_MAX_CRASHES} replicas have ended while they had the request"
                request.fail(EngineError(f"{reason}, the last one as {error}"))
            elif request.resume():
                self._place(request)

    def _end(self) -> None:
        """Fail all requests, since no replica is left."""
        self._error = self._last_error
        for request in list(self._placed):
            request.fail(self._error)

    async def _tick(self) -> None:
        """Twice per second: update the loads, end overdue requests, and place waiting ones."""
        while True:
            await asyncio.sleep(m.BEAT_SECONDS)
            self._stuck = {n for n, client in self._clients.items() if not client.is_responsive}
            if self._has_peers:
                for number, client in self._clients.items():
                    self._router.report_load(number, *client.load)
            self._end_overdue()
            self._place_waiting()

    def _end_overdue(self) -> None:
        """End overdue requests that no engine will end, because theirs hangs or they have none."""
        now = time.monotonic()
        for request, placed in self._placed.items():
            deadline = request.group.deadline
            client = placed.client
            if deadline is None or request.is_finished:
                continue
            if now > deadline + (0.0 if client is None else _DEADLINE_SLACK):
                if client is not None:
                    client.drop(request)
                request.abort("timeout")

    # ---- requests

    @property
    def error(self) -> EngineError | None:
        """The error that stopped the last replica; None while requests are served."""
        return self._error

    @property
    def is_responsive(self) -> bool:
        """Whether any replica is alive and its current step is within `step_timeout`."""
        if self._error is not None:
            return False
        return not self._clients or any(c.is_responsive for c in self._clients.values())

    @property
    def num_unfinished_requests(self) -> int:
        """Number of this client's requests that are waiting or running."""
        return sum(not request.is_finished for request in self._placed)

    def submit(self, request: RemoteRequest) -> None:
        """Send a request to a replica; see `RequestClient.submit`."""
        self._check_alive()
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id[:80]!r} is in use")
        request.message.params.setdefault("seed", self._next_seed())
        self._requests[request.request_id] = request
        placed = self._placed[request] = _Placed()
        try:
            if not self._place(request) and placed.refusing:
                raise QueueFullError("no replica takes requests at the moment; try again later")
        except BaseException:
            self.drop(request)
            raise

    def drop(self, request: RemoteRequest) -> None:
        """Abort a request that nobody reads any more."""
        placed = self._placed.pop(request, None)
        if placed is None:
            return
        del self._requests[request.request_id]
        if placed.route is not None:
            self._router.finished(placed.route)
        if placed.client is not None:
            placed.client.drop(request)

    async def abort(self, request_id: str) -> None:
        """Abort a request; see `EngineClient.abort`."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if (client := self._placed[request].client) is None:
            request.abort()
        else:
            await client.abort(request_id)

    def _place(self, request: RemoteRequest) -> bool:
        """Send a request to the replica the router chooses; return False if none accepts it."""
        placed = self._placed[request]
        message = request.message
        request.update_timeout()
        while True:
            # Adapters share no prefixes.
            salt = message.cache_salt
            salt = salt if message.adapter is None else f"{message.adapter}\0{salt}"
            avoided = placed.refusing | self._lacking(message.adapter)
            route = self._route(message.token_ids, salt, avoided)
            if route is None:
                return False
            client = self._clients[route.replica]
            try:
                client.submit(request)
            except BaseException as error:
                self._router.finished(route)
                if not isinstance(error, QueueFullError):
                    raise
                placed.refusing.add(route.replica)
                continue
            placed.route = route
            placed.client = client
            if request.has_begun:  # `_note_first` has already been called
                self._router.computed(route, route.num_cached_tokens)
            return True

    def _route(
        self, token_ids: Sequence[int], salt: str | None, refusing: set[int]
    ) -> Route | None:
        """Choose a replica; unresponsive ones are a last resort."""
        found = None
        if self._stuck:
            found = self._router.route(token_ids, salt, refusing | self._stuck)
        return found or self._router.route(token_ids, salt, refusing)

    def _lacking(self, adapter: str | None) -> set[int]:
        """Return the replicas that lack an adapter which another one holds."""
        if adapter is None:
            return set()
        lacking = {n for n, client in self._clients.items() if adapter not in client.adapters}
        return lacking if len(lacking) < len(self._clients) else set()

    def _place_waiting(self) -> None:
        for request, placed in list(self._placed.items()):
            if placed.client is None and not request.is_finished:
                placed.refusing.clear()  # their queues may have space again
                try:
                    self._place(request)
                except Exception as error:
                    request.fail(error)

    def _on_refusal(self, request: RemoteRequest, error: EngineError) -> bool:
        """Offer a request refused because of a full queue to the other replicas."""
        placed = self._placed.get(request)
        if placed is None or placed.route is None or not isinstance(error, QueueFullError):
            return False
        self._router.finished(placed.route)
        placed.refusing.add(placed.route.replica)
        placed.route = placed.client = None
        return self._place(request)

    def _note_first(self, request: RemoteRequest, output: RequestOutput) -> None:
        placed = self._placed.get(request)
        if placed is not None and placed.route is not None:
            self._router.computed(placed.route, output.num_cached_tokens)

    def _next_seed(self) -> int:
        entropy = [*self._seed, next(self._num_seeds)]
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)

    def _set_answer(self, answer: Answerer | None) -> None:
        self._answer = answer  # replicas that join later need it too
        for client in self._clients.values():
            client.answer = answer
        if answer is None:
            self._router.forget_prefixes()

    # ---- calls

    async def stats(self) -> EngineStats:
        """Return the stats of the first responsive replica; see `stats_by_replica`."""
        return await self._first().stats()

    async def stats_by_replica(self) -> dict[int, EngineStats]:
        """Return the stats of each responsive replica, counted since its start."""
        numbers = [n for n, client in sorted(self._clients.items()) if client.is_responsive]
        calls = [asyncio.wait_for(self._clients[n].stats(), _STATS_SECONDS) for n in numbers]
        found = await asyncio.gather(*calls, return_exceptions=True)
        pairs = zip(numbers, found, strict=True)
        return {number: stats for number, stats in pairs if isinstance(stats, EngineStats)}

    async def snapshot(self, salt_prefix: str | None = None) -> dict[str, Any]:
        """Return the state of the first responsive replica; see `EngineClient.snapshot`."""
        return await self._first().snapshot(salt_prefix)

    async def embed_ids(
        self, token_ids: Sequence[Sequence[int]], pooling: str | None, *, normalize: bool
    ) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        """Embed each sequence of validated token ids; see `EngineClient.embed`."""
        all_ids = list(itertools.chain(*token_ids))
        return await self._on_one(
            all_ids, lambda client: client.embed_ids(token_ids, pooling, normalize=normalize)
        )

    async def logit_lens(
        self, token_ids: Sequence[int], num_tokens: int = 1, top: int = 5
    ) -> LogitLens:
        """Return what each layer predicts; see `EngineClient.logit_lens`."""
        ids = list(token_ids)
        return await self._on_one(ids, lambda client: client.logit_lens(ids, num_tokens, top))

    async def _on_one(
        self, token_ids: list[int], call: Callable[[ZmqEngineClient], Awaitable[T]]
    ) -> T:
        """Call one replica; the next one if it exits meanwhile."""
        num_crashes = 0
        while True:
            self._check_alive()
            # A separate salt: such calls neither use nor leave cached prefixes.
            route = self._route(token_ids, "embeddings", set())
            if route is None:
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            client = self._clients[route.replica]
            try:
                return await call(client)
            except EngineError:
                num_crashes += 1
                if client.error is None or num_crashes >= _MAX_CRASHES:
                    raise
            finally:
                self._router.finished(route)

    async def reset_prefix_cache(self) -> int:
        """Drop the cached prefixes of all replicas; return the number of blocks freed in all."""
        self._router.forget_prefixes()
        counts = await _from_all(self._connected(), lambda client: client.reset_prefix_cache())
        return sum(counts)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that any replica holds."""
        names = (name for client in self._clients.values() for name in client.adapters)
        return tuple(dict.fromkeys(names))

    async def update_weights(self, path: str) -> tuple[str, ...]:
        """Have every replica read new weights, and those that join later."""
        async with self._changing:
            self._router.forget_prefixes()
            found = await _from_all(self._connected(), lambda client: client.update_weights(path))
            # A folder is read once, at its last place: its earlier content is gone.
            self._updates.pop(path, None)
            self._updates[path] = None
            return found[0]

    async def add_lora(self, lora_request: LoRARequest, *, load_inplace: bool = False) -> None:
        """Have every replica read an adapter, and those that join later.

        If one cannot, the others forget it again, unless they held one of its name before.
        """
        name = lora_request.lora_name
        async with self._changing:
            clients = self._connected()
            lacked = [client for client in clients if name not in client.adapters]
            try:
                await _from_all(
                    clients, lambda client: client.add_lora(lora_request, load_inplace=load_inplace)
                )
            except EngineError:
                calls = (each.remove_lora(name) for each in lacked if name in each.adapters)
                await asyncio.gather(*calls, return_exceptions=True)
                raise
            self._added[name] = lora_request
            self._removed.discard(name)

    async def remove_lora(self, lora_name: str) -> None:
        """Have every replica that holds an adapter forget it."""
        async with self._changing:
            connected = self._connected()
            holders = [each for each in connected if lora_name in each.adapters]
            # If none holds it, the first one says so.
            await _from_all(holders or connected[:1], lambda client: client.remove_lora(lora_name))
            self._added.pop(lora_name, None)
            self._removed.add(lora_name)

    @property
    def seems_asleep(self) -> bool:
        """Whether any replica slept when it was last heard of."""
        return any(client.seems_asleep for client in self._clients.values())

    async def sleep(self, level: int = 1) -> None:
        """Put all replicas to sleep, and those that join; if one refuses, wake all up again."""
        async with self._changing:
            clients = self._connected()
            try:
                await _from_all(clients, lambda client: client.sleep(level))
            except EngineError:
                self._sleep_level = None
                await asyncio.gather(*(c.wake_up() for c in clients), return_exceptions=True)
                raise
            if self._sleep_level is None:  # a sleeper sleeps on, at its first level
                self._sleep_level = level
                if level == 2:
                    self._updates.clear()  # `wake_up` reads the checkpoint again

    async def wake_up(self) -> None:
        """Wake all replicas up."""
        async with self._changing:
            await _from_all(self._connected(), lambda client: client.wake_up())
            self._sleep_level = None

    async def is_sleeping(self) -> bool:
        """Return whether any replica sleeps."""
        return any(await _from_all(self._connected(), lambda client: client.is_sleeping()))

    async def close(self, reason: str = CLIENT_CLOSED) -> None:
        """Fail all requests of this client with an `EngineError`; the engines keep running."""
        self._ticking.cancel()
        if self._ending is not None:
            self._ending.cancel()
        if self._error is None:
            self._last_error = EngineError(reason)
        clients = list(self._clients.values())
        for client in clients:
            client.on_end = None
        self._end()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for client in clients:
            await client.close()

    def _first(self) -> ZmqEngineClient:
        return self._connected()[0]

    def _connected(self) -> list[ZmqEngineClient]:
        """Return the connected replicas: the responsive ones first, then by number.

        Raises
        ------
        EngineError
            If there is none.
        """
        self._check_alive()
        if not self._clients:
            raise EngineError("no replica is ready at the moment; try again later")
        order = sorted(self._clients.items(), key=lambda each: (not each[1].is_responsive, each[0]))
        return [client for _, client in order]


async def _from_all(
    clients: Sequence[ZmqEngineClient], call: Callable[[ZmqEngineClient], Awaitable[T]]
) -> list[T]:
    """Call every replica; return the results of those that have not exited, at least one.

    Raises
    ------
    EngineError
        The first error of a replica that has not exited, or if all have, of one that has.
    """
    answers = await asyncio.gather(*map(call, clients), return_exceptions=True)
    errors = []
    found: list[T] = []
    for client, answer in zip(clients, answers, strict=True):
        if not isinstance(answer, BaseException):
            found.append(answer)
        elif client.error is None:
            raise answer
        else:
            errors.append(answer)
    if not found:
        raise errors[0]
    return found
