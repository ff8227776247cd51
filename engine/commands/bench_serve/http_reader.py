"""Reads an HTTP/1.1 answer with server-sent events from bytes as they arrive; no sockets here.

What a server sends is bounded: the header, a line, a chunk's size line, and the whole body.
"""

from __future__ import annotations

__all__ = ["HttpReader", "ResponseError", "SseReader"]

_MAX_HEADER = 64 << 10
_MAX_SIZE_LINE = 256
_MAX_LINE = 1 << 20
_HEX = frozenset(b"0123456789abcdefABCDEF")


class ResponseError(Exception):
    """What the server sent is no answer; `reason` is one of a few words, for counting."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class HttpReader:
    """Takes the bytes of one answer, and gives those of its body.

    Parameters
    ----------
    max_body : int
        Bytes of the body at most.

    Attributes
    ----------
    status : int
        0 until the header is there.
    content_type : str
    complete : bool
        The body has ended as its header says.
    keep_alive : bool
        The connection can take another request.
    """

    __slots__ = (
        *("_chunked", "_max_body", "_rest", "_step", "_tail", "_total"),
        *("complete", "content_type", "keep_alive", "status"),
    )

    def __init__(self, max_body: int) -> None:
        self.status = 0
        self.content_type = ""
        self.complete = False
        self.keep_alive = True
        self._max_body = max_body
        self._total = 0
        self._tail = b""
        self._chunked = False
        self._rest = 0  # bytes that the chunk, or the whole body, still has; -1: until the end
        self._step = "header"

    def feed(self, data: bytes) -> bytes:
        """Return the bytes of the body that `data` brings.

        Raises
        ------
        ResponseError
            If this is no HTTP/1.1, or too long.
        """
        if self._tail:
            data = self._tail + data
            self._tail = b""
        if self._step == "header":
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._keep(data, _MAX_HEADER, "the header")
                return b""
            self._read_header(data[:end])
            data = data[end + 4 :]
        body = self._chunks(data) if self._chunked else self._plain(data)
        self._total += len(body)
        if self._total > self._max_body:
            raise ResponseError("response too long", f"more than {self._max_body} bytes")
        return body

    def end(self) -> None:
        """Note that the server has closed the connection.

        Raises
        ------
        ResponseError
            If the answer was not complete.
        """
        self.keep_alive = False
        if self._step == "plain" and self._rest < 0:
            self.complete = True
        elif not self.complete:
            raise ResponseError("disconnected", "the server closed the connection in the answer")

    def _keep(self, data: bytes, limit: int, what: str) -> None:
        if len(data) > limit:
            raise ResponseError("malformed response", f"{what} has more than {limit} bytes")
        self._tail = data

    def _read_header(self, header: bytes) -> None:
        first, *lines = header.split(b"\r\n")
        parts = first.split(b" ", 2)
        if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
            raise ResponseError("malformed response", f"no status line: {first[:60]!r}")
        self.status = int(parts[1][:4])
        fields = {}
        for line in lines:
            name, colon, value = line.partition(b":")
            if not colon:
                raise ResponseError("malformed response", f"no header field: {line[:60]!r}")
            fields[name.strip().lower()] = value.strip().decode("latin-1").lower()
        self.content_type = fields.get(b"content-type", "")
        closes = "close" in fields.get(b"connection", "")
        self.keep_alive = parts[0] == b"HTTP/1.1" and not closes
        self._chunked = "chunked" in fields.get(b"transfer-encoding", "")
        self._step = "size" if self._chunked else "plain"
        length = fields.get(b"content-length")
        if self._chunked:
            return
        if length is not None and not (length.isascii() and length.isdigit() and len(length) < 16):
            raise ResponseError("malformed response", f"content-length is {length[:40]!r}")
        self._rest = -1 if length is None else int(length)
        self.complete = self._rest == 0

    def _plain(self, data: bytes) -> bytes:
        if self._rest < 0:
            return data
        self._end_at(len(data) - self._rest)
        data = data[: self._rest]
        self._rest -= len(data)
        self.complete = self._rest == 0
        return data

    def _end_at(self, excess: int) -> None:
        if excess > 0:
            raise ResponseError("malformed response", f"{excess} bytes after the answer's end")

    def _chunks(self, data: bytes) -> bytes:
        """Take as many chunks as there are; what a chunk has of its payload is given at once."""
        at = 0
        size = len(data)
        step = self._step
        pieces = []
        while at < size and not self.complete:
            if step == "data":
                piece = data[at : at + self._rest]
                pieces.append(piece)
                at += len(piece)
                self._rest -= len(piece)
                step = "data" if self._rest else "after"
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                self._keep(data[at:], _MAX_SIZE_LINE, "a chunk's line")
                at = size
                break
            line = data[at:end]
            at = end + 2
            step = self._next_step(step, line)
        self._step = step
        if self.complete:
            self._end_at(size - at)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _next_step(self, step: str, line: bytes) -> str:
        """Read a line between chunks: a size, the end of a payload, or a trailer."""
        if step == "after":
            if line:
                raise ResponseError("malformed response", f"no end of a chunk: {line[:20]!r}")
            return "size"
        if step == "trailer":
            self.complete = not line
            return step
        digits = line.partition(b";")[0].strip()
        if not 0 < len(digits) <= 8 or not _HEX.issuperset(digits):
            raise ResponseError("malformed response", f"a chunk's size is {line[:20]!r}")
        self._rest = int(digits, 16)
        return "data" if self._rest else "trailer"


class SseReader:
    """Takes the bytes of a body, and gives the `data` of its events, one line an event."""

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, body: bytes) -> list[bytes]:
        """Return the data lines that are complete now.

        Raises
        ------
        ResponseError
            If a line is longer than a mebibyte.
        """
        lines = (self._tail + body if self._tail else body).split(b"\n")
        self._tail = lines.pop()
        if len(self._tail) > _MAX_LINE:
            raise ResponseError("malformed response", f"a line has more than {_MAX_LINE} bytes")
        # Comments (": keep-alive"), event names and the blank lines between events say nothing.
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
