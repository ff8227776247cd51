"""Isolated child processes, and frames for their pipes: a length in 8 bytes, then as many bytes."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

__all__ = ["ask", "end", "receive", "send", "start"]

_HEAD_BYTES = 8  # the length of a frame


def start(
    code: str,
    env: Mapping[str, str],
    *,
    descriptors: Collection[int] = (),
    stderr: int | None = subprocess.DEVNULL,  # panics print there
) -> subprocess.Popen[bytes]:
    """Start Python with `code`, whose first argument is the import path as JSON.

    Isolated, so that no module is imported from the current folder, which may be a model's. It
    inherits `descriptors`; with None for `stderr` it has the parent's.
    """
    paths = [str(Path(__file__).parents[1]), *filter(os.path.isabs, sys.path)]
    return subprocess.Popen(
        [sys.executable, "-I", "-c", code, json.dumps(paths)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=env,
        pass_fds=descriptors,
        start_new_session=True,  # an interrupt of the terminal is for the parent
    )


def send(pipe: Any, frame: bytes) -> None:
    """Write a frame to a binary file."""
    pipe.write(len(frame).to_bytes(_HEAD_BYTES, "little"))
    pipe.write(frame)
    pipe.flush()


def receive(pipe: Any) -> bytes | None:
    """Return the next frame; None at the end of the file."""
    head = pipe.read(_HEAD_BYTES)
    size = int.from_bytes(head, "little")
    frame: bytes = pipe.read(size) if len(head) == _HEAD_BYTES else b""
    return frame if len(head) == _HEAD_BYTES and len(frame) == size else None


def ask(process: subprocess.Popen[bytes], frame: bytes, seconds: float) -> bytes | None:
    """Send a frame to a child of `start`, and return its answer; None if the child has ended.

    Raises
    ------
    TimeoutError
        If the child has not read the frame and answered within `seconds`. The pipes then hold
        part of a frame: end the child.
    """
    assert process.stdin is not None and process.stdout is not None
    deadline = time.monotonic() + seconds
    source = process.stdout.fileno()
    sink = process.stdin.fileno()
    for descriptor in (source, sink):
        os.set_blocking(descriptor, False)
    unsent = memoryview(len(frame).to_bytes(_HEAD_BYTES, "little") + frame)
    try:
        while unsent:
            _wait(sink, selectors.EVENT_WRITE, deadline)
            unsent = unsent[os.write(sink, unsent) :]
    except BrokenPipeError:
        return None
    head = _read(source, _HEAD_BYTES, deadline)
    return None if head is None else _read(source, int.from_bytes(head, "little"), deadline)


def _read(source: int, size: int, deadline: float) -> bytes | None:
    """Return so many bytes; None at the end of the file."""
    data = bytearray()
    while len(data) < size:
        _wait(source, selectors.EVENT_READ, deadline)
        part = os.read(source, min(size - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


def _wait(descriptor: int, events: int, deadline: float) -> None:
    """Wait until a descriptor can be read or written.

    Raises
    ------
    TimeoutError
    """
    with selectors.DefaultSelector() as selector:  # `select` takes no descriptor above 1023
        selector.register(descriptor, events)
        seconds = deadline - time.monotonic()
        if seconds <= 0 or not selector.select(seconds):
            raise TimeoutError


def end(process: subprocess.Popen[bytes]) -> int:
    """End a child, if it still runs; return its exit code, before that if it had one."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        # An idle child exits at the end of its input; one that computes has to be killed.
        code = process.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    process.stdout.close()
    return code
