"""Owns what a loader can be given: scans, batches, Arrow tables, frames, rows; knows no order of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from trajstore.batch import pad_values
from trajstore.errors import InputError
from trajstore.layouts import SCALARS, Lists, Ragged, Rows, RowSource
from trajstore.loader.stats import Stats


class Source(Protocol):
    """Where rows come from: a Scan, a TrajectoryBatch, or anything else with this method."""

    def rows(self, columns: Sequence[str] = ()) -> RowSource:
        """The scalars of all rows and the addresses of these list columns; others may come along."""
        ...


@dataclass(frozen=True)
class Given:
    """Rows that are there already."""

    given: RowSource

    def rows(self, columns: Sequence[str] = ()) -> RowSource:
        """The rows."""
        return self.given


class ArrowRows:
    """Rows of an Arrow table or record batch in memory, whose values are not copied.

    A table with the scalars of trajectories (`trajstore.layouts.SCALARS`) and `tokens` is one of
    trajectories. Any other one has a batch of all its list columns of numbers, each padded to its own
    width; its rows are as long as those of the first one.

    Args:
        data: the rows; list or large_list columns.
        pads: value on padding, by name; 0 when not named. For trajectories these are the columns of the
            user's own that `extra` may name.

    Raises:
        InputError: there is no list column of numbers.
    """

    def __init__(self, data: pa.Table | pa.RecordBatch, pads: dict[str, float] | None = None) -> None:
        self._table = data if isinstance(data, pa.Table) else pa.Table.from_batches([data])
        self._pads = pads

    def rows(self, columns: Sequence[str] = ()) -> RowSource:
        """The rows, all columns."""
        names = set(self._table.schema.names)
        if names.issuperset((*SCALARS, "tokens")):
            pads = pad_values(self._table.schema) if self._pads is None else self._pads
            return Rows.from_arrow(self._table, pads)
        return self._lists()

    def _lists(self) -> Lists:
        lists = {
            f.name: Ragged.from_arrow(self._table.column(f.name), f.name)
            for f in self._table.schema
            if _is_list_of_numbers(f.type)
        }
        if not lists:
            raise InputError(
                "the table has no list column of numbers", hint=f"columns: {self._table.schema.names}"
            )
        count = self._table.num_rows
        there = self._table.schema.names
        ids = self._table.column("id").to_pylist() if "id" in there else [str(i) for i in range(count)]
        keys = self._table.column("id_hash").to_numpy() if "id_hash" in there else np.arange(count)
        lengths = next(iter(lists.values())).length.clip(0)
        return Lists(ids, lengths, keys.astype(np.int64), lists, pads=self._pads or {})

    def __reduce__(self) -> tuple[object, ...]:
        # Pickling a slice of an Arrow table sends the whole of its buffers; an IPC stream sends its rows.
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self._table.schema) as writer:
            writer.write_table(self._table)
        return _from_stream, (sink.getvalue().to_pybytes(), self._pads)


def source_of(given: Any) -> Source:
    """Anything a loader takes as a source.

    Raises:
        InputError: it is nothing of the kind.
    """
    if type(given).__module__.partition(".")[0] == "polars":  # not imported here; a frame has other `rows`
        return ArrowRows(given.to_arrow())
    if isinstance(given, (pa.Table, pa.RecordBatch)):
        return ArrowRows(given)
    if hasattr(given, "outputs") and hasattr(given, "take"):
        return Given(given)
    if callable(getattr(given, "rows", None)):
        return given  # type: ignore[no-any-return]  # known by its method
    raise InputError(
        f"a loader cannot read a {type(given).__name__}",
        hint="give a Scan, a TrajectoryBatch, an Arrow table, a polars frame, or rows (trajstore.layouts)",
    )


def cache_use(source: Source) -> Stats:
    """What the rows of a source cost the column cache."""
    use = getattr(source, "cache_use", None)
    return Stats() if use is None else Stats(cache_hits=use.hits, cache_decoded=use.decoded)


def _from_stream(stream: bytes, pads: dict[str, float] | None) -> ArrowRows:
    return ArrowRows(pa.ipc.open_stream(stream).read_all(), pads)


def _is_list_of_numbers(kind: pa.DataType) -> bool:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    element = kind.value_type
    return bool(pa.types.is_integer(element) or pa.types.is_floating(element) or pa.types.is_boolean(element))
