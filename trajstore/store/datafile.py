"""Owns what one data file is to the log and to its reader, and durability on disk; knows neither."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path


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


def sync(path: Path) -> None:
    """Makes the bytes of a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
