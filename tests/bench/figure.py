"""Common style of all figures in docs/benchmarks.

Ours is blue (lighter: another mode of ours), a peer has the same colour in all figures, and the
hardware limit is a dashed black line. A figure consists of panels of bars or lines; `plot.py`
defines the contents of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from PIL import Image  # a dependency of matplotlib

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"

_COLORS = {
    "ours": "#1f5fbf",
    "cuBLAS": "#e8852b",
    "cuDNN": "#e8852b",
    "FlashAttention-2": "#8c8c8c",
    "FlashAttention-3": "#4f4f4f",
    "FlashInfer": "#b04a8b",
    "flash-linear-attention": "#8c8c8c",
    "FlashMLA": "#4f4f4f",
    "vLLM": "#c9a227",
    "llama.cpp": "#7a9a3b",
    "transformers": "#a05a2c",
    "CuPy": "#8c8c8c",
    "torch": "#e8852b",
    "Triton": "#8c8c8c",
    "NCCL": "#7a9a3b",
}
_OURS_TOO = ("#85b4ee", "#bcd6f7")  # our other modes, in order of appearance
_BAR = 0.8  # bar thickness as a fraction of a case's slot
_BEHIND_TEXT = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.0}
_LEGEND_COLUMNS = 6
_PALETTE = 64  # colours per file: edges stay smooth at a third of the size

Values = Sequence[float | None]


@dataclass(frozen=True)
class Bars:
    """Horizontal bars, one group per case.

    Attributes
    ----------
    title, unit : str
        Panel title; axis label, which says whether higher or lower is better.
    cases : sequence of str
        Group names, from top to bottom.
    series : mapping
        Name -> one value per case; None leaves a gap. Names that begin with "ours" are blue.
    limit : tuple or None
        Hardware limit: a name, and one value or one value per case.
    log : bool
        Whether the axis is logarithmic.
    digits : str or None
        Format of the number at the end of our bars; None: no numbers.
    """

    title: str
    unit: str
    cases: Sequence[str]
    series: Mapping[str, Values]
    limit: tuple[str, float | Sequence[float]] | None = None
    log: bool = False
    digits: str | None = ".0f"


@dataclass(frozen=True)
class Lines:
    """One line per series over a shared axis; attributes as in `Bars`."""

    title: str
    unit: str
    x_name: str
    x: Sequence[float]
    series: Mapping[str, Values]
    limit: tuple[str, float | Sequence[float]] | None = None


@dataclass(frozen=True)
class Roofline:
    """Points (operations per byte, TFLOP/s), compute roofs (name, TFLOP/s) and a memory roof."""

    title: str
    points: Mapping[str, Sequence[tuple[float, float]]]
    roofs: Sequence[tuple[str, float]]
    bandwidth: float


@dataclass(frozen=True)
class Picture:
    """A title, the source of the data, and panels in rows of `columns`."""

    title: str
    source: str
    panels: Sequence[Bars | Lines | Roofline]
    columns: int = 1
    height: float = 3.5  # height of a row of panels, inches
    width: float = 9.5
    shared_cases: bool = False  # panels in a row share their cases: label them once


def color(name: str, order: Sequence[str]) -> str:
    """Return the colour of a series: blue for ours, lighter blues for our other modes."""
    if name in _COLORS:
        return _COLORS[name]
    if name.startswith("ours"):
        others = [each for each in order if each.startswith("ours") and each != "ours"]
        return _OURS_TOO[min(others.index(name), len(_OURS_TOO) - 1)]
    return next(_COLORS[peer] for peer in _COLORS if name.startswith(peer))


def _limit_values(limit: tuple[str, Any], count: int) -> list[float]:
    values = limit[1]
    return [values] * count if isinstance(values, (int, float)) else list(values)


def _draw_bars(axis: Any, panel: Bars) -> None:
    names = list(panel.series)
    thick = _BAR / len(names)
    for index, (name, values) in enumerate(panel.series.items()):
        places = [case - _BAR / 2 + thick * (index + 0.5) for case in range(len(values))]
        shown = [value or 0.0 for value in values]
        axis.barh(places, shown, thick * 0.92, color=color(name, names), label=name)
        if name == "ours" and panel.digits:
            for place, value in zip(places, values, strict=True):
                if value is not None:
                    text = f" {value:,{panel.digits}}"
                    axis.text(value, place, text, va="center", fontsize=6.5,
                              color=_COLORS["ours"], bbox=_BEHIND_TEXT)  # fmt: skip
    if panel.limit is not None:
        limits = _limit_values(panel.limit, len(panel.cases))
        x = [value for value in limits for _ in (0, 1)]
        y = [case + edge for case in range(len(limits)) for edge in (-0.5, 0.5)]
        axis.plot(x, y, "--", color="black", linewidth=1.1, label=panel.limit[0])
    axis.set_yticks(range(len(panel.cases)), panel.cases, fontsize=7.5)
    axis.set_ylim(len(panel.cases) - 0.5, -0.5)
    axis.set_xlabel(panel.unit, fontsize=8)
    if panel.log:
        axis.set_xscale("log")
    axis.grid(axis="x", linewidth=0.3)


def _draw_lines(axis: Any, panel: Lines) -> None:
    names = list(panel.series)
    for name, values in panel.series.items():
        points = [(x, y) for x, y in zip(panel.x, values, strict=True) if y is not None]
        wide = 2.0 if name.startswith("ours") else 1.2
        axis.plot(*zip(*points, strict=True), "o-", color=color(name, names), label=name,
                  linewidth=wide, markersize=2 + wide)  # fmt: skip
    if panel.limit is not None:
        limits = _limit_values(panel.limit, len(panel.x))
        axis.plot(panel.x, limits, "--", color="black", linewidth=1.1, label=panel.limit[0])
    axis.set_xscale("log", base=2)
    axis.set_xticks(panel.x, [f"{x:,}" for x in panel.x], fontsize=7.5)
    axis.minorticks_off()
    axis.set_xlabel(panel.x_name, fontsize=8)
    axis.set_ylabel(panel.unit, fontsize=8)
    axis.set_ylim(bottom=0)
    axis.grid(linewidth=0.3)


def _draw_roofline(axis: Any, panel: Roofline) -> None:
    for (name, points), marker in zip(panel.points.items(), "osD^v<", strict=False):
        hue = color(name.partition(":")[0], ())
        axis.plot(*zip(*points, strict=True), marker, markersize=5, label=name, color=hue,
                  markeredgecolor="white", markeredgewidth=0.5)  # fmt: skip
    for style, (name, roof) in zip(("--", ":"), panel.roofs, strict=True):
        edge = roof / panel.bandwidth
        axis.plot((1, edge, 1e4), (panel.bandwidth, roof, roof), style, color="black",
                  linewidth=1.1, label=name)  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("operations per byte that must move", fontsize=8)
    axis.set_ylabel("TFLOP/s", fontsize=8)
    axis.grid(linewidth=0.3)


_DRAW = {Bars: _draw_bars, Lines: _draw_lines, Roofline: _draw_roofline}


def _legend(figure: Any, axes: Sequence[Any], top: float) -> int:
    """Draw one legend for all panels; return its row count."""
    entries: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(
        entries.values(), entries.keys(), loc="upper center", bbox_to_anchor=(0.5, top),
        ncols=min(len(entries), _LEGEND_COLUMNS), fontsize=7.5, frameon=False,
    )  # fmt: skip
    return -(-len(entries) // _LEGEND_COLUMNS)


def draw(name: str, picture: Picture) -> Path:
    """Draw one figure; return its file."""
    rows = -(-len(picture.panels) // picture.columns)
    height = rows * picture.height + 0.75
    figure, grid = plt.subplots(
        rows, picture.columns, figsize=(picture.width, height), squeeze=False,
        sharey="row" if picture.shared_cases else False,
    )  # fmt: skip
    axes = list(grid.flat)
    for axis, panel in zip(axes, picture.panels, strict=False):
        _DRAW[type(panel)](axis, panel)
        axis.set_axisbelow(True)
        axis.set_title(panel.title, fontsize=8.5)
        axis.tick_params(axis="both", labelsize=7.5)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    for axis in axes[len(picture.panels) :]:
        axis.set_visible(False)
    figure.text(0.5, 1 - 0.08 / height, picture.title, ha="center", va="top", fontsize=10)
    figure.text(
        0.5, 1 - 0.29 / height, picture.source, ha="center", va="top", fontsize=7.5, color="#444444"
    )
    legend_rows = _legend(figure, axes, 1 - 0.42 / height)
    figure.tight_layout(rect=(0, 0, 1, 1 - (0.5 + 0.18 * legend_rows) / height))
    return save(figure, name)


def save(figure: Any, name: str) -> Path:
    """Write a figure next to its data, with few colours to keep the file small."""
    target = FOLDER / f"{name}.png"
    figure.set_dpi(100)
    figure.canvas.draw()
    picture = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
    picture.quantize(_PALETTE).save(target, optimize=True)
    plt.close(figure)
    return target
