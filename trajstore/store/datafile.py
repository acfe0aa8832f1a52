"""Owns what the log says of data files and snapshots, as plain values; knows no log and no file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any


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


@dataclass(frozen=True)
class Snapshot:
    """One committed state of a table.

    Attributes:
        snapshot: its number.
        timestamp: when it was committed, UTC.
        operation: what was done: create, append, ...
        rows: rows it added.
        writer_id: who did it, when known.
        cache_refs_left_out: rows that lost an object in `kv_cache_ref` that is not a string.
    """

    snapshot: int
    timestamp: datetime
    operation: str
    rows: int
    writer_id: str | None
    cache_refs_left_out: int = 0


@dataclass(frozen=True)
class LogFile(DataFile):
    """A data file as the log has it; `snapshot` is the one that brought it."""

    snapshot: int = 0


def read_snapshot(entry: Mapping[str, Any]) -> Snapshot:
    """A snapshot from an entry of the log's history."""
    note = json.loads(entry.get("trajstore", "{}"))
    return Snapshot(
        snapshot=entry["version"],
        timestamp=datetime.fromtimestamp(entry["timestamp"] / 1000, UTC),
        operation=note.get("operation", entry.get("operation", "").lower()),
        rows=note.get("rows", 0),
        writer_id=note.get("writer_id"),
        cache_refs_left_out=note.get("cache_refs_left_out", 0),
    )


def statistics(file: DataFile) -> str:
    """What an add action says of a file's rows."""
    return json.dumps(
        {"numRecords": file.rows, "minValues": file.low, "maxValues": file.high, "nullCount": file.nulls}
    )


def log_file(action: Mapping[str, Any], snapshot: int) -> LogFile:
    """A data file from a flattened add action."""

    def named(prefix: str) -> dict[str, Any]:
        found = ((k.removeprefix(prefix), v) for k, v in action.items() if k.startswith(prefix))
        return {name: value for name, value in found if value is not None}

    return LogFile(
        name=action["path"],
        rows=action["num_records"],
        bytes=action["size_bytes"],
        low=named("min."),
        high=named("max."),
        nulls=named("null_count."),
        snapshot=snapshot,
    )
