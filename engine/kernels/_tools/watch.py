"""`kernels.watch`: check a kernel again whenever its source is saved."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, EngineError
from engine.kernels._tools.check import check
from engine.kernels._tools.check_report import CheckReport, Finding
from engine.kernels._user.files import check_target, load_ops
from engine.kernels._user.op import Op

__all__ = ["Watcher", "watch"]

_POLL_SECONDS = 0.3

Stamps = dict[Path, int]
"""Time of change of each file, in ns."""


class Watcher:
    """Checks ops again when their files change. `watch` makes it.

    Attributes
    ----------
    ok : bool
        Whether the last check found no error.
    num_checks : int
        Checks of all ops so far.
    """

    def __init__(
        self, target: Op | str, show: Callable[[str], None], options: dict[str, Any]
    ) -> None:
        self._target = target
        self._show = show
        self._options = options
        self._path = Path() if isinstance(target, Op) else check_target(target)
        self._ops = [target] if isinstance(target, Op) else []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._error = ""  # message of the Python file's last failure
        self.ok = True
        self.num_checks = 0

    def __repr__(self) -> str:
        state = "stopped" if self._ended.is_set() else "watching"
        files = ", ".join(path.name for path in self._stamps())
        return f"<Watcher {state} {files}, {self.num_checks} checks>"

    def start(self) -> None:
        """Watch in a thread."""
        self._thread = threading.Thread(target=self.run, name="kernels.watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, after the check that is running."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def run(self) -> None:
        """Check now, and after every change, until `stop`."""
        seen: Stamps | None = None
        while not self._ended.is_set():
            if self._stamps() != seen:
                seen = self._load()
                self._check_all()
            self._ended.wait(_POLL_SECONDS)

    def _stamps(self) -> Stamps:
        return {**self._python_stamp(), **self._source_stamps()}

    def _python_stamp(self) -> Stamps:
        if isinstance(self._target, Op):
            return {}
        return {self._path: _stamp(self._path)}

    def _source_stamps(self) -> Stamps:
        return {path: _stamp(path) for op in self._ops for path in op.source.files}

    def _load(self) -> Stamps:
        """Run the Python file again; return the stamps of what was read, or of older versions."""
        stamp = self._python_stamp()
        if not isinstance(self._target, Op):
            self._error = ""
            try:
                self._ops = list(load_ops(self._target).values())
            except EngineError as error:
                self._error = str(error)
        return {**stamp, **self._source_stamps()}

    def _check_all(self) -> None:
        if self._error:
            self._show(self._error)
        self.ok = not self._error and all([self._check(op) for op in self._ops])
        self.num_checks += 1

    def _check(self, op: Op) -> bool:
        """Check a few shapes first, then all of them; show the first failure only."""
        report = self._report(op, quick=True)
        if report.ok and not self._options.get("quick") and not self._ended.is_set():
            report = self._report(op, quick=False)
        self._show(str(report))
        return report.ok

    def _report(self, op: Op, *, quick: bool) -> CheckReport:
        try:
            return check(op, **(self._options | {"quick": quick, "show": False}))
        except EngineError as error:  # the source cannot be read, or declares no kernel
            finding = Finding("definition", str(error))
            return CheckReport(op.name, op.signature.text, [finding])


def watch(target: Op | str | Path, *, background: bool = True, **options: Any) -> Watcher:
    """Check an op now, and again whenever its source, or a header beside it, is saved.

    Parameters
    ----------
    target : Op, str or Path
        An op, or a Python file: "FILE.py", "FILE.py:NAME"; the file is run again when it changes.
    background : bool
        Return at once, and watch in a thread that prints; `stop()` ends it. False: until Ctrl-C.
    **options
        Arguments of `check`.

    Returns
    -------
    Watcher

    Raises
    ------
    ConfigError
        If an op's source is a string, or the Python file does not exist: nothing can be watched.

    Examples
    --------
    >>> from engine import kernels
    >>> watcher = kernels.watch("scale_rows.py")  # doctest: +SKIP
    >>> watcher.stop()  # doctest: +SKIP
    """
    if isinstance(target, Op) and target.source.path is None:
        raise ConfigError(
            f"{target.name}: source: must be a file, to be watched; it is a string. Call "
            "kernels.check after each change"
        )
    watcher = Watcher(target if isinstance(target, Op) else str(target), _printed(), options)
    if background:
        watcher.start()
        return watcher
    print("watching; Ctrl-C ends it", flush=True)
    try:
        watcher.run()
    except KeyboardInterrupt:
        watcher.stop()
    return watcher


def _printed() -> Callable[[str], None]:
    """Return a function that prints where this one was called: in a notebook, below its cell."""
    stream = sys.stdout

    def show(text: str) -> None:
        print(f"\n{text}", file=stream, flush=True)

    return show


def _stamp(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # while an editor saves it
        return 0
