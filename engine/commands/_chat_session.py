"""A conversation of `engine chat`: its messages, sampling parameters and slash commands."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Generator, Sequence
from typing import Any, Protocol

from engine.commands._chat_saved import load_conversation, save_conversation, saved_names
from engine.commands._chat_terminal import Entry, Terminal, held_typing, printable
from engine.commands._options import DEFAULT_MAX_TOKENS, SAMPLING_TYPES
from engine.errors import EngineError, RequestError, did_you_mean
from engine.sampling_params import SamplingParams

__all__ = ["ChatModel", "Message", "Session"]

Message = dict[str, str]

_COMMANDS = {
    "/help": ("", "list the commands"),
    "/set": ("[NAME [VALUE]]", "show the sampling parameters, or set one; VALUE default: unset it"),
    "/system": ("[TEXT]", "show or set the system message; TEXT default: unset it"),
    "/model": ("[NAME]", "show the model, or go on with another one"),
    "/save": ("NAME", "save the conversation"),
    "/load": ("[NAME]", "list the saved conversations, or go on with one"),
    "/clear": ("", "forget the conversation, but not the system message"),
    "/exit": ("", "leave; so does Ctrl-D"),
}
_ALIASES = {"/reset": "/clear", "/bye": "/exit", "/quit": "/exit", "/?": "/help"}
_KEYS = {
    '"""': "begins and ends a text of several lines",
    "Ctrl-C": "stops the answer and keeps what has come, or stops /model; drops the line",
    "space": "before a slash: the line is a text for the model",
}


class ChatModel(Protocol):
    """A model to talk to, here or on a server."""

    @property
    def name(self) -> str:
        """Name of the model."""

    def answer(
        self, messages: Sequence[Message], sampling: dict[str, Any]
    ) -> Generator[str, None, None]:
        """Yield the text of the answer as it comes; Ctrl-C raises KeyboardInterrupt."""

    def summary(self) -> str:
        """Return the statistics of the last answer; "" if it was stopped."""

    def defaults(self) -> dict[str, Any] | None:
        """Return the model's value of each sampling parameter; None if they are not known."""

    def switch(self, name: str) -> None:
        """Go on with another model; after an error or Ctrl-C, with the former one."""

    def names(self) -> list[str]:
        """Return names that `switch` takes, for completions."""


