"""The roofline picture of a benchmark; needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from engine.kernels._tools.roofline import Peaks
from engine.testing.bench_case import Measurement
from engine.testing.timing import Timing

__all__ = ["draw"]

_OURS = "#1f5fbf"
_RIVALS = ("#e8852b", "#7a9a3b", "#b04a8b", "#8c8c8c", "#c9a227")
_ROOFS = {"float32": "float32", "bfloat16": "16 bits, tensor cores"}


def draw(
    title: str,
    peaks: Peaks,
    copy_rate: float,
    found: Sequence[Measurement],
    file: str | Path | None,
) -> Figure:
    """Draw operations per second over operations per byte, on logarithmic axes.

    Parameters
    ----------
    title : str
    peaks : Peaks
    copy_rate : float
        Bytes per second of a copy.
    found : sequence of Measurement
        Cases that count their operations.
    file : path or None
    """
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    axes.set_xscale("log")
    axes.set_yscale("log")
    _draw_points(axes, found)
    _draw_roofs(axes, peaks, copy_rate, [_intensity(each) for each in found])
    axes.set_xlabel("operations per byte that must be moved")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(title)
    axes.grid(which="major", color="0.9")
    axes.set_axisbelow(True)
    axes.legend(loc="lower right", frameon=False)
    if file is not None:
        figure.savefig(file, dpi=150)
    plt.close(figure)  # a notebook shows what the cell returns
    return figure


def _draw_points(axes: Axes, found: Sequence[Measurement]) -> None:
    _scatter(axes, found, [each.tflops for each in found], "the kernel", _OURS)
    for index, each in enumerate(found):
        axes.annotate(
            each.case.name,
            (_intensity(each), each.tflops),
            xytext=(6, -10 if index % 2 else 4),
            textcoords="offset points",
            fontsize=8,
        )
    names = dict.fromkeys(name for each in found for name in each.rivals)
    for index, name in enumerate(names):
        timed = [each for each in found if isinstance(each.rivals.get(name), Timing)]
        rates = [each.case.flops / _rival(each, name) * 1e-12 for each in timed]
        _scatter(axes, timed, rates, name, _RIVALS[index % len(_RIVALS)])


def _scatter(
    axes: Axes, found: Sequence[Measurement], rates: Sequence[float], label: str, color: str
) -> None:
    if found:
        axes.plot([_intensity(each) for each in found], rates, "o", color=color, label=label)


def _rival(measured: Measurement, name: str) -> float:
    timing = measured.rivals[name]
    assert isinstance(timing, Timing)
    return timing.median


def _intensity(measured: Measurement) -> float:
    return measured.case.flops / measured.case.nbytes


def _draw_roofs(axes: Axes, peaks: Peaks, copy_rate: float, intensities: Sequence[float]) -> None:
    memory = peaks.memory * 1e-12
    highest = max(peaks.rate(name) for name in _ROOFS) * 1e-12
    low = min(*intensities, 1.0) / 4
    high = max(*intensities, highest / memory) * 4
    x = np.geomspace(low, high, 200)
    for index, (dtype, label) in enumerate(_ROOFS.items()):
        rate = peaks.rate(dtype) * 1e-12
        axes.plot(x, np.minimum(rate, x * memory), "--", color="black", linewidth=1)
        axes.text(high, rate, f"{label}: {rate:.3g} TFLOP/s", ha="right", va="bottom", fontsize=8)
        if index == 0:
            axes.text(low, low * memory, f" {memory:.3g} TB/s", va="top", fontsize=8, rotation=0)
    copy = np.minimum(highest, x * copy_rate * 1e-12)
    axes.plot(x, copy, ":", color="0.5", linewidth=1, label="rate of a copy")
    lowest = min(float(np.min(line.get_ydata())) for line in axes.get_lines())
    axes.set_ylim(lowest / 2, highest * 3)
