"""Owns Scan, a lazy selection of rows at a pinned snapshot; must not write; decides from scalars only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
from numpy.typing import NDArray

from trajstore import layouts
from trajstore.batch import TrajectoryBatch, pad_values
from trajstore.chunks import take_rows
from trajstore.errors import QueryError
from trajstore.layouts import Ragged, Rows
from trajstore.selection import Fresh, Limit, Step, Where
from trajstore.selection.derived import PER_SNAPSHOT
from trajstore.selection.explain import Account, Explanation, Gate
from trajstore.selection.steps import evaluate, scalar, scalar_columns
from trajstore.store import files
from trajstore.store.cache import CacheUse, ColumnCache
from trajstore.store.datafile import DataFile, LogFile
from trajstore.store.place import Place
from trajstore.store.scalars import ARRIVED, Frame, ScalarCache
from trajstore.store.table import Table
from trajstore.trajectory import Trajectory

if TYPE_CHECKING:
    import polars as pl

Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class _Chosen:
    """Rows in order of arrival: the frame's rows at `rows`, all of them when it is None."""

    frame: Frame
    rows: Int64s | None
    gates: list[Gate]

    def __len__(self) -> int:
        return len(self.frame) if self.rows is None else len(self.rows)

    def of(self, column: Int64s) -> Int64s:
        """A column of the frame at the chosen rows."""
        return column if self.rows is None else column[self.rows]

    def part(self, start: int, stop: int) -> _Chosen:
        """Some of the rows."""
        rows = np.arange(len(self.frame)) if self.rows is None else self.rows
        return _Chosen(self.frame, rows[start:stop], [])


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
        scalars: ScalarCache | None = None,
    ) -> None:
        self._table = table
        self._scalars = ScalarCache() if scalars is None else scalars
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
    def place(self) -> Place:
        """Where the table is; its side tables are below it."""
        return self._table.place

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
        return Scan(self._table, (*self._steps, step), self._columns, only=self._only, scalars=self._scalars)

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
        scan = Scan(self._table, self._steps, names, only=self._only, scalars=self._scalars)
        scan._chosen = self._chosen  # the rows are the same ones
        return scan

    # Terminal verbs

    def count(self) -> int:
        """Number of rows; without steps it is read from the log alone."""
        if not self._steps:
            return sum(file.rows for file in self._files())
        return len(self._choose())

    def gates(self) -> list[Gate]:
        """How many rows every step let through, in order; files that a gate rules out are not opened."""
        return self._choose().gates

    def explain(self, by: Any = "source") -> Explanation:
        """How many rows every step dropped, by task and by length: what a gate starves, and how it biases.

        A gate `fresh(...)` says too how many rows it dropped because their version is not known. The scalars
        of all files are read, also of files that a gate could have ruled out.

        Args:
            by: what a task is: a scalar column, `metadata.key`, a polars expression, or None for no tasks.

        Raises:
            QueryError: it is no scalar.
        """
        task = None if by is None else scalar(by)
        names = set() if task is None else scalar_columns(task, self._scalar_types())
        frame = self._scalars.frame(self._table.place, self._files(), self._table.schema)
        seen = frame.columns(sorted(names | {"length"}))
        tasks = None if task is None else evaluate(task, seen, str(by))
        account = Account(tasks, seen["length"].to_numpy().astype(np.int64))
        rows = np.arange(len(frame))
        gates = []
        for step in self._steps:
            kept = self._step(step, frame, rows)
            unknown = frame.columns([step.version])[rows] if isinstance(step, Fresh) else None
            gates.append(account.gate(step.label, rows, kept, unknown))
            rows = kept
        return Explanation(tuple(gates), str(by))

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
        count = len(self._choose())
        yield from self.iter_parts([*range(0, count, batch_size), count])

    def iter_parts(self, edges: Sequence[int]) -> Iterator[TrajectoryBatch]:
        """The rows from each edge to the next, reading as it goes; equal edges give an empty batch."""
        chosen = self._choose()
        for start, stop in pairwise(edges):
            part = chosen.part(start, stop)
            yield TrajectoryBatch.from_arrow(self._gather(part, self.schema))

    def pieces(self, columns: Sequence[str]) -> Iterator[tuple[Int64s, pa.Table]]:
        """The rows as they lie in the files, for reductions that need no order and little memory.

        Each piece is the positions of up to a row group of rows in the scan's order, [K] int64, and these
        rows' columns. Every row group is decoded once, whatever the order of arrival.
        """
        chosen = self._choose()
        schema = pa.schema([self._table.schema.field(name) for name in columns])
        file_of, row_of = chosen.of(chosen.frame.file), chosen.of(chosen.frame.row)
        for number in np.unique(file_of):
            mine = np.nonzero(file_of == number)[0]
            mine = mine[np.argsort(row_of[mine], kind="stable")]
            found = files.read_row_groups(self._table.place, chosen.frame.files[number], schema, row_of[mine])
            for part, table in found:
                yield mine[part], table

    def rows(self, columns: Sequence[str] = ()) -> Rows:
        """The row source that loaders take: scalars of a batch and addresses of these list columns.

        They come from the column cache, decoded there first if they are new to it.
        """
        known = self._table.schema
        fields = [known.field(n) for n in dict.fromkeys((*layouts.SCALARS, *columns)) if n in known.names]
        scalars = pa.schema([f for f in fields if not pa.types.is_nested(f.type)])
        chosen = self._choose()
        file_of = chosen.of(chosen.frame.file)
        used = np.unique(file_of)
        kept = [chosen.frame.files[i] for i in used]
        lists = pa.schema([f for f in fields if pa.types.is_nested(f.type)])
        table, self.cache_use = ColumnCache().open(self._table.place, kept, lists)
        first = np.zeros(len(chosen.frame.files), np.int64)
        first[used] = np.cumsum([0, *(file.rows for file in kept)])[:-1]
        position = first[file_of] + chosen.of(chosen.frame.row)
        found = {f.name: Ragged.from_arrow(table.column(f.name), f.name).take(position) for f in lists}
        return Rows.from_arrow(self._scalar_table(chosen, scalars), pad_values(known), found)

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
        file, row = chosen.of(chosen.frame.file), chosen.of(chosen.frame.row)
        return [(chosen.frame.files[number], row[file == number]) for number in np.unique(file)]

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
        types = self._scalar_types()
        needed = set().union(*(step.columns(types) for step in self._steps))
        whole = not self._steps or bool(needed & PER_SNAPSHOT.keys())
        kept = all_files if whole else [file for file in all_files if _may_hold(file, self._steps[0])]
        frame = self._scalars.frame(self._table.place, kept, self._table.schema)
        frame.columns(sorted(needed))  # in one go: a file is opened once for all steps
        rows: Int64s | None = None
        count = sum(file.rows for file in all_files)
        gates = []
        for step in self._steps:
            rows = self._step(step, frame, rows)
            gates.append(Gate(step.label, count, len(rows)))
            count = len(rows)
        return _Chosen(frame, rows, gates)

    def _step(self, step: Step, frame: Frame, rows: Int64s | None) -> Int64s:
        """Positions that stay after one step more."""
        # A step that looks at nothing still has to see how many rows there are.
        names = sorted(step.columns(self._scalar_types())) or ["writer_seq"]
        seen = frame.columns(names)
        if "ingest_snapshot" in names:  # a fresh file does not say which snapshot brought it: the log does
            seen = seen.with_columns(frame.columns([ARRIVED])[ARRIVED].alias("ingest_snapshot"))
        if rows is None:
            return step.keep(seen)
        return rows[step.keep(seen[rows])]

    def _read(self, schema: pa.Schema) -> pa.Table:
        return self._gather(self._choose(), schema)

    def _gather(self, chosen: _Chosen, schema: pa.Schema) -> pa.Table:
        """The chosen rows in their order: each file is read once, then runs of rows are put in place."""
        if not any(pa.types.is_nested(f.type) for f in schema):
            return self._scalar_table(chosen, schema)
        tables: list[pa.Table] = []
        file_of, row_of = chosen.of(chosen.frame.file), chosen.of(chosen.frame.row)
        position = np.empty(len(chosen), np.int64)
        done = 0
        for number in np.unique(file_of):
            mine = np.nonzero(file_of == number)[0]
            rows, back = np.unique(row_of[mine], return_inverse=True)
            file = chosen.frame.files[number]
            whole = len(rows) == file.rows
            tables.append(files.read(self._table.place, file, schema, None if whole else rows))
            position[mine] = done + back
            done += len(rows)
        if not tables:
            return schema.empty_table()
        table = pa.concat_tables(tables)
        if (position == np.arange(len(position))).all():
            return table
        return take_rows(table, position)

    def _scalar_table(self, chosen: _Chosen, schema: pa.Schema) -> pa.Table:
        """Scalar columns of the chosen rows, from what the handle has decoded already."""
        frame = chosen.frame.columns(schema.names)
        if chosen.rows is not None:
            frame = frame[chosen.rows]
        table = frame.to_arrow()
        return pa.Table.from_arrays([table.column(f.name).cast(f.type) for f in schema], schema=schema)


def _reopened(
    place: Place,
    snapshot: int,
    steps: Sequence[Step],
    columns: Sequence[str] | None,
    only: Sequence[LogFile] | None,
) -> Scan:
    return Scan(Table.open(place, snapshot), steps, columns, only=only)


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
