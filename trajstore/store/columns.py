"""Owns a data file's column decoded to an uncompressed IPC file; knows not where such files are kept.

List columns become flat values and int64 offsets; an attention_mask of ones becomes null, as if not given.
Memory is bounded: row groups are decoded, written and dropped in steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trajstore.errors import ValidationError
from trajstore.store import files
from trajstore.store.datafile import DataFile
from trajstore.store.place import Place

STEP = 64 << 20
"""Decoded bytes of one step; a row group that is larger is a step of its own."""


def cached_field(field: pa.Field) -> pa.Field:
    """A column's field in the cache: lists of numbers have int64 offsets and no nulls inside."""
    if not _is_list(field.type) or pa.types.is_nested(field.type.value_type):
        return field
    element = field.type.value_type
    if not (pa.types.is_boolean(element) or pa.types.is_integer(element) or pa.types.is_floating(element)):
        return field
    flat = pa.uint8() if pa.types.is_boolean(element) else element  # bits have no address of their own
    return field.with_type(pa.large_list(pa.field("element", flat, False)))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _as_cached(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    kind = cached_field(field).type
    if kind != field.type:
        for chunk in column.chunks:
            if chunk.flatten().null_count:
                raise ValidationError(
                    "an element inside a list is null", column=field.name, hint="store NaN instead"
                )
    if field.name == "attention_mask" and pc.all(pc.equal(pc.list_flatten(column), 1)).as_py():
        # Null says the same and is made from lengths: a byte a token that no batch has to read.
        return pa.chunked_array([pa.nulls(len(column), kind)])
    return column.cast(kind)


def decoded_size(place: Place, file: DataFile, fields: Sequence[pa.Field]) -> int:
    """Bytes of these columns once decoded, from the footer."""
    with files.reading(place, file) as parquet:
        return sum(sum(_group_sizes(parquet, field)) for field in fields)


def _group_sizes(parquet: pq.ParquetFile, field: pa.Field) -> list[int]:
    """Bytes of a column in each row group once decoded."""
    metadata, kind = parquet.metadata, cached_field(field).type
    leaf = kind.value_type if _is_list(kind) else kind
    width = max(leaf.bit_width // 8, 1) if pa.types.is_primitive(leaf) else None
    paths = [parquet.schema.column(i).path for i in range(len(parquet.schema))]
    leaves = [i for i, path in enumerate(paths) if path == field.name or path.startswith(f"{field.name}.")]
    sizes = []
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        chunks = [group.column(i) for i in leaves]
        sizes.append(
            8 * group.num_rows
            + sum(c.total_uncompressed_size if width is None else c.num_values * width for c in chunks)
        )
    return sizes


def decode(
    place: Place, file: DataFile, field: pa.Field, aside: Path, advance: Callable[[int], None]
) -> None:
    """Writes a column of a data file to an IPC file and makes it durable; tells of every step's bytes.

    Raises:
        CorruptFileError: the data file is missing or cannot be read.
        ValidationError: an element inside a list of numbers is null.
        OSError: the IPC file cannot be written.
    """
    schema = pa.schema([cached_field(field)])
    with pa.OSFile(str(aside), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for column, size in _parts(place, file, field):
            writer.write_table(pa.Table.from_arrays([column], schema=schema))
            advance(size)
    descriptor = os.open(aside, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _parts(place: Place, file: DataFile, field: pa.Field) -> Iterator[tuple[pa.ChunkedArray, int]]:
    """A column in steps, with the bytes of each."""
    with files.reading(place, file) as parquet:
        if field.name not in parquet.schema_arrow.names:
            yield pa.chunked_array([pa.nulls(file.rows, cached_field(field).type)]), 0
            return
        sizes = _group_sizes(parquet, field)
        for groups in _steps(sizes):
            part = parquet.read_row_groups(groups, [field.name], use_threads=False).column(0)
            yield _as_cached(part.cast(field.type), field), sum(sizes[g] for g in groups)


def _steps(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Runs of row groups that decode to about STEP bytes."""
    run: list[int] = []
    total = 0
    for group, size in enumerate(sizes):
        if run and total + size > STEP:
            yield run
            run, total = [], 0
        run.append(group)
        total += size
    if run:
        yield run
