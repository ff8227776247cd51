"""HTTP as strangers speak it: framing, deadlines, crowds and hosts, over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import socket
import ssl
import struct
import time

import pytest

from engine.server import connection_pool, http_protocol, limits
from engine.server.connection_pool import ConnectionPool
from engine.server.hosts import AllowedHosts
from engine.server.logs import configure_logging
from engine.server.protocol.errors import APIError
from engine.server.server_config import ServerConfig, key_hash
from tests.server.serving import CannedClient, serve

BODY = json.dumps({"prompt": "a"}).encode()
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CLOSE = b"Connection: close\r\n"


@pytest.fixture(scope="module")
def server():
    with serve(lambda: CannedClient("ok"), ServerConfig(max_header_bytes=4096)) as found:
        yield found


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def read_all(connection):
    found = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(65536):
            found += data
    return found


def ask(server, data):
    """Return everything that the server answers, until it closes the connection."""
    with connect(server) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        return read_all(connection)


def read_answer(connection):
    """Return one answer with a declared length."""
    found = connection.recv(65536)
    length = re.search(rb"content-length: (\d+)\r\n", found)
    while len(found.partition(b"\r\n\r\n")[2]) < int(length[1]):
        found += connection.recv(65536)
    return found


def statuses(data):
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", data)]


def error_of(data):
    """Return the error in the body of an answer that closes its connection."""
    return json.loads(data.partition(b"\r\n\r\n")[2])["error"]


# ---- framing


def chunks(*parts):
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n"


def test_a_chunked_body_is_read_with_its_extensions_and_trailers_left_out(server):
    pieces = [BODY[i : i + 1] for i in range(len(BODY))]
    whole = POST + CHUNKED + CLOSE + b"\r\n" + chunks(*pieces) + b"X-A: b\r\n\r\n"
    assert statuses(ask(server, whole)) == [200]
    extended = b"00%x;name=value;other\r\n%b\r\n0;last\r\n\r\n" % (len(BODY), BODY)
    assert statuses(ask(server, POST + CHUNKED + CLOSE + b"\r\n" + extended)) == [200]


@pytest.mark.parametrize("name", [b"X-API-Key: secret", b"Authorization: Bearer secret"])
def test_a_trailer_is_not_a_header(name):
    config = ServerConfig(api_key_hashes=(key_hash("secret"),))
    with serve(lambda: CannedClient("ok"), config) as server:
        body = chunks(BODY)
        head = POST + CHUNKED + CLOSE
        assert statuses(ask(server, head + name + b"\r\n\r\n" + body + b"\r\n")) == [200]
        assert statuses(ask(server, head + b"\r\n" + body + name + b"\r\n\r\n")) == [401]


ENDLESS = {
    "trailers": (GET + CHUNKED + b"\r\n0\r\n", b"X-A: b\r\n"),
    "trailers of a POST": (POST + CHUNKED + b"\r\n" + chunks(BODY), b"X-A: b\r\n"),
    "a trailer": (POST + CHUNKED + b"\r\n" + chunks(BODY) + b"X-A: ", b"a"),
    "chunk extensions": (POST + CHUNKED + b"\r\n", b"1;" + b"a" * 100 + b"\r\n \r\n"),
    "a chunk extension": (POST + CHUNKED + b"\r\n1;", b"a"),
    "zeros of a chunk's size": (POST + CHUNKED + b"\r\n", b"0"),
    "blank lines": (b"", b"\r\n"),
    "headers": (GET, b"X-A: b\r\n"),
    "a header": (GET + b"X-A: ", b"b"),
    "a header's name": (GET, b"b"),
    "a target": (b"GET /", b"a"),
    "a method": (b"", b"A"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_bytes_that_are_no_body_are_bounded_in_every_state_of_the_parser(server, name):
    """1 MB of them: the answer is an error, and the connection is closed."""
    head, part = ENDLESS[name]
    begin = time.monotonic()
    found = ask(server, head + part * (1_000_000 // len(part)))
    # Refused as a whole, or where a GET is answered before its trailers have come: closed.
    assert statuses(found) in ([431], [400], [200]), found
    assert b"connection: close" in found
    assert time.monotonic() - begin < 5


def test_the_number_of_headers_and_the_length_of_a_target_are_bounded(server):
    most = http_protocol._MAX_HEADERS
    for number, status in ((most, 200), (most + 1, 431)):
        headers = b"".join(b"X%d: a\r\n" % i for i in range(number - 2))
        assert statuses(ask(server, GET + headers + CLOSE + b"\r\n")) == [status]
    with serve(lambda: CannedClient("ok")) as other:
        target = b"GET /health?" + b"a" * http_protocol._MAX_TARGET
        assert statuses(ask(other, target + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")) == [414]


def test_pipelined_requests_are_answered_in_order(server):
    post = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    get = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    found = ask(server, b"\r\n" + post + b"\r\n" + get + post + GET + CLOSE + b"\r\n")
    assert statuses(found) == [200] * 4
    kinds = [found.index(b"text_completion"), found.index(b'"object":"list"')]
    assert kinds == sorted(kinds) and kinds[1] < found.rindex(b"text_completion")


def test_what_is_pipelined_behind_a_request_is_bounded():
    """Requests of more than `max_header_bytes` behind one are not kept: the connection ends."""
    config = ServerConfig(max_header_bytes=4096)
    with serve(lambda: CannedClient(*"abcd", delay=0.1), config) as server:
        post = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
        with connect(server) as connection:
            connection.sendall(post + (GET + b"\r\n") * 40)  # 1.6 kB: all are answered
            found = b""
            while len(statuses(found)) < 41:
                found += connection.recv(65536)
            assert statuses(found) == [200] * 41
            connection.sendall(post + (GET + b"\r\n") * 1000)
            assert statuses(read_all(connection)) == [200]


def test_a_request_behind_a_chunked_body_ends_the_connection(server):
    """It cannot be kept unparsed, and what was parsed of it must not get lost silently."""
    first = POST + CHUNKED + b"\r\n" + chunks(BODY) + b"\r\n"
    found = ask(server, first + GET + b"\r\n" + GET + b"\r\n")
    assert statuses(found) == [200]
    assert b"connection: close" in found


@pytest.mark.parametrize("head, status", [
    (b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\n", 404),
    (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n", 415),
    (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", 200),
    (b"PUT /v1/completions HTTP/1.1\r\nHost: localhost\r\n", 405),
])  # fmt: skip
@pytest.mark.parametrize("framing", [b"Content-Length: 1000000000000\r\n", CHUNKED])
def test_an_answer_whose_body_was_not_read_closes_the_connection(
    server, monkeypatch, head, status, framing
):
    """And the client can read it, even if it goes on sending for a moment."""
    monkeypatch.setattr(http_protocol, "_LINGER_SECONDS", 0.2)
    begin = time.monotonic()
    with connect(server) as connection:
        connection.sendall(head + framing + b"\r\n" + (b"5\r\nabcde\r\n" * 100))
        found = connection.recv(65536)
        assert statuses(found) == [status]
        assert b"connection: close" in found
        with pytest.raises(ConnectionError):
            while time.monotonic() - begin < 10:
                connection.sendall(b"5\r\nabcde\r\n" * 100)
                time.sleep(0.01)
    assert time.monotonic() - begin < 5


def test_bodies_of_all_connections_are_bounded_together(monkeypatch):
    monkeypatch.setattr(limits, "_MAX_HELD_BYTES", 0)  # only `max_body_bytes` bounds them then
    body = b'{"prompt": "%b"}' % (b"a" * 600)
    head = POST + b"Content-Length: %d\r\n" % len(body)
    config = ServerConfig(max_body_bytes=1000)
    with serve(lambda: CannedClient("ok"), config) as server, connect(server) as first:
        first.sendall(head + b"\r\n" + body[:500])
        while server.app.state.body_memory.num_bytes != 500:
            time.sleep(0.001)
        second = ask(server, head + b"\r\n" + body)
        assert statuses(second) == [503] and b"\r\nretry-after: 1\r\n" in second.lower()
        assert "1000 bytes" in error_of(second)["message"]
        first.sendall(body[500:])
        assert statuses(read_answer(first)) == [200]
        assert statuses(ask(server, head + CLOSE + b"\r\n" + body)) == [200]
        assert server.app.state.body_memory.num_bytes == 0


def test_a_body_beyond_the_limit_is_refused_while_it_arrives():
    with serve(lambda: CannedClient("ok"), ServerConfig(max_body_bytes=1000)) as server:
        found = ask(server, POST + CHUNKED + b"\r\n" + chunks(b" " * 900, b" " * 900))
        assert statuses(found) == [413]
        assert error_of(found)["message"] == "the body must have at most 1000 bytes"


@pytest.mark.parametrize("lines, status", [
    (b"Transfer-Encoding: x, chunked\r\n", 501),
    (b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n", 501),
    (b"Transfer-Encoding: identity, chunked\r\n", 501),
    (b"Transfer-Encoding: gzip\r\n", 501),
    (b"Transfer-Encoding: chunked, chunked\r\n", 400),
    (b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", 400),
    (b"Content-Length: 3\r\nContent-Length: 4\r\n", 400),
    (b"Content-Length: 3\r\nContent-Length: 3\r\n", 400),
    (b"Content-Length: +3\r\n", 400),
    (b"Content-Length: 99999999999999999999\r\n", 400),
    (b"Transfer-Encoding: chunked\r\nX : a\r\n", 400),
])  # fmt: skip
def test_a_body_whose_end_is_unclear_is_refused(server, lines, status):
    found = ask(server, POST + lines + b"\r\n" + chunks(BODY) + b"\r\n")
    assert statuses(found) == [status]
    assert error_of(found)["type"] == "invalid_request_error"


def test_an_upgrade_is_not_granted_and_its_request_is_answered(server):
    """As Java's client and `curl --http2` send it; httptools alone would lose the body."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAAA\r\n"
    length = b"Content-Length: %d\r\n\r\n" % len(BODY)
    plain = POST + upgrade + length + BODY
    chunked = POST + upgrade + CHUNKED + b"\r\n" + chunks(BODY) + b"\r\n"
    get = GET + upgrade + b"\r\n"
    with connect(server) as connection:
        for request in (plain, get, plain[:-4], chunked):
            connection.sendall(request)
            if request == plain[:-4]:
                time.sleep(0.05)
                connection.sendall(plain[-4:])
            found = read_answer(connection)
            assert statuses(found) == [200]
            assert request == get or b'"text":"ok"' in found


