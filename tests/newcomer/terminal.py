"""A terminal that a script types into, recorded as an asciicast."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pexpect

COLUMNS, ROWS = 134, 34
_PROMPT = re.compile(r"\x1b\]0;(\d+)\x07\$ ")  # the exit status, in the window's title
_LONGEST_PAUSE = 1.5  # seconds in a recording


class Terminal:
    """An interactive shell in a pseudo-terminal.

    Parameters
    ----------
    folder : Path
        Where the shell starts.
    environment : dict of str to str
        All of its variables.
    delay : float
        Seconds between two typed characters.
    """

    def __init__(self, folder: Path, environment: dict[str, str], delay: float = 0.0) -> None:
        self._events: list[tuple[float, str]] = []
        self._delay = delay
        own = {"TERM": "xterm-256color", "PS1": r"\[\e]0;$?\a\]$ ", "INPUTRC": "/dev/null"}
        self._child = pexpect.spawn(
            "bash",
            ["--norc", "--noprofile", "--noediting"],
            cwd=str(folder),
            env={**environment, **own},
            dimensions=(ROWS, COLUMNS),
            encoding="utf-8",
        )
        self._child.delaybeforesend = None
        self._child.logfile_read = self
        self._wait_for_prompt(30)

    def write(self, text: str) -> None:
        """Record what the terminal shows; called by pexpect."""
        self._events.append((time.monotonic(), text))

    def flush(self) -> None:
        """Do nothing: a file's method that pexpect calls."""

    def run(self, line: str, seconds: float = 600) -> str:
        """Return the output of a command; raise if it fails or takes more than `seconds`."""
        self.type(line)
        status, output = self._wait_for_prompt(seconds)
        if status:
            raise RuntimeError(f"{line!r} ended with {status}:\n{output}")
        return output

    def type(self, line: str) -> None:
        """Type a line, and Enter."""
        for character in line + "\n":
            time.sleep(self._delay)
            self._child.send(character)

    def wait_for(self, pattern: str, seconds: float = 300) -> str:
        """Return what the terminal shows up to the end of `pattern`; raise after `seconds`."""
        self._child.expect(pattern, timeout=seconds)
        return str(self._child.before + self._child.match.group())

    def close(self) -> None:
        """End the shell, and what it runs."""
        self._child.close(force=True)

    def _wait_for_prompt(self, seconds: float) -> tuple[int, str]:
        self._child.expect(_PROMPT, timeout=seconds)
        return int(self._child.match[1]), self._child.before

    def save(self, path: Path, title: str, folders: dict[str, str]) -> None:
        """Write what was shown since the last call in the format of asciinema 2.

        `folders`: path of this machine -> what stands for it in the recording.
        """
        head = {"version": 2, "width": COLUMNS, "height": ROWS, "title": title}
        lines = [json.dumps(head)]
        now = last = 0.0
        for at, text in self._events:
            now += min(at - last, _LONGEST_PAUSE) if last else 0.0
            last = at
            for folder, name in folders.items():
                text = text.replace(folder, name)
            lines.append(json.dumps([round(now, 3), "o", text], ensure_ascii=False))
        path.write_text("\n".join(lines) + "\n")
        self.forget()

    def forget(self) -> None:
        """Leave what was shown so far out of the next recording."""
        self._events.clear()
