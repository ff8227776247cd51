"""Request limits: size, timeout and memory of bodies, and number of concurrent requests."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from engine.server.field_limits import check_fields
from engine.server.protocol.common import decode_body
from engine.server.protocol.errors import APIError
from engine.server.protocol.unknown_fields import ignore_unknown_fields
from engine.server.server_config import ServerConfig
from engine.server.sse import ClientGone

__all__ = [
    "BodyMemory",
    "RequestSlots",
    "check_fields",
    "check_model",
    "check_query",
    "decoded",
    "read_struct",
]

T = TypeVar("T", bound=msgspec.Struct)
V = TypeVar("V")

_MAX_DECODED_AT_ONCE = 1 << 18  # bytes; a larger body is decoded by `_decoder`
# One thread: decoding holds the GIL, and two large bodies must not hold it one after the other.
_decoder = ThreadPoolExecutor(1, "decode-body")
_MAX_HELD_BYTES = 1 << 30
_RETRY = {"Retry-After": "1"}


async def read_struct(request: Request, kind: type[T]) -> T:
    """Read and validate a request body, and return it as a struct of type `kind`.

    Raises
    ------
    APIError
        If the body is too large (413), too slow (408) or invalid (400), or if the bodies of all
        requests need too much memory (503).
    ClientGone
        If the client disconnects.
    """
    if request.app.state.config.ignore_unknown_fields:
        ignore_unknown_fields()
    memory: BodyMemory = request.app.state.body_memory
    with memory.hold() as take:
        return await decoded(await _read_body(request, take), kind)


async def decoded(body: bytes, kind: type[V]) -> V:
    """Decode JSON as a value of type `kind`, a large one on a thread of its own.

    Raises
    ------
    APIError
        See `decode_body`.
    """
    if len(body) <= _MAX_DECODED_AT_ONCE:
        return decode_body(body, kind)
    decode = functools.partial(contextvars.copy_context().run, decode_body, body, kind)
    return await asyncio.get_running_loop().run_in_executor(_decoder, decode)


async def _read_body(request: Request, take: Callable[[int], None]) -> bytes:
    """Return the request body; raise if it exceeds `max_body_bytes` or `body_timeout`."""
    config: ServerConfig = request.app.state.config
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    # With any other type or none, a browser sends cross-origin requests without a preflight.
    if kind.lower() != "application/json":
        message = f"the header Content-Type must be application/json; got {kind[:80]!r}"
        raise APIError(415, message)
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        message = f"a body must not be compressed; got the Content-Encoding {coding[:80]!r}"
        raise APIError(415, message, headers={"Accept-Encoding": "identity"})
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > config.max_body_bytes:
        raise _too_large(config)
    try:
        return await asyncio.wait_for(_read(request, config, take), config.body_timeout)
    except asyncio.TimeoutError:
        message = f"the body must arrive within {config.body_timeout} s"
        raise APIError(408, message, headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise ClientGone from None


async def _read(request: Request, config: ServerConfig, take: Callable[[int], None]) -> bytes:
    parts = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > config.max_body_bytes:
            raise _too_large(config)
        take(len(part))
        parts.append(part)
    return b"".join(parts)


def _too_large(config: ServerConfig) -> APIError:
    message = f"the body must have at most {config.max_body_bytes} bytes"
    return APIError(413, message, headers={"Connection": "close"})


def check_model(model: str | None, request: Request, *, takes_adapters: bool = True) -> str:
    """Return the model name to put into the response.

    `takes_adapters`: whether the endpoint serves LoRA adapters, which have names of their own.

    Raises
    ------
    APIError
        404, if the server has no model with this name; 400 for an adapter that the endpoint does
        not serve.
    """
    state = request.app.state
    names: tuple[str, ...] = state.model_names
    if model is None or model in names:
        return model or names[0]
    adapters = state.client.adapters
    if model in adapters and takes_adapters:
        return model
    if model in adapters:
        message = (
            f"model must be {names[0]!r}: {request.url.path} serves no adapters; got {model!r}"
        )
        raise APIError(400, message, param="model")
    names = (*names, *adapters)
    message = f"the model {model[:100]!r} does not exist; this server has {', '.join(names)}"
    raise APIError(404, message, param="model", code="model_not_found")


def check_query(request: Request, *known: str) -> None:
    """Raise an `APIError` if a parameter of the URL is not `known`."""
    for name, value in request.query_params.multi_items():
        if name not in known:
            message = f"{name[:50]} is not a parameter of this path; got {value[:50]!r}"
            raise APIError(400, message, param=name[:50])


class BodyMemory:
    """Limits the bytes of all bodies that are being received or wait to be decoded.

    The limit is 1 GiB, or that of one body, `max_body_bytes`, if it is larger.

    Parameters
    ----------
    config : ServerConfig

    Attributes
    ----------
    num_bytes : int
        Bytes held at present.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._limit = max(_MAX_HELD_BYTES, config.max_body_bytes)
        self.num_bytes = 0

    @contextlib.contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that adds bytes to one body; they are released with the context.

        It raises an `APIError` (503) if the bodies would exceed the limit.
        """
        num_own = 0

        def take(size: int) -> None:
            nonlocal num_own
            if self.num_bytes + size > self._limit:
                message = f"the bodies being received have {self._limit} bytes, the maximum"
                raise APIError(503, message, headers=_RETRY | {"Connection": "close"})
            self.num_bytes += size
            num_own += size

        try:
            yield take
        finally:
            self.num_bytes -= num_own


class RequestSlots:
    """Counts the unfinished requests of a process, in total and by API key.

    Each key may have at most `max_requests_per_key`. By default, once 7/8 of all slots are taken,
    each key is limited to an equal share, so that no key can lock out the others.

    Parameters
    ----------
    config : ServerConfig

    Examples
    --------
    >>> slots = RequestSlots(ServerConfig(max_concurrent_requests=1))
    >>> with slots.hold(None), slots.hold(None):
    ...     pass
    Traceback (most recent call last):
    ...
    engine.server.protocol.errors.APIError: the server has 1 unfinished requests, its maximum
    """

    def __init__(self, config: ServerConfig) -> None:
        self._limit = config.max_concurrent_requests
        self._per_key = config.max_requests_per_key
        self._by_key: Counter[str] = Counter()
        self.num_active = 0

    @contextlib.contextmanager
    def hold(self, key: str | None) -> Iterator[None]:
        """Hold one request slot for the duration of the context.

        Raises
        ------
        APIError
            429, if the limit is reached.
        """
        if self.num_active >= self._limit:
            message = f"the server has {self._limit} unfinished requests, its maximum"
            raise APIError(429, message, headers=_RETRY)
        if key is not None and self._by_key[key] >= self._share(key):
            count = self._by_key[key]
            raise APIError(
                429, f"the key has {count} unfinished requests, its share", headers=_RETRY
            )
        self.num_active += 1
        if key is not None:
            self._by_key[key] += 1
        try:
            yield
        finally:
            self.num_active -= 1
            if key is not None:
                self._by_key[key] -= 1
                if not self._by_key[key]:
                    del self._by_key[key]

    def _share(self, key: str) -> int:
        """Return the number of requests that this key may have at present."""
        if self._per_key is not None:
            return self._per_key
        if self._limit - self.num_active > self._limit // 8:
            return self._limit
        num_others = len(self._by_key) - (self._by_key[key] > 0)
        return max(1, self._limit // (num_others + 2))  # one share stays free for a new key
