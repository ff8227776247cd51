"""The ZeroMQ sockets between engine process and API processes: bounded, sends never block."""

from __future__ import annotations

import os
from typing import Any

import zmq

__all__ = ["Socket", "bound_socket", "connected_socket", "descriptor", "has_input"]

Socket = zmq.Socket[bytes]

MAX_UNREAD = 1000  # unread messages of an API process above which its requests are aborted
_POLLIN = int(zmq.POLLIN)  # an int: `&` of the enum takes half as long as polling the socket
_PING_MS = 2000  # answered by the peer's I/O thread, even during a long step
_MAX_UNSENT = 10_000  # maximum messages that wait for an engine in a long step


def bound_socket(address: str) -> Socket:
    """Return the engine's socket; clients connect to its `last_endpoint`.

    Parameters
    ----------
    address : str
        "ipc://<path>", or "tcp://127.0.0.1:*" for a free port.
    """
    socket: Socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.linger = 1000
    socket.sndhwm = MAX_UNREAD
    socket.rcvhwm = 0  # no limit: each client bounds its own messages
    socket.router_mandatory = 1  # sending to a full or absent peer raises
    _notice_silence(socket, address)
    socket.bind(address)
    return socket


def connected_socket(address: str) -> tuple[Socket, Socket]:
    """Return a client's socket, and a monitor socket that reports when its engine has ended."""
    socket: Socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.sndhwm = _MAX_UNSENT
    socket.rcvhwm = MAX_UNREAD
    _notice_silence(socket, address)
    socket.setsockopt(zmq.IDENTITY, os.urandom(16).hex().encode())
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    socket.connect(address)
    return socket, monitor


def _notice_silence(socket: Socket, address: str) -> None:
    """End the connection to a machine that stops answering pings."""
    if address.startswith("tcp:"):
        socket.heartbeat_ivl = _PING_MS
        socket.heartbeat_timeout = 5 * _PING_MS


def has_input(socket: Socket) -> bool:
    """Return whether a message can be received."""
    events: Any = socket.get(zmq.EVENTS)
    return bool(events & _POLLIN)


def descriptor(socket: Socket) -> int:
    """Return the file descriptor that becomes readable when the socket's state changes."""
    number: Any = socket.get(zmq.FD)
    return int(number)
