"""ZeroMQ sockets between the engine process and API processes: bounded, with non-blocking sends."""

from __future__ import annotations

import os
from typing import Any

import zmq

__all__ = ["Socket", "bound_socket", "connected_socket", "descriptor", "has_input"]

Socket = zmq.Socket[bytes]

MAX_UNREAD = 1000  # maximum unread messages of an API process before its requests are aborted
_POLLIN = int(zmq.POLLIN)  # as an int: `&` on the enum takes half as long as the poll itself
_PING_MS = 2000  # milliseconds; the peer's I/O thread answers even during a long step
_MAX_UNSENT = 10_000  # maximum messages queued for an engine that is in a long step


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
    socket.rcvhwm = 0  # no limit: each client bounds its own queue
    socket.router_mandatory = 1  # sending to a full or absent peer raises an error
    _notice_silence(socket, address)
    socket.bind(address)
    return socket


def connected_socket(address: str) -> tuple[Socket, Socket]:
    """Return a client's socket, and a monitor socket that reports when the engine is gone."""
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
    """Enable pings, so that the connection to a machine that stops answering them is closed."""
    if address.startswith("tcp:"):
        socket.heartbeat_ivl = _PING_MS
        socket.heartbeat_timeout = 5 * _PING_MS


def has_input(socket: Socket) -> bool:
    """Return whether a message is ready to be received."""
    events: Any = socket.get(zmq.EVENTS)
    return bool(events & _POLLIN)


def descriptor(socket: Socket) -> int:
    """Return the file descriptor that becomes readable when the socket's state changes."""
    number: Any = socket.get(zmq.FD)
    return int(number)
