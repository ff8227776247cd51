"""`engine chat --url`: chat with a model on an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

from engine.commands._http import Server, api_key
from engine.commands._options import given_sampling
from engine.errors import ConfigError, EngineError
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

# Control characters are replaced: an answer must not control the terminal.
_CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160))}
_CONTROL = {code: to for code, to in _CONTROL.items() if chr(code) not in "\n\t"}


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
    model : str
    fields : dict
        Request fields other than the messages.
    """

    def __init__(self, server: Server, model: str, fields: dict[str, Any]) -> None:
        self._server = server
        self._fields = {
            "model": model,
            **fields,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

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
        fields = given_sampling(arguments)
        SamplingParams(**fields)  # reject invalid values before sending anything
        if not arguments.ignore_eos:
            del fields["ignore_eos"]  # other servers may reject the field
        server = Server.parse("--url", arguments.url, key=api_key(arguments.api_key))
        return cls(server, arguments.model or server.first_model(), fields)

    def turn(self, history: list[dict[str, str]], question: str) -> None:
        """Answer one question; on an error, report it and leave `history` unchanged."""
        asked = [*history, {"role": "user", "content": question}]
        stream = _Stream(self._server.stream("/v1/chat/completions", self._body(asked)))
        pieces: list[str] = []
        try:
            try:
                for piece in stream.text():
                    pieces.append(piece)
                    print(piece.translate(_CONTROL), end="", flush=True)
            except KeyboardInterrupt:
                print(" [stopped]", end="")
            finally:
                stream.close()
            print()
            print(stream.summary(), file=sys.stderr)
        except EngineError as error:
            if pieces:
                print()
            print(f"engine chat: {error}", file=sys.stderr)
            return
        history[:] = [*asked, {"role": "assistant", "content": "".join(pieces)}]

    def _body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        return {"messages": messages, **self._fields}


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
                print(thought.translate(_CONTROL), end="", file=sys.stderr, flush=True)
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

    def close(self) -> None:
        """Close the connection; the server then aborts the request."""
        self._events.close()

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
            parts.append(str(self._reason)[:80].translate(_CONTROL))
        return ", ".join(parts)


def _count(value: object) -> int | None:
    """Return a token count from the server, or None if it is not a plausible number."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value <= _MAX_TOKENS else None
