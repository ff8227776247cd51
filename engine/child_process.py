"""Isolated child processes, and frames for their pipes: a length in 8 bytes, then as many bytes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["end", "receive", "send", "start"]


def start(code: str, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start Python with `code`, whose first argument is the import path as JSON.

    Isolated, so that no module is imported from the current folder, which may be a model's.
    """
    paths = [str(Path(__file__).parents[1]), *filter(os.path.isabs, sys.path)]
    return subprocess.Popen(
        [sys.executable, "-I", "-c", code, json.dumps(paths)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # panics print there
        env=env,
        start_new_session=True,  # an interrupt of the terminal is for the parent
    )


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
        # An idle child exits at the end of its input; one that computes has to be killed.
        code = process.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    process.stdout.close()
    return code
