"""The parts of a step's time, in microseconds."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["Terms"]


@dataclass(frozen=True)
class Terms:
    """Parts of a step's time, in us; they add up to the step's time.

    A launch that overlaps memory reads and arithmetic takes the root of the sum of their squares,
    and is attributed to the two in proportion to their squares.

    Attributes
    ----------
    weights : float
        Reading weights.
    products : float
        Arithmetic of GEMMs.
    pages : float
        Reading keys and values.
    attention : float
        Arithmetic of attention.
    elementwise : float
        Norms, activation functions, rope, quantization of activations, sums over experts.
    sampling : float
        Sampling from the logits.
    launches : float
        Overhead of the launches, beyond their bytes and arithmetic.
    routing : float
        Selection of experts, permutation of tokens.
    collectives : float
        All-reduces and all-gathers of tensor-parallel ranks.
    transfers : float
        Activations sent from one pipeline stage to the next.
    host : float
        Host work that the device waits for, and `step_us`.

    Examples
    --------
    >>> terms = Terms(weights=3.0, launches=1.0) + Terms(launches=0.5)
    >>> terms.total, terms.largest
    (4.5, 'weights')
    """

    weights: float = 0.0
    products: float = 0.0
    pages: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    sampling: float = 0.0
    launches: float = 0.0
    routing: float = 0.0
    collectives: float = 0.0
    transfers: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """Time of the step."""
        return sum(self.as_dict().values())

    @property
    def largest(self) -> str:
        """Name of the largest part."""
        parts = self.as_dict()
        return max(parts, key=lambda name: parts[name])

    def as_dict(self) -> dict[str, float]:
        """Return the parts by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __add__(self, other: Terms) -> Terms:
        mine = self.as_dict()
        others = other.as_dict()
        return Terms(**{name: mine[name] + others[name] for name in mine})

    def times(self, factor: float) -> Terms:
        """Return all parts multiplied by `factor`."""
        return Terms(**{name: factor * part for name, part in self.as_dict().items()})