class Session:
    """Reads entries, and answers them.

    Parameters
    ----------
    model : ChatModel
    system : str or None
        System message.
    sampling : dict
        Sampling parameters given by the user, as keywords of `SamplingParams`.
    """

    def __init__(self, model: ChatModel, system: str | None, sampling: dict[str, Any]) -> None:
        self.model = model
        self.system_message = system
        self._sampling = sampling
        self._messages: list[Message] = []  # without the system message
        self._is_left = False

    def run(self) -> None:
        """Answer each entry until /exit or the end of the input."""
        terminal = Terminal(self._completions)
        if terminal.is_interactive:
            _say(f"{self.model.name}: /help lists the commands, Ctrl-D leaves")
        while not self._is_left and (entry := terminal.read()) is not None:
            try:
                self._handle(entry)
            except EngineError as error:
                _say(f"engine chat: {error}")

    def _handle(self, entry: Entry) -> None:
        if not entry.is_command:
            if entry.text:
                self._answer(entry.text)
            return
        word, _, argument = entry.text.partition(" ")
        name = _ALIASES.get(word, word)
        if name not in _COMMANDS:
            hint = did_you_mean(word, _COMMANDS, "/help lists them")
            raise RequestError(
                f"there is no command {word!r:.100}{hint} (a space before / sends the text)"
            )
        getattr(self, f"_{name[1:]}")(argument.strip())

    def _answer(self, question: str) -> None:
        """Answer one question; after an error the conversation is as before."""
        asked = [*self._messages, {"role": "user", "content": question}]
        sampling = {"max_tokens": DEFAULT_MAX_TOKENS} | self._sampling
        pieces: list[str] = []
        try:
            with contextlib.closing(self.model.answer(self._all(asked), sampling)) as stream:
                self._print(stream, pieces)
        except EngineError:
            if pieces:
                print()
            raise
        if summary := self.model.summary():
            _say(summary)
        if text := "".join(pieces):  # "": stopped before the first token
            self._messages = [*asked, {"role": "assistant", "content": text}]

    def _print(self, stream: Generator[str, None, None], pieces: list[str]) -> None:
        """Print the answer, and collect it."""
        with held_typing():
            try:
                for piece in stream:
                    pieces.append(piece)
                    print(printable(piece), end="", flush=True)
            except KeyboardInterrupt:
                print(" [stopped]", end="")
            print(flush=True)

    def _all(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages behind the system message."""
        first = [{"role": "system", "content": self.system_message}] if self.system_message else []
        return [*first, *messages]

    # ---- commands

    def _help(self, argument: str) -> None:
        rows = {f"{name} {what}": text for name, (what, text) in _COMMANDS.items()} | _KEYS
        _say("\n".join(f"{name:22}{text}" for name, text in rows.items()))

    def _exit(self, argument: str) -> None:
        self._is_left = True

    def _clear(self, argument: str) -> None:
        self._messages = []
        _say("(forgotten)")

    def _system(self, argument: str) -> None:
        if argument:
            self.system_message = None if argument == "default" else argument
        _say(
            f"system message: {printable(self.system_message)}"
            if self.system_message
            else "no system message"
        )

    def _set(self, argument: str) -> None:
        name, _, text = argument.partition(" ")
        if not name:
            _say("\n".join(self._setting(each) for each in SAMPLING_TYPES))
            return
        if name not in SAMPLING_TYPES:
            known = ", ".join(SAMPLING_TYPES)
            hint = did_you_mean(name, SAMPLING_TYPES, f"known are {known}")
            raise RequestError(f"there is no sampling parameter {name!r:.100}{hint}")
        text = text.strip()
        if text == "default":
            self._sampling = {k: v for k, v in self._sampling.items() if k != name}
        elif text:
            value = _parsed(name, text)
            sampling = self._sampling | {name: value}
            SamplingParams(**({"max_tokens": DEFAULT_MAX_TOKENS} | sampling))  # reject it here
            self._sampling = sampling
        _say(self._setting(name))

    def _setting(self, name: str) -> str:
        """Return a line of /set: a sampling parameter, its value, and where that is from."""
        defaults = self.model.defaults()
        origin = ""
        value: Any = "-"
        if name in self._sampling:
            value = self._sampling[name]
            origin = "set here"
        elif name == "max_tokens":
            value = DEFAULT_MAX_TOKENS
        elif defaults is None:
            origin = "the server's default"
        else:
            value = defaults[name]
            if value != getattr(SamplingParams(), name):
                origin = "the model's default"
        shown = "-" if value in (None, ()) else str(value)
        return f"{name:20}{shown:10}{origin}".rstrip()

    def _model(self, argument: str) -> None:
        if argument:
            with held_typing():
                try:
                    self.model.switch(argument)
                except KeyboardInterrupt:
                    print("[stopped]")
        _say(f"model: {self.model.name}")

    def _save(self, argument: str) -> None:
        record = {
            "model": self.model.name,
            "messages": self._all(self._messages),
            "sampling": self._sampling,
        }
        is_new = argument not in saved_names()
        file = save_conversation(argument, record)
        _say(f"{'saved' if is_new else 'saved over'} {file}")

    def _load(self, argument: str) -> None:
        if not argument:
            _say("\n".join(saved_names()) or "no saved conversations")
            return
        record = load_conversation(argument)
        SamplingParams(**record["sampling"])  # reject a damaged file before anything changes
        messages = record["messages"]
        has_system = bool(messages) and messages[0]["role"] == "system"
        self.system_message = messages[0]["content"] if has_system else None
        self._messages = messages[has_system:]
        self._sampling = record["sampling"]
        _say(f"{len(self._messages)} messages of {argument}")
        if (model := record.get("model")) != self.model.name:
            _say(f"they were saved with {printable(str(model))}: /model goes on with another model")

    def _completions(self, line: str) -> list[str]:
        """Return the completions of the last word of a command."""
        command, *words = line.split(" ")
        if not command.startswith("/") or len(words) > 1:
            return []
        if not words:
            found = [f"{name} " if what else name for name, (what, _) in _COMMANDS.items()]
        elif command == "/model":
            found = self.model.names()
        elif command in ("/save", "/load"):
            found = saved_names()
        else:
            found = [f"{name} " for name in SAMPLING_TYPES] if command == "/set" else []
        return [name for name in found if name.startswith(words[0] if words else command)]


def _parsed(name: str, text: str) -> Any:
    """Return the value of a sampling parameter; a text may be a JSON string, for "\\n"."""
    kind = SAMPLING_TYPES[name]
    try:
        if kind is str:
            return [str(json.loads(text)) if text.startswith('"') else text]
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text)
    except (ValueError, KeyError):
        wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
        raise RequestError(f"{name} must be {wanted[kind]}; got {text!r:.80}") from None


def _say(text: str) -> None:
    """Print what is not the model's answer."""
    print(text, file=sys.stderr, flush=True)
