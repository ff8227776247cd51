"""The screen: generated candidates through a trained network, with the time of each part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np

from engine import kernels

from . import compositions, crystals, ops
from .crystals import Crystal
from .data import MAX_ELEMENTS, Compositions
from .elements import NUMBER
from .inference import FastNetwork

__all__ = ["TEMPLATES", "candidates", "parts", "screen", "synchronize"]

Array = np.ndarray[Any, Any]
_EARTHS = "La Pr Nd Sm Eu Gd Y"
_ALKALINES = "Ba Sr Ca"

# Sites of known structures: the elements that may stand there, how many of them share the site, and
# atoms per formula. Each template has seven elements.
TEMPLATES: dict[str, tuple[tuple[str, int, float], ...]] = {
    "cuprate 123": ((_EARTHS, 2, 1), (_ALKALINES, 2, 2), ("Cu Zn Ni Co Fe", 2, 3), ("O", 1, 6.9)),
    "cuprate 214": (
        ("La Nd Pr Sm", 2, 1.85),
        (_ALKALINES, 2, 0.15),
        ("Cu Zn Ni", 2, 1),
        ("O", 1, 4),
    ),
    "mercury cuprate": (
        ("Hg Tl Pb Re Bi", 2, 1),
        ("Ba Sr", 2, 2),
        ("Ca Y", 1, 2),
        ("Cu", 1, 3),
        ("O", 1, 8.3),
    ),
    "iron pnictide 122": (("Ba Sr Ca K Na Eu", 3, 1), ("Fe Co Ni Ru Rh", 2, 2), ("As P Sb", 2, 2)),
    "iron pnictide 1111": (
        ("La Ce Pr Nd Sm Gd", 2, 1),
        ("Fe Co Ni", 2, 1),
        ("As", 1, 1),
        ("O F H", 2, 1),
    ),
    "A15": (("Nb V Ti Ta Mo Zr", 4, 3), ("Sn Ge Al Ga Si Pt", 3, 1)),
    "diboride": (("Mg Al Zr Nb Ti Li Sc Ta", 5, 1), ("B C", 2, 2)),
    "borocarbide": (
        ("Y Lu Er Tm Ho Dy Sc", 2, 1),
        ("Ni Pd Pt Co", 2, 2),
        ("B", 1, 2),
        ("C N", 2, 1),
    ),
}


def candidates(count: int, seed: int = 0) -> Compositions:
    """Return generated compositions of seven elements: substitutions in known structures.

    The elements that share a site are drawn at random; all but the first together hold 1 to 50 %.
    """
    rng = np.random.default_rng(seed)
    kinds = rng.integers(len(TEMPLATES), size=count)
    elements = np.zeros((count, MAX_ELEMENTS), np.int32)
    amounts = np.zeros((count, MAX_ELEMENTS), np.float32)
    for kind, sites in enumerate(TEMPLATES.values()):
        rows = np.flatnonzero(kinds == kind)[:, None]
        place = 0
        for symbols, shared, atoms in sites:
            pool = np.array([NUMBER[symbol] for symbol in symbols.split()])
            drawn = rng.random((len(rows), len(pool))).argsort(axis=1)[:, :shared]
            share = rng.uniform(0.01, 0.5, (len(rows), shared)) / max(1, shared - 1)
            share = np.maximum(share.round(2), 0.01)
            share[:, 0] = 1 - share[:, 1:].sum(1)
            columns = np.arange(place, place + shared)
            elements[rows, columns] = pool[drawn]
            amounts[rows, columns] = atoms * share
            place += shared
    return Compositions.from_arrays(elements, amounts)


def screen(
    network: FastNetwork,
    items: Compositions | Sequence[Crystal],
    *,
    density: float = 1.0,
    size: int,
) -> tuple[Array, dict[str, float]]:
    """Predict for all candidates, `size` at a time.

    Parameters
    ----------
    network : FastNetwork
    items : Compositions or sequence of Crystal
    density : float
        Density of the attention pattern of crystals.
    size : int
        Candidates per batch.

    Returns
    -------
    outputs : (N,) array of float32
        First output of the network, in its own unit.
    seconds : dict
        "batches" (the host's time for tokens and features) and "all", until the device is done.

    Notes
    -----
    On a GPU the host makes a batch while the device computes the one before; results are copied
    back at the end.
    """
    is_crystals = not isinstance(items, Compositions)
    found = np.empty(len(items), np.float32)
    pending = []
    of_batches = 0.0
    start = time.perf_counter()
    for first in range(0, len(items), size):
        part = items[first : first + size]
        began = time.perf_counter()
        if is_crystals:
            batch, order = crystals.batch_of(part, density, network.xp)
        else:
            batch, order = compositions.batch_of(part, network.xp)
        of_batches += time.perf_counter() - began
        pending.append((first + order, network.predict(batch)[:, 0]))
    for rows, outputs in pending:
        found[rows] = outputs.get() if hasattr(outputs, "get") else outputs
    return found, {"batches": of_batches, "all": time.perf_counter() - start}


_PARTS = {
    "attention": (
        "attention_prefill",
        "attention_prefill_fp8",
        "quantize_heads",
        "short_attention",
    ),
    "products": ("gemm", "gemm_fp8"),
    "norms": ("rmsnorm",),
    "embedding": ("embedding",),
    "first layer": ("first_layer",),
    "norm and product": ("norm_product", "norm_product_codes"),
    "after attention": ("finish_layer",),
    "mean": ("mean_rows",),
}


def parts(network: FastNetwork, batch: Any) -> dict[str, float]:
    """Return the seconds of a forward pass, by part, of those that it has, and of all of it.

    Each call is followed by a synchronisation, so the sum is above the time of an unwatched pass.
    """
    seconds = dict.fromkeys(_PARTS, 0.0)

    def add(part: str, taken: float) -> None:
        seconds[part] += taken

    with ExitStack() as stack:
        for part, names in _PARTS.items():
            for name in names:
                stack.enter_context(_timed(name, network.xp, partial(add, part)))
        start = time.perf_counter()
        network.predict(batch)
        synchronize(network.xp)
        seconds["all"] = time.perf_counter() - start
    return {part: taken for part, taken in seconds.items() if taken}


@contextmanager
def _timed(name: str, xp: Any, add: Callable[[float], None]) -> Iterator[None]:
    """Report the seconds of each call of an op, of the engine or of the example."""
    is_own = name in ops.__all__
    op = getattr(ops if is_own else kernels, name)

    def timed(*arguments: Any, **options: Any) -> Any:
        synchronize(xp)
        start = time.perf_counter()
        result = op(*arguments, **options)
        synchronize(xp)
        add(time.perf_counter() - start)
        return result

    if is_own:
        setattr(ops, name, timed)
        try:
            yield
        finally:
            setattr(ops, name, op)
    else:
        with kernels.override(name, timed):
            yield


def synchronize(xp: Any) -> None:
    """Wait for the device, if `xp` is CuPy."""
    if xp is not np:
        xp.cuda.Device().synchronize()
