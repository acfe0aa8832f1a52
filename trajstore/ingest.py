"""Owns importer → store: one file becomes one commit, or nothing; must not know any file format."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trajstore.errors import ImportFormatError, StoreExistsError, ValidationError
from trajstore.importers import ImportOptions, detect, open_importer
from trajstore.importers.tokenizer import load_tokenizer
from trajstore.store import Commit, Place, TrajectoryStore
from trajstore.store.append import OnError
from trajstore.trajectory import Trajectory

AUTO = "auto"


@dataclass
class Progress:
    """How far an import has come; `total_bytes` is the size of the file."""

    total_bytes: int
    bytes_read: int = 0
    rows: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class ImportReport:
    """What an import did.

    Attributes:
        format: the format it read.
        why: how that was decided.
        commit: what the store says of the commit.
        tokens: tokens read.
        refused: where each quarantined row stands in the file, and why it was refused.
        created: whether the import made the store.
    """

    format: str
    why: str
    commit: Commit
    tokens: int
    refused: list[tuple[str, str]]
    created: bool


def ingest(
    source: Path,
    store: str | Path,
    *,
    format: str = AUTO,
    tokenizer: Path | None = None,
    on_error: OnError = "raise",
    nulls: bool = False,
    report: Callable[[Progress], None] = lambda progress: None,
) -> ImportReport:
    """Imports one file as one commit; the store is made when there is none.

    When it fails, it leaves behind neither a new store nor a changed one.

    Args:
        source: the file.
        store: folder of the store, or its s3:// URI.
        format: a name of `trajstore.importers.FORMATS`, or "auto" to look at the first record.
        tokenizer: a tokenizer.json or .tiktoken file for formats that hold text only.
        on_error: "quarantine" puts rows that break the contract aside and commits the others.
        nulls: accept null in a list of log-probs (or other floats) as NaN.
        report: called after every row.

    Raises:
        ImportFormatError: the file is not what its format says; names the file and the line.
        StoreExistsError: there is something at `store` that is not a store.
        FormatVersionError: the store was written by a newer trajstore.
    """
    read = None if format == AUTO else open_importer(format)
    place = Place.of(store)
    target = TrajectoryStore.open(place) if place.is_table() else None
    if target is None and not place.is_free():
        raise StoreExistsError(f"{store} exists and is not a store", hint="choose another path")
    why = "as asked"
    if read is None:
        format, why = detect(source)
        read = open_importer(format)
    options = ImportOptions(None if tokenizer is None else load_tokenizer(tokenizer))
    places: list[str] = []
    progress = Progress(source.stat().st_size)

    def rows() -> Iterator[Trajectory]:
        for item in read(source, options):
            places.append(item.where)
            progress.rows += 1
            progress.tokens += item.trajectory.total_length
            progress.bytes_read = item.bytes_read
            report(progress)
            yield item.trajectory

    def append(to: TrajectoryStore) -> Commit:
        try:
            return to.append(rows(), on_error=on_error, nulls="nan" if nulls else "error")
        except ValidationError as error:
            raise _placed(error, places) from error

    commit = append(target) if target is not None else _created(place, append)
    refused = [(places[r.row], r.reason) for r in commit.refused]
    return ImportReport(format, why, commit, progress.tokens, refused, created=target is None)


def _placed(error: ValidationError, places: list[str]) -> ImportFormatError:
    """The same complaint in terms of the file."""
    where = places[error.row] if error.row is not None else "row unknown"
    column = f"column {error.column!r}: " if error.column else ""
    hint = f"{error.hint}; " if error.hint else ""
    return ImportFormatError(
        f"{where}: {column}{error.reason}", hint=f"{hint}--on-error quarantine sets such rows aside"
    )


def _created(place: Place, append: Callable[[TrajectoryStore], Commit]) -> Commit:
    """Makes the store, so that it is seen with its first rows in it or, when they fail, not at all.

    On disk it is made aside and moved into place; a bucket has no move, so what was made is removed again.
    """
    if place.folder is None:
        try:
            return append(TrajectoryStore.create(place))
        except BaseException:
            for entry in place.entries():
                place.delete(entry.name)
            raise
    parent = place.folder.parent
    while not parent.exists():
        parent = parent.parent
    aside = parent / f".{place.folder.name}-{uuid.uuid4().hex}.importing"
    try:
        commit = append(TrajectoryStore.create(aside))
        place.folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            aside.rename(place.folder)
        except OSError as error:
            raise StoreExistsError(f"{place} appeared while its first rows were read: {error}") from error
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return commit
