"""Owns numbers as a person reads them, and a table of them as HTML; knows no report."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import polars as pl

SHOWN_ROWS = 14
NOTHING = "–"
LONGEST_NAME = 20


def number(value: Any) -> str:
    """A number to three digits that matter."""
    if value is None or value != value:
        return NOTHING
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 1e9:
        return f"{value:.2e}"
    if value == 0 or 0.001 <= abs(value) < 1000:
        return f"{value:.3f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1e}"


def tokens(value: Any) -> str:
    """A number of tokens, or a mean of them."""
    if value is None or value != value:
        return NOTHING
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def percent(value: Any) -> str:
    """A share."""
    return NOTHING if value is None or value != value else f"{value:.1%}"


def short(value: float) -> str:
    """A large number with its prefix."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 1000 or unit == "T":
            return f"{value:.0f} {unit}" if unit and value >= 100 else f"{value:,.3g}{unit and ' ' + unit}"
        value /= 1000
    raise AssertionError


def size(count: int) -> str:
    """Bytes with their prefix."""
    text = short(count)
    return f"{text}B" if " " in text else f"{text} B"


def cut(name: str) -> str:
    """A name that fits a legend or the head of a column: its two ends, which tell it apart from others."""
    half = LONGEST_NAME // 2
    return name if len(name) <= LONGEST_NAME else f"{name[:half].rstrip()}…{name[1 - half :].lstrip()}"


def numbers(table: pl.DataFrame, columns: Mapping[str, tuple[str, Any]], *, last: bool = False) -> str:
    """A table of these columns: title to (name, format); long ones show their first or last rows."""
    shown = table.tail(SHOWN_ROWS) if last else table.head(SHOWN_ROWS)
    texts = [title for title, (name, _) in columns.items() if table.schema[name] == pl.String]
    head = "".join(f"<th{' class=text' if title in texts else ''}>{escape(title)}</th>" for title in columns)
    lines = []
    for row in shown.iter_rows(named=True):
        cells = (
            f"<td class=text>{escape(form(row[name]))}</td>"
            if title in texts
            else f"<td>{form(row[name])}</td>"
            for title, (name, form) in columns.items()
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    left = len(table) - len(shown)
    more = (
        f'<p class="more">{"the last" if last else "the first"} {len(shown)} of {len(table):,}</p>'
        if left
        else ""
    )
    return f'<div class="numbers"><table><tr>{head}</tr>{"".join(lines)}</table>{more}</div>'
