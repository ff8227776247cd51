"""The whole accuracy study: folds, ensembles, baselines, and one JSON of results.

    python -m examples.superconductors.study --data supercon.csv --json results.json

What a model predicts is kept in a file of the folder `--members`, so that the command continues
where it was stopped. (Clear the folder after a change of the code.) On a GPU the networks train one
after the other; `--jobs N` trains N models at a time on a CPU's cores.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from engine import device
from engine.dtypes import np_dtype

from . import compositions, crystals, screen
from .data import (
    FAMILIES,
    Compositions,
    Table,
    element_features,
    fetch,
    folds,
    format_formula,
    load,
)
from .neighbours import Neighbours, exchanged
from .network import Config

__all__ = [
    "EDGES",
    "FORESTS",
    "Recipe",
    "best_candidates",
    "crystal_study",
    "errors",
    "forest",
    "main",
    "study",
]

Array = np.ndarray[Any, Any]
EDGES = np.linspace(0, 144, 49)  # bins of the histogram of predictions, in K
SPLITS = ("random", "system", "family")
FORESTS = {"random forest": "RandomForestRegressor", "extra trees": "ExtraTreesRegressor"}
_ALL = (*SPLITS, "crystals", "screen")
Predictions = dict[str, dict[int, Array]]


@dataclass(frozen=True)
class Recipe:
    """How a member is trained. See `compositions.train`."""

    num_epochs: int = 40
    num_neighbours: int = 4  # read by members with even seeds; the others read none
    batch_size: int = 128
    learning_rate: float = 3e-3
    weight_decay: float = 0.3
    hidden: int = 128
    num_heads: int = 4
    ffn: int = 256
    num_layers: int = 2
    dropout: float = 0.1

    def train(
        self, known: Compositions, tc: Array, seed: int, xp: Any = np, dtype: Any = np.float32
    ) -> compositions.Trained:
        """Train a member on these rows."""
        sizes = ("hidden", "num_heads", "ffn", "num_layers", "dropout")
        options = asdict(self)
        options["num_neighbours"] *= seed % 2 == 0
        config = Config(**{name: options.pop(name) for name in sizes}, seed=seed)
        return compositions.train(known, tc, config=config, xp=xp, dtype=dtype, **options)


@dataclass(frozen=True)
class Task:
    """A model to train on all rows but those of a fold, or for the screen on all.

    Attributes
    ----------
    method : str
        "network", a key of `FORESTS`, or "crystals": `crystal_study`.
    split : str
        One of `SPLITS`, "screen" or "crystals".
    fold : int
        For the screen minus the number of candidates: predictions of another number are no part.
    seed : int
    """

    method: str
    split: str
    fold: int
    seed: int = 0

    @property
    def file(self) -> str:
        """Name of the file of its predictions."""
        return f"{self.method}_{self.split}_{self.fold}_{self.seed}.npz".replace(" ", "_")


def run_task(task: Task, *, data: str, folder: Path, recipe: Recipe, on: str) -> str:
    """Train, and keep the predictions: of the fold's rows, or of the candidates."""
    table = load(data)
    start = time.perf_counter()
    chosen, _ = device.resolve_device(on)
    chosen.activate()
    dtype = np_dtype("bfloat16" if chosen.is_cuda else "float32")
    if task.method == "crystals":
        text = json.dumps(crystal_study(xp=chosen.xp, dtype=dtype))
        _keep(folder / task.file, json=text)
        return text
    if task.fold < 0:
        test = np.zeros(len(table), bool)
        wanted = screen.candidates(-task.fold)
    else:
        test = folds(table, task.split) == task.fold
        wanted = table.compositions[test]
    known, tc = table.compositions[~test], table.tc[~test]
    if task.method in FORESTS:
        found = forest(known, tc, wanted, kind=task.method)
    else:
        found = recipe.train(known, tc, task.seed, chosen.xp, dtype).predict(wanted)
    seconds = time.perf_counter() - start
    _keep(folder / task.file, tc=found, seconds=seconds)
    return f"{task.file}: {seconds:.0f} s"


def _keep(path: Path, **values: Any) -> None:
    """Write a file that is there only once it is whole: the command may be stopped at any time."""
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez(file, **values)
    part.replace(path)


def has_forest() -> bool:
    """Tell whether scikit-learn is installed."""
    return importlib.util.find_spec("sklearn") is not None


def forest(
    known: Compositions, tc: Array, wanted: Compositions, kind: str = "random forest"
) -> Array:
    """Return what scikit-learn's forest of 200 trees on `element_features` predicts, (M,), in K.

    kind : str
        A key of `FORESTS`. The thresholds of "extra trees" are random.
    """
    from sklearn import ensemble

    model = getattr(ensemble, FORESTS[kind])
    trees = model(200, max_features=1 / 3, random_state=0)
    trees.fit(element_features(known), tc)
    found: Array = trees.predict(element_features(wanted)).astype(np.float32)
    return found