def test_http_1_0_and_other_versions(server):
    stream = json.dumps({"prompt": "a", "stream": True}).encode()
    head = POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Content-Length: %d\r\n\r\n" % len(stream)
    found = ask(server, head + stream)
    assert b"transfer-encoding" not in found and found.endswith(b"data: [DONE]\n\n")
    assert statuses(ask(server, b"GET /health HTTP/1.0\r\n\r\n")) == [200]
    assert statuses(ask(server, b"GET /health HTTP/2.0\r\nHost: localhost\r\n\r\n")) == [505]
    head = ask(server, b"HEAD /v1/models HTTP/1.1\r\nHost: localhost\r\n" + CLOSE + b"\r\n")
    assert statuses(head) == [200] and head.endswith(b"\r\n\r\n")


def test_a_client_that_waits_for_100_continue_gets_it_once_the_body_is_wanted(server):
    expect = b"Expect: 100-continue\r\nContent-Length: %d\r\n" % len(BODY)
    with connect(server) as connection:
        connection.sendall(POST + expect + b"\r\n")
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(BODY)
        assert statuses(read_answer(connection)) == [200]
    refused = POST.replace(b"application/json", b"text/plain") + expect + b"\r\n"
    assert statuses(ask(server, refused)) == [415]


def test_bytes_that_are_no_http_are_a_400_in_json(server):
    found = ask(server, b"\x16\x03\x01\x00\xa5")
    assert statuses(found) == [400]
    assert error_of(found)["message"].startswith("the request is not valid HTTP/1.1")
    # An answer in progress is not torn by it.
    post = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    assert statuses(ask(server, post + b"nonsense\r\n\r\n")) == [200, 400]


