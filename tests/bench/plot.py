"""`python -m tests.bench.plot`: draw every result in docs/benchmarks as a picture beside it.

A file whose rows have a baseline ("x <name>") shows how many times faster ours is; one without
shows the share of the rate that memory allows, or operations a second.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"


def _series(rows: list[dict[str, Any]]) -> tuple[str, float | None, list[tuple[str, float]]]:
    """Return the axis label, a line to draw, and (name, value) a row."""
    ratios = sorted({key for row in rows for key in row if key.startswith("x ")})
    if ratios:
        key = ratios[0]
        values = [(f"{row['op']} {row['case']}", row[key]) for row in rows if key in row]
        return f"times faster than {key[2:]}", 1.0, values
    is_compute = all(row.get("TFLOP/s", 0.0) > 50 for row in rows)
    key = "TFLOP/s" if is_compute else "GB/s"
    return key, None, [(f"{row['op']} {row['case']}", row[key]) for row in rows]


def draw(path: Path) -> Path | None:
    """Draw one file; None where its rows are no timings of cases."""
    record = json.loads(path.read_text())
    rows = [row for row in record["rows"] if "case" in row and ("GB/s" in row)]
    if not rows:
        return None
    label, line, values = _series(rows)
    figure, axis = plt.subplots(figsize=(9, 1.2 + 0.22 * len(values)))
    names = [name for name, _ in values]
    axis.barh(range(len(values)), [value for _, value in values], color="#4477aa")
    axis.set_yticks(range(len(values)), names, fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel(label)
    if line is not None:
        axis.axvline(line, color="black", linewidth=0.8)
    axis.set_title(f"{record['card']}, {record['date']}, commit {record['commit']}", fontsize=9)
    figure.tight_layout()
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=80)
    plt.close(figure)
    return target


if __name__ == "__main__":
    for source in sorted(FOLDER.glob("*.json")):
        print(source.name, "->", draw(source))
