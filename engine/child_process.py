"""Frames between a process and its child: a length in 8 bytes, then as many bytes."""

from __future__ import annotations

import contextlib
import subprocess
from typing import Any

__all__ = ["end", "receive", "send"]


def send(pipe: Any, frame: bytes) -> None:
    """Write a frame to a binary file."""
    pipe.write(len(frame).to_bytes(8, "little"))
    pipe.write(frame)
    pipe.flush()


def receive(pipe: Any) -> bytes | None:
    """Return the next frame; None at the end of the file."""
    head = pipe.read(8)
    size = int.from_bytes(head, "little")
    frame: bytes = pipe.read(size) if len(head) == 8 else b""
    return frame if len(head) == 8 and len(frame) == size else None


def end(process: subprocess.Popen[bytes]) -> int:
    """End a child, if it still runs; return its exit code, before that if it had one."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        # After the end of its output it exits by itself; while it computes, it does not.
        code = process.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    process.stdout.close()
    return code
