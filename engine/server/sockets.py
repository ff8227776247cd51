"""ZeroMQ sockets between the engine process and API processes: bounded, with non-blocking sends.

Both ends derive their keys from the engine's token. CURVE refuses a connection whose client does
not know the engine's public key, before the first frame is read. Each message to the engine then
starts with a frame of fixed size that proves the token once more.

A message is split into frames of at most `FRAME_BYTES`, so that ZMQ_MAXMSGSIZE, which limits what a
stranger can make us hold, need not be as large as the largest message.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Any

import zmq
from zmq.utils import z85

from engine.errors import ConfigError

__all__ = [
    "FRAME_BYTES",
    "MAX_MESSAGE_BYTES",
    "Socket",
    "bound_socket",
    "connected_socket",
    "descriptor",
    "frames_of",
    "has_input",
    "proof_of",
    "received",
]

Socket = zmq.Socket[bytes]

FRAME_BYTES = 1 << 16  # maximum size of a frame
MAX_MESSAGE_BYTES = 1 << 28  # maximum size of a message: 50 million token ids
MAX_UNREAD = 1000  # maximum unread messages of an API process before its requests are aborted
_CURVE_BYTES = 64  # more than CURVE adds to a frame
_HANDSHAKE_MS = 10_000  # milliseconds until a connection that has not proved the key is closed
_POLLIN = int(zmq.POLLIN)  # as an int: `&` on the enum takes half as long as the poll itself
_PING_MS = 2000  # milliseconds; the peer's I/O thread answers even during a long step
_BACKLOG = 4096  # connections that wait for the I/O thread to accept them
_MAX_UNSENT = 10_000  # maximum messages queued for an engine that is in a long step


def bound_socket(address: str, token: str) -> Socket:
    """Return the engine's socket; clients connect to its `last_endpoint`.

    Parameters
    ----------
    address : str
        "ipc://<path>", or "tcp://127.0.0.1:*" for a free port.
    token : str
        The engine's token.

    Raises
    ------
    ConfigError
        If libzmq was built without CURVE.
    """
    socket = _new_socket(zmq.ROUTER, address)
    socket.curve_server = 1
    socket.curve_secretkey = _secret_key(token)
    socket.linger = 1000
    socket.sndhwm = MAX_UNREAD
    socket.rcvhwm = _MAX_UNSENT  # per client, whose own queue then fills up
    socket.backlog = _BACKLOG
    socket.router_mandatory = 1  # sending to a full or absent peer raises an error
    socket.bind(address)
    return socket


def connected_socket(address: str, token: str) -> tuple[Socket, Socket]:
    """Return a client's socket, and a monitor socket that reports when the engine is gone.

    The monitor also reports that the engine has another token. See `bound_socket`.
    """
    socket = _new_socket(zmq.DEALER, address)
    socket.curve_serverkey = zmq.curve_public(_secret_key(token))
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.linger = 0
    socket.sndhwm = _MAX_UNSENT
    socket.rcvhwm = MAX_UNREAD
    socket.setsockopt(zmq.IDENTITY, os.urandom(16).hex().encode())
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    socket.connect(address)
    return socket, monitor


def _new_socket(kind: int, address: str) -> Socket:
    if not zmq.has("curve"):
        raise ConfigError("the server needs a libzmq with CURVE, such as that of pyzmq's wheels")
    socket: Socket = zmq.Context.instance().socket(kind)
    socket.maxmsgsize = FRAME_BYTES + _CURVE_BYTES
    socket.handshake_ivl = _HANDSHAKE_MS
    if address.startswith("tcp:"):  # close the connection to a machine that answers no pings
        socket.heartbeat_ivl = _PING_MS
        socket.heartbeat_timeout = 5 * _PING_MS
    return socket


def _secret_key(token: str) -> bytes:
    """Return the engine's CURVE key; its public half is a secret too, which only clients know."""
    return z85.encode(hashlib.sha256(b"engine curve key " + token.encode()).digest())


def proof_of(token: str) -> bytes:
    """Return the first frame of each message to the engine: 32 bytes derived from its token."""
    return hashlib.sha256(b"engine message " + token.encode()).digest()


def frames_of(data: bytes) -> list[bytes]:
    """Split a message into frames.

    Examples
    --------
    >>> [len(frame) for frame in frames_of(bytes(FRAME_BYTES + 1))], frames_of(b"")
    ([65536, 1], [b''])
    """
    if len(data) <= FRAME_BYTES:
        return [data]
    return [data[at : at + FRAME_BYTES] for at in range(0, len(data), FRAME_BYTES)]


def received(frames: list[bytes], proof: bytes) -> tuple[bytes, bytes] | None:
    """Return the client's address and message, received by the engine; None from a stranger."""
    if len(frames) < 3 or not hmac.compare_digest(frames[1], proof):
        return None
    return frames[0], b"".join(frames[2:])


def has_input(socket: Socket) -> bool:
    """Return whether a message is ready to be received."""
    events: Any = socket.get(zmq.EVENTS)
    return bool(events & _POLLIN)


def descriptor(socket: Socket) -> int:
    """Return the file descriptor that becomes readable when the socket's state changes."""
    number: Any = socket.get(zmq.FD)
    return int(number)