def errors(table: Table, found: Array, split: str) -> dict[str, Any]:
    """Return mean absolute errors in K: of all rows, of folds, of families, of reported rows.

    Rows without a prediction (NaN) are left out.
    """
    difference = np.abs(found - table.tc)
    is_there = ~np.isnan(found)
    fold_of = folds(table, split)
    family_of = folds(table, "family")

    def mean(rows: Array) -> float:
        return round(float(difference[rows & is_there].mean()), 3)

    return {
        "all": mean(np.ones(len(table), bool)),
        "reported": mean(table.is_reported),
        "folds": [mean(fold_of == k) for k in np.unique(fold_of[is_there])],
        "families": {
            name: mean(family_of == k)
            for k, name in enumerate(FAMILIES)
            if (is_there & (family_of == k)).any()
        },
        "rows": int(is_there.sum()),
    }


def study(table: Table, split: str, found: Predictions) -> dict[str, Any]:
    """Compare what models predict for the rows of folds, and add the methods that need none.

    Parameters
    ----------
    table : Table
    split : str
    found : dict
        ``found[method][fold]`` is an array (members, rows of the fold) of predictions in K. The
        members of "network" differ in their seed; those of other methods are averaged. All are
        compared on the folds that every method has, if it has any.

    Returns
    -------
    dict
        `errors` by method. "ensemble" is the median of the networks, "neighbours" the mean of the
        nearest known rows, "mix" the mean of these two, "median" that of the known rows. "network"
        lists the errors of the single networks by fold; "folds" are those compared. "histogram"
        counts rows by measured and predicted (mix) temperature, in `EDGES`.
    """
    fold_of = folds(table, split)
    found = {method: of_fold for method, of_fold in found.items() if of_fold}
    names = ("ensemble", "neighbours", "mix", "median", *found)
    values = {name: np.full(len(table), np.nan, np.float32) for name in names}
    networks = found.get("network", {})
    shared = sorted(set.intersection(*(set(of_fold) for of_fold in found.values())))
    for fold in shared:
        test = fold_of == fold
        known, tc = table.compositions[~test], table.tc[~test]
        for method, of_fold in found.items():
            values[method][test] = of_fold[fold].mean(0)
        values["neighbours"][test] = Neighbours(known, tc).predict(table.compositions[test])
        values["median"][test] = np.median(tc)
        if networks:
            values["ensemble"][test] = np.median(networks[fold], axis=0)
            values["mix"][test] = (values["ensemble"][test] + values["neighbours"][test]) / 2
    singles = {
        fold: np.abs(networks[fold] - table.tc[fold_of == fold]).mean(1).round(3).tolist()
        for fold in shared
        if networks
    }
    values.pop("network", None)
    is_mixed = ~np.isnan(values["mix"])
    counts, _, _ = np.histogram2d(table.tc[is_mixed], values["mix"][is_mixed], bins=(EDGES, EDGES))
    return {
        "folds": shared,
        "network": singles,
        "errors": {
            name: errors(table, each, split)
            for name, each in values.items()
            if not np.isnan(each).all()
        },
        "histogram": counts.astype(int).tolist(),
    }


def best_candidates(table: Table, members: Array, count: int = 10) -> list[dict[str, Any]]:
    """Return the candidates with the highest mean prediction, each with its nearest known row.

    members : (members, candidates) array
        Predictions in K for `screen.candidates(N)`.
    """
    wanted = screen.candidates(members.shape[1])
    mean = members.mean(0)
    rows = np.argsort(-mean)[:count]
    neighbours = Neighbours(table.compositions, table.tc, count=1)
    nearest = neighbours.nearest(wanted[rows], 1)[0][:, 0]
    shares = exchanged(wanted[rows], table.compositions[nearest])
    return [
        {
            "formula": format_formula(wanted.elements[row], wanted.amounts[row]),
            "tc": round(float(mean[row]), 1),
            "deviation": round(float(members[:, row].std()), 1),
            "neighbour": table.names[near],
            "neighbour_tc": float(table.tc[near]),
            "exchanged": round(float(share), 3),
        }
        for row, near, share in zip(rows, nearest, shares, strict=True)
    ]


def crystal_study(
    *,
    count: int = 640,
    length: int = 100,
    density: float = 0.25,
    num_epochs: int = 24,
    xp: Any = np,
    dtype: Any = np.float32,
) -> dict[str, Any]:
    """Train on crystals with dense attention and with the pattern, and run both either way.

    Returns
    -------
    dict
        Mean absolute errors in eV per atom on the fifth of the crystals that was left out:
        "errors", by how a network was trained and how it was run, and "median", of the median.
    """
    items = crystals.generate(count, seed=1, length=length)
    targets = np.array([crystals.energy(crystal) for crystal in items])
    known = count * 4 // 5
    config = Config(hidden=64, num_heads=2, ffn=128)
    modes = {"dense": 1.0, "pattern": density}
    found: dict[str, dict[str, float]] = {}
    for name, trained_density in modes.items():
        trained = crystals.train(
            *(items[:known], targets[:known]),
            config=config,
            num_epochs=num_epochs,
            density=trained_density,
            xp=xp,
            dtype=dtype,
        )
        found[name] = {
            run: _mean_error(trained.predict(items[known:], run_density), targets[known:])
            for run, run_density in modes.items()
        }
    return {
        "crystals": count,
        "length": length,
        "density": density,
        "num_epochs": num_epochs,
        "errors": found,
        "median": _mean_error(np.median(targets[:known]), targets[known:]),
    }


