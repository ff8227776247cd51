"""Incremental parser for an HTTP/1.1 response of server-sent events; does no I/O.

All sizes that a server controls are bounded: the header, chunk framing, a line, and the whole body.
"""

from __future__ import annotations

from engine.errors import ConfigError

try:
    import httptools
except ModuleNotFoundError as missing:
    raise ConfigError(
        "engine bench serve needs the package 'httptools': install rawengine[serve]"
    ) from missing

__all__ = ["HttpReader", "ResponseError", "SseReader"]

_MAX_FRAMING = 64 << 10  # maximum bytes of a header, chunk-size line, or trailer
_MAX_LINE = 1 << 20  # maximum bytes per line of the body


class ResponseError(Exception):
    """Invalid response; `reason` is from a small fixed set, so that failures can be counted."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class HttpReader:
    """Parser of one response: consumes raw bytes and returns body bytes.

    Parameters
    ----------
    max_body : int
        Maximum bytes of the body.

    Attributes
    ----------
    status : int
        0 until the header is complete.
    content_type : str
        In lower case.
    complete : bool
        Whether the whole body that the header announces has arrived.
    keep_alive : bool
        Whether the connection can be reused once the response is complete.
    """

    def __init__(self, max_body: int) -> None:
        self.status = 0
        self.content_type = ""
        self.complete = False
        self.keep_alive = False
        self._max_body = max_body
        self._total = 0
        self._framing = 0  # bytes received since the last body bytes
        self._is_delimited = False  # Content-Length or chunked; otherwise the body ends at EOF
        self._pieces: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> bytes:
        """Return the body bytes contained in `data`.

        Raises
        ------
        ResponseError
            If `data` is not valid HTTP/1.1 at this point, or a bound is exceeded.
        """
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            detail = "bytes after the answer's end" if self.complete else str(error)
            raise ResponseError("malformed response", detail) from None
        if not self._pieces:
            self._framing += len(data)
            if self._framing > _MAX_FRAMING:
                what = "a chunk's line" if self.status else "the header"
                detail = f"{what} has more than {_MAX_FRAMING} bytes"
                raise ResponseError("malformed response", detail)
            return b""
        self._framing = 0
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._total += len(body)
        if self._total > self._max_body:
            raise ResponseError("response too long", f"more than {self._max_body} bytes")
        return body

    def end(self) -> None:
        """Handle EOF: the server has closed the connection.

        Raises
        ------
        ResponseError
            If the response is not complete.
        """
        self.keep_alive = False
        if self.status and not self._is_delimited:
            self.complete = True
        elif not self.complete:
            raise ResponseError("disconnected", "the server closed the connection in the answer")

    # ---- called by httptools

    def on_message_begin(self) -> None:
        if self.complete:
            raise ValueError  # a second response to one request

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self.content_type = value.decode("latin-1").lower()
        elif name in (b"content-length", b"transfer-encoding"):
            self._is_delimited = True

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.complete = True
        self.keep_alive = self._parser.should_keep_alive()


class SseReader:
    """Parser of server-sent events: consumes body bytes and returns the `data` of each event.

    Each event must have a single data line; comments (": keep-alive") and event names are skipped.
    """

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, body: bytes) -> list[bytes]:
        """Return the data lines that `body` completes.

        Raises
        ------
        ResponseError
            If a line is longer than 1 MiB.
        """
        lines = (self._tail + body if self._tail else body).split(b"\n")
        self._tail = lines.pop()
        if len(self._tail) > _MAX_LINE:
            raise ResponseError("malformed response", f"a line has more than {_MAX_LINE} bytes")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
