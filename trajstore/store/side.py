"""Owns side tables inside a store: quarantine, tags, training ledger, buffer state; knows no codec.

A side table is a table of its own in `_trajstore/<name>/`: vacuum leaves names with an underscore alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from numpy.typing import NDArray

from trajstore.errors import (
    ConflictError,
    CorruptFileError,
    StoreExistsError,
    TrajstoreError,
    is_refusal,
)
from trajstore.schema import list_of
from trajstore.store import files
from trajstore.store.datafile import DataFile, LogFile
from trajstore.store.files import FileWriter, storage_errors
from trajstore.store.place import Place
from trajstore.store.table import Table

_TIME = pa.timestamp("us", "UTC")


def _required(*fields: tuple[str, pa.DataType]) -> list[pa.Field]:
    return [pa.field(name, kind, False) for name, kind in fields]


QUARANTINE = pa.schema(
    [
        *_required(("writer_id", pa.string()), ("batch_no", pa.int64()), ("row", pa.int64())),
        *_required(("id", pa.string()), ("error", pa.string())),
        pa.field("column", pa.string()),
        *_required(("reason", pa.string()), ("trajectory", pa.string()), ("quarantined_at", _TIME)),
    ]
)
TAGS = pa.schema(_required(("name", pa.string()), ("snapshot", pa.int64()), ("tagged_at", _TIME)))
LEDGER = pa.schema(
    [
        *_required(("step", pa.int64()), ("rank", pa.int32()), ("micro_batch", pa.int32())),
        *_required(("position", pa.int32()), ("id", pa.string()), ("snapshot", pa.int64())),
        *_required(("recorded_at", _TIME)),
    ]
)

BUFFER = pa.schema(
    [
        *_required(("saved_at", _TIME), ("note", pa.string())),
        pa.field("id_hashes", list_of(pa.int64()), False),
        pa.field("times_sampled", list_of(pa.int32()), False),
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


def quarantine(store: Place, refused: Sequence[Refused], writer_id: str, batch_no: int) -> None:
    """Commits refused rows with their reasons; a resend of the same batch adds nothing."""
    now = datetime.now(UTC)
    rows = [vars(r) | {"writer_id": writer_id, "batch_no": batch_no, "quarantined_at": now} for r in refused]
    # Its own key: a writer's good batches and its quarantined ones do not come in step.
    _append(store, "quarantine", QUARANTINE, rows, key=f"{writer_id}/{batch_no}")


def quarantined(store: Place) -> pa.Table:
    """All refused rows with their reasons, in order of arrival; empty when there are none."""
    return _read(store, "quarantine", QUARANTINE)


def tag(store: Place, name: str, snapshot: int) -> None:
    """Names a snapshot.

    Raises:
        ConflictError: the name is that of another snapshot.
    """
    known = tags(store).get(name)
    if known == snapshot:
        return
    if known is not None:
        raise ConflictError(f"tag {name!r} is at snapshot {known}", hint="choose another name")
    row = {"name": name, "snapshot": snapshot, "tagged_at": datetime.now(UTC)}
    if not _append(store, "tags", TAGS, [row], key=f"tag/{name}"):
        tag(store, name, snapshot)  # another process was first: it may have meant the same


def tags(store: Place) -> dict[str, int]:
    """Snapshots by their names."""
    return {row["name"]: row["snapshot"] for row in _read(store, "tags", TAGS).to_pylist()}


def record_step(
    store: Place, step: int, ids: Sequence[str], *, rank: int, micro_batch: int, snapshot: int
) -> None:
    """Notes which rows a rank trained on in a step, in order; a second note of the same adds nothing."""
    now = datetime.now(UTC)
    rows = [
        {
            "step": step,
            "rank": rank,
            "micro_batch": micro_batch,
            "position": position,
            "id": id,
            "snapshot": snapshot,
            "recorded_at": now,
        }
        for position, id in enumerate(ids)
    ]
    _append(store, "ledger", LEDGER, rows, key=f"{step}/{rank}/{micro_batch}")


def ledger(store: Place) -> pa.Table:
    """What was trained on, by step, rank, micro-batch and position."""
    order = [(name, "ascending") for name in ("step", "rank", "micro_batch", "position")]
    return _read(store, "ledger", LEDGER).sort_by(order)


def recorded(store: Place) -> pa.Table:
    """The ledger in the order in which it was written: what was there before stays where it is."""
    return _read(store, "ledger", LEDGER)


def save_buffer(store: Place, note: str, id_hashes: NDArray[Any], times_sampled: NDArray[Any]) -> None:
    """Puts a buffer's state in the place of the one before, another buffer's too: the last one counts.

    Args:
        store: where the store is.
        note: JSON that only the buffer reads.
        id_hashes, times_sampled: [N] one for each row it holds.
    """
    place, table = _table(store, "buffer", BUFFER)
    columns = [
        pa.array([datetime.now(UTC)], _TIME),
        pa.array([note]),
        pa.ListArray.from_arrays([0, len(id_hashes)], pa.array(id_hashes), BUFFER.field(2).type),
        pa.ListArray.from_arrays([0, len(times_sampled)], pa.array(times_sampled), BUFFER.field(3).type),
    ]
    with FileWriter(place, BUFFER) as writer:
        writer.write(pa.record_batch(columns, schema=BUFFER))
        file = writer.close()
    try:
        old = _replaced(table, file)
    except TrajstoreError as error:
        if is_refusal(error):
            place.discard(file.name)
        raise
    for gone in old:
        place.discard(gone.name)


def _replaced(table: Table, file: DataFile) -> list[LogFile]:
    """Puts a file in the place of all that are there, however often another process does so first."""
    while True:
        old = table.files()
        try:
            table.swap(old, [file], operation="buffer")
        except ConflictError:
            table.refresh()
            if _names(table) == {gone.name for gone in old}:  # it was not that
                raise
        else:
            return old


def _names(table: Table) -> set[str]:
    return {file.name for file in table.files()}


def buffer_state(store: Place) -> tuple[str, NDArray[Any], NDArray[Any]] | None:
    """Note, id hashes and counts of the state saved last; None when there is none."""
    while True:
        before = _place(store, "buffer")
        names = _names(Table.open(before)) if before.is_table() else set()
        try:
            found = _read(store, "buffer", BUFFER)
        except CorruptFileError:
            if _names(Table.open(before)) == names:
                raise
            continue  # another one has taken its place meanwhile
        if not found.num_rows:
            return None
        # Two buffers that both saved their first state leave two.
        (last,) = found.sort_by([("saved_at", "descending")]).slice(0, 1).to_batches()
        hashes, times = (last.column(name).flatten().to_numpy() for name in BUFFER.names[2:])
        return last.column("note")[0].as_py(), hashes, times


def kept_snapshots(store: Place) -> set[int]:
    """Snapshots that a tag or the ledger refers to."""
    return {*tags(store).values(), *_read(store, "ledger", LEDGER)["snapshot"].to_pylist()}


def _place(store: Place, name: str) -> Place:
    return store.child(f"_trajstore/{name}")


def _table(store: Place, name: str, schema: pa.Schema) -> tuple[Place, Table]:
    place = _place(store, name)
    if not place.is_table():
        with suppress(StoreExistsError):  # another process made it at the same time
            Table.create(place, schema)
    return place, Table.open(place)


def _append(
    store: Place, name: str, schema: pa.Schema, rows: Sequence[Mapping[str, Any]], *, key: str
) -> bool:
    """Adds rows once and returns whether it did: the same key again adds nothing."""
    place, table = _table(store, name, schema)
    if table.committed_batch(key) is not None:
        return False
    with storage_errors(place), FileWriter(place, schema) as writer:
        writer.write(pa.RecordBatch.from_pylist(list(rows), schema))
        file = writer.close()
    try:
        added = table.commit([file], writer_id=key, batch_no=0, operation=name) is not None
    except TrajstoreError as error:
        if is_refusal(error):
            place.discard(file.name)
        raise
    if not added:
        place.discard(file.name)
    return added


def _read(store: Place, name: str, schema: pa.Schema) -> pa.Table:
    place = _place(store, name)
    if not place.is_table():
        return schema.empty_table()
    parts = [files.read(place, file, schema) for file in Table.open(place).files()]
    return pa.concat_tables(parts) if parts else schema.empty_table()
