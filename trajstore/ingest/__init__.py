"""Owns importer → store: each file becomes one commit, a large one several; must not know any file format.

Commits are idempotent: a file is a writer of its own, named by the digest of its content and of what was
asked, and its batches are numbered. So an import that was stopped is continued by the same call: what is in
is read and passed over.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from trajstore import importers
from trajstore.errors import ImportFormatError, ValidationError
from trajstore.importers import Imported, ImportOptions, NotRecognisedError, SourceFile
from trajstore.importers.records import place_and_reason
from trajstore.importers.tokenizer import load_tokenizer
from trajstore.ingest.refusals import OnBadRecord, Refusals
from trajstore.ingest.target import Target
from trajstore.store import Commit, TrajectoryStore
from trajstore.store.append import OnError
from trajstore.trajectory import Trajectory

AUTO = "auto"

COMMIT_ROWS = 1 << 16
COMMIT_TOKENS = 1 << 27
NAMED = 10
"""Rows without a reward that are named."""
_APPENDED: dict[OnBadRecord, OnError] = {"stop": "raise", "skip": "skip", "quarantine": "quarantine"}


@dataclass
class Progress:
    """How far an import has come; `total_bytes` is the size of all its files."""

    total_bytes: int
    bytes_read: int = 0
    rows: int = 0
    tokens: int = 0
    files: int = 0


@dataclass(frozen=True)
class FileReport:
    """What became of one file.

    Attributes:
        name: as in messages and ids.
        format: the format it was read as.
        why: how that was decided.
        rows: rows added.
        batches: commits it took, those of an earlier, stopped import included.
        already_in: whether all of it was in the store before.
    """

    name: str
    format: str
    why: str
    rows: int
    batches: int
    already_in: bool


@dataclass
class ImportReport:
    """What an import did.

    Attributes:
        commit: the commits of all files as one: the newest snapshot, rows and bytes added.
        tokens: tokens read.
        refused: where each bad record stands, and why it was refused.
        created: whether the import made the store.
        files: each file that was read.
        left_out: files of a folder that were not, with the reason.
        no_reward_at: where the first rows stand whose reward is not known (NaN) or infinite.
        found_in: whether some of it was in the store before.
    """

    commit: Commit
    refused: list[tuple[str, str]]
    tokens: int = 0
    created: bool = False
    files: list[FileReport] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    no_reward_at: list[str] = field(default_factory=list)
    found_in: bool = False

    @property
    def nothing(self) -> bool:
        """Whether every record was refused: none is in the store."""
        return bool(self.refused) and not self.commit.rows and not self.found_in

    @property
    def format(self) -> str:
        """The formats that were read, each once."""
        return ", ".join(dict.fromkeys(file.format for file in self.files))

    @property
    def why(self) -> str:
        """How the format was decided; of several, the first."""
        return self.files[0].why if self.files else "nothing was read"


@dataclass(frozen=True)
class _Asked:
    """What one import was asked for, and what it has gathered."""

    target: Target
    refusals: Refusals
    options: ImportOptions
    on_error: OnBadRecord
    nulls: bool
    progress: Progress
    report: Callable[[Progress], None]

    def options_for(self, namespace: str) -> ImportOptions:
        """The options for one file."""
        on_fault = None if self.on_error == "stop" else self.refusals.add
        return replace(self.options, namespace=namespace, on_fault=on_fault)


def ingest(
    source: str | Path,
    store: str | Path,
    *,
    format: str = AUTO,
    tokenizer: Path | None = None,
    on_error: OnBadRecord = "stop",
    nulls: bool = False,
    derive_groups: bool = True,
    report: Callable[[Progress], None] = lambda progress: None,
) -> ImportReport:
    """Imports a file, a folder, a glob or stdin ("-"); the store is made when there is none.

    A file is one commit, or nothing when it fails; beyond 65,536 rows or 134 million tokens it is several.
    The same file again, asked for in the same way, adds nothing.

    Args:
        source: what to read; gzip and zstd files are unpacked on the way.
        store: folder of the store, or its s3:// URI.
        format: a name of `trajstore.importers.FORMATS`, or "auto" to look at each file's beginning.
        tokenizer: a tokenizer.json or .tiktoken file for formats that hold text only.
        on_error: at a bad record "stop", "skip" it, or put it into the store's "quarantine"; all three name
            it, its place and the reason.
        nulls: accept null in a list of log-probs (or other floats) as NaN.
        derive_groups: rows of one file with the same prompt are a group where the format names none.
        report: called after every row.

    Raises:
        ImportFormatError: a file is not what its format says; names the file and the record.
        StoreExistsError: there is something at `store` that is not a store.
        FormatVersionError: the store was written by a newer trajstore.
    """
    if format != AUTO:
        importers.open_importer(format)
    target = Target(store)
    refusals = Refusals(target, on_error)
    read_by = None if tokenizer is None else load_tokenizer(tokenizer)
    made_from = None if tokenizer is None or tokenizer.is_dir() else importers.digest(tokenizer)
    options = ImportOptions(read_by, derive_groups=derive_groups)
    mark = json.dumps([format, made_from or str(tokenizer), nulls, derive_groups])
    done = ImportReport(Commit(0, 0, 0, True, (), {}), refusals.named, created=target.store is None)
    with importers.sources(source) as files:
        beside = importers.beside(files) if len(files) > 1 else {}
        chosen = [file for file in files if file.path not in beside]
        progress = Progress(sum(file.path.stat().st_size for file in chosen))
        asked = _Asked(target, refusals, options, on_error, nulls, progress, report)
        seen: dict[str, int] = {}
        for file in chosen:
            writer, content, copy = _writer(file, mark, seen)
            refusals.begin(writer)
            try:
                known = importers.Detected(format, "as asked") if format != AUTO else _detected(file, asked)
                if known is not None:
                    _import(file, known, f"{content}{copy}", writer, asked, done)
            except NotRecognisedError as error:
                if len(files) == 1:
                    raise
                done.left_out.append((file.name, place_and_reason(file.path, error.message)[1]))
            except ImportFormatError as error:
                raise _told_of_files(error, done, len(files)) from error
        done.left_out += [(file.name, beside[file.path]) for file in files if file.path in beside]
    if not done.files and not done.refused:
        reasons = "; ".join(f"{name}: {why}" for name, why in done.left_out[:3])
        more = f"; and {len(done.left_out) - 3:,} files more" if len(done.left_out) > 3 else ""
        raise ImportFormatError(
            f"{source}: no file in it can be imported: {reasons}{more}",
            hint="`trajstore formats` lists what is read; --format names one that is not told by itself",
        )
    done.created = done.created and target.store is not None
    if target.store is not None:
        done.commit = _with(done.commit, snapshot=target.store.snapshot)
    done.tokens = progress.tokens
    return done


def _writer(file: SourceFile, mark: str, seen: dict[str, int]) -> tuple[str, str, str]:
    """Who adds the rows of a file; and what tells them from others': its content, and which copy it is."""
    content = "+".join(importers.digest(path) for path in (file.path, *importers.joined(file.path)))
    seen[content] = seen.get(content, -1) + 1  # a second file with the same bytes is another file
    key = json.dumps([content, seen[content], mark])
    writer = f"import-{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}"
    return writer, content[:8], f"-{seen[content]}" if seen[content] else ""


