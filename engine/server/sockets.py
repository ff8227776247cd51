"""The ZeroMQ sockets between engine process and API processes: bounded, never waiting to send."""

from __future__ import annotations

import os
from typing import Any

import zmq

__all__ = ["Socket", "bound_socket", "connected_socket", "descriptor", "has_input"]

Socket = zmq.Socket[bytes]

MAX_UNREAD = 1000  # messages that wait for an API process, before its requests are aborted
_POLLIN = int(zmq.POLLIN)  # `&` of an enum takes half as long as asking the socket
_PING_MS = 2000  # answered by the other side's thread for input and output, also in a long step
_MAX_UNSENT = 10_000  # messages that wait for an engine in a long step


def bound_socket(address: str) -> Socket:
    """Return the engine's socket; its `last_endpoint` is what clients connect to.

    Parameters
    ----------
    address : str
        "ipc://<path>", or "tcp://127.0.0.1:*" for a free port.
    """
    socket: Socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.linger = 1000
    socket.sndhwm = MAX_UNREAD
    socket.rcvhwm = 0  # each client bounds what it has in flight
    socket.router_mandatory = 1  # a full or absent peer is an error
    _notice_silence(socket, address)
    socket.bind(address)
    return socket


def connected_socket(address: str) -> tuple[Socket, Socket]:
    """Return a client's socket, and the one that tells when its engine has gone."""
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
    """End connections to machines that do not answer any more."""
    if address.startswith("tcp:"):
        socket.heartbeat_ivl = _PING_MS
        socket.heartbeat_timeout = 5 * _PING_MS


def has_input(socket: Socket) -> bool:
    """Tell whether there is a message to take."""
    events: Any = socket.get(zmq.EVENTS)
    return bool(events & _POLLIN)


def descriptor(socket: Socket) -> int:
    """Return what becomes readable when the state of the socket changes."""
    number: Any = socket.get(zmq.FD)
    return int(number)
