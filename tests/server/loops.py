"""An `EngineLoop` on a thread, for tests of its clients."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
import time

import pytest

from engine.server.engine_client import ZmqEngineClient
from engine.server.engine_loop import EngineLoop
from engine.server.sockets import bound_socket

TOKEN = "a token"


def run(coroutine, seconds=60):
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


@contextlib.contextmanager
def served(engine, transport="ipc", *, fails=False):
    """Serve `engine`; yield the loop and its address."""
    with tempfile.TemporaryDirectory() as folder:
        socket = bound_socket(
            f"ipc://{folder}/e" if transport == "ipc" else "tcp://127.0.0.1:*", TOKEN
        )
        address, errors = socket.last_endpoint.decode(), []
        loop = EngineLoop(engine, socket, TOKEN)

        def serve():
            try:
                loop.run()
            except BaseException as error:
                errors.append(error)
            finally:
                socket.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield loop, address
            _wait_until_idle(engine, thread)
        finally:
            loop.stop()
            thread.join(30)
            assert not thread.is_alive()
        assert bool(errors) == fails, errors


def _wait_until_idle(engine, thread):
    """Let the loop take what clients have said at last, and end the steps in flight."""
    end = time.monotonic() + 10
    while engine.has_unfinished_requests() and thread.is_alive() and time.monotonic() < end:
        time.sleep(0.005)


@contextlib.asynccontextmanager
async def connected(address, tokenizer=None):
    client = await asyncio.wait_for(ZmqEngineClient.connect(address, TOKEN, tokenizer), 20)
    try:
        yield client
    finally:
        await client.close()


async def collected(client, prompt, params, **options):
    """Return all outputs of a request."""
    return [output async for output in client.generate(prompt, params, **options)]


async def eventually(condition, seconds=60.0):
    """Wait until `condition()`, or the awaitable that it returns, is true."""
    for _ in range(int(seconds / 0.01)):
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return
        await asyncio.sleep(0.01)
    pytest.fail("it did not happen in time")
