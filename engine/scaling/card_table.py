"""A model on every kind of card: where it fits, and how fast it is there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from engine.cache.memory_pool import format_bytes
from engine.cards import Card
from engine.errors import ConfigError
from engine.scaling.plan import PlanRow, ScalingPlan

__all__ = ["CardRow", "CardTable", "Planner", "card_table"]

_SMALLER = ("fp8", "int8", "int4")  # formats to try if the model does not fit, largest first


class Planner(Protocol):
    """Plans a model on a card, in its own format or a given one."""

    def __call__(self, card: Card, quantization: str | None = None) -> ScalingPlan:
        """Return the plan.

        Raises
        ------
        ConfigError
            If the card lacks the arithmetic of the format.
        """


@dataclass(frozen=True)
class CardRow:
    """One kind of card.

    Attributes
    ----------
    card : Card
    best : PlanRow or None
        The division with the lowest latency; None if there is none.
    reason : str
        Reason why the model does not fit; "" if it does.
    smaller : str or None
        The largest of some smaller formats in which it would fit.
    has_speed : bool
        Whether `card` is a real one, so that speeds apply.
    """

    card: Card
    best: PlanRow | None
    reason: str = ""
    smaller: str | None = None
    has_speed: bool = True

    @property
    def fits(self) -> bool:
        """Whether the model fits."""
        return self.best is not None

    def as_dict(self) -> dict[str, Any]:
        """Return the row as numbers, strings and dicts of these."""
        found: dict[str, Any] = {
            "name": self.card.name,
            "title": self.card.title,
            "memory": self.card.memory,
            "fits": self.fits,
        }
        if self.best is None:
            return found | {"reason": self.reason, "fits_with": self.smaller}
        row = self.best.as_dict()
        if not self.has_speed:
            names = ("division", "weights", "pages", "num_tokens", "longest", "num_running")
            row = {name: row[name] for name in names}
        return found | row | {"name": self.card.name, "layout": str(self.best.division)}

    def __str__(self) -> str:
        memory = f"{self.card.memory / 1e9:g} GB"
        head = f"{self.card.name:15} {self.card.title:26} {memory:>7}"
        row = self.best
        if row is None:
            hint = f"; fits with -q {self.smaller}" if self.smaller else ""
            return f"{head}  {self.reason}{hint}".lstrip()
        line = (
            f"{head} {format_bytes(row.weights):>10} {format_bytes(row.pages):>10} "
            f"{row.num_tokens:>11,} {row.longest:>8,} {row.num_running:>7} "
        )
        if self.has_speed:
            line += (
                f"{row.ms_per_token:>8.2f} {row.output_tokens_per_s:>9,.0f} "
                f"{row.prompt_tokens_per_s:>9,.0f}"
            )
        else:
            line += f"{'-':>8} {'-':>9} {'-':>9}"
        return f"{line}  {row.division}"


_HEAD = (
    f"{'fits':42} {'memory':>7} {'weights':>10} {'pages':>10} {'tokens':>11} {'longest':>8} "
    f"{'running':>7} {'ms/token':>8} {'tokens/s':>9} {'prompt/s':>9}"
)


@dataclass(frozen=True)
class CardTable:
    """A model on several kinds of cards.

    Attributes
    ----------
    plan : ScalingPlan
        The plan of one of them; model and workload are those of all.
    rows : tuple of CardRow
        Those that fit first, smallest memory first; then the others, largest first.
    """

    plan: ScalingPlan
    rows: tuple[CardRow, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the table as numbers, strings, and dicts and lists of these."""
        plan = self.plan.as_dict()
        shared = ("num_gpus", "weights", "page_itemsize", "workload", "prompt_len", "max_model_len")
        rows = [row.as_dict() for row in self.rows]
        return {name: plan[name] for name in shared} | {"cards": rows}

    def __str__(self) -> str:
        fitting = [str(row) for row in self.rows if row.fits]
        others = [str(row) for row in self.rows if not row.fits]
        lines = [_HEAD, *fitting] if fitting else []
        return "\n".join([*lines, *(["does not fit", *others] if others else [])])


def card_table(plan: Planner, cards: Iterable[Card], any_card: Card | None = None) -> CardTable:
    """Plan a model on several kinds of cards.

    Parameters
    ----------
    plan : Planner
    cards : iterable of Card
    any_card : Card, optional
        Stands for every card with its memory: of its row, only the memory is shown.

    Raises
    ------
    ConfigError
        If no card can run the model's format, or the workload does not suit the model.
    """
    plans: list[ScalingPlan] = []
    errors: list[ConfigError] = []

    def row(card: Card, *, has_speed: bool = True) -> CardRow:
        try:
            found = plan(card)
        except ConfigError as error:
            errors.append(error)
            return CardRow(card, None, str(error))
        plans.append(found)
        if found.fastest_token is not None:
            return CardRow(card, found.fastest_token, has_speed=has_speed)
        smaller = _fitting_format(plan, card) if found.model.quantization is None else None
        return CardRow(card, None, _reason(found), smaller)

    rows = [row(card) for card in cards]
    rows.sort(key=_order)
    if any_card is not None:
        rows.insert(0, row(any_card, has_speed=False))
    if not plans:
        raise errors[0]
    return CardTable(plans[0], tuple(sorted(rows, key=lambda one: not one.fits)))


def _order(row: CardRow) -> tuple[float, float]:
    if row.best is None:
        return -row.card.memory, 0.0
    return row.card.memory, row.best.ms_per_token


def _reason(plan: ScalingPlan) -> str:
    """Return what is missing in the division that comes closest, or why there is none."""
    short = [row for row in plan.rows if row.pages < 0]
    row = max(short, key=lambda one: one.pages) if short else plan.rows[0]
    return row.reason.removeprefix("does not fit: ")


def _fitting_format(plan: Planner, card: Card) -> str | None:
    """Return the first of the smaller formats in which the model fits; None if there is none."""
    for name in _SMALLER:
        try:
            if plan(card, name).possible:
                return name
        except ConfigError:  # the card lacks its arithmetic, or a matrix does not fit its groups
            continue
    return None
