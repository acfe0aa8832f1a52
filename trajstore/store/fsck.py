"""Owns the check of a whole store against its log and its contract; repairs only what loses no row.

What is put right: orphans, once they are old, and a torn newest entry of the log, which is put aside.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trajstore.codec import check, id_hashes
from trajstore.errors import CorruptFileError, ValidationError
from trajstore.store import files
from trajstore.store.datafile import LogFile
from trajstore.store.files import NAME
from trajstore.store.log import TORN, is_short, torn_entry
from trajstore.store.place import Place, entry
from trajstore.store.table import Table

ORPHAN_SECONDS = 3600.0
"""Younger files may be about to be committed."""


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        level: "error" when rows are lost or wrong, "warning" when nothing is.
        where: the file, or the rows.
        what: what was found.
        next: what to do.
        repaired: whether it was put right.
    """

    level: Literal["error", "warning"]
    where: str
    what: str
    next: str
    repaired: bool = False


def fsck(place: Place, *, repair: bool = False, orphan_seconds: float = ORPHAN_SECONDS) -> list[Finding]:
    """Reads everything again: log against files, digests, row counts, statistics, every row's contract.

    Args:
        place: the store's.
        repair: remove orphans, files that no snapshot ever used; put a torn newest entry of the log
            aside, which keeps the files that it names.
        orphan_seconds: how old an orphan must be to be removed.

    Raises:
        CorruptFileError: the log itself cannot be read.
    """
    table, torn = _open(place, repair)
    found = [finding for file in table.files() for finding in _file(table, file)]
    if not found:
        found += _duplicates(table)
    # Files of a torn entry may be part of what its line no longer names: not now.
    return torn + list(_short(table)) + found + list(_orphans(table, repair and not torn, orphan_seconds))


def _open(place: Place, repair: bool) -> tuple[Table, list[Finding]]:
    """The table, at the snapshot before the newest one when the entry of that is torn."""
    number = torn_entry(place)
    if number is None:
        return Table.open(place), []
    try:
        return Table.open(place), []
    except CorruptFileError:
        before = Table.open(place, number - 1)  # proves that this entry is what cannot be read
    if repair:
        place.move(entry(number), f"{TORN}/{number:020d}-{uuid.uuid4().hex}.json")
    what = "its end is missing: a power cut came before its commit was acknowledged"
    next = "--repair puts it aside; then send the batch again" if not repair else "send its batch again"
    return Table.open(place) if repair else before, [
        Finding("error", entry(number), what, next, repaired=repair)
    ]


def _short(table: Table) -> Iterator[Finding]:
    """Entries that are cut short and that later ones were built upon."""
    for number in range(1, table.snapshot):
        if is_short(table.place, number):
            yield Finding(
                "error",
                entry(number),
                "its end is missing, and later commits were built upon it",
                "see which rows it added or removed (`diff`), and whether its batch was sent again",
            )


def _file(table: Table, file: LogFile) -> Iterator[Finding]:
    again = "restore the file from a backup, or `restore` a snapshot that does not use it"
    if not table.place.exists(file.name):
        yield Finding("error", file.name, "the log has it, the store does not", again)
        return
    data = table.place.read(file.name)
    if len(data) != file.bytes:
        yield Finding("error", file.name, f"has {len(data)} bytes, the log says {file.bytes}", again)
        return
    digest = hashlib.blake2b(data, digest_size=8).hexdigest()
    if not file.name.endswith(f"-{digest}.parquet"):
        yield Finding("error", file.name, f"its bytes have the digest {digest}", again)
        return
    try:
        rows = files.read(table.place, file, table.schema)
    except CorruptFileError as error:
        yield Finding("error", file.name, error.message, again)
        return
    if rows.num_rows != file.rows:
        yield Finding("error", file.name, f"has {rows.num_rows} rows, the log says {file.rows}", again)
    yield from _statistics(file, rows)
    yield from _contract(file, rows)


def _statistics(file: LogFile, rows: pa.Table) -> Iterator[Finding]:
    for name, low in file.low.items():
        ends = pc.min_max(rows[name]).as_py()
        if (ends["min"], ends["max"]) != (low, file.high[name]):
            what = f"{name} goes from {ends['min']} to {ends['max']}, the log says {low} to {file.high[name]}"
            yield Finding(
                "error", file.name, what, "append its rows to a new store: gates may skip this file"
            )


def _contract(file: LogFile, rows: pa.Table) -> Iterator[Finding]:
    at = 0
    for batch in rows.to_batches(max_chunksize=4096):
        fix = "delete the row by its id and append it again"
        try:
            check(batch)
        except ValidationError as error:
            yield Finding("error", file.name, str(error.moved(at).message), fix)
        wrong = pc.not_equal(batch["id_hash"], id_hashes(batch["id"].to_pylist()))
        for i in np.asarray(wrong).nonzero()[0]:
            yield Finding(
                "error", file.name, f"id_hash of {batch['id'][int(i)].as_py()!r} is not that of its id", fix
            )
        at += batch.num_rows


def _duplicates(table: Table) -> Iterator[Finding]:
    schema = pa.schema([table.schema.field("id")])
    parts = [files.read(table.place, file, schema)["id"] for file in table.files()]
    ids = pa.chunked_array([chunk for part in parts for chunk in part.chunks], pa.string())
    for counted in pc.value_counts(ids).to_pylist():
        if counted["counts"] > 1:
            yield Finding(
                "warning",
                f"id {counted['values']!r}",
                f"names {counted['counts']} rows",
                "delete all but one; updates by id refuse it until then",
            )


def _orphans(table: Table, repair: bool, seconds: float) -> Iterator[Finding]:
    known = table.departures()
    torn = b"".join(table.place.read(e.name) for e in table.place.entries(TORN))
    for there in table.place.entries():
        if "/" in there.name or there.name in known or not NAME.fullmatch(there.name):
            continue
        old = time.time() - there.modified >= seconds
        gone = repair and old and there.name.encode() not in torn
        if gone:
            table.place.discard(there.name)
        yield Finding(
            "warning",
            there.name,
            f"no snapshot uses it ({there.bytes:,} bytes)",
            "left by a writer that was killed; --repair removes it once it is an hour old",
            repaired=gone,
        )
