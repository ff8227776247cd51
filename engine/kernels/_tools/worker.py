"""The parent's side of `child.py`: starts it, sends calls, and survives its end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from engine import device
from engine.errors import DeviceError, EngineError
from engine.kernels._tools.child import Link, launch_message, read_problem
from engine.kernels._tools.device_run import Answer, Call, run_call
from engine.kernels._user.op import Op, current_chip
from engine.kernels._user.problem import Chip

__all__ = ["Local", "Worker", "WorkerFailure"]

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
        if answer.error and answer.error[0] == "crash":
            self.close()  # its CUDA context is lost
        return answer

    def close(self) -> None:
        """End the child."""
        process = self._process
        self._process = None
        if process is None:
            return
        with contextlib.suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self) -> None:
        """End the child at once: its kernel may never end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _spawn(self) -> None:
        paths = os.pathsep.join(filter(os.path.isabs, sys.path))
        self._process = process = subprocess.Popen(
            [*self._prefix, sys.executable, "-m", "engine.kernels._tools.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": paths},
            start_new_session=True,  # Ctrl-C interrupts the parent, which then ends it
        )
        self._link = link = Link(process.stdout, process.stdin)
        messages: queue.Queue[Any] = queue.Queue()
        self._messages = messages
        threading.Thread(target=_read, args=(link, messages), daemon=True).start()

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
            code = self._process.wait() if self._process else None
            self._process = None
            raise WorkerFailure(f"it ended with status {code}", is_timeout=False)
        found: tuple[dict[str, Any], dict[str, Any]] = message
        return found

    def _launches(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            launches = self._op.launches(read_problem(message))
        except EngineError as error:
            return {"error": str(error)}
        except Exception as error:
            return {"error": f"launch fails: {type(error).__name__}: {error}"}
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


def _read(link: Link, messages: queue.Queue[Any]) -> None:
    """Pass on the child's messages, and None at its end."""
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
