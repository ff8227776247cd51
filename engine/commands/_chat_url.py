"""`engine chat --url`: chat with a model on an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from engine.commands._chat_session import Message
from engine.commands._chat_terminal import printable
from engine.commands._http import Server, api_key
from engine.commands._options import given_sampling
from engine.errors import ConfigError, EngineError, did_you_mean
from engine.sampling_params import SamplingParams

__all__ = ["RemoteChat", "add_url_arguments"]

_LOCAL = {
    "device": "auto",
    "dtype": "auto",
    "load_format": "auto",
    "quantization": None,
    "max_model_len": None,
    "kv_cache_dtype": "auto",
    "speculative_config": None,
    "kernels": None,
    "logits_processors": None,
}
"""Options that apply only to a local model, and their defaults."""

_MAX_TOKENS = 1 << 40  # largest plausible token count in a usage


def add_url_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options for a remote server."""
    parser.add_argument(
        "--url",
        help="chat with a model of the server at this URL (http://127.0.0.1:8000); MODEL "
        "is its name there (default: the first that the server lists)",
    )
    parser.add_argument("--api-key", help="sent as a bearer token (default: OPENAI_API_KEY)")


class RemoteChat:
    """Chat with a model on a server.

    Parameters
    ----------
    server : Server
    name : str
        Name of the model.
    """

    def __init__(self, server: Server, name: str) -> None:
        self.name = name
        self._server = server
        self._summary = ""

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> RemoteChat:
        """Build the chat from the command's options.

        Raises
        ------
        ConfigError
            If an option applies only to a local model, or has an invalid value.
        EngineError
            If no model is named and the server cannot be asked for its first one.
        """
        for name, default in _LOCAL.items():
            if getattr(arguments, name) != default:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} applies to a model here, not to --url")
        SamplingParams(**given_sampling(arguments))  # reject invalid values before sending anything
        server = Server.parse("--url", arguments.url, key=api_key(arguments.api_key))
        return cls(server, arguments.model or server.models()[0])

    def answer(
        self, messages: Sequence[Message], sampling: dict[str, Any]
    ) -> Generator[str, None, None]:
        """Yield the text of the answer; reasoning goes to standard error."""
        body = {
            "messages": messages,
            "model": self.name,
            **sampling,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self._summary = ""
        with contextlib.closing(self._server.stream("/v1/chat/completions", body)) as events:
            stream = _Stream(events)
            try:
                yield from stream.text()
            finally:  # the server tells the figures of a stopped answer, too
                self._summary = stream.summary()

    def summary(self) -> str:
        """Return the statistics of the last answer."""
        return self._summary

    def defaults(self) -> None:
        """The server's values are not known."""

    def switch(self, name: str) -> None:
        """Go on with another model of the server.

        Raises
        ------
        ConfigError
            If the server lists no such model.
        """
        known = self._server.models()
        if name not in known:
            hint = did_you_mean(name, known, f"it has {', '.join(known[:20])}")
            raise ConfigError(f"{self._server.url} has no model {name!r:.100}{hint}")
        self.name = name

    def names(self) -> list[str]:
        """Return the models of the server."""
        try:
            return self._server.models()
        except EngineError:
            return []


class _Stream:
    """Event stream of one answer: yields its text, and collects figures for the summary."""

    def __init__(self, events: Iterator[dict[str, Any]]) -> None:
        self._events: Any = events
        self._usage: dict[str, Any] = {}
        self._reason = ""
        self._start = time.perf_counter()
        self._first = 0.0

    def text(self) -> Iterator[str]:
        """Yield the answer's text as it arrives; reasoning goes to standard error."""
        for event in self._events:
            try:
                thought, piece = self._read(event)
            except (AttributeError, TypeError, ValueError, LookupError) as error:
                raise EngineError(f"the server's event is no chunk of a chat: {error}") from error
            if thought:
                print(printable(thought), end="", file=sys.stderr, flush=True)
            if piece:
                yield piece

    def _read(self, event: dict[str, Any]) -> tuple[str, str]:
        """Return the reasoning and text deltas of an event."""
        self._usage = dict(event.get("usage") or self._usage)
        if not event.get("choices"):
            return "", ""
        choice = event["choices"][0]
        self._reason = choice.get("finish_reason") or self._reason
        self._first = self._first or time.perf_counter()
        delta = choice.get("delta") or {}
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        piece = delta.get("content") or ""
        if not isinstance(thought, str) or not isinstance(piece, str):
            raise TypeError("its content must be text")
        return thought, piece

    def summary(self) -> str:
        """Return the statistics line printed after an answer."""
        now = time.perf_counter()
        made, read = (
            _count(self._usage.get(f"{name}_tokens")) for name in ("completion", "prompt")
        )
        parts = [f"first token after {(self._first or now) - self._start:.2f} s"]
        if made is not None and read is not None:
            seconds = now - self._first
            rate = f", {(made - 1) / seconds:.1f} tokens/s" if made > 1 and seconds else ""
            parts.insert(0, f"{made} tokens after {read}{rate}")
        if self._reason not in ("", "stop"):
            parts.append(printable(str(self._reason)[:80]))
        return ", ".join(parts)


def _count(value: object) -> int | None:
    """Return a token count from the server, or None if it is not a plausible number."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value <= _MAX_TOKENS else None
