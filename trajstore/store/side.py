"""Owns side tables inside a store: the quarantine of rows that were refused; knows no codec.

A side table is a table of its own in `_trajstore/<name>/`: vacuum leaves names with an underscore alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from trajstore.store import files
from trajstore.store.files import FileWriter
from trajstore.store.table import Table, is_store

QUARANTINE = "quarantine"

QUARANTINE_SCHEMA = pa.schema(
    [
        pa.field("writer_id", pa.string(), False),
        pa.field("batch_no", pa.int64(), False),
        pa.field("row", pa.int64(), False),
        pa.field("id", pa.string(), False),
        pa.field("error", pa.string(), False),
        pa.field("column", pa.string()),
        pa.field("reason", pa.string(), False),
        pa.field("trajectory", pa.string(), False),
        pa.field("quarantined_at", pa.timestamp("us", "UTC"), False),
    ]
)


@dataclass(frozen=True)
class Refused:
    """One row that was not stored.

    Attributes:
        row: its position in what was appended.
        id: its id, "" when it has none.
        error: class of the error.
        column: the column at fault, when one is.
        reason: what is wrong with it.
        trajectory: the row itself, as JSON where it has a JSON form.
    """

    row: int
    id: str
    error: str
    column: str | None
    reason: str
    trajectory: str


def side_folder(store: Path, name: str) -> Path:
    """Where a store keeps the side table of that name."""
    return store / "_trajstore" / name


def quarantine(store: Path, refused: Sequence[Refused], writer_id: str, batch_no: int) -> None:
    """Commits refused rows with their reasons; a resend of the same batch adds nothing."""
    folder = side_folder(store, QUARANTINE)
    table = Table.open(folder) if is_store(folder) else Table.create(folder, QUARANTINE_SCHEMA)
    now = datetime.now(UTC)
    rows = [vars(r) | {"writer_id": writer_id, "batch_no": batch_no, "quarantined_at": now} for r in refused]
    with FileWriter(folder, QUARANTINE_SCHEMA) as writer:
        writer.write(pa.RecordBatch.from_pylist(rows, QUARANTINE_SCHEMA))
        file = writer.close()
    # Its own numbering: a writer's good batches and its quarantined ones do not come in step.
    key = f"{writer_id}/{batch_no}"
    if table.commit([file], writer_id=key, batch_no=0, operation="quarantine") is None:
        (folder / file.name).unlink()


def quarantined(store: Path) -> pa.Table:
    """All refused rows with their reasons, in order of arrival; empty when there are none."""
    folder = side_folder(store, QUARANTINE)
    if not is_store(folder):
        return QUARANTINE_SCHEMA.empty_table()
    table = Table.open(folder)
    parts = [files.read(folder, file, QUARANTINE_SCHEMA) for file in table.files()]
    return pa.concat_tables(parts) if parts else QUARANTINE_SCHEMA.empty_table()
