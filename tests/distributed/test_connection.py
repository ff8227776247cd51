"""Connections between stages: what arrives, and who is refused."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
import zlib

import numpy as np
import pytest

from engine.distributed import connection
from engine.distributed.connection import Listener, connect, parse_address
from engine.distributed.messages import pack, unpack
from engine.errors import RankError
from tests.attack import frames

SECRET = b"a secret of a test"


@pytest.fixture
def listener():
    accepted = []
    listener = Listener("127.0.0.1", 0, SECRET, accepted.append)
    listener.accepted = accepted
    yield listener
    for each in (listener, *accepted):
        each.close()


def _until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_arrays_arrive_as_they_are(listener):
    ours = connect(("127.0.0.1", listener.port), SECRET)
    _until(lambda: listener.accepted)
    [theirs] = listener.accepted
    large = np.arange(3_000_000, dtype=np.int32).reshape(1000, -1)[:, ::2]  # not contiguous
    sender = threading.Thread(
        target=ours.send, args=(7, [1, -2], [None, large, np.zeros((0, 3), np.uint8)])
    )
    sender.start()
    kind, numbers, arrays = theirs.receive()
    sender.join()
    ours.close()
    assert (kind, numbers, arrays[0], arrays[2].shape) == (7, [1, -2], None, (0, 3))
    np.testing.assert_array_equal(arrays[1], large)
    arrays[1][0] = 5  # layers write into what has arrived


def test_a_wrong_secret_is_refused(listener):
    with pytest.raises(RankError, match="is the secret the same"):
        connect(("127.0.0.1", listener.port), b"another secret")
    _until(lambda: listener.num_refused == 1)
    assert not listener.accepted


def test_a_listener_that_does_not_know_the_secret_is_refused():
    """It takes what it is sent, but its own proof is wrong."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend():
            with server.accept()[0] as sock:
                sock.sendall(b"engine pipeline 2\n" + bytes(32))
                sock.recv(64, socket.MSG_WAITALL)
                sock.sendall(bytes(32))

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(RankError, match="does not know the secret of this pipeline"):
            connect(server.getsockname(), SECRET)


def test_whoever_says_something_else_is_refused(listener):
    with socket.create_connection(("127.0.0.1", listener.port)) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n" + b"x" * 100)
        _until(lambda: listener.num_refused == 1)
    assert not listener.accepted


@pytest.mark.parametrize("count", [1, (1 << 18) - 36, 1 << 18, (1 << 20) + 3])
def test_a_flipped_bit_is_found(listener, count):
    """In messages that are sent at once, and in pieces."""
    ours = connect(("127.0.0.1", listener.port), SECRET)
    _until(lambda: listener.accepted)
    [theirs] = listener.accepted
    array = np.arange(count, dtype=np.uint8)
    received = []
    thread = threading.Thread(target=lambda: received.append(theirs.receive()))
    thread.start()
    ours.send(7, [3], [array, None])
    thread.join()
    kind, numbers, [found, nothing] = received[0]
    np.testing.assert_array_equal(found, array)
    assert (kind, numbers, nothing) == (7, [3], None) and found.flags.writeable
    frame = bytearray().join(_frame(7, [3], [array]))
    frame[len(frame) // 2] ^= 16
    sender = threading.Thread(target=ours._socket.sendall, args=(frame,))
    sender.start()
    with pytest.raises(RankError, match="its checksum is wrong"):
        theirs.receive()
    sender.join()
    ours.close()


def _frame(*message):
    data = pack(*message)
    return len(data).to_bytes(8, "little"), data, zlib.crc32(data).to_bytes(4, "little")


@pytest.mark.parametrize("where", ["checksum", "size"])
def test_a_damaged_message_is_found(listener, where):
    ours = connect(("127.0.0.1", listener.port), SECRET)
    _until(lambda: listener.accepted)
    [theirs] = listener.accepted
    size = {"checksum": (24).to_bytes(8, "little"), "size": b"\xff" * 8}
    ours._socket.sendall(size[where] + bytes(24) + b"\1\0\0\0")
    with pytest.raises(RankError, match="is damaged"):
        theirs.receive()
    ours.close()


def test_an_accept_that_fails_is_tried_again(listener, caplog):
    """Without a free descriptor `accept` fails with EMFILE, which is no reason to stop."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = [socket.socket() for _ in range(3)]
    used = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
    spare = []
    try:
        with contextlib.suppress(OSError):
            while True:
                spare.append(os.dup(0))
        for each in waiting:
            each.connect(("127.0.0.1", listener.port))
        _until(lambda: "connections cannot be accepted" in caplog.text)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in spare:
            os.close(number)
    for each in waiting:
        each.close()
    _until(lambda: listener.num_refused == 3)
    connect(("127.0.0.1", listener.port), SECRET).close()
    _until(lambda: listener.accepted)


def test_strangers_get_a_few_threads_and_the_next_stage_gets_in(listener, monkeypatch):
    before = threading.active_count()
    strangers = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(150)]
    try:
        _until(lambda: listener.num_refused >= 150 - connection._MAX_HANDSHAKES)
        assert threading.active_count() - before <= connection._MAX_HANDSHAKES + 1
        connect(("127.0.0.1", listener.port), SECRET).close()
        _until(lambda: listener.accepted)
    finally:
        for each in strangers:
            each.close()
    _until(lambda: not listener._proving)
    assert listener.num_refused == 150


def test_a_byte_now_and_then_does_not_prolong_the_handshake(monkeypatch):
    monkeypatch.setattr(connection, "_PROOF_SECONDS", 0.2)
    accepted = []
    listener = Listener("127.0.0.1", 0, SECRET, accepted.append)
    begin = time.monotonic()
    with (
        socket.create_connection(("127.0.0.1", listener.port)) as sock,
        contextlib.suppress(OSError),
    ):
        while not listener.num_refused:
            assert time.monotonic() - begin < 1.5
            sock.sendall(b"x")
            time.sleep(0.05)
    assert listener.num_refused == 1 and not accepted
    listener.close()


def test_damaged_messages_of_stages_are_one_kind_of_error():
    assert frames.unpack_failures(2000, 5) == 0
    for fields in ([1, -1, 0], [1, 0, 1, 0, -1], [1, 0, 1, 4, 2, -1, -1], [1, 0, 1, 99, 1, 0]):
        with pytest.raises(RankError, match="is damaged"):
            unpack(np.array(fields, np.int64).tobytes())


def test_addresses():
    assert parse_address("[::1]:80") == ("::1", 80)
    for text in ("host", "host:", ":1", "host:70000", "host:x"):
        with pytest.raises(ValueError, match="an address must be HOST:PORT"):
            parse_address(text)
