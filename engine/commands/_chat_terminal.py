"""The terminal of `engine chat`: entries with line editing and history; typing held for later.

Lines are edited by readline of the standard library, which knows the keys of ~/.inputrc, searches
the history and takes a pasted text of several lines as one entry. Without a terminal, or without
readline (Windows), entries are plain lines.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from engine import env
from engine.commands._streams import read_input

__all__ = ["Entry", "Interrupt", "Terminal", "held_typing", "printable"]

_QUOTES = '"""'
_MAX_HISTORY = 1000  # lines

# Control characters are replaced: an answer must not control the terminal.
_CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160))}
_CONTROL = {code: to for code, to in _CONTROL.items() if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Return the text without characters that control a terminal, other than new line and tab."""
    return text.translate(_CONTROL)


class Entry(NamedTuple):
    """What was entered: a text for the model, or a command (a line that begins with a slash)."""

    text: str
    is_command: bool


class Terminal:
    """Reads entries from standard input.

    Parameters
    ----------
    complete : callable
        Returns the completions of the last word of a line, given the whole line.
    """

    def __init__(self, complete: Callable[[str], list[str]]) -> None:
        self.is_interactive = sys.stdin.isatty()
        self._readline: Any = None
        self._num_saved = 0
        if self.is_interactive:
            with contextlib.suppress(ImportError):  # Windows
                self._readline = importlib.import_module("readline")
        if self._readline is not None:
            self._prepare(complete)

    def read(self) -> Entry | None:
        '''Return the next entry, or None at the end of the input; Ctrl-C drops what was typed.

        Lines from one that begins with three quotes to one that ends with them are one entry. A
        command's text may be such a block, too: /system """...
        '''
        while True:
            try:
                if (entry := self._entry()) is not None:
                    return entry
            except EOFError:
                if self.is_interactive:
                    print(file=sys.stderr)
                return None
            except KeyboardInterrupt:
                print(file=sys.stderr)

    def _entry(self) -> Entry | None:
        """Return the next entry; None if it is a block without an end."""
        line = self._line("> ")
        head, quotes, rest = line.partition(_QUOTES)
        is_command = line.startswith("/")
        if not quotes or (head.strip() and not is_command):
            return Entry(line.strip(), is_command)
        lines = [rest]
        while _QUOTES not in lines[-1]:
            try:
                lines.append(self._line("... "))
            except EOFError:
                what = f"a block that {_QUOTES} begins must end with {_QUOTES}"
                print(f"engine chat: {what}", file=sys.stderr)
                return None
        text = "\n".join(lines).replace(_QUOTES, "", 1).strip("\n")
        return Entry(head + text if is_command else text, is_command)

    def _line(self, prompt: str) -> str:
        """Return the next line without its end; raises EOFError after the last one."""
        if not self.is_interactive:
            line = read_input(line=True)
            if not line:
                raise EOFError
            return line.rstrip("\n")
        line = input(prompt)
        if self._readline is not None:
            self._append_history()
        return line

    def _prepare(self, complete: Callable[[str], list[str]]) -> None:
        """Read the history, and bind the tab key."""
        readline = self._readline
        is_libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
        readline.set_completer_delims(" ")
        readline.set_completer(
            lambda word, index: (complete(readline.get_line_buffer()) + [None] * (index + 1))[index]
        )
        readline.set_history_length(_MAX_HISTORY)
        with contextlib.suppress(OSError):  # there is none yet, or the cache cannot be read
            readline.read_history_file(_history_file())
        self._num_saved = readline.get_current_history_length()

    def _append_history(self) -> None:
        """Append new lines to the history file, which only the user may read."""
        readline = self._readline
        number = readline.get_current_history_length() - self._num_saved
        file = _history_file()
        with contextlib.suppress(OSError):  # the cache cannot be written: no history
            os.makedirs(os.path.dirname(file), mode=0o700, exist_ok=True)
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600))
            if not hasattr(readline, "append_history_file"):  # libedit
                readline.write_history_file(file)
            elif number > 0:
                readline.append_history_file(number, file)
        self._num_saved += max(0, number)


def _history_file() -> str:
    return str(env.cache_dir() / "chat_history")


@contextlib.contextmanager
def held_typing() -> Iterator[None]:
    """Hold what is typed for the next prompt, instead of showing it in the answer.

    The terminal neither echoes keys nor waits for the end of a line, so that readline finds all of
    them. Ctrl-C still interrupts, and does not drop what was typed before it.
    """
    try:
        termios: Any = importlib.import_module("termios")
    except ImportError:  # Windows
        termios = None
    if termios is None or not sys.stdin.isatty():
        yield
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    held = termios.tcgetattr(file)
    held[3] = (held[3] & ~(termios.ECHO | termios.ICANON)) | termios.NOFLSH  # the local modes
    termios.tcsetattr(file, termios.TCSANOW, held)
    try:
        yield
    finally:
        termios.tcsetattr(file, termios.TCSANOW, before)


class Interrupt:
    """Within `with`, the first Ctrl-C sets `is_set`; only a second one raises KeyboardInterrupt.

    A step of the engine is then never left in the middle by a user who waits for its end.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, *_: object) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