# ---- deadlines


SLOW = {
    "nothing": (b"", b""),
    "blank lines": (b"", b"\r\n"),
    "a target": (b"GET /", b"a"),
    "headers": (GET + b"X: ", b"a"),
    "a body": (POST + b"Content-Length: 1000\r\n\r\n", b" "),
    "chunks": (POST + CHUNKED + b"\r\n", b"1\r\n \r\n"),
    "a chunk extension": (POST + CHUNKED + b"\r\n1;", b"a"),
    "trailers": (POST + CHUNKED + b"\r\n" + chunks(BODY), b"X: a\r\n"),
    "trailers of a GET": (GET + CHUNKED + b"\r\n" + chunks(), b"X: a\r\n"),
    "the body of a 404": (b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n", b" "),
    "blank lines after an answer": (GET + b"\r\n", b"\r\n"),
    "a stream whose request does not end": (
        b"GET /v1/engine/watch HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n",
        b" ",
    ),
}


def test_a_byte_now_and_then_keeps_no_connection_open():
    """Whatever the byte belongs to: the deadline of a request is its first byte's."""
    config = ServerConfig(body_timeout=1.0, timeout_keep_alive=1.0)
    with serve(lambda: CannedClient("ok"), config) as server:
        begin = time.monotonic()
        connections = {name: connect(server) for name in SLOW}
        for name, (head, _) in SLOW.items():
            connections[name].sendall(head)
        closed = {}
        while len(closed) < len(SLOW) and time.monotonic() - begin < 8:
            time.sleep(0.1)
            for name, (_, part) in SLOW.items():
                with contextlib.suppress(BlockingIOError):
                    try:
                        connections[name].sendall(part)
                        connections[name].setblocking(False)
                        while connections[name].recv(65536):
                            pass
                        raise ConnectionResetError
                    except (ConnectionError, BrokenPipeError):
                        closed.setdefault(name, time.monotonic() - begin)
        for connection in connections.values():
            connection.close()
        assert closed.keys() == SLOW.keys()
        assert max(closed.values()) < 4, closed


def test_a_server_that_ends_does_not_wait_for_an_idle_client_to_end_tls(certificate, monkeypatch):
    monkeypatch.setattr(http_protocol, "_SHUTDOWN_SECONDS", 0.1)
    names = {"ssl_certfile": certificate / "cert.pem", "ssl_keyfile": certificate / "key.pem"}
    context = ssl.create_default_context(cafile=names["ssl_certfile"])
    options = names | {"timeout_graceful_shutdown": 15}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serve(lambda: CannedClient("ok"), **options))
        client = context.wrap_socket(connect(server), server_hostname="127.0.0.1")
        with client:
            client.sendall(GET + b"\r\n")
            assert statuses(read_answer(client)) == [200]
            begin = time.monotonic()
            stack.close()  # ends the server, whose side of TLS the client does not read
            assert time.monotonic() - begin < 5


