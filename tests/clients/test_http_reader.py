"""Bytes of an HTTP answer in any pieces give the same events, and broken ones a reason."""

from __future__ import annotations

import random

import pytest

from engine.commands.bench_serve.http_reader import HttpReader, ResponseError, SseReader

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
EVENTS = [b'{"a": 1}', "é".encode(), b"[DONE]"]
SSE = b": keep-alive\n\ndata: " + EVENTS[0] + b"\r\n\r\nevent: x\ndata:" + EVENTS[1] + b"\n\n"
SSE += b"data: [DONE]\n\n"


def _chunked(body, rng):
    pieces, at = [], 0
    while at < len(body):
        size = rng.randint(1, 9)
        piece = body[at : at + size]
        pieces.append(b"%X;x=1\r\n%s\r\n" % (len(piece), piece))
        at += size
    return CHUNKED + b"".join(pieces) + b"0\r\nTrailer: 1\r\n\r\n"


def _read(pieces, max_body=1000):
    http, sse, events = HttpReader(max_body), SseReader(), []
    for piece in pieces:
        events += sse.feed(http.feed(piece))
    return http, events


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_any_size_give_the_same_events(seed):
    rng = random.Random(seed)
    plain = HEAD + b"Content-Length: %d\r\n\r\n" % len(SSE) + SSE
    for data in (_chunked(SSE, rng), plain):
        pieces, at = [], 0
        while at < len(data):
            size = rng.randint(1, 40)
            pieces.append(data[at : at + size])
            at += size
        http, events = _read(pieces)
        assert events == EVENTS
        assert http.complete and http.keep_alive and http.status == 200
        assert http.content_type == "text/event-stream"


def test_a_body_without_a_length_ends_with_the_connection():
    http, events = _read([HEAD + b"Connection: close\r\n\r\n" + SSE])
    assert events == EVENTS and not http.complete
    http.end()
    assert http.complete and not http.keep_alive


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "disconnected"),
        (HEAD, "disconnected"),
        (CHUNKED + b"5\r\nab", "disconnected"),
        (CHUNKED + b"2\r\nab\r\n", "disconnected"),
        (HEAD + b"Content-Length: 9\r\n\r\nab", "disconnected"),
    ],
)
def test_a_closed_connection_in_an_answer_is_a_disconnect(data, reason):
    http, _ = _read([data])
    with pytest.raises(ResponseError) as failure:
        http.end()
    assert failure.value.reason == reason


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"SSH-2.0-x\r\n\r\n", "Expected HTTP"),
        (b"HTTP/1.1 2x0 OK\r\n\r\n", "status code"),
        (
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nx",
            "bytes after",
        ),
        (b"HTTP/1.1 200 OK\r\nnothing\r\n\r\n", "header"),
        (HEAD + b"Content-Length: -1\r\n\r\n", "Content-Length"),
        (HEAD + b"Content-Length: 1_0\r\n\r\n", "Content-Length"),
        (HEAD + b"Content-Length: 1\r\n\r\nabc", "bytes after"),
        (HEAD + b"Content-Length: 0\r\n\r\n" + HEAD, "bytes after"),
        (HEAD + b"Connection: close\r\nContent-Length: 1\r\n\r\nabc", "bytes after"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"x" * 70_000, "the header has more than"),
        (CHUNKED + b"0x5\r\n", "chunk size"),
        (CHUNKED + b"-5\r\n", "chunk size"),
        (CHUNKED + b"123456789abcdef01\r\n", "overflow"),
        (CHUNKED + b"\r\n", "chunk size"),
        (CHUNKED + b"1" * 300, "overflow"),
        (CHUNKED + b"1;" + b"x" * 70_000, "a chunk's line has more than"),
        (CHUNKED + b"2\r\nabc\r\n", "after chunk data"),
        (CHUNKED + b"0\r\n\r\nx", "bytes after"),
        (CHUNKED + b"100001\r\n" + b"x" * (1 + (1 << 20)), "a line has more than"),
    ],
)
def test_what_is_no_http_is_malformed(data, what):
    with pytest.raises(ResponseError, match=what) as failure:
        _read([data], max_body=4 << 20)
    assert failure.value.reason == "malformed response"


def test_the_bound_of_a_header_is_of_all_its_pieces():
    with pytest.raises(ResponseError, match="the header has more than"):
        _read([b"HTTP/1.1 200 OK\r\n", *[b"x: y\r\n" * 1000] * 11])


def test_a_body_has_a_bound():
    with pytest.raises(ResponseError, match="more than 1000 bytes"):
        _read([CHUNKED + b"3E9\r\n", b"\n" * 500, b"\n" * 501])
