"""Owns the commit log: create, open, commit, snapshots; the only file that knows deltalake.

We write our own Parquet files and use Delta Lake as a log of which files make up which snapshot.
"""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, PostCommitHookProperties, RemoveAction

from trajstore.errors import (
    ConflictError,
    CorruptFileError,
    InputError,
    QueryError,
    SchemaError,
    StorageError,
    StoreExistsError,
    StoreNotFoundError,
    UncertainCommitError,
)
from trajstore.schema import FORMAT_VERSION, check_format
from trajstore.store.batches import application, is_known
from trajstore.store.datafile import DataFile, LogFile, Snapshot, log_file, read_snapshot, statistics
from trajstore.store.log import EPOCH, MAINTENANCE, RESTORED, has_mark, is_short, log_reader, torn_entry
from trajstore.store.place import Place, entry

COMMIT_ATTEMPTS = 100

_ALREADY_IN = -1

_FORMAT_KEY = "trajstore.formatVersion"
_CONFIGURATION = {
    "delta.checkpointInterval": "20",  # opening gets slower with every log entry behind the last one
    "delta.logRetentionDuration": "interval 36500 days",  # history is the point
    "delta.appendOnly": "false",
}
_AFTER = PostCommitHookProperties(create_checkpoint=True, cleanup_expired_logs=False)


