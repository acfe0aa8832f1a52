"""Owns what the shell prints: tables for people, JSON for scripts, one line and a hint for errors."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from trajstore.errors import TrajstoreError

if TYPE_CHECKING:
    from trajstore.query.checks import Finding

NO_WIDTH_LIMIT = 100_000
CELL = 60
TERMINAL_ROWS = 200


def console(*, stderr: bool = False) -> Console:
    """A console that obeys NO_COLOR, and does not cut lines off for a width that a pipe does not have."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else NO_WIDTH_LIMIT
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=not stream.isatty())


def table(rows: Sequence[Mapping[str, Any]], *, columns: Sequence[str] = (), title: str = "") -> None:
    """Prints rows as a table; numbers to the right, long text cut on a terminal only."""
    names = list(columns) or (list(rows[0]) if rows else [])
    out = console()
    made = Table(title=title or None, title_justify="left", header_style="bold", title_style="bold")
    for name in names:
        numeric = bool(rows) and all(isinstance(r[name], (int, float, type(None))) for r in rows)
        made.add_column(name, justify="right" if numeric else "left", overflow="fold")
    shown = rows[:TERMINAL_ROWS] if out.is_terminal else rows
    for row in shown:
        made.add_row(*(cell(row[name], cut=out.is_terminal) for name in names))
    out.print(made)
    if len(shown) < len(rows):
        out.print(f"{len(rows) - len(shown):,} more rows; a pipe or --json gets all of them")


def pairs(title: str, values: Mapping[str, Any]) -> None:
    """Prints names and values below one another."""
    made = Table(title=title, show_header=False, box=None, title_justify="left", title_style="bold")
    made.add_column(style="dim")
    made.add_column()
    for name, value in values.items():
        made.add_row(name, cell(value, cut=False))
    console().print(made)


def cell(value: Any, *, cut: bool) -> str:
    """One value as text; square brackets of data are not markup."""
    text = "" if value is None else str(value)
    if cut and len(text) > CELL:
        text = text[: CELL - 1] + "…"
    return text.replace("\n", "⏎").replace("[", "\\[")


def as_json(value: Any) -> None:
    """Prints one JSON document; NaN, infinities and bytes (in hex) as strings, for every parser."""
    print(json.dumps(plain(value), indent=1, default=str))


def plain(value: Any) -> Any:
    """The value with what JSON has no form for written out."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


LEVEL_STYLES = {"error": "bold red", "warning": "yellow", "note": "blue"}
SHOWN_IDS = 3


def findings(found: Sequence[Finding], *, rows: int) -> None:
    """Prints what the doctor found in so many rows: a level, what it is, which rows, what to do."""
    out = console()
    if not found:
        out.print("nothing found that a trainer should know" if rows else "there are no rows")
    for one in found:
        style = LEVEL_STYLES[one.level]
        ids = ", ".join(one.ids[:SHOWN_IDS]) + (", …" if one.rows > SHOWN_IDS else "")
        out.print(
            f"[{style}]{one.level}[/] {cell(one.what, cut=False)} [dim]\\[{one.check}][/]", highlight=False
        )
        out.print(f"  {cell(one.next, cut=False)}\n  [dim]rows {cell(ids, cut=False)}[/]", highlight=False)


def error(problem: TrajstoreError) -> None:
    """Prints an error as one line and its hint as another."""
    out = console(stderr=True)
    out.print("[bold red]error:[/] " + cell(" ".join(problem.message.split()), cut=False))
    if problem.hint:
        out.print("[bold]hint:[/] " + cell(problem.hint, cut=False))


def size(count: int) -> str:
    """Bytes as a person reads them."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
