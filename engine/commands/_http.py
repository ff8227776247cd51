"""Blocking HTTP client for OpenAI-compatible servers; the response size is bounded."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import urllib.parse
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError, EngineError
from engine.model_files import excerpt

__all__ = ["Server", "api_key"]

_MAX_BODY = 16 << 20
_MAX_ERROR = 64 << 10
_MAX_LINE = 1 << 20
_MAX_STREAM = 256 << 20


def api_key(given: str | None) -> str | None:
    """Return the API key from the option or OPENAI_API_KEY, or None if neither is set.

    Raises
    ------
    ConfigError
        If it contains characters that are not allowed in a header.
    """
    key = os.environ.get("OPENAI_API_KEY") if given is None else given
    if key and not (key.isascii() and key.isprintable()):
        raise ConfigError("--api-key must be printable ASCII")  # never quote the key
    return key or None


@dataclass(frozen=True)
class Server:
    """Address of a server.

    Attributes
    ----------
    host, port, tls
        The server's address.
    prefix : str
        Path prefix before ``/v1``.
    key : str or None
        API key.
    timeout : float
        Maximum seconds to connect, and between two reads.
    """

    host: str
    port: int
    tls: bool
    prefix: str
    key: str | None = None
    timeout: float = 60.0

    @classmethod
    def parse(
        cls, option: str, url: str, *, key: str | None = None, timeout: float = 60.0
    ) -> Server:
        """Parse a URL, with or without a trailing ``/v1``.

        Raises
        ------
        ConfigError
            If it is not an http:// or https:// URL; the message names `option`.
        """
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port
            (parts.hostname or "").encode("idna")  # raises here instead of during name resolution
        except ValueError:
            parts = urllib.parse.urlsplit("")
            port = None
        simple = not (parts.query or parts.fragment or parts.username or parts.password)
        plain = url.isascii() and url.isprintable() and " " not in url
        simple = simple and bool(parts.hostname) and port != 0
        if parts.scheme not in ("http", "https") or not (simple and plain):
            raise ConfigError(
                f"{option} must be a URL like http://127.0.0.1:8000; got {excerpt(url)!r}"
            )
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(str(parts.hostname), port or (443 if tls else 80), tls, prefix, key, timeout)

    @property
    def url(self) -> str:
        """URL of the server, for messages."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{name}:{self.port}{self.prefix}"

    def models(self) -> list[str]:
        """Return the names of the models that the server lists, at least one.

        Raises
        ------
        EngineError
            If the server does not respond, or lists no model.
        """
        with self._answer("GET", "/v1/models", None) as response:
            body = _read(response, _MAX_BODY)
        try:
            names = [each["id"] for each in json.loads(body)["data"]]
        except (ValueError, TypeError, LookupError, RecursionError):
            names = []
        if not names or not all(isinstance(name, str) for name in names):
            raise EngineError(f"{self.url}/v1/models must list a model; got {_text(body)}")
        return names

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """POST `body`, and yield the response's events up to [DONE].

        Closing the iterator closes the connection, which aborts the request.

        Raises
        ------
        EngineError
            If the connection fails, the status is not 200, or the response is not a complete event
            stream; the message includes the server's error.
        """
        with self._answer("POST", path, json.dumps(body).encode()) as response:
            kind = response.headers.get_content_type()
            if kind != "text/event-stream":
                got = excerpt(kind)
                raise EngineError(f"{self.url} must answer with text/event-stream; got {got}")
            for data in _data_lines(response, self.url):
                if data == b"[DONE]":
                    return
                yield _event(data, self.url)
        raise EngineError(f"{self.url} closed the stream before [DONE]")

    @contextlib.contextmanager
    def _answer(
        self, method: str, path: str, body: bytes | None
    ) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self.tls else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=self.timeout)
        headers = {"Accept": "text/event-stream, application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            connection.request(method, self.prefix + path, body, headers)
            response = connection.getresponse()
            if response.status != 200:
                message = _message(_read(response, _MAX_ERROR))
                raise EngineError(f"{self.url} answered {response.status}: {message}")
            yield response
        except TimeoutError as error:
            raise EngineError(f"{self.url} sent nothing for {self.timeout:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or error or type(error).__name__
            raise EngineError(f"the connection to {self.url} failed: {excerpt(reason)}") from error
        finally:
            connection.close()


def _data_lines(response: http.client.HTTPResponse, url: str) -> Iterator[bytes]:
    rest = _MAX_STREAM
    while line := response.readline(_MAX_LINE + 1):
        rest -= len(line)
        if len(line) > _MAX_LINE:
            raise EngineError(f"{url} sent a line of more than {_MAX_LINE} bytes")
        if rest < 0:
            raise EngineError(f"{url} sent more than {_MAX_STREAM} bytes")
        if line.startswith(b"data:"):
            yield line[5:].strip()


def _event(data: bytes, url: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        raise EngineError(f"{url} sent an event that is no JSON object: {_text(data)}")
    if "error" in event:
        raise EngineError(f"{url}: {_message(data)}")
    return event


def _read(response: http.client.HTTPResponse, limit: int) -> bytes:
    body = response.read(limit + 1)
    if len(body) > limit:
        raise EngineError(f"the server's answer has more than {limit} bytes")
    return body


def _message(body: bytes) -> str:
    """Return the message of an error in OpenAI's format, or the start of any other body."""
    try:
        error = json.loads(body)["error"]
        return excerpt(error if isinstance(error, str) else error["message"])
    except (ValueError, TypeError, LookupError, RecursionError):
        return _text(body)


def _text(body: bytes) -> str:
    return excerpt(body[:1000].decode("utf-8", "replace").strip() or "(no text)")
