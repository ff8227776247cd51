"""Connections between stages: what arrives, and who is refused."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest

from engine.distributed.connection import Listener, connect, parse_address
from engine.errors import RankError

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
                sock.sendall(b"engine pipeline 1\n" + bytes(32))
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


@pytest.mark.parametrize("where", ["checksum", "size"])
def test_a_damaged_message_is_found(listener, where):
    ours = connect(("127.0.0.1", listener.port), SECRET)
    _until(lambda: listener.accepted)
    [theirs] = listener.accepted
    head = {"checksum": b"\1\0\0\0" + (24).to_bytes(8, "little"), "size": b"\0" * 4 + b"\xff" * 8}
    ours._socket.sendall(head[where] + bytes(24))
    with pytest.raises(RankError, match="is damaged"):
        theirs.receive()
    ours.close()


def test_addresses():
    assert parse_address("[::1]:80") == ("::1", 80)
    for text in ("host", "host:", ":1", "host:70000", "host:x"):
        with pytest.raises(ValueError, match="an address must be HOST:PORT"):
            parse_address(text)