def _mean_error(found: Any, wanted: Array) -> float:
    return round(float(np.abs(found - wanted).mean()), 4)


def _kept(folder: Path, method: str, split: str, fold: int) -> Array | None:
    """Return the predictions that are kept, (members, rows), if there are any."""
    first = Task(method, split, fold).file.removesuffix("0.npz")
    files = sorted(folder.glob(f"{first}*.npz"))
    return np.stack([np.load(file)["tc"] for file in files]) if files else None


def _record(table: Table, folder: Path, recipe: Recipe, num_candidates: int) -> dict[str, Any]:
    rows = []
    for split in SPLITS:
        found: Predictions = {}
        for method in ("network", *FORESTS):
            kept = {k: _kept(folder, method, split, k) for k in range(len(FAMILIES))}
            found[method] = {fold: each for fold, each in kept.items() if each is not None}
        if any(found.values()):
            rows.append({"split": split, **study(table, split, found)})
    screened = _kept(folder, "network", "screen", -num_candidates)
    best = [] if screened is None else best_candidates(table, screened)
    record = {"recipe": asdict(recipe), "rows": rows, "best_candidates": best}
    of_crystals = folder / Task("crystals", "crystals", -1).file
    if of_crystals.exists():
        record["crystals"] = json.loads(str(np.load(of_crystals)["json"]))
    return record


def _conditions(on: str) -> dict[str, str]:
    """Return card, date, commit and command, which every file of figures starts with."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    chosen, _ = device.resolve_device(on)
    card = f"{platform.machine()}, {os.cpu_count()} cores"
    if chosen.is_cuda:
        card = chosen.xp.cuda.runtime.getDeviceProperties(chosen.index)["name"].decode()
    return {
        "card": card,
        "date": datetime.date.today().isoformat(),
        "commit": done.stdout.strip() or os.environ.get("ENGINE_COMMIT", "unknown"),
        "command": "python -m examples.superconductors.study " + " ".join(sys.argv[1:]),
    }


def _tasks(table: Table, options: argparse.Namespace) -> list[Task]:
    """Return what to train: the networks, one seed after the other, then all else."""
    splits, chosen = options.splits, options.folds
    there = [
        (split, fold)
        for split in SPLITS
        if split in splits
        for fold in range(int(folds(table, split).max()) + 1)
        if chosen is None or fold in chosen
    ]
    tasks = []
    for seed in range(options.seeds):
        tasks += [Task("network", *each, seed) for each in there]
        screened = Task("network", "screen", -options.candidates, seed)
        tasks += [screened] if "screen" in splits else []
    tasks += [Task(kind, *each) for kind in FORESTS for each in there if has_forest()]
    tasks += [Task("crystals", "crystals", -1)] if "crystals" in splits else []
    return tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="SuperCon's CSV file; fetched if it is missing")
    parser.add_argument("--splits", nargs="+", choices=_ALL, default=_ALL, help="default: all")
    parser.add_argument("--folds", nargs="+", type=int, help="default: all")
    parser.add_argument("--seeds", type=int, default=6, help="networks per fold")
    parser.add_argument("--epochs", type=int, default=Recipe.num_epochs)
    parser.add_argument("--candidates", type=int, default=100_000)
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--jobs", type=int, default=1, help="models that train at a time (CPU)")
    parser.add_argument("--members", type=Path, default=Path("build/superconductors"))
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    for name in ("seeds", "epochs", "candidates", "jobs"):
        if (number := getattr(options, name)) < 1:
            parser.error(f"argument --{name}: must be at least 1; got {number}")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"argument --json: must be in an existing folder; got {options.json}")
    table = load(fetch(options.data)) if options.data else load()
    recipe = Recipe(num_epochs=options.epochs)
    digest = hashlib.sha256(f"{table.source} {recipe}".encode()).hexdigest()[:8]
    folder = options.members / digest  # members of another recipe are not mixed in
    folder.mkdir(parents=True, exist_ok=True)
    tasks = _tasks(table, options)
    missing = [task for task in tasks if not (folder / task.file).exists()]
    print(f"{table.source}: {len(table)} rows; {len(missing)} of {len(tasks)} models to train")
    work = partial(
        run_task,
        data=str(options.data or ""),
        folder=folder,
        recipe=recipe,
        on=options.device,
    )
    with ProcessPoolExecutor(options.jobs) as pool:  # starts a process only when given work
        run = map if options.jobs == 1 else pool.map
        for done in run(work, missing):
            print(done, flush=True)
    record = _record(table, folder, recipe, options.candidates)
    for row in record["rows"]:
        for method, found in row["errors"].items():
            print(f"{row['split']:8} {method:14} {found['all']:7.3f} K  {found['families']}")
    if options.json:
        text = json.dumps({**_conditions(options.device), **record}, indent=1)
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
