"""Owns Scan, a lazy selection of rows at a pinned snapshot; must not write; decides from scalars only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
from numpy.typing import NDArray

from trajstore import layouts
from trajstore.batch import TrajectoryBatch, pad_values
from trajstore.errors import QueryError
from trajstore.layouts import Ragged, Rows
from trajstore.selection import Limit, Step, Where
from trajstore.store import files
from trajstore.store.cache import CacheUse, ColumnCache
from trajstore.store.datafile import DataFile, LogFile
from trajstore.store.place import Place
from trajstore.store.table import Table
from trajstore.trajectory import Trajectory

if TYPE_CHECKING:
    import polars as pl

Int64s = NDArray[np.int64]

_ORDER = ("ingest_snapshot", "writer_id", "writer_seq")
_FILE, _ROW = "__file", "__row"


@dataclass(frozen=True)
class Gate:
    """What one step of a scan did.

    Attributes:
        label: the step.
        rows_in, rows_out: rows before and after it.
    """

    label: str
    rows_in: int
    rows_out: int

    @property
    def dropped(self) -> int:
        """Rows the step left out."""
        return self.rows_in - self.rows_out


@dataclass(frozen=True)
class _Chosen:
    """Rows in order of arrival: `row[i]` of `files[file[i]]`."""

    files: list[LogFile]
    file: Int64s
    row: Int64s
    gates: list[Gate]


class Scan:
    """Rows of one snapshot, narrowed step by step; nothing is read before a terminal verb asks.

    Rows come in order of arrival: by snapshot, then by writer, then by the writer's own order.
    """

    def __init__(
        self,
        table: Table,
        steps: Sequence[Step] = (),
        columns: Sequence[str] | None = None,
        *,
        only: Sequence[LogFile] | None = None,
    ) -> None:
        self._table = table
        self._only = None if only is None else tuple(only)
        self._steps = tuple(steps)
        self._columns = None if columns is None else tuple(columns)
        self._chosen: _Chosen | None = None
        self.cache_use = CacheUse(0, 0)
        if self._columns is not None and (not self._columns or len(set(self._columns)) < len(self._columns)):
            raise QueryError(
                f"columns is {list(self._columns)}, expected one name or more, each once",
                hint="leave columns out to get all of them",
            )
        for name in self._columns or ():
            if name not in table.schema.names:
                known = ", ".join(table.schema.names)
                raise QueryError(f"there is no column {name!r}", hint=f"columns: {known}")

    @property
    def snapshot(self) -> int:
        """The snapshot this scan is pinned to."""
        return self._table.snapshot

    @property
    def schema(self) -> pa.Schema:
        """Columns that the terminal verbs give."""
        names = self._columns or self._table.schema.names
        return pa.schema([self._table.schema.field(name) for name in names])

    def __reduce__(self) -> tuple[object, ...]:
        # A recipe: another process opens the same snapshot and chooses the same rows. On an object store it
        # holds the credentials that the store was opened with.
        opened = (self._table.place, self._table.snapshot, self._steps, self._columns, self._only)
        return _reopened, opened

    def __repr__(self) -> str:
        steps = "".join(f", {step.label}" for step in self._steps)
        return f"Scan({str(self._table.place)!r}, snapshot={self.snapshot}{steps})"

    # Chaining

    def then(self, step: Step) -> Scan:
        """The scan narrowed by one more step."""
        return Scan(self._table, (*self._steps, step), self._columns, only=self._only)

    def filter(self, where: Any) -> Scan:
        """Keeps rows for which `where` is true.

        Args:
            where: a polars expression, an SQL predicate as text, or a gate such as `fresh(...)`.
                NaN is above every number, as in polars and DuckDB.

        Raises:
            QueryError: the predicate cannot be read, or looks at a list column.
        """
        step = as_step(where)
        step.columns(self._scalar_types())
        return self.then(step)

    def limit(self, n: int) -> Scan:
        """Keeps the first n rows."""
        if n < 0:
            raise QueryError(f"limit is {n}, expected 0 or more")
        return self.then(Limit(n))

    def columns(self, names: Sequence[str]) -> Scan:
        """Reads only these columns."""
        scan = Scan(self._table, self._steps, names, only=self._only)
        scan._chosen = self._chosen  # the rows are the same ones
        return scan

    # Terminal verbs

    def count(self) -> int:
        """Number of rows; without steps it is read from the log alone."""
        if not self._steps:
            return sum(file.rows for file in self._files())
        return len(self._choose().row)

    def explain(self) -> list[Gate]:
        """What every step did, in order."""
        return self._choose().gates

    def to_arrow(self) -> pa.Table:
        """The rows as an Arrow table."""
        return self._read(self.schema)

    def to_polars(self) -> pl.DataFrame:
        """The rows as a polars frame."""
        import polars as pl

        frame = pl.from_arrow(self.to_arrow())
        assert isinstance(frame, pl.DataFrame)
        return frame

    def to_batch(self) -> TrajectoryBatch:
        """The rows as one TrajectoryBatch."""
        return TrajectoryBatch.from_arrow(self.to_arrow())

    def to_trajectories(self) -> list[Trajectory]:
        """The rows as objects."""
        return list(self.to_batch())

    def iter_batches(self, batch_size: int = 1024) -> Iterator[TrajectoryBatch]:
        """The rows in batches, reading as it goes."""
        if batch_size < 1:
            raise QueryError(f"batch_size is {batch_size}, expected at least 1")
        chosen = self._choose()
        for start in range(0, len(chosen.row), batch_size):
            part = slice(start, start + batch_size)
            rows = _Chosen(chosen.files, chosen.file[part], chosen.row[part], [])
            yield TrajectoryBatch.from_arrow(self._gather(rows, self.schema))

    def rows(self, columns: Sequence[str] = ()) -> Rows:
        """The row source that loaders take: scalars of a batch and addresses of these list columns.

        They come from the column cache, decoded there first if they are new to it.
        """
        known = self._table.schema
        names = [n for n in dict.fromkeys((*layouts.SCALARS, *columns)) if n in known.names]
        chosen = self._choose()
        used = np.unique(chosen.file)
        table, self.cache_use = ColumnCache().open(
            self._table.place, [chosen.files[i] for i in used], pa.schema([known.field(n) for n in names])
        )
        first = np.zeros(len(chosen.files), np.int64)
        first[used] = np.cumsum([0, *(chosen.files[i].rows for i in used)])[:-1]
        position = first[chosen.file] + chosen.row
        flat = [n for n in names if not pa.types.is_large_list(table.schema.field(n).type)]
        scalars = _take(table.select(flat), position)
        lists = {n: Ragged.from_arrow(table.column(n), n).take(position) for n in names if n not in flat}
        return replace(Rows.from_arrow(scalars, pad_values(known)), columns=lists)

    def data_files(self) -> list[str]:
        """Paths of the files the snapshot is made of, for readers of one's own."""
        return [self._table.place.url(file.name) for file in self._files()]

    def to_dataset(self) -> pads.Dataset:
        """The snapshot's files as an Arrow dataset, for engines that push down filters and columns.

        Raises:
            QueryError: the scan is narrowed, which a list of files cannot say.
        """
        if self._steps:
            raise QueryError("a narrowed scan is not a set of files", hint="use to_arrow()")
        place = self._table.place
        paths = [place.path(file.name) for file in self._files()]
        return pads.dataset(paths, self.schema, format="parquet", filesystem=place.filesystem)

    def places(self) -> list[tuple[LogFile, Int64s]]:
        """Where the rows are: each data file that holds any, and their positions in it."""
        chosen = self._choose()
        return [
            (chosen.files[number], chosen.row[chosen.file == number]) for number in np.unique(chosen.file)
        ]

    @property
    def is_whole(self) -> bool:
        """Whether no step narrows the snapshot."""
        return not self._steps

    # Choosing and reading

    def _files(self) -> Sequence[LogFile]:
        """The snapshot's files, or those of them that the scan was narrowed to."""
        return self._table.files() if self._only is None else self._only

    def _scalar_types(self) -> dict[str, bool]:
        return {f.name: not pa.types.is_nested(f.type) for f in self._table.schema}

    def _choose(self) -> _Chosen:
        if self._chosen is None:
            self._chosen = self._narrow()
        return self._chosen

    def _narrow(self) -> _Chosen:
        all_files = self._files()
        total = sum(file.rows for file in all_files)
        types = self._scalar_types()
        needed = {*_ORDER}.union(*(step.columns(types) for step in self._steps))
        kept_files = [file for file in all_files if self._steps == () or _may_hold(file, self._steps[0])]
        frame = self._frame(kept_files, needed)
        gates = []
        for i, step in enumerate(self._steps):
            rows_in = total if i == 0 else len(frame)
            frame = frame[step.keep(frame)]
            gates.append(Gate(step.label, rows_in, len(frame)))
        return _Chosen(kept_files, frame[_FILE].to_numpy(), frame[_ROW].to_numpy(), gates)

    def _frame(self, kept: Sequence[LogFile], names: set[str]) -> pl.DataFrame:
        """Scalars of every row of these files, in order of arrival, with the row's place."""
        import polars as pl

        schema = pa.schema([f for f in self._table.schema if f.name in names])
        parts = []
        for number, file in enumerate(kept):
            part = pl.from_arrow(files.read(self._table.place, file, schema))
            assert isinstance(part, pl.DataFrame)
            parts.append(
                part.with_columns(
                    pl.lit(number, pl.Int64).alias(_FILE),
                    pl.int_range(len(part), dtype=pl.Int64).alias(_ROW),
                    pl.col("ingest_snapshot").fill_null(file.snapshot),
                )
            )
        empty = pl.from_arrow(schema.empty_table())
        assert isinstance(empty, pl.DataFrame)
        empty = empty.with_columns(pl.lit(0, pl.Int64).alias(_FILE), pl.lit(0, pl.Int64).alias(_ROW))
        return pl.concat([empty, *parts]).sort(_ORDER, maintain_order=True)

    def _read(self, schema: pa.Schema) -> pa.Table:
        return self._gather(self._choose(), schema)

    def _gather(self, chosen: _Chosen, schema: pa.Schema) -> pa.Table:
        """The chosen rows in their order: each file is read once, then runs of rows are put in place."""
        tables: list[pa.Table] = []
        position = np.empty(len(chosen.row), np.int64)
        done = 0
        for number in np.unique(chosen.file):
            mine = np.nonzero(chosen.file == number)[0]
            rows, back = np.unique(chosen.row[mine], return_inverse=True)
            file = chosen.files[number]
            whole = len(rows) == file.rows
            tables.append(files.read(self._table.place, file, schema, None if whole else rows))
            position[mine] = done + back
            done += len(rows)
        if not tables:
            return schema.empty_table()
        table = pa.concat_tables(tables)
        if (position == np.arange(len(position))).all():
            return table
        return _take(table, position)


