"""Frames: reading ahead, comments, errors before and after the first frame, disconnects."""

from __future__ import annotations

import asyncio
import json

import pytest

from engine.errors import EngineError
from engine.server.protocol.errors import APIError
from engine.server.read_ahead import ReadAhead
from engine.server.sse import DONE, ClientGone, EventStream, unless_disconnected


def _run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


class _Connection:
    """The two ends of a request: what was sent, and a client that may go."""

    def __init__(self):
        self.messages = []
        self.gone = asyncio.Event()
        self.may_write = asyncio.Event()
        self.may_write.set()

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        await self.may_write.wait()
        self.messages.append(message)

    @property
    def bodies(self):
        return [m["body"] for m in self.messages if m["type"] == "http.response.body"]


async def _items(*items, queue=None, closed=None):
    try:
        for item in items:
            if isinstance(item, Exception):
                raise item
            if isinstance(item, float):
                await asyncio.sleep(item)
            else:
                yield item
        while queue is not None:
            yield await queue.get()
    finally:
        if closed is not None:
            closed.append(True)


# ---- ReadAhead


def test_read_ahead_gives_every_item_once_whatever_the_calls():
    async def main(pattern):
        queue = asyncio.Queue()
        reader = ReadAhead(_items(b"0", b"1", 0.001, b"2", 0.0, b"3"))
        found = []
        for use_poll in pattern * 20:
            item = reader.poll() if use_poll else await reader.next()
            if item is None and not use_poll:
                break
            if item is not None:
                found.append(item)
        assert queue.empty()
        return found

    for pattern in ([0], [0, 1], [1, 0], [1, 1, 0], [0, 0, 1]):
        assert _run(main(pattern)) == [b"0", b"1", b"2", b"3"]


def test_poll_does_not_wait_and_next_goes_on_waiting():
    async def main():
        queue, closed = asyncio.Queue(), []
        reader = ReadAhead(_items(queue=queue, closed=closed))
        assert reader.poll() is None
        assert reader.poll() is None
        queue.put_nowait(b"a")
        queue.put_nowait(b"b")
        assert await reader.next() == b"a"
        assert reader.poll() == b"b"
        assert reader.poll() is None
        waiting = asyncio.ensure_future(reader.next())
        await asyncio.sleep(0)
        queue.put_nowait(b"c")
        assert await waiting == b"c"
        assert reader.poll() is None
        await reader.close()
        assert closed == [True]

    _run(main())


def test_an_error_found_by_poll_is_raised_by_next():
    async def main():
        reader = ReadAhead(_items(b"a", KeyError("x")))
        assert await reader.next() == b"a"
        assert reader.poll() is None
        with pytest.raises(KeyError):
            await reader.next()

    _run(main())


def test_a_cancelled_reader_closes_the_generator():
    async def main(polls):
        closed = []
        reader = ReadAhead(_items(queue=asyncio.Queue(), closed=closed))
        if polls:
            reader.poll()
        task = asyncio.ensure_future(reader.next())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await reader.close()
        assert closed == [True]

    _run(main(False))
    _run(main(True))


# ---- EventStream


def test_frames_come_in_order_and_then_the_end():
    async def main():
        connection = _Connection()
        await EventStream(_items(b"1", 0.001, b"2"))({}, connection.receive, connection.send)
        return connection

    connection = _run(main())
    assert connection.messages[0]["status"] == 200
    assert b"".join(connection.bodies) == b"12" + DONE
    assert [m.get("more_body") for m in connection.messages[1:]] == [True, True, False]


def test_frames_that_piled_up_are_written_together():
    async def main():
        connection, queue = _Connection(), asyncio.Queue()
        stream = EventStream(_items(b"first", queue=queue))
        task = asyncio.ensure_future(stream({}, connection.receive, connection.send))
        await asyncio.sleep(0.01)
        connection.may_write.clear()
        for number in range(5):
            queue.put_nowait(b"%d" % number)
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        connection.may_write.set()
        await asyncio.sleep(0.01)
        task.cancel()
        return connection.bodies

    assert _run(main()) in ([b"first", b"0", b"1234"], [b"first", b"01234"])


def test_an_error_before_the_first_frame_is_raised():
    async def main():
        connection = _Connection()
        with pytest.raises(APIError):
            await EventStream(_items(APIError(400, "no")))({}, connection.receive, connection.send)
        assert connection.messages == []

    _run(main())


def test_a_later_error_is_a_frame():
    async def main():
        connection = _Connection()
        stream = EventStream(_items(b"1", EngineError("the engine has ended")))
        await stream({}, connection.receive, connection.send)
        return connection

    connection = _run(main())
    frame = b"".join(connection.bodies).removeprefix(b"1").removesuffix(DONE)
    assert json.loads(frame.removeprefix(b"data: "))["error"]["message"] == "the engine has ended"
    assert not connection.messages[-1].get("more_body")


@pytest.mark.parametrize("first", [(), (b"1",)])
def test_a_client_that_waits_hears_comments(first):
    async def main():
        connection = _Connection()
        stream = EventStream(_items(*first, 0.1, b"2"), keep_alive=0.02)
        await stream({}, connection.receive, connection.send)
        return connection

    connection = _run(main())
    body = b"".join(connection.bodies)
    assert 2 <= body.count(b": keep-alive\n\n") <= 5
    assert body.replace(b": keep-alive\n\n", b"") == b"".join(first) + b"2" + DONE
    assert connection.messages[0]["type"] == "http.response.start"


def test_a_disconnect_closes_the_generator_at_once():
    async def main():
        connection, closed = _Connection(), []
        stream = EventStream(_items(b"1", queue=asyncio.Queue(), closed=closed))
        task = asyncio.ensure_future(stream({}, connection.receive, connection.send))
        await asyncio.sleep(0.01)
        assert not closed
        connection.gone.set()
        await task
        assert closed == [True]

    _run(main())


def test_a_disconnect_closes_the_generator_of_a_slow_reader():
    async def main():
        connection, closed = _Connection(), []
        connection.may_write.clear()
        stream = EventStream(_items(b"1", b"2", queue=asyncio.Queue(), closed=closed))
        task = asyncio.ensure_future(stream({}, connection.receive, connection.send))
        await asyncio.sleep(0.01)
        connection.gone.set()
        await task
        assert closed == [True]

    _run(main())


def test_work_ends_with_the_connection():
    async def main():
        connection = _Connection()
        assert await unless_disconnected(connection.receive, asyncio.sleep(0, 5)) == 5
        with pytest.raises(ZeroDivisionError):
            await unless_disconnected(connection.receive, _raises())
        connection.gone.set()
        with pytest.raises(ClientGone):
            await unless_disconnected(connection.receive, asyncio.sleep(60))

    async def _raises():
        raise ZeroDivisionError

    _run(main())
