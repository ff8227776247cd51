"""The parts of a step's time, in microseconds."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["Terms"]


@dataclass(frozen=True)
class Terms:
    """What a step's time is made of, in us; the parts add up to the step.

    Where a launch reads and multiplies at the same time, its time is shared between both in
    proportion to their squares, as it is the root of the sum of these.

    Attributes
    ----------
    weights : float
        Reading weights.
    products : float
        Operations of products.
    pages : float
        Reading keys and values.
    attention : float
        Operations of attention.
    elementwise : float
        Norms, activations, rotation, quantization of activations, sums of experts.
    sampling : float
    launches : float
        What each launch takes beside its bytes and operations.
    routing : float
        Choosing experts, placing tokens.
    collectives : float
        Sums and gathers between the GPUs that share a layer.
    transfers : float
        Activations from one stage of a pipeline to the next.
    host : float
        Of the host's work, what the device waits for.

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
        """The time of the step."""
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
        """Return all parts `factor` times as long."""
        return Terms(**{name: factor * part for name, part in self.as_dict().items()})
