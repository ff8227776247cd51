"""Crystals as sequences: public prototypes, their cell repeated, a pattern of attention, a target.

A crystal is a list of sites. They are ordered column by column: the cells of a column are stacked
along the third axis, and the sites of a cell are sorted by their height. So the place of a token
in its column is its rank by height, and a `Periodic` pattern whose period is a column is a slab
around the site, in every column, with the crystal's own periodic boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from engine.kernels import Periodic

from .elements import ELECTRONEGATIVITY, NUMBER, RADIUS
from .network import Adam, Batch, Config, Group, Network
from .training import Step

NUM_FEATURES = 32
_LENGTHS = slice(-4, -1)  # features that are lengths of the cell: they scale

__all__ = [
    "PROTOTYPES",
    "Crystal",
    "Prototype",
    "Trained",
    "batch_of",
    "energy",
    "generate",
    "train",
]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Prototype:
    """A structure type: the cell, and the sites with the elements that may stand there.

    Attributes
    ----------
    name : str
    lattice : (3, 3) nested tuple of float
        Rows are the axes of the cell in angstrom; the third is the stacking axis.
    kinds : tuple of str
        Elements that a kind of site may hold, separated by spaces; the first is the prototype's.
    sites : tuple of (kind, x, y, z)
        Index of the kind, and fractional coordinates in the cell.
    """

    name: str
    lattice: tuple[tuple[float, float, float], ...]
    kinds: tuple[str, ...]
    sites: tuple[tuple[int, float, float, float], ...]

    @cached_property
    def site_kinds(self) -> Array:
        """Kind of each site, (s,), by rising height."""
        return self._sorted[:, 0].astype(int)

    @cached_property
    def positions(self) -> Array:
        """Fractional coordinates, (s, 3), by rising height."""
        return self._sorted[:, 1:] % 1.0

    @cached_property
    def _sorted(self) -> Array:
        rows = np.array(self.sites)
        x, y, z = (rows[:, 1:] % 1.0).round(6).T
        return rows[np.lexsort((y, x, z))]

    def choices(self, kind: int) -> Array:
        """Return the atomic numbers of the elements for a kind of site."""
        return np.array([NUMBER[symbol] for symbol in self.kinds[kind].split()])


def _orthogonal(a: float, b: float, c: float) -> tuple[tuple[float, float, float], ...]:
    return ((a, 0.0, 0.0), (0.0, b, 0.0), (0.0, 0.0, c))


def _face_centred(*sites: tuple[int, float, float, float]) -> tuple[Any, ...]:
    shifts = ((0, 0, 0), (0, 0.5, 0.5), (0.5, 0, 0.5), (0.5, 0.5, 0))
    return tuple((k, x + p, y + q, z + r) for k, x, y, z in sites for p, q, r in shifts)


def _spinel_anions(x: float) -> tuple[tuple[int, float, float, float], ...]:
    """Return position 32e of space group 227, origin 2, less its face centring."""
    half = [(x, x, x), (0.75 - x, 0.25 - x, x + 0.5), (0.25 - x, x + 0.5, 0.75 - x)]
    half += [(x + 0.5, 0.75 - x, 0.25 - x)]
    return tuple((2, s * u, s * v, s * w) for u, v, w in half for s in (1, -1))


_ALKALINE = "Ba Sr Ca La Pb"
_RARE_EARTH = "Y La Nd Sm Gd Dy Er Yb"
PROTOTYPES = (
    Prototype(
        "perovskite",
        _orthogonal(3.905, 3.905, 3.905),
        ("Sr Ba Ca La Pb", "Ti Zr Nb Mn Fe Ru", "O F"),
        ((0, 0, 0, 0), (1, 0.5, 0.5, 0.5), (2, 0.5, 0.5, 0), (2, 0.5, 0, 0.5), (2, 0, 0.5, 0.5)),
    ),
    Prototype(
        "cuprate 123",
        _orthogonal(3.82, 3.886, 11.68),
        (_RARE_EARTH, _ALKALINE, "Cu Ni Zn Co", "O F"),
        (
            *((0, 0.5, 0.5, 0.5), (1, 0.5, 0.5, 0.184), (1, 0.5, 0.5, 0.816), (2, 0, 0, 0)),
            *((2, 0, 0, 0.355), (2, 0, 0, 0.645), (3, 0, 0.5, 0), (3, 0.5, 0, 0.378)),
            *((3, 0.5, 0, 0.622), (3, 0, 0.5, 0.377), (3, 0, 0.5, 0.623), (3, 0, 0, 0.159)),
            (3, 0, 0, 0.841),
        ),
    ),
    Prototype(
        "cuprate 214",
        _orthogonal(3.787, 3.787, 13.23),
        ("La Nd Sr Ba Ca", "Cu Ni Zn Co", "O F"),
        tuple(
            (k, x + d, y + d, z + d)
            for k, x, y, z in (
                *((0, 0, 0, 0.361), (0, 0, 0, -0.361), (1, 0, 0, 0), (2, 0, 0.5, 0)),
                *((2, 0.5, 0, 0), (2, 0, 0, 0.182), (2, 0, 0, -0.182)),
            )
            for d in (0, 0.5)
        ),
    ),
    Prototype(
        "iron pnictide 122",
        _orthogonal(3.963, 3.963, 13.017),
        ("Ba Sr Ca K Eu", "Fe Co Ni Ru Mn", "As P Sb Ge"),
        (
            *((0, 0, 0, 0), (0, 0.5, 0.5, 0.5), (1, 0, 0.5, 0.25), (1, 0.5, 0, 0.25)),
            *((1, 0.5, 0, 0.75), (1, 0, 0.5, 0.75), (2, 0, 0, 0.354), (2, 0, 0, 0.646)),
            *((2, 0.5, 0.5, 0.854), (2, 0.5, 0.5, 0.146)),
        ),
    ),
    Prototype(
        "iron pnictide 1111",
        _orthogonal(4.035, 4.035, 8.739),
        ("La Ce Pr Nd Sm Gd", "Fe Co Ni Mn", "As P", "O F H"),
        (
            *((1, 0.75, 0.25, 0.5), (1, 0.25, 0.75, 0.5), (3, 0.75, 0.25, 0), (3, 0.25, 0.75, 0)),
            *((0, 0.25, 0.25, 0.142), (0, 0.75, 0.75, 0.858), (2, 0.25, 0.25, 0.651)),
            (2, 0.75, 0.75, 0.349),
        ),
    ),
    Prototype(
        "A15",
        _orthogonal(5.29, 5.29, 5.29),
        ("Nb V Ti Mo Ta", "Sn Ge Al Ga Si Pt"),
        (
            *((1, 0, 0, 0), (1, 0.5, 0.5, 0.5), (0, 0.25, 0, 0.5), (0, 0.75, 0, 0.5)),
            *((0, 0.5, 0.25, 0), (0, 0.5, 0.75, 0), (0, 0, 0.5, 0.25), (0, 0, 0.5, 0.75)),
        ),
    ),
    Prototype(
        "rocksalt",
        _orthogonal(4.39, 4.39, 4.39),
        ("Nb Ti Zr V Mo Ta", "N C O"),
        _face_centred((0, 0, 0, 0), (1, 0.5, 0.5, 0.5)),
    ),
    Prototype(
        "spinel",
        _orthogonal(8.41, 8.41, 8.41),
        ("Li Mg Zn Cu Fe", "Ti Al Cr Rh V", "O S Se"),
        _face_centred(
            *((0, 0.125, 0.125, 0.125), (0, 0.875, 0.375, 0.375), (1, 0.5, 0.5, 0.5)),
            *((1, 0.25, 0.75, 0), (1, 0.75, 0, 0.25), (1, 0, 0.25, 0.75)),
            *_spinel_anions(0.2625),
        ),
    ),
    Prototype(
        "diboride",
        ((3.086, 0.0, 0.0), (-1.543, 2.6726, 0.0), (0.0, 0.0, 3.524)),
        ("Mg Al Zr Nb Ti", "B C Be"),
        ((0, 0, 0, 0), (1, 1 / 3, 2 / 3, 0.5), (1, 2 / 3, 1 / 3, 0.5)),
    ),
)


@dataclass(frozen=True)
class Crystal:
    """A repeated cell with an element on each site.

    Attributes
    ----------
    prototype : Prototype
    repeats : (n1, n2, n3)
        Cells along each axis.
    scale : float
        Factor on the prototype's lattice.
    elements : (n1 * n2 * n3 * s,) array of int32
        Atomic number of each token, in the module's order.
    """

    prototype: Prototype
    repeats: tuple[int, int, int]
    scale: float
    elements: Array

    def __len__(self) -> int:
        return len(self.elements)

    @property
    def kind(self) -> tuple[int, tuple[int, int, int]]:
        """Equal for crystals of one prototype and size."""
        return id(self.prototype), self.repeats

    @property
    def cell_sites(self) -> int:
        """Sites of a cell."""
        return len(self.prototype.site_kinds)

    @property
    def column(self) -> int:
        """Tokens in a column: the period of the pattern."""
        return self.repeats[2] * self.cell_sites

    @property
    def fractions(self) -> Array:
        """Coordinates of the tokens in units of the cell's axes, (L, 3)."""
        cells = np.stack(np.indices(self.repeats), axis=-1).reshape(-1, 1, 3)
        return (cells + self.prototype.positions).reshape(-1, 3)

    @property
    def lattice(self) -> Array:
        """Axes of the cell in angstrom, (3, 3), one per row."""
        return self.scale * np.array(self.prototype.lattice)

    def steps(self, density: float) -> int:
        """Return the cells above and below that a site sees: at least 1, at most half a column."""
        return int(np.clip(round(density * self.repeats[2] / 2), 1, (self.repeats[2] - 1) // 2))

    def pattern(self, density: float) -> Periodic | None:
        """Return the pattern that shows about this share of the tokens; None for density 1.

        With h = `steps`, a site sees the images of itself under every lattice translation by -h to
        h cells along the stacking axis (and any along the others), and all sites whose height is
        between: its own cell, the same sites of other cells, and their neighbours.
        """
        if density >= 1 or self.repeats[2] < 3:
            return None
        return _pattern(self.column, self.steps(density) * self.cell_sites)

    def sees(self, density: float) -> Array:
        """Return the pattern as a mask, (L, L) of bool: whether a token (row) sees another."""
        pattern = self.pattern(density)
        tokens = np.arange(len(self))
        if pattern is None:
            return np.ones((len(self), len(self)), bool)
        distances = tokens[:, None] - tokens + pattern.offset
        found: Array = distances % pattern.period < pattern.width
        return found


@cache
def _places(prototype: Prototype, repeats: tuple[int, int, int]) -> Array:
    """Return what a token holds beside its element, (L, 32): its place, and the cell's size."""
    crystal = Crystal(prototype, repeats, 1.0, np.empty(0))
    x, y, z = (crystal.fractions % 1.0).T
    place = crystal.fractions / repeats
    octaves = 2.0 ** np.arange(6)
    angles = np.concatenate(
        [
            2 * np.pi * np.stack([x, 2 * x, y, 2 * y, z, 2 * z], 1),
            2 * np.pi * place[:, 2:] * octaves,
            2 * np.pi * place[:, :2],
        ],
        axis=1,
    )
    lengths = np.linalg.norm(crystal.lattice, axis=1) / 5
    skew = prototype.lattice[1][0] / prototype.lattice[0][0]
    cell = np.broadcast_to([*lengths, skew], (len(x), 4))
    return np.concatenate([np.sin(angles), np.cos(angles), cell], axis=1).astype(np.float32)


@cache
def _pattern(period: int, half: int) -> Periodic:
    """Return the one pattern with these sizes: ops know a pattern by its identity."""
    return Periodic(period, 2 * half + 1, half)


def generate(
    count: int,
    seed: int = 0,
    *,
    length: int = 400,
    columns: tuple[int, int] = (1, 1),
    prototypes: Sequence[Prototype] = PROTOTYPES,
) -> list[Crystal]:
    """Generate crystals of about `length` tokens.

    Each kind of site has two elements, mixed at random over its sites (substitutional disorder), at
    a random ratio. The lattice follows the covalent radii, with a random strain of 2 %.
    """
    rng = np.random.default_rng(seed)
    crystals = []
    for _ in range(count):
        prototype = prototypes[rng.integers(len(prototypes))]
        kinds = prototype.site_kinds
        repeats = (*columns, max(3, round(length / (len(kinds) * columns[0] * columns[1]))))
        cells = repeats[0] * repeats[1] * repeats[2]
        elements = np.empty((cells, len(kinds)), np.int32)
        for kind in range(len(prototype.kinds)):
            sites = kinds == kind
            pair = rng.choice(prototype.choices(kind), 2, replace=False)
            share = 0.5 * rng.random()
            elements[:, sites] = pair[(rng.random((cells, sites.sum())) < share).astype(int)]
        first = np.array([prototype.choices(kind)[0] for kind in kinds])
        scale = RADIUS[elements].mean() / RADIUS[first].mean() * (1 + 0.02 * rng.standard_normal())
        crystals.append(Crystal(prototype, repeats, float(scale), elements.ravel()))
    return crystals


def energy(crystal: Crystal, *, decay: float = 2.5, cutoff: float = 8.0) -> float:
    """Return the target, a screened Madelung energy in eV per atom.

    E = 14.4 eV A / (2 L) * the sum over pairs of q_i q_j exp(-r / decay) / r, over all images with
    r < cutoff (in angstrom). The charge of a site is the crystal's mean electronegativity less the
    site's, so that the crystal is neutral. The sum over cells is a convolution, computed by FFT.
    """
    n = np.array(crystal.repeats)
    chi = ELECTRONEGATIVITY[crystal.elements]
    charges = (chi.mean() - chi).reshape(*n, -1)
    weights = _pair_weights(crystal, decay, cutoff)
    spectrum = np.fft.fftn(charges, axes=(0, 1, 2))
    of_weights = np.fft.fftn(weights, axes=(0, 1, 2))
    field = np.einsum("xyzab,xyzb->xyza", of_weights.conj(), spectrum)
    potential = np.fft.ifftn(field, axes=(0, 1, 2)).real
    return float(14.4 / 2 * (charges * potential).sum() / len(crystal))


def _pair_weights(crystal: Crystal, decay: float, cutoff: float) -> Array:
    """Return the sum of exp(-r / decay) / r over the images of cell 0 + d: (n1, n2, n3, s, s)."""
    positions = crystal.prototype.positions
    lattice = crystal.lattice
    heights = abs(np.linalg.det(lattice)) / np.linalg.norm(
        np.cross(lattice[[1, 2, 0]], lattice[[2, 0, 1]]), axis=1
    )
    reach = np.ceil(cutoff / heights).astype(int) + 1
    shifts = np.stack(
        np.meshgrid(*(np.arange(-m, m + 1) for m in reach), indexing="ij"), axis=-1
    ).reshape(-1, 3)
    between = positions[None, :] - positions[:, None]  # from site a to site b of one cell
    r = np.linalg.norm((shifts[:, None, None] + between) @ lattice, axis=-1)
    near = (r > 1e-6) & (r < cutoff)
    terms = np.where(near, np.exp(-r / decay) / np.where(near, r, 1.0), 0.0)
    weights = np.zeros((*crystal.repeats, *between.shape[:2]))
    np.add.at(weights, tuple((shifts % crystal.repeats).T), terms)
    return weights


def batch_of(
    crystals: Sequence[Crystal], density: float = 1.0, xp: Any = np
) -> tuple[Batch, Array]:
    """Return a batch of crystals, and the index of the crystal that each sequence stands for.

    Crystals of one prototype and size are a group: one call of the attention op.
    """
    kinds: dict[Any, list[int]] = {}
    for index, crystal in enumerate(crystals):
        kinds.setdefault(crystal.kind, []).append(index)
    groups, features = [], []
    start = 0
    for members in kinds.values():
        first, count = crystals[members[0]], len(members)
        length = len(first)
        ends = xp.arange(count + 1, dtype=np.int32) * np.int32(length)
        groups.append(Group(start, count, length, ends, length, first.pattern(density)))
        start += count * length
        scales = xp.asarray([crystals[i].scale for i in members], np.float32)
        places = _places(first.prototype, first.repeats)
        of_kind = xp.repeat(xp.asarray(places)[None], count, axis=0)
        of_kind[:, :, _LENGTHS] *= scales[:, None, None]
        features.append(of_kind.reshape(-1, NUM_FEATURES))
    order = np.concatenate([*kinds.values()])
    elements = xp.asarray(np.concatenate([crystals[i].elements for i in order]))
    return Batch(elements, xp.concatenate(features), tuple(groups)), order


@dataclass(frozen=True)
class Trained:
    """A network for crystals, with the mean and deviation of its targets in eV per atom."""

    network: Network
    mean: float
    deviation: float

    def predict(self, crystals: Sequence[Crystal], density: float = 1.0, size: int = 16) -> Array:
        """Return the predicted energies in eV per atom, (N,), `size` crystals at a time."""
        found = np.empty(len(crystals))
        for start in range(0, len(crystals), size):
            batch, order = batch_of(crystals[start : start + size], density, self.network.xp)
            outputs = self.network.predict(batch)[:, 0]
            found[start + order] = outputs.get() if hasattr(outputs, "get") else outputs
        return found * self.deviation + self.mean


def train(
    crystals: Sequence[Crystal],
    targets: Array,
    *,
    config: Config,
    num_epochs: int,
    density: float = 1.0,
    xp: Any = np,
    dtype: Any = np.float32,
    batch_size: int = 8,
    learning_rate: float = 2e-3,
    report: Callable[[int, float], None] | None = None,
) -> Trained:
    """Train on the mean absolute error of the energies, with attention of this density.

    Raises
    ------
    ValueError
        If there are fewer crystals than `batch_size`.
    """
    if len(crystals) < batch_size:
        raise ValueError(f"batch_size must be at most {len(crystals)}, the crystals; "
                         f"got {batch_size}")  # fmt: skip
    network = Network(replace(config, num_features=NUM_FEATURES), xp, dtype)
    mean, deviation = float(targets.mean()), float(targets.std()) or 1.0
    wanted = ((targets - mean) / deviation).astype(np.float32)
    rng = np.random.default_rng(config.seed)
    num_steps = len(_alike(crystals, batch_size, rng)) * num_epochs
    adam = Adam(learning_rate, num_steps, mean_decay=0.98)
    step = Step(network, adam)
    for epoch in range(num_epochs):
        total = 0.0
        for chosen in _alike(crystals, batch_size, rng):
            batch, order = batch_of([crystals[i] for i in chosen], density, xp)
            aim = xp.asarray(wanted[chosen][order])[:, None]
            total += float(abs(step(batch, aim) - aim).sum())
        if report is not None:
            report(epoch, total / len(crystals) * deviation)
    network.update(adam.mean)
    return Trained(network, mean, deviation)


def _alike(crystals: Sequence[Crystal], size: int, rng: np.random.Generator) -> list[Array]:
    """Return the crystals' indices as batches of one prototype and size, in random order."""
    kinds: dict[Any, list[int]] = {}
    for index in rng.permutation(len(crystals)):
        kinds.setdefault(crystals[index].kind, []).append(index)
    batches = [
        np.array(members[start : start + size])
        for members in kinds.values()
        for start in range(0, len(members), size)
    ]
    return [batches[i] for i in rng.permutation(len(batches))]
