"""The sockets of the server: which addresses, which port, and what is refused."""

from __future__ import annotations

import errno
import socket

import pytest

from engine.errors import ConfigError
from engine.server import listeners
from engine.server.listeners import listening_sockets
from engine.server.server_config import ServerConfig

V4 = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))
V6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))
# An address for documentation (RFC 5737), which no machine has.
ELSEWHERE = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="needs ::1")


@pytest.fixture
def sockets(monkeypatch):
    """Call `sockets(addresses, **options)` to listen on a name that has these addresses."""
    opened = []

    def listen(addresses, port=0, **options):
        found = [(*each[:4], (each[4][0], port, *each[4][2:])) for each in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        opened.extend(listening_sockets(ServerConfig(host="name", port=port, **options)))
        return opened

    yield listen
    for each in opened:
        listeners._close(each)


def _hosts(opened):
    return [[each.getsockname()[0] for each in process] for process in opened]


def _ports(opened):
    return {each.getsockname()[1] for process in opened for each in process}


@needs_ipv6
@pytest.mark.parametrize("count", [1, 3])
def test_every_process_listens_on_every_address(sockets, count):
    opened = sockets([V6, V4, V4], api_server_count=count)
    assert _hosts(opened) == [["::1", "127.0.0.1"]] * count
    [port] = _ports(opened)
    for (family, *_), host in ((V6, "::1"), (V4, "127.0.0.1")):
        with socket.socket(family) as connection:
            connection.connect((host, port))


@pytest.mark.parametrize("count", [1, 2])
def test_an_address_that_the_machine_does_not_have_is_left_out(sockets, count):
    opened = sockets([ELSEWHERE, V4], api_server_count=count)
    assert _hosts(opened) == [["127.0.0.1"]] * count


def test_no_address_of_the_machine_is_an_error(sockets):
    with pytest.raises(ConfigError, match=r"cannot listen on name:0: .*192\.0\.2\.1"):
        sockets([ELSEWHERE])


@needs_ipv6
@pytest.mark.parametrize("count", [1, 2])
def test_a_port_that_one_address_has_in_use_is_named(sockets, count):
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"listen on name:{port}: .*in use.*::1"):
            sockets([V4, V6], port=port, api_server_count=count)
    socket.create_server(("127.0.0.1", port)).close()  # nothing was left open


@needs_ipv6
def test_another_free_port_is_taken_if_an_address_has_it_in_use(sockets, monkeypatch):
    create, failures = socket.create_server, []

    def refuse_once(address, **options):
        if options.get("family") == socket.AF_INET6 and not failures:
            failures.append(address)
            raise OSError(errno.EADDRINUSE, "in use")
        return create(address, **options)

    monkeypatch.setattr(socket, "create_server", refuse_once)
    opened = sockets([V4, V6])
    assert failures and _hosts(opened) == [["127.0.0.1", "::1"]] and len(_ports(opened)) == 1


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for count in (1, 2):
            with pytest.raises(ConfigError, match=f"listen on 127.0.0.1:{port}"):
                listening_sockets(ServerConfig(port=port, api_server_count=count))


def test_two_servers_cannot_share_a_port(sockets):
    opened = sockets([V4], api_server_count=3)
    [port] = _ports(opened)
    assert len(opened) == 3
    with pytest.raises(ConfigError, match="in use"):
        sockets([V4], port=port, api_server_count=2)


def test_an_impossible_host_is_named():
    with pytest.raises(ConfigError, match=r"cannot listen on a\.\.b:0"):
        listening_sockets(ServerConfig(host="a..b", port=0))
