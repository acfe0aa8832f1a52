"""Owns TrajectoryStore, the handle users hold: create, open, append, scan, at; knows no file format."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trajstore.batch import TrajectoryBatch
from trajstore.codec import Nulls
from trajstore.errors import InputError, QueryError
from trajstore.schema import Column, extra_columns, with_extra
from trajstore.selection import Resumable, fresh
from trajstore.store import files, side
from trajstore.store.append import Appendable, Commit, OnError, append
from trajstore.store.datafile import Snapshot
from trajstore.store.maintenance import Maintenance
from trajstore.store.place import Place
from trajstore.store.scalars import ScalarCache
from trajstore.store.scan import Scan
from trajstore.store.table import Table
from trajstore.store.writer import StoreWriter
from trajstore.trajectory import PolicyVersion


@dataclass(frozen=True)
class Diff:
    """Ids that came and went from one snapshot to another, each in order of arrival."""

    added: list[str]
    removed: list[str]


class TrajectoryStore:
    """A transactional table of trajectories, in a local folder or on an object store.

    Make one with `create` or `open`. Appends are atomic; a scan is pinned to the snapshot at which it was
    made. Do not fork a process that holds an open store: spawn, and open it there.
    """

    def __init__(self, place: Place, table: Table, scalars: ScalarCache | None = None) -> None:
        self._place = place
        self._scalars = ScalarCache() if scalars is None else scalars
        self._table = table
        self._writer_id = uuid.uuid4().hex
        self._batch_no = 0
        self._pinned: Table | None = None
        self._lock = threading.Lock()

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
        scan = Scan(self._newest(), columns=columns, scalars=self._scalars)
        return scan if where is None else scan.filter(where)

    def count(self) -> int:
        """Number of rows in the newest snapshot."""
        return self.scan().count()

    def partials(
        self, current_version: PolicyVersion | int | None = None, max_staleness: int | None = None
    ) -> TrajectoryBatch:
        """The resume queue: generations that were cut off and that no later row continues, oldest first.

        Of rows with one id the last one counts.

        Args:
            current_version: the engine's policy version; with it, rows whose oldest token is staler than
                `max_staleness` are left out, and rows of unknown version too.
            max_staleness: largest version gap that stays, in publications of the policy.

        Raises:
            QueryError: only one of the two is given.
        """
        scan = self.scan(Resumable())
        if (current_version is None) != (max_staleness is None):
            raise QueryError("current_version and max_staleness go together", hint="give both, or neither")
        if current_version is not None and max_staleness is not None:
            scan = scan.filter(fresh(current_version, max_staleness))
        return scan.to_batch()

    def history(self) -> list[Snapshot]:
        """Every snapshot, oldest first."""
        self._table.refresh()
        return self._table.history()

    def at(self, snapshot: int | str | datetime) -> TrajectoryStore:
        """The store as it was, read-only.

        Args:
            snapshot: a snapshot's number, its tag, or a time: the newest snapshot up to then.

        Raises:
            QueryError: there is no such snapshot.
        """
        return type(self)(self._place, Table.open(self._place, self._number(snapshot)), self._scalars)

    def _number(self, snapshot: int | str | datetime) -> int:
        if isinstance(snapshot, int):
            return snapshot
        if isinstance(snapshot, str):
            known = self.tags()
            if snapshot not in known:
                hint = f"tags: {', '.join(known)}" if known else "there is no tag yet: store.tag(name)"
                raise QueryError(f"there is no tag {snapshot!r}", hint=hint)
            return known[snapshot]
        if snapshot.tzinfo is None:
            raise QueryError(f"{snapshot} has no time zone", hint="datetime.now(timezone.utc), for example")
        upto = [s.snapshot for s in self.history() if s.timestamp <= snapshot]
        if not upto:
            raise QueryError(f"the store is younger than {snapshot}")
        return upto[-1]

    def tag(self, name: str, snapshot: int | None = None) -> None:
        """Names a snapshot, the newest one unless given; a vacuum keeps its files.

        Raises:
            ConflictError: the name is that of another snapshot.
            QueryError: there is no such snapshot.
        """
        number = self._newest().snapshot if snapshot is None else self.at(snapshot).snapshot
        side.tag(self._place, name, number)

    def tags(self) -> dict[str, int]:
        """Snapshots by their names."""
        return side.tags(self._place)

    def diff(self, old: int | str, new: int | str) -> Diff:
        """Which ids came and went between two snapshots."""
        before, after = (self.at(s).scan(columns=["id"]).to_arrow()["id"].to_pylist() for s in (old, new))
        was, now = set(before), set(after)
        return Diff([i for i in after if i not in was], [i for i in before if i not in now])

    def record_training_step(
        self,
        step: int,
        ids: Sequence[str],
        *,
        rank: int = 0,
        micro_batch: int = 0,
        snapshot: int | None = None,
    ) -> None:
        """Notes in the training ledger which rows a step trained on, in their order.

        Args:
            step: optimizer step.
            ids: of the rows, in the order of the batch.
            rank, micro_batch: where in the step; the same three again add nothing.
            snapshot: the one the rows were read at, the newest one unless given; a vacuum keeps its files.
        """
        number = self._newest().snapshot if snapshot is None else snapshot
        side.record_step(self._place, step, ids, rank=rank, micro_batch=micro_batch, snapshot=number)

    def ledger(self) -> pa.Table:
        """The training ledger: step, rank, micro_batch, position, id, snapshot, recorded_at."""
        return side.ledger(self._place)

    def column_bytes(self) -> dict[str, int]:
        """Compressed bytes of each column in the newest snapshot."""
        self._table.refresh()
        return files.column_bytes(self._place, self._table.files())

    def buffer_state(self) -> tuple[str, NDArray[Any], NDArray[Any]] | None:
        """What a TrajectoryBuffer over this store saved last: its note, id hashes [N] and counts [N]."""
        return side.buffer_state(self._place)

    def save_buffer_state(
        self, note: str, id_hashes: NDArray[np.int64], times_sampled: NDArray[np.int32]
    ) -> None:
        """Keeps the state of a TrajectoryBuffer in the place of the one before."""
        side.save_buffer(self._place, note, id_hashes, times_sampled)

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

    def writer(
        self,
        *,
        writer_id: str | None = None,
        max_rows: int = 1024,
        max_bytes: int = 64 << 20,
        max_age: float = 1.0,
        nulls: Nulls = "error",
    ) -> StoreWriter:
        """A writer that gathers rows from many threads and commits them in groups.

        Args:
            writer_id: stable over restarts when given; its batches then go on from the last one.
            max_rows, max_bytes: commit when so many rows, or bytes of Arrow, are gathered.
            max_age: commit when the oldest row has waited so long, in seconds.
            nulls: see `append`.

        Raises:
            InputError: a limit is not above 0, or the store is pinned to a snapshot.
        """
        if self._table.pinned:
            raise InputError("this handle is pinned to a snapshot", hint="open the store to write to it")
        return StoreWriter(
            Table.open(self._place),
            writer_id=writer_id or uuid.uuid4().hex,
            max_rows=max_rows,
            max_bytes=max_bytes,
            max_age=max_age,
            nulls=nulls,
        )

    @property
    def maintenance(self) -> Maintenance:
        """The verbs that rewrite the store: compact, delete, update, vacuum, restore, ..."""
        if self._table.pinned:
            raise InputError("this handle is pinned to a snapshot", hint="open the store to write to it")
        return Maintenance(self._place)

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
            on_error: with "skip", rows that break the contract are left out and told in the commit's
                `refused`, with their reasons; "quarantine" also puts them into a side table.

        Raises:
            ValidationError: a row breaks the contract (its position, id and column are named).
            SchemaError: Arrow data does not fit the store's columns.
            ConflictError: batch_no does not follow the writer's last one.
            StorageError: the disk or the object store refused; with UncertainCommitError, after the commit
                was sent, so that it may be in. Send it again with its writer_id and batch_no, if it has any.
        """
        if (writer_id is None) != (batch_no is None):
            raise InputError("writer_id and batch_no go together", hint="give both, or neither")
        with self._lock:
            if writer_id is not None and batch_no is not None:
                return append(self._table, rows, writer_id, batch_no, nulls=nulls, on_error=on_error)
            number = self._batch_no
            self._batch_no += 1  # an append that failed may have got through: no number is used again
            return append(
                self._table, rows, self._writer_id, number, nulls=nulls, on_error=on_error, resent=False
            )