def test_an_upload_within_the_deadline_is_read_and_a_slower_one_is_a_408():
    config = ServerConfig(body_timeout=1.0)
    with serve(lambda: CannedClient("ok"), config) as server:
        for pause, status in ((0.1, 200), (0.4, 408)):
            with connect(server) as connection:
                connection.sendall(POST + CLOSE + b"Content-Length: %d\r\n\r\n" % (len(BODY) + 4))
                with contextlib.suppress(ConnectionError):
                    for _ in range(4):
                        time.sleep(pause)
                        connection.sendall(b" ")
                    connection.sendall(BODY)
                assert statuses(read_all(connection)) == [status]


# ---- logs


@pytest.fixture
def loggers():
    """Loggers of the server and its libraries, as they were before, afterwards."""
    found = [logging.getLogger(name) for name in ("engine.server", "uvicorn", "asyncio")]
    before = [(each, each.handlers[:], each.propagate, each.level) for each in found]
    yield found
    for each, handlers, propagate, level in before:
        each.handlers[:] = handlers
        each.propagate = propagate
        each.setLevel(level)


def test_lines_of_libraries_are_json_too(loggers, capsys):
    configure_logging("info", json_logs=True, access_log=True)
    logging.getLogger("uvicorn.error").error("Cancel %s running task(s)", 3)
    logging.getLogger("uvicorn.error").info("Shutting down")
    logging.getLogger("asyncio").error("Task exception was never retrieved")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["logger"], line["message"]) for line in lines] == [
        ("uvicorn.error", "Cancel 3 running task(s)"),
        ("asyncio", "Task exception was never retrieved"),
    ]


