"""Owns what one data file is to the log and to its reader; knows neither of the two."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class DataFile:
    """One immutable file of a table.

    Attributes:
        name: path below the table's folder.
        rows: number of rows.
        bytes: size on disk.
        low, high: least and greatest value of each integer column that has one.
        nulls: null count of each integer column.
    """

    name: str
    rows: int
    bytes: int
    low: dict[str, int] = field(default_factory=dict)
    high: dict[str, int] = field(default_factory=dict)
    nulls: dict[str, int] = field(default_factory=dict)
