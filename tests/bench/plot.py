"""`python -m tests.bench.plot`: draw every result in docs/benchmarks as a picture beside it.

Rows with a peer's time in the same run become a ratio, larger is better and 1 is a tie; others the
rate they reached. Attention is drawn over the length too (`<name>_length.png`), beside the peer.
"""

from __future__ import annotations

import collections
import json
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"

_OVER_LENGTH = ("attention_prefill_sm90", "attention_decode")
_LENGTH = re.compile(r" (?:S|ctx)(\d+)")
_RATES = ("TFLOP/s", "GB/s")


def _point(row: dict[str, Any]) -> tuple[str, str, float] | None:
    """Return (axis label, name, value) of a row; None if it is no timing of a case."""
    if "ratio" in row:
        return "times as fast as cuBLAS", f"M={row['m']} ({row['n']}, {row['k']})", row["ratio"]
    if "after_overlap_us" in row and row["m"] in (1, 16, 64):
        name = f"M={row['m']} {row['layer']}"
        return "times as fast as cuBLAS", name, row["cublas_us"] / row["after_overlap_us"]
    if "latency_ms_per_token" in row:
        share = row["floor_ms"] / row["latency_ms_per_token"]
        return "share of the memory floor at batch 1", row["model"], share
    name = f"{row.get('op', row.get('version', ''))} {row.get('case', '')}"
    for key in (k for k in row if k.startswith("x ")):
        return f"times as fast as {key[2:]}", name, row[key]
    return ("GB/s", name, row["GB/s"]) if "GB/s" in row else None


def draw(path: Path) -> Path | None:
    """Draw one file; None where its rows are no timings of cases."""
    record = json.loads(path.read_text())
    points = [point for row in record["rows"] if (point := _point(row)) is not None]
    if not points:
        return None
    label = points[0][0]
    points = [point for point in points if point[0] == label]
    figure, axis = plt.subplots(figsize=(9, 1.2 + 0.19 * len(points)))
    axis.barh(range(len(points)), [value for _, _, value in points], color="#4477aa")
    axis.set_yticks(range(len(points)), [name for _, name, _ in points], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel(label)
    if label.startswith("times"):
        axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_title(
        f"{record['card']}, {record['date']}, commit {record['commit']}"[:90], fontsize=8
    )
    return _save(figure, path.with_suffix(".png"))


def draw_over_length(path: Path) -> Path:
    """Draw what the first version in a file reaches over the length, and its peer dashed."""
    record = json.loads(path.read_text())
    lines: dict[str, dict[int, float]] = collections.defaultdict(dict)
    rate = next(name for name in _RATES if name in record["rows"][0])
    for row in record["rows"]:
        found = _LENGTH.search(row["case"])
        if found is None:
            continue
        kind, length = _LENGTH.sub("", row["case"]), int(found[1])
        lines[kind].setdefault(length, row[rate])
        for key in (k for k in row if k.startswith("x ")):
            lines[f"{kind}, {key[2:]}"].setdefault(length, row[rate] / row[key])
    figure, axis = plt.subplots(figsize=(8, 4.5))
    colors: dict[str, Any] = {}
    for name, points in lines.items():
        kind, _, peer = name.partition(", ")
        if len(points) < 2:
            continue
        (line,) = axis.plot(
            *zip(*sorted(points.items()), strict=True),
            marker=None if peer else "o",
            linestyle="--" if peer else "-",
            color=colors.get(kind),
            label=name,
        )
        colors[kind] = line.get_color()
    axis.set_xscale("log", base=2)
    axis.set_xlabel("keys of a sequence")
    axis.set_ylabel(rate)
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=7)
    axis.set_title(f"{record['card']}, {record['date']}, {record['commit']}"[:90], fontsize=8)
    return _save(figure, path.with_name(f"{path.stem}_length.png"))


def _save(figure: Any, target: Path) -> Path:
    figure.tight_layout()
    figure.savefig(target, dpi=80)
    plt.close(figure)
    return target


if __name__ == "__main__":
    for source in sorted(FOLDER.glob("*.json")):
        print(source.name, "->", draw(source))
        if source.stem in _OVER_LENGTH:
            print(source.name, "->", draw_over_length(source))
