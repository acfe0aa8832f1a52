"""Owns TrajectoryStore, the handle users hold: create, open, append, scan, at; knows no file format."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trajstore.batch import TrajectoryBatch
from trajstore.codec import Nulls, check, conform, encode, id_hashes
from trajstore.errors import InputError, ValidationError
from trajstore.schema import Column, extra_columns, with_extra
from trajstore.store import files, side
from trajstore.store.datafile import DataFile
from trajstore.store.files import FileWriter
from trajstore.store.place import Place
from trajstore.store.scan import Scan
from trajstore.store.side import Refused
from trajstore.store.table import Snapshot, Table
from trajstore.trajectory import Trajectory

OnError = Literal["raise", "quarantine"]
Appendable: TypeAlias = TrajectoryBatch | pa.RecordBatch | pa.Table | Iterable[Trajectory]

CHUNK_ROWS = 4096
CHUNK_TOKENS = 1 << 22
FILE_BYTES = 256 << 20
_SEQ_BITS = 32


@dataclass(frozen=True)
class Commit:
    """What one append did.

    Attributes:
        snapshot: the snapshot it made, or the newest one when nothing was added.
        rows: rows added.
        bytes: bytes of data files added.
        already_in: whether this writer's batch had been committed before.
        refused: the rows that were put into the quarantine, with their reasons.
        not_finite: rows with a NaN or an infinity, by column.
    """

    snapshot: int
    rows: int
    bytes: int
    already_in: bool
    refused: tuple[Refused, ...]
    not_finite: dict[str, int]

    @property
    def quarantined(self) -> int:
        """How many rows were put into the quarantine."""
        return len(self.refused)


class TrajectoryStore:
    """A transactional table of trajectories, in a local folder or on an object store.

    Make one with `create` or `open`. Appends are atomic; a scan is pinned to the snapshot at which it was
    made. Do not fork a process that holds an open store: spawn, and open it there.
    """

    def __init__(self, place: Place, table: Table) -> None:
        self._place = place
        self._table = table
        self._writer_id = uuid.uuid4().hex
        self._batch_no = 0
        self._pinned: Table | None = None

    @classmethod
    def create(
        cls,
        path: str | Path | Place,
        *,
        extra: Sequence[Column] = (),
        storage_options: Mapping[str, str] | None = None,
    ) -> TrajectoryStore:
        """A new, empty store.

        Args:
            path: a folder that does not exist or is empty, or `s3://bucket/prefix`.
            extra: columns of your own, all nullable.
            storage_options: for S3, by the names of the environment variables (AWS_ENDPOINT_URL, ...),
                which are used otherwise.

        Raises:
            StoreExistsError: there is something at the path.
            SchemaError: an extra column's name is taken, or it is not nullable.
        """
        place = Place.of(path, storage_options)
        return cls(place, Table.create(place, with_extra(extra)))

    @classmethod
    def open(
        cls, path: str | Path | Place, *, storage_options: Mapping[str, str] | None = None
    ) -> TrajectoryStore:
        """The store at a path or an `s3://` URI.

        Raises:
            StoreNotFoundError: there is none.
            FormatVersionError: a newer trajstore wrote it.
        """
        place = Place.of(path, storage_options)
        return cls(place, Table.open(place))

    def __repr__(self) -> str:
        return f"TrajectoryStore({str(self._place)!r}, snapshot={self.snapshot})"

    @property
    def path(self) -> Path:
        """The folder of the store.

        Raises:
            InputError: the store is not on a local disk.
        """
        if self._place.folder is None:
            raise InputError(f"{self._place} is not a folder", hint="use uri")
        return self._place.folder

    @property
    def uri(self) -> str:
        """Where the store is, as a URI."""
        return self._place.uri

    @property
    def snapshot(self) -> int:
        """Number of the newest snapshot this handle has seen, or of the one it is pinned to."""
        return self._table.snapshot

    @property
    def schema(self) -> pa.Schema:
        """The stored columns."""
        return self._table.schema

    @property
    def extra(self) -> tuple[Column, ...]:
        """The user's own columns."""
        return extra_columns(self._table.schema)

    # Reading

    def scan(self, where: Any = None, columns: Sequence[str] | None = None) -> Scan:
        """A lazy selection of the newest snapshot's rows.

        Args:
            where: a polars expression, an SQL predicate as text, or a gate such as `fresh(...)`.
            columns: read only these.

        Raises:
            QueryError: the predicate cannot be read or looks at a list column; no such column.
        """
        scan = Scan(self._newest(), columns=columns)
        return scan if where is None else scan.filter(where)

    def count(self) -> int:
        """Number of rows in the newest snapshot."""
        return self.scan().count()

    def history(self) -> list[Snapshot]:
        """Every snapshot, oldest first."""
        self._table.refresh()
        return self._table.history()

    def at(self, snapshot: int) -> TrajectoryStore:
        """The store as it was at a snapshot, read-only.

        Raises:
            QueryError: there is no such snapshot.
        """
        return type(self)(self._place, Table.open(self._place, snapshot))

    def column_bytes(self) -> dict[str, int]:
        """Compressed bytes of each column in the newest snapshot."""
        self._table.refresh()
        return files.column_bytes(self._place, self._table.files())

    def quarantined(self) -> pa.Table:
        """Rows that were refused with on_error="quarantine", with their reasons."""
        return side.quarantined(self._place)

    def _newest(self) -> Table:
        """A table of its own, so that a scan stays where it is when this handle moves on."""
        if self._table.pinned:
            return self._table
        self._table.refresh()
        if self._pinned is None or self._pinned.snapshot != self._table.snapshot:
            self._pinned = Table.open(self._place, self._table.snapshot)
        return self._pinned

    # Writing

    def append(
        self,
        rows: Appendable,
        *,
        writer_id: str | None = None,
        batch_no: int | None = None,
        nulls: Nulls = "error",
        on_error: OnError = "raise",
    ) -> Commit:
        """Adds rows in one atomic commit: all of them, or none.

        Args:
            rows: trajectories (any iterable; it is read in chunks), a TrajectoryBatch, or Arrow data in
                the store's columns.
            writer_id, batch_no: make the append idempotent. A writer numbers its batches 0, 1, 2, ...;
                a batch that is in already adds nothing, so a resend after a crash is safe.
            nulls: "nan" turns None inside a list of floats into NaN; otherwise it is an error.
            on_error: "quarantine" puts rows that break the contract into a side table, with their
                reasons, and commits the others.

        Raises:
            ValidationError: a row breaks the contract (its position, id and column are named).
            SchemaError: Arrow data does not fit the store's columns.
            ConflictError: batch_no does not follow the writer's last one.
        """
        if (writer_id is None) != (batch_no is None):
            raise InputError("writer_id and batch_no go together", hint="give both, or neither")
        anonymous = writer_id is None
        if writer_id is None or batch_no is None:
            writer_id, batch_no = self._writer_id, self._batch_no
        stamp = _Stamp(writer_id, batch_no)
        self._table.refresh()
        last = self._table.committed_batch(writer_id)
        if last is not None and batch_no <= last:
            return Commit(self.snapshot, 0, 0, True, (), {})
        refused: list[Refused] = []
        with _Files(self._place, self._table.schema) as out:
            for batch in self._encoded(rows, nulls, refused if on_error == "quarantine" else None):
                out.write(stamp(conform(batch, self._storable())))
            done = out.finish()
            if refused:
                side.quarantine(self._place, refused, writer_id, batch_no)
            if not done and anonymous:
                return Commit(self.snapshot, 0, 0, False, tuple(refused), {})
            snapshot = self._table.commit(done, writer_id=writer_id, batch_no=batch_no)
            out.committed = snapshot is not None
        self._batch_no += anonymous
        if snapshot is None:
            return Commit(self.snapshot, 0, 0, True, tuple(refused), {})
        total = sum(file.bytes for file in done)
        return Commit(snapshot, stamp.rows, total, False, tuple(refused), out.not_finite)

    def _storable(self) -> pa.Schema:
        """What a caller may give: every stored column but the store's own stamps."""
        return pa.schema([f for f in self._table.schema if f.name not in _STAMPS])

    def _encoded(
        self, rows: Appendable, nulls: Nulls, refused: list[Refused] | None
    ) -> Iterator[pa.RecordBatch]:
        if isinstance(rows, TrajectoryBatch):
            rows = rows.to_arrow()
        if isinstance(rows, (pa.Table, pa.RecordBatch)):
            yield from self._checked(pa.table(rows) if isinstance(rows, pa.RecordBatch) else rows)
            return
        offset = 0
        for chunk in _chunks(rows):
            yield from _encode(chunk, offset, nulls, refused)
            offset += len(chunk)

    def _checked(self, table: pa.Table) -> Iterator[pa.RecordBatch]:
        unstamped = table.drop_columns([n for n in table.schema.names if n in _STAMPS])
        offset = 0
        for batch in unstamped.to_batches(max_chunksize=CHUNK_ROWS):
            fitted = conform(batch, self._storable())
            try:
                check(fitted)
            except ValidationError as error:
                raise error.moved(offset) from None
            offset += batch.num_rows
            yield fitted


_STAMPS = frozenset({"ingested_at", "writer_id", "writer_seq", "ingest_snapshot"})


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
        if pc.any(nameless).as_py():
            made = [self._id(self.rows + int(i)) for i in np.asarray(nameless).nonzero()[0]]
            ids = pc.replace_with_mask(ids, nameless, pa.array(made, pa.string()))
        columns = {name: batch.column(name) for name in batch.schema.names}
        columns["id"] = ids
        columns["id_hash"] = id_hashes(ids.to_pylist())
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
    """The data files of one append; removed again unless they are committed."""

    def __init__(self, place: Place, schema: pa.Schema) -> None:
        self.place = place
        self.schema = schema
        self.committed = False
        self.not_finite: dict[str, int] = {}
        self._open: FileWriter | None = None
        self._done: list[DataFile] = []

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._open is not None:
            self._open.abort()
        if not self.committed:
            for file in self._done:
                self.place.delete(file.name)

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
        values = column.flatten() if listed else column.drop_null()
        wild = ~np.isfinite(values.to_numpy(zero_copy_only=False))
        if wild.any():
            parents = column.value_parent_indices().to_numpy() if listed else np.arange(len(values))
            yield name, len(np.unique(parents[wild]))
