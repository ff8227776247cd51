"""`kernels.watch`: check a kernel again whenever its source is saved."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, EngineError
from engine.kernels._tools.check import check
from engine.kernels._user.files import load_ops
from engine.kernels._user.op import Op

__all__ = ["Watcher", "watch"]

_POLL_SECONDS = 0.3


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
        self._ops = [target] if isinstance(target, Op) else []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.ok = True
        self.num_checks = 0

    def __repr__(self) -> str:
        state = "stopped" if self._ended.is_set() else "watching"
        files = ", ".join(path.name for path, _ in self._stamps())
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
        seen: Any = None
        while not self._ended.is_set():
            stamps = self._stamps()
            if stamps != seen:
                self._check_all()
                seen = (
                    self._stamps()
                    if seen is None and not isinstance(self._target, Op)
                    else (stamps)
                )
            self._ended.wait(_POLL_SECONDS)

    def _stamps(self) -> tuple[tuple[Path, int], ...]:
        paths = [path for op in self._ops for path in op.source.files]
        if not isinstance(self._target, Op):
            paths.append(Path(self._target.split(".py:")[0].removesuffix(".py") + ".py").resolve())
        return tuple((path, _stamp(path)) for path in dict.fromkeys(paths))

    def _check_all(self) -> None:
        """Check a few shapes of every op first, then all; show the first failure only."""
        try:
            if not isinstance(self._target, Op):
                self._ops = list(load_ops(self._target).values())
            self.ok = all([self._check(op) for op in self._ops])
        except EngineError as error:
            self.ok = False
            self._show(str(error))
        self.num_checks += 1

    def _check(self, op: Op) -> bool:
        report = check(op, **(self._options | {"quick": True, "show": False}))
        if report.ok and not self._options.get("quick") and not self._ended.is_set():
            report = check(op, **(self._options | {"show": False}))
        self._show(str(report))
        return report.ok


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
        If an op's source is a string: there is no file to watch.

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