def _detected(file: SourceFile, asked: _Asked) -> importers.Detected | None:
    """The format of a file; None for a damaged one that is passed over."""
    try:
        return importers.detect(file.path)
    except NotRecognisedError:
        raise
    except ImportFormatError as error:
        asked.options_for(file.name).fault(str(file.path), error)
        asked.refusals.set_aside()
        return None


def _import(
    file: SourceFile, known: importers.Detected, content: str, writer: str, asked: _Asked, done: ImportReport
) -> None:
    """One file, batch by batch."""
    format, why = known
    options = asked.options_for(f"{file.name}@{content}")
    before = done.commit.rows
    items = _guarded(importers.open_importer(format)(file.path, options), file.path, options)
    batch_no, all_in, base = 0, True, asked.progress.bytes_read
    size = file.path.stat().st_size
    while (batch := _Batch(items, asked, base, size, done.no_reward_at)).more:
        try:
            commit = _append(batch, writer, batch_no, asked)
        except ImportFormatError as error:
            raise _told_of_batches(error, done.commit.rows - before, batch_no) from error
        all_in &= commit.already_in
        done.found_in |= commit.already_in
        done.refused += [(batch.places[row.row], row.reason) for row in commit.refused]
        done.commit = _summed(done.commit, commit)
        asked.refusals.set_aside()
        batch_no += 1
    asked.refusals.set_aside()
    asked.progress.bytes_read = base + size
    asked.progress.files += 1
    rows = done.commit.rows - before
    done.files.append(FileReport(file.name, format, why, rows, batch_no, all_in and batch_no > 0))


