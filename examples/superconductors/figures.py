"""Pictures of the notebook and of docs/superconductors.md.

    python -m examples.superconductors.figures STUDY.json SPEED.json --out docs/img

draws those of the page from the results of the study and of the benchmark; the one of the attention
trains a small network.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image  # a dependency of matplotlib

from engine import kernels

from . import crystals
from .inference import FastNetwork
from .network import Config
from .study import EDGES

__all__ = [
    "attention_weights",
    "by_family",
    "by_split",
    "pattern",
    "predicted",
    "roofline",
    "speed",
]

Array = np.ndarray[Any, Any]


def predicted(histogram: Sequence[Sequence[int]], title: str) -> Any:
    """Return the figure of predicted over measured temperatures, from `study`'s histogram."""
    counts = np.array(histogram, float)
    figure, axis = plt.subplots(figsize=(5.4, 4.4), layout="constrained")
    shown = np.where(counts > 0, counts, np.nan).T
    mesh = axis.pcolormesh(EDGES, EDGES, shown, cmap="viridis", norm="log")
    axis.plot(EDGES[[0, -1]], EDGES[[0, -1]], color="0.6", linewidth=1)
    axis.set_xlabel("measured Tc, K")
    axis.set_ylabel("predicted Tc, K")
    axis.set_title(title)
    figure.colorbar(mesh, label="rows")
    return figure


def by_split(results: Mapping[str, Any], methods: Sequence[str]) -> Any:
    """Return the figure of mean errors by split and method, from results of `study`."""
    nothing = {"all": float("nan")}
    values = {
        method: [result["errors"].get(method, nothing)["all"] for result in results.values()]
        for method in methods
        if any(method in result["errors"] for result in results.values())
    }
    return _bars(list(results), values, "mean absolute error, K")


def by_family(result: Mapping[str, Any], methods: Sequence[str]) -> Any:
    """Return the figure of mean errors by chemical family and method, of one split."""
    there = {name: result["errors"][name]["families"] for name in methods}
    families = list(there[methods[0]])
    values = {name: [errors[each] for each in families] for name, errors in there.items()}
    labels = [family.replace(", ", ",\n") for family in families]
    return _bars(labels, values, "mean absolute error, K")


def _bars(labels: Sequence[str], values: Mapping[str, Sequence[float]], name: str) -> Any:
    width = 1.2 + 1.15 * len(labels)
    figure, axis = plt.subplots(figsize=(max(width, 5.4), 3.6), layout="constrained")
    thick = 0.8 / len(values)
    for i, (method, heights) in enumerate(values.items()):
        places = np.arange(len(labels)) + thick * (i - (len(values) - 1) / 2)
        axis.bar(places, heights, 0.9 * thick, label=method)
    axis.set_xticks(range(len(labels)), labels)
    axis.set_ylabel(name)
    figure.legend(loc="outside upper center", ncols=len(values), frameon=False, fontsize="small")
    return figure


def attention_weights(trained: crystals.Trained, crystal: crystals.Crystal) -> Array:
    """Return the first layer's attention weights, (L, L), mean of the heads.

    An override of the attention op notes its queries and keys.
    """
    notes = []

    def noting(q: Any, k: Any, v: Any, **options: Any) -> Any:
        notes.append((q.copy(), k.copy()))
        return kernels.attention_prefill(q, k, v, **options)

    with kernels.override("attention_prefill", noting):
        trained.predict([crystal])
    q, k = notes[0]  # (L, H, D)
    scores = np.einsum("ihd,jhd->hij", q, k) * q.shape[2] ** -0.5
    weights = np.exp(scores - scores.max(2, keepdims=True))
    mean: Array = (weights / weights.sum(2, keepdims=True)).mean(0)
    return mean


