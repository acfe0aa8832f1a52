"""Owns what rewrites a table: compact, delete, update, vacuum, restore; each is one compare-and-swap commit.

A plan is made against one snapshot. When another maintainer has rewritten one of its files meanwhile, the
commit is refused, what was written is removed, and the plan is made again; appends never get in the way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trajstore.codec import check, conform
from trajstore.errors import (
    ConflictError,
    CorruptFileError,
    QueryError,
    ValidationError,
    is_refusal,
)
from trajstore.schema import BY_NAME, Column
from trajstore.selection import VERSION_OF, GapOf, Stale, fresh
from trajstore.store import files, side
from trajstore.store.datafile import DataFile, LogFile
from trajstore.store.files import NAME, FileWriter, storage_errors
from trajstore.store.fsck import Finding, fsck
from trajstore.store.place import Place
from trajstore.store.scan import Scan, as_step
from trajstore.store.table import Table
from trajstore.trajectory import PolicyVersion

PLANS = 50
TARGET_BYTES = 256 << 20
MINIMUM_RETENTION_HOURS = 168.0

_FIXED = frozenset(
    {
        *("id", "id_hash", "tokens", "length", "prompt_length", "response_length", "prompt_tokens"),
        *("response_tokens", "ingested_at", "writer_id", "writer_seq", "ingest_snapshot"),
    }
)
"""Columns that say which row it is and which tokens it has: an update does not touch them."""


@dataclass(frozen=True)
class Rewrite:
    """What a maintenance verb did.

    Attributes:
        snapshot: the newest snapshot after it.
        rows: rows deleted or updated; 0 for a compaction.
        files_removed, files_added: data files that left and entered the table.
    """

    snapshot: int
    rows: int
    files_removed: int
    files_added: int


class Maintenance:
    """The verbs that rewrite a store; reached as `store.maintenance`."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def compact(self, *, target_bytes: int = TARGET_BYTES) -> Rewrite:
        """Joins files of less than half the target size, ordered by policy version.

        Rows, ids and samples stay as they are; the order of arrival is stamped into `ingest_snapshot`.
        """

        def plan(table: Table) -> _Plan:
            small = [file for file in table.files() if file.bytes * 2 < target_bytes]
            bins = _bins(small, target_bytes)
            return _Plan(
                [file for group in bins for file in group],
                [partial(_merged, table, group) for group in bins],
                rows=0,
            )

        return self._rewrite("compact", plan, data_change=False)

    def delete(self, where: Any) -> Rewrite:
        """Deletes the rows for which `where` is true, as of the snapshot it is planned against.

        Raises:
            QueryError: the predicate cannot be read, or looks at a list column.
        """
        as_step(where)

        def plan(table: Table) -> _Plan:
            return _without(table, Scan(table).filter(where))

        return self._rewrite("delete", plan)

    def remove_stale(
        self, current_version: PolicyVersion | int, max_staleness: int, *, gap_of: GapOf = "oldest"
    ) -> Rewrite:
        """Deletes rows whose version gap is above `max_staleness`; rows of unknown version stay.

        Files in which every row is stale go by the log's statistics alone.
        """
        at = fresh(current_version, max_staleness, gap_of=gap_of).at

        def plan(table: Table) -> _Plan:
            column = VERSION_OF[gap_of]  # of the mean the log has no statistics
            lowest = at - max_staleness
            whole = [
                file
                for file in table.files()
                if file.nulls.get(column) == 0 and file.high.get(column, lowest) < lowest
            ]
            gone = {file.name for file in whole}
            mixed = [file for file in table.files() if file.name not in gone]
            plan = _without(table, Scan(table, only=mixed).filter(Stale(at, max_staleness, gap_of)))
            return _Plan([*whole, *plan.remove], plan.add, plan.rows + sum(file.rows for file in whole))

        return self._rewrite("remove_stale", plan)

    def update(self, ids: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> Rewrite:
        """Sets values of columns that became known after the rollout: log-probs, advantages, entropy, ...

        The files that hold the rows are rewritten. Lengths are checked against the rows.

        Args:
            ids: K ids of rows.
            columns: by name, K values: None, a number or text, or a list as long as the row's tokens.

        Raises:
            ValidationError: an id is unknown or names several rows, or a value breaks the contract.
            QueryError: a column cannot be updated, or is not there.
        """
        if len(set(ids)) != len(ids):
            raise QueryError("an id is given twice", hint="give each row once")

        def plan(table: Table) -> _Plan:
            for name, values in columns.items():
                if name in _FIXED or name not in table.schema.names:
                    known = ", ".join(n for n in table.schema.names if n not in _FIXED)
                    raise QueryError(f"column {name!r} cannot be updated", hint=f"columns: {known}")
                if len(values) != len(ids):
                    raise QueryError(f"{name!r} has {len(values)} values for {len(ids)} ids")
            return _with_values(table, list(ids), columns)

        return self._rewrite("update", plan)

    def add_column(self, *added: Column) -> int:
        """Adds columns of one's own, null in every row there is, and returns the new snapshot.

        Raises:
            SchemaError: a column of that name is there, or it is not nullable.
        """
        table = Table.open(self._place)
        for column in added:
            if column.name in BY_NAME or not column.nullable:
                raise QueryError(f"column {column.name!r} cannot be added", hint="name it anew, nullable")
        return table.add_columns([column.field for column in added])

    def restore(self, snapshot: int) -> int:
        """Makes the store as it was at a snapshot, as a new snapshot, which it returns.

        Writers may send again what was rolled back: it is not answered "already in".

        Raises:
            QueryError: there is no such snapshot.
            CorruptFileError: a file of it was vacuumed.
        """
        past = {file.name: file for file in Table.open(self._place, snapshot).files()}
        for _ in range(PLANS):
            for name in past:
                if not self._place.exists(name):
                    raise CorruptFileError(
                        f"snapshot {snapshot} cannot be restored: its file {name} is gone",
                        hint="tag snapshots to keep them through a vacuum",
                    )
            table = Table.open(self._place)
            live = {file.name: file for file in table.files()}
            with suppress(ConflictError):  # a maintainer was first: what is live has changed
                return table.swap(
                    [file for name, file in live.items() if name not in past],
                    [file for name, file in past.items() if name not in live],
                    operation="restore",
                    restored=snapshot,
                )
        raise ConflictError(
            f"other maintainers were first {PLANS} times", hint="run one maintainer at a time"
        )

    def vacuum(
        self,
        retention_hours: float = MINIMUM_RETENTION_HOURS,
        *,
        keep: Sequence[int] = (),
        dry_run: bool = False,
        force: bool = False,
    ) -> list[str]:
        """Removes data files that neither a kept snapshot nor a recent one uses, and returns their names.

        Snapshots with a tag, and those that the training ledger names, are kept; so are files of others.

        Args:
            retention_hours: files younger than this stay: a writer may be about to commit them.
            keep: more snapshots whose files stay.
            dry_run: only name the files.
            force: allow a retention below MINIMUM_RETENTION_HOURS.

        Raises:
            QueryError: the retention is below the minimum and not forced.
        """
        if retention_hours < MINIMUM_RETENTION_HOURS and not force:
            raise QueryError(
                f"a retention of {retention_hours} h may remove files that are being committed or read",
                hint=f"give at least {MINIMUM_RETENTION_HOURS:.0f}, or force=True when nothing else runs",
            )
        there = (
            self._place.entries()
        )  # before the log is read: what is committed meanwhile is in the log then
        table = Table.open(self._place)
        used = {file.name for file in table.files()}
        for snapshot in {*keep, *side.kept_snapshots(self._place)}:
            used |= {file.name for file in Table.open(self._place, snapshot).files()}
        left = table.departures()
        before = time.time() - retention_hours * 3600
        # A file that a snapshot once used is as old as its removal, any other as its last write.
        names = [
            entry.name
            for entry in there
            if NAME.fullmatch(entry.name)
            and entry.name not in used
            and (left.get(entry.name) or entry.modified) <= before
        ]
        for name in () if dry_run else names:
            self._place.discard(name)
        return names

    def fsck(self, *, repair: bool = False) -> list[Finding]:
        """Reads the whole store again and says what is not as it should be; see `trajstore.store.fsck`."""
        return fsck(self._place, repair=repair)

    def _rewrite(
        self, operation: str, make: Callable[[Table], _Plan], *, data_change: bool = True
    ) -> Rewrite:
        for _ in range(PLANS):
            table = Table.open(self._place)
            plan = make(table)
            if not plan.remove:
                return Rewrite(table.snapshot, plan.rows, 0, 0)
            written: list[DataFile] = []
            swapping = False
            try:
                with storage_errors(self._place):
                    for merge in plan.add:
                        written += _written(table, merge())
                    swapping = True
                    snapshot = table.swap(plan.remove, written, operation=operation, data_change=data_change)
            except BaseException as error:
                if not swapping or is_refusal(error):
                    for file in written:
                        self._place.discard(file.name)
                if isinstance(error, ConflictError):
                    continue
                raise
            return Rewrite(snapshot, plan.rows, len(plan.remove), len(written))
        raise ConflictError(
            f"other maintainers were first {PLANS} times", hint="run one maintainer at a time"
        )


@dataclass(frozen=True)
class _Plan:
    """Files that leave, what makes those that come, and how many rows are concerned."""

    remove: list[LogFile]
    add: Sequence[Callable[[], pa.Table]]
    rows: int


def _bins(small: Sequence[LogFile], target: int) -> list[list[LogFile]]:
    """Groups of two files or more that together reach about the target, by version."""
    groups: list[list[LogFile]] = []
    size = target
    for file in sorted(small, key=lambda f: (f.low.get("oldest_version_id", -1), f.snapshot, f.name)):
        if size + file.bytes > target:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.bytes
    return [group for group in groups if len(group) > 1]


def _merged(table: Table, group: Sequence[LogFile]) -> pa.Table:
    return pa.concat_tables([_stamped(table, file) for file in group])


def _stamped(table: Table, file: LogFile) -> pa.Table:
    """All rows of a file, which remember the snapshot that brought them."""
    rows = files.read(table.place, file, table.schema)
    at = rows.schema.get_field_index("ingest_snapshot")
    return rows.set_column(at, rows.schema.field(at), pc.fill_null(rows["ingest_snapshot"], file.snapshot))


def _without(table: Table, doomed: Scan) -> _Plan:
    """The plan that takes the rows of a scan out of their files."""
    remove, add, rows = [], [], 0
    for file, positions in doomed.places():
        remove.append(file)
        rows += len(positions)
        if len(positions) < file.rows:
            keep = np.ones(file.rows, bool)
            keep[positions] = False
            add.append(partial(_kept, table, file, keep))
    return _Plan(remove, add, rows)


def _kept(table: Table, file: LogFile, keep: NDArray[np.bool_]) -> pa.Table:
    return _stamped(table, file).filter(pa.array(keep))


def _with_values(table: Table, ids: list[str], columns: Mapping[str, Sequence[Any]]) -> _Plan:
    import polars as pl

    found: dict[str, int] = {}
    remove, add = [], []
    wanted = pa.array(ids)
    for file, positions in Scan(table).filter(pl.col("id").is_in(ids)).places():
        names = files.read(table.place, file, pa.schema([table.schema.field("id")]), np.sort(positions))["id"]
        for name in names.to_pylist():
            found[name] = found.get(name, 0) + 1
        remove.append(file)
        add.append(partial(_updated, table, file, wanted, columns))
    for name in ids:
        if found.get(name, 0) != 1:
            what = "is not in the store" if name not in found else f"names {found[name]} rows"
            raise ValidationError(f"id {name!r} {what}", column="id", hint="nothing was updated")
    return _Plan(remove, add, len(ids))


def _updated(table: Table, file: LogFile, ids: pa.Array, columns: Mapping[str, Sequence[Any]]) -> pa.Table:
    rows = _stamped(table, file)
    at = pc.index_in(rows["id"], ids).combine_chunks()
    here = at.is_valid()
    for name, values in columns.items():
        field = rows.schema.field(name)
        try:
            given = pa.array(values, field.type)
        except (pa.ArrowException, TypeError) as error:
            raise ValidationError(f"does not fit {field.type}: {error}", column=name) from error
        old = rows[name].combine_chunks()
        both = pa.concat_arrays([old, given])
        order = pc.if_else(
            here, pc.add(pc.fill_null(at, 0), len(old)), pa.array(np.arange(len(old)), pa.int32())
        )
        rows = rows.set_column(rows.schema.get_field_index(name), field, both.take(order))
    for batch in rows.to_batches(max_chunksize=4096):
        check(conform(batch, rows.schema))
    return rows


def _written(table: Table, rows: pa.Table) -> list[DataFile]:
    if not rows.num_rows:
        return []
    with FileWriter(table.place, table.schema) as writer:
        for batch in rows.sort_by("oldest_version_id").combine_chunks().to_batches():
            writer.write(batch)
        return [writer.close()]
