"""Hostile frames on the engine's socket: no process ends, no other client's answer changes."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import msgspec
import pytest
import zmq

from engine.checks import parse_object
from engine.errors import EngineError, RequestError
from engine.sampling_params import SamplingParams
from engine.server import engine_client, engine_loop, messages, sockets
from engine.server.engine_client import ZmqEngineClient
from tests.attack import frames
from tests.e2e.tiny import check_drained, make_engine, tiny_model
from tests.server.loops import TOKEN, collected, connected, eventually, run, served


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_hostile_frames_end_nothing_and_change_no_answer(transport):
    engine = make_engine(tiny_model())
    hostile = frames.hostile(7, 80)
    with served(engine, transport) as (loop, address):
        frames.send_as_stranger(address, hostile)
        assert asyncio.run(frames.send_as_client(address, hostile)) == 0
        assert loop._num_clients >= 2  # they have been heard
    check_drained(engine)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_hostile_frames(seed):
    engine = make_engine(tiny_model())
    with served(engine) as (_, address):
        assert asyncio.run(frames.send_as_client(address, frames.hostile(seed, 3000))) == 0
    check_drained(engine)


def test_two_requests_of_one_id_do_not_end_the_engine():
    """The second comes when the first is aborted, and its last output not yet sent."""

    async def main(address):
        bad, monitor = sockets.connected_socket(address, TOKEN)
        add = messages.Add(3, "s", [1], {"max_tokens": 50}, False, 0, None, None)
        first = messages.Add(1, "r", [1], {"max_tokens": 50}, False, 0, None, None)
        second = messages.Add(2, "r", [1], {"max_tokens": 50}, False, 0, None, None)
        hello = messages.Hello()
        async with connected(address) as client:
            for message in (hello, first, messages.Abort(1), second, add, hello):
                data = msgspec.msgpack.encode(message)
                bad.send_multipart([sockets.proof_of(TOKEN), data])
            found = await collected(client, [1, 2], SamplingParams(max_tokens=3))
            bad.disable_monitor()
            monitor.close(linger=0)
            bad.close(linger=0)
            return found[-1].outputs[0].finish_reason

    engine = make_engine(tiny_model())
    with served(engine) as (_, address):
        assert run(main(address)) == "length"
    check_drained(engine)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91" * 2000 + b"\xc0",
        b"\x92\xa4Drop\xd9\x02\xff\xfe",
        b"\x91\xa2\xff\xfe",
        b"\xdd\xff\xff\xff\xff",
        b"\x92\xa4Drop\xcf" + b"\xff" * 9,
    ],
)
def test_what_is_no_message_is_one_kind_of_error(data):
    with pytest.raises(EngineError, match=f"a message of {len(data)} bytes cannot be read"):
        messages.decode(data, messages.FromClient)


def test_a_token_of_another_length_or_content_opens_nothing():
    proof = sockets.proof_of(TOKEN)
    hello = msgspec.msgpack.encode(messages.Hello())
    assert sockets.received([b"peer", proof, hello], proof) == (b"peer", hello)
    for wrong in ([b"peer"], [b"peer", proof], [b"peer", hello], [b"peer", proof[:-1], hello]):
        assert sockets.received(wrong, proof) is None
    for token in ("", "another", "t\xf6ken", proof.hex()):
        assert sockets.received([b"peer", sockets.proof_of(token), hello], proof) is None


def test_a_client_with_another_token_is_refused_and_told_so():
    async def main(address):
        with pytest.raises(EngineError, match="has ended"):
            await ZmqEngineClient.connect(address, "another token")
        async with connected(address) as client:
            assert (await collected(client, [1, 2], SamplingParams(max_tokens=3)))[-1].finished

    with served(make_engine(tiny_model())) as (_, address):
        run(main(address), 20)


def test_strangers_cannot_make_the_engine_hold_their_bytes(tmp_path):
    """1 GiB announced, and messages of endless parts: neither is kept."""
    socket = sockets.bound_socket(f"ipc://{tmp_path}/e", TOKEN)
    page = os.sysconf("SC_PAGE_SIZE")
    try:
        assert 0 < socket.maxmsgsize < 1 << 17 and socket.rcvhwm > 0 and socket.sndhwm > 0

        def memory():
            return int(Path("/proc/self/statm").read_text().split()[1]) * page

        before = memory()
        sent, most = frames.flood(f"ipc://{tmp_path}/e", 0.5, memory)
        assert sent and most - before < 16e6
    finally:
        socket.close(linger=0)


def test_large_messages_arrive_in_frames_and_too_large_ones_are_refused(monkeypatch):
    large = SamplingParams(
        temperature=0.0, max_tokens=3, ignore_eos=True, logit_bias={i: -1.0 for i in range(50, 90)}
    )

    async def main(address):
        async with connected(address) as client:
            want = (await collected(client, [1] * 200, large))[-1].outputs
            monkeypatch.setattr(sockets, "FRAME_BYTES", 16)
            assert (await collected(client, [1] * 200, large))[-1].outputs == want
            monkeypatch.setattr(engine_client, "MAX_MESSAGE_BYTES", 200)
            with pytest.raises(RequestError, match="at most 200 bytes between the processes"):
                await collected(client, [1] * 200, large)
            with pytest.raises(RequestError, match="at most 200 bytes between the processes"):
                await client.embed([[1] * 200])
            assert not client._requests and not client._calls
            monkeypatch.setattr(engine_loop, "MAX_MESSAGE_BYTES", 1000)
            small = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
            found = await asyncio.gather(
                collected(client, [1, 2], small),
                collected(client, [3, 4], SamplingParams(max_tokens=30, logprobs=-1)),
                client.embed([[1]] * 9),
                return_exceptions=True,
            )
            assert found[0][-1].finished
            for error in found[1:]:
                assert isinstance(error, RequestError) and "at most 1000 bytes" in str(error)
            await eventually(lambda: not client._requests)

    engine = make_engine(tiny_model())
    with served(engine) as (_, address):
        run(main(address))
    check_drained(engine)


def test_an_engine_that_sends_garbage_ends_its_client_with_the_reason(tmp_path):
    async def main():
        address = f"ipc://{tmp_path}/e"
        socket = sockets.bound_socket(address, TOKEN)
        client = ZmqEngineClient(*sockets.connected_socket(address, TOKEN), TOKEN, None)
        client._send(messages.Hello())
        peer = (await asyncio.to_thread(socket.recv_multipart))[0]
        socket.send_multipart([peer, b"\x91" * 2000])
        await eventually(lambda: client.error is not None)
        await client.close()
        socket.close(linger=0)
        return str(client.error)

    assert "the engine sent a wrong message" in run(main())


def test_one_wrong_update_fails_one_request():
    async def main(address):
        async with connected(address) as client:
            streams = [client.generate([1, i], SamplingParams(max_tokens=60)) for i in (5, 6)]
            for stream in streams:
                await anext(stream)
            handle = client._handles[next(iter(client._handles))]
            wrong = messages.Continuation(3, [1], None, None, None)
            client._take(
                messages.StepResult(
                    [], [], [messages.Piece(handle, [wrong], False, 0, None, None, None)]
                )
            )
            with pytest.raises(IndexError):
                async for _ in streams[0]:
                    pass
            assert [output async for output in streams[1]][-1].finished

    engine = make_engine(tiny_model())
    with served(engine) as (_, address):
        run(main(address))
    check_drained(engine)


def test_objects_of_other_processes_never_raise():
    random_ = random.Random(1)
    legal = b'{"reason": "a step has failed", "status": 2, "alive": true}'
    for _ in range(300):
        data = bytearray(legal)
        for _ in range(3):
            data[random_.randrange(len(data))] = random_.randrange(256)
        found = parse_object(bytes(data))
        assert found is None or isinstance(found, dict)
    for data in (b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b"[]", b"1" * 5000, ""):
        assert parse_object(data) is None


def test_every_socket_is_bounded():
    context = zmq.Context.instance()
    assert context is zmq.Context.instance()
    client, monitor = sockets.connected_socket("ipc:///nowhere", TOKEN)
    try:
        assert 0 < client.maxmsgsize < 1 << 17 and client.rcvhwm > 0 and client.sndhwm > 0
    finally:
        client.disable_monitor()
        monitor.close(linger=0)
        client.close(linger=0)
