"""Owns what a finding is and how it is made from rows; knows no check.

A level says what happens when one trains on the rows as they are. `error`: the gradient is wrong.
`warning`: it may be biased, or data is lost. `note`: worth knowing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import polars as pl

from trajstore.query.survey import Survey

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True)
class Finding:
    """One thing about the stored rows that a trainer should know.

    Attributes:
        level: "error", "warning" or "note".
        check: name of the check; it stays the same from release to release.
        what: what was found, with numbers.
        next: what to do.
        rows: how many rows it concerns.
        ids: all of them, in order of arrival.
    """

    level: Level
    check: str
    what: str
    next: str
    rows: int
    ids: tuple[str, ...]


Check = Callable[[Survey], Iterator[Finding]]


def found(level: Level, check: str, rows: pl.DataFrame, what: str, next: str) -> Iterator[Finding]:
    """A finding about these rows, none when there are none; `{n}` in `what` is their number."""
    if len(rows):
        n = f"{len(rows):,} row{'s' if len(rows) > 1 else ''}"
        yield Finding(level, check, what.replace("{n}", n), next, len(rows), tuple(rows["id"].to_list()))


def where(survey: Survey, condition: pl.Expr) -> pl.DataFrame:
    """Rows for which the condition is true; null is not."""
    return survey.frame.filter(condition.fill_null(False))
