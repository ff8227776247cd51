"""`Figure`: one measured number, and the limit that it must not pass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """A measured number.

    Parameters
    ----------
    name : str
        What was measured; unique within a kind.
    value : float
    unit : str
    limit : float, optional
        The largest allowed value; None for a number that is only reported.
    """

    name: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def is_passed(self) -> bool:
        """Whether the value is beyond the limit."""
        return self.limit is not None and not self.value <= self.limit
