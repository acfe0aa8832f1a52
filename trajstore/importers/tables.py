"""Owns Parquet files as records: a dict a row, number lists as numpy arrays; knows no format's columns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.errors import ImportFormatError
from trajstore.importers import files
from trajstore.importers.records import ImportOptions, Record, read_records

_ROWS = 4096


def read_parquet(path: Path) -> Iterator[Record]:
    """The rows of a Parquet file in order, 4,096 in memory at a time.

    Raises:
        ImportFormatError: it is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    size = path.stat().st_size
    try:
        source = pa.BufferReader(files.read_whole(path)) if files.is_packed(path) else path
        with pq.ParquetFile(source) as file:
            total = max(file.metadata.num_rows, 1)
            row = 0
            for batch in file.iter_batches(batch_size=_ROWS):
                columns = {name: _values(batch.column(name)) for name in batch.schema.names}
                for index in range(batch.num_rows):
                    data = {name: values[index] for name, values in columns.items()}
                    row += 1
                    yield Record(data, f"{path}[{row - 1}]", size * row // total)
    except (pa.ArrowException, OSError) as error:
        raise ImportFormatError(
            f"{path}: not a whole Parquet file: {error}", hint="copy the file again"
        ) from error


def read_rows(path: Path, options: ImportOptions) -> Iterator[Record]:
    """The records of a Parquet file, or of JSON: for formats that come as either."""
    return read_parquet(path) if files.head(path, 4) == b"PAR1" else read_records(path, options)


def _values(column: Any) -> list[Any]:
    import pyarrow as pa

    kind = column.type
    flat = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not flat or not (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type)):
        return column.to_pylist()  # type: ignore[no-any-return]  # pyarrow is untyped
    if column.values.null_count:
        return column.to_pylist()  # type: ignore[no-any-return]  # pyarrow is untyped
    numbers = np.asarray(column.values)
    offsets = column.offsets.to_numpy()
    there = column.is_valid().to_pylist()
    bounds = zip(offsets[:-1].tolist(), offsets[1:].tolist(), there, strict=True)
    return [numbers[start:end] if valid else None for start, end, valid in bounds]
