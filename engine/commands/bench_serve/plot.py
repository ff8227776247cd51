"""Plots of benchmark runs: latencies of one run, or throughput and latencies over a sweep."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.commands.bench_serve.figures import METRICS
from engine.errors import ConfigError
from engine.model_files import excerpt

__all__ = ["check", "draw"]

_KINDS = (".png", ".svg")
_TOP = 1.08  # upper end of an axis, relative to the highest value
_BLUE = "#1f5fbf"
_ORANGE = "#e8852b"
_GREY = "#8c8c8c"


def check(file: Path) -> None:
    """Raise `ConfigError` if the plot cannot be written to the file."""
    if file.suffix not in _KINDS:
        raise ConfigError(f"--plot must name a {' or '.join(_KINDS)} file; got {excerpt(file)}")
    if not file.parent.is_dir():
        raise ConfigError(f"--plot must name a file in an existing folder; got {excerpt(file)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'rawengine[bench]'")


def draw(
    file: Path, rows: Sequence[Mapping[str, Any]], details: Sequence[Mapping[str, list[Any]]]
) -> None:
    """Draw the plot and write it to a file.

    Parameters
    ----------
    file : Path
    rows : sequence of dict
        One `figures.summarize` row per run.
    details : sequence of dict
        `figures.describe` for the same runs.

    Raises
    ------
    ConfigError
        If the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    panels = figure.subplots(1, 3)
    if len(rows) == 1:
        _draw_run(panels, details[0])
    else:
        _draw_sweep(panels, rows)
    first = rows[0]
    figure.suptitle(
        f"{first['model']}, {first['endpoint']}, {first['num_prompts']} requests, "
        f"{first['request_rate']} requests/s"
    )
    try:
        figure.savefig(file, dpi=150)
    except OSError as error:
        raise ConfigError(f"--plot {excerpt(file)} cannot be written: {error}") from error


def _draw_run(panels: Any, detail: Mapping[str, list[Any]]) -> None:
    """Draw cumulative distributions of latencies over requests or chunks."""
    gaps = [gap for one in detail["itls"] for gap in one or ()]
    columns = {"ttft": detail["ttfts"], "itl": gaps, "e2el": detail["e2els"]}
    for panel, (name, values) in zip(panels, columns.items(), strict=True):
        known = np.sort([value for value in values if value is not None])
        if known.size:
            panel.plot(known, np.arange(1, known.size + 1) / known.size, color=_BLUE)
            for percent in (50, 99):
                panel.axvline(np.percentile(known, percent), color=_GREY, linestyle="--", lw=0.8)
        panel.set(xlabel=f"{METRICS[name]} (ms)", ylabel="share", ylim=(0, 1.02))


def _draw_sweep(panels: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw throughput, and p50 and p99 of two latencies, against concurrency."""
    places = [row["max_concurrency"] for row in rows]
    throughput = [row["output_throughput"] for row in rows]
    panels[0].plot(places, throughput, color=_BLUE, marker="o")
    panels[0].set(ylabel="output tokens/s")
    panels[0].set_ylim(0, _TOP * max(throughput) or 1)
    for panel, name in zip(panels[1:], ("ttft", "tpot"), strict=True):
        highest = 0.0
        for percent, color in ((50, _BLUE), (99, _ORANGE)):
            values = [row.get(f"p{percent}_{name}_ms", np.nan) for row in rows]
            panel.plot(places, values, color=color, marker="o", label=f"p{percent}")
            highest = max(highest, *np.nan_to_num(values))
        panel.set(ylabel=f"{METRICS[name]} (ms)")
        panel.set_ylim(0, _TOP * highest or 1)
        panel.legend(loc="lower right")
    for panel in panels:
        panel.set(xlabel="requests in flight")
        panel.set_xlim(0.8 * min(places), 1.25 * max(places))  # a panel may be empty
        panel.set_xscale("log", base=2)
        panel.set_xticks(places, map(str, places))
