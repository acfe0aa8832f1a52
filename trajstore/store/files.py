"""Owns the store's Parquet files: encodings, statistics, digests, fsync, reading; knows nothing of commits.

A file is written aside, made durable, and only then gets its name, `part-<uuid>-<digest>.parquet`, where the
digest is 16 hex digits of blake2b over its bytes.
"""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
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
RUN = 8
"""Mean length of runs from which on a list column of numbers is dictionary-encoded."""
SAMPLE = 1 << 16

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
        self._stem = f"part-{uuid.uuid4().hex}"
        self._sink = place.aside(self._aside)
        self._hashed = _Hashed(self._sink)
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_rows = self._gathered_bytes = 0
        self._rows = 0
        self._low: dict[str, int] = {}
        self._high: dict[str, int] = {}
        self._nulls = {f.name: 0 for f in schema if pa.types.is_integer(f.type)}
        self._parquet: pq.ParquetWriter | None = None

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()

    @property
    def _aside(self) -> str:
        return f"{self._stem}.tmp"

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
        batch = pa.concat_batches(self._gathered) if len(self._gathered) > 1 else self._gathered[0]
        self._gathered = []
        self._gathered_rows = self._gathered_bytes = 0
        if "oldest_version_id" in batch.schema.names:
            order = pc.sort_indices(batch["oldest_version_id"])
            if not np.array_equal(order, np.arange(len(order))):
                batch = batch.take(order)
        for name in self._nulls:
            column = batch.column(name)
            self._nulls[name] += column.null_count
            if column.null_count < len(column):
                ends = pc.min_max(column).as_py()
                self._low[name] = min(ends["min"], self._low.get(name, ends["min"]))
                self._high[name] = max(ends["max"], self._high.get(name, ends["max"]))
        self._rows += batch.num_rows
        self._start(runs(batch)).write_batch(batch, row_group_size=ROW_GROUP_ROWS)

    def _start(self, runs: Collection[str] = ()) -> pq.ParquetWriter:
        """The writer of Parquet, whose encodings are chosen when the first rows are known."""
        if self._parquet is None:
            sink = pa.PythonFile(self._hashed, mode="w")
            self._parquet = pq.ParquetWriter(sink, self.schema, **settings(self.schema, runs))
        return self._parquet

    def close(self) -> DataFile:
        """Makes the file durable under its final name."""
        self._write_gathered()
        self._start().close()
        self._sink.flush()
        os.fsync(self._sink.fileno())
        size = self._sink.tell()
        self._verify()
        name = f"{self._stem}-{self._hashed.digest.hexdigest()}.parquet"
        self.place.publish(self._sink, self._aside, name)
        self._sink.close()
        return DataFile(name, self._rows, size, self._low, self._high, self._nulls)

    def _verify(self) -> None:
        """What the log will say of the file is what its footer says: a wrong bound would hide rows."""
        metadata = pq.read_metadata(self._sink)
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
            if self._parquet is not None:
                self._parquet.close()
            with suppress(OSError):  # what is still buffered may not fit on a full disk: it goes anyway
                self._sink.close()
        finally:
            self.place.drop(self._aside)


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


def runs(batch: pa.RecordBatch) -> frozenset[str]:
    """List columns of numbers whose values, zeros aside, mostly equal the one before.

    One advantage for all tokens of a row is such a column: a dictionary makes it 4 times smaller than
    BYTE_STREAM_SPLIT, and makes log-probs half as large again, be they ever so sparse. The first `SAMPLE`
    values decide, so the same rows are always encoded in the same way.
    """
    found = []
    for name in batch.schema.names:
        column = batch[name]
        if not pa.types.is_list(column.type) or not _is_wide_number(column.type.value_type):
            continue
        values = column.flatten()[:SAMPLE].to_numpy()
        bits = values.view(f"i{values.itemsize}")
        news = np.count_nonzero(bits[1:][bits[1:] != bits[:-1]])
        if len(bits) and news * RUN <= np.count_nonzero(bits):
            found.append(name)
    return frozenset(found)


def _is_wide_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or (pa.types.is_integer(kind) and kind.bit_width > 8))


def settings(schema: pa.Schema, runs: Collection[str] = ()) -> dict[str, Any]:
    """Parquet settings for a schema, by leaf path: other names of list columns are ignored in silence.

    Args:
        schema: the columns.
        runs: the list columns in which a value mostly equals the one before.
    """
    dictionary, split, statistics = [], {}, []
    for f in schema:
        for path, kind in _leaves(f.name, f.type):
            nested = path != f.name
            if pa.types.is_floating(kind):
                if nested and f.name not in runs:
                    split[path] = "BYTE_STREAM_SPLIT"
                else:
                    dictionary.append(path)
            elif pa.types.is_integer(kind):
                # Token ids are plain: zstd finds whole phrases in them, and DuckDB before 2.0 reads no
                # BYTE_STREAM_SPLIT of integers.
                ids = pa.types.is_list(f.type) and f.type.value_type == kind and _is_wide_number(kind)
                if f.name in runs or not (ids or f.name in _PLAIN_NUMBERS):
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
        there = _there(parquet, schema)
        if rows is None:
            table = parquet.read(there)
        else:
            parts = [part for _, part in _row_groups(parquet, there, rows)]
            table = pa.concat_tables(parts) if parts else parquet.schema_arrow.empty_table().select(there)
    return _as(schema, table, file.rows if rows is None else len(rows))


def read_row_groups(
    place: Place, file: DataFile, schema: pa.Schema, rows: NDArray[np.int64]
) -> Iterator[tuple[slice, pa.Table]]:
    """The same rows as of `read`, a row group at a time; with each, which of `rows` they are."""
    with reading(place, file) as parquet:
        for part, table in _row_groups(parquet, _there(parquet, schema), rows):
            yield part, _as(schema, table, part.stop - part.start)


def _there(parquet: pq.ParquetFile, schema: pa.Schema) -> list[str]:
    known = set(parquet.schema_arrow.names)
    return [name for name in schema.names if name in known]


def _as(schema: pa.Schema, table: pa.Table, count: int) -> pa.Table:
    known = set(table.schema.names)
    columns = [
        table.column(f.name).cast(f.type) if f.name in known else pa.nulls(count, f.type) for f in schema
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


def _row_groups(
    parquet: pq.ParquetFile, columns: Sequence[str], rows: NDArray[np.int64]
) -> Iterator[tuple[slice, pa.Table]]:
    sizes = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
    ends = np.cumsum([0, *sizes], dtype=np.int64)
    bounds = np.searchsorted(rows, ends)
    for group, (first, last) in enumerate(pairwise(bounds.tolist())):
        if first == last:
            continue
        part = parquet.read_row_group(group, columns)
        inside = rows[first:last] - ends[group]
        yield slice(first, last), part if len(inside) == sizes[group] else part.take(inside)


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