def _reopened(
    place: Place,
    snapshot: int,
    steps: Sequence[Step],
    columns: Sequence[str] | None,
    only: Sequence[LogFile] | None,
) -> Scan:
    return Scan(Table.open(place, snapshot), steps, columns, only=only)


def _take(table: pa.Table, position: Int64s) -> pa.Table:
    # A chunked take joins the chunks, whose int32 list offsets overflow past 2^31 values: runs do not.
    if not len(position):
        return table.slice(0, 0)
    breaks = np.nonzero(np.diff(position) != 1)[0] + 1
    if len(breaks) > len(position) // 4:
        chunks = np.array_split(position, max(1, len(position) // 4096))
        return pa.concat_tables([table.take(chunk) for chunk in chunks])
    starts = np.concatenate([[0], breaks, [len(position)]])
    return pa.concat_tables([table.slice(position[a], b - a) for a, b in pairwise(starts)])


def as_step(where: Any) -> Step:
    """A predicate as a step of a scan."""
    if hasattr(where, "keep") and hasattr(where, "columns"):
        return where  # type: ignore[no-any-return]  # a gate or a sampler's draw
    if isinstance(where, str):
        return Where(where, where)
    if type(where).__module__.partition(".")[0] == "polars":
        return Where(where, str(where))
    raise QueryError(
        f"where is {where!r}, expected a polars expression, an SQL predicate or a gate",
        hint='for example where="reward > 0.5" or where=fresh(at=10, max_staleness=4)',
    )


def _may_hold(file: DataFile, step: Step) -> bool:
    """Whether a file can hold a row that the step keeps, by the statistics in the log."""
    for name, (low, high) in step.bounds.items():
        if file.nulls.get(name) == file.rows:
            return False
        if low is not None and file.high.get(name, low) < low:
            return False
        if high is not None and file.low.get(name, high) > high:
            return False
    return True
