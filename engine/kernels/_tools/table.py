"""Tables of text and HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence

__all__ = ["html_table", "text_table"]


def text_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return aligned lines: the first column to the left, numbers to the right.

    Examples
    --------
    >>> print("\\n".join(text_table(("case", "us"), [("N=8", "1.5"), ("N=16", "12")])))
    case   us
    N=8   1.5
    N=16   12
    """
    table = [heads, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(heads))]
    is_text = [
        not all(row[column][:1].isdigit() or not row[column] for row in rows)
        for column in range(len(heads))
    ]
    lines = []
    for row in table:
        cells = zip(row, widths, is_text, strict=True)
        lines.append("  ".join(f"{c:{w}}" if left else f"{c:>{w}}" for c, w, left in cells))
    return [line.rstrip() for line in lines]


def html_table(heads: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """Return an HTML table."""
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(text)}</td>' for text in row)}</tr>" for row in rows
    )
    return f"<table><caption>{html.escape(caption)}</caption><tr>{head}</tr>{body}</table>"
