"""Owns the store's Parquet files: encodings, statistics, digests, fsync, reading; knows nothing of commits.

A file is written aside, made durable, and only then gets its name, `part-<uuid>-<digest>.parquet`, where the
digest is 16 hex digits of blake2b over its bytes.
"""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trajstore.errors import CorruptFileError, StorageError, TrajstoreError
from trajstore.store.datafile import DataFile
from trajstore.store.place import Place

ROW_GROUP_ROWS = 1024
GATHER_ROWS = 4096
GATHER_BYTES = 128 << 20

NAME = re.compile(r"part-[0-9a-f]{32}(-[0-9a-f]{16}\.parquet|\.tmp)")
"""Names of data files, and of those that are being written."""

_DICTIONARY_TEXT = frozenset(
    {
        *("group_id", "prompt", "status", "version_known", "finish_reason", "source"),
        *("writer_id", "start_rollout_id", "parent_id"),
    }
)
_PLAIN_NUMBERS = ("id_hash",)  # every value is another one
_STATISTICS_TEXT = ("group_id", "status", "version_known", "writer_id")


class FileWriter:
    """Writes record batches of one schema to one file; `close` gives it its name.

    Used as a context manager it removes what is half-written when the block fails.
    """

    def __init__(self, place: Place, schema: pa.Schema) -> None:
        self.place = place
        self.schema = schema
        self._aside = place.aside(f"part-{uuid.uuid4().hex}.tmp")
        self._sink: BinaryIO = self._aside.open("wb")
        self._hashed = _Hashed(self._sink)
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_rows = self._gathered_bytes = 0
        self._rows = 0
        self._low: dict[str, int] = {}
        self._high: dict[str, int] = {}
        self._nulls = {f.name: 0 for f in schema if pa.types.is_integer(f.type)}
        try:
            self._parquet = pq.ParquetWriter(
                pa.PythonFile(self._hashed, mode="w"), schema, **settings(schema)
            )
        except BaseException:
            self._sink.close()
            self._aside.unlink()
            raise

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()

    @property
    def bytes_written(self) -> int:
        """Bytes on their way to disk so far."""
        return self._sink.tell()

    def write(self, batch: pa.RecordBatch) -> None:
        """Adds rows; small batches are gathered, so that row groups do not get tiny."""
        self._gathered.append(batch)
        self._gathered_rows += batch.num_rows
        self._gathered_bytes += batch.nbytes
        if self._gathered_rows >= GATHER_ROWS or self._gathered_bytes >= GATHER_BYTES:
            self._write_gathered()

    def _write_gathered(self) -> None:
        """Writes what is gathered, by oldest policy version, so that a staleness gate skips row groups."""
        if not self._gathered:
            return
        batch = pa.concat_batches(self._gathered)
        self._gathered = []
        self._gathered_rows = self._gathered_bytes = 0
        if "oldest_version_id" in batch.schema.names:
            batch = batch.take(pc.sort_indices(batch, [("oldest_version_id", "ascending")]))
        for name in self._nulls:
            column = batch.column(name)
            self._nulls[name] += column.null_count
            if column.null_count < len(column):
                ends = pc.min_max(column).as_py()
                self._low[name] = min(ends["min"], self._low.get(name, ends["min"]))
                self._high[name] = max(ends["max"], self._high.get(name, ends["max"]))
        self._rows += batch.num_rows
        self._parquet.write_batch(batch, row_group_size=ROW_GROUP_ROWS)

    def close(self) -> DataFile:
        """Makes the file durable under its final name."""
        self._write_gathered()
        self._parquet.close()
        self._sink.flush()
        os.fsync(self._sink.fileno())
        size = self._sink.tell()
        self._sink.close()
        self._verify()
        name = f"{self._aside.stem}-{self._hashed.digest.hexdigest()}.parquet"
        self.place.publish(self._aside, name)
        return DataFile(name, self._rows, size, self._low, self._high, self._nulls)

    def _verify(self) -> None:
        """What the log will say of the file is what its footer says: a wrong bound would hide rows."""
        metadata = pq.read_metadata(self._aside)
        if metadata.num_rows != self._rows:
            raise CorruptFileError(f"{self._aside} has {metadata.num_rows} rows, {self._rows} were written")
        bounds: dict[str, tuple[int, int]] = {}
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            for chunk in map(group.column, range(group.num_columns)):
                name, found = chunk.path_in_schema, chunk.statistics
                if name in self._nulls and found is not None and found.has_min_max:
                    low, high = bounds.get(name, (found.min, found.max))
                    bounds[name] = (min(low, found.min), max(high, found.max))
        if bounds != {name: (low, self._high[name]) for name, low in self._low.items()}:
            raise CorruptFileError(f"{self._aside} has other statistics than the rows written to it")

    def abort(self) -> None:
        """Removes the half-written file."""
        self._hashed.dropping = True  # the footer that Parquet writes when it closes goes nowhere
        try:
            self._parquet.close()
            with suppress(OSError):  # what is still buffered may not fit on a full disk: it goes anyway
                self._sink.close()
        finally:
            self._aside.unlink(missing_ok=True)