class _Records(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.records = []

    def emit(self, record):
        self.records.append(record)


def test_clients_that_go_before_their_answer_leave_no_traceback(loggers):
    """Also if the request they left behind is refused, or others are pipelined behind it."""
    kept = _Records()
    for each in loggers:
        each.addHandler(kept)
    length = b"Content-Length: %d\r\n\r\n"
    slow = POST + length % len(BODY) + BODY
    requests = [
        b"nonsense\r\n\r\n",
        slow + b"nonsense\r\n\r\n",
        POST + length % 3 + b"{{{",
        slow + POST + length % 3 + b"{{{" + slow,
        POST + CHUNKED + b"\r\nzz\r\n",
        POST + b"Transfer-Encoding: x, chunked\r\n\r\n",
        GET + b"Host: localhost\r\n\r\n",
        POST + length % 1000 + b"{",
    ]
    with serve(lambda: CannedClient("o", "k", delay=0.05)) as server:
        for request in requests * 3:
            for how in ("close", "reset", "wait"):
                with connect(server) as connection:
                    connection.sendall(request)
                    if how == "reset":
                        linger = struct.pack("ii", 1, 0)
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    elif how == "wait":
                        time.sleep(0.01)
        while server.server.server_state.connections:
            time.sleep(0.01)
    assert [record.getMessage() for record in kept.records] == []


# ---- crowds


def test_clients_that_keep_the_server_waiting_make_room_for_others(monkeypatch):
    monkeypatch.setattr(connection_pool, "_GRACE_SECONDS", 0.1)
    config = ServerConfig(max_connections=20)
    with serve(lambda: CannedClient("ok"), config) as server:
        slow = [connect(server) for _ in range(20)]
        for number, connection in enumerate(slow):
            connection.sendall((b"", b"\r\n", GET, POST + CHUNKED + b"\r\n")[number % 4])
        time.sleep(0.2)
        post = POST + CLOSE + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
        new = [connect(server) for _ in range(8)]
        for connection in new:
            connection.sendall(post)
        assert {tuple(statuses(read_all(connection))) for connection in new} == {(200,)}
        told = [read_all(connection) for connection in slow[:8]]  # the oldest have made room
        assert {tuple(statuses(found)) for found in told} == {(503,)}
        for connection in slow + new:
            connection.close()


def test_only_the_surplus_is_refused_and_health_is_always_answered():
    """With as many answers in progress as there may be connections."""
    config = ServerConfig(max_connections=4)
    with serve(lambda: CannedClient(*"abc", delay=0.5), config) as server:
        post = POST + CLOSE + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
        served = [connect(server) for _ in range(4)]
        for connection in served:
            connection.sendall(post)
        while server.client.num_active < 4:
            time.sleep(0.01)
        refused = ask(server, post)
        assert statuses(refused) == [503]
        assert b"retry-after: 1\r\n" in refused and b"x-request-id: " in refused
        assert error_of(refused)["message"] == "the server has 4 connections, its maximum"
        agent = ask(server, post.replace(b"/v1/completions", b"/v1/messages"))
        assert json.loads(agent.partition(b"\r\n\r\n")[2])["type"] == "error"
        assert statuses(ask(server, GET + b"\r\n")) == [200]
        silent = [connect(server) for _ in range(10)]
        assert statuses(ask(server, GET + b"\r\n")) == [200]
        assert [statuses(read_all(connection)) for connection in served] == [[200]] * 4
        assert statuses(ask(server, post)) == [200]  # there is room again
        assert {tuple(statuses(read_all(connection))) for connection in silent} == {(503,)}
        for connection in served + silent:
            connection.close()


def test_requests_that_come_at_once_are_all_answered_and_health_first():
    """More than a round takes, on connections that were open before."""
    number = 6 * http_protocol._MAX_STEPS
    with serve(lambda: CannedClient("ok")) as server:
        connections = [connect(server) for _ in range(number)]
        post = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
        for _ in range(2):
            for connection in connections:
                connection.sendall(post)
            assert statuses(ask(server, GET + CLOSE + b"\r\n")) == [200]
            for connection in connections:
                assert statuses(read_answer(connection)) == [200]
        assert len(server.client.requests) == 2 * number
        for connection in connections:
            connection.close()


def test_steps_are_taken_in_rounds_in_their_order():
    rounds = http_protocol._Rounds()
    taken = []
    loop = asyncio.new_event_loop()
    for number in range(100):
        rounds.add(loop, lambda number=number: taken.append(number))
    assert rounds.is_crowded
    seen = []
    while len(taken) < 100:
        loop.call_soon(loop.stop)
        loop.run_forever()
        seen.append(len(taken))
    loop.close()
    assert taken == list(range(100)) and seen == [32, 64, 96, 100]


class _Client:
    """A connection that notes what the pool does to it."""

    def __init__(self):
        self.events = []

    def make_room(self):
        self.events.append("make_room")

    def abort(self):
        self.events.append("abort")


def test_who_makes_room():
    now = [0.0]
    pool = ConnectionPool(3, reserve=2, clock=lambda: now[0])
    idle, receiving, answered, new, late = (_Client() for _ in range(5))
    for client in (idle, receiving, answered):
        assert pool.enter(client)
        pool.wait(client)
        now[0] += 0.2
    pool.serve(answered)
    assert not pool.enter(new)  # nobody has waited for a second
    now[0] += 1.0
    pool.wait(idle)  # it has had an answer just now
    assert pool.enter(late) and receiving.events == ["make_room"]
    pool.stall(answered)
    now[0] += 2.0
    others = [_Client() for _ in range(4)]
    assert [pool.enter(c) for c in others] == [True, False, False, False]
    assert idle.events == ["make_room", "abort"]  # the surplus is bounded: the oldest goes
    now[0] += 4.0
    assert pool.enter(_Client()) and answered.events == ["make_room"]
    assert [client.events for client in others] == [[], ["abort"], ["abort"], []]
    assert not pool.promote(others[1])


def test_as_many_connections_as_there_may_be_open_files(monkeypatch):
    limits = {"RLIMIT_NOFILE": (1024, 4096), "set": None}
    monkeypatch.setattr(connection_pool.resource, "getrlimit", lambda _: limits["RLIMIT_NOFILE"])
    monkeypatch.setattr(
        connection_pool.resource, "setrlimit", lambda _, given: limits.update(set=given)
    )
    assert connection_pool.fitting_pool(8192).limit == 4096 - 1024 - 256
    assert limits["set"] == (4096, 4096)
    limits["RLIMIT_NOFILE"] = (1024, 1 << 20)
    assert connection_pool.fitting_pool(8192).limit == 8192
    assert limits["set"] == (8192 + connection_pool.RESERVE + 256, 1 << 20)


# ---- hosts


@pytest.mark.parametrize("request_, status", [
    (b"GET /v1/models HTTP/1.1\r\nHost: localhost:8000\r\n", 200),
    (b"GET /v1/models HTTP/1.1\r\nHost: LOCALHOST.\r\n", 200),
    (b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1:1\r\n", 200),
    (b"GET /v1/models HTTP/1.1\r\nHost: [::1]:8000\r\n", 200),
    (b"GET http://localhost/v1/models HTTP/1.1\r\nHost: localhost\r\n", 200),
    (b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n", 403),
    (b"GET /v1/models HTTP/1.1\r\nHost: evil.example:8000\r\n", 403),
    (b"GET /v1/models HTTP/1.1\r\nHost: localhost.evil.example\r\n", 403),
    (b"GET /v1/models HTTP/1.1\r\nHost: evil\r\n", 403),
    (b"GET / HTTP/1.1\r\nHost: evil.example\r\n", 403),
    (b"GET /static/app.js HTTP/1.1\r\nHost: evil.example\r\n", 403),
    (b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\n", 403),
    (b"GET /v1/engine/watch HTTP/1.1\r\nHost: evil.example\r\n", 403),
    (b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: evil.example\r\n", 403),
    (b"GET /health HTTP/1.1\r\nHost: 10.1.2.3:8000\r\n", 200),
    (b"GET /v1/models HTTP/1.1\r\nHost: localhost:\r\n", 200),
    (b"GET /health HTTP/1.1\r\nHost: [fe80::1%25eth0]:8000\r\n", 200),
    (b"GET /v1/models HTTP/1.1\r\nHost: [fe80::1%eth0]\r\n", 403),
    (b"GET /health HTTP/1.1\r\nHost: [fe80::1%]\r\n", 400),
    (b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost\r\n", 400),
    (b"GET http://localhost/v1/models HTTP/1.1\r\nHost: evil.example\r\n", 400),
    (b"GET http://a@localhost/v1/models HTTP/1.1\r\nHost: localhost\r\n", 400),
    (b"GET http://localhost/v1/models HTTP/1.0\r\n", 200),
    (b"GET http://evil.example/v1/models HTTP/1.0\r\n", 403),
    (b"GET /health HTTP/1.1\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost:\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHOST: evil.example\r\n", 400),
    (b"GET /health HTTP/1.0\r\nHost: localhost\r\nHost: localhost\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: localhost:80000\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: localhost:x\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: user@localhost\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: localhost, evil.example\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: localhost/\r\n", 400),
])  # fmt: skip
def test_the_host_is_checked(server, request_, status):
    found = ask(server, request_ + CLOSE + b"\r\n") if b"watch" not in request_ else None
    if found is None:
        with connect(server) as connection:
            connection.sendall(request_ + b"\r\n")
            found = read_answer(connection)
    assert [int(found.split()[1])] == [status], found
    if status == 403:
        assert "--allowed-hosts" in error_of(found)["message"]


KEY = {"api_key_hashes": (key_hash("k"),)}


@pytest.mark.parametrize("options, allowed, refused", [
    ({}, "localhost 127.9.9.9 [::1]:80 a.localhost", "example.com 10.0.0.1 engine 0.0.0.0"),
    ({"host": "::1"}, "localhost [::1]:8000", "example.com"),
    ({"host": "0.0.0.0"}, "localhost 10.0.0.1:8000 engine:8000 engine.ns.svc.cluster.local "
     "[fd00::1]:8000 [fe80::1%eth0]:8000 [fe80::1%25eth0]",
     "evil.example engine.example.com local.example.com"),
    ({"host": "engine.example.com"}, "engine.example.com:8000 localhost", "evil.example"),
    ({"host": "0.0.0.0", **KEY}, "localhost example.com", ""),
    (KEY, "localhost example.com", ""),
    ({"allowed_hosts": ("*",)}, "localhost example.com", ""),
    ({"allowed_hosts": ("a.example.com", "b.example.com:443", "*.example.org"), **KEY},
     "A.example.com:8000 b.example.com:443 x.y.example.org localhost:8000",
     "b.example.com example.org example.com 10.0.0.1 engine notexample.org"),
])  # fmt: skip
def test_which_hosts_are_allowed(options, allowed, refused):
    hosts = AllowedHosts(ServerConfig(**options))
    assert [host for host in allowed.split() if not hosts.allows(host)] == []
    assert [host for host in refused.split() if hosts.allows(host)] == []


def test_a_host_header_that_is_no_host_is_an_api_error():
    with pytest.raises(APIError, match="must be a host and a port"):
        AllowedHosts(ServerConfig()).allows("a b")
