"""Owns one append: rows in, checked, stamped, written and committed; must not know who may open a store."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trajstore.batch import TrajectoryBatch
from trajstore.codec import Nulls, cache_refs_left_out, check, conform, encode, id_hashes
from trajstore.errors import InputError, ValidationError, is_refusal
from trajstore.store import side
from trajstore.store.datafile import DataFile
from trajstore.store.files import FileWriter, storage_errors
from trajstore.store.place import Place
from trajstore.store.side import Refused
from trajstore.store.table import Table
from trajstore.trajectory import Trajectory

OnError = Literal["raise", "skip", "quarantine"]
Appendable: TypeAlias = TrajectoryBatch | pa.RecordBatch | pa.Table | Iterable[Trajectory]

CHUNK_ROWS = 4096
CHUNK_TOKENS = 1 << 22
FILE_BYTES = 256 << 20
_SEQ_BITS = 32
STAMPS = frozenset({"ingested_at", "writer_id", "writer_seq", "ingest_snapshot"})
"""Columns that only the store fills."""


@dataclass(frozen=True)
class Commit:
    """What one append did.

    Attributes:
        snapshot: the snapshot it made, or the newest one when nothing was added.
        rows: rows added.
        bytes: bytes of data files added.
        already_in: whether this writer's batch had been committed before.
        refused: the rows that were left out, with their reasons; with "quarantine" they are set aside.
        not_finite: rows with a NaN or an infinity, by column.
        cache_refs_left_out: rows that lost an object in `kv_cache_ref` that is not a string.
    """

    snapshot: int
    rows: int
    bytes: int
    already_in: bool
    refused: tuple[Refused, ...]
    not_finite: dict[str, int]
    cache_refs_left_out: int = 0

    @property
    def quarantined(self) -> int:
        """How many rows were refused; all of them are in the quarantine if that was asked for."""
        return len(self.refused)


def append(
    table: Table,
    rows: Appendable,
    writer_id: str,
    batch_no: int,
    *,
    nulls: Nulls,
    on_error: OnError,
    cache_refs_left_out: int = 0,
    resent: bool = True,
) -> Commit:
    """Adds rows to a table as the given batch of a writer, in one atomic commit.

    A row that breaks the contract fails the append ("raise"), is left out and told ("skip"), or is left out,
    told and put into the side table ("quarantine"); of Arrow data, such a row always fails it.
    `cache_refs_left_out` counts the objects in `kv_cache_ref` that Arrow data lost before it came here.
    `resent` is false where the caller's own handle numbers the batches, see `batches.is_known`.

    Raises:
        ValidationError: a row breaks the contract.
        SchemaError: Arrow data does not fit the table's columns.
        ConflictError: batch_no does not follow the writer's last one.
        StorageError: a file or the commit could not be written.
        UncertainCommitError: it is not known whether the commit got through.
    """
    stamp = _Stamp(writer_id, batch_no)
    table.refresh()
    if table.is_in(writer_id, batch_no, resent=resent):
        return Commit(table.snapshot, 0, 0, True, (), {})
    storable = pa.schema([f for f in table.schema if f.name not in STAMPS])
    refused: list[Refused] = []
    left_out = [cache_refs_left_out]
    with storage_errors(table.place), _Files(table.place, table.schema) as out:
        into = None if on_error == "raise" else refused
        for batch in _encoded(rows, storable, nulls, into, left_out):
            out.write(stamp(conform(batch, storable)))
        done = out.finish()
        if refused and on_error == "quarantine":
            side.quarantine(table.place, refused, writer_id, batch_no)
        out.kept = True
        snapshot = table.commit(
            done,
            writer_id=writer_id,
            batch_no=batch_no,
            cache_refs_left_out=sum(left_out),
            resent=resent,
        )
        out.kept = snapshot is not None
    if snapshot is None:
        return Commit(table.snapshot, 0, 0, True, tuple(refused), {})
    total = sum(file.bytes for file in done)
    return Commit(snapshot, stamp.rows, total, False, tuple(refused), out.not_finite, sum(left_out))


def _encoded(
    rows: Appendable,
    storable: pa.Schema,
    nulls: Nulls,
    refused: list[Refused] | None,
    left_out: list[int],
) -> Iterator[pa.RecordBatch]:
    if isinstance(rows, TrajectoryBatch):
        rows = rows.to_arrow()
    if isinstance(rows, (pa.Table, pa.RecordBatch)):
        yield from _checked(pa.table(rows) if isinstance(rows, pa.RecordBatch) else rows, storable)
        return
    offset = 0
    for chunk in _chunks(rows):
        yield from _encode(chunk, offset, nulls, refused)
        left_out.append(cache_refs_left_out(chunk))
        offset += len(chunk)


def _checked(table: pa.Table, storable: pa.Schema) -> Iterator[pa.RecordBatch]:
    unstamped = table.drop_columns([n for n in table.schema.names if n in STAMPS])
    offset = 0
    for batch in unstamped.to_batches(max_chunksize=CHUNK_ROWS):
        fitted = conform(batch, storable)
        try:
            check(fitted)
        except ValidationError as error:
            raise error.moved(offset) from None
        offset += batch.num_rows
        at = storable.get_field_index("id_hash")  # whatever it was given as
        yield fitted.set_column(at, storable.field(at), id_hashes(fitted["id"].to_pylist()))


def _chunks(rows: Iterable[Trajectory]) -> Iterator[list[Trajectory]]:
    """Chunks small enough to encode at once."""
    chunk: list[Trajectory] = []
    tokens = 0
    for row in rows:
        if not isinstance(row, Trajectory):
            raise InputError(
                f"found {type(row).__name__}, expected a Trajectory",
                hint="append trajectories, a TrajectoryBatch or Arrow data; dicts go through from_dict",
            )
        chunk.append(row)
        tokens += row.total_length
        if len(chunk) == CHUNK_ROWS or tokens >= CHUNK_TOKENS:
            yield chunk
            chunk, tokens = [], 0
    if chunk:
        yield chunk


def _encode(
    chunk: list[Trajectory], offset: int, nulls: Nulls, refused: list[Refused] | None
) -> Iterator[pa.RecordBatch]:
    """One record batch, or, when rows are quarantined, one for each run of good ones.

    Bad rows are found by halving, so that few of them cost few encodings.
    """
    try:
        yield encode(chunk, nulls=nulls)
    except ValidationError as error:
        if refused is None:
            raise error.moved(offset) from None
        if len(chunk) == 1:
            refused.append(_refusal(chunk[0], offset, error))
            return
        half = len(chunk) // 2
        yield from _encode(chunk[:half], offset, nulls, refused)
        yield from _encode(chunk[half:], offset + half, nulls, refused)


def _refusal(trajectory: Trajectory, row: int, error: ValidationError) -> Refused:
    return Refused(
        row=row,
        id=error.id,
        error=type(error).__name__,
        column=error.column,
        reason=error.reason,
        trajectory=json.dumps(trajectory.to_dict(), default=repr),
    )


class _Stamp:
    """Fills what only the store knows: ids of rows without one, who wrote them, in which order and when."""

    def __init__(self, writer_id: str, batch_no: int) -> None:
        self.writer_id = writer_id
        self.batch_no = batch_no
        self.rows = 0
        self.now = datetime.now(UTC)

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        count = batch.num_rows
        first = (self.batch_no << _SEQ_BITS) + self.rows
        ids = batch.column("id")
        nameless = pc.equal(ids, "")
        columns = {name: batch.column(name) for name in batch.schema.names}
        if pc.any(nameless).as_py():
            made = [self._id(self.rows + int(i)) for i in np.asarray(nameless).nonzero()[0]]
            columns["id"] = pc.replace_with_mask(ids, nameless, pa.array(made, pa.string()))
            columns["id_hash"] = id_hashes(columns["id"].to_pylist())
        columns["ingested_at"] = pa.array([self.now] * count, pa.timestamp("us", "UTC"))
        columns["writer_id"] = pa.array([self.writer_id] * count, pa.string())
        columns["writer_seq"] = pa.array(np.arange(first, first + count))
        columns["ingest_snapshot"] = pa.nulls(count, pa.int64())
        self.rows += count
        return pa.RecordBatch.from_pydict(columns)

    def _id(self, row: int) -> str:
        """The same name for the same row of a resent batch."""
        return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{self.writer_id}/{self.batch_no}/{row}"))


class _Files:
    """The data files of one append; removed again unless the log names them, or may do so."""

    def __init__(self, place: Place, schema: pa.Schema) -> None:
        self.place = place
        self.schema = schema
        self.kept = False
        self.not_finite: dict[str, int] = {}
        self._open: FileWriter | None = None
        self._done: list[DataFile] = []

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if self._open is not None:
            self._open.abort()
        if not self.kept or (error is not None and is_refusal(error)):
            for file in self._done:
                self.place.discard(file.name)

    def write(self, batch: pa.RecordBatch) -> None:
        if self._open is None:
            self._open = FileWriter(self.place, self.schema)
        self._open.write(batch.select(self.schema.names).cast(self.schema))
        for name, rows in _not_finite(batch):
            self.not_finite[name] = self.not_finite.get(name, 0) + rows
        if self._open.bytes_written >= FILE_BYTES:
            self._roll()

    def finish(self) -> list[DataFile]:
        if self._open is not None:
            self._roll()
        return self._done

    def _roll(self) -> None:
        assert self._open is not None
        self._done.append(self._open.close())
        self._open = None


def _not_finite(batch: pa.RecordBatch) -> Iterator[tuple[str, int]]:
    """Rows with a NaN or an infinity in each float column that has any."""
    for name in batch.schema.names:
        column = batch.column(name)
        listed = pa.types.is_list(column.type)
        if not pa.types.is_floating(column.type.value_type if listed else column.type):
            continue
        values = (column.flatten() if listed else column.drop_null()).to_numpy(zero_copy_only=False)
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(values.sum()):  # then so is each of them, and a sum is quickly made
                continue
        wild = ~np.isfinite(values)
        if wild.any():
            parents = column.value_parent_indices().to_numpy() if listed else np.arange(len(values))
            yield name, len(np.unique(parents[wild]))
