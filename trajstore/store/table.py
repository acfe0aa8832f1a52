"""Owns the commit log: create, open, commit, snapshots; the only file that knows deltalake.

We write our own Parquet files and use Delta Lake as a log of which files make up which snapshot.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from trajstore.errors import (
    ConflictError,
    CorruptFileError,
    InputError,
    QueryError,
    StoreExistsError,
    StoreNotFoundError,
)
from trajstore.schema import FORMAT_VERSION, check_format
from trajstore.store.datafile import DataFile
from trajstore.store.place import LOG, Place

COMMIT_ATTEMPTS = 100

_FORMAT_KEY = "trajstore.formatVersion"
_CONFIGURATION = {
    "delta.checkpointInterval": "20",  # opening gets slower with every log entry behind the last one
    "delta.logRetentionDuration": "interval 36500 days",  # history is the point
    "delta.appendOnly": "false",
}


@dataclass(frozen=True)
class Snapshot:
    """One committed state of a table.

    Attributes:
        snapshot: its number.
        timestamp: when it was committed, UTC.
        operation: what was done: create, append, ...
        rows: rows it added.
        writer_id: who did it, when known.
    """

    snapshot: int
    timestamp: datetime
    operation: str
    rows: int
    writer_id: str | None


@dataclass(frozen=True)
class LogFile(DataFile):
    """A data file as the log has it; `snapshot` is the one that brought it."""

    snapshot: int = 0


class Table:
    """A handle on one snapshot of a Delta table."""

    def __init__(self, place: Place, delta: DeltaTable, *, pinned: bool) -> None:
        self.place = place
        self.pinned = pinned
        self._delta = delta
        self.schema: pa.Schema = _arrow_schema(delta)
        self._files: tuple[int, list[LogFile]] | None = None
        self._arrivals: dict[str, int] = {}
        self._arrivals_up_to = -1

    @classmethod
    def create(cls, place: Place, schema: pa.Schema) -> Table:
        """A new, empty table.

        Raises:
            StoreExistsError: something is there already.
        """
        if not place.is_free():
            what = "a store" if place.is_table() else "something else"
            hint = "open it, or choose another path" if what == "a store" else "choose another path"
            raise StoreExistsError(f"{place} already holds {what}", hint=hint)
        try:
            if place.folder is not None:
                place.folder.mkdir(parents=True, exist_ok=True)
            delta = DeltaTable.create(
                place.uri,
                schema,
                mode="error",
                name="trajstore",
                configuration=_CONFIGURATION | {_FORMAT_KEY: str(FORMAT_VERSION)},
                storage_options=place.options,
                raise_if_key_not_exists=False,
                commit_properties=CommitProperties(custom_metadata={"trajstore": '{"operation": "create"}'}),
            )
        except OSError as error:
            raise InputError(f"cannot create a store at {place}: {error}") from error
        except DeltaError as error:
            raise StoreExistsError(f"{place} was made by another process meanwhile: {error}") from error
        _sync_log(place, 0)
        return cls(place, delta, pinned=False)

    @classmethod
    def open(cls, place: Place, snapshot: int | None = None) -> Table:
        """The newest snapshot of a table, or the one asked for, which stays as it is.

        Raises:
            StoreNotFoundError: there is no store there.
            FormatVersionError: a newer trajstore wrote it.
            QueryError: it has no such snapshot.
        """
        if not place.is_table():
            hint = f"make one: trajstore import FILE {place}"
            raise StoreNotFoundError(f"there is no store at {place}", hint=hint)
        try:
            delta = DeltaTable(place.uri, storage_options=place.options)
            newest = delta.version()
            if snapshot is not None:
                if not 0 <= snapshot <= newest:
                    raise QueryError(
                        f"{place} has no snapshot {snapshot}", hint=f"snapshots go from 0 to {newest}"
                    )
                delta.load_as_version(snapshot)
        except TableNotFoundError as error:
            raise StoreNotFoundError(f"there is no store at {place}") from error
        except DeltaError as error:
            raise CorruptFileError(f"the log of {place} cannot be read: {error}") from error
        found = delta.metadata().configuration.get(_FORMAT_KEY)
        if found is None:
            raise StoreNotFoundError(
                f"{place} is a Delta table, but trajstore did not write it",
                hint="read it with pyarrow or polars and append the rows to a store",
            )
        check_format(int(found), str(place))
        return cls(place, delta, pinned=snapshot is not None)

    @property
    def snapshot(self) -> int:
        """Number of the snapshot this handle reads."""
        return int(self._delta.version())

    def refresh(self) -> None:
        """Moves to the newest snapshot, unless the handle is pinned."""
        if not self.pinned:
            self._delta.update_incremental()
            self.schema = _arrow_schema(self._delta)

    def files(self) -> list[LogFile]:
        """Data files of the snapshot, in order of arrival."""
        if self._files is None or self._files[0] != self.snapshot:
            arrivals = self._arrival()
            actions = pa.table(self._delta.get_add_actions(flatten=True)).to_pylist()
            files = [_log_file(action, arrivals.get(action["path"], 0)) for action in actions]
            self._files = (self.snapshot, sorted(files, key=lambda f: (f.snapshot, f.name)))
        return self._files[1]

    def _arrival(self) -> dict[str, int]:
        for number in range(self._arrivals_up_to + 1, self.snapshot + 1):
            if self.place.exists(_entry(number)):
                for line in self.place.read(_entry(number)).splitlines():
                    if line.startswith(b'{"add"'):
                        self._arrivals.setdefault(json.loads(line)["add"]["path"], number)
        self._arrivals_up_to = self.snapshot
        return self._arrivals

    def committed_batch(self, writer_id: str) -> int | None:
        """The last batch number that this writer has committed, None when it has none."""
        last = self._delta.transaction_version(writer_id)
        return None if last is None else int(last)

    def commit(
        self, files: Sequence[DataFile], *, writer_id: str, batch_no: int, operation: str = "append"
    ) -> int | None:
        """Adds files in one atomic step and returns the new snapshot.

        Only the commit is tried again when another writer was first, never the writing of files.

        Returns:
            The snapshot, or None when this writer's batch is in already.

        Raises:
            ConflictError: the batch number is not the writer's next, or others won every attempt.
        """
        if self.pinned:
            raise InputError("this handle is pinned to a snapshot", hint="open the store to write to it")
        now = int(time.time() * 1000)
        actions: list[AddAction | RemoveAction] = [_add_action(file, now) for file in files]
        note = {"operation": operation, "rows": sum(f.rows for f in files), "writer_id": writer_id}
        properties = CommitProperties(
            custom_metadata={"trajstore": json.dumps(note)},
            app_transactions=[Transaction(writer_id, batch_no, now)],
            max_commit_retries=0,
        )
        for attempt in range(COMMIT_ATTEMPTS):
            self.refresh()
            base = self.snapshot
            if self._is_in(writer_id, batch_no):
                return None
            for file in files:
                if not self.place.exists(file.name):
                    raise ConflictError(
                        f"data file {file.name} went away before its commit",
                        hint="a vacuum with too short a retention ran; append the rows again",
                    )
            try:
                self._delta.create_write_transaction(
                    actions, "append", self._delta.schema(), commit_properties=properties
                )
            except CommitFailedError:
                time.sleep(random.uniform(0, 0.002 * min(attempt + 1, 25)))
                continue
            _sync_log(self.place, base + 1)  # no retries inside: the commit is the one after base
            self.refresh()
            return base + 1
        raise ConflictError(
            f"other writers were first {COMMIT_ATTEMPTS} times; nothing was committed",
            hint="append fewer, larger batches",
        )

    def _is_in(self, writer_id: str, batch_no: int) -> bool:
        last = self.committed_batch(writer_id)
        if last is not None and batch_no <= last:
            return True
        expected = 0 if last is None else last + 1
        if batch_no != expected:
            raise ConflictError(
                f"batch {batch_no} of writer {writer_id!r} does not follow: the next one is {expected}",
                hint="number a writer's batches 0, 1, 2, ... and resend the missing one first",
            )
        return False

    def history(self) -> list[Snapshot]:
        """Every snapshot up to this one, oldest first."""
        return [_snapshot(entry) for entry in reversed(self._delta.history())]


def _arrow_schema(delta: DeltaTable) -> pa.Schema:
    return pa.schema(delta.schema().to_arrow())


def _snapshot(entry: Mapping[str, Any]) -> Snapshot:
    note = json.loads(entry.get("trajstore", "{}"))
    return Snapshot(
        snapshot=entry["version"],
        timestamp=datetime.fromtimestamp(entry["timestamp"] / 1000, UTC),
        operation=note.get("operation", entry.get("operation", "").lower()),
        rows=note.get("rows", 0),
        writer_id=note.get("writer_id"),
    )


def _add_action(file: DataFile, now: int) -> AddAction:
    statistics = {
        "numRecords": file.rows,
        "minValues": file.low,
        "maxValues": file.high,
        "nullCount": file.nulls,
    }
    return AddAction(file.name, file.bytes, {}, now, True, json.dumps(statistics))


def _log_file(action: Mapping[str, Any], snapshot: int) -> LogFile:
    def statistics(prefix: str) -> dict[str, Any]:
        found = ((k.removeprefix(prefix), v) for k, v in action.items() if k.startswith(prefix))
        return {name: value for name, value in found if value is not None}

    return LogFile(
        name=action["path"],
        rows=action["num_records"],
        bytes=action["size_bytes"],
        low=statistics("min."),
        high=statistics("max."),
        nulls=statistics("null_count."),
        snapshot=snapshot,
    )


def _entry(number: int) -> str:
    return f"{LOG}/{number:020d}.json"


def _sync_log(place: Place, number: int) -> None:
    """delta-rs never fsyncs: without this a power cut can take the newest commits away in silence."""
    place.sync(_entry(number))
    place.sync(LOG)
