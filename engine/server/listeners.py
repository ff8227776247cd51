"""Listening sockets: one per address of the host and API process."""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import Any

from engine.errors import ConfigError
from engine.server.server_config import ServerConfig

__all__ = ["BACKLOG", "listening_sockets"]

# Clients beyond it wait for a second before they try again; the kernel has a limit of its own
# (net.core.somaxconn, 4,096 by default).
BACKLOG = 4096
_MAX_TRIES = 16  # attempts to find a port that is free on all addresses
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)

_Address = tuple[int, tuple[Any, ...]]
"""Address family, and the address to pass to `bind`."""


def listening_sockets(server: ServerConfig) -> list[list[socket.socket]]:
    """Return the listening sockets of each API process, all on the same port.

    Each process gets a socket for each address that `host` resolves to: "localhost" is 127.0.0.1
    and ::1 on most machines, and clients may try either first. Addresses of an unsupported family
    are skipped, unless no other is left.

    Processes do not share a socket: the kernel balances connections over sockets, but not over
    processes that accept from the same socket.

    Raises
    ------
    ConfigError
        If the host is unknown, or the port is in use on one of its addresses.
    """
    try:
        addresses = _addresses(server.host, server.port)
        # First bind without SO_REUSEPORT, so that two servers cannot share a port by mistake.
        first = _on_one_port(addresses)
        if server.api_server_count == 1:
            return [first]
        bound: list[_Address] = [(each.family, each.getsockname()) for each in first]
        _close(first)
        return [_listen(bound, reuse_port=True) for _ in range(server.api_server_count)]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {server.host}:{server.port}: {reason}") from error


def _addresses(host: str, port: int) -> list[_Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _on_one_port(addresses: list[_Address]) -> list[socket.socket]:
    """Return sockets on the same port; for port 0, one that is free on all addresses."""
    for _ in range(_MAX_TRIES - 1):
        try:
            return _listen(addresses)
        except OSError as error:
            # The port chosen for the first address may be in use on another.
            if error.errno != errno.EADDRINUSE or addresses[0][1][1] != 0:
                raise
    return _listen(addresses)


def _listen(addresses: list[_Address], *, reuse_port: bool = False) -> list[socket.socket]:
    """Return a socket per address, all on the first one's port."""
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    with contextlib.ExitStack() as on_error:
        on_error.callback(_close, sockets)
        for family, (host, port, *rest) in addresses:
            if sockets:
                port = sockets[0].getsockname()[1]
            try:
                sockets.append(
                    socket.create_server(
                        (host, port, *rest),
                        family=family,
                        backlog=BACKLOG,
                        reuse_port=reuse_port,
                    )
                )
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                missing = error
        if missing is not None and not sockets:
            raise missing
        on_error.pop_all()
    return sockets


def _close(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()