@contextmanager
def storage_errors(place: Place) -> Iterator[None]:
    """Turns the operating system's refusals into ours.

    Raises:
        StorageError: a file could not be written.
    """
    try:
        yield
    except TrajstoreError:
        raise
    except OSError as error:
        raise StorageError(
            f"{place} refused a write: {error}", hint="nothing was committed; make room or get access"
        ) from error


class _Hashed:
    """A sink that digests what passes through it."""

    closed = False
    dropping = False

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink
        self.digest = hashlib.blake2b(digest_size=8)

    def write(self, data: bytes) -> int:
        if self.dropping:
            return len(data)
        self.digest.update(data)
        return self._sink.write(data)

    def tell(self) -> int:
        return self._sink.tell()

    def flush(self) -> None:
        self._sink.flush()

    def close(self) -> None:
        self.closed = True


def settings(schema: pa.Schema) -> dict[str, Any]:
    """Parquet settings for a schema, by leaf path: other names of list columns are ignored in silence."""
    dictionary, split, statistics = [], {}, []
    for f in schema:
        for path, kind in _leaves(f.name, f.type):
            nested = path != f.name
            if pa.types.is_floating(kind):
                if nested:
                    split[path] = "BYTE_STREAM_SPLIT"
                else:
                    dictionary.append(path)
            elif pa.types.is_integer(kind):
                if f.name not in _PLAIN_NUMBERS:
                    dictionary.append(path)
                if not nested:
                    statistics.append(path)
            elif pa.types.is_string(kind) and f.name in _DICTIONARY_TEXT:
                dictionary.append(path)
                if f.name in _STATISTICS_TEXT:
                    statistics.append(path)
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": dictionary,
        "column_encoding": split,
        # Never on floats: their statistics leave NaN out, and DuckDB prunes on them.
        "write_statistics": statistics,
        "store_schema": True,
    }


def _leaves(path: str, kind: pa.DataType) -> list[tuple[str, pa.DataType]]:
    if pa.types.is_list(kind):
        return _leaves(f"{path}.list.element", kind.value_type)
    if pa.types.is_struct(kind):
        return [leaf for f in kind for leaf in _leaves(f"{path}.{f.name}", f.type)]
    return [(path, kind)]


def read(place: Place, file: DataFile, schema: pa.Schema, rows: NDArray[np.int64] | None = None) -> pa.Table:
    """Columns of one file, those it does not have as null.

    Args:
        place: the table's.
        file: which file.
        schema: the columns to read.
        rows: positions to read, ascending; None reads all. Row groups without any are not touched.

    Raises:
        CorruptFileError: the file is missing or cannot be read.
    """
    with reading(place, file) as parquet:
        there = [name for name in schema.names if name in parquet.schema_arrow.names]
        table = parquet.read(there) if rows is None else _read_rows(parquet, there, rows)
    count = table.num_rows if there else file.rows if rows is None else len(rows)
    columns = [
        table.column(f.name).cast(f.type) if f.name in there else pa.nulls(count, f.type) for f in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


@contextmanager
def reading(place: Place, file: DataFile) -> Iterator[pq.ParquetFile]:
    """One file, open for reading.

    Raises:
        CorruptFileError: the file is missing or cannot be read.
    """
    try:
        with place.open(file.name) as source:
            yield pq.ParquetFile(source, pre_buffer=place.folder is None)
    except TrajstoreError:
        raise
    except FileNotFoundError as error:
        raise CorruptFileError(
            f"data file {place.url(file.name)} is gone: it was deleted, or its snapshot was vacuumed",
            hint="read a newer snapshot, or restore the file from a backup; tags keep snapshots",
        ) from error
    except (OSError, pa.ArrowException) as error:
        raise CorruptFileError(
            f"data file {place.url(file.name)} cannot be read: {error}",
            hint="restore the file from a backup, or go back to a snapshot that does not use it",
        ) from error


def _read_rows(parquet: pq.ParquetFile, columns: Sequence[str], rows: NDArray[np.int64]) -> pa.Table:
    sizes = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
    ends = np.cumsum(sizes, dtype=np.int64)
    group_of = np.searchsorted(ends, rows, side="right")
    parts = []
    for group in np.unique(group_of):
        inside = rows[group_of == group] - (ends[group] - sizes[group])
        part = parquet.read_row_group(int(group), columns)
        parts.append(part if len(inside) == sizes[group] else part.take(inside))
    return pa.concat_tables(parts) if parts else parquet.schema_arrow.empty_table().select(columns)


def column_bytes(place: Place, files: Sequence[DataFile]) -> dict[str, int]:
    """Compressed bytes of each column over all files, from the footers."""
    total: dict[str, int] = {}
    for file in files:
        with place.open(file.name) as source:
            metadata = pq.read_metadata(source)
        for group in range(metadata.num_row_groups):
            row_group = metadata.row_group(group)
            for i in range(row_group.num_columns):
                chunk = row_group.column(i)
                name = chunk.path_in_schema.split(".")[0]
                total[name] = total.get(name, 0) + chunk.total_compressed_size
    return total