def pattern(crystal: crystals.Crystal, weights: Array, density: float) -> Any:
    """Return the figure of a crystal's pattern, and of attention weights (L, L) under it."""
    seen = crystal.sees(density)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    left.imshow(weights, cmap="Greys", vmax=np.percentile(weights, 99.5))
    left.contour(seen, levels=[0.5], colors="C3", linewidths=1.2)
    left.set_title("attention, trained dense; the pattern outlined")
    right.imshow(seen, cmap="Blues")
    right.set_title(str(crystal.pattern(density)))
    for axis in (left, right):
        axis.set_xlabel("site seen")
        axis.set_ylabel("site")
    return figure


def speed(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return the figure of candidates a second, over those of torch, from the benchmark's rows."""
    rates: dict[str, dict[str, float]] = {}
    for row in rows:
        if "per_second" in row and "note" not in row:
            name = row["op"].partition(" (")[0].replace("crystals of ", "").replace(" tokens", "")
            is_offered = name.isdigit() and int(name) >= FastNetwork.FP8_KEYS
            if row["method"] != "ours, FP8" or is_offered:
                rates.setdefault(name, {})[row["method"]] = row["per_second"]
    methods = ("ours", "ours, FP8", "ours, pattern")
    values = {
        method: [there.get(method, np.nan) / there["torch"] for there in rates.values()]
        for method in methods
    }
    figure = _bars(list(rates), values, "candidates a second, torch = 1")
    axis = figure.axes[0]
    axis.axhline(1, color="0.6", linewidth=1)
    axis.set_xlabel("compositions of 8 tokens, and crystals by their number of tokens")
    return figure


def roofline(rows: Sequence[Mapping[str, Any]], rate: float = 3350, peak: float = 989) -> Any:
    """Return the figure of the example's kernels under the card's roofs.

    rows : sequence of mappings
        The benchmark's, with GB/s and TFLOP/s of kernels.
    rate, peak : float
        GB/s of memory and TFLOP/s in 16 bits: by default those of an H100's data sheet.
    """
    figure, axis = plt.subplots(figsize=(6.2, 4.2), layout="constrained")
    intensities = np.geomspace(1, 2000, 100)
    axis.loglog(intensities, np.minimum(rate * intensities * 1e-3, peak), color="0.4")
    for row in rows:
        if row["op"] == "kernel" and "TFLOP/s" in row:
            intensity = row["TFLOP/s"] * 1e3 / row["GB/s"]
            axis.plot(intensity, row["TFLOP/s"], "o", label=row["method"])
    axis.legend(fontsize="small")
    axis.set_xlabel("operations per byte")
    axis.set_ylabel("TFLOP/s")
    return figure


def example_crystal() -> crystals.Crystal:
    """Return the crystal of the pictures: two columns of a layered cuprate."""
    kind = [each for each in crystals.PROTOTYPES if each.name == "cuprate 214"]
    return crystals.generate(1, length=240, columns=(1, 2), prototypes=kind)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, help="the study's JSON file")
    parser.add_argument("speed", type=Path, help="the benchmark's JSON file")
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    options = parser.parse_args()
    matplotlib.use("Agg")
    rows = {row["split"]: row for row in json.loads(options.results.read_text())["rows"]}
    measured = json.loads(options.speed.read_text())["rows"]
    random = rows["random"]
    methods = [
        m for m in ("ensemble", "mix", "random forest", "extra trees") if m in random["errors"]
    ]
    known = crystals.generate(160, seed=1, length=60)
    energies = np.array([crystals.energy(crystal) for crystal in known])
    sizes = Config(hidden=32, num_heads=2, ffn=64)
    trained = crystals.train(known, energies, config=sizes, num_epochs=12)
    crystal = example_crystal()
    figures = {
        "predicted": predicted(random["histogram"], "random folds, mix"),
        "families": by_family(random, methods),
        "splits": by_split(rows, ["ensemble", "mix", "random forest", "neighbours", "median"]),
        "pattern": pattern(crystal, attention_weights(trained, crystal), 0.25),
        "speed": speed(measured),
        "roofline": roofline(measured),
    }
    for name, figure in figures.items():
        figure.canvas.draw()
        picture = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
        # 32 colours: a third of the size.
        picture.quantize(32).save(options.out / f"superconductors-{name}.png", optimize=True)


if __name__ == "__main__":
    main()
