"""The Host header: its syntax, and the names under which the server may be addressed.

A web page can point its own name at another machine's address (DNS rebinding). To the browser the
server is then part of that page's site, and the page may call everything and read the answers. Only
the Host header tells: it holds the page's name, which has to be a public one. Addresses and names
that only a private network resolves are therefore harmless.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable

from starlette.datastructures import Headers

from engine.checks import shown
from engine.server.protocol.errors import APIError
from engine.server.server_config import ServerConfig

__all__ = ["AllowedHosts", "check_one_host", "is_same_host"]

# The zone of a link-local address ("%eth0", or "%25eth0" as in a URL) names an interface of the
# client's machine; some clients send it.
_ZONE = r"(?:%[A-Za-z0-9._~%-]{1,64})?"
_HOST = re.compile(
    rf"(\[[0-9A-Fa-f:.]{{2,45}}{_ZONE}\]|[A-Za-z0-9._-]{{1,255}})(?::([0-9]{{0,5}}))?"
)
_PRIVATE_SUFFIXES = (".localhost", ".local", ".internal")


def check_one_host(headers: Iterable[tuple[bytes, bytes]], version: str) -> None:
    """Check that a request has one valid Host header; HTTP/1.0 may leave it out.

    Raises
    ------
    APIError
        400, if it has several, none, or one that is not a host with an optional port.
    """
    found = [value for name, value in headers if name == b"host"]
    if len(found) != 1 and not (version == "1.0" and not found):
        raise APIError(400, f"a request must have one Host header; got {len(found)}")
    for value in found:
        _split(value.decode("latin-1"))


def is_same_host(first: str, second: str) -> bool:
    """Return whether two values of a Host header name the same host and port.

    Examples
    --------
    >>> is_same_host("Example.com:80", "example.com")
    True
    >>> is_same_host("example.com", "example.com:8000")
    False
    """
    return [name or "80" for name in _split(first)] == [name or "80" for name in _split(second)]


def _split(host: str) -> tuple[str, str]:
    """Return a host's name in lower case, without a dot at its end, and its port or ""."""
    found = _HOST.fullmatch(host)
    if found is None or int(found[2] or 0) > 65535:
        raise APIError(400, f"the Host header must be a host and a port; got {shown(host)}")
    return found[1].lower().removesuffix("."), found[2] or ""


class AllowedHosts:
    """The hosts under which a server may be addressed: `allowed_hosts`, or a default.

    An entry is a name (any port), a name and a port, ``*.example.com`` (all names below it), or
    ``*``. The machine's own names for itself (``localhost``, 127.0.0.1, ...) are always allowed.
    Without entries:

    - with an API key, all: a page does not know it;
    - without one, when listening on the loopback: `host`;
    - without one, when listening on other addresses: every IP address, names without a dot or below
      ``.local`` or ``.internal``, `host`, and this machine's name.

    Parameters
    ----------
    config : ServerConfig

    Examples
    --------
    >>> AllowedHosts(ServerConfig()).allows("localhost:8000")
    True
    >>> AllowedHosts(ServerConfig()).allows("example.com")
    False
    >>> AllowedHosts(ServerConfig(host="0.0.0.0")).allows("10.1.2.3:8000")
    True
    >>> AllowedHosts(ServerConfig(allowed_hosts=("*.example.com",))).allows("api.example.com")
    True
    """

    def __init__(self, config: ServerConfig) -> None:
        given = config.allowed_hosts
        self._allows_all = "*" in given or (config.needs_key and not given)
        self._allows_private = not given and not _is_loopback(config.host)
        names = given or ((config.host,) if _is_loopback(config.host) else _own_names(config.host))
        self._suffixes = tuple(n[1:].lower() for n in names if n.startswith("*."))
        self._names = frozenset(n.lower() for n in names)

    def allows(self, host: str) -> bool:
        """Return whether a value of the Host header is allowed.

        Raises
        ------
        APIError
            400, if it is not a host.
        """
        if self._allows_all:
            return True
        name, port = _split(host)
        return (
            _is_loopback(name)
            or not self._names.isdisjoint((name, f"{name}:{port}", name.strip("[]")))
            or name.endswith(self._suffixes)
            or (self._allows_private and _is_private(name))
        )

    def check(self, headers: Headers) -> None:
        """Check a request's Host header; HTTP/1.0 may leave it out, which no browser does.

        Raises
        ------
        APIError
            403, if the server may not be addressed by it.
        """
        for host in headers.getlist("host"):
            if not self.allows(host):
                raise APIError(
                    403, f"the host {shown(host)} is not allowed; see the option --allowed-hosts"
                )


def _own_names(host: str) -> tuple[str, ...]:
    """Return the names of a server that listens on `host`, an address or name for the network."""
    return (host, socket.gethostname(), socket.getfqdn())


def _is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _address(name)
    return address is not None and address.is_loopback


def _is_private(name: str) -> bool:
    """Return whether no page of the internet can have this host name."""
    return _address(name) is not None or "." not in name or name.endswith(_PRIVATE_SUFFIXES)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.strip("[]").partition("%")[0])
    except ValueError:
        return None
