"""What a case may take, how that is enforced, and the short form of an outcome."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass

from engine.errors import EngineError

__all__ = ["Limits", "cpu_seconds", "outcome_of", "peak_bytes"]

_VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|/[^ :]*|[\d.e+-]*\d")
_MAX_OUTCOME = 100
MAX_MESSAGE = 1200  # characters: an error repeats little of a file


@dataclass(frozen=True)
class Limits:
    """Limits of one case.

    Attributes
    ----------
    cpu_seconds : float
        CPU time of the worker and of its ended children, which the machine's load does not change.
    wall_seconds : float
        After these the case counts as hanging and its worker is killed.
    memory_bytes : int
        Address space that the worker may have beyond what it had before its first case. An
        allocation beyond it fails; that must be one of the engine's own errors too.
    """

    cpu_seconds: float = 5.0
    wall_seconds: float = 60.0
    memory_bytes: int = 3 << 30


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in usage)


def peak_bytes() -> int:
    """Return the largest resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def outcome_of(error: EngineError) -> str:
    """Return the kind of an error and its message without what varies: a crude coverage.

    Raises
    ------
    AssertionError
        If the message is empty or too long, or cannot be printed.
    """
    text = str(error)
    assert text.strip(), f"{type(error).__name__} without a message"
    assert len(text) < MAX_MESSAGE, f"{type(error).__name__} of {len(text)} characters"
    text.encode("utf-8", "backslashreplace")
    return f"{type(error).__name__}: {_VARYING.sub('#', text)}"[:_MAX_OUTCOME]
