"""`python -m tests.bench.plot`: draw every result in docs/benchmarks as a picture beside it.

Rows with a peer's time in the same run become a ratio, larger is better and 1 is a tie; others the
rate they reached. Attention is drawn over the length too (`<name>_length.png`), beside the peer,
and all of it over its operations per byte, under the card's roofs (`attention_roofline.png`). Files
of what was tried (`_tried`) are not drawn.
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
_ROOFS = {"bfloat16, 989 TFLOP/s": 989.0, "e4m3, 1,979 TFLOP/s": 1979.0}  # H200's datasheet, dense
_BANDWIDTH = 4.8  # TB/s, likewise
_ROOFLINE = {
    "attention_prefill_sm90": "forward",
    "attention_prefill_256": "forward, D = 256",
    "attention_prefill_fp8": "forward, 8 bits",
    "attention_backward": "backward",
    "attention_decode": "decoding",
}
_DECODE_INTENSITY = 4.0  # operations per byte of K and V for one query token: 4 heads share them


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


def _intensity(row: dict[str, Any]) -> tuple[float, float] | None:
    """Return a row's (operations per byte, TFLOP/s): bytes are counted once, as the bench does."""
    if "TFLOP/s" in row and "GB/s" in row:
        return row["TFLOP/s"] / row["GB/s"] * 1e3, row["TFLOP/s"]
    tokens = re.search(r" Q(\d+)$", row["case"])
    if tokens is None or "GB/s" not in row:
        return None
    intensity = _DECODE_INTENSITY * int(tokens[1])
    return intensity, intensity * row["GB/s"] * 1e-3


def draw_roofline() -> Path:
    """Draw what every attention kernel reaches over its operations per byte."""
    figure, axis = plt.subplots(figsize=(8, 5))
    for (stem, label), marker in zip(_ROOFLINE.items(), "osD^v", strict=True):
        rows = json.loads((FOLDER / f"{stem}.json").read_text())["rows"]
        rows = [row for row in rows if row.get("version") == rows[0].get("version")]
        points = [point for row in rows if (point := _intensity(row)) is not None]
        axis.plot(*zip(*points, strict=True), marker, markersize=4, label=label)
    for style, (label, roof) in zip(("-", "--"), _ROOFS.items(), strict=True):
        edge = roof / _BANDWIDTH
        label = f"{_BANDWIDTH} TB/s; {label}"
        axis.plot((1, edge, 1e5), (_BANDWIDTH, roof, roof), style, color="black", label=label)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("operations per byte that must move")
    axis.set_ylabel("TFLOP/s")
    axis.legend(fontsize=7)
    axis.set_title("Attention on one H200 under its datasheet's roofs", fontsize=9)
    return _save(figure, FOLDER / "attention_roofline.png")


def _save(figure: Any, target: Path) -> Path:
    figure.tight_layout()
    figure.savefig(target, dpi=80)
    plt.close(figure)
    return target


if __name__ == "__main__":
    for source in sorted(FOLDER.glob("*.json")):
        if source.stem.endswith("_tried"):
            continue
        print(source.name, "->", draw(source))
        if source.stem in _OVER_LENGTH:
            print(source.name, "->", draw_over_length(source))
    print("attention ->", draw_roofline())
