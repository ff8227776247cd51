"""`engine chat` in a real (pseudo) terminal, against a scripted server."""

from __future__ import annotations

import asyncio
import os
import pty
import select
import stat
import subprocess
import sys
import threading
import time

import pytest

from tests.clients.scripted_server import ScriptedServer

SECONDS = 120.0  # deadline of everything that is waited for


class Screen:
    """A chat in a terminal: types keys, and waits for what is shown."""

    def __init__(self, url: str, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        self._shown = ""
        self._seen = 0
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine", "chat", "--url", url, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "INPUTRC": os.devnull, "COLUMNS": "200"},
            preexec_fn=_take_terminal,
        )
        os.close(slave)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def interrupt(self, text: str) -> str:
        """Press Ctrl-C until `text` is shown; return as `wait` does.

        `input` notes a Ctrl-C that falls between its prompt and its wait for keys with the next
        key only (CPython checks for signals when its `select` returns).
        """
        for _ in range(int(SECONDS / 5)):
            self.type("\x03")
            if self._read(text, 5.0) is not None:
                break
        return self.wait(text)

    def wait(self, text: str) -> str:
        """Wait until `text` is shown; return all since the last wait, up to its end."""
        at = self._read(text, SECONDS)
        assert at is not None, f"{text!r} is not in {self._shown[self._seen :]!r}"
        start = self._seen
        self._seen = at + len(text)
        return self._shown[start : self._seen]

    def _read(self, text: str, seconds: float) -> int | None:
        """Read until `text` is shown, at most for `seconds`; return where it begins, or None."""
        end = time.monotonic() + seconds
        while (at := self._shown.find(text, self._seen)) < 0:
            if time.monotonic() > end:
                return None
            if not select.select([self._master], [], [], 1.0)[0]:
                continue
            try:
                self._shown += os.read(self._master, 65536).decode()
            except OSError:  # the other end is closed
                return None
        return at

    def end(self) -> int:
        return self.process.wait(SECONDS)


def _take_terminal() -> None:
    """Make standard input the controlling terminal, so that its keys send signals."""
    import fcntl
    import signal
    import termios

    signal.signal(signal.SIGINT, signal.default_int_handler)  # the suite may run with it ignored
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path))
    return tmp_path


class Slow:
    """A script whose answers pause after "one" until the test lets them go on."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    async def __call__(self, exchange):
        if exchange.method == "GET":
            await exchange.json(200, {"data": [{"id": "first"}]})
            return
        await exchange.head()
        await exchange.token("one")
        while not self.go_on.is_set():
            await asyncio.sleep(0.01)
        await exchange.token("two", "stop")
        await exchange.end(1, 2)


def _contents(request):
    return [message["content"] for message in request.body["messages"]]


def test_typing_during_an_answer_is_held_and_ctrl_c_keeps_what_has_come(cache):
    script = Slow()
    with ScriptedServer(script) as server, Screen(server.url) as screen:
        screen.wait("> ")
        screen.type("first\r")
        screen.wait("one")
        screen.type("seco")  # held
        script.go_on.set()
        assert screen.wait("two").startswith("two")
        screen.wait("> ")
        screen.wait("seco")
        script.go_on.clear()
        screen.type("nd\r")
        screen.wait("one")
        screen.type("thi")  # held, too
        screen.interrupt("[stopped]")
        script.go_on.set()
        screen.wait("> ")
        screen.wait("thi")
        screen.type("rd\r")
        screen.wait("two")
        screen.wait("> ")
        screen.type("\x04")
        assert screen.end() == 0
    assert _contents(server.requests[-1]) == ["first", "onetwo", "second", "one", "third"]


def test_lines_are_edited_and_remembered(cache):
    script = Slow()
    script.go_on.set()
    with ScriptedServer(script) as server, Screen(server.url) as screen:
        screen.wait("> ")
        screen.type("helo\x1b[Dl\r")  # left, and the missing letter
        screen.wait("two")
        screen.wait("> ")
        screen.type('"""a\r')
        screen.wait("... ")
        screen.type("  b\r")
        screen.wait("... ")
        screen.type('c"""\r')
        screen.wait("two")
        screen.wait("> ")
        screen.type("dropped")
        screen.wait("dropped")
        screen.interrupt("> ")
        screen.type("/sav\t")
        screen.wait("/save ")
        screen.type("talk\r")
        screen.wait("saved ")
        screen.wait("> ")
        screen.type("/exit\r")
        assert screen.end() == 0

        with Screen(server.url) as again:
            again.wait("> ")
            again.type("\x12hel")  # a search backwards
            again.wait("hello")
            again.type("\r")
            again.wait("two")
            again.wait("> ")
            again.type("\x04")
            assert again.end() == 0
    contents = [_contents(each) for each in server.requests if each.method == "POST"]
    assert contents == [["hello"], ["hello", "onetwo", "a\n  b\nc"], ["hello"]]
    for file in (cache / "chat_history", cache / "chats" / "talk.json"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "dropped" not in (cache / "chat_history").read_text()
