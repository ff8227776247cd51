"""A process that owns a CUDA context and makes checked calls for its parent.

    python -m engine.kernels._tools.child

The parent (`worker.py`) sends an op's signature and source, then calls: the content of the
arguments, and where they lie. The child compiles and launches; it asks the parent for the launches
of a problem, since these come from a Python function that may exist in a notebook only. So an
illegal access, a hang or a crash ends this process and no other.

A message is a frame: the length of a JSON header, the header, the bytes of its arrays. Standard
output carries the messages; what kernels print goes to standard error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from engine import device
from engine.errors import ConfigError
from engine.kernels._tools.device_run import Answer, Call, Placed, run_call
from engine.kernels._user.define import define
from engine.kernels._user.op import Op, current_chip
from engine.kernels._user.problem import Chip, Launch, Problem, Scratch, TensorMapOf
from engine.kernels._user.signature import DTYPES
from engine.text.child_process import receive, send

__all__ = ["Link", "launch_message", "main", "problem_message", "read_launch", "read_problem"]

_HEAD_BYTES = 8


class Link:
    """Messages between parent and child, over two binary files."""

    def __init__(self, reader: Any, writer: Any) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, header: dict[str, Any], arrays: dict[str, Any] | None = None) -> None:
        """Send a header that JSON can write, and NumPy arrays."""
        named = {name: np.asarray(array, order="C") for name, array in (arrays or {}).items()}
        about = {name: [_name(a.dtype), a.shape] for name, a in named.items()}
        text = json.dumps(header | {"arrays": about}).encode()
        blobs = [array.tobytes() for array in named.values()]
        send(self._writer, len(text).to_bytes(_HEAD_BYTES, "little") + text + b"".join(blobs))

    def receive(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return the next message, (header, arrays); None at the end."""
        frame = receive(self._reader)
        if frame is None:
            return None
        size = int.from_bytes(frame[:_HEAD_BYTES], "little")
        header = json.loads(frame[_HEAD_BYTES : _HEAD_BYTES + size])
        arrays = {}
        at = _HEAD_BYTES + size
        for name, (dtype, shape) in header.pop("arrays").items():
            count = int(np.prod(shape, dtype=np.int64))
            array = np.frombuffer(frame, DTYPES[dtype], count, at) if count else np.empty(0)
            arrays[name] = array.astype(DTYPES[dtype], copy=False).reshape(shape)
            at += array.nbytes
        return header, arrays


def _name(dtype: Any) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)


def problem_message(problem: Problem) -> dict[str, Any]:
    """Return a problem as JSON can write it."""
    return {
        field.name: getattr(problem, field.name)
        for field in dataclasses.fields(problem)
        if field.name != "chip"
    } | {"chip": dataclasses.asdict(problem.chip)}


def read_problem(message: dict[str, Any]) -> Problem:
    """Return the problem of a message."""
    pairs = {key: tuple(map(tuple, message[key])) for key in ("sizes", "scalars", "dtypes")}
    return Problem(**(message | pairs | {"chip": Chip(**message["chip"])}))


_ARGUMENTS: dict[str, Any] = {"scratch": Scratch, "tensor map": TensorMapOf}


def launch_message(launch: Launch) -> dict[str, Any]:
    """Return a launch as JSON can write it."""
    return {
        field.name: getattr(launch, field.name)
        for field in dataclasses.fields(launch)
        if field.name != "args"
    } | {"args": [(name, _argument_message(value)) for name, value in launch.args]}


def _argument_message(value: Any) -> Any:
    for kind, cls in _ARGUMENTS.items():
        if isinstance(value, cls):
            return {"kind": kind} | dataclasses.asdict(value)
    return value.item() if isinstance(value, np.generic) else value


def read_launch(message: dict[str, Any]) -> Launch:
    """Return the launch of a message."""
    args = tuple((name, _read_argument(value)) for name, value in message["args"])
    tuples = {key: tuple(message[key]) for key in ("grid", "block")}
    defines = tuple((name, value) for name, value in message["defines"])
    return Launch(**(message | tuples | {"args": args, "defines": defines}))


def _read_argument(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    fields: dict[str, Any] = {
        key: tuple(v) if isinstance(v, list) else v for key, v in value.items()
    }
    return _ARGUMENTS[fields.pop("kind")](**fields)


def main() -> None:
    """Answer the parent's messages until it closes the pipe."""
    writer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # printf of a kernel must not mix with the messages
    link = Link(sys.stdin.buffer, writer)
    op: Op | None = None
    while (message := link.receive()) is not None:
        header, arrays = message
        if header["do"] == "start":
            _start(link, exact=header["exact"])
        elif header["do"] == "define":
            op = _defined(link, header["op"])
            link.send({"do": "defined"})
        else:
            assert op is not None
            _answer(link, _called(op, header["call"], arrays))


def _start(link: Link, *, exact: bool) -> None:
    """Say which GPU this is. `exact`: no pool, so that a tool sees the end of each array."""
    cp = device.cupy()
    if exact:
        cp.cuda.set_allocator(None)
    name = cp.cuda.runtime.getDeviceProperties(cp.cuda.runtime.getDevice())["name"].decode()
    link.send({"do": "started", "name": name, "chip": dataclasses.asdict(current_chip())})


def _defined(link: Link, about: dict[str, Any]) -> Op:
    """Return the parent's op; its launches are asked of the parent."""

    def launch(problem: Problem) -> list[Launch]:
        link.send({"do": "launch", "problem": problem_message(problem)})
        answer = link.receive()
        if answer is None:
            sys.exit(1)  # the parent has ended
        header, _ = answer
        if "error" in header:
            raise ConfigError(header["error"])
        return [read_launch(each) for each in header["launches"]]

    source = Path(about.pop("path")) if about.get("path") else about["text"]
    about = {key: value for key, value in about.items() if key not in ("path", "text")}
    return define(**about, reference=lambda *_: None, source=source, launch=launch)


def _called(op: Op, about: dict[str, Any], arrays: dict[str, Any]) -> Answer:
    placed = [
        Placed(**(each | {key: tuple(each[key]) for key in ("shape", "strides")}))
        for each in about.pop("arrays")
    ]
    return run_call(op, Call(placed, arrays, **about))


def _answer(link: Link, answer: Answer) -> None:
    header = {"do": "answer", "findings": answer.findings, "error": answer.error}
    link.send(header, answer.results)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the parent was killed
        main()
