"""Owns rows picked out of record batches, gathered only when touched; knows no objects and no store.

Axis letters: N rows of a chunk, K picked rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trajstore.layouts import UNKNOWN_VERSION, Ragged, Rows, group_codes

Int64s = NDArray[np.int64]

_SCALARS = {"length": 0, "prompt_length": -1, "version_id": UNKNOWN_VERSION, "id_hash": 0, "reward": 0}
"""Scalars of `layouts.Rows`, and what stands for null."""

_FEW_RUNS = 8
"""Up to so many runs of rows slices cost less than a take (research/performance.md §4)."""

_GATHERED_ROWS, _GATHERED_BYTES = 4096, 1 << 28
"""What is gathered at once of scattered rows: far from where the int32 offsets of a list overflow."""

_FEW_ROWS = 64
"""Rows so large that fewer than this are gathered at once are not worth a copy."""


@dataclass(frozen=True)
class _List:
    """Views of a list column: row i is `values[offsets[i] : offsets[i + 1]]`, or null where not valid."""

    values: NDArray[Any]
    offsets: NDArray[Any]
    valid: NDArray[np.bool_] | None


class Chunk:
    """A record batch, and numpy views of its columns, made when first asked for."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch
        self._lists: dict[str, _List | None] = {}
        self._scalars: dict[str, NDArray[Any]] = {}

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    def scalar(self, name: str) -> NDArray[Any]:
        """A number of each row, [N]; see `_SCALARS` for null."""
        found = self._scalars.get(name)
        if found is None:
            found = self.batch.column(name).fill_null(_SCALARS[name]).to_numpy()
            self._scalars[name] = found
        return found

    def lists(self, name: str) -> _List | None:
        """A list column of numbers; None when it is null in every row."""
        if name not in self._lists:
            array = self.batch.column(name) if name in self.batch.schema.names else None
            self._lists[name] = None if array is None or array.null_count == len(array) else _view(array)
        return self._lists[name]


def _view(array: pa.Array) -> _List:
    ragged = Ragged.from_arrow(array)
    valid = np.asarray(array.is_valid()) if array.null_count else None
    return _List(ragged.chunks[0], array.offsets.to_numpy(), valid)


@dataclass(frozen=True)
class Picked:
    """K rows: row i is `row[i]` of `chunks[chunk[i]]`.

    Attributes:
        chunks: what the rows are in.
        chunk, row: [K] int64 each.
        schema: the columns; a chunk that does not have one is null there.
    """

    chunks: Sequence[Chunk]
    chunk: Int64s
    row: Int64s
    schema: pa.Schema

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, positions: slice | Int64s) -> Picked:
        return Picked(self.chunks, self.chunk[positions], self.row[positions], self.schema)

    def column(self, name: str) -> pa.ChunkedArray:
        """One column of the rows."""
        kind = self.schema.field(name).type
        parts = [
            self.chunks[number].batch.column(name).take(pa.array(self.row[a:b]))
            if name in self.chunks[number].batch.schema.names
            else pa.nulls(b - a, kind)
            for number, a, b in self._parts()
        ]
        return pa.chunked_array(parts, kind)

    def to_arrow(self) -> pa.Table:
        """The rows as a table; runs of rows are slices, nothing of them is copied."""
        batches: list[pa.RecordBatch] = []
        for number, a, b in self._parts():
            batch, rows = _fitted(self.chunks[number].batch, self.schema), self.row[a:b]
            cuts = np.flatnonzero(np.diff(rows) != 1) + 1
            if len(cuts) >= _FEW_RUNS:
                batches.append(batch.take(pa.array(rows)))
                continue
            edges = [0, *cuts.tolist(), len(rows)]
            batches += [batch.slice(int(rows[first]), last - first) for first, last in pairwise(edges)]
        return pa.Table.from_batches(batches, self.schema)

    def _parts(self) -> Iterator[tuple[int, int, int]]:
        """Stretches of positions in one chunk: its number, first and last + 1."""
        if not len(self.chunk):
            return
        cuts = (np.flatnonzero(np.diff(self.chunk)) + 1).tolist()
        for a, b in zip([0, *cuts], [*cuts, len(self.chunk)], strict=True):
            yield int(self.chunk[a]), a, b

    def rows(self, pads: Mapping[str, float], columns: Sequence[str] = ()) -> Rows:
        """What batches of tensors are made from; no token is copied.

        Args:
            pads: see `Rows`.
            columns: list columns to look at, and group_id; none: all.
        """
        count = len(self)
        rewards: NDArray[Any] = np.empty(count, np.float64)
        scalars: dict[str, NDArray[Any]] = {"reward": rewards}
        scalars |= {name: np.empty(count, np.int64) for name in _SCALARS if name != "reward"}
        wanted = set(columns)
        names = [f.name for f in self.schema if (not wanted or f.name in wanted) and _holds_numbers(f.type)]
        start = {name: np.zeros(count, np.int64) for name in names}
        length = {name: np.full(count, -1, np.int64) for name in names}
        values: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
        chunk = {name: np.zeros(count, np.int64) for name in names}
        for number, a, b in self._parts():
            source, rows = self.chunks[number], self.row[a:b]
            for name, out in scalars.items():
                out[a:b] = source.scalar(name)[rows]
            for name in names:
                found = source.lists(name)
                if found is None:
                    continue
                start[name][a:b] = first = found.offsets[rows]
                size = found.offsets[rows + 1] - first
                length[name][a:b] = size if found.valid is None else np.where(found.valid[rows], size, -1)
                chunk[name][a:b] = len(values[name])
                values[name].append(found.values)
        return Rows(
            ids=_Ids(self),
            lengths=scalars["length"],
            prompt_lengths=scalars["prompt_length"],
            rewards=rewards,
            versions=scalars["version_id"],
            columns={n: Ragged(tuple(values[n]), chunk[n], start[n], length[n]) for n in names},
            pads=pads,
            keys=scalars["id_hash"],
            groups=group_codes(self.column("group_id")) if not wanted or "group_id" in wanted else None,
        )


