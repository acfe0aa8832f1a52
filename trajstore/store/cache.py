"""Owns the column cache: columns of data files decoded once into mapped Arrow IPC; knows no rows and no log.

A column of a data file never changes, so it is decoded once into `<cache>/<data file>/<column>.arrow`: an
uncompressed IPC file, list columns as flat values and int64 offsets. Processes share it through the page
cache. The name of a data file holds the digest of its bytes, so nothing here is ever out of date; what was
not used for longest goes when the size limit is reached.

A file is written aside under a lock, made durable, then renamed: what has its name is whole. It is written
with write(2) and never through a mapping, where a full disk would kill the process; it is removed by unlink,
which leaves the pages of those who map it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote, unquote

import pyarrow as pa

from trajstore.errors import InputError, StorageError, TrajstoreError
from trajstore.store import files
from trajstore.store.columns import cached_field, decode, decoded_size
from trajstore.store.datafile import DataFile
from trajstore.store.place import Place

FORMAT = "columns.v1"
_SUFFIX, _ASIDE = ".arrow", ".tmp"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Entry:
    """One column of one data file in the cache.

    Attributes:
        data_file: whose column it is.
        column: its name, "" for what a builder has not finished.
        bytes: size on disk.
        used: when it was last opened, UTC.
        path: where it is.
    """

    data_file: str
    column: str
    bytes: int
    used: datetime
    path: Path


@dataclass(frozen=True)
class CacheUse:
    """What an opening found.

    Attributes:
        hits: columns of files that were in the cache.
        decoded: those that had to be decoded.
    """

    hits: int
    decoded: int


class ColumnCache:
    """A folder of decoded columns, shared by processes.

    Args:
        folder: where; by default TRAJSTORE_CACHE, else `trajstore` in the user's cache folder.
        limit: bytes it may hold; by default TRAJSTORE_CACHE_SIZE ("200G"), else half of what it holds and
            the disk has free together.
    """

    def __init__(self, folder: Path | None = None, limit: int | None = None) -> None:
        self.folder = (folder or default_folder()) / FORMAT
        self._limit = limit

    def limit(self) -> int:
        """Bytes it may hold now.

        Raises:
            InputError: TRAJSTORE_CACHE_SIZE is not a size.
        """
        if self._limit is not None:
            return self._limit
        given = os.environ.get("TRAJSTORE_CACHE_SIZE")
        if given:
            return parse_size(given)
        return (shutil.disk_usage(self._made()).free + sum(e.bytes for e in self.entries())) // 2

    def entries(self) -> list[Entry]:
        """What is in it, least recently used first."""
        found = []
        for path in self.folder.glob("*/*"):
            with suppress(FileNotFoundError):  # another process removes it
                status = path.stat()
                column = unquote(path.stem) if path.suffix == _SUFFIX else ""
                used = datetime.fromtimestamp(status.st_mtime, UTC)
                found.append(Entry(path.parent.name, column, status.st_size, used, path))
        return sorted(found, key=lambda e: e.used)

    def remove(self, keys: Collection[str] | None = None) -> int:
        """Removes the columns of these data files (of all when None); returns the bytes freed.

        Those who have them open keep them until they close; what a builder is writing stays.
        """
        return _unlink([e for e in self.entries() if keys is None or e.data_file in keys])

    def open(
        self, place: Place, data_files: Sequence[DataFile], schema: pa.Schema
    ) -> tuple[pa.Table, CacheUse]:
        """These columns of these files, decoding what is not there yet.

        Decoding runs in parallel, one column of one file at a time and worker; other processes that want
        the same column wait for the one that began. A terminal shows a progress bar.

        Args:
            place: the table's.
            data_files: which files.
            schema: the columns. One that a file does not have is null.

        Returns:
            The rows of all files, one after the other and mapped: lists of numbers as large_list, booleans
            in them as uint8.

        Raises:
            CorruptFileError: a data file is missing or cannot be read.
            ValidationError: an element inside a list of numbers is null.
            StorageError: the cache's disk is full or may not be written, or the columns do not fit into
                its limit.
        """
        wanted = [(file, field) for field in schema for file in data_files]
        found = {i: self._map(place, *task) for i, task in enumerate(wanted)}
        missing = [i for i, column in found.items() if column is None]
        if missing:
            found |= zip(missing, self._build(place, [wanted[i] for i in missing]), strict=True)
        cached = pa.schema([cached_field(f) for f in schema])
        chunks: list[list[pa.Array]] = [[] for _ in schema]
        for i, column in found.items():
            chunks[i // len(data_files)] += column.chunks if column is not None else []
        columns = [pa.chunked_array(c, f.type) for c, f in zip(chunks, cached, strict=True)]
        table = pa.Table.from_arrays(columns, schema=cached)
        return table, CacheUse(len(wanted) - len(missing), len(missing))

    def _path(self, place: Place, file: DataFile, column: str) -> Path:
        return self.folder / key(place, file.name, file.bytes) / (quote(column, safe="") + _SUFFIX)

    def _map(self, place: Place, file: DataFile, field: pa.Field) -> pa.ChunkedArray | None:
        path = self._path(place, file, field.name)
        try:
            with pa.memory_map(str(path)) as source:
                mapped = source.read_buffer()  # outlives the descriptor, which is closed here
            column = pa.ipc.open_file(mapped).read_all().column(0)
        except FileNotFoundError:
            return None
        except pa.ArrowInvalid:  # somebody else's damage: it is decoded again
            path.unlink(missing_ok=True)
            return None
        except OSError as error:
            raise _refused(self.folder, error) from error
        with suppress(OSError):  # of a cache that we may only read, others keep the order
            os.utime(path)
        # Another type is that of a column of this name in a later schema; it is decoded again.
        return column if column.type == cached_field(field).type and len(column) == file.rows else None

    # Building

    def _build(self, place: Place, tasks: Sequence[tuple[DataFile, pa.Field]]) -> list[pa.ChunkedArray]:
        workers = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4, 8)
        with ThreadPoolExecutor(workers, "trajstore-cache") as pool:
            fields: dict[str, tuple[DataFile, list[pa.Field]]] = {}
            for file, field in tasks:
                fields.setdefault(file.name, (file, []))[1].append(field)
            total = sum(pool.map(lambda of: decoded_size(place, *of), fields.values()))
            self._make_room(total, {key(place, file.name, file.bytes) for file, _ in tasks})
            with _progress(total) as advance:
                running = [pool.submit(self._claim, place, *task, advance) for task in tasks]
                try:
                    return [future.result() for future in running]
                finally:
                    for future in running:
                        future.cancel()

    def _claim(
        self, place: Place, file: DataFile, field: pa.Field, advance: Callable[[int], None]
    ) -> pa.ChunkedArray:
        """The column, decoded here or by another process that was first."""
        path = self._path(place, file, field.name)
        for _ in range(3):  # it may be evicted before it is mapped, hardly twice
            try:
                with _locked(path.with_suffix(_ASIDE)) as aside:
                    column = self._map(place, file, field)
                    if column is not None:
                        return column
                    decode(place, file, field, aside, advance)
                    aside.rename(path)
            except OSError as error:
                if isinstance(error, TrajstoreError):
                    raise
                raise _refused(self.folder, error) from error
            column = self._map(place, file, field)
            if column is not None:
                return column
        raise StorageError(f"{path} is removed as soon as it is written", hint="raise TRAJSTORE_CACHE_SIZE")

    def _made(self) -> Path:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _refused(self.folder, error) from error
        return self.folder

    def _make_room(self, needed: int, keep: set[str]) -> None:
        self._made()
        limit, entries = self.limit(), self.entries()
        over = sum(e.bytes for e in entries) + needed - limit
        if over <= 0:
            return
        going = []
        for entry in entries:
            if over > 0 and entry.data_file not in keep:
                going.append(entry)
                over -= entry.bytes
        if over > 0:
            raise StorageError(
                f"the columns need {needed:,} bytes in the cache {self.folder}, its limit is {limit:,}",
                hint="set TRAJSTORE_CACHE_SIZE (e.g. 200G), or TRAJSTORE_CACHE to a larger disk",
            )
        _unlink(going)


def default_folder() -> Path:
    """TRAJSTORE_CACHE, else `trajstore` in the user's cache folder (XDG_CACHE_HOME, else ~/.cache)."""
    given = os.environ.get("TRAJSTORE_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "trajstore"


def parse_size(text: str) -> int:
    """Bytes of "1500000", "500M", "1.5GB" or "2 TiB"; K, M, G and T are powers of 1024.

    Raises:
        InputError: it is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise InputError(f"TRAJSTORE_CACHE_SIZE is {text!r}, expected a size", hint="200G, for example")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def key(place: Place, name: str, size: int) -> str:
    """What the cache calls a data file: its name, which holds its digest, if it is one of ours."""
    if files.NAME.fullmatch(name):
        return name.removesuffix(".parquet")
    named = f"{place.url(name)}\n{size}"
    return f"other-{hashlib.blake2b(named.encode(), digest_size=16).hexdigest()}"


def keys(place: Place) -> set[str]:
    """What the cache calls the data files of a store, of all snapshots that are still there."""
    return {key(place, e.name, e.bytes) for e in place.entries() if e.name.endswith(".parquet")}


# Files


@contextmanager
def _locked(path: Path) -> Iterator[Path]:
    """A file to write to that no other process or thread writes to; gone afterwards unless renamed.

    The lock goes with the process: what a killed one left is taken over and written again.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            continue  # the folder was empty, and removed
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not _is_at(descriptor, path):
                continue  # renamed or removed while we waited
            try:
                yield path
            finally:
                if _is_at(descriptor, path):
                    path.unlink()
            return
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _unlink(entries: Sequence[Entry]) -> int:
    freed = 0
    for entry in entries:
        with suppress(FileNotFoundError):
            if entry.column or _is_abandoned(entry.path):
                entry.path.unlink()
                freed += entry.bytes
        with suppress(OSError):  # not empty yet
            entry.path.parent.rmdir()
    return freed


def _is_abandoned(path: Path) -> bool:
    """Whether a builder left this file when it died."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def _refused(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"the column cache {folder} refused: {error}",
        hint="make room (trajstore cache rm), or set TRAJSTORE_CACHE to a folder with room",
    )


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing elsewhere; what it gives is told of bytes done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("decoding columns"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.advance(task, done)
