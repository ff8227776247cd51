"""`engine chat [MODEL]`: chat in the terminal with a model here or, with `--url`, on a server."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Generator, Sequence
from typing import Any

from engine.commands._chat_session import ChatModel, Message, Session
from engine.commands._chat_terminal import Interrupt, held_typing
from engine.commands._chat_url import RemoteChat, add_url_arguments
from engine.commands._options import (
    SAMPLING_TYPES,
    add_model_arguments,
    add_sampling_arguments,
    check_has_template,
    given_sampling,
    make_llm,
    summary,
)
from engine.commands._parser import MODEL_HELP, add_positional_model, chosen_model
from engine.errors import ConfigError, EngineError
from engine.llm import LLM
from engine.loading.download import resolve_model
from engine.loading.model_cache import cached_models

__all__ = ["add_arguments", "run"]

_EPILOG = (
    "In the chat, /help lists commands: /set temperature 0.2, /system, /save, /load, /model ..."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    add_positional_model(parser, f"{MODEL_HELP} (default: smollm2); with --url, its name there")
    parser.add_argument("--system", help="system message")
    add_url_arguments(parser)
    add_model_arguments(parser)
    add_sampling_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Answer each entry until the end of the input."""
    default = "smollm2" if arguments.url is None else None
    arguments.model = chosen_model(arguments.named_model, arguments.model, default)
    if arguments.url is not None:
        _converse(arguments, RemoteChat.from_arguments(arguments))
        return 0
    if arguments.api_key is not None:
        raise ConfigError("--api-key needs --url")
    with held_typing():
        chat = LocalChat(arguments)
    try:
        _converse(arguments, chat)
    finally:
        chat.close()
    return 0


def _converse(arguments: argparse.Namespace, model: ChatModel) -> None:
    Session(model, arguments.system, given_sampling(arguments)).run()


class LocalChat:
    """Chat with a model on this machine.

    Parameters
    ----------
    arguments : argparse.Namespace
        The command's options.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._llm = _load(arguments)
        self._summary = ""

    @property
    def name(self) -> str:
        """Name of the model."""
        return str(self._arguments.model)

    def answer(
        self, messages: Sequence[Message], sampling: dict[str, Any]
    ) -> Generator[str, None, None]:
        """Yield the text of the answer; Ctrl-C raises KeyboardInterrupt between two steps."""
        self._summary = ""
        num_ids = 0
        params = self._llm.get_default_sampling_params(**sampling)
        with (
            Interrupt() as interrupt,
            contextlib.closing(self._llm.stream(messages, params)) as stream,
        ):
            for output in stream:
                num_ids += len(output.outputs[0].token_ids)
                if output.finished:
                    self._summary = summary(self._llm, output, num_ids)
                yield output.outputs[0].text
                if interrupt.is_set and not output.finished:
                    raise KeyboardInterrupt

    def summary(self) -> str:
        """Return the statistics of the last answer; "" if it was stopped."""
        return self._summary

    def defaults(self) -> dict[str, Any]:
        """Return the model's value of each sampling parameter."""
        params = self._llm.get_default_sampling_params()
        return {name: getattr(params, name) for name in SAMPLING_TYPES}

    def switch(self, name: str) -> None:
        """Load another model; after an error or Ctrl-C, load the former one again.

        The former one is closed first, as a GPU has no room for two.
        """
        resolve_model(name, progress=True)  # a name that is unknown closes nothing
        former = self._arguments
        self._llm.close()
        self._arguments = argparse.Namespace(**{**vars(former), "model": name})
        try:
            self._llm = _load(self._arguments)
        except BaseException:  # Ctrl-C, too
            self._arguments = former
            self._llm = _load(former)
            raise

    def names(self) -> list[str]:
        """Return the downloaded models."""
        return [model.name for model in cached_models()]

    def close(self) -> None:
        """Free the model's memory."""
        self._llm.close()


def _load(arguments: argparse.Namespace) -> LLM:
    llm = make_llm(arguments)
    try:
        check_has_template(llm, "engine generate MODEL PROMPT continues a text; or take an "
                           "instruct model")  # fmt: skip
    except EngineError:
        llm.close()
        raise
    return llm
