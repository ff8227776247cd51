"""`engine chat`: chat in the terminal with a local model or, with `--url`, a remote one."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable

from engine.commands._chat_url import RemoteChat, add_url_arguments
from engine.commands._options import (
    add_model_arguments,
    add_sampling_arguments,
    make_llm,
    sampling_params,
    summary,
)
from engine.commands._parser import MODEL_HELP, add_positional_model, chosen_model
from engine.commands._streams import read_input
from engine.errors import ConfigError, EngineError
from engine.llm import LLM
from engine.sampling_params import SamplingParams

__all__ = ["add_arguments", "run"]

_MODEL = "smollm2"
_HELP = "/reset forgets the conversation, /exit leaves; Ctrl-C stops an answer, Ctrl-D leaves"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_positional_model(parser, f"{MODEL_HELP} (default: smollm2); with --url, its name there")
    parser.add_argument("--system", help="system message")
    add_url_arguments(parser)
    add_model_arguments(parser)
    add_sampling_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Answer each input line until end of file."""
    default = _MODEL if arguments.url is None else None
    arguments.model = chosen_model(arguments.named_model, arguments.model, default)
    if arguments.url is not None:
        _converse(arguments.system, RemoteChat.from_arguments(arguments).turn)
        return 0
    if arguments.api_key is not None:
        raise ConfigError("--api-key needs --url")
    with make_llm(arguments) as llm:
        params = sampling_params(llm, arguments)
        _converse(arguments.system, functools.partial(_turn, llm, params))
    return 0


def _converse(system: str | None, turn: Callable[[list[dict[str, str]], str], None]) -> None:
    """Read lines; `turn` answers each, and appends the question and answer to the history."""
    first = [{"role": "system", "content": system}] if system else []
    history = list(first)
    if sys.stdin.isatty():
        print(_HELP, file=sys.stderr)
    while (line := _read_line()) is not None:
        if line == "/exit":
            break
        if line == "/reset":
            history = list(first)
            print("(forgotten)", file=sys.stderr)
        elif line:
            turn(history, line)


def _read_line() -> str | None:
    """Return the next line, or None at end of file; Ctrl-C clears the line, as in a shell."""
    while True:
        try:
            if sys.stdin.isatty():
                return input("> ").strip()
            line = read_input(line=True)
            return line.strip() if line else None
        except EOFError:
            return None
        except KeyboardInterrupt:
            print(file=sys.stderr)


def _turn(llm: LLM, params: SamplingParams, history: list[dict[str, str]], question: str) -> None:
    """Answer one question; on an error, report it and leave `history` unchanged."""
    asked = [*history, {"role": "user", "content": question}]
    pieces: list[str] = []
    ids = 0
    try:
        stream = llm.stream(asked, params)
        output = None
        try:
            for output in stream:
                pieces.append(output.outputs[0].text)
                ids += len(output.outputs[0].token_ids)
                print(pieces[-1], end="", flush=True)
        except KeyboardInterrupt:
            stream.close()
            print(" [stopped]", end="")
        print()
        if output is not None and output.finished:
            print(summary(llm, output, ids), file=sys.stderr)
    except EngineError as error:
        print(f"engine chat: {error}", file=sys.stderr)
        return
    history[:] = [*asked, {"role": "assistant", "content": "".join(pieces)}]