class _Ids(Sequence[str]):
    """The ids of picked rows, gathered when the first one is asked for: tensors need none."""

    def __init__(self, picked: Picked) -> None:
        self._picked = picked

    @cached_property
    def _names(self) -> list[str]:
        return self._picked.column("id").to_pylist()  # type: ignore[no-any-return]  # pyarrow is untyped

    def __len__(self) -> int:
        return len(self._picked)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._names[index]


def take_rows(table: pa.Table, positions: Int64s) -> pa.Table:
    """The rows at these positions, in this order; long runs of rows are slices, nothing of them is copied.

    A take of a chunked table joins its chunks first: that copies all of it, and the int32 offsets of a list
    column overflow past 2^31 values.

    Args:
        table: the rows, in any number of chunks.
        positions: [K] positions from 0, in any order.
    """
    if not len(positions):
        return table.slice(0, 0)
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    size = min(_GATHERED_ROWS, _GATHERED_BYTES * len(table) // max(1, table.nbytes))
    if len(cuts) <= len(positions) // 4 or size < _FEW_ROWS:
        edges = [0, *cuts.tolist(), len(positions)]
        return pa.concat_tables([table.slice(int(positions[a]), b - a) for a, b in pairwise(edges)])
    batches = table.to_batches()
    ends = np.cumsum([len(batch) for batch in batches])
    chunk = np.searchsorted(ends, positions, side="right")
    row = positions - (ends - [len(batch) for batch in batches])[chunk]
    made: list[pa.RecordBatch] = []
    for first in range(0, len(positions), size):
        made += _gathered(batches, chunk[first : first + size], row[first : first + size])
    return pa.Table.from_batches(made, table.schema)


def _gathered(batches: Sequence[pa.RecordBatch], chunk: Int64s, row: Int64s) -> list[pa.RecordBatch]:
    """Scattered rows as one batch, or as more when they are large."""
    numbers, counts = np.unique(chunk, return_counts=True)
    order = np.argsort(chunk, kind="stable")
    groups = np.split(row[order], np.cumsum(counts)[:-1])
    parts = [batches[n].take(pa.array(rows)) for n, rows in zip(numbers.tolist(), groups, strict=True)]
    if len(parts) == 1:
        return parts
    if sum(part.nbytes for part in parts) > _GATHERED_BYTES:
        half = len(row) // 2
        return _gathered(batches, chunk[:half], row[:half]) + _gathered(batches, chunk[half:], row[half:])
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    return [pa.concat_batches(parts).take(pa.array(back))]


def _fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    if batch.schema.names == schema.names:
        return batch
    held = set(batch.schema.names)
    columns = [batch.column(f.name) if f.name in held else pa.nulls(len(batch), f.type) for f in schema]
    return pa.record_batch(columns, schema=schema)


def _holds_numbers(kind: pa.DataType) -> bool:
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(listed and pa.types.is_primitive(kind.value_type))
