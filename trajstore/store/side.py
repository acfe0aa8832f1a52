"""Owns side tables inside a store: the quarantine of rows that were refused; knows no codec.

A side table is a table of its own in `_trajstore/<name>/`: vacuum leaves names with an underscore alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa

from trajstore.store import files
from trajstore.store.files import FileWriter
from trajstore.store.place import Place
from trajstore.store.table import Table

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


def side_place(store: Place, name: str) -> Place:
    """Where a store keeps the side table of that name."""
    return store.child(f"_trajstore/{name}")


def quarantine(store: Place, refused: Sequence[Refused], writer_id: str, batch_no: int) -> None:
    """Commits refused rows with their reasons; a resend of the same batch adds nothing."""
    place = side_place(store, QUARANTINE)
    table = Table.open(place) if place.is_table() else Table.create(place, QUARANTINE_SCHEMA)
    now = datetime.now(UTC)
    rows = [vars(r) | {"writer_id": writer_id, "batch_no": batch_no, "quarantined_at": now} for r in refused]
    with FileWriter(place, QUARANTINE_SCHEMA) as writer:
        writer.write(pa.RecordBatch.from_pylist(rows, QUARANTINE_SCHEMA))
        file = writer.close()
    # Its own numbering: a writer's good batches and its quarantined ones do not come in step.
    key = f"{writer_id}/{batch_no}"
    if table.commit([file], writer_id=key, batch_no=0, operation="quarantine") is None:
        place.delete(file.name)


def quarantined(store: Place) -> pa.Table:
    """All refused rows with their reasons, in order of arrival; empty when there are none."""
    place = side_place(store, QUARANTINE)
    if not place.is_table():
        return QUARANTINE_SCHEMA.empty_table()
    table = Table.open(place)
    parts = [files.read(place, file, QUARANTINE_SCHEMA) for file in table.files()]
    return pa.concat_tables(parts) if parts else QUARANTINE_SCHEMA.empty_table()
