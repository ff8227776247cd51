"""Tables of `engine ls` and `engine ps`."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["print_table"]


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells in columns that are as wide as their longest cell."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for cells in (heads, *rows):
        print("  ".join(map(str.ljust, cells, widths)).rstrip())
