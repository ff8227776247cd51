"""The parent's side of `child.py`: starts it, sends calls, and survives its end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from engine import device
from engine.errors import DeviceError, EngineError
from engine.kernels._tools.child import Link, launch_message, read_problem
from engine.kernels._tools.device_run import Answer, Call, run_call
from engine.kernels._user.files import in_line
from engine.kernels._user.op import Op, current_chip
from engine.kernels._user.problem import Chip

__all__ = ["Local", "Worker", "WorkerFailure"]

CHILD = "engine.kernels._tools.child"
"""Module that the process runs."""

_END_SECONDS = 5.0
_TOOL_SECONDS = 30.0  # a tool writes its log at the end
_START_SECONDS = 120.0  # import of CuPy, a context, and a tool that instruments it


class WorkerFailure(Exception):
    """The child did not answer.

    Attributes
    ----------
    is_timeout : bool
        It was killed after the time limit; else it ended by itself.
    """

    def __init__(self, text: str, *, is_timeout: bool) -> None:
        super().__init__(text)
        self.is_timeout = is_timeout


class Worker:
    """A child process that makes calls of one op. A new one is started after a failure.

    Parameters
    ----------
    op : Op
    seconds : float
        Longest time of a call.
    prefix : sequence of str
        Command that runs the child, such as compute-sanitizer.
    exact : bool
        Allocate every array by itself, without guard bands.

    Attributes
    ----------
    device : str
        Name of the GPU, once it has started.
    chip : Chip
    """

    def __init__(
        self, op: Op, seconds: float, prefix: Sequence[str] = (), *, exact: bool = False
    ) -> None:
        self._op = op
        self._seconds = seconds
        self._prefix = list(prefix)
        self._exact = exact
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Link | None = None
        self._reader: threading.Thread | None = None
        self._messages: queue.Queue[Any] = queue.Queue()
        self.device = ""
        self.chip: Chip | None = None

    def start(self) -> Chip:
        """Start the child unless it runs; return its GPU.

        Raises
        ------
        DeviceError
            If it cannot use a GPU.
        """
        if self._process is None:
            self._spawn()
            try:
                header, _ = self._ask({"do": "start", "exact": self._exact}, {}, _START_SECONDS)
                self._ask({"do": "define", "op": _definition(self._op)}, {}, _START_SECONDS)
            except WorkerFailure as error:
                raise DeviceError(f"the process for the GPU does not start: {error}") from error
            self.device = header["name"]
            self.chip = Chip(**header["chip"])
        assert self.chip is not None
        return self.chip

    def call(self, call: Call) -> Answer:
        """Make a call.

        Raises
        ------
        WorkerFailure
            If the child hangs or crashes; it is ended.
        """
        self.start()
        about = {
            field.name: getattr(call, field.name)
            for field in dataclasses.fields(call)
            if field.name not in ("arrays", "data")
        }
        about["arrays"] = [dataclasses.asdict(placed) for placed in call.arrays]
        header, results = self._ask({"do": "call", "call": about}, call.data, self._seconds)
        findings = [(kind, text) for kind, text in header["findings"]]
        answer = Answer(results, findings, tuple(header["error"]) if header["error"] else None)
        if answer.error and answer.error[0] == "crash" and not self._prefix:
            self.kill()  # its CUDA context is lost; a tool still has its log to write
        return answer

    def close(self) -> None:
        """Let the child end, which a closed pipe tells it to."""
        self._end(_TOOL_SECONDS if self._prefix else _END_SECONDS)

    def kill(self) -> None:
        """End the child at once: its kernel may never end."""
        if self._process is not None:
            _kill(self._process)
        self._end(None)

    def _end(self, seconds: float | None) -> int | None:
        """Wait for the child; return its status."""
        process = self._process
        self._process = None
        if process is None:
            return None
        with contextlib.suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            _kill(process)
            status = process.wait()
        if self._reader is not None:
            self._reader.join(_END_SECONDS)  # it closes the other pipe
        return status

    def _spawn(self) -> None:
        paths = os.pathsep.join(filter(os.path.isabs, sys.path))
        self._process = process = subprocess.Popen(
            [*self._prefix, sys.executable, "-m", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": paths},
            start_new_session=True,  # Ctrl-C interrupts the parent, which then ends it
        )
        self._link = link = Link(process.stdout, process.stdin)
        messages: queue.Queue[Any] = queue.Queue()
        self._messages = messages
        pipe = process.stdout
        self._reader = threading.Thread(target=_read, args=(link, messages, pipe), daemon=True)
        self._reader.start()

    def _ask(
        self, header: dict[str, Any], arrays: dict[str, Any], seconds: float
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        assert self._link is not None
        try:
            self._link.send(header, arrays)
            while True:
                message = self._messages.get(timeout=seconds)
                if message is None or message[0]["do"] != "launch":
                    break
                self._link.send(self._launches(message[0]["problem"]))
        except (queue.Empty, OSError) as error:
            is_timeout = isinstance(error, queue.Empty)
            self.kill()
            text = f"no answer within {seconds:g} s" if is_timeout else str(error)
            raise WorkerFailure(text, is_timeout=is_timeout) from None
        if message is None:
            status = self._end(_END_SECONDS)
            raise WorkerFailure(f"it ended with status {status}", is_timeout=False)
        found: tuple[dict[str, Any], dict[str, Any]] = message
        return found

    def _launches(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            launches = self._op.launches(read_problem(message))
        except EngineError as error:
            return {"error": str(error)}
        except Exception as error:
            where = in_line(self._op.definition.file, error)
            return {"error": f"launch fails{where}: {type(error).__name__}: {error}"}
        return {"launches": [launch_message(launch) for launch in launches]}


class Local:
    """Makes the calls in this process. See `Worker`."""

    def __init__(self, op: Op) -> None:
        self._op = op
        self.device = ""
        self.chip: Chip | None = None

    def start(self) -> Chip:
        """Return the current GPU."""
        runtime = device.cupy().cuda.runtime
        self.device = runtime.getDeviceProperties(runtime.getDevice())["name"].decode()
        self.chip = current_chip()
        return self.chip

    def call(self, call: Call) -> Answer:
        """Make a call."""
        return run_call(self._op, call)

    def close(self) -> None:
        """Do nothing."""


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and, where it leads a session, those that it started: a tool's target."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


def _read(link: Link, messages: queue.Queue[Any], pipe: Any) -> None:
    """Pass on the child's messages, and None at its end."""
    with pipe:
        message: Any = True
        while message is not None:
            try:
                message = link.receive()
            except (OSError, ValueError):
                message = None
            messages.put(message)


def _definition(op: Op) -> dict[str, Any]:
    """Return what the child needs of the definition."""
    definition = op.definition
    return {
        "name": op.name,
        "signature": op.signature.text,
        "path": str(op.source.path) if op.source.path else "",
        "text": op.source.current().text,
        "entry": definition.entry,
        "where": ", ".join(part.text for part in definition.where),
        "requires": definition.requires,
        "alignment": definition.alignment,
        "in_place": list(definition.in_place),
    }
