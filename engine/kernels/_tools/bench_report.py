"""What `bench` measured, and how it is shown."""

from __future__ import annotations

import datetime
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError
from engine.kernels._tools.profile_report import ProfileReport
from engine.kernels._tools.roofline import Peaks, Roof
from engine.kernels._tools.table import html_table, text_table
from engine.testing.bench_case import Measurement
from engine.testing.timing import Timing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["BenchReport", "BenchRow"]

_MAX_FRACTION = 1.02  # share of the roof; more is no measuring error


@dataclass(frozen=True)
class BenchRow:
    """One measured call.

    Attributes
    ----------
    case : str
        Sizes and dtype.
    measured : Measurement or None
        None if the kernel's result is wrong.
    roof : Roof or None
        The card's limit; None on a CPU.
    notes : tuple of str
        What to know about the figures.
    wrong : str
        How the result differs from the reference; "" if it does not.
    """

    case: str
    measured: Measurement | None
    roof: Roof | None = None
    notes: tuple[str, ...] = ()
    wrong: str = ""

    @property
    def fraction(self) -> float | None:
        """Share of the card's peak: the time at the roof, divided by the measured one."""
        if self.measured is None or self.roof is None:
            return None
        return self.roof.seconds / self.measured.timing.median

    @property
    def is_impossible(self) -> bool:
        """Whether it is faster than the card can be: the stated bytes or operations are wrong."""
        return (self.fraction or 0) > _MAX_FRACTION

    def record(self) -> dict[str, Any]:
        """Return the row for JSON; a wrong kernel has no times."""
        if self.measured is None:
            return {"case": self.case, "wrong": self.wrong}
        row = self.measured.row()
        if self.roof is not None:
            row |= {"roof": self.roof.name, "of roof": self.fraction}
        timing = self.measured.timing
        row["samples"] = len(timing.samples)
        return row | ({"notes": list(self.notes)} if self.notes else {})


