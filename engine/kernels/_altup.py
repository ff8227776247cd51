"""Shared code of `altup_predict` and `altup_correct`."""

from __future__ import annotations

from typing import Any

from engine.kernels._contract import FLOATS, Contract

__all__ = ["THREADS", "checked_streams"]

THREADS = 256  # kThreads in CUDA
_MAX_STREAMS = 4  # kMaxStreams in CUDA


def checked_streams(call: Contract, streams: Any) -> Any:
    """Return the checked streams (T, S, N), which are written."""
    streams = call.written("streams", streams, "T S N", FLOATS)
    count = call["S"]
    call.check("streams", 1 <= count <= _MAX_STREAMS, f"of 1 to {_MAX_STREAMS} streams", count)
    return streams
