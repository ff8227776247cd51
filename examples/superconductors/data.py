"""SuperCon's compositions and critical temperatures, folds, and a generated set in their place.

The table is not part of the project, because its repository states no licence. `load` reads a file,
or fetches it and checks its SHA-256. Rows are known by their number in that file.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .elements import NUMBER, PROPERTIES, SYMBOLS

__all__ = [
    "FAMILIES",
    "MAX_ELEMENTS",
    "SHA256",
    "VARIABLE",
    "Compositions",
    "Table",
    "element_features",
    "family",
    "fetch",
    "folds",
    "format_formula",
    "generated",
    "load",
    "parse_formula",
]

Array = np.ndarray[Any, Any]

VARIABLE = "SUPERCON_CSV"
SHA256 = "b34a955cc59f7a1556bc92c4b9db559bfd634c03227b7e95337a2e5d69227dd6"
URL = (
    "https://raw.githubusercontent.com/vstanev1/Supercon/"
    "de55874c0c5c22d69d46ba2c7a3352193e48390c/Supercon_data.csv"
)
FOLDS = Path(__file__).with_name("folds.json")
MAX_ELEMENTS = 8
FAMILIES = (
    "cuprate",
    "iron-based",
    "other oxide",
    "chalcogenide",
    "pnictide",
    "boride, carbide, nitride",
    "metal",
)
# Place of each element by rising electronegativity; number 0 comes last.
_RANK = np.lexsort((np.arange(len(SYMBOLS)), PROPERTIES[:, 0])).argsort()
_RANK[0] = len(SYMBOLS)
_PART = re.compile(r"([A-Z][a-z]?)([0-9]+\.?[0-9]*|\.[0-9]+)?")


@dataclass(frozen=True)
class Compositions:
    """Compositions as tokens, padded: elements in the order of rising electronegativity.

    Attributes
    ----------
    elements : (N, 8) array of int32
        Atomic numbers; 0 after the last element.
    amounts : (N, 8) array of float32
        Atoms per formula as written; 0 after the last element.
    """

    elements: Array
    amounts: Array

    def __len__(self) -> int:
        return len(self.elements)

    def __getitem__(self, rows: Any) -> Compositions:
        return Compositions(self.elements[rows], self.amounts[rows])

    @property
    def counts(self) -> Array:
        """Number of elements of each composition, (N,)."""
        return (self.elements > 0).sum(1)

    @property
    def fractions(self) -> Array:
        """Share of each element among the atoms, (N, 8)."""
        return self.amounts / self.amounts.sum(1, keepdims=True)

    def by_element(self) -> Array:
        """Return the fractions by atomic number, (N, 97) float32."""
        table = np.zeros((len(self), len(SYMBOLS)), np.float32)
        table[np.arange(len(self))[:, None], self.elements] = self.fractions
        table[:, 0] = 0
        return table

    @classmethod
    def from_formulas(cls, formulas: Iterable[str]) -> Compositions:
        """Parse formulas. See `parse_formula`."""
        return cls.from_parts([parse_formula(formula) for formula in formulas])

    @classmethod
    def from_parts(cls, parts: Sequence[dict[int, float]]) -> Compositions:
        """Build from one mapping of atomic numbers to amounts per composition."""
        elements = np.zeros((len(parts), MAX_ELEMENTS), np.int32)
        amounts = np.zeros((len(parts), MAX_ELEMENTS), np.float32)
        for row, part in enumerate(parts):
            if not 0 < len(part) <= MAX_ELEMENTS:
                raise ValueError(
                    f"row {row}: a composition needs 1 to {MAX_ELEMENTS} elements; got {len(part)}"
                )
            elements[row, : len(part)] = list(part)
            amounts[row, : len(part)] = list(part.values())
        return cls.from_arrays(elements, amounts)

    @classmethod
    def from_arrays(cls, elements: Array, amounts: Array) -> Compositions:
        """Build from (N, 8) arrays whose elements have any order; 0 marks an empty place."""
        order = np.argsort(_RANK[elements], axis=1, kind="stable")
        pairs = (np.take_along_axis(x, order, axis=1) for x in (elements, amounts))
        return cls(*pairs)


@dataclass(frozen=True)
class Table:
    """Compositions with their critical temperatures.

    Attributes
    ----------
    names : list of str
        Formulas as written.
    compositions : Compositions
    tc : (N,) array of float32
        Critical temperature in K; 0 means that none was reported.
    source : str
        Where the rows come from.
    """

    names: list[str]
    compositions: Compositions
    tc: Array
    source: str

    def __len__(self) -> int:
        return len(self.names)

    @property
    def is_reported(self) -> Array:
        """Whether a critical temperature was reported, (N,)."""
        return self.tc > 0


def parse_formula(formula: str) -> dict[int, float]:
    """Return the atoms per formula by atomic number.

    SuperCon writes every amount, also 1. An amount that is missing, or a letter in its place
    (``OY`` at the end), is an oxygen content that was not determined: as many atoms as all others
    together, about what a cuprate has. Signs and other marks between parts and elements with the
    amount 0 are skipped. D and T are hydrogen; an element that occurs twice is summed.

    Raises
    ------
    ValueError
        If an element is unknown, none has an amount above 0, or a bracket would multiply some.

    Examples
    --------
    >>> parse_formula("Y1Ba2Cu3O6.9")
    {39: 1.0, 56: 2.0, 29: 3.0, 8: 6.9}
    """
    text = re.sub(r"O[XYZ]$", "O", formula).replace("TI", "Ti")
    if any(bracket in text for bracket in "([{"):
        raise ValueError(f"formula {formula!r}: brackets must be multiplied out")
    parts: dict[int, float] = {}
    is_open = False
    for symbol, amount in _PART.findall(text):
        if symbol not in NUMBER:
            raise ValueError(f"formula {formula!r}: {symbol!r} is not an element from H to Cm")
        is_open |= symbol == "O" and not amount
        count = float(amount) if amount else 0.0 if symbol == "O" else 1.0
        parts[NUMBER[symbol]] = parts.get(NUMBER[symbol], 0.0) + count
    if is_open and parts[8] == 0:
        parts[8] = sum(parts.values()) or 1.0
    parts = {number: amount for number, amount in parts.items() if amount > 0}
    if not parts:
        raise ValueError(f"formula {formula!r}: no element with an amount above 0")
    return parts


def format_formula(elements: Array, amounts: Array) -> str:
    """Return the formula of one composition, amounts to three digits.

    The amount 1 is left out, but for oxygen, where that would mean an amount not determined.
    """
    pairs = zip(elements, amounts, strict=True)
    return "".join(SYMBOLS[e] + _format_amount(e, float(a)) for e, a in pairs if e)


def _format_amount(element: int, amount: float) -> str:
    if round(amount, 3) == 1 and element != NUMBER["O"]:
        return ""
    return np.format_float_positional(amount, 3, fractional=False, trim="-")


def family(elements: Iterable[int]) -> int:
    """Return the index in `FAMILIES` of a composition with these elements: the first that fits."""
    symbols = {SYMBOLS[number] for number in elements if number}
    rules = (
        {"Cu", "O"} <= symbols,
        "Fe" in symbols and bool(symbols & {"As", "P", "S", "Se", "Te"}),
        "O" in symbols,
        bool(symbols & {"S", "Se", "Te"}),
        bool(symbols & {"P", "As", "Sb", "Bi"}),
        bool(symbols & {"B", "C", "N"}),
        True,
    )
    return rules.index(True)


def fetch(path: Path) -> Path:
    """Download the table to `path`, unless the file exists; return `path`.

    Raises
    ------
    ValueError
        If the SHA-256 of what arrived is not the known one; nothing is written then.
    """
    if not path.exists():
        with urllib.request.urlopen(URL, timeout=60) as answer:  # an https address
            content = answer.read(8 << 20)
        found = hashlib.sha256(content).hexdigest()
        if found != SHA256:
            raise ValueError(f"{URL}: SHA-256 must be {SHA256}; got {found}")
        path.write_bytes(content)
    return path


def load(path: str | Path | None = None, *, num_generated: int = 1000) -> Table:
    """Read SuperCon's table, or generate one if there is none.

    Parameters
    ----------
    path : path, optional
        The CSV file, with columns ``name`` and ``Tc``; by default the environment variable
        `SUPERCON_CSV`. `fetch` gets it. Without either, the result is `generated(num_generated)`.

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    ValueError
        If its SHA-256 is not the known one: the folds are row numbers of that very file.
    """
    path = path or os.environ.get(VARIABLE)
    if not path:
        return generated(num_generated)
    content = Path(path).read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        raise ValueError(f"{path}: SHA-256 must be {SHA256}; got {found}")
    rows = list(csv.DictReader(content.decode("utf-8").splitlines()))
    names = [row["name"] for row in rows]
    tc = np.array([float(row["Tc"]) for row in rows], np.float32)
    return Table(names, Compositions.from_formulas(names), tc, "SuperCon")


def folds(table: Table, split: str = "random") -> Array:
    """Return the fold of each row, (N,), for one of three splits.

    ``"random"``: five folds. ``"system"``: five folds; rows with the same elements share one, so no
    neighbour by doping is known. ``"family"``: a fold for each of `FAMILIES`. For SuperCon they are
    read from ``folds.json``, so that results can be compared row by row.
    """
    if table.source == "SuperCon":
        digits = json.loads(FOLDS.read_text())["splits"][split]["fold_of_row"]
        return np.array(list(digits), np.int8)
    return make_folds(table.compositions, split)


def make_folds(compositions: Compositions, split: str, seed: int = 0) -> Array:
    """Compute the folds of a split from compositions and a seed. See `folds`."""
    rng = np.random.default_rng(seed)
    if split == "family":
        return np.array([family(row) for row in compositions.elements], np.int8)
    if split == "random":
        groups = np.arange(len(compositions))
    elif split == "system":
        sets = np.sort(compositions.elements, axis=1)
        groups = np.unique(sets, axis=0, return_inverse=True)[1].ravel()
    else:
        raise ValueError(f"split must be 'random', 'system' or 'family'; got {split!r}")
    order = rng.permutation(groups.max() + 1)
    sizes = np.bincount(groups)[order]
    # Cut the shuffled groups into five parts with as equal numbers of rows as they allow.
    fold_of_group = np.empty(len(order), np.int8)
    fold_of_group[order] = (np.cumsum(sizes) - 1) * 5 // len(compositions)
    return fold_of_group[groups]


def write_folds(table: Table, path: Path = FOLDS, seed: int = 0) -> None:
    """Write the folds of SuperCon's rows: row numbers and seeds only, none of the table's data."""
    splits = {}
    for split in ("random", "system", "family"):
        fold_of_row = make_folds(table.compositions, split, seed)
        digits = "".join(map(str, fold_of_row))
        splits[split] = {"seed": seed, "fold_of_row": digits}
    record = {"sha256": SHA256, "rows": len(table), "families": FAMILIES, "splits": splits}
    path.write_text(json.dumps(record, indent=1) + "\n")


def element_features(compositions: Compositions) -> Array:
    """Return features for models of tables, (N, 97 + 4 x 11 + 3) float32.

    Fractions of the elements; weighted mean, weighted mean deviation, maximum and minimum of each
    property; number of elements, atoms in the formula, entropy of the fractions.
    """
    fractions = compositions.fractions
    by_element = compositions.by_element()
    values = PROPERTIES[compositions.elements]  # (N, 8, 11)
    is_there = (compositions.elements > 0)[..., None]
    mean = (fractions[..., None] * values).sum(1)
    spread = (fractions[..., None] * np.abs(values - mean[:, None])).sum(1)
    high = np.where(is_there, values, -np.inf).max(1)
    low = np.where(is_there, values, np.inf).min(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.nansum(fractions * np.log(fractions), axis=1)
    counts = np.stack([compositions.counts, compositions.amounts.sum(1), entropy], axis=1)
    return np.concatenate([by_element, mean, spread, high, low, counts], axis=1).astype(np.float32)


def generated(count: int = 1000, seed: int = 0) -> Table:
    """Generate compositions with a public formula for the critical temperature.

    Five rows each are dopings of one compound of two to six elements, as in SuperCon. With the
    weighted mean m and mean deviation s of the electronegativity (`PROPERTIES`), the fractions of
    copper and oxygen, and a number g of each compound from a normal distribution, which stands for
    what a formula does not tell: Tc = max(0.1, 25 + 20 m - 10 s + 600 f(Cu) f(O) + 8 g), in K. It
    stands for nothing in nature. A tenth of the rows has Tc 0, as if none had been reported.
    """
    rng = np.random.default_rng(seed)
    pool = np.array([57, 38, 56, 39, 20, 29, 26, 41, 13, 22, 8, 33, 5, 34])  # La, Sr, Ba, Y, ...
    parts, hidden = [], []
    while len(parts) < count:
        chosen = rng.choice(pool, rng.integers(2, 7), replace=False)
        base = rng.choice([0.5, 1.0, 2.0, 3.0, 4.0], len(chosen))
        number = rng.standard_normal()
        for _ in range(5):
            amounts = (base * (1 + 0.3 * rng.random(len(base)))).round(2)
            parts.append({int(e): float(a) for e, a in zip(chosen, amounts, strict=True)})
            hidden.append(number)
    compositions = Compositions.from_parts(parts[:count])
    tc = _generated_tc(compositions, np.array(hidden[:count]))
    tc[rng.random(count) < 0.1] = 0
    pairs = zip(compositions.elements, compositions.amounts, strict=True)
    return Table([format_formula(*pair) for pair in pairs], compositions, tc, "generated")


def _generated_tc(compositions: Compositions, hidden: Array) -> Array:
    """Return the formula of `generated`, (N,) float32."""
    fractions = compositions.fractions
    values = PROPERTIES[compositions.elements, 0]
    mean = (fractions * values).sum(1)
    spread = (fractions * np.abs(values - mean[:, None])).sum(1)
    copper, oxygen = (compositions.by_element()[:, NUMBER[symbol]] for symbol in ("Cu", "O"))
    tc = 25 + 20 * mean - 10 * spread + 600 * copper * oxygen + 8 * hidden
    return np.maximum(tc, 0.1).astype(np.float32)
