"""Stop strings in text that arrives in pieces: `StopChecker`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["StopChecker", "StopResult"]


class StopResult(NamedTuple):
    """Outcome for one piece of text.

    Attributes
    ----------
    text : str
        Text that may be emitted now.
    stop : str or None
        Stop string that was found; text after it is discarded.
    """

    text: str
    stop: str | None


class StopChecker:
    """Finds stop strings, holding back text that may become one.

    The result does not depend on how the text is split: the stop string completed first wins; if
    several end at the same character, the longest one does.

    Parameters
    ----------
    stop : sequence of str
        Non-empty strings.
    include_stop_str_in_output : bool
        Whether the emitted text includes the stop string.

    Examples
    --------
    >>> checker = StopChecker(["\\n\\n", "END"])
    >>> checker.push("one\\n"), checker.push("two E")
    (StopResult(text='one', stop=None), StopResult(text='\\ntwo ', stop=None))
    >>> checker.push("ND three")
    StopResult(text='', stop='END')
    """

    def __init__(self, stop: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        self._stops = tuple(stop)
        self._include = include_stop_str_in_output
        self._firsts = frozenset(text[0] for text in self._stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._met: str | None = None

    @property
    def stop(self) -> str | None:
        """Stop string that was found, or None."""
        return self._met

    def push(self, text: str, check: bool = True) -> StopResult:
        """Add `text`; return the text to emit and the stop string it completed, if any.

        Parameters
        ----------
        text : str
            New text, of any length.
        check : bool
            False emits `text` and everything held back, unchecked (for the first `min_tokens`).
        """
        if self._met is not None:
            return StopResult("", self._met)
        seen = self._held + text
        if not check or not self._stops:
            self._held = ""
            return StopResult(seen, None)
        met = self._first_match(seen)
        if met is not None:
            end, self._met = met
            self._held = ""
            return StopResult(seen[: end if self._include else end - len(self._met)], self._met)
        kept = len(seen) - self._num_held(seen)
        self._held = seen[kept:]
        return StopResult(seen[:kept], None)

    def flush(self) -> str:
        """Return the text held back, once the text has ended without a stop string."""
        held = self._held
        self._held = ""
        return held

    def _first_match(self, seen: str) -> tuple[int, str] | None:
        """Return (end, stop string) of the match that ends first; the longest if several do."""
        found = [(seen.find(stop) + len(stop), stop) for stop in self._stops if stop in seen]
        return min(found, key=lambda match: (match[0], -len(match[1])), default=None)

    def _num_held(self, seen: str) -> int:
        """Return the length of the longest suffix of `seen` that is a prefix of a stop string."""
        for start in range(max(0, len(seen) - self._longest + 1), len(seen)):
            if seen[start] in self._firsts:
                tail = seen[start:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return len(tail)
        return 0