def _guarded(items: Iterator[Imported], path: Path, options: ImportOptions) -> Iterator[Imported]:
    """The same, but a file that breaks off is a fault of its own: what came before it stays."""
    try:
        yield from items
    except ImportFormatError as error:
        options.fault(str(path), error)


class _Batch:
    """The next rows of a file, as many as one commit takes.

    Attributes:
        more: whether there is a first one.
        places: where each row given out so far stands in the file.
    """

    def __init__(
        self, items: Iterator[Imported], asked: _Asked, base: int, size: int, no_reward: list[str]
    ) -> None:
        self.places: list[str] = []
        self.more = True
        self._asked, self._no_reward = asked, no_reward
        self._base, self._size = base, size
        try:
            self._items = chain([next(items)], items)
        except StopIteration:
            self.more = False
            self._items = chain(())

    def __iter__(self) -> Iterator[Trajectory]:
        tokens, progress = 0, self._asked.progress
        if not self.more:
            return
        for item in self._items:
            self.places.append(item.where)
            length = item.trajectory.total_length
            tokens += length
            progress.rows += 1
            if len(self._no_reward) < NAMED and _is_wild(item.trajectory.reward):
                self._no_reward.append(item.where)
            progress.tokens += length
            progress.bytes_read = self._base + min(item.bytes_read, self._size)
            self._asked.report(progress)
            yield item.trajectory
            if len(self.places) == COMMIT_ROWS or tokens >= COMMIT_TOKENS:
                return


def _append(batch: _Batch, writer: str, batch_no: int, asked: _Asked) -> Commit:
    rows = iter(batch)

    def append(to: TrajectoryStore) -> Commit:
        commit = to.append(
            rows,
            writer_id=writer,
            batch_no=batch_no,
            on_error=_APPENDED[asked.on_error],
            nulls="nan" if asked.nulls else "error",
        )
        for _ in rows:  # of a batch that is in already, nothing was read
            pass
        return commit

    try:
        return asked.target.fill(append)
    except ValidationError as error:
        raise _placed(error, batch.places) from error


def _is_wild(reward: object) -> bool:
    return isinstance(reward, float) and not math.isfinite(reward)


def _with(commit: Commit, *, snapshot: int) -> Commit:
    return Commit(snapshot, commit.rows, commit.bytes, commit.already_in, commit.refused, commit.not_finite)


def _summed(total: Commit, one: Commit) -> Commit:
    names = [*total.not_finite, *one.not_finite]
    return Commit(
        snapshot=one.snapshot,
        rows=total.rows + one.rows,
        bytes=total.bytes + one.bytes,
        already_in=total.already_in and one.already_in,
        refused=total.refused + one.refused,
        not_finite={name: total.not_finite.get(name, 0) + one.not_finite.get(name, 0) for name in names},
    )


def _told_of_batches(error: ImportFormatError, rows: int, batches: int) -> ImportFormatError:
    if not batches:
        return error
    hint = f"{error.hint}; " if error.hint else ""
    went_in = f"the {batches} batches before it are in ({rows:,} rows now)"
    return type(error)(error.message, hint=f"{hint}{went_in}; --on-error skip goes on behind it")


def _told_of_files(error: ImportFormatError, done: ImportReport, files: int) -> ImportFormatError:
    """The same complaint for who gave several files: what became of those before, how to go on."""
    if files == 1:
        return error
    hint = f"{error.hint}; " if error.hint else ""
    went_in = f"{len(done.files):,} of the {files:,} files are in; " if done.files else ""
    return type(error)(error.message, hint=f"{hint}{went_in}--on-error skip goes on with the other files")


def _placed(error: ValidationError, places: list[str]) -> ImportFormatError:
    """The same complaint in terms of the file."""
    where = places[error.row] if error.row is not None else "row unknown"
    column = f"column {error.column!r}: " if error.column else ""
    hint = f"{error.hint}; " if error.hint else ""
    return ImportFormatError(
        f"{where}: {column}{error.reason}", hint=f"{hint}--on-error quarantine sets such rows aside"
    )