class Table:
    """A handle on one snapshot of a Delta table."""

    def __init__(self, place: Place, delta: DeltaTable, *, pinned: bool) -> None:
        self.place = place
        self.pinned = pinned
        self.conflicts = 0  # commits of this handle that another writer beat
        self._delta = delta
        self.schema: pa.Schema = _arrow_schema(delta)
        self._files: tuple[int, list[LogFile]] | None = None
        self._known: tuple[int, dict[str, int | None]] = (-1, {})  # transactions at a snapshot
        self._log = log_reader(place)

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
                commit_properties=CommitProperties(
                    custom_metadata={"trajstore": '{"operation": "create"}'}, max_commit_retries=0
                ),
            )
        except OSError as error:
            raise InputError(f"cannot create a store at {place}: {error}") from error
        except DeltaError as error:
            if "already exists" in str(error) or isinstance(error, CommitFailedError):
                raise StoreExistsError(f"{place} was made by another process meanwhile") from error
            raise StorageError(f"cannot create a store at {place}: {error}") from error
        place.sync_entry(0)
        return cls(place, delta, pinned=False)

    @classmethod
    def open(cls, place: Place, snapshot: int | None = None) -> Table:
        """The newest snapshot of a table, or the one asked for, which stays as it is.

        Raises:
            StoreNotFoundError: there is no store there.
            FormatVersionError: a newer trajstore wrote it.
            QueryError: it has no such snapshot.
            CorruptFileError: the log cannot be read, or its newest entry is cut short.
        """
        if not place.is_table():
            hint = f"make one: trajstore import FILE {place}"
            raise StoreNotFoundError(f"there is no store at {place}", hint=hint)
        try:
            delta = DeltaTable(place.uri, version=snapshot, storage_options=place.options)
        except TableNotFoundError as error:
            raise StoreNotFoundError(f"there is no store at {place}") from error
        except (DeltaError, ValueError, OverflowError) as error:
            if snapshot is not None:
                newest = cls.open(place).snapshot
                if not 0 <= snapshot <= newest:
                    hint = f"snapshots go from 0 to {newest}"
                    raise QueryError(f"{place} has no snapshot {snapshot}", hint=hint) from error
            raise _unreadable(place, error) from error
        found = delta.metadata().configuration.get(_FORMAT_KEY)
        if found is None:
            raise StoreNotFoundError(
                f"{place} is a Delta table, but trajstore did not write it",
                hint="read it with pyarrow or polars and append the rows to a store",
            )
        check_format(int(found), str(place))
        if snapshot is None and is_short(place, int(delta.version())) and torn_entry(place) is not None:
            raise _unreadable(place, CorruptFileError(f"the end of entry {delta.version()} is missing"))
        return cls(place, delta, pinned=snapshot is not None)

    @property
    def snapshot(self) -> int:
        """Number of the snapshot this handle reads."""
        return int(self._delta.version())

    def refresh(self) -> None:
        """Moves to the newest snapshot, unless the handle is pinned."""
        if not self.pinned and not self._is_newest():
            try:
                self._delta.update_incremental()
            except (DeltaError, OSError) as error:
                raise _unreadable(self.place, error) from error
            self.schema = _arrow_schema(self._delta)

    def _is_newest(self) -> bool:
        """Whether the log has no further entry: on a disk, a look costs a hundredth of what delta-rs does."""
        exists = self.place.exists
        return self.place.folder is not None and (
            exists(entry(self.snapshot)) and not exists(entry(self.snapshot + 1))
        )

    def files(self) -> list[LogFile]:
        """Data files of the snapshot, in order of arrival."""
        if self._files is None or self._files[0] != self.snapshot:
            arrivals = self._log.up_to(self.place, self.snapshot).arrivals
            actions = pa.table(self._delta.get_add_actions(flatten=True)).to_pylist()
            files = [log_file(action, arrivals.get(action["path"], 0)) for action in actions]
            self._files = (self.snapshot, sorted(files, key=lambda f: (f.snapshot, f.name)))
        return self._files[1]

    def departures(self) -> dict[str, float | None]:
        """Files of every snapshot up to this one, and when they last left the table, in seconds."""
        log = self._log.up_to(self.place, self.snapshot)
        return {name: log.departures.get(name) for name in log.arrivals}

    @property
    def epoch(self) -> int:
        """How often the table was restored; a writer's batch numbers are counted within an epoch."""
        return self._transaction(EPOCH) or 0

    def _transaction(self, name: str) -> int | None:
        """The number that the log holds for an application."""
        if self._known[0] != self.snapshot:
            self._known = (self.snapshot, {})
        known = self._known[1]
        if name not in known:
            try:
                number = self._delta.transaction_version(name)
            except DeltaError as error:
                raise _unreadable(self.place, error) from error
            known[name] = None if number is None else int(number)
        return known[name]

    def committed_batch(self, writer_id: str) -> int | None:
        """The last batch number of this writer that is in the table, None when none is.

        After a restore it is the last one that the restored snapshot held: what was rolled back may be
        sent again.
        """
        last = self._transaction(application(writer_id, self.epoch))
        if last is not None:
            return last
        if self.epoch == 0:
            return None
        restored = self._transaction(RESTORED) or 0
        return Table.open(self.place, restored).committed_batch(writer_id)

    def commit(
        self,
        files: Sequence[DataFile],
        *,
        writer_id: str,
        batch_no: int,
        operation: str = "append",
        cache_refs_left_out: int = 0,
        resent: bool = True,
    ) -> int | None:
        """Adds files in one atomic step and returns the new snapshot.

        Only the commit is tried again when another writer was first, never the writing of files.

        Returns:
            The snapshot, or None when this writer's batch is in already; `is_known` says what `resent` means.

        Raises:
            ConflictError: the batch number is not the writer's next, or others won every attempt.
            StorageError: the commit was refused.
            UncertainCommitError: it is not known whether it got through. After any other error it did not.
        """
        note = {"operation": operation, "rows": sum(f.rows for f in files), "writer_id": writer_id}
        if cache_refs_left_out:
            note["cache_refs_left_out"] = cache_refs_left_out

        def attempt() -> int | None:
            if self.is_in(writer_id, batch_no, resent=resent):
                return _ALREADY_IN
            self._there(files)
            transactions = {application(writer_id, self.epoch): batch_no}
            return self._attempt([_add_action(file, data_change=True) for file in files], note, transactions)

        made = self._until_committed(attempt)
        return None if made == _ALREADY_IN else made

    def swap(
        self,
        remove: Sequence[LogFile],
        add: Sequence[DataFile],
        *,
        operation: str,
        data_change: bool = True,
        restored: int | None = None,
    ) -> int:
        """Replaces live files by others in one compare-and-swap step and returns the new snapshot.

        With `restored`, the snapshot that they make up again, a new epoch of batch numbers begins.

        Raises:
            ConflictError: another maintainer has rewritten one of the files meanwhile: plan again.
            StorageError: the commit was refused.
            UncertainCommitError: it is not known whether it got through. After any other error it did not.
        """
        note = {"operation": operation, "rows": sum(f.rows for f in add) - sum(f.rows for f in remove)}
        gone = {file.name for file in remove}

        def attempt() -> int | None:
            missing = gone - {file.name for file in self.files()}
            if missing:
                raise ConflictError(f"{len(missing)} files were rewritten by another maintainer meanwhile")
            self._there(add)
            actions: list[AddAction | RemoveAction] = [
                *(_remove_action(file, data_change) for file in remove),
                *(_add_action(file, data_change) for file in add),
            ]
            # Two swaps of the same files must not both pass: the counter makes them conflict.
            counter = (self._transaction(MAINTENANCE) or 0) + 1
            epoch = {} if restored is None else {EPOCH: self.epoch + 1, RESTORED: restored}
            return self._attempt(actions, note, {MAINTENANCE: counter, **epoch})

        return self._until_committed(attempt)

    def _there(self, files: Sequence[DataFile]) -> None:
        """Refuses to commit a file that is not there: the log would point nowhere."""
        for file in files:
            if not self.place.exists(file.name):
                raise ConflictError(
                    f"data file {file.name} went away before its commit",
                    hint="a vacuum with too short a retention ran; write the rows again",
                )

    def _until_committed(self, attempt: Callable[[], int | None]) -> int:
        if self.pinned:
            raise InputError("this handle is pinned to a snapshot", hint="open the store to write to it")
        for number in range(COMMIT_ATTEMPTS):
            self.refresh()
            made = attempt()
            if made is not None:
                return made
            self.conflicts += 1
            time.sleep(random.uniform(0, 0.002 * min(number + 1, 25)))
        raise ConflictError(
            f"other writers were first {COMMIT_ATTEMPTS} times; nothing was committed",
            hint="append fewer, larger batches",
        )

    def _attempt(
        self,
        actions: list[AddAction | RemoveAction],
        note: Mapping[str, Any],
        transactions: Mapping[str, int],
    ) -> int | None:
        """One commit against the snapshot of this handle; None when another one was first."""
        base = self.snapshot
        now = int(time.time() * 1000)
        named = [Transaction(name, number, now) for name, number in transactions.items()]
        run = partial(
            self._delta.create_write_transaction,
            actions,
            "append",
            self._delta.schema(),
            post_commithook_properties=_AFTER,
        )
        if self._made(note, run, named) is None:
            return None
        known = self._known[1] if self._known[0] == base else {}
        with suppress(CorruptFileError):  # of a later entry: this commit is in, the next call says so
            self.refresh()
        self._known = (base + 1, {**known, **transactions})  # of no use when others were quick
        return base + 1

    def _made(
        self,
        note: Mapping[str, Any],
        run: Callable[..., None],
        transactions: list[Transaction] | None = None,
    ) -> int | None:
        """The snapshot that a strict compare-and-swap of delta-rs made; None when another one was first.

        An object store can carry a request out and lose the answer; the client's own retry then finds the
        entry there and reports a conflict with itself. So each entry has a mark by which it is known again.
        """
        number, mark = self.snapshot + 1, uuid.uuid4().hex
        properties = CommitProperties(
            custom_metadata={"trajstore": json.dumps({**note, "commit": mark})},
            app_transactions=transactions,
            max_commit_retries=0,
        )
        try:
            try:
                run(commit_properties=properties)
            except (DeltaError, OSError) as error:
                found = has_mark(self.place, number, mark)
                if found is False or (found is None and isinstance(error, CommitFailedError)):
                    return None
                if found is None and self.place.folder is not None:
                    raise StorageError(f"the commit could not be written to {self.place}: {error}") from error
                if found is None:  # the request may still be on its way
                    raise
            self.place.sync_entry(number)
        except StorageError:
            raise
        except (DeltaError, OSError) as error:
            what = f"whether a commit got into {self.place} is not known: {_first_line(error)}"
            hint = "send the batch again with the same writer_id and batch_no, or look into the history"
            raise UncertainCommitError(what, hint=hint) from error
        return number

    def is_in(self, writer_id: str, batch_no: int, *, resent: bool) -> bool:
        """Whether a writer's batch was committed before; see `commit`."""
        return is_known(self.committed_batch(writer_id), writer_id, batch_no, resent=resent)

    def add_columns(self, fields: Sequence[pa.Field]) -> int:
        """Adds nullable columns; files that do not have them are read as null there.

        Raises:
            SchemaError: a column of that name is there already.
        """
        for _ in range(COMMIT_ATTEMPTS):
            self.refresh()
            for added in fields:
                if added.name in self.schema.names:
                    raise SchemaError(f"column {added.name!r} is already there", hint="choose another name")
            columns = list(Schema.from_arrow(pa.schema(fields)).fields)
            run = partial(self._delta.alter.add_columns, columns)
            made = self._made({"operation": "add_column", "rows": 0}, run)
            if made is not None:
                self.refresh()
                return made
        raise ConflictError(f"other writers were first {COMMIT_ATTEMPTS} times; no column was added")

    def history(self) -> list[Snapshot]:
        """Every snapshot up to this one, oldest first."""
        commits = self._log.up_to(self.place, self.snapshot).commits
        numbers = [number for number in commits if number <= self.snapshot]
        return [read_snapshot(commits[number] | {"version": number}) for number in numbers]


def _arrow_schema(delta: DeltaTable) -> pa.Schema:
    return pa.schema(delta.schema().to_arrow())


def _unreadable(place: Place, error: Exception) -> CorruptFileError:
    return CorruptFileError(
        f"the log of {place} cannot be read: {_first_line(error)}",
        hint=f"trajstore fsck {place} says why, when it can be repaired",
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _remove_action(file: LogFile, data_change: bool) -> RemoveAction:
    return RemoveAction(file.name, data_change, int(time.time() * 1000), file.bytes, {})


def _add_action(file: DataFile, data_change: bool) -> AddAction:
    now = int(time.time() * 1000)
    return AddAction(file.name, file.bytes, {}, now, data_change, statistics(file))