@dataclass(frozen=True)
class BenchReport:
    """The result of `bench`: `print` shows it, a notebook shows a table.

    Attributes
    ----------
    op : str
    device : str
        Name of the GPU, or of the CPU.
    rows : tuple of BenchRow
    peaks : Peaks or None
        Of the GPU; None on a CPU.
    copy_rate : float
        Bytes per second, read and written, of a large copy on this GPU; 0 on a CPU.
    compiled : ProfileReport or None
        On a CPU: what the compiler says about the kernel.
    """

    op: str
    device: str
    rows: tuple[BenchRow, ...]
    peaks: Peaks | None = None
    copy_rate: float = 0.0
    compiled: ProfileReport | None = None
    date: str = field(default_factory=lambda: datetime.date.today().isoformat())

    @property
    def ok(self) -> bool:
        """Whether every result is right, and no time is below what the card can do."""
        return not any(row.wrong or row.is_impossible for row in self.rows)

    def __str__(self) -> str:
        lines = [self._title(), *text_table(*self._table())]
        for row in self.rows:
            lines += [f"{row.case}: {note}" for note in _notes(row)]
        if self.compiled is not None:
            lines += ["", str(self.compiled)]
        return "\n".join([*lines, self._footer()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        notes = [f"{row.case}: {note}" for row in self.rows for note in _notes(row)]
        below = "<br>".join(html.escape(text) for text in (self._footer(), *notes))
        compiled = "" if self.compiled is None else f"<pre>{html.escape(str(self.compiled))}</pre>"
        return html_table(*self._table(), self._title()) + compiled + f"<p>{below}</p>"

    def record(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON: card, date, rows."""
        record: dict[str, Any] = {"card": self.device, "date": self.date, "op": self.op}
        if self.peaks is not None:
            record["peak GB/s"] = self.peaks.memory * 1e-9
            record["peak TFLOP/s"] = {k: rate * 1e-12 for k, rate in self.peaks.rates.items()}
            record["peaks"] = self.peaks.source
            record["copy GB/s"] = self.copy_rate * 1e-9
        return record | {"rows": [{"op": self.op, **row.record()} for row in self.rows]}

    def plot(self, file: str | Path | None = None) -> Figure:
        """Draw a roofline: a point for each case and rival, below the roofs of the card.

        Parameters
        ----------
        file : path, optional
            Picture to write; its ending selects the format.

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        ConfigError
            If matplotlib is not installed, there is no GPU, or the operations are not stated.
        """
        found = [row.measured for row in self.rows if row.measured and row.measured.case.flops]
        if self.peaks is None:
            raise ConfigError("plot: a roofline has the limits of a GPU; this report is of a CPU")
        if not found:
            raise ConfigError(f"plot: the definition of {self.op} must state flops=")
        try:
            # Imported lazily: matplotlib is an extra.
            from engine.kernels._tools import roofline_plot
        except ImportError as error:
            raise ConfigError(
                f"plot needs matplotlib ({error}); install it with: pip install 'rawengine[bench]'"
            ) from error
        title = f"{self.op} on {self.device}, {self.date}"
        return roofline_plot.draw(title, self.peaks, self.copy_rate, found, file)

    def _title(self) -> str:
        if self.peaks is None:
            return f"{self.op}: the reference in NumPy on {self.device}"
        return (
            f"{self.op} on {self.device}: {self.peaks.memory * 1e-12:.3g} TB/s, "
            f"{self.peaks.rate('bfloat16') * 1e-12:.3g} TFLOP/s in 16 bits, "
            f"{self.peaks.rate('float32') * 1e-12:.3g} in float32 ({self.peaks.source}); "
            f"a copy reaches {self.copy_rate * 1e-12:.3g} TB/s"
        )

    def _footer(self) -> str:
        if self.peaks is None:
            return "us: median, first and third quartile. The kernel is measured on a GPU."
        return (
            "us: median, first and third quartile of the replays of a CUDA graph, without launch "
            "overhead; inputs rotate, so that L2 is cold. GB/s and TFLOP/s count what the "
            "definition states. x: the time to the left, divided by the kernel's"
        )

    def _table(self) -> tuple[Sequence[str], list[Sequence[str]]]:
        shown = [row for row in self.rows if row.measured is not None]
        has_flops = self.peaks is not None and any(
            row.measured and row.measured.case.flops for row in shown
        )
        rivals = list(
            dict.fromkeys(
                name
                for row in shown
                for name, timing in _rivals(row).items()
                if isinstance(timing, Timing)
            )
        )
        heads = ["case", "us", "quartiles", "GB/s", *["TFLOP/s"] * has_flops]
        heads += ["of the peak"] * (self.peaks is not None)
        heads += [head for name in rivals for head in (f"{name} us", "x")]
        return heads, [self._cells(row, has_flops, rivals) for row in self.rows]

    def _cells(self, row: BenchRow, has_flops: bool, rivals: Sequence[str]) -> list[str]:
        found = row.measured
        if found is None:
            num_more = has_flops + (self.peaks is not None) + 2 * len(rivals)
            return [row.case, "wrong", "", "", *[""] * num_more]
        low, high = found.timing.quartiles
        cells = [row.case, _digits(found.timing.median * 1e6)]
        cells += [f"{_digits(low * 1e6)}..{_digits(high * 1e6)}", _digits(found.gbytes_per_s)]
        if has_flops:
            cells.append(_digits(found.tflops) if found.case.flops else "")
        if self.peaks is not None:
            cells.append(_share_text(row))
        for name in rivals:
            rival = _rivals(row).get(name)
            cells += _rival_cells(rival, found.timing.median)
        return cells


def _rivals(row: BenchRow) -> Mapping[str, Timing | str]:
    return row.measured.rivals if row.measured is not None else {}


def _rival_cells(rival: Timing | str | None, seconds: float) -> list[str]:
    if not isinstance(rival, Timing):
        return ["", ""]
    return [_digits(rival.median * 1e6), _digits(rival.median / seconds)]


def _notes(row: BenchRow) -> list[str]:
    if row.wrong:
        return [f"wrong, so its time is no result; engine kernels check says more. {row.wrong}"]
    notes = list(row.notes)
    if row.is_impossible and row.roof is not None:
        notes.insert(
            0,
            f"{row.fraction:.0%} of the card's {row.roof.name} peak is impossible: nbytes or flops "
            "of the definition are too large, or the data came from L2",
        )
    notes += [f"no {name}: {why}" for name, why in _rivals(row).items() if isinstance(why, str)]
    return notes + [
        f"{name} cannot be captured in a CUDA graph and was launched call by call: a time of a few "
        "microseconds is mostly launch overhead"
        for name, rival in _rivals(row).items()
        if isinstance(rival, Timing) and rival.has_launches
    ]


def _share_text(row: BenchRow) -> str:
    if row.fraction is None or row.roof is None:
        return ""
    share = f"{row.fraction:.0%}" if row.fraction >= 0.01 else "<1%"
    return f"{share} {row.roof.name}"


def _digits(value: float) -> str:
    """Return three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
