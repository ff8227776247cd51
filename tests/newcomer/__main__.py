"""A newcomer with the README alone: `python -m tests.newcomer [--record]`.

In a clone, a home and an environment of its own, the commands of the README are typed into a
terminal: install, chat, quantize, plot, serve. It fails if a command fails, is no longer in the
README, or its answer makes no sense. `--record` writes what the terminal showed to docs/casts; the
installation is not recorded, since it tells much of the machine and little of the engine.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from pathlib import Path

from tests.newcomer.terminal import Terminal
from tests.server.page_browser import CHROMIUM, Page, start_chromium

ROOT = Path(__file__).parents[2]
CASTS = ROOT / "docs" / "casts"
_KEPT = ("PATH", "LANG", "PIP_INDEX_URL", "PIP_CACHE_DIR", "SSL_CERT_FILE", "HTTPS_PROXY")
_QUIET = {"PIP_QUIET": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "VIRTUAL_ENV_DISABLE_PROMPT": "1"}


class Newcomer:
    """One visit, scene by scene.

    Parameters
    ----------
    folder : Path
        Empty; gets the clone and the home.
    delay : float
        Seconds between two typed characters.
    casts : Path or None
        Where each scene is recorded.
    """

    def __init__(self, folder: Path, delay: float, casts: Path | None) -> None:
        clone = folder / "engine"
        home = folder / "home"
        home.mkdir()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        self._readme = (clone / "README.md").read_text()
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        environment |= _QUIET | {"HOME": str(home)}
        self._terminal = Terminal(clone, environment, delay)
        self._folders = {str(clone): "~/engine", str(home): "~"}
        self._casts = casts
        self.clone = clone

    def run(self, command: str) -> str:
        """Return the output of a command of the README."""
        self._check(command)
        return self._terminal.run(command)

    def _check(self, command: str) -> None:
        pattern = rf"^\$ {re.escape(command)}( +#.*)?$"
        if not re.search(pattern, self._readme, re.MULTILINE):
            raise RuntimeError(f"the README has no line '$ {command}'")

    def install(self) -> None:
        """Install the package and the model."""
        self.run("python -m venv .venv && . .venv/bin/activate")
        self.run("pip install .")
        self.run("engine pull smollm2")
        _expect(self.run("engine doctor"), r"CPU: ready")
        self._terminal.run("clear")
        self._terminal.forget()

    def chat(self) -> None:
        """Say hi; the answer must be one to that."""
        terminal = self._terminal
        self._check("engine chat")
        terminal.type("engine chat")
        terminal.wait_for(r"\n> ")
        for question, sense in (
            ("hi", r"(?i)\b(hello|hi)\b"),
            ("What is the capital of France?", "Paris"),
        ):
            terminal.type(question)
            answer = terminal.wait_for(r"\n\d+ tokens after")
            _expect(answer.partition("\n")[2], sense)
            terminal.wait_for(r"\n> ")
        terminal.type("/set temperature")
        _expect(terminal.wait_for(r"\n> "), r"temperature +0\.2 +the model's default")
        terminal.run("/exit")

    def look(self) -> None:
        """Quantize a model, plan for a GPU, draw what attention sees."""
        self.run("engine quantize smollm2 smollm2-int8 --format int8")
        answer = self.run('engine generate smollm2-int8 --temperature 0 "The capital of France is"')
        _expect(answer, "Paris")
        _expect(self.run("engine plan llama-3.1-8b"), r"(?i)fits")
        self.run("pip install '.[examples]'")
        self.run("python examples/02_inside_attention.py")
        if not (self.clone / "attention.png").stat().st_size:
            raise RuntimeError("attention.png is empty")

    def serve(self) -> None:
        """Serve the model; ask over HTTP, open the page, and end the server."""
        terminal = self._terminal
        self.run("pip install '.[serve]'")
        self._check("engine serve smollm2 --port 8000")
        terminal.type("engine serve smollm2 --port 8000 &")
        terminal.wait_for(r"ready at (http://\S+)")
        answer = self.run(
            "curl -s http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' "
            """-d '{"messages": [{"role": "user", "content": "hi"}]}'"""
        )
        _expect(answer, r'(?i)"content": ?"[^"]*\b(hello|hi)\b')
        self._open_page()
        terminal.type("kill %1")
        terminal.wait_for(r"ended by SIGTERM; served \d+ requests")

    def _open_page(self) -> None:
        """Say hi on the page, if the machine has a browser."""
        if not CHROMIUM:
            print("no chromium: the page is not opened")
            return
        with tempfile.TemporaryDirectory() as folder:
            driver = start_chromium(folder)
            try:
                driver.get("http://127.0.0.1:8000/")
                page = Page(driver)
                page.ask("hi")
                _expect(page.answer(), r"(?i)\b(hello|hi)\b")
            finally:
                driver.quit()

    def save(self, scene: str) -> None:
        """Record what the terminal showed since the last scene."""
        if self._casts is not None:
            path = self._casts / f"{scene}.cast"
            self._terminal.save(path, f"engine: {scene}", self._folders)

    def close(self) -> None:
        """Leave the terminal."""
        self._terminal.close()


def _expect(text: str, pattern: str) -> None:
    if not re.search(pattern, text):
        raise RuntimeError(f"expected {pattern!r} in:\n{text}")


def main() -> None:
    """Play all scenes."""
    parser = argparse.ArgumentParser(prog="python -m tests.newcomer")
    parser.add_argument("--record", action="store_true", help=f"write {CASTS.relative_to(ROOT)}/")
    is_recorded = parser.parse_args().record
    if is_recorded:
        CASTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        visit = Newcomer(Path(folder), 0.04 if is_recorded else 0.0, CASTS if is_recorded else None)
        try:
            for scene in (visit.install, visit.chat, visit.look, visit.serve):
                scene()
                print(f"{scene.__name__}: done")
                if scene != visit.install:
                    visit.save(scene.__name__)
        finally:
            visit.close()


if __name__ == "__main__":
    main()
