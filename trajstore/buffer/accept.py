"""Owns what may be added to a buffer → checked record batches, each row with an id; holds nothing."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trajstore.batch import TrajectoryBatch
from trajstore.codec import check, conform, encode, id_hashes
from trajstore.schema import BY_NAME, ROW_SCHEMA
from trajstore.trajectory import PartialTrajectory, Trajectory

Addable: TypeAlias = Sequence[Trajectory] | TrajectoryBatch | pa.RecordBatch | pa.Table

_CHUNK = 4096

_SLACK = 1 << 16
"""Bytes that a slice may hold on to beyond its own before it is copied."""


def encoded(given: Addable, refs: dict[str, Any]) -> list[pa.RecordBatch]:
    """The rows as record batches of the row's columns and any extra ones.

    Args:
        given: objects, a TrajectoryBatch, or Arrow data; what a store stamped is left out.
        refs: takes `kv_cache_ref` by id where it is an object that no column can hold.

    Raises:
        ValidationError: a row breaks the contract of the row.
        SchemaError: Arrow data does not fit the columns.
    """
    if isinstance(given, TrajectoryBatch):
        given = given.to_arrow()
    if isinstance(given, pa.RecordBatch):
        given = pa.Table.from_batches([given])
    if isinstance(given, pa.Table):
        return [_named(_own(batch)) for batch in _checked(given)]
    rows = list(given)
    for i, row in enumerate(rows):
        if isinstance(row, PartialTrajectory) and not isinstance(row.kv_cache_ref, str | None):
            rows[i] = replace(row, id=row.id or str(uuid.uuid4()), kv_cache_ref=None)
            refs[rows[i].id] = row.kv_cache_ref
    return [_named(encode(rows[start : start + _CHUNK])) for start in range(0, len(rows), _CHUNK)]


def _checked(table: pa.Table) -> list[pa.RecordBatch]:
    extra = [field for field in table.schema if field.name not in BY_NAME]
    schema = pa.schema([*ROW_SCHEMA, *extra])
    unstamped = table.select([name for name in table.schema.names if name in schema.names])
    batches = [conform(batch, schema) for batch in unstamped.to_batches(max_chunksize=_CHUNK)]
    for batch in batches:
        check(batch)
    return batches


def _own(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch, copied if it is a slice of much more: its chunk would hold all of that until it goes."""
    if batch.get_total_buffer_size() <= 2 * batch.nbytes + _SLACK:
        return batch
    return batch.take(pa.array(np.arange(batch.num_rows)))


def _named(batch: pa.RecordBatch) -> pa.RecordBatch:
    nameless = pc.equal(batch.column("id"), "")
    if not pc.any(nameless).as_py():
        return batch
    made = [str(uuid.uuid4()) for _ in range(pc.sum(nameless).as_py())]
    ids = pc.replace_with_mask(batch.column("id"), nameless, pa.array(made, pa.string()))
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    columns |= {"id": ids, "id_hash": id_hashes(ids.to_pylist())}
    return pa.record_batch(list(columns.values()), schema=batch.schema)
